"""The console: messages for users, all on stderr, and the arguments shared by commands."""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from fed_dpsd.cli.completion import complete_override
from fed_dpsd.errors import UNREAD


class _Stderr(Console):
    """stderr that ends the process quietly once nothing reads it, as with `2>&1 | head`."""

    def on_broken_pipe(self) -> None:
        """Write nothing more, and exit with the same code as other commands."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        raise SystemExit(UNREAD)


console = _Stderr(stderr=True, highlight=False)
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings as KEY=VALUE, such as rounds=10 data=mnist; `fed-dpsd list` shows them all.",
        autocompletion=complete_override,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import large libraries in this block without garbage collection, a fifth faster.

    Their objects live as long as the process, so they need not be searched for garbage.
    """
    if "torch" in sys.modules:  # nothing large is left to import
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def say(line: str) -> None:
    """Print a line for users, unchanged."""
    console.print(line, markup=False, soft_wrap=True)


def say_failed(line: str) -> None:
    """Print an error for users, unchanged."""
    console.print(line, style="red", markup=False, soft_wrap=True)
