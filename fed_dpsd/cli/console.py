"""The console: messages for people, all on stderr, and the arguments that commands share."""

from typing import Annotated

import typer
from rich.console import Console

console = Console(stderr=True, highlight=False)
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Hydra overrides, such as rounds=10 data=mnist.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def say(line: str) -> None:
    """Print a line for people, as it is."""
    console.print(line, markup=False, soft_wrap=True)


def say_failed(line: str) -> None:
    """Print an error for people, as it is."""
    console.print(line, style="red", markup=False, soft_wrap=True)
