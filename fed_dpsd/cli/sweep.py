"""The commands `fed-dpsd sweep` and `fed-dpsd report`: grids of runs, and their tables."""

from pathlib import Path
from typing import Annotated

import typer

from fed_dpsd.cli.console import Overrides, console, importing, say, say_failed
from fed_dpsd.report import require_path


def sweep(
    overrides: Overrides = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Names of the grid's entries to run, as in DENSE,FedDPSD. Default: all."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs' folders.")] = Path("runs/sweep"),
    table: Annotated[
        Path | None, typer.Option("--csv", help="File of the table. Default: results.csv in --out.")
    ] = None,
) -> None:
    """Run a grid of experiments; the last line of stdout is the path of its table.

    Separate values with commas, as in seed=0,1,2, or give the file of your own grid, such as
    my_grid.yaml. To resume a sweep, repeat the command.

    Example: fed-dpsd sweep seed=0,1,2 answers=label,votes

    Or: fed-dpsd sweep experiment=ci

    Read on: results/README.md
    """
    with importing():
        from fed_dpsd import api
        from fed_dpsd.sweep import sweep as sweeps

    folder = out.absolute()
    path = (table or folder / sweeps.TABLE).absolute()
    cells = sweeps.plan(overrides or [], folder, Path.cwd(), say, only or [])
    failed = api.run_cells(cells, path, console, say)
    print(path, flush=True)
    for cell, error in failed.items():
        say_failed(f"failed: {cell}: {error}")
    if failed:
        raise typer.Exit(1)


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, sweep folders or tables, or a rehearsal's folder.", metavar="PATH..."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to. Default: the folder of the first table."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Entry to compare the others with, at equal seeds and varied keys."),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page, such as the study's name.")] = "",
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Least probability at which an image counts as the second of two classes, chosen "
            "on other images. Default: chosen on half of the test images."
        ),
    ] = None,
) -> None:
    """Write a page, tables and figures, and print their paths, with the HTML page last.

    The page of a run or a deployment shows its result, how it was obtained and what is protected. A
    second page is for a privacy officer. The page of a sweep compares settings by their means over
    seeds. A page is a single file that works offline. Figures (PDF, SVG and PNG) show accuracy
    against the proven epsilon, queries, seconds and partition.alpha. A LaTeX table has a column for
    each alpha.

    Example: fed-dpsd report runs/sweep/results.csv

    Read on: results/README.md
    """
    for path in paths:  # before the imports, which take seconds
        require_path(path.absolute())
    from fed_dpsd.sweep.reported import write_report

    places = [path.absolute() for path in paths]
    for path in write_report(places, out and out.absolute(), against, threshold, say, title):
        print(path)
