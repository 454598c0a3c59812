"""What a run needs of its configuration and of its folders, checked before it begins."""

import tempfile
from pathlib import Path

from fed_dpsd.accounts.account import shortfall
from fed_dpsd.accounts.card import plan_of
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment


def cautions(experiment: Experiment) -> list[str]:
    """Return what to say before a run that will teach nothing, or end early; a sentence each.

    Raises:
        UserError: its budget does not even admit the first charge.
    """
    config = experiment.config
    charged = bool(config.ledger) and any(Path(config.ledger).glob("*"))  # by earlier runs
    ending = "" if charged else shortfall(config.privacy, plan_of(experiment))
    return [*experiment.cautions, *([ending] if ending else [])]


def require_writable(key: str, folder: Path) -> None:
    """Check that the folder of a key can be made or written; nothing is made.

    Raises:
        UserError: it cannot.
    """
    there = nearest(folder)
    try:
        if not there.is_dir():
            raise NotADirectoryError
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError:
        raise UserError(f"{key}={folder} is not writable; choose another folder") from None


def nearest(folder: Path) -> Path:
    """Return a folder, or what exists nearest above it."""
    return next(path for path in (folder, *folder.parents) if path.exists())
