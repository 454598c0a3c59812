"""The commands `fed-dpsd run`, `resume`, `data` and `doctor`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from fed_dpsd import api
from fed_dpsd.cli.console import Overrides, console
from fed_dpsd.config import compose
from fed_dpsd.experiment import load_data, partitions, set_up
from fed_dpsd.simulation.doctor import examine


class Engine(StrEnum):
    """The places where clients may live."""

    local = "local"
    flower = "flower"


def run(
    overrides: Overrides = None,
    engine: Annotated[Engine, typer.Option(help="In this process, or a Flower simulation.")] = (
        Engine.local
    ),
    nodes: Annotated[
        int | None,
        typer.Option(help="Simulated nodes with --engine flower; default: one for each client."),
    ] = None,
) -> None:
    """Run one experiment. The last line of stdout is the run folder."""
    _finish(api.new_job(tuple(overrides or ()), engine.value, nodes))


def resume(
    run_folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
) -> None:
    """Go on from a run's last checkpoint, in this process, whatever engine it started on."""
    _finish(api.resumed_job(run_folder))


def show(job: api.Job) -> None:
    """Run a job under a progress display, and print its result for people."""
    with api.shown_progress(job.experiment, console) as progress:
        finished = job.run(progress)
    console.print(str(finished), soft_wrap=True)


def _finish(job: api.Job) -> None:
    """Run a job, and always print its run folder."""
    try:
        show(job)
    finally:
        if job.folder.exists():
            print(job.folder, flush=True)


def data(overrides: Overrides = None) -> None:
    """Show split sizes, class counts per simulated client, and a picture of the partition."""
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
        table.add_row(str(client), f"{len(part):,}", *(_cell(n, counts) for n in counts))
    Console(highlight=False).print(table)


def _cell(count: int, counts: np.ndarray) -> str:
    """Return a class count, shaded by its size relative to the client's largest class."""
    shade = " ░▒▓█"[min(4, int(np.ceil(4 * count / max(1, counts.max()))))]
    return f"{shade}{count}"


def doctor() -> None:
    """Check this machine for a run, and print the remedy of each problem."""
    table = Table("check", "state", "remedy")
    checks = examine()
    for check in checks:
        table.add_row(check.name, ("ok: " if check.good else "BAD: ") + check.state, check.remedy)
    Console(highlight=False).print(table)
    if not all(check.good for check in checks):
        raise typer.Exit(1)
