"""The command `fed-dpsd bench`: compare times, memory and traffic of whole runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fed_dpsd.cli.console import Overrides, say
from fed_dpsd.errors import UserError

WIDTH = 120  # smallest width of the tables: numbers do not fit into narrower ones


def bench(
    overrides: Overrides = None,
    rows: Annotated[
        str,
        typer.Option(
            help="Rows to measure, separated by commas. local: in one process; flower: through "
            "Flower. Default: both, or local with --clients. fedavg, pfl, fluke, appfl: FedAvg in "
            "Flower and in other simulators, with method=fedavg."
        ),
    ] = "",
    clients: Annotated[
        str,
        typer.Option(
            help="Numbers of clients, such as 10,100,1000; each row runs once with each number."
        ),
    ] = "",
    peers: Annotated[
        Path | None,
        typer.Option(help="Folder of the other simulators' environments: FOLDER/pfl and so on."),
    ] = None,
    repeat: Annotated[int, typer.Option(help="Number of runs of each row.")] = 3,
    out: Annotated[Path | None, typer.Option(help="File for the result as JSON.")] = None,
) -> None:
    """Measure whole runs side by side, each in its own process and from an empty cache.

    Example: fed-dpsd bench experiment=bench --rows local --repeat 1

    Read on: docs/scaling.md
    """
    from fed_dpsd.benchmarks import report
    from fed_dpsd.benchmarks import rows as benches

    chosen = rows.split(",") if rows else benches.ROWS if not clients else ("local",)
    planned = benches.plan(overrides or (), chosen, _numbers(clients))
    command = ["fed-dpsd", *sys.argv[1:]]
    content = benches.bench(planned, repeat, command, out, say, peers)
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    for name, (header, *lines) in report.filled_tables(content).items():
        shown = Table(*header, title=name, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for line in lines:
            shown.add_row(*line)
        console.print(shown)
    console.print(report.origin(content), markup=False, soft_wrap=True)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise UserError(f"--clients {text} must be whole numbers, such as 10,100,1000") from None
