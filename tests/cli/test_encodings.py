"""Terminals that lack letters, and undecodable file names: every command keeps printing."""

import io
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fed_dpsd import cli
from fed_dpsd.engines.flower import server as flower
from tests.conftest import SMALL

LATIN = os.fsdecode(b"r\xe9s.png")
DATA = ("data=imagefolder", "data.path=pictures", "data.shape=[1,8,8]", "partition=iid")


@pytest.fixture
def said(tmp_path, monkeypatch):
    """Run a command whose streams have an encoding; returns its exit code and both as bytes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(encoding, *arguments):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2)]
        code = 0
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["fed-dpsd", *arguments])
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            try:
                cli.main()
            except SystemExit as stop:
                code = stop.code or 0
        for stream in streams:
            stream.flush()
        return code, *(stream.buffer.getvalue() for stream in streams)

    return call


@pytest.fixture
def model(said, tmp_path):
    """A student with Greek and Polish classes, in a run folder with a Latin-1 name."""
    for number in range(40):
        path = tmp_path / "pictures" / ("αβ", "≥5 żółw")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 6 * number, np.uint8)).save(path)
    os.link(tmp_path / "pictures" / "αβ" / "0.png", tmp_path / LATIN)
    run = os.fsdecode(b"runs/r\xe9")
    folder = f'run_folder="{run}"'
    code, out, err = said("ascii", "run", *SMALL, *DATA, "rounds=1", folder)
    assert code == 0, err
    assert out == rb"%s/runs/r\udce9" % os.fsencode(tmp_path) + b"\n"
    assert b"result" in err or b"student" in err
    assert said("ascii", "export", run, "--out", "model")[0] == 0
    return run


@pytest.mark.parametrize(
    ("encoding", "greek", "latin"),
    [
        ("utf-8", "αβ".encode(), b"r\xe9s.png"),
        pytest.param("cp1252", rb"\u03b1\u03b2", rb"r\udce9s.png", marks=pytest.mark.slow),
        pytest.param(
            *("ascii", rb"\u03b1\u03b2", rb"r\udce9s.png"),
            marks=(pytest.mark.ci, pytest.mark.slow),
        ),
    ],
)
def test_every_command_prints_what_an_encoding_lacks(said, model, encoding, greek, latin):
    pictures = (LATIN, f"no{LATIN}")
    code, out, err = said(encoding, "predict", "model/student.safetensors", *pictures, "--all")
    assert code == 1
    assert greek in out.splitlines()[0].split(b",")
    assert out.splitlines()[1].startswith(latin + b",")
    assert b"no" + latin + b" is skipped: No such file" in err
    code, out, _ = said(encoding, "data", *DATA, "num_clients=2")
    assert code == 0
    assert greek in out
    for command in (
        ("resume", model),
        ("report", model),
        ("privacy", "ledger", model),
        ("synthesize", model, "--num", "8", "--out", f"new/{LATIN}/train.parquet"),
        ("list", "methods"),
        ("doctor",),
    ):
        code, out, err = said(encoding, *command)
        assert code == 0, err
        assert out
        assert b"Error" not in err


def test_a_file_of_predictions_has_the_names_of_files_as_they_are(said, model, tmp_path):
    assert said("ascii", "predict", "model/student.onnx", LATIN)[0] == 1  # there is no such model
    code, *_ = said("ascii", "predict", "model/student.safetensors", LATIN, "--out", "all.csv")
    assert code == 0
    assert (tmp_path / "all.csv").read_bytes().splitlines()[1].startswith(b"r\xe9s.png,")


def test_what_flowers_server_prints_can_be_sent(monkeypatch, capsys):
    """Flower's log upload rejects raw bytes of names; the same print outside keeps them."""
    sent = []
    monkeypatch.setattr(sys.stdout, "write", sent.append, raising=False)
    print(LATIN)
    serve = SimpleNamespace(print=lambda: print(LATIN))
    flower._printing_utf8()(serve.print)()
    assert "".join(sent) == f"{LATIN}\nr\\udce9s.png\n"
    with pytest.raises(UnicodeEncodeError):
        sent[0].encode()
