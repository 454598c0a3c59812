"""Hospitals that join late, leave and return, over real SuperNodes with TLS on one machine.

All of them share one network, with default settings: no port or folder is given.
"""

import contextlib
import json
import subprocess
import time

import psutil
import pytest

from fed_dpsd.rehearsal.rehearsal import COMPLETED, COORDINATOR, Rehearsal
from fed_dpsd.report.pages import run_page
from fed_dpsd.sweep.reported import facts_of
from tests.hospitals import charges
from tests.rehearsal.faults import reconcile
from tests.report.runs import check_structure

pytestmark = pytest.mark.slow(seconds=60)  # every round starts processes at every hospital

SMALL = (
    *("data=digits", "num_clients=2", "queries_per_round=64", "training.steps=5"),
    *("method.student_steps=5", "method.final_student_steps=5", "federation.retry_seconds=20"),
)
PATIENCE = 900


class Late(Rehearsal):
    """A rehearsal whose hospital 1 joins when the test says so."""

    late = True

    def start_hospital(self, number):
        if not (self.late and number == 1):
            super().start_hospital(number)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A coordinator and hospital 0; hospital 1 is not there yet."""
    folder = tmp_path_factory.mktemp("rehearsal")
    with Late(folder, SMALL) as found:
        yield found


def stop(rehearsal, host):
    """Stop a hospital's service as its owner would, so that its node leaves the federation."""
    service = rehearsal._processes[host]
    service.terminate()
    with contextlib.suppress(psutil.TimeoutExpired):
        service.wait(20)
    rehearsal.kill(host)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(rehearsal, name, *overrides, look=lambda rounds: None):
    """The folder and status of a run; `look` is called with the number of finished rounds."""
    folder = rehearsal.folder / name
    number = rehearsal.submit(f"run_folder={folder}", *overrides)
    watch = lambda: look(len(lines(folder / "rounds.jsonl")))  # noqa: E731
    return folder, rehearsal.wait(number, PATIENCE, watch)


def log_of(rehearsal, number):
    return (rehearsal.folder / f"hospital{number}" / "log").read_text()


def title(folder):
    return check_structure(run_page(facts_of([folder]))).text_of("h1")


def test_a_run_waits_for_a_late_hospital_and_fails_with_its_number_if_it_never_joins(rehearsal):
    folder, status = run(rehearsal, "never", "rounds=1", "federation.node_timeout_seconds=60")
    assert status == "finished:failed"
    error = json.loads((folder / "summary.json").read_text())["error"]
    assert error.startswith("1 of 2 hospitals connected; waiting for hospital 1 within")
    assert not charges(rehearsal.hospital(0))

    began, started = time.monotonic(), []

    def start_late(rounds):
        if not started and time.monotonic() > began + 20:
            assert rounds == 0
            rehearsal.late = False
            rehearsal.start_hospital(1)
            started.append(True)

    folder, status = run(rehearsal, "late", "rounds=1", look=start_late)
    assert (status, started) == (COMPLETED, [True])
    assert [line["answered"] for line in lines(folder / "asks.jsonl")] == [[0, 1]] * 2
    assert not reconcile(rehearsal, folder)
    assert title(folder).endswith("a rehearsal on one machine with 2 hospitals")
    for number in (0, 1):
        assert "run late: round 1, answers to 64 images: answered; charged" in log_of(
            rehearsal, number
        )


def test_two_hospitals_on_one_machine_share_no_port_and_no_folder(rehearsal):
    """Both are connected at once, and neither node was ever started again."""
    ports = []
    for number in (0, 1):
        assert "it starts again in" not in log_of(rehearsal, number)
        listening = set()
        for process in rehearsal._processes[f"hospital{number}"].children():  # one is the node
            with contextlib.suppress(psutil.Error):
                found = process.net_connections("inet")
                listening |= {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}
        assert len(listening) == 1
        ports += listening
    assert len(set(ports)) == 2
    assert len({rehearsal.hospital(number).folder for number in (0, 1)}) == 2


def site(rehearsal, *arguments):
    """What the coordinator's command prints, in lines."""
    done = subprocess.run(
        ["fed-dpsd", "site", *arguments, "--connection", "here"],
        env={**rehearsal._environment(COORDINATOR), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_hospital_is_listed_and_revoked_by_its_name(rehearsal):
    """Its node learns of it at once; the next run has only the other. No log is long."""
    path = rehearsal.site(1)
    path.write_text(f"{path.read_text()}hospital: St Mary's\n")
    folder, status = run(rehearsal, "named", "rounds=2")
    assert status == COMPLETED
    named = "│ 1      │ St Mary's │"
    (listed,) = (line for line in site(rehearsal, "list", str(folder)) if named in line)
    assert "│ online │ 20" in listed
    (said,) = site(rehearsal, "revoke", str(folder), "St Mary's")
    assert said.startswith("hospital 1 (St Mary's): node ")
    (listed,) = (line for line in site(rehearsal, "list", str(folder)) if named in line)
    assert "│ unregistered │ 20" in listed
    settings = "rounds=1", "federation.min_clients=1", "federation.node_timeout_seconds=20"
    folder, status = run(rehearsal, "alone", *settings)
    assert status == COMPLETED
    assert all(line["answered"] == [0] for line in lines(folder / "asks.jsonl"))
    for number in (0, 1):
        log = log_of(rehearsal, number)
        assert len(log.splitlines()) <= 30
        assert "Traceback" not in log
    assert "does not admit the key" in log_of(rehearsal, 1)
