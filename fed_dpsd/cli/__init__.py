"""The console script `fed-dpsd`: data on stdout, messages for users on stderr.

Knows every room, and none imports it. It parses words and prints: budgets, noise and charges are
decided in the rooms below.
"""

import inspect
import itertools
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fed_dpsd import __version__
from fed_dpsd.cli import catalogue, data, privacy, rehearse, run, site, student, sweep
from fed_dpsd.cli.console import say_failed
from fed_dpsd.errors import ConfigError, ProtocolError, UserError, is_disk_full, one_line
from fed_dpsd.storage import print_any_text

EXIT_CODES = (
    "Exit codes: 0 success, 1 an error that you can fix, 2 an invalid command line, "
    "130 stopped by Ctrl-C, 143 stopped by SIGTERM."
)
AUDIT_CODE = " 3: the audit had an unexpected outcome."
PANELS = TRY, KNOW, CLAIM, MEASURE, DEPLOY = (
    *("Run an experiment, and use its result", "Find your way", "Privacy"),
    *("Compare", "Hospitals"),
)


class _Commands(TyperGroup):
    """The commands, in the order in which newcomers need them.

    A configuration key typed as an option, and an empty value, get their own error messages.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse an empty value, often of an unset variable: a path would be this folder."""
        for before, word in itertools.pairwise(["", *args]):
            option, equals, value = word.partition("=")
            if not word or (option.startswith("--") and equals and not value):
                after = f" after {word or before}" if word or before else ""
                raise click.UsageError(f"empty value{after}; give one, or leave it out", ctx)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, panel by panel."""
        commands: Mapping[str, Any] = self.commands
        panel = {name: command.rich_help_panel for name, command in commands.items()}
        return sorted(self.commands, key=lambda name: PANELS.index(panel[name]))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise _explained(error) from None


def _explained(error: click.NoSuchOption) -> click.UsageError:
    """Return the remedy for a key typed as an option; return any other error unchanged."""
    from fed_dpsd.config.plugins import groups
    from fed_dpsd.config.schema import fields

    option = error.option_name
    key = option.lstrip("-").replace("-", "_")
    known = {each.partition(".")[0] for each in fields()}
    if key.partition(".")[0] not in {*known, *groups(), "device"}:
        return error
    words = " ".join(sys.argv).partition(option)[2].lstrip("= ").split() or ["VALUE"]
    return click.UsageError(f"{option}: settings are KEY=VALUE; write {key}={words[0]}", error.ctx)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    suggest_commands=False,  # click does
    pretty_exceptions_enable=False,
    epilog=f"{EXIT_CODES}\n\nStart with: fed-dpsd run. docs/commands.md describes every command.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train one image classifier from several hospitals' data, without moving the data."""


def _add(
    *commands: Callable[..., Any],
    panel: str = "",
    to: typer.Typer = app,
    codes: str = "",
    extra: bool = False,
) -> None:
    """Add commands, each described by its docstring.

    The last paragraphs, from "Example: ..." to "Read on: ...", end its help, with the exit codes
    before the last one. With `extra`, commands report extra arguments themselves.
    """
    for command in commands:
        # A paragraph on one line wraps at the width of the terminal.
        paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
        lines = [" ".join(each.split()) for each in paragraphs]
        first = next(n for n, line in enumerate(lines) if line.startswith("Example: "))
        to.command(
            command.__name__.rstrip("_"),
            context_settings={"allow_extra_args": extra},
            help="\n\n".join(lines[:first]),
            epilog="\n\n".join([*lines[first:-1], EXIT_CODES + codes, lines[-1]]),
            rich_help_panel=panel,
        )(command)


_add(run.run, panel=TRY)
_add(run.resume, panel=TRY, extra=True)
_add(student.export, student.predict, student.synthesize, panel=TRY)
_add(catalogue.list_, data.data, run.doctor, panel=KNOW)
app.add_typer(privacy.app, name="privacy", rich_help_panel=CLAIM)
_add(privacy.plan, to=privacy.app)
_add(privacy.audit, privacy.attack, to=privacy.app, codes=AUDIT_CODE)
_add(privacy.ledger, to=privacy.app)
_add(sweep.sweep, sweep.report, panel=MEASURE)
_add(rehearse.rehearse, panel=DEPLOY)
app.add_typer(site.app, name="site", rich_help_panel=DEPLOY)
_add(site.init, site.key, site.check, site.serve, site.list_, site.revoke, to=site.app)


def main() -> None:
    """Run the command line; errors that users can fix print one line each and exit with code 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a simulation is cleaned up
    print_any_text()
    try:
        app()
    except (UserError, ProtocolError) as error:
        whole = (" ".join(str(error).split()),)
        for problem in error.problems if isinstance(error, ConfigError) else whole:
            say_failed(f"error: {problem}")
        sys.exit(1)
    except OSError as error:  # from files that libraries write
        if not is_disk_full(error):
            raise
        say_failed(f"error: {one_line(error)}")
        sys.exit(1)
