"""The order in which the apps of `flwr run` start in a simulation.

Flower loads both apps in one process: the ServerApp in a thread, and the ClientApp right before it
starts Ray. The ClientApp waits here until the ServerApp has done its first checks of the run, and,
on a machine with GPUs, has let it place the clients, so that Ray starts with the environment for
that placement. Without GPUs, Ray starts while the ServerApp imports torch.

This file needs only Flower and the standard library, because it reports what is not installed.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.constant import TaskType

from fed_dpsd.errors import UserError, one_line

LONGEST = 600.0  # seconds, in case Flower loads only one of the apps
NODES_WITHIN = 5.0  # seconds for a simulation's nodes
RAY_WITHIN = 5.0  # seconds for Ray to start
WAKE = "query.wake"  # the message after which a simulation's client process imports its app
GPU_FILES = ("nvidia[0-9]*", "dxg", "kfd")  # in /dev, of any GPU that torch may find
_needed: Future[bool] = Future()  # whether the run needs clients
_place: Future[Callable[[Any, int], str]] = Future()  # for an experiment and a number of nodes


def in_simulation() -> bool:
    """Return whether this is the process of a simulation that `flwr run` started."""
    return Path(sys.argv[0]).name == TaskType.SIMULATION


def number_of_nodes(grid: Grid) -> int:
    """Return the number of nodes in a simulation; Flower adds them before it loads the apps.

    Raises:
        UserError: there are none.
    """
    until = time.monotonic() + NODES_WITHIN
    while not (nodes := len(list(grid.get_node_ids()))):
        if time.monotonic() > until:
            raise UserError(
                "the simulation has no nodes: num-supernodes must be at least 1, as in "
                "--federation-config num-supernodes=5"
            )
        time.sleep(0.01)
    return nodes


def may_have_gpus() -> bool:
    """Return whether torch, whose import takes seconds, could find a GPU in this machine."""
    return any(any(Path("/dev").glob(file)) for file in GPU_FILES)


# --- for the ServerApp ---


class RunFailed(Exception):
    """The failure of a Flower run, with a one-line cause; Flower's log then has no traceback.

    Flower shows the cause as the run's status details.
    """

    __traceback__ = property(lambda self: None, lambda self, value: None)


def cause_of(error: BaseException) -> str:
    """Return an error as one line, with a remedy if a package is missing."""
    if isinstance(error, ImportError):
        return f"{error}; install FedDPSD where the SuperLink runs: pip install -e ."
    return one_line(error)


def failing_app(error: BaseException) -> ServerApp:
    """Return a ServerApp that reports why the real ServerApp cannot be loaded."""
    app, cause = ServerApp(), cause_of(error)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        server_ended()
        print(f"error: {cause}", flush=True)
        raise RunFailed(cause)

    return app


def place_clients(experiment: Any, nodes: int) -> str:
    """Check an experiment's clients and place them on devices, with the ClientApp's function.

    Returns:
        The placement as one line.

    Raises:
        UserError: the clients lack something.
        Exception: the rest of the ClientApp cannot be imported, or cannot place clients.
    """
    line = _place.result(LONGEST)(experiment, nodes)
    start_clients()
    return line


def start_clients() -> None:
    """Let Flower start Ray and the clients."""
    if not _needed.done():
        _needed.set_result(True)


def wait_for_ray() -> None:
    """Wait until Ray has started, which takes longer while this process imports other things."""
    until = time.monotonic() + RAY_WITHIN
    while time.monotonic() < until:
        started = getattr(sys.modules.get("ray"), "is_initialized", bool)
        if started():
            return
        time.sleep(0.01)


def server_ended() -> None:
    """Report that the ServerApp has ended, so that the ClientApp stops waiting for it."""
    if not _needed.done():
        _needed.set_result(False)


# --- for the ClientApp ---


def wait_until_needed(place: Callable[[Any, int], str]) -> bool:
    """Give the ServerApp a function that places clients, and wait until it starts them.

    Returns:
        Whether clients are needed; otherwise, the run has failed.
    """
    _place.set_result(place)
    return _needed.result(LONGEST)
