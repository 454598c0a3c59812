"""What users type: exit codes, required and forbidden output.

A row of typed/*.yaml has `command`, `code`, `says` (regular expressions, each found in what is
printed on both streams), and, where needed: `never` (more of them, found nowhere), `given` (the
fixture functions below, whose paths stand for {NAME} in the command) and `leaves` (true where the
command may leave a run folder in runs/).
"""

import io
import re
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from PIL import Image

from fed_dpsd.errors import UserError
from fed_dpsd.experiment import from_overrides
from fed_dpsd.server.run_folder import new_run_folder
from fed_dpsd.server.summary import write_failure
from tests.conftest import SMALL
from tests.shapes import write_shapes

TABLES = sorted((Path(__file__).parent / "typed").glob("*.yaml"))
NEVER = (
    "Traceback",
    r"\[?[Ee]rrno",
    r"os error \d",
    r"[Hh]ydra",
    "OmegaConf",
    "NoneType",
    r"\bNone\b",
    r"<class '",
    r"\w+Error: ",
)


def _failed(tmp_path):
    experiment = from_overrides([*SMALL, "out=elsewhere"], tmp_path)
    folder = new_run_folder(experiment)
    write_failure(experiment, folder, "local", UserError("the disk is full"))
    return str(folder)


def _onnx(tmp_path):
    path = tmp_path / "student.onnx"
    path.write_bytes(b"for other tools")
    return path


def _pictures(tmp_path):
    return write_shapes(tmp_path / "pictures", 40, broken=2)


def _tables(tmp_path):
    folder = write_shapes(tmp_path / "pictures", 40)
    paths = (path.relative_to(folder) for path in sorted(folder.glob("*/*.*")))
    rows = [f"{path},{path.parent}" for path in paths]
    for name, header, lines in (
        ("semicolons", "image;label", [row.replace(",", ";") for row in rows]),
        ("blanks", "image, label", [row.replace(",", ", ") for row in rows]),
        ("twice", "image,label", [*rows, rows[0]]),
        ("headless", rows[0], rows[1:]),
        ("other", "filename,diagnosis,site", [f"{row},north" for row in rows]),
    ):
        (folder / f"{name}.csv").write_text("\n".join([header, *lines]) + "\n")
    (folder / "empty.csv").touch()
    return folder


def _damaged(tmp_path):
    folder = _failed(tmp_path)
    (Path(folder) / "summary.json").write_text('{"status": ')
    return folder


def _parquet(tmp_path):
    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "PNG")
    rows = {"image": [{"bytes": buffer.getvalue(), "path": None}] * 20, "label": [*range(10)] * 2}
    for split in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / f"{split}.parquet")
    return tmp_path


GIVEN = {
    "failed": _failed,
    "onnx": _onnx,
    "pictures": _pictures,
    "parquet": _parquet,
    "tables": _tables,
    "damaged": _damaged,
}


@pytest.fixture
def given(run_of, model_of, tmp_path):
    """A function that makes a row's fixture in a folder and returns its path."""

    def lines():
        folder = run_of(out="elsewhere")
        with (Path(folder) / "rounds.jsonl").open("a") as file:
            file.write('{"round": \n')
        return folder

    runs = {"run": lambda: run_of(out="elsewhere"), "model": model_of, "lines": lines}
    return lambda name, folder: runs[name]() if name in runs else GIVEN[name](folder)


LONG = ("artefacts", "messages", "trades")  # which take seconds each
WALKS = [
    pytest.param(table, id=table.stem, marks=[pytest.mark.slow] * (table.stem in LONG))
    for table in TABLES
]


@pytest.mark.parametrize("table", WALKS)
def test_what_a_newcomer_reads(fed_dpsd, given, tmp_path, monkeypatch, caplog, table, subtests):
    for number, row in enumerate(yaml.safe_load(table.read_text())):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        caplog.clear()
        with subtests.test(row["command"]):
            assert set(row) <= {"command", "code", "says", "never", "given", "leaves"}
            paths = {name: given(name, folder) for name in row.get("given", ())}
            code, out, err = fed_dpsd(*shlex.split(row["command"].format(**paths)))
            said = "\n".join([*out, err, *caplog.messages])  # Python prints warnings on stderr
            assert code == row["code"], said
            for pattern in row["says"]:
                assert re.search(pattern, said), f"{pattern!r} is not in: {said}"
            for pattern in (*NEVER, *row.get("never", ())):
                assert not re.search(pattern, said), f"{pattern!r} is in: {said}"
            if not row.get("leaves"):
                assert not list(folder.glob("runs/*"))
