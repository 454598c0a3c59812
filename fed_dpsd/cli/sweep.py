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
    out: Annotated[Path, typer.Option(help="Folder for the runs' folders.")] = Path("runs/sweep"),
    table: Annotated[
        Path | None, typer.Option("--csv", help="File of the table. Default: results.csv in --out.")
    ] = None,
) -> None:
    """Run a grid of experiments, and print the path of its table, the last line of stdout.

    Values stand between commas, as in seed=0,1,2. The same command again skips what is finished.
    """
    from fed_dpsd.simulation import sweep as sweeps
    from fed_dpsd.simulation.ready import ready

    folder = out.absolute()
    path = (table or folder / "results.csv").absolute()
    cells = sweeps.plan(overrides or [], folder, Path.cwd(), say)
    checked = sweeps.check(cells, ready)
    for line in dict.fromkeys(line for _, warnings in checked for line in warnings):
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
        typer.Option(help="Name of a setting, with which the others are compared, seed by seed."),
    ] = None,
) -> None:
    """Write tables of means over seeds, figures, and one page of both, and print their paths.

    Figures show accuracy against the proven epsilon, against queries, against seconds and against
    partition.alpha, and which classes are confused, wherever the tables hold what they need.
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
