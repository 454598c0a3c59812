"""The commands `fed-dpsd sweep` and `fed-dpsd report`: grids of runs, and their tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fed_dpsd.cli.console import Overrides, console, say, say_failed
from fed_dpsd.cli.run import show
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

    folder = out.absolute()
    path = (table or folder / "results.csv").absolute()
    cells = sweeps.plan(overrides or [], folder, Path.cwd(), say)
    with shown(console):
        failed = sweeps.run(cells, _run_cell, path, say)
    print(path, flush=True)
    for cell, error in failed.items():
        say_failed(f"failed: {cell}: {error}")
    if failed:
        raise typer.Exit(1)


def report(
    tables: Annotated[
        list[Path], typer.Argument(help="Tables that `fed-dpsd sweep` wrote.", metavar="CSV...")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. Default: beside the first table.")
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

    for path in pages.write(tables, (out or tables[0].parent).absolute(), against):
        print(path)


def _run_cell(experiment: "Experiment", folder: Path) -> None:
    from fed_dpsd import api

    api.check_simulated(experiment, "overrides=...")
    api.placed(experiment, 1)
    show(api.local_job(experiment, folder))
