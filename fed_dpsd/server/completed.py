"""Completed runs, for exports, reports and attacks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment
from fed_dpsd.methods.method import State
from fed_dpsd.server import checkpoint
from fed_dpsd.server.run_folder import open_run_folder
from fed_dpsd.server.summary import read_summary


@dataclass(frozen=True)
class CompletedRun:
    """A completed run, read from its folder."""

    folder: Path
    experiment: Experiment
    summary: Mapping[str, Any]
    state: State  # the last checkpoint; it has no tensors if the method keeps none


def open_completed(folder: Path) -> CompletedRun:
    """Read the folder of a completed run."""
    experiment = open_run_folder(folder)
    summary = read_summary(folder)
    if summary.get("status") != "completed":
        cause = f" ({summary['error']})" if summary.get("error") else ""
        raise UserError(
            f"{folder}: this run has not completed{cause}; continue it with `fed-dpsd resume "
            f"{folder}`, or run it again with other settings"
        )
    state = checkpoint.load(folder / "checkpoint") or State(0, {}, ())
    return CompletedRun(folder, experiment, summary, state)
