"""Checks of a run before its folder is made: configuration, folders and this machine's devices."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fed_dpsd.accounts.account import budget_warning
from fed_dpsd.accounts.secret import require_secret
from fed_dpsd.config import require_device
from fed_dpsd.errors import UserError, is_disk_full
from fed_dpsd.experiment import Experiment, largest_partition, partitions, test_split
from fed_dpsd.models.devices import number_of_gpus, torch_device
from fed_dpsd.models.functions import require_functions
from fed_dpsd.models.precision import uses_bfloat16
from fed_dpsd.needs import require_room
from fed_dpsd.server.inputs import require_same_inputs
from fed_dpsd.server.trackers import require_tracker
from fed_dpsd.storage import app_folder, nearest_existing

Placed = TypeVar("Placed")


def check_run(
    experiment: Experiment, place: Callable[[], Placed], resumed: Path | None = None
) -> tuple[Placed, list[str]]:
    """Check that a run has what it needs on any engine; the data is read last.

    Hospitals check their own side, so a deployment is only checked for what the server needs.

    Args:
        experiment: the run's experiment.
        place: checks and places clients on this machine, such as `clients.prepare_clients`.
        resumed: the folder of a run to resume; None for a new run.

    Returns:
        What `place` returns, and the warnings of `run_warnings` and `weak_delta`.

    Raises:
        UserError: the secret of a resumed run, a Python function or a tracker is missing, a device
            does not exist or lacks the precision, the budget is too small, a folder cannot be
            written, memory or disk are too small, the data cannot be read or has changed since the
            run started, the data does not allow so many clients, or `place` raises it.
    """
    config, simulated = experiment.config, experiment.config.federation.simulation
    if resumed:
        require_secret(experiment, resumed)
    require_functions(config)
    require_tracker(config.tracker)
    key = "device" if config.client_device == config.server_device else "server_device"
    require_device(key, config.server_device, number_of_gpus())
    uses_bfloat16(config.precision, torch_device(config.server_device))  # raises if it lacks it
    warnings = run_warnings(experiment) if simulated else []
    if simulated:
        require_writable("cache", Path(config.cache))
        if config.ledger:
            require_writable("ledger", Path(config.ledger))
    if not (resumed or config.run_folder):
        require_writable("out", Path(config.out))
    require_room(experiment, new=not resumed, count=True)
    if resumed:
        require_same_inputs(experiment, resumed)
    placed = place()
    if simulated:
        partitions(experiment)
    else:
        test_split(experiment)
    return placed, [*warnings, *weak_delta(experiment)]


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


def run_warnings(experiment: Experiment) -> list[str]:
    """Return warnings about a run that will learn nothing or end early, one sentence each."""
    config = experiment.config
    charged = bool(config.ledger) and any(Path(config.ledger).glob("*"))  # earlier runs charged it
    ending = "" if charged else budget_warning(config.privacy, experiment.plan)
    return [*experiment.warnings, *([ending] if ending else [])]


def weak_delta(experiment: Experiment) -> list[str]:
    """Return a warning if delta is too large for the number of records. This reads the data.

    Only a simulation's owner may see the warning: public cards do not give the number of records.
    """
    delta, records = experiment.config.privacy.delta, largest_partition(experiment)
    if records is None or delta * records < 1:
        return []
    return [
        f"privacy.delta={delta:g} is too large for the {records:,} records of the largest client: "
        f"epsilons mean little unless delta is below 1/{records:,}; use privacy.delta=1e-05 or less"
    ]


def require_writable(key: str, folder: Path) -> None:
    """Check that the folder of a key can be created or written to, without creating it."""
    there = nearest_existing(folder)
    try:
        if not there.is_dir():
            raise NotADirectoryError
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        reason = "no space left" if is_disk_full(error) else "not writable"
        raise UserError(f"{key}={folder} is {reason}; choose another folder") from None
