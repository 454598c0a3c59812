"""The commands `fed-dpsd sweep` and `fed-dpsd report`: grids of runs, and their tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fed_dpsd.cli.console import Overrides, console, say, say_failed
from fed_dpsd.display import shown

if TYPE_CHECKING:
    from fed_dpsd.experiment import Experiment


def sweep(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Parent of the run folders.")] = Path("runs/sweep"),
    table: Annotated[
        Path | None, typer.Option("--csv", help="The table. Default: results.csv in --out.")
    ] = None,
) -> None:
    """Run a grid, such as seed=0,1,2 answers=label,votes, or go on with one that stopped.

    The last line of stdout is the table's path.
    """
    from fed_dpsd.simulation import sweep as sweeps
    from fed_dpsd.simulation.ready import cautions, ready

    folder = out.absolute()
    path = (table or folder / "results.csv").absolute()
    cells = sweeps.plan(overrides or [], folder, Path.cwd(), say)
    sweeps.check(cells, ready)
    begun = (cell.experiment for cell in cells if not cell.finished)
    for line in dict.fromkeys(line for each in begun for line in cautions(each)):
        say(f"warning: {line}")
    with shown(console):
        failed = sweeps.run(cells, _run_cell, path, say)
    print(path, flush=True)
    for cell, error in failed.items():
        say_failed(f"failed: {cell}: {error}")
    if failed:
        raise typer.Exit(1)


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Tables of sweeps, sweeps' folders, or run folders.", metavar="PATH..."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. Default: that of the first table.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Name of a setting: show the others' differences, paired by seed."),
    ] = None,
) -> None:
    """Write tables of means over seeds, figures, and a page of both; print the path of each.

    Figures: accuracy against the proven epsilon, teacher answers, seconds and alpha; confusion.
    """
    from fed_dpsd.report import pages
    from fed_dpsd.simulation.reported import table_of

    tables = [table_of(path.absolute(), out and out.absolute()) for path in paths]
    for path in pages.write(tables, (out or tables[0].parent).absolute(), against):
        print(path)


def _run_cell(experiment: "Experiment", folder: Path) -> None:
    from fed_dpsd import api

    api.require_tracker(experiment.config.tracker)
    api.show(api.local_job(experiment, folder), console)
