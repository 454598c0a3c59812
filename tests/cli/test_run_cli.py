"""The messages of `run` and `resume`, from the first line to the last, and after a signal."""

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from fed_dpsd import api, cli
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import from_overrides
from fed_dpsd.server import checkpoint
from fed_dpsd.server.run_folder import new_run_folder
from tests.conftest import SMALL, contents
from tests.forks import finished, fork
from tests.shapes import write_shapes


def test_a_run_says_what_it_does_before_it_begins(fed_dpsd, monkeypatch, tmp_path):
    """So a user who interrupts it knows the folder."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "run_rounds", interrupted)
    code, (folder,), err = fed_dpsd("run", *SMALL)
    assert code == 130
    first, second, data, third, *_, last = err.splitlines()
    assert first == f"run folder: {folder}"
    assert second == (
        "data digits · method fed_dpsd · 2 clients, each with 1 teacher (cnn; training plain, "
        "answers label) · 3 rounds of 64 queries"
    )
    assert data == "data: 1,797 images found, 1,797 used"
    assert third.startswith("privacy: published 10 (label) · planned 1,921 (record, add_remove), ")
    assert ", 1,921 (replace_one), trust nobody, delta 0, seeded noise" in third
    place = folder.removeprefix(f"{tmp_path}/")
    assert last == (
        f"stopped by Ctrl-C before the end of its first round; to continue: fed-dpsd resume {place}"
    )


def test_a_run_ends_with_its_result_and_the_next_steps(fed_dpsd, tmp_path):
    _, (folder,), err = fed_dpsd("run", *SMALL)
    place = folder.removeprefix(f"{tmp_path}/")
    result, seeded, *steps = err.splitlines()[7:]
    assert result.startswith("student ")
    assert "carry no guarantee" in seeded
    assert steps == [
        f"export the student: fed-dpsd export {place}",
        f"report with tables and figures: fed-dpsd report {place}",
        f"what each client has spent: fed-dpsd privacy ledger {place}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "never"),
    [
        (("noise=secure",), "carry no guarantee"),
        (("method=local",), "privacy ledger"),  # nothing was released
        (("method=local",), "fed-dpsd export"),  # and there is no student
    ],
)
def test_no_next_step_leads_nowhere(fed_dpsd, overrides, never):
    small = [setting for setting in SMALL if not setting.startswith("method.")]
    code, _, err = fed_dpsd("run", *small, "rounds=1", *overrides)
    assert code == 0
    assert "fed-dpsd report" in err
    assert never not in err


def test_resuming_a_completed_run_is_over_at_once_and_touches_nothing(fed_dpsd, monkeypatch):
    _, (folder,), err = fed_dpsd("run", *SMALL)
    (result,) = [line for line in err.splitlines() if line.startswith("student ")]
    before = contents(api.Path(folder))
    monkeypatch.setattr(api, "LocalFederation", None)
    monkeypatch.setattr(api, "check_run", None)
    code, out, err = fed_dpsd("resume", folder)
    assert (code, out) == (0, [folder])
    assert err.splitlines()[:2] == ["already completed; nothing to do", result]
    assert contents(api.Path(folder)) == before


def test_a_run_that_another_process_has_is_left_to_it(fed_dpsd, tmp_path):
    """Its summary, too: a Flower simulation ends when one appears."""

    def resume():
        sys.argv = ["fed-dpsd", "resume", str(folder)]
        cli.main()

    experiment = from_overrides([*SMALL, f"run_folder={tmp_path}/held"], tmp_path)
    folder = new_run_folder(experiment)
    held = LocalFederation(experiment, folder)
    assert finished(fork(resume, tmp_path / "log")) == 1
    assert "error: another process is running " in (tmp_path / "log").read_text()
    assert not (folder / "summary.json").exists()
    del held


def test_a_failed_run_says_how_far_it_came_and_its_resumption_why(fed_dpsd, monkeypatch):
    rounds = api.run_rounds

    def failing(experiment, federation, folder, progress):
        def stop(line):
            raise UserError("the disk is full")

        return rounds(experiment, federation, folder, stop)

    with monkeypatch.context() as patch:
        patch.setattr(api, "run_rounds", failing)
        code, (folder,), err = fed_dpsd("run", *SMALL)
    assert code == 1
    *_, onward, cause = err.splitlines()
    assert onward.startswith("failed after round 1; after fixing the cause: fed-dpsd resume runs/")
    assert cause == "error: the disk is full"
    code, _, err = fed_dpsd("resume", folder)
    assert code == 0
    assert err.splitlines()[3:5] == ["last error: the disk is full", "resuming after round 1 of 3"]
    assert "round 2/3" in err


@pytest.mark.parametrize(
    ("sent", "code", "word"),
    [(signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGINT, 130, "stopped by Ctrl-C")],
)
def test_a_signal_leaves_a_run_to_go_on_with(fed_dpsd, tmp_path, sent, code, word):
    save = checkpoint.save

    def save_and_wait(place, state):
        save(place, state)
        time.sleep(120)

    def run():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
        checkpoint.save = save_and_wait
        sys.argv = ["fed-dpsd", "run", *SMALL, f"run_folder={tmp_path}/stopped"]
        cli.main()

    log, folder = tmp_path / "log", tmp_path / "stopped"
    child = fork(run, log)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(folder.glob("checkpoint/*.json")):
        time.sleep(0.01)
    os.kill(child, sent)
    assert finished(child) == code
    said = log.read_text()
    assert f"{word} after round 1" in said
    assert "continue: fed-dpsd resume stopped\n" in said
    assert said.splitlines()[-1] == str(folder)
    assert json.loads((folder / "summary.json").read_text())["error"] == word
    resumed, _, err = fed_dpsd("resume", str(folder))
    assert resumed == 0
    assert f"last error: {word}" in err
    assert "round 3/3" in err


def test_what_a_run_warns_of_is_on_stderr_and_only_its_folder_on_stdout(tmp_path):
    """In a process without pytest's log handlers, since the log must reach people."""
    write_shapes(tmp_path / "pictures", 40, broken=2)
    words = ["data=imagefolder", "data.path=pictures", *SMALL, "answers=votes", "rounds=1"]
    words += ["partition=class", "partition.classes_per_client=1"]
    printed = tmp_path / "printed"

    def run():
        logging.getLogger().handlers.clear()
        sys.stdout = printed.open("w")
        os.dup2(sys.stdout.fileno(), 1)
        sys.argv = ["fed-dpsd", "run", *words]
        try:
            cli.main()
        finally:
            sys.stdout.flush()

    code = finished(fork(run, tmp_path / "log", tmp_path))
    said = (tmp_path / "log").read_text()
    assert code == 0, said
    assert "warning: answers=votes with answers.noise_multiplier=100" in said
    assert "40 files found, 38 used, 2 skipped: 2 unreadable (" in said
    assert said.count("have none, because 1 of 3 classes have no client") == 1
    assert "has no train and test splits: one image in 5 is for testing, chosen by" in said
    (folder,) = printed.read_text().splitlines()
    assert (tmp_path / folder / "summary.json").is_file()


@pytest.mark.parametrize(
    "engine", [(), pytest.param(("--engine", "flower"), marks=pytest.mark.slow)], ids=str
)
def test_training_that_diverges_ends_with_the_network_the_key_and_1(fed_dpsd, engine):
    """Slow with Flower, which starts its processes; the control ends with 0."""
    settings = [
        *("training=plain", "model=cnn", "model.teacher_width=4", "model.student_width=4"),
        *("method=fedavg", "num_clients=2", "rounds=1", "teacher.epochs=0", "teacher.min_steps=3"),
    ]
    if not engine:
        assert fed_dpsd("run", *settings)[0] == 0
    code, _, err = fed_dpsd("run", *settings, "teacher.learning_rate=1e30", *engine)
    assert code == 1
    assert re.search(
        r"training diverged: the loss of client \d's teacher is NaN after step 1; "
        r"lower teacher.learning_rate \(now 1e\+30\)",
        err,
    )


@pytest.mark.slow
@pytest.mark.parametrize("redirected", ["2>&1 | head -6", "| head -0"])
def test_a_run_whose_output_nobody_reads_ends_quietly(tmp_path, redirected):
    """A shell and a process of the command, without which no pipe breaks: ten seconds."""
    words = " ".join(map(shlex.quote, [*SMALL, f"out={tmp_path}/runs", "rounds=8"]))
    main = "from fed_dpsd.cli import main; main()"
    code = f"{shlex.quote(sys.executable)} -c '{main}' run {words} {redirected}"
    done = subprocess.run(code, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert "Error" not in done.stdout + done.stderr
    assert "Exit" not in done.stdout + done.stderr
    (summary,) = tmp_path.glob("runs/*/summary.json")
    error = json.loads(summary.read_text())["error"]
    ended = "stopped because nothing reads its output any more"
    assert error == (ended if redirected.startswith("2") else None)
