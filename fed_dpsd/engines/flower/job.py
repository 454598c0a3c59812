"""The ServerApp's job: check a run, and run its experiment."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fed_dpsd.engines.flower import gate
from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.engines.flower.run_config import from_run_config, with_typed_keys
from fed_dpsd.engines.ready import check_run
from fed_dpsd.errors import ProtocolError, UserError, shown
from fed_dpsd.experiment import Experiment, unused_records
from fed_dpsd.models.devices import torch_device
from fed_dpsd.server.attendance import incomplete_attendance, requests_of
from fed_dpsd.server.federation import InUse
from fed_dpsd.server.run import run
from fed_dpsd.server.run_folder import new_run_folder, open_run_folder, require_checkpoint
from fed_dpsd.server.summary import read_summary, result_line, round_text, write_failure
from fed_dpsd.server.words import describe_start

logger = logging.getLogger("fed_dpsd")


def prepare(
    grid: Grid, run_config: Mapping[str, Any], folder: Path | None
) -> tuple[Experiment, Path]:
    """Check that a run has what it needs, and return its experiment and run folder.

    Args:
        grid: Flower's grid.
        run_config: the configuration of a new run.
        folder: the folder of a run to resume instead.

    Raises:
        UserError: as for `check_run`; no request was sent, and a new run has no folder.
    """
    if folder is not None:
        experiment = open_run_folder(folder)
        if _completed(folder):
            return experiment, folder
    else:
        experiment = from_run_config(run_config)
    _, warnings = check_run(experiment, lambda: _place(grid, experiment), resumed=folder)
    for warning in filter(None, (*warnings, unused_records(experiment))):
        _print_line(f"warning: {with_typed_keys(warning, run_config)}")
    return experiment, folder or new_run_folder(experiment)


def _place(grid: Grid, experiment: Experiment) -> None:
    """Place and print a simulation's clients if `flwr run` simulates them in this process."""
    config = experiment.config
    if config.federation.simulation and gate.in_simulation():
        clients = gate.place_clients(experiment, gate.number_of_nodes(grid))
        server = torch_device(config.server_device)
        where = "the CPU" if server.type == "cpu" else str(server)
        print(f"devices: {clients}; the server computes on {where}", flush=True)


def finish(experiment: Experiment, grid: Grid, folder: Path) -> None:
    """Run the experiment and print its result; a completed run is left unchanged."""
    if _completed(folder):
        summary = read_summary(folder)
        require_checkpoint(folder, summary)
        print("already completed; nothing to do")
        _print_result(experiment, summary, folder)
        return
    try:
        for line in describe_start(experiment, folder):
            _print_line(line)
        federation = GridFederation(experiment, grid, folder, _print_line)
        summary = run(experiment, federation, folder, lambda line: _print_line(round_text(line)))
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
        for client, missed in incomplete_attendance(requests_of(folder)).items():
            _print_line(f"hospital {client} {missed}")
    _print_line(f"result: {result_line(experiment, summary)}\nrun folder: {folder}")


def _print_line(line: str) -> None:
    print(shown(line), flush=True)
