"""Paths that `fed-dpsd report` is given, and the tables that they stand for."""

import dataclasses
from pathlib import Path

from fed_dpsd.errors import UserError
from fed_dpsd.server.run_folder import is_run_folder, open_run_folder
from fed_dpsd.server.summary import read_summary
from fed_dpsd.simulation.sweep import TABLE, Cell, write_tables

REPORTED = "a table of `fed-dpsd sweep`, or the folder that a sweep or a run has written"


def table_of(path: Path, out: Path | None = None) -> Path:
    """Return the table that a path stands for: itself, a sweep's, or a run's, which is written.

    Args:
        path: a table, the folder of a sweep, or a run folder.
        out: the folder that a run's table is written to; None for the run folder.

    Raises:
        UserError: there is no table, the run has not completed, or its table cannot be written.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(f"{path} is not there; give {REPORTED}")
    if is_run_folder(path):
        return _table_of_run(path, (out or path) / TABLE)
    if not (path / TABLE).is_file():
        raise UserError(f"{path} holds neither a table nor a run; give {REPORTED}")
    return path / TABLE


def _table_of_run(folder: Path, table: Path) -> Path:
    """Write the table of one run, as a sweep with one cell has it."""
    experiment, summary = open_run_folder(folder), read_summary(folder)
    if summary.get("status") != "completed":
        error = summary.get("error") or "it was stopped, or is still under way"
        raise UserError(
            f"{folder}: the run has not completed: {error}; go on: fed-dpsd resume {folder}"
        )
    config = dataclasses.replace(experiment.config, run_folder=str(folder))
    experiment = dataclasses.replace(experiment, config=config)
    try:
        table.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{table} cannot be written ({error.strerror}); choose --out") from None
    write_tables(table, [Cell(folder.name, folder.name, "", {}, experiment)])
    return table
