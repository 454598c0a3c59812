"""The order in which the apps of `flwr run` start a simulation.

Flower loads both apps in one process: the ServerApp in a thread, and the ClientApp right before it
starts Ray. The ClientApp waits here until the ServerApp has found the first problems of the run.
It then places the clients, so that Ray starts with the environment of that placement.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType

from fed_dpsd.errors import UserError

LONGEST = 600.0  # seconds, in case one of the apps cannot be loaded
_checked: Future[tuple[Any, int] | None] = Future()  # the experiment and the number of nodes
_placed: Future[str] = Future()


def in_simulation() -> bool:
    """Return whether this is the process of a simulation that `flwr run` started."""
    return Path(sys.argv[0]).name == TaskType.SIMULATION


def number_of_nodes(grid: Grid) -> int:
    """Return the number of a simulation's nodes, which Flower adds before it loads the apps."""
    while not (nodes := len(list(grid.get_node_ids()))):
        time.sleep(0.01)
    return nodes


# --- for the ServerApp ---


def place_clients(experiment: Any, nodes: int) -> str:
    """Let the ClientApp place a checked experiment's clients on devices, and then start Ray.

    Returns:
        The placement as one line.

    Raises:
        UserError: a device does not exist or is too small.
    """
    _checked.set_result((experiment, nodes))
    return _placed.result(LONGEST)


def close() -> None:
    """Report that the ServerApp has ended: the ClientApp need not wait for it."""
    if not _checked.done():
        _checked.set_result(None)


# --- for the ClientApp ---


def is_needed() -> bool:
    """Wait in a simulation for the ServerApp's checks; return whether clients will be needed."""
    return not in_simulation() or _checked.result(LONGEST) is not None


def answer(place: Callable[[Any, int], str]) -> None:
    """Place the clients of a simulation with `place`, for the waiting ServerApp."""
    if not in_simulation() or (checked := _checked.result()) is None:
        return
    try:
        _placed.set_result(place(*checked))
    except UserError as error:
        _placed.set_exception(error)
