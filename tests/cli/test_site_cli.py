"""A hospital's own commands: their output before it connects; nothing is spent."""

import contextlib
import hashlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import safetensors.numpy
import yaml
from cryptography.hazmat.primitives.asymmetric import ec

from fed_dpsd.accounts.words import against
from fed_dpsd.client import check
from fed_dpsd.client.hospital import open_hospital
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.engines.flower import supernode
from fed_dpsd.errors import UserError
from fed_dpsd.models import fixed_features
from tests.every import every
from tests.hospitals import certificate, private_key, site_file, summing
from tests.processes import lives, wait_until

SMALL = ("num_clients=2", "training.steps=3", "model.teacher_width=4")
PLAIN = ("num_clients=2", "training=plain", "model=cnn", "teacher.epochs=0")


def test_a_file_is_written_once_and_says_what_is_missing(fed_dpsd, tmp_path):
    code, out, _ = fed_dpsd("site", "init", "site.yaml")
    assert (code, out) == (0, [f"{tmp_path}/site.yaml"])
    written = (tmp_path / "site.yaml").read_text()
    assert open_hospital(tmp_path / "site.yaml").num_clients == 3
    code, _, err = fed_dpsd("site", "init", "site.yaml")
    assert code == 1
    assert "site.yaml already exists; it is not overwritten" in err
    assert (tmp_path / "site.yaml").read_text() == written
    code, _, err = fed_dpsd("site", "check", "site.yaml")
    assert code == 1
    assert f"path={tmp_path}/images does not exist; give a folder" in err


@pytest.mark.slow
def test_a_check_counts_trains_and_rehearses_and_charges_nothing(fed_dpsd, tmp_path):
    file = site_file(
        tmp_path / "hospital", training=["dp_sgd"], models=["scattering"], queries=10_000
    )
    code, out, err = fed_dpsd("site", "check", str(file), *SMALL)
    assert (code, err) == (0, "")
    text = "\n".join(out)
    assert "│ 9     │ 9      │ 4       │" in text
    assert "a run: " in text
    assert "default settings" not in text  # the settings are given
    assert not re.search(r"\w\(\w+=", text)  # no Python
    assert "spent so far: 0 (record, add_remove" in text
    assert "the budget is 100" in text
    assert re.search(r"a teacher: right on \d of \d+ held-out records, too few to judge", text)
    assert "an answer, rehearsed: 16 images, 160 bytes" in text
    ledger = open_hospital(file).ledger
    with ledger.transaction():
        assert not ledger.entries()
    assert not (tmp_path / "hospital" / "state" / "cache" / "teachers").exists()


@every(
    ("method", "answers", "numbers"),
    [
        ("dp_fedsgd", "clipped_gradients", 10 * (68 + 1)),
        ("class_statistics", "class_statistics", 68 * 69 // 2 + 10 * (68 + 1)),
    ],
)
@pytest.mark.slow
@pytest.mark.ci
def test_a_check_of_sums_over_records_rehearses_a_sum_and_trains_nothing(
    fed_dpsd, tmp_path, method, answers, numbers
):
    allowed = {"methods": [method], "answers": [answers], "models": ["scattering"]}
    file = site_file(tmp_path / method, **allowed)
    code, out, err = fed_dpsd("site", "check", str(file))
    assert (code, err) == (0, "")
    text = "\n".join(out)
    assert "estimated need: memory about " in text
    assert f"an answer, rehearsed: a sum over records, {8 * numbers:,} bytes" in text
    assert "a teacher" not in text
    ledger = open_hospital(file).ledger
    with ledger.transaction():
        assert not ledger.entries()


def test_a_check_of_secure_sums_says_whom_each_number_holds_against(tmp_path):
    allowed = {"methods": ["dp_fedsgd"], "answers": ["clipped_gradients"]}
    file, *_ = summing(tmp_path, models=["scattering"], colluding=1, **allowed)
    quorum = "answers.noise_at=distributed", "answers.quorum={threshold: 3, colluding: 1}"
    run = ["num_clients=3", "method=dp_fedsgd", *quorum]
    said = [f"{line}" for line in check.check(open_hospital(file), run)]
    first, *others = (line for line in said if line.startswith("a run: "))
    assert first.endswith(f"against {against('threshold', 1)}")
    assert f"keys: 3, with digest {open_hospital(file).digest_of_keys}" in said
    (reader,) = (line for line in others if "besides 1 colluding client" in line)
    assert "against a client that sees the result" in reader


@pytest.mark.slow
def test_a_check_counts_by_name_and_compares_classes_with_a_coordinators(fed_dpsd, tmp_path):
    """Any printable name, and the hospital's own labels of each."""
    names = ["normal", 'é, "x" = {3}']
    file = site_file(
        tmp_path / "hospital",
        classes=names,
        training=["dp_sgd"],
        models=["scattering"],
        queries=10_000,
    )
    settings = yaml.safe_load(file.read_text())
    settings["files"]["labels"] = {str(label): names[label > 6] for label in range(10)}
    file.write_text(yaml.safe_dump(settings))
    code, out, err = fed_dpsd("site", "check", str(file))
    assert (code, err) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out if "│" in line]
    assert rows == [
        ["normal", "0, 1, 2, 3, 4, 5, 6", "28"],
        [names[1], "7, 8, 9", "12"],
    ]
    file.write_text(yaml.safe_dump(settings | {"delta": 0.025}))
    code, _, err = fed_dpsd("site", "check", str(file))
    assert (code, "site.delta=0.025 must be below 1 / 40, the number of" in err) == (1, True)
    file.write_text(yaml.safe_dump(settings))
    code, _, err = fed_dpsd("site", "check", str(file), *SMALL)
    assert code == 1
    assert f"the hospital's classes are {names}, the experiment's are ['0', '1'," in err
    assert "only the hospital has" in err


def test_a_check_says_what_a_coordinator_would_be_refused(fed_dpsd, tmp_path):
    limits = {"training": ["dp_sgd"], "models": ["scattering"], "queries": 10_000}
    file = site_file(tmp_path / "hospital", **limits)
    code, _, err = fed_dpsd("site", "check", str(file), "training.noise_multiplier=0.01", *SMALL)
    assert (code, "budget=100 is not enough for this run" in err) == (1, True)
    code, _, err = fed_dpsd("site", "check", str(file), "model=patches", *SMALL)
    assert (code, "model=patches" in err, "only the teachers scattering" in err) == (1, True, True)
    site_file(tmp_path / "hospital", **limits | {"methods": ["dpsd"], "models": ["cnn"]})
    code, _, err = fed_dpsd("site", "check", str(file), *SMALL)  # as the run would be refused
    assert code == 1
    assert "allows only method=dpsd (methods: in its file); this site allows only the teach" in err
    code, _, err = fed_dpsd("site", "check", str(file), *SMALL[1:])
    assert "num_clients is 2 at this site; give all settings of the coordinator's run" in err


def test_a_check_says_whether_the_budget_lasts(fed_dpsd, tmp_path):
    """One image after another would be answered until it does not."""
    file = site_file(
        tmp_path / "hospital",
        training=["plain"],
        answers=["gradient"],
        models=["cnn"],
        budget=8,
        queries=10_000,
    )
    overrides = (*PLAIN, "answers=gradient", "answers.noise_multiplier=20", "teacher.min_steps=1")
    code, out, err = fed_dpsd("site", "check", str(file), *overrides)
    assert code == 1
    found = re.search(r"budget=8 is not enough for this run.* raise budget to at least (.+)", err)
    hospital = replace(open_hospital(file), budget=float(found[1]))
    experiment = check._experiment(hospital, list(overrides))
    assert hospital.open(experiment, "check").exceeded_limit() == ""
    code, out, err = fed_dpsd("site", "check", str(file), *overrides, "rounds=1")
    assert (code, err) == (0, "")
    assert any(re.fullmatch(r"pixels: 0 to 255 of 255, 12\d on average", line) for line in out)
    assert (tmp_path / "hospital" / "state").stat().st_mode & 0o777 == 0o700
    site_file(
        tmp_path / "hospital", training=["plain"], answers=["gradient"], models=["cnn"], queries=8
    )
    code, _, err = fed_dpsd("site", "check", str(file), *overrides, "rounds=1")
    assert code == 1
    assert "queries=8 is not enough for this run" in err


def test_a_check_names_a_budget_that_pays_for_the_training(tmp_path):
    """More images cost nothing; the budget named suffices, and a used ledger has no other."""
    settings = {"training": ["dp_sgd"], "models": ["scattering"], "queries": 10_000}
    overrides = [*SMALL, "training.noise_multiplier=1"]
    file = site_file(tmp_path / "hospital", budget=3.0, **settings)
    with pytest.raises(UserError) as raised:
        list(check.check(open_hospital(file), overrides))
    found = re.fullmatch(
        r"budget=3 is not enough for this run: this site would refuse to train; agree on more "
        r"noise \(privacy.target_epsilon\), or raise budget to at least ([0-9.]+)",
        str(raised.value),
    )
    least = float(found[1])
    for budget, lacking in ((least, ""), (0.99 * least, "budget")):
        hospital = replace(open_hospital(file), budget=budget)
        experiment = check._experiment(hospital, overrides)
        assert hospital.open(experiment, "check").exceeded_limit() == lacking
    planned = experiment.plan
    assert "raise" not in check._more_for_budget(experiment.config.privacy, planned, True)


@pytest.mark.parametrize(
    ("column", "unit", "relation"),
    [("patient", "patient", "replace_one"), ("patient", "record", "add_remove"), (None,) * 3],
)
def test_a_check_counts_patients_and_puts_the_unit_asked_for_first(
    tmp_path, column, unit, relation
):
    file = site_file(
        tmp_path / "hospital",
        training=["dp_sgd"],
        models=["scattering"],
        queries=10_000,
        budget_relation=relation or "add_remove",
        units=["record", "patient"],
    )
    hospital = open_hospital(file)
    hospital = replace(hospital, files=replace(hospital.files, patient_column=column))
    overrides = [*SMALL, *([f"training.unit={unit}"] if unit else [])]
    lines = itertools.takewhile(
        lambda line: not str(line).startswith("spent so far"), check.check(hospital, overrides)
    )
    said = dict(line.split(": ", 1) for line in lines if isinstance(line, str))
    assert said.get("patients") == ("5" if column else None)
    assert f"({unit or 'record'}, add_remove" in said["a run"]
    budget = said.get("the budget counts records", "")
    assert (f"(record, {relation}" in budget) == (unit == "patient")


@pytest.mark.parametrize(
    ("column", "units", "said", "unit"),
    [
        (None, None, "record, because the file names no patient_column", "record"),
        ("patient", None, "patient, because patient_column is patient; the coordinator", "patient"),
        ("patient", ["record"], "record (units: in the file)", "record"),
    ],
)
def test_a_check_states_the_units_and_why_and_trains_by_the_first(
    tmp_path, column, units, said, unit
):
    """With the coordinator's settings, the coordinator's unit counts."""
    file = site_file(tmp_path / "hospital", training=["dp_sgd"], queries=10_000, units=units)
    hospital = open_hospital(file)
    hospital = replace(hospital, files=replace(hospital.files, patient_column=column))
    lines = itertools.takewhile(
        lambda line: not str(line).startswith("spent so far"), check.check(hospital, [])
    )
    found = dict(line.split(": ", 1) for line in lines if isinstance(line, str))
    assert found["units of private training"].startswith(said)
    assert f"({unit}, add_remove" in found["a run"]
    assert "with default settings; give the coordinator's" in found["run"]
    if unit == "patient":
        with pytest.raises(UserError, match=r"^num_clients=2: training.unit=record: .*patient, or"):
            list(check.check(hospital, ["num_clients=2"]))


@pytest.mark.slow
def test_a_second_check_does_not_compute_what_features_are_made_with(tmp_path, monkeypatch):
    """It is public and slow; teachers and answers of a check are still thrown away."""
    terms = {"training": ["dp_sgd"], "models": ["scattering"], "queries": 10_000}
    hospital = open_hospital(site_file(tmp_path / "hospital", **terms))
    list(check.check(hospital, [*SMALL]))
    assert {path.name for path in (hospital.folder / "cache").iterdir()} == {"features"}
    monkeypatch.setattr(fixed_features, "_components", pytest.fail)
    list(check.check(hospital, [*SMALL]))


def test_a_check_deletes_what_a_killed_one_left_a_day_ago(tmp_path):
    hospital = open_hospital(site_file(tmp_path / "hospital", queries=10_000, budget=1e6))
    for name, days in (("old", 2), ("new", 0)):
        left = hospital.folder / "checks" / name
        left.mkdir(parents=True)
        (left / "teacher").touch()
        os.utime(left, (time.time() - days * check.DAY,) * 2)
    settings = "teacher.min_steps=3", "model.teacher_width=4"
    list(check.check(hospital, [*PLAIN, "answers=label", *settings]))
    assert [path.name for path in (hospital.folder / "checks").iterdir()] == ["new"]
    assert (hospital.folder / "secret").read_bytes()  # which the check links


def test_a_check_keeps_no_rows_of_private_images(tmp_path):
    """Public networks' rows are below the folder of constants."""
    (tmp_path / "own" / "asked").mkdir(parents=True)
    for name in ("constants.npy", "asked/rows.npy"):
        (tmp_path / "own" / name).write_bytes(b"1")
    check._copy_constants(tmp_path / "own", tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").rglob("*")] == ["constants.npy"]


def test_a_check_reads_the_weights(tmp_path):
    """It prints the digest that the coordinator's must equal, and refuses other files."""
    folder = tmp_path / "hospital"
    hospital = open_hospital(site_file(folder, training=["dp_sgd"], weights="own.safetensors"))
    with pytest.raises(UserError, match=r"weights=.*own.safetensors: No such file"):
        list(check.check(hospital, []))
    (folder / "own.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"weights=.*own.safetensors is not a safetensors file"):
        list(check.check(hospital, []))
    safetensors.numpy.save_file({"w": np.zeros(3)}, folder / "own.safetensors")
    digest = hashlib.sha256((folder / "own.safetensors").read_bytes()).hexdigest()
    assert f"weights: tensors: 1; model.digest=sha256:{digest}" in check.check(hospital, [])


def test_a_check_says_that_a_training_diverges(fed_dpsd, tmp_path):
    """In a run only the hospital's log would; with the default rate the check passes."""
    file = site_file(tmp_path / "hospital", training=["plain"], models=["cnn"], budget=1e6)
    settings = *PLAIN, "answers=label", "rounds=1", "teacher.min_steps=3"
    assert fed_dpsd("site", "check", str(file), *settings)[0] == 0
    code, _, err = fed_dpsd("site", "check", str(file), *settings, "teacher.learning_rate=1e30")
    assert code == 1
    assert "client 0's teacher are NaN or infinite; lower teacher.learning_rate (now 1e+30)" in err


def test_what_is_held_out_is_of_patients_of_whom_nothing_was_seen(tmp_path, monkeypatch):
    """Forty records of five patients: the eight records of one are held out."""
    file = site_file(tmp_path / "hospital", training=["dp_sgd"], models=["scattering"])
    hospital = open_hospital(file)
    hospital = replace(hospital, files=replace(hospital.files, patient_column="patient"))
    seen = []

    class Seeing(Teachers):
        def __init__(self, config, mechanism, client, records, shard_ids, secret):
            seen.append(shard_ids)
            super().__init__(config, mechanism, client, records, shard_ids, secret)

    monkeypatch.setattr(check, "Teachers", Seeing)
    found = hospital.read()
    experiment = check._experiment(hospital, [*SMALL, "training.unit=patient"])
    text = check._train(hospital, found, experiment, tmp_path)
    assert "of 8 held-out records, too few to judge" in text
    assert len(seen[0]) == 32
    assert len(set(found.records.patients) - set(seen[0])) == 1


@pytest.mark.parametrize(
    ("right", "units", "labels", "text"),
    [
        (25, 25, [0, 1], "100.0 % on 25 held-out records"),
        (24, 24, [0, 1], "right on 24 of 24 held-out records, too few to judge it: that takes 25"),
        (25, 24, [0, 1], "right on 25 of 25"),  # two are of one patient
        (25, 25, [1, 1], "all records are of class b: nothing to tell apart"),
        (1, 1, [0, 1], "right on 1 of 1 held-out records, too few to judge"),
    ],
)
def test_an_accuracy_on_few_records_or_one_class_is_not_stated(right, units, labels, text):
    right, labels = np.ones(right, bool), np.array(labels)
    assert check._accuracy(right, units, labels, ("a", "b")).startswith(text)
    found = check._accuracy(right, units, labels, ("a", "b", "c"))
    assert found.endswith("; no record is of class c") == (len(set(labels)) > 1)


@pytest.mark.slow
def test_records_that_are_too_few_to_test_a_teacher_are_reported(fed_dpsd, tmp_path):
    file = site_file(tmp_path / "hospital", training=["dp_sgd"], models=["scattering"])
    images = np.zeros((1, 8, 8), np.uint8)
    np.savez(tmp_path / "hospital" / "scans.npz", image=images, label=np.array([3]))
    code, out, _ = fed_dpsd("site", "check", str(file), *SMALL, "queries_per_round=16")
    assert code == 0
    assert "a teacher: one image or patient is too few for a hold-out" in out


@pytest.mark.slow
def test_what_cannot_be_read_is_listed(fed_dpsd, tmp_path):
    file = site_file(
        tmp_path / "hospital", training=["dp_sgd"], models=["scattering"], queries=10_000
    )
    folder = tmp_path / "hospital" / "images" / "0"
    folder.mkdir(parents=True)
    from PIL import Image

    for number in range(10):
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(folder / f"{number}.png")
    (folder / "broken.png").write_bytes(b"no image")
    settings = yaml.safe_load(file.read_text())
    settings["files"] |= {"path": "images", "skip_unreadable": True}
    file.write_text(yaml.safe_dump(settings))
    code, out, _ = fed_dpsd("site", "check", str(file), *SMALL)
    assert code == 0
    assert any("1 unreadable (0/broken.png: " in line for line in out)
    settings["files"] |= {"skip_unreadable": False}
    file.write_text(yaml.safe_dump(settings))
    code, _, err = fed_dpsd("site", "check", str(file), *SMALL)
    assert code == 1
    assert "0/broken.png" in err


def test_a_key_is_the_same_every_time_and_anothers_is_another(fed_dpsd, tmp_path):
    files = [str(site_file(tmp_path / f"hospital{number}", number)) for number in (0, 1)]
    keys = [fed_dpsd("site", "key", file)[1] for file in (*files, files[0])]
    assert keys[0] == keys[2] != keys[1]
    assert len(bytes.fromhex(keys[0][0])) == 32


def test_files_in_one_folder_have_states_of_their_own(fed_dpsd, tmp_path):
    for name in ("north.yaml", "south 2.yaml", "site.yaml"):
        assert fed_dpsd("site", "init", name)[0] == 0
    states = [open_hospital(tmp_path / n).folder.name for n in ("north.yaml", "south 2.yaml")]
    assert states == ["north-state", "south 2-state"]
    assert open_hospital(tmp_path / "site.yaml").folder.name == "state"


def test_one_state_cannot_serve_two_hospitals(tmp_path):
    """It is locked while a process serves it, and free again when the process has ended."""
    holding = (
        f"{supernode.import_line()}\nimport time\nfrom pathlib import Path\n"
        "from fed_dpsd.engines.flower.supernode import _lock_folder\n"
        f"lock = _lock_folder(Path({str(tmp_path)!r}))\nprint('locked', flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match="is in use by another `fed-dpsd site serve`"):
            supernode._lock_folder(tmp_path)
        process.kill()
    supernode._lock_folder(tmp_path).close()


WHERE = ("--superlink", "host:1", "--certificate", "ca.crt", "--node-key", "key")


def stub_node(folder, script):
    """A hospital's file, with what `site serve` needs and a script in place of Flower's node."""
    file = site_file(folder / "hospital")
    key = ec.generate_private_key(ec.SECP384R1())
    (folder / "ca.crt").write_bytes(certificate(key))
    (folder / "key").write_bytes(private_key(key))
    node = folder / "node"
    node.write_text(f"#!/bin/sh\n{script}\n")
    node.chmod(0o755)
    return file


def node_line(folder):
    """The line of Python that starts the script."""
    run = f"os.execv({str(folder / 'node')!r}, ['node', *sys.argv[1:]])"
    return f"import os, sys; keep_ready, node = print, lambda _: {run}"


def test_a_delta_that_is_too_large_is_a_warning_at_every_start(fed_dpsd, tmp_path, monkeypatch):
    """As are records that cannot be read; the node starts nevertheless."""

    def stop(_):
        for thread in threading.enumerate():
            if thread.name == "records":  # they are checked while the node runs
                thread.join()
        sys.exit(0)

    monkeypatch.setattr(supernode, "time", SimpleNamespace(sleep=stop))
    file = stub_node(tmp_path, "exit 1")
    monkeypatch.setattr(supernode, "import_line", lambda: node_line(tmp_path))
    settings = yaml.safe_load(file.read_text())
    too_large = "warning: site.delta=0.5 must be below 1 / 40, the number of records; else"
    for delta in (0.5, 1e-5):
        file.write_text(yaml.safe_dump(settings | {"delta": delta}))
        code, _, err = fed_dpsd("site", "serve", str(file), *WHERE)
        assert (code, too_large in err, "warning" in err) == (0, delta == 0.5, delta == 0.5), err
        assert "the node ended with an error" in err
    (tmp_path / "hospital" / "scans.npz").unlink()
    code, _, err = fed_dpsd("site", "serve", str(file), *WHERE)
    assert (code, "warning: files.path=" in err, "the node ended" in err) == (0, True, True), err


def test_a_node_that_ends_by_itself_is_started_again(fed_dpsd, tmp_path, monkeypatch):
    """It fails twice and then ends with status 0, as Flower's does if its signature is rejected."""
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(supernode, "time", SimpleNamespace(sleep=sleep))
    file = stub_node(tmp_path, 'echo "$@" >> calls\n[ $(wc -l < calls) -gt 2 ]')
    monkeypatch.setattr(supernode, "import_line", lambda: node_line(tmp_path))
    code, _, err = fed_dpsd("site", "serve", str(file), *WHERE)
    assert (code, slept) == (130, [10, 10, 10])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3
    for called in calls:
        settings, _, port = called.partition(" --port ")
        assert settings == (
            f"--superlink host:1 --root-certificates {tmp_path}/ca.crt "
            f'--auth-supernode-private-key {tmp_path}/key --node-config site="{file}"'
        )
        assert 1024 < int(port) < 2**16
    first, last = (line for line in err.splitlines() if line.startswith("the node ended"))
    log = open_hospital(file).folder / "flower.log"
    assert first == f"the node ended with an error, see {log}; it starts again every 10 s"
    assert re.fullmatch(
        "the node ended with status 0: .* because this machine's clock is wrong .*`timedatectl`.*; "
        "it starts again every 10 s",
        last,
    )
    code, _, err = fed_dpsd("site", "serve", str(file), *WHERE[:-1], "none")
    assert code == 1
    assert "none does not exist" in err


@pytest.mark.parametrize(
    ("number", "send", "status"),
    [
        pytest.param(signal.SIGTERM, os.kill, 143, marks=pytest.mark.ci),
        (signal.SIGINT, os.kill, 130),
        (signal.SIGINT, os.killpg, 130),
    ],
)
@pytest.mark.slow  # a process that imports Flower, for each
def test_a_signal_ends_the_command_and_its_node(tmp_path, number, send, status):
    """Whether the node gets it too, as from Ctrl-C, or not."""
    file = stub_node(tmp_path, "echo $$ >> pids\n[ $(wc -l < pids) = 1 ] || exec sleep 60")
    program = (
        "import signal\nsignal.signal(2, signal.default_int_handler)\n"  # ignored in a shell's jobs
        f"{supernode.import_line()}\nfrom fed_dpsd.engines.flower import supernode\n"
        f"supernode.import_line = lambda: {node_line(tmp_path)!r}\n"
        "supernode.RESTART_SECONDS = 0.01\n"
        "from fed_dpsd.cli import main\nmain()"
    )
    command = [sys.executable, "-c", program, "site", "serve", str(file), *WHERE]
    process = psutil.Popen(command, cwd=tmp_path, start_new_session=True)
    pids = tmp_path / "pids"
    try:  # the first node ends with status 0
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, process)
        node = psutil.Process(int(pids.read_text().split()[1]))
        send(process.pid, number)
        assert process.wait(30) == status
        psutil.wait_procs([node], timeout=30)
        assert not lives(node)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
