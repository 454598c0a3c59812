"""Real Flower simulations, through the command line, down to the last process."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from fed_dpsd import api
from fed_dpsd.engines.flower import superlink
from fed_dpsd.engines.placement import Placement, fraction
from tests.conftest import SMALL
from tests.environments import said_by, with_wheel

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-c", "from fed_dpsd.cli import main; main()"]
TAG = "FED_DPSD_TEST"
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def _tagged(monkeypatch, tmp_path):
    """A test's processes can be told from those of other simulations on this machine."""
    monkeypatch.setenv(TAG, str(tmp_path))


def environment(**extra):
    return os.environ | {"PYTHONPATH": str(ROOT)} | extra


def command(*arguments, checkout=ROOT):
    """Run a checkout's `fed-dpsd` in a process of its own; returns code, run folder and stderr."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=checkout,
        env=environment(PYTHONPATH=str(checkout)),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    return done.returncode, Path(lines[-1]) if lines else None, done.stderr


@contextlib.contextmanager
def begun(*arguments):
    """`fed-dpsd` in a process of its own, which ends with the block at the latest."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for(happened, process):
    """Wait until a process has come so far: minutes on a machine that does other work too."""
    deadline = time.monotonic() + 1200
    while not happened():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)


def ours():
    """Yield each process that this test's simulations have started, with its command."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environ = process.environ()
            if superlink.MARKER in environ and environ.get(TAG) == os.environ[TAG]:
                yield process, " ".join(process.cmdline())


def leftovers():
    """The commands of Flower's and Ray's processes that this test's simulations have left."""
    names = ("flower-superlink", "flower-superexec", "flwr-simulation", "raylet", "ray::")
    return [command for _, command in ours() if any(name in command for name in names)]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def small(tmp_path, *more):
    return ["run", *SMALL, f"out={tmp_path}/runs", f"cache={tmp_path}/cache", *more]


@slow
@pytest.mark.parametrize("method", ["dpdfd", "dp_dfd", "dgd"])
def test_methods_of_one_client_give_the_same_bits_on_both_engines(tmp_path, method):
    """They ask for a sum of gradients, for weights, and for a baseline."""
    places = (f"out={tmp_path}/runs", f"cache={tmp_path}/cache", "threads_server=1")
    quick = ["rounds=2", "queries_per_round=64", "teacher.min_steps=20", "teacher.epochs=0"]
    if method == "dgd":
        quick += ["method.synthetic_images=200", "method.vae_steps=5", "method.student_steps=20"]
    hashes = set()
    for engine in ("local", "flower"):
        code, folder, err = command("run", f"method={method}", *quick, *places, "--engine", engine)
        assert code == 0, err
        hashes.add(summary(folder)["student_sha256"])
    assert len(hashes) == 1


@slow
@pytest.mark.parametrize("nodes", [1, 5])
def test_any_number_of_nodes(tmp_path, nodes):
    overrides = ("num_clients=5", "training=plain", "answers=gradient")
    _, local, _ = command(*small(tmp_path, *overrides))
    shutil.rmtree(tmp_path / "cache" / "teachers")
    code, folder, err = command(
        *small(tmp_path, *overrides, "--engine", "flower", "--nodes", str(nodes))
    )
    assert code == 0, err
    assert summary(folder)["student_sha256"] == summary(local)["student_sha256"]


@slow
def test_five_in_a_row_and_two_at_once_leave_no_process_and_no_port(tmp_path):
    run = small(tmp_path, "--engine", "flower", "--nodes", "1")
    for _ in range(5):
        code, _, err = command(*run)
        assert code == 0, err
        assert not leftovers()
    results = []
    threads = [threading.Thread(target=lambda: results.append(command(*run))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [code for code, _, _ in results] == [0, 0], results
    assert len({folder for _, folder, _ in results}) == 2
    assert not leftovers()


@slow
@pytest.mark.parametrize("app", ["server_app", "client_app"])
def test_an_exception_in_an_app_is_exit_code_one_and_one_line(tmp_path, app):
    """On a copy of the checkout whose app breaks."""
    copy = tmp_path / "checkout"
    ignore = shutil.ignore_patterns(".git", "__pycache__", "runs", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=ignore)
    path = copy / app / "__init__.py"
    call = "    server.serve(" if app == "server_app" else "    return client.answer("
    raising = '    raise RuntimeError("broken on purpose")\n'
    before, _, after = path.read_text().partition(call)
    assert after
    path.write_text(f"{before}{raising}{call}{after}")
    run = small(tmp_path, "--engine", "flower", "--nodes", "1")
    code, folder, err = command(*run, checkout=copy)
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "broken on purpose" in line
    assert "Traceback" not in err
    assert summary(folder)["status"] == "failed"
    assert not leftovers()


@slow
def test_a_killed_ray_worker_is_exit_code_one_and_one_line(tmp_path):
    with begun(*small(tmp_path, "rounds=500", "--engine", "flower", "--nodes", "1")) as process:
        wait_for(lambda: any(map(Path.read_text, tmp_path.glob("runs/*/rounds.jsonl"))), process)
        workers = [worker for worker, name in ours() if name.startswith("ray::")]
        assert workers
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        out, err = process.communicate(timeout=1200)
    assert process.returncode == 1
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "hosts clients [0, 1] failed" in line
    folder = Path(out.splitlines()[-1])
    assert summary(folder)["status"] == "failed"
    assert summary(folder)["queries"]["answered_per_client"] >= 64
    assert not leftovers()


@slow
def test_a_simulation_that_is_stopped_goes_on_in_one_process(tmp_path):
    with begun(*small(tmp_path, "rounds=30", "--engine", "flower", "--nodes", "1")) as process:
        wait_for(lambda: list(tmp_path.glob("runs/*/checkpoint/*.json")), process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=1200)
    assert process.returncode == 143
    folder = Path(out.splitlines()[-1])
    assert err.splitlines()[0] == f"run folder: {folder}"
    assert "stopped by SIGTERM after round " in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith(f"continue: fed-dpsd resume {folder}")
    assert summary(folder)["error"] == "stopped by SIGTERM"
    assert not leftovers()
    code, _, err = command("resume", str(folder))
    assert code == 0, err
    assert summary(folder)["status"] == "completed"


# --- as a user types it ---


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def as_typed(tmp_path, run_config):
    """`flwr run . --run-config ...` in a fresh clone; returns its output and its runs."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    marker = "as-typed-" + tmp_path.name
    own = os.environ | {
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FED_DPSD_HOME": str(tmp_path / "home"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": free_port(),
        "FLWR_LOCAL_CONTROL_API_PORT": free_port(),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        superlink.MARKER: marker,
    }
    own.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            ["flwr", "run", ".", "--run-config", run_config, "--stream"],
            cwd=clone,
            env=own,
            capture_output=True,
            text=True,
            check=False,
            timeout=1200,  # minutes on a machine that does other work too
        )
        listed = subprocess.run(
            ["flwr", "ls", "--format", "json"],
            cwd=clone,
            env=own,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    finally:
        superlink.end_marked(marker)
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True
    )
    assert changed.stdout == ""
    return done.stdout + done.stderr, json.loads(listed[listed.index("{") :])["runs"]


@slow
@pytest.mark.ci
def test_flower_run_as_typed_on_a_fresh_clone(tmp_path):
    started = time.monotonic()
    output, (run, *_) = as_typed(tmp_path, "num_clients=5")
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
def test_flat_keys_of_flower_run_give_the_bits_of_the_command_line(tmp_path):
    """And a key that is not declared is refused, by Flower itself, which does not name it."""
    out = tmp_path / "runs"
    flat = 'num_clients=2 method="fedprox" data="digits" model="cnn" training="plain" seed=3 '
    flat += f'rounds=2 out="{out}" overrides="teacher.min_steps=20 method.proximal_weight=1"'
    output, (run, *_) = as_typed(tmp_path, flat)
    assert run["status"] == "finished:completed", output[-3000:]
    (folder,) = out.iterdir()
    typed = ["num_clients=2", "method=fedprox", "data=digits", "model=cnn", "training=plain"]
    typed += ["seed=3", "rounds=2", "teacher.min_steps=20", "method.proximal_weight=1"]
    code, local, err = command("run", *typed, f"out={tmp_path}/local", f"cache={tmp_path}/cache")
    assert code == 0, err
    assert summary(folder)["student_sha256"] == summary(local)["student_sha256"]
    again = tmp_path / "again"  # whose Flower knows no former run
    again.mkdir()
    output, runs = as_typed(again, "rouns=3")
    assert "Invalid run configuration" in output
    assert not runs


@slow
@pytest.mark.ci
def test_the_wheel_gives_the_same_bits_on_both_engines_next_to_another_flower_app(tmp_path):
    program = with_wheel(tmp_path)
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    for name in ("client_app", "server_app"):
        assert not (packages / name).exists()  # ours lie below fed_dpsd/_app
        (packages / f"{name}.py").write_text("raise RuntimeError('another Flower app')\n")
    script = packages / "fed_dpsd" / "_app" / "deploy" / "certificates.sh"
    assert os.access(script, os.X_OK)  # what docs/deployment.md needs comes with it
    assert (packages / "fed_dpsd" / "report" / "style.css").exists()  # and what pages need
    hashes = set()
    for engine in (["local"], ["flower", "--nodes", "2"]):
        done = said_by(program, tmp_path, *small(tmp_path, "num_clients=3"), "--engine", *engine)
        assert "round 3/3" in done.stderr
        assert "published 10 (label) · proven 1,921 (record, add_remove)" in done.stderr
        found = summary(Path(done.stdout.splitlines()[-1]))
        assert found["engine"] == engine[0]
        hashes.add(found["student_sha256"])
        shutil.rmtree(tmp_path / "cache" / "teachers")
    assert len(hashes) == 1
    assert not leftovers()


SHARED = Placement(("cuda:0", "cuda:1"), 3, fraction(2), 2**30, 2**29)


@pytest.mark.parametrize(
    ("placement", "asked"),
    [
        (Placement(), "num-supernodes=5 client-resources-num-cpus=1"),
        (
            SHARED,
            "num-supernodes=5 client-resources-num-cpus=1 client-resources-num-gpus=0.5 "
            "init-args-num-gpus=2 init-args-num-cpus=3",
        ),
    ],
)
def test_a_gpu_is_asked_of_ray_where_clients_are_placed_on_one(
    tmp_path, monkeypatch, placement, asked
):
    words = []
    response = {"success": True, "run-id": "7"}
    monkeypatch.setattr(superlink, "_flwr", lambda _, __, *given: words.extend(given) or response)
    assert superlink._submit(tmp_path, {}, tmp_path, {"overrides": "seed=1"}, 5, placement) == "7"
    assert words[words.index("--federation-config") + 1] == asked


def test_a_running_ray_cluster_is_not_told_what_it_has(tmp_path, monkeypatch):
    """Ray refuses to join a cluster with a number of processors or GPUs."""
    words = []
    response = {"success": True, "run-id": "7"}
    monkeypatch.setattr(superlink, "_flwr", lambda _, __, *given: words.extend(given) or response)
    for address, told in (("192.0.2.1:6379", False), ("local", True), ("", True)):
        words.clear()
        superlink._submit(tmp_path, {"RAY_ADDRESS": address}, tmp_path, {}, 5, SHARED)
        asked = words[words.index("--federation-config") + 1]
        assert "client-resources-num-gpus=0.5" in asked
        assert ("init-args-" in asked) is told


@slow
def test_ray_starts_as_many_clients_as_are_placed_on_gpus(tmp_path, monkeypatch):
    """Ray believes in the two GPUs that it is told of; the clients compute on the processor."""
    monkeypatch.setenv("FED_DPSD_HOME", str(tmp_path))
    monkeypatch.setattr("fed_dpsd.engines.ready.placed", lambda *_: SHARED)
    settings = (*SMALL, "num_clients=5", f"out={tmp_path}/runs")
    seen = []

    def count(_):
        seen.append(sum("ClientAppActor" in title for _, title in ours()))

    on_flower = api.run(*settings, engine="flower", progress=count)
    shutil.rmtree(tmp_path / "cache" / "teachers")
    local = api.run(*settings, progress=False)
    assert max(seen) == SHARED.processes
    assert on_flower.summary["student_sha256"] == local.summary["student_sha256"]
    assert not leftovers()
