"""Flower's ServerApp, for runs started by `flwr run`.

This file imports neither torch nor the methods, so that a run's first problem is printed without
waiting for the imports.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from fed_dpsd.config.bind import read_run
from fed_dpsd.engines.flower import gate
from fed_dpsd.engines.flower.gate import RunFailed
from fed_dpsd.engines.flower.run_config import check_early, given_keys, with_typed_keys
from fed_dpsd.errors import UserError, encodable, one_line
from fed_dpsd.storage import print_any_text

app = ServerApp()
logger = logging.getLogger("fed_dpsd")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment of `flwr run --run-config`."""
    try:
        serve(grid, context.run_config)
    finally:
        gate.server_ended()  # before a failed run ends, Flower waits for the ClientApp and for Ray


@contextlib.contextmanager
def _printing_utf8() -> Iterator[None]:
    """Print only valid UTF-8, because any other output stops Flower from uploading its log."""
    print_any_text()
    streams = (sys.stdout, sys.stderr)
    former = [stream.write for stream in streams]
    for stream, write in zip(streams, former, strict=True):
        stream.write = lambda text, write=write: write(encodable(text))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for stream, write in zip(streams, former, strict=True):
            stream.write = write  # type: ignore[method-assign]


@_printing_utf8()
def serve(grid: Grid, run_config: Mapping[str, Any]) -> None:
    """Run the experiment of `flwr run --run-config`, and print its result.

    With `resume`, resume the run in that folder; no other key may then be set. A completed run is
    left unchanged.

    Raises:
        RunFailed: the run failed; the error gives the cause in one line.
    """
    try:
        folder = _resumed(run_config)
        values = read_run(folder) if folder else check_early(run_config)
        if gate.in_simulation():
            clients, nodes = values.get("num_clients"), gate.number_of_nodes(grid)
            print(f"{clients} clients on {nodes:,} nodes; {_devices(values)}", flush=True)
            if not (folder or gate.may_have_gpus()) and values["federation"]["simulation"]:
                gate.start_clients()
                _wake(grid)
                gate.wait_for_ray()
        from fed_dpsd.engines.flower import job  # takes seconds: torch and all methods

        experiment, folder = job.prepare(grid, run_config, folder)
    except Exception as error:
        if isinstance(error, UserError):
            problems = with_typed_keys(str(error), run_config).splitlines()
        else:
            logger.exception("the server failed")
            problems = [gate.cause_of(error)]
        for problem in problems:
            print(f"error: {problem}", flush=True)
        raise RunFailed("; ".join(problems)) from None
    try:
        job.finish(experiment, grid, folder)
    except Exception as error:
        print(f"error: {one_line(error)}\nrun folder: {folder}", flush=True)
        raise RunFailed(one_line(error)) from None


def _wake(grid: Grid) -> None:
    """Make client processes import their app while this process imports the rest."""
    nodes = sorted(grid.get_node_ids())[: os.cpu_count()]  # at most one process for each processor
    grid.push_messages(
        [Message(RecordDict(), dst_node_id=node, message_type=gate.WAKE) for node in nodes]
    )


def _devices(values: Mapping[str, Any]) -> str:
    """Describe the configured devices and the number of NVIDIA GPUs; only torch can find others."""
    sides = dict.fromkeys(str(values.get(key)) for key in ("client_device", "server_device"))
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    seen = f", {gpus} GPU{'s' * (gpus > 1)} in this machine" if gpus else ""
    return f"device={' and '.join(sides)}{seen}"


def _resumed(run_config: Mapping[str, Any]) -> Path | None:
    """Return the folder of a run to resume, if one is given.

    Raises:
        UserError: another key is set too, or the path is relative.
    """
    path = str(run_config.get("resume", ""))
    if not path:
        return None
    if others := [key for key in given_keys(run_config) if key != "resume"]:
        raise UserError(
            f"{others[0]} is given with resume={path}, but a run keeps its configuration"
        )
    if not Path(path).is_absolute():
        raise UserError(f"resume={path} must be an absolute path, as printed at the run's end")
    return Path(path)
