"""`fed-dpsd rehearse`, with stubs for hosts and processes: what it shows and prints."""

import shutil
import socket
from types import SimpleNamespace

import pytest

from fed_dpsd.config.compose import compose
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import set_up
from fed_dpsd.rehearsal import rehearsal
from tests.conftest import SMALL


@pytest.fixture
def rehearse(fed_dpsd, run_of, monkeypatch, tmp_path):
    """Calls the command; its coordinator "runs" by copying a finished run's folder in two parts."""
    finished = run_of(out="elsewhere")

    class Stub:
        status = rehearsal.COMPLETED

        def __init__(self, folder, overrides):
            self.folder, self.hospitals = folder, range(2)
            self.experiment = set_up(compose(SMALL), tmp_path)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, run_folder):
            assert run_folder == f'run_folder="{self.folder}/run"'
            return "1"

        def wait(self, run_id, timeout, look):
            look()
            folder = self.folder / "run"
            shutil.copytree(finished, folder)
            log = folder / "rounds.jsonl"
            whole = log.read_text()
            log.write_text(whole[: whole.index("\n") + 9])  # the second line is being written
            look()
            log.write_text(whole)
            look()
            look()
            return self.status

    monkeypatch.setattr(rehearsal, "Rehearsal", Stub)

    def call():
        return Stub, fed_dpsd("rehearse", "--out", "mine")

    return call


def test_rounds_are_shown_as_they_end_and_the_result_last(rehearse, tmp_path):
    _, (code, out, err) = rehearse()
    assert (code, out) == (0, [f"{tmp_path}/mine/run"])
    lines = err.splitlines()
    assert lines[:2] == [
        f"started: 2 hospitals; all files are in {tmp_path}/mine",
        f"run folder: {tmp_path}/mine/run",
    ]
    assert lines[4].startswith("privacy: ")
    assert [line.split(" · ")[0] for line in lines[5:8]] == [f"round {n}/3" for n in (1, 2, 3)]
    assert lines[8].startswith("student ")
    assert "proven 1,921 (record, add_remove)" in lines[8]
    assert "fed-dpsd export mine/run" in err
    assert lines[-1].endswith("fed-dpsd privacy ledger mine/hospital0/state/ledger")


def test_a_run_that_failed_is_an_error_and_no_result(rehearse, monkeypatch, tmp_path):
    monkeypatch.setattr(rehearsal.Rehearsal, "status", "finished:failed")
    _, (code, out, err) = rehearse()
    assert (code, out) == (1, [])
    assert "error: the run failed: Flower reports finished:failed; see" in err.splitlines()[-1]
    assert "student " not in err.splitlines()[-1]


def test_a_hospital_that_is_not_registered_ends_the_rehearsal(tmp_path):
    answer = {"success": False, "error-message": "Connection to the\n SuperLink is unavailable."}
    stub = SimpleNamespace(
        folder=tmp_path, node_key=lambda number: tmp_path / "key", flwr=lambda *_: answer
    )
    with pytest.raises(UserError, match="^hospital 1 was not registered: Connection to the Super"):
        rehearsal.Rehearsal._register(stub, 1)
    answer["success"] = True
    rehearsal.Rehearsal._register(stub, 1)


def test_a_port_that_another_process_has_is_refused_before_anything_starts(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(rehearsal, "PORT", other.getsockname()[1])
        stub = SimpleNamespace(folder=tmp_path, command_on=lambda host, *command: [*command])
        stub._listening = lambda: rehearsal.Rehearsal._listening(stub)
        with pytest.raises(UserError, match=f"listens at port {rehearsal.PORT}, .*; stop it"):
            rehearsal.Rehearsal.start_superlink(stub)
    assert not stub._listening()
