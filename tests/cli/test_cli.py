"""The command line: data on stdout, messages on stderr, exit code 1 with one clear line."""

import inspect
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.cli import constant
from typer.main import get_command

from fed_dpsd import __version__, api, cli
from fed_dpsd.config.compose import compose
from fed_dpsd.engines import doctor
from fed_dpsd.engines.flower import direct, proxies
from fed_dpsd.experiment import set_up
from fed_dpsd.models.devices import Device
from fed_dpsd.server.run_folder import new_run_folder
from tests.conftest import SMALL

RESULT = (
    "published 10 (label) · "
    "proven 1,921 (record, add_remove), 1,921 (replace_one), trust nobody, delta 0"
)


def test_no_command_answers_in_the_place_of_hospitals(fed_dpsd, tmp_path):
    deployment = ("federation=deployment", f"out={tmp_path}/runs")
    code, _, err = fed_dpsd("run", *deployment)
    assert code == 1
    assert "federation=deployment" in err
    assert not (tmp_path / "runs").exists()
    folder = new_run_folder(set_up(compose(list(deployment)), tmp_path))
    code, _, err = fed_dpsd("resume", str(folder))
    assert code == 1
    assert f"--run-config 'resume=\"{folder}\"'" in err
    assert not (folder / "summary.json").exists()


def test_a_failing_run_still_prints_its_folder_and_says_why_in_one_line(
    fed_dpsd, monkeypatch, tmp_path
):
    def broken(*_):
        raise RuntimeError("something\nunforeseen")

    monkeypatch.setattr(api, "run_rounds", broken)
    code, out, err = fed_dpsd("run", *SMALL)
    assert code == 1
    assert out[-1].startswith(f"{tmp_path}/runs/")
    assert "error: RuntimeError: something unforeseen (traceback: " in err
    assert "Traceback" not in err
    assert "Traceback" in (tmp_path / out[-1] / "error.log").read_text()


# --- doctor ---


def test_doctor_finds_nothing_wrong_here_and_a_wrong_version(fed_dpsd, monkeypatch):
    code, out, _ = fed_dpsd("doctor")
    assert code == 0, out
    assert any("flwr" in line and "ok: " in line for line in out)
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.9")
    code, out, _ = fed_dpsd("doctor")
    assert code == 1
    assert any("BAD: 0.9" in line and "pip install" in line for line in out)


GIB = 2**30


def test_doctor_checks_the_ports_that_flwr_run_will_use(monkeypatch):
    """Flower's variables move them."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name in doctor.LOCAL_PORTS:
            monkeypatch.setenv(name, port)
        assert f"{port} in use" in doctor._ports().state
    check = doctor._ports()
    assert check.good
    assert check.state.startswith(f"{port} and {port} are free")
    monkeypatch.setenv("FLWR_LOCAL_CONTROL_API_PORT", "http")
    assert not doctor._ports().good
    for name, usual in doctor.LOCAL_PORTS.items():  # they are Flower's own
        assert f'"{name}", "{usual}"' in " ".join(inspect.getsource(constant).split())


def test_doctor_finds_a_proxy_for_loopback_addresses(monkeypatch):
    for name in (*proxies(os.environ), "no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert doctor._proxies().good
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    check = doctor._proxies()
    assert not check.good
    assert check.remedy.startswith("add 127.0.0.1, localhost, ::1 to no_proxy and NO_PROXY")
    for name, value in direct(os.environ).items():
        monkeypatch.setenv(name, value)
    assert doctor._proxies().good


def test_doctor_says_that_the_home_folder_is_not_known(fed_dpsd, homeless):
    code, out, err = fed_dpsd("doctor")
    assert (code, out) == (1, [])
    assert "~/.fed-dpsd: its home folder is not known" in err
    assert "set FED_DPSD_HOME" in err


def test_doctor_examines_what_a_command_needs(fed_dpsd, tmp_path):
    code, out, _ = fed_dpsd("doctor", *SMALL)
    text = "\n".join(out)
    assert code == 0
    assert "digits: 1,437 records" in text
    assert "admits the whole plan" in text
    code, out, _ = fed_dpsd(
        "doctor", "cache=/proc/nowhere", "privacy.budget=0.5", "num_clients=900"
    )
    text = " ".join("\n".join(out).replace("│", " ").split())
    assert code == 1
    assert "works here" in text
    assert "privacy.budget=0.5 is less than" in text
    assert "not writable" in text
    assert text.count("BAD") == 3
    assert not list(tmp_path.iterdir())


def test_doctor_says_what_five_clients_get_of_a_gpu(subtests):
    for free, said, good in [
        (7 * GIB, "5 processes on cuda:0, each 0.1999 of a GPU, 1.10 GiB", True),
        (1 * GIB, "use a smaller teacher", False),
    ]:
        with subtests.test(free=free, said=said, good=good):
            device, share = doctor._gpus((Device("cuda:0", "card", 8 * GIB, free),), 16)
            assert (device.good, device.state) == (
                *(True, f"cuda:0 card, {free / GIB:.2f} of 8.00 GiB free"),
            )
            assert said in share.state
            assert share.good is good is not share.remedy.startswith("stop the processes that fill")
            (nothing,) = doctor._gpus((), 16)
            assert nothing.state == "none; everything runs on the CPU"


# --- sweep and report ---


@pytest.mark.slow
def test_sweep_runs_the_grid_and_prints_its_table_last(fed_dpsd, tmp_path):
    tiny = (*SMALL, "rounds=2", "method.final_student_steps=1", "training=plain", "answers=label")
    code, out, err = fed_dpsd("sweep", *tiny, "num_clients=2,3", "--out", "grid")
    assert (code, out) == (0, [f"{tmp_path}/grid/results.csv"])
    assert f"num_clients=3: {tmp_path}/grid/fed_dpsd-digits-alpha0.5-" in err
    assert "round 2/2 · student" in err
    table = tmp_path / "mine.csv"
    code, out, err = fed_dpsd("sweep", *tiny, "num_clients=2", "--out", "grid", "--csv", str(table))
    assert (code, out) == (0, [str(table)])
    assert "already finished: the only cell" in err
    code, out, _ = fed_dpsd("report", str(table), "--out", "pages")
    wide = [f"_progress.{end}" for end in ("png", "pdf", "svg")]
    narrow = [f"_progress_column.{end}" for end in ("pdf", "svg")]
    ends = [".md", "_summary.csv", *wide, *narrow, ".html"]
    assert (code, out) == (0, [f"{tmp_path}/pages/mine{end}" for end in ends])
    assert all(Path(path).stat().st_size for path in out)


@pytest.mark.slow
def test_a_sweep_counts_its_cells(fed_dpsd, monkeypatch):
    monkeypatch.setattr("fed_dpsd.progress.LINE_SECONDS", 0)
    tiny = (*SMALL, "rounds=1", "method.final_student_steps=1", "training=plain")
    code, _, err = fed_dpsd("sweep", *tiny, "seed=0,1,2")
    assert code == 0
    begun = {line.partition(",")[0] for line in err.splitlines()}
    assert {"1 of 3 cells", "2 of 3 cells"} <= begun
    _, _, err = fed_dpsd("sweep", *tiny, "seed=0,1,2")
    assert "cells" not in err


def test_a_crash_in_a_cell_is_one_line_and_a_traceback_in_its_folder(
    fed_dpsd, monkeypatch, tmp_path
):
    def broken(*_):
        raise RuntimeError("something\nunforeseen")

    monkeypatch.setattr(api, "run_rounds", broken)
    code, _, err = fed_dpsd("sweep", *SMALL, "seed=0,1")
    assert code == 1
    assert err.count("failed: seed=") == 2
    assert "RuntimeError: something unforeseen (traceback: " in err
    assert len(list((tmp_path / "runs/sweep").glob("*/error.log"))) == 2


def test_entries_of_a_grid_may_be_named_one_by_one(fed_dpsd):
    """All count: the last one alone would run here."""
    code, _, err = fed_dpsd("sweep", "experiment=ci", "--only", "nowhere", "--only", "FedDPSD")
    assert code == 1
    assert "nowhere" in err


def test_an_empty_value_is_refused(fed_dpsd, tmp_path):
    """As of an unset variable: --only would name no entry, and a path is the working directory."""
    for command in (
        ("sweep", "experiment=ci", "--only", ""),
        ("sweep", "experiment=ci", "--only="),
        ("export", "RUN", "--out", ""),
        ("report", "RUN", "--against", ""),
        ("report", ""),
        ("run", "--show-config", ""),
    ):
        code, out, err = fed_dpsd(*command)
        after = command[-2] if command[-1] == "" else command[-1]
        assert (code, out) == (2, [])
        assert f"empty value after {after}; give one, or leave it out" in err
    _, _, err = fed_dpsd("report", "nowhere", "--title=a=")
    assert "nowhere does not exist" in err
    assert not list(tmp_path.iterdir())


def test_the_package_is_the_command():
    command = [sys.executable, "-m", "fed_dpsd", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


def test_a_command_is_suggested_once(fed_dpsd):
    for words, meant in (
        (["Run"], "run"),
        (["privacy", "Plan"], "plan"),
        (["site", "chek"], "check"),
    ):
        code, _, err = fed_dpsd(*words)
        assert code == 2
        assert err.count(f"Did you mean '{meant}'?") == 1


def test_paragraphs_of_help_wrap_at_the_width_of_the_terminal():
    """No line of a paragraph is short if the next word would have fitted."""
    group = get_command(cli.app)
    for name in ("run", "report", "rehearse"):
        text = group.commands[name].help
        assert "\n" not in text.replace("\n\n", ""), name
    assert "with 5 simulated clients. Teachers" in group.commands["run"].help
