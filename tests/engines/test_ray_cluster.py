"""A simulation that joins a running Ray cluster: two nodes, both on this machine.

This is the run that docs/scaling.md describes.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fed_dpsd import api
from fed_dpsd.engines.flower import QUIET
from tests.conftest import SMALL
from tests.processes import MARK, end_marked, free_port, wait_until

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def ray_node(temporary, *arguments):
    """Run a node of a Ray cluster with one processor during the block; yield its raylet.

    Its own temporary folder also keeps its address from other Ray programs of this machine.
    """
    marker = f"ray-node-{temporary}"
    (temporary / "empty").mkdir(parents=True)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--block"),
            *("--num-cpus=1", "--num-gpus=0", f"--temp-dir={temporary}"),
            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
            *(f"--object-store-memory={10**8}", "--disable-usage-stats"),
        ],
        cwd=temporary / "empty",
        env=os.environ | QUIET | {"PYTHONPATH": str(ROOT), MARK: marker},
        stdout=(temporary / "out").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        wait_until(lambda: "Ray runtime started." in (temporary / "out").read_text())
        (raylet,) = (
            child for child in psutil.Process(process.pid).children() if child.name() == "raylet"
        )
        yield raylet
    finally:
        process.send_signal(signal.SIGTERM)  # it ends what it started; `ray stop` ends every Ray
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        end_marked(marker)
        process.wait()


def clients_below(raylet):
    """Return the process ids of a raylet's client actors."""
    found = set()
    for child in raylet.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ClientAppActor" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


@pytest.mark.slow(seconds=20)
def test_two_ray_nodes_answer_as_one_process_does(tmp_path, tmp_path_factory, monkeypatch):
    settings = (*SMALL, "num_clients=4", f"out={tmp_path}/runs", f"cache={tmp_path}/cache")
    local = api.run(*settings, progress=False)
    shutil.rmtree(tmp_path / "cache" / "teachers")
    place = Path(tmp_path_factory.mktemp("r"))  # short, for the names of sockets
    head = ("--head", f"--port={free_port()}", "--include-dashboard=false")
    with contextlib.ExitStack() as nodes:
        raylets = [nodes.enter_context(ray_node(place / "a", *head))]
        address = (place / "a" / "ray_current_cluster").read_text()
        raylets.append(nodes.enter_context(ray_node(place / "b", f"--address={address}")))
        monkeypatch.setenv("RAY_ADDRESS", address)
        seen = [set(), set()]

        def look(_):
            for raylet, clients in zip(raylets, seen, strict=True):
                clients |= clients_below(raylet)

        joined = api.run(*settings, engine="flower", progress=look)
        assert [len(clients) for clients in seen] == [1, 1]
        wait_until(lambda: not any(clients_below(raylet) for raylet in raylets))
        assert all(raylet.is_running() for raylet in raylets)  # the cluster outlives the run
    assert joined.summary["student_sha256"] == local.summary["student_sha256"]
    assert not any(raylet.is_running() for raylet in raylets)
