"""Flower's ServerApp: a run of `flwr run`."""

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.engines.flower.run_config import as_typed, from_run_config, given
from fed_dpsd.errors import ProtocolError, UserError, one_line, printable
from fed_dpsd.experiment import Experiment, partitions, test_split, unused
from fed_dpsd.models.devices import number_of_gpus, require_device
from fed_dpsd.server.attendance import absent, requests_of
from fed_dpsd.server.checks import cautions, require_writable, weak_delta
from fed_dpsd.server.federation import InUse
from fed_dpsd.server.run import run
from fed_dpsd.server.run_folder import new_run_folder, open_run_folder
from fed_dpsd.server.summary import read_summary, result_line, round_text, write_failure
from fed_dpsd.server.trackers import require_tracker
from fed_dpsd.server.words import opening
from fed_dpsd.storage import print_any_text

app = ServerApp()
logger = logging.getLogger("fed_dpsd")


class RunFailed(Exception):
    """The failure of a Flower run, with a one-line cause; Flower's log shows no traceback."""

    __traceback__ = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment of `flwr run --run-config`."""
    serve(grid, context.run_config)


@contextlib.contextmanager
def _printing_utf8() -> Iterator[None]:
    """Print only valid UTF-8: Flower stops uploading its log at anything else."""
    print_any_text()
    streams = (sys.stdout, sys.stderr)
    former = [stream.write for stream in streams]
    for stream, write in zip(streams, former, strict=True):
        stream.write = lambda text, write=write: write(printable(text))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for stream, write in zip(streams, former, strict=True):
            stream.write = write  # type: ignore[method-assign]


@_printing_utf8()
def serve(grid: Grid, run_config: Mapping[str, Any]) -> None:
    """Run the experiment of `flwr run --run-config`, and print its result.

    With `resume`, resume the run of that folder; then no other key may be set. A completed run is
    not changed.

    Raises:
        RunFailed: the run failed; the error is the cause in one line.
    """
    try:
        if resumed := str(run_config.get("resume", "")):
            folder = _resumed(resumed, run_config)
            experiment = open_run_folder(folder)
            if (summary := read_summary(folder)).get("status") == "completed":
                print("already completed; nothing to do")
                _print_result(experiment, summary, folder)
                return
        else:
            experiment = from_run_config(run_config)
        _check(experiment, run_config)
        if not resumed:
            folder = new_run_folder(experiment)
    except UserError as error:
        problems = as_typed(str(error), run_config).splitlines()
        for problem in problems:
            print(f"error: {problem}", flush=True)
        raise RunFailed("; ".join(problems)) from None
    try:
        for line in opening(experiment, folder):
            print(line, flush=True)
        federation = GridFederation(experiment, grid, folder, _print_line)
        summary = run(experiment, federation, folder, _print_round)
    except Exception as error:
        if not isinstance(error, UserError | ProtocolError):
            logger.exception("the server failed")
        if not isinstance(error, InUse) and not (folder / "summary.json").exists():
            write_failure(experiment, folder, GridFederation.engine, error)
        print(f"error: {one_line(error)}\nrun folder: {folder}", flush=True)
        raise RunFailed(one_line(error)) from None
    _print_result(experiment, summary, folder)


def _resumed(path: str, run_config: Mapping[str, Any]) -> Path:
    """Return the folder of a run to resume.

    Raises:
        UserError: another key is set too, or the path is relative.
    """
    if others := [key for key in given(run_config) if key != "resume"]:
        raise UserError(f"{others[0]} is given with resume={path}: a run keeps its configuration")
    if not Path(path).is_absolute():
        raise UserError(f"resume={path} must be an absolute path, as printed at the run's end")
    return Path(path)


def _check(experiment: Experiment, run_config: Mapping[str, Any]) -> None:
    """Check what a run needs, before making its folder and waiting for hospitals.

    Raises:
        UserError: something is missing or cannot be read.
    """
    config = experiment.config
    require_tracker(config.tracker)
    key = "device" if config.client_device == config.server_device else "server_device"
    require_device(key, config.server_device, number_of_gpus())
    if config.federation.simulation:
        warnings = cautions(experiment)
        require_writable("cache", Path(config.cache))
        partitions(experiment)
        for warning in filter(None, (*warnings, *weak_delta(experiment), unused(experiment))):
            print(f"warning: {as_typed(warning, run_config)}", flush=True)
    test_split(experiment)


def _print_result(experiment: Experiment, summary: Mapping[str, Any], folder: Path) -> None:
    if not experiment.config.federation.simulation:
        for client, missed in absent(requests_of(folder)).items():
            _print_line(f"hospital {client} {missed}")
    _print_line(f"result: {result_line(experiment, summary)}\nrun folder: {folder}")


def _print_round(line: Mapping[str, Any]) -> None:
    _print_line(round_text(line))


def _print_line(line: str) -> None:
    print(line, flush=True)
