"""Checks of a run's configuration and folders before the run begins."""

import tempfile
from pathlib import Path

from fed_dpsd.accounts.account import budget_warning
from fed_dpsd.errors import UserError, is_disk_full
from fed_dpsd.experiment import Experiment, largest_partition


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


def nearest_existing(folder: Path) -> Path:
    """Return a folder, or its nearest existing ancestor."""
    return next(path for path in (folder, *folder.parents) if path.exists())
