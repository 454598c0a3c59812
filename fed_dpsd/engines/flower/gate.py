"""The order in which the apps of `flwr run` start in a simulation.

Flower loads both apps in one process: the ServerApp in a thread, and the ClientApp right before it
starts Ray. The ClientApp waits here until the ServerApp has done its first checks of the run. It
then places the clients, so that Ray starts with the environment for that placement. An error on
either side ends the other side's wait.

This file needs only Flower and the standard library, because it reports what is not installed.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.constant import TaskType

from fed_dpsd.errors import UserError, one_line

LONGEST = 600.0  # seconds, in case Flower loads only one of the apps
NODES_WITHIN = 5.0  # seconds for a simulation's nodes
_checked: Future[tuple[Any, int] | None] = Future()  # the experiment and the number of nodes
_placed: Future[str] = Future()


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


# --- for the ServerApp ---


class RunFailed(Exception):
    """The failure of a Flower run, with a one-line cause; Flower's log then has no traceback.

    Flower shows the cause as the run's status details.
    """

    __traceback__ = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]


def cause_of(error: BaseException) -> str:
    """Return an error as one line, with a remedy if a package is missing."""
    if isinstance(error, ImportError):
        return f"{error}; install FedDPSD where the SuperLink runs: pip install -e ."
    return one_line(error)


def failing(error: BaseException) -> ServerApp:
    """Return a ServerApp that reports why the real ServerApp cannot be loaded."""
    app, cause = ServerApp(), cause_of(error)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        close()
        print(f"error: {cause}", flush=True)
        raise RunFailed(cause)

    return app


def place_clients(experiment: Any, nodes: int) -> str:
    """Let the ClientApp place a checked experiment's clients on devices before Ray starts.

    Returns:
        The placement as one line.

    Raises:
        UserError: a device does not exist or is too small.
        Exception: the ClientApp cannot be loaded, or cannot place clients.
    """
    _checked.set_result((experiment, nodes))
    return _placed.result(LONGEST)


def close() -> None:
    """Report that the ServerApp has ended, so that the ClientApp stops waiting for it."""
    if not _checked.done():
        _checked.set_result(None)


# --- for the ClientApp ---


def is_needed() -> bool:
    """In a simulation, wait for the ServerApp's checks; return whether clients are needed."""
    return not in_simulation() or _checked.result(LONGEST) is not None


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Pass any error in this block to a simulation's waiting ServerApp, which raises it."""
    try:
        yield
    except Exception as error:
        if not in_simulation():
            raise
        _placed.set_exception(error)


def answer(place: Callable[[Any, int], str]) -> None:
    """Place a simulation's clients with `place`, for the waiting ServerApp."""
    if in_simulation() and (checked := _checked.result()) is not None:
        _placed.set_result(place(*checked))
