"""A disk that fills up at any file of any command: one error line, and nothing is left behind."""

import errno
import json
import os
import re
import shlex

import numpy as np
import pytest
from PIL import Image

from fed_dpsd import needs, storage
from fed_dpsd.accounts.simulated import entries_in
from tests.conftest import SMALL

TINY = " ".join([*SMALL, "rounds=1"])
PICTURES = "data=imagefolder data.path=pictures data.shape=[1,8,8]"
COMMANDS = {  # each with the number of files that it writes, at least
    "data num_clients=3 cache={new}": 1,
    f"data {PICTURES} partition=iid num_clients=2 cache={{new}}": 4,
    "data num_clients=3 --out {new}/parts.png": 1,
    "export {run} --out {new}": 5,
    "synthesize {run} --num 8 --out {new}/train.parquet": 4,
    "predict {model} picture.png --out {new}/all.csv": 1,
    "site init {here}/site.yaml": 1,
    "report {run} --out {new}": 5,
}


@pytest.fixture
def given(run_of, model_of, tmp_path):
    """The paths that stand in commands; they start from a folder with pictures."""
    for number in range(12):
        path = tmp_path / "pictures" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(path)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "picture.png")
    return {"run": run_of("rounds=1", out="elsewhere"), "model": model_of(), "here": tmp_path}


def _fill(monkeypatch, number):
    """Simulate a full disk from one file on: the file is written but cannot be kept."""
    written, sync = [], storage.sync

    def full(path):
        if not path.is_dir():
            written.append(path)
            if len(written) > number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    monkeypatch.setattr(storage, "sync", full)


def _files(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def _each_time(fed_dpsd, given, monkeypatch, caplog, command):
    """Yield a command's messages and files while the disk fills up later and later."""
    for number in range(100):
        new = given["here"] / f"new{number}"
        before = _files(given["here"])
        caplog.clear()
        with monkeypatch.context() as patch:
            _fill(patch, number)
            code, _, err = fed_dpsd(*shlex.split(command.format(**given, new=new)))
        if code == 0:
            return
        assert code == 1
        said = "\n".join([err, *caplog.messages])
        assert not re.search(r"Traceback|[Ee]rrno|\w+Error: ", said), said
        yield err, _files(given["here"]) - before
    raise AssertionError("it does not end")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] * command.startswith("report"))
        for command in COMMANDS  # a report draws its figures again for each of its files
    ],
)
def test_a_command_on_a_full_disk_leaves_nothing(fed_dpsd, given, monkeypatch, caplog, command):
    times = 0
    for err, left in _each_time(fed_dpsd, given, monkeypatch, caplog, command):
        (line,) = (line for line in err.splitlines() if line.startswith("error: "))
        assert re.fullmatch(
            "error: no space left in /.*; free 1 MB or more, or (choose|set FED_DPSD_HOME to) a "
            "folder on another disk",
            line,
        )
        # A cache and a report keep complete files that are useful alone.
        assert not left or command.startswith(("data", "report"))
        assert not [path for path in left if path.suffix == ".tmp"]
        times += 1
    assert times >= COMMANDS[command]


@pytest.mark.slow  # a run for each of its files
def test_a_run_on_a_full_disk_says_so_once(fed_dpsd, given, monkeypatch, caplog):
    times = 0
    typed = f"run run_folder={{new}}/run cache={{new}}/cache {TINY}"
    for err, left in _each_time(fed_dpsd, given, monkeypatch, caplog, typed):
        said = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(said) == 1, err
        assert "no space left in /" in err + caplog.text
        assert not [path for path in left if path.suffix == ".tmp"]
        times += 1
    assert times >= 10


@pytest.mark.parametrize(
    "size", [24_000, *(pytest.param(size, marks=pytest.mark.slow) for size in (100_000, 140_000))]
)
def test_a_run_that_a_full_disk_stopped_resumes_to_the_same_bits(
    fed_dpsd, tmp_path, caplog, small_disk, size, monkeypatch
):
    """Its ledgers, on the same disk, equal the ledgers of an uninterrupted run.

    Another program fills the disk once the run has found enough room on it.
    """
    monkeypatch.setattr(needs, "_require_disk", lambda *_: None)
    folder, resize = small_disk
    resize(size)

    def result(run):
        ledgers = [
            [(each.digest, each.releases) for each in entries]
            for entries in entries_in(run / "ledger").values()
        ]
        return json.loads((run / "summary.json").read_text())["student_sha256"], ledgers

    code, _, err = fed_dpsd("run", *SMALL, f"run_folder={folder}/run")
    assert code == 1
    assert "no space left" in err + caplog.text
    assert err.splitlines()[-1].startswith("error: ")
    assert resize(10_000_000)
    assert fed_dpsd("resume", str(folder / "run"))[0] == 0
    assert fed_dpsd("run", *SMALL, f"run_folder={tmp_path}/run")[0] == 0
    assert result(folder / "run") == result(tmp_path / "run")
