"""Flower simulations: the local engine's bits, one line for a failure, and no process left."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fed_dpsd import api
from fed_dpsd.engines.flower import simulation
from fed_dpsd.engines.placement import Placement
from fed_dpsd.errors import UserError
from fed_dpsd.server.run_folder import new_run_folder
from tests.conftest import SMALL
from tests.environments import said_by, with_wheel
from tests.processes import MARK, commands_of, end_marked, free_port, marked, wait_until

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-c", "from fed_dpsd.cli import main; main()"]
FEW = ("synthetic_images=200", "vae_steps=5", "generator_steps=5", "student_steps=20")
slow = pytest.mark.slow(seconds=20)


@pytest.fixture(autouse=True)
def mark(monkeypatch, tmp_path):
    """All processes that a test starts carry its mark, and end with it."""
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield str(tmp_path)
    assert not commands_of(str(tmp_path))


@contextlib.contextmanager
def begun(*arguments):
    """`fed-dpsd` in a separate process, which ends at the latest with the block."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def places(tmp_path):
    return f"out={tmp_path}/runs", f"cache={tmp_path}/cache"


def on_flower(tmp_path, *more):
    return ["run", *SMALL, *places(tmp_path), *more, "--engine", "flower", "--nodes", "1"]


def has_rounds(tmp_path):
    return any(map(Path.read_text, tmp_path.glob("runs/*/rounds.jsonl")))


@slow
@pytest.mark.parametrize(
    ("nodes", "settings"),
    [
        (5, (*SMALL, "num_clients=5", "answers=gradient")),
        # A sum of gradients, and a baseline:
        (1, ("method=dpdfd",)),
        (1, ("method=dgd", *(f"method.{key}" for key in FEW))),
    ],
    ids=lambda case: str(case) if isinstance(case, int) else case[0],
)
def test_both_engines_give_the_same_bits(tmp_path, monkeypatch, nodes, settings):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # of flower.log
    quick = ["rounds=2", "queries_per_round=64", "teacher.min_steps=20", "teacher.epochs=0"]
    settings = [*settings, *quick, *places(tmp_path), "threads_server=1"]
    local = api.run(*settings, progress=False)
    shutil.rmtree(tmp_path / "cache" / "teachers", ignore_errors=True)
    lines = []
    flower = api.run(*settings, engine="flower", nodes=nodes, progress=lines.append)
    assert flower.summary["student_sha256"] == local.summary["student_sha256"]
    assert flower.summary["engine"] == "flower"
    assert [line["round"] for line in lines] == [1, 2]
    assert not (flower.folder / "flower.log").exists()


@slow
def test_a_killed_ray_worker_is_exit_code_one_and_one_line(tmp_path, mark):
    with begun(*on_flower(tmp_path, "rounds=500")) as process:
        wait_until(lambda: has_rounds(tmp_path), process)
        workers = [each for each in marked(mark) if each.name().startswith("ray::")]
        assert workers
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with one before
                worker.kill()
        out, err = process.communicate(timeout=1200)
    assert process.returncode == 1
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "hosts clients [0, 1] failed" in line
    folder = Path(out.splitlines()[-1])
    assert summary(folder)["status"] == "failed"
    assert summary(folder)["queries"]["answered_per_client"] >= 64
    assert (folder / "flower.log").exists()


@slow
def test_a_stopped_simulation_resumes_in_one_process(tmp_path, mark):
    with begun(*on_flower(tmp_path, "rounds=30")) as process:
        wait_until(lambda: list(tmp_path.glob("runs/*/checkpoint/*.json")), process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=1200)
    assert process.returncode == 143
    assert not commands_of(mark)
    folder = Path(out.splitlines()[-1])
    assert f"run folder: {folder}" in err.splitlines()
    assert "stopped by SIGTERM after round " in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith(f"fed-dpsd resume {folder}")
    assert summary(folder)["error"] == "stopped by SIGTERM"
    assert api.resume(folder, progress=False).summary["status"] == "completed"


@slow
def test_two_simulations_at_once_and_a_killed_one_leave_no_process(tmp_path, mark):
    with contextlib.ExitStack() as stack:
        three = [stack.enter_context(begun(*on_flower(tmp_path))) for _ in range(2)]
        three.append(stack.enter_context(begun(*on_flower(tmp_path / "killed", "rounds=500"))))
        wait_until(lambda: has_rounds(tmp_path / "killed"), three[2])
        three[2].kill()
        assert [process.wait(1200) for process in three] == [0, 0, -signal.SIGKILL]
        wait_until(lambda: not commands_of(mark))


def test_a_process_that_dies_is_one_error_and_the_run_has_failed(small, monkeypatch):
    experiment = small()
    folder = new_run_folder(experiment)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(UserError, match="simulation failed: its process ended with exit status 1"):
        simulation.simulate(experiment, folder, 1, Placement(), print)
    assert summary(folder)["status"] == "failed"


# --- as a user types it ---


def as_typed(tmp_path, run_config, mark, *more, **variables):
    """`flwr run . --run-config ...` in a fresh clone; returns its output and its runs."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    own = os.environ | {
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FED_DPSD_HOME": str(tmp_path / "home"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": free_port(),
        "FLWR_LOCAL_CONTROL_API_PORT": free_port(),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    own.pop("PYTHONPATH")
    own |= variables

    def call(*command):
        done = subprocess.run(
            command, cwd=clone, env=own, capture_output=True, text=True, check=False, timeout=1200
        )
        return done.stdout + done.stderr

    try:
        output = call("flwr", "run", ".", "--run-config", run_config, "--stream", *more)
        listed = call("flwr", "ls", "--format", "json")
    finally:
        end_marked(mark)  # Flower leaves its SuperLink running
    assert call("git", "status", "--porcelain") == ""
    return output, json.loads(listed[listed.index("{") : listed.rindex("}") + 1])["runs"]


@slow
@pytest.mark.ci
def test_flower_run_as_typed_on_a_fresh_clone(tmp_path, mark):
    started = time.monotonic()
    output, (run, *_) = as_typed(tmp_path, "num_clients=5", mark)
    assert run["status"] == "finished:completed", output[-3000:]
    (result,) = [line for line in output.splitlines() if "result: student" in line]
    proven = "proven 2.99 (record, add_remove), 6.59 (replace_one), trust nobody, delta 1e-05"
    assert f"published 10 (label) · {proven}" in result
    (folder,) = (tmp_path / "home" / "runs").iterdir()
    assert f"run folder: {folder}" in output
    scores = summary(folder)["accuracy"]
    assert scores["student"] > 0.5
    seconds = time.monotonic() - started
    print(f"{seconds:.0f} s, student {scores['student']}, ensemble {scores['ensemble']}")


@slow
def test_the_wheel_gives_the_same_bits_on_both_engines_next_to_another_flower_app(tmp_path):
    program = with_wheel(tmp_path)
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    for name in ("client_app", "server_app"):
        assert not (packages / name).exists()  # ours are in fed_dpsd/_app
        (packages / f"{name}.py").write_text("raise RuntimeError('another Flower app')\n")
    script = packages / "fed_dpsd" / "_app" / "deploy" / "certificates.sh"
    assert os.access(script, os.X_OK)  # what docs/deployment.md needs comes with it
    hashes = set()
    for engine in (["local"], ["flower", "--nodes", "2"]):
        words = ["run", *SMALL, "num_clients=3", *places(tmp_path), "--engine", *engine]
        done = said_by(program, tmp_path, *words)
        assert "round 3/3" in done.stderr
        assert "published 10 (label) · proven 1,921 (record, add_remove)" in done.stderr
        found = summary(Path(done.stdout.splitlines()[-1]))
        assert found["engine"] == engine[0]
        hashes.add(found["student_sha256"])
        shutil.rmtree(tmp_path / "cache" / "teachers")
    assert len(hashes) == 1


@slow
def test_a_bare_flower_run_shares_the_gpus_that_are_there(tmp_path, mark):
    """Two GPUs that are not there have room for a process each; Flower starts four."""
    small = ["teacher.min_steps=20", "teacher.epochs=0", "method.final_student_steps=10"]
    small += ["threads_server=1", "model.student_width=4", "model.teacher_width=4"]
    flat = f'num_clients=5 training="plain" model="cnn" rounds=2 overrides="{" ".join(small)}"'
    fakes = Path(__file__).parent / "fake_gpus"
    seen = tmp_path / "seen"
    output, (run, *_) = as_typed(
        *(tmp_path, flat, mark, "--federation-config", "num-supernodes=5 init-args-num-cpus=8"),
        PYTHONPATH=str(fakes),
        FAKE_GPUS=str(seen),
    )
    assert run["status"] == "finished:completed", output[-3000:]
    assert "5 clients on 5 nodes" in output
    assert "devices: 2 processes on cuda:0, cuda:1, each 1 of a GPU, " in output
    used = {tuple(map(str, json.loads(line))) for line in seen.read_text().splitlines()}
    shares = [(gpus, teachers) for _, gpus, teachers in used if gpus != "['0', '1']"]  # the server
    assert sorted(gpus for gpus, _ in shares) == ["['0']", "['1']"]  # a process each, never more
    assert all(0 < int(teachers) < 2**30 for _, teachers in shares)
    (folder,) = (tmp_path / "home" / "runs").iterdir()
    typed = ["num_clients=5", "training=plain", "model=cnn", "rounds=2", *small, "device=cpu"]
    local = api.run(*typed, *places(tmp_path / "local"), progress=False)
    assert summary(folder)["student_sha256"] == local.summary["student_sha256"]
