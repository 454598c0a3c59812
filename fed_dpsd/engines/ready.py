"""Checks of a new run: configuration, folders and this machine's devices."""

from collections.abc import Sequence
from pathlib import Path

from fed_dpsd.accounts.database import header, ledger_path
from fed_dpsd.client.teacher_file import read_teacher
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.engines.clients import data_of
from fed_dpsd.engines.placement import Placement, placed
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment, partitions
from fed_dpsd.models import pictures
from fed_dpsd.models.devices import choose
from fed_dpsd.models.functions import require_functions
from fed_dpsd.models.precision import require_precision
from fed_dpsd.server.checks import cautions, require_writable, weak_delta
from fed_dpsd.storage import app_folder


def ready(
    experiment: Experiment, overrides: Sequence[str], nodes: int = 1
) -> tuple[Placement, list[str]]:
    """Check that a new run has what it needs, before making its folder, and place its clients.

    Returns:
        The placement, and the `cautions` and `weak_delta`.

    Raises:
        UserError: a Python function is missing, the clients are hospitals, a device does not exist
            or lacks the precision, the budget is too small, a folder cannot be written, a ledger
            belongs to other records, the data does not allow so many clients, or pictures or
            teachers cannot be read.
    """
    text = " ".join(overrides)
    require_functions(experiment.config)
    check_simulated(experiment, f'overrides="{text}"')
    placement, config = placed(experiment, nodes), experiment.config
    require_precision(config.precision, choose(config.server_device))
    warnings = cautions(experiment)
    require_writable("cache", Path(config.cache))
    if config.ledger:
        require_writable("ledger", Path(config.ledger))
        _require_own_ledgers(experiment, Path(config.ledger))
    if not config.run_folder:
        require_writable("out", Path(config.out))
    if config.pictures:
        pictures.load(config.pictures, config.data.shape[1])
    if config.teacher.path is not None:
        files = config.num_clients if "{client}" in config.teacher.path else 1
        for client in range(files):
            read_teacher(make_teacher(config, client, 0), config, client)
    partitions(experiment)
    return placement, [*warnings, *weak_delta(experiment)]


def _require_own_ledgers(experiment: Experiment, folder: Path) -> None:
    """Check that existing ledgers belong to the clients' own records."""
    for client in range(experiment.config.num_clients):
        path, own = ledger_path(folder, client), data_of(experiment, client)
        if path.exists() and (found := header(path).get("data", own)) != own:
            raise UserError(
                f"ledger={folder}: {path.name} belongs to other records ({found}); this run's are "
                f"{own}. A budget is for one data set and client; choose another folder"
            )


def check_simulated(experiment: Experiment, run_config: str) -> None:
    """Check that the clients of a run are simulated.

    Raises:
        UserError: the clients are hospitals; the message explains how to reach them.
    """
    if not experiment.config.federation.simulation:
        raise UserError(
            "federation=deployment: the clients of this run are hospitals, which only Flower can "
            f"reach: flwr run {app_folder()} FEDERATION --run-config '{run_config}', with the "
            "federation of docs/deployment.md; `fed-dpsd rehearse` rehearses it on this machine"
        )
