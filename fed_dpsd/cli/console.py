"""The console: messages for users, all on stderr, and the arguments shared by commands."""

import contextlib
import gc
import os
import re
import sys
from collections.abc import Iterator
from typing import Annotated

import click
import typer
from click.shell_completion import CompletionItem

from fed_dpsd.errors import UNREAD
from fed_dpsd.progress import PlainConsole


class _Stderr(PlainConsole):
    """stderr that ends the process quietly once nothing reads it, as with `2>&1 | head`."""

    def on_broken_pipe(self) -> None:
        """Write nothing more, and exit with the same code as other commands."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        raise SystemExit(UNREAD)


class _Override(click.ParamType):
    """A KEY=VALUE, which shells complete: a choice of a group, or a key of the schema."""

    name = "text"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the overrides that begin as typed."""
        from fed_dpsd.config.comments import first_sentences
        from fed_dpsd.config.plugins import groups
        from fed_dpsd.config.schema import fields

        # Bash makes three words of KEY=VALUE, and replaces the last.
        words = [*(ctx.params.get("overrides") or ()), incomplete]
        *typed, begun = re.sub("\n?=\n?", "=", "\n".join(words)).split("\n")
        if not begun and typed and "=" not in typed[-1]:  # click removes a last =
            begun = f"{typed.pop()}="
        known = {
            f"{group}={choice}": line
            for group in groups()
            for choice, line in first_sentences(group).items()
        }
        # With two words for a key, shells add no blank after the =.
        values = ("",) if "=" in begun else ("", "VALUE")
        for key, field in fields().items():
            known |= {f"{key}={value}": field.description or "" for value in values}
        cut = len(begun) - len(incomplete)
        return [
            CompletionItem(word[cut:], help=line)
            for word, line in known.items()
            if word.startswith(begun) and word != begun
        ]


console = _Stderr(stderr=True)
OVERRIDE = _Override()
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings as KEY=VALUE, such as rounds=10 data=mnist; `fed-dpsd list` shows them all.",
        click_type=OVERRIDE,
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
    """Print a line for users."""
    console.print(line, soft_wrap=True)


def say_failed(line: str) -> None:
    """Print an error for users."""
    console.print(line, style="red", soft_wrap=True)
