"""Flower's ServerApp for `flwr run`, and the server of every run on Flower."""

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fed_dpsd.config import FederationConfig
from fed_dpsd.config.bind import bind_dataclass
from fed_dpsd.config.compose import split_overrides
from fed_dpsd.engines.flower.codec import Shares
from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.engines.flower.run_config import from_run_config, given_keys, with_typed_keys
from fed_dpsd.engines.ready import check_run
from fed_dpsd.errors import ProtocolError, UserError, encodable, one_line, shown
from fed_dpsd.experiment import Experiment, unused_records
from fed_dpsd.models.devices import torch_device
from fed_dpsd.privacy.mechanism import quorum_of
from fed_dpsd.server.attendance import absences, requests_of
from fed_dpsd.server.federation import InUse
from fed_dpsd.server.run import run
from fed_dpsd.server.run_folder import new_run_folder, open_run_folder, require_checkpoint
from fed_dpsd.server.summary import read_summary, result_line, round_text, write_failure
from fed_dpsd.server.words import describe_start
from fed_dpsd.storage import print_any_text

app = ServerApp()
logger = logging.getLogger("fed_dpsd")


class RunFailed(Exception):
    """The failure of a Flower run, with a one-line cause; Flower's log then has no traceback.

    Flower shows the cause as the run's status details.
    """

    __traceback__ = property(lambda self: None, lambda self, value: None)


def _failed(cause: str) -> RunFailed:
    """Return the failure of this run, after which Flower logs no more than what is printed."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    return RunFailed(cause)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment of `flwr run --run-config`."""
    start(grid, context.run_config)


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
def start(grid: Grid, run_config: Mapping[str, Any]) -> None:
    """Run the experiment of `flwr run --run-config`, and print its result.

    With `resume`, resume the run in that folder. No other key may then be set, except that
    `overrides` may change a deployment's keys of `federation`. A completed run is left unchanged.

    Raises:
        RunFailed: the run failed; the error gives the cause in one line.
    """
    try:
        experiment, folder, shares = prepare(grid, run_config)
    except Exception as error:
        if isinstance(error, UserError):
            problems = with_typed_keys(str(error), run_config).splitlines()
        else:
            logger.exception("the server failed")
            problems = [one_line(error)]
        for problem in problems:
            print(f"error: {problem}", flush=True)
        raise _failed("; ".join(problems)) from None
    try:
        serve(experiment, grid, folder, shares)
    except Exception as error:
        print(f"error: {one_line(error)}\nrun folder: {folder}", flush=True)
        if not isinstance(error, InUse) and requests_of(folder):
            print(f"resume it with --run-config 'resume=\"{folder}\"'", flush=True)
        raise _failed(one_line(error)) from None


def prepare(grid: Grid, run_config: Mapping[str, Any]) -> tuple[Experiment, Path, Shares | None]:
    """Check that a run has what it needs.

    Args:
        grid: Flower's grid.
        run_config: the configuration of a new run, or the folder of a run to resume.

    Returns:
        The run's experiment, its folder, and the GPU shares of a simulation's client processes.

    Raises:
        UserError: as for `check_run`; no request was sent, and a new run has no folder.
    """
    resumed = _resumed(run_config)
    if resumed:
        experiment = _with_other_deadlines(open_run_folder(resumed), run_config)
    else:
        experiment = from_run_config(run_config)
    if resumed and _completed(resumed):
        return experiment, resumed, None
    config, nodes = experiment.config, len(list(grid.get_node_ids()))
    (clients, shares), warnings = check_run(
        experiment, lambda: _place_clients(experiment, nodes or config.num_clients), resumed
    )
    for warning in filter(None, (*warnings, unused_records(experiment))):
        _print_line(f"warning: {with_typed_keys(warning, run_config)}")
    if config.federation.simulation:
        server = torch_device(config.server_device)
        where = "the CPU" if server.type == "cpu" else str(server)
        _print_line(f"{config.num_clients:,} clients on {nodes:,} nodes")
        _print_line(f"devices: {clients}; the server computes on {where}")
    return experiment, resumed or new_run_folder(experiment), shares


def _place_clients(experiment: Experiment, nodes: int) -> tuple[str, Shares | None]:
    """Check and place simulated clients.

    Their code is imported here, by name, so that a coordinator of hospitals never loads it.
    """
    if not experiment.config.federation.simulation:
        return "", None
    placing = importlib.import_module("fed_dpsd.engines.flower.shares")
    placed: tuple[str, Shares | None] = placing.place_clients(experiment, nodes)
    return placed


def _resumed(run_config: Mapping[str, Any]) -> Path | None:
    """Return the folder of a run to resume, if one is given.

    Raises:
        UserError: another key is set too, or the path is relative.
    """
    path = str(run_config.get("resume", ""))
    if not path:
        return None
    if others := given_keys(run_config).keys() - {"resume", "overrides"}:
        raise UserError(
            f"{min(others)} is given with resume={path}, but a run keeps its configuration"
        )
    if not Path(path).is_absolute():
        raise UserError(f"resume={path} must be an absolute path, as printed at the run's end")
    return Path(path)


def _with_other_deadlines(experiment: Experiment, run_config: Mapping[str, Any]) -> Experiment:
    """Return a resumed deployment with the keys of `federation` in `overrides`, if any.

    They decide how many hospitals must answer and how long the run waits.

    Raises:
        UserError: there is another override, or a value does not fit the run.
    """
    config, quorum = experiment.config, quorum_of(experiment.answers)
    values = asdict(config.federation)
    for override in split_overrides(str(run_config.get("overrides", ""))):
        key, _, value = override.partition("=")
        name = key.removeprefix("federation.")
        if config.federation.simulation or name not in values.keys() - {key, "simulation"}:
            raise UserError(
                f"{override} is given with resume, but a run keeps its configuration; only a "
                "deployment's federation.min_clients and times may change"
            )
        values[name] = yaml.safe_load(value)
    federation = bind_dataclass(FederationConfig, values, "federation.")
    least, most = federation.min_clients, config.clients_per_round or config.num_clients
    fewest = quorum.threshold if quorum else 1
    if least != config.federation.min_clients and not fewest <= (least or most) <= most:
        raise UserError(
            f"federation.min_clients={least} must be a number of hospitals from {fewest} to {most}"
        )
    return replace(experiment, config=replace(config, federation=federation))


def serve(experiment: Experiment, grid: Grid, folder: Path, shares: Shares | None = None) -> None:
    """Run an experiment on a grid, and print its result; a completed run is left unchanged.

    Args:
        experiment: the run's experiment.
        grid: Flower's grid.
        folder: the run folder.
        shares: the GPU shares of a simulation's client processes; None if Ray assigns GPUs.
    """
    if _completed(folder):
        summary = read_summary(folder)
        require_checkpoint(folder, summary)
        print("already completed; nothing to do")
        _print_result(experiment, summary, folder)
        return
    try:
        for line in describe_start(experiment, folder):
            _print_line(line)
        federation = GridFederation(experiment, grid, folder, _print_line, shares)
        who = "client" if experiment.config.federation.simulation else "hospital"

        def show(line: Mapping[str, Any]) -> None:
            _print_line(round_text(line, who))

        summary = run(experiment, federation, folder, show)
    except Exception as error:
        if not isinstance(error, UserError | ProtocolError):
            logger.exception("the server failed")
        if not isinstance(error, InUse) and not (folder / "summary.json").exists():
            write_failure(experiment, folder, GridFederation.engine, error)
        raise
    _print_result(experiment, summary, folder)


def _completed(folder: Path) -> bool:
    return read_summary(folder).get("status") == "completed"


def _print_result(experiment: Experiment, summary: Mapping[str, Any], folder: Path) -> None:
    if not experiment.config.federation.simulation:
        for line in absences(folder):
            _print_line(line)
    _print_line(f"result: {result_line(experiment, summary)}\nrun folder: {folder}")


def _print_line(line: str) -> None:
    print(shown(line), flush=True)
