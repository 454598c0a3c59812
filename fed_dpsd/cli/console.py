"""The console: messages for users, all on stderr, and the arguments shared by commands."""

from typing import Annotated

import typer
from rich.console import Console

from fed_dpsd.cli.completion import override

console = Console(stderr=True, highlight=False)
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings as KEY=VALUE, such as rounds=10 data=mnist; `fed-dpsd list` has them all.",
        autocompletion=override,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def say(line: str) -> None:
    """Print a line for users, unchanged."""
    console.print(line, markup=False, soft_wrap=True)


def say_failed(line: str) -> None:
    """Print an error for users, unchanged."""
    console.print(line, style="red", markup=False, soft_wrap=True)
