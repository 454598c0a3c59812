"""What `fed-dpsd report` is given: tables, folders of sweeps, and runs, completed or not."""

import csv
import json

import pytest

from fed_dpsd import api
from fed_dpsd.errors import UserError
from fed_dpsd.simulation.reported import table_of
from tests.conftest import SMALL


@pytest.fixture
def run(tmp_path):
    """A completed run's folder."""
    return api.run(*SMALL, "rounds=1", f"out={tmp_path}/runs", progress=False).folder


def test_a_run_is_a_table_of_one_row(run, tmp_path):
    path = table_of(run, tmp_path / "report")
    assert path == tmp_path / "report" / "results.csv"
    (row,) = csv.DictReader(path.open(newline=""))
    summary = json.loads((run / "summary.json").read_text())
    assert float(row["student"]) == summary["accuracy"]["student"]
    assert (row["key"], row["seed"], row["data"]) == (run.name, "0", "digits")
    assert table_of(run) == run / "results.csv"
    assert table_of(run) == run / "results.csv"  # again, over its own
    assert table_of(tmp_path / "report") == path  # as the folder of a sweep
    assert table_of(path) == path


def test_a_run_that_stopped_and_a_place_that_is_none_are_told(run, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="cannot be written .*; choose --out"):
        table_of(run, tmp_path / "file")
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match="has not completed: it was stopped, or is still under way"):
        table_of(run)
