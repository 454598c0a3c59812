"""The commands `fed-dpsd run`, `resume`, `data` and `doctor`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from fed_dpsd.cli.console import Overrides, console
from fed_dpsd.cli.show_config import ShowConfig, print_config

if TYPE_CHECKING:
    from fed_dpsd.api import Job


def run(
    overrides: Overrides = None,
    engine: Annotated[
        Literal["local", "flower"],
        typer.Option(help="local: in this process; flower: a Flower simulation of its own."),
    ] = "local",
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of nodes with --engine flower. Default: one for each client."),
    ] = None,
    show_config: ShowConfig = False,
) -> None:
    """Run one experiment, and print its folder, which is the last line of stdout.

    Without settings: FedDPSD on scikit-learn's digits, with 5 simulated clients whose teachers are
    trained with DP-SGD, at epsilon 3 for a record that is added or removed.
    """
    from fed_dpsd import api

    if show_config:
        print_config(overrides or [])
        return
    _finish(api.new_job(tuple(overrides or ()), engine, nodes))


def resume(
    run_folder: Annotated[
        Path, typer.Argument(help="Folder of the run, which it printed last.", metavar="RUN")
    ],
) -> None:
    """Continue a run that stopped, from its last checkpoint, in this process; same bits."""
    from fed_dpsd import api

    _finish(api.resumed_job(run_folder))


def show(job: "Job") -> None:
    """Run a job under a progress display, and print its result for people."""
    from fed_dpsd import api

    with api.shown_progress(job.experiment, console) as progress:
        finished = job.run(progress)
    console.print(str(finished), soft_wrap=True)


def _finish(job: "Job") -> None:
    """Run a job, and always print its run folder."""
    try:
        show(job)
    finally:
        if job.folder.exists():
            print(job.folder, flush=True)


def data(overrides: Overrides = None) -> None:
    """Show the sizes of a data set, and how many records of each class each client gets."""
    import numpy as np

    from fed_dpsd.config import compose
    from fed_dpsd.experiment import load_data, partitions, set_up

    experiment = set_up(compose(overrides or []), Path.cwd())
    config = experiment.config
    loaded = load_data(config.data, config.cache)
    console.print(
        f"{config.data.name}: {len(loaded.train):,} to train, {len(loaded.test):,} to test, "
        f"{config.data.num_classes} classes, shape {list(config.data.shape)}; "
        f"partition {experiment.partition.name}, {config.num_clients} clients"
    )
    table = Table("client", "records", box=None, padding=(0, 1, 0, 0))
    for number in range(config.data.num_classes):
        table.add_column(str(number), justify="right")
    for client, part in enumerate(partitions(experiment)):
        counts = np.bincount(loaded.train.labels[part], minlength=config.data.num_classes)
        cells = (_cell(count, max(1, counts.max())) for count in counts)
        table.add_row(str(client), f"{len(part):,}", *cells)
    Console(highlight=False).print(table)


def _cell(count: int, largest: int) -> str:
    """Return a class count, shaded by its size relative to the client's largest class."""
    shade = " ░▒▓█"[min(4, math.ceil(4 * count / largest))]
    return f"{shade}{count}"


def doctor() -> None:
    """Check this machine for a run, and print the remedy of each problem."""
    from fed_dpsd.simulation.doctor import examine

    table = Table("check", "state", "remedy")
    checks = examine()
    for check in checks:
        table.add_row(check.name, ("ok: " if check.good else "BAD: ") + check.state, check.remedy)
    Console(highlight=False).print(table)
    if not all(check.good for check in checks):
        raise typer.Exit(1)
