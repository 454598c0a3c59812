"""Hosts on this machine, with TLS, node keys and processes, and their faults."""

import contextlib
import ipaddress
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from fed_dpsd.privacy.accounting import best_bound
from fed_dpsd.rehearsal.rehearsal import COMPLETED, PORT
from fed_dpsd.storage import app_folder
from tests import pages
from tests.processes import wait_until
from tests.proofs import spent
from tests.rehearsal.faults import Hosts, reconcile, run_with_faults

pytestmark = pytest.mark.slow(seconds=60)

SMALL = (
    *("data=digits", "num_clients=3", "rounds=2", "queries_per_round=128"),
    *("method.final_student_steps=50", "federation.min_clients=3", "federation.retry_seconds=20"),
    "data.records_per_patient=2",  # simulated patients, whom the hospitals' files name
)
SUMS = (
    *("training=plain", "answers=gradient", "answers.noise_at=distributed"),
    "answers.quorum={threshold:2,colluding:0}",
)
CONNECTED = "connected to"  # what an admitted node logs


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    with Hosts(folder, SMALL) as found:
        yield found


def newest(rehearsal):
    return max((rehearsal.folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def finish(rehearsal, *overrides):
    """A run that completes; its folder."""
    assert rehearsal.wait(rehearsal.submit(*overrides), 600) == COMPLETED
    return newest(rehearsal)


def requests(folder):
    return [json.loads(line) for line in (folder / "asks.jsonl").read_text().splitlines()]


def claims(card):
    """The epsilon of each unit and relation, and the proof that it rests on."""
    return {
        (row["unit"], row["relation"]): (row["basis"], row["epsilon"]) for row in card["proven"]
    }


def in_ledgers(rehearsal, basis, unit, relation):
    """The epsilon of the hospital that was charged most, from the ledgers alone."""
    found = []
    for number in rehearsal.hospitals:
        with (ledger := rehearsal.hospital(number).ledger).transaction():
            event = spent(ledger.entries(), unit, relation, basis)
        found.append(best_bound(event, rehearsal.experiment.config.privacy.delta).epsilon)
    return max(found)


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_ledgers_of_labels_of_private_teachers_equal_the_card(rehearsal, unit):
    rehearsal.delete_answers()
    taken = f"training.records_per_patient={2 if unit == 'patient' else 1}"
    axes = "training=dp_sgd", "answers=label", f"training.unit={unit}"
    if unit == "record":  # the files name patients
        assert rehearsal.wait(rehearsal.submit(*axes), 600) != COMPLETED
        said = json.loads((newest(rehearsal) / "summary.json").read_text())["error"]
        assert "training.unit=patient, or allow it in its file with `units:" in said
    for number in rehearsal.hospitals:
        file = rehearsal.site(number)
        own = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump(own | {"units": [unit]}))
    folder = finish(rehearsal, *axes, taken)
    summary = json.loads((folder / "summary.json").read_text())
    assert all(line["answered"] == [0, 1, 2] for line in requests(folder))
    assert not reconcile(rehearsal, folder)
    found = claims(summary["privacy"])
    for (protected, relation), (basis, claimed) in found.items():
        charged = in_ledgers(rehearsal, basis, protected, relation)
        assert float(claimed) == pytest.approx(charged, rel=1e-9)
    basis, claimed = found[unit, "add_remove"]
    assert basis == "training"
    assert claimed < 3.1
    if unit == "record":  # it promises patients nothing, and neither do class counts
        assert found["patient", "add_remove"][1] == "inf"


def test_a_secure_sum_over_hosts_ends_and_accounts_agree(rehearsal):
    rehearsal.delete_answers()
    folder = finish(rehearsal, *SUMS)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["accuracy"]["ensemble"] is None  # no exact diagnostics outside a simulation
    assert all(line["answered"] == [0, 1, 2] for line in requests(folder))
    assert not reconcile(rehearsal, folder)


def test_faults_change_nothing_that_is_promised(rehearsal):
    faulty = run_with_faults(rehearsal, 0, 1, 3, print, gap=5)  # no run is over by then
    clean = run_with_faults(rehearsal, 0, 1, 0, print)
    assert faulty.faults
    assert faulty.student == clean.student
    assert not faulty.differences
    assert not clean.differences


def rehearse(folder, *settings):
    """The summary of a rehearsal in a separate process, which leaves no process behind."""
    command = [sys.executable, "-c", "from fed_dpsd.cli import main; main()", "rehearse"]
    done = subprocess.run(
        [*command, *settings, "--out", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert str(folder) not in " ".join(process.cmdline())
    return json.loads((Path(done.stdout.splitlines()[-1]) / "summary.json").read_text())


def test_the_readmes_command(tmp_path):
    assert rehearse(tmp_path / "mine", *SMALL, "rounds=1")["status"] == "completed"


def test_the_tutorials_dicom_files(tmp_path, monkeypatch):
    """With fewer patients, at 16 pixels and for one round; the unit is a patient."""
    monkeypatch.chdir(tmp_path)
    made, typed = "", []
    for step in pages.steps(pages.text_of("docs/tutorial.md")):
        if isinstance(step, str):
            made = pages.of_few_patients(step)
        elif step.words[1:3] == ["rehearse", "data=imagefolder"]:
            typed = step.words[2 : step.words.index("--out")]
    exec(compile(made, "docs/tutorial.md", "exec"), {})
    small = {"data.shape=[1,224,224]": "data.shape=[1,16,16]", "rounds=5": "rounds=1"}
    assert small.keys() < set(typed)
    card = rehearse(tmp_path / "day", *(small.get(word, word) for word in typed))["privacy"]
    (first, *_) = card["proven"]
    assert (first["unit"], first["relation"], first["trust"]) == ("patient", "add_remove", "nobody")
    assert 0.99 < float(first["epsilon"]) <= 1
    assert "seeded noise" not in first["notes"]


# --- strangers ---


def stranger(rehearsal, tmp_path, says, certificate=None, key=None, command=(), host=None):
    """The output of a faulty node until it says something, and then for five seconds."""
    own = tmp_path / "stranger"
    own.mkdir()
    site = yaml.safe_load(rehearsal.site(0).read_text())
    files = {**site["files"], "path": str(rehearsal.site(0).parent / "records.npz")}
    (own / "site.yaml").write_text(yaml.safe_dump(site | {"files": files, "state": "state"}))
    if key is None:
        key = own / "key"
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key], check=True
        )
    authority = certificate or rehearsal.folder / "certificates" / "ca.crt"
    command = command or (
        *("fed-dpsd", "site", "serve", str(own / "site.yaml")),
        *("--superlink", f"{host or rehearsal.address(0)}:{PORT}"),
        *("--certificate", str(authority)),
        *("--node-key", str(key), "--port", "9399"),
    )
    log = own / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            rehearsal.command_on("hospital0", *command),
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=own,
        )
        try:
            wait_until(lambda: says in log.read_text(), process)
            time.sleep(5)
        finally:
            process.terminate()  # and its node with it
            process.wait()
    assert not (own / "state" / "ledger").exists()
    assert CONNECTED in (rehearsal.folder / "hospital0" / "log").read_text()  # a correct one
    return log.read_text()


def require_short(log):
    """The log of a node that was not admitted has a line for each event."""
    assert CONNECTED not in log
    assert "Traceback" not in log
    assert len(log.splitlines()) <= 4, log


def test_a_node_that_is_not_registered_is_refused(rehearsal, tmp_path):
    """Its certificate is correct, its key is its own; the same for a hospital with another key."""
    says = "the coordinator does not admit the key of --node-key"
    require_short(stranger(rehearsal, tmp_path, says))


def test_a_coordinator_of_another_authority_is_refused(rehearsal, tmp_path):
    """The hospital's own key, but another coordinator's certificate."""
    other = tmp_path / "other"
    made = [str(app_folder() / "deploy" / "certificates.sh"), str(other), "127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    key = rehearsal.node_key(0)
    says = "has not signed the coordinator's certificate"
    require_short(stranger(rehearsal, tmp_path, says, other / "ca.crt", key))


def test_a_coordinator_of_another_host_name_is_refused(rehearsal, tmp_path):
    """Its address, written as one number, is a host name that its certificate lacks."""
    host = str(int(ipaddress.ip_address(rehearsal.address(0))))
    key, says = rehearsal.node_key(0), f"not for the host of --superlink {host}:"
    require_short(stranger(rehearsal, tmp_path, says, key=key, host=host))


def test_plain_text_is_refused(rehearsal, tmp_path):
    command = ("flower-supernode", "--insecure", "--superlink", f"{rehearsal.address(0)}:{PORT}")
    says, command = "Connection attempt failed", (*command, "--port", "9399")
    assert "SuperNode ID" not in stranger(rehearsal, tmp_path, says, command=command)
