"""The console script `fed-dpsd`: data on stdout, every word for people on stderr."""

import signal
import sys
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fed_dpsd import __version__
from fed_dpsd.cli import bench, catalogue, data, privacy, rehearse, run, site, student, sweep
from fed_dpsd.cli.console import say_failed
from fed_dpsd.errors import ConfigError, ProtocolError, UserError


class _Commands(TyperGroup):
    """The commands; an option that is none, but a key of the configuration, is explained."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was typed."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise _explained(error) from None


def _explained(error: click.NoSuchOption) -> click.UsageError:
    """Return the error of a key that was typed as an option, or the same error of any other."""
    from fed_dpsd.keys import groups
    from fed_dpsd.storage import conf_folder

    option = error.option_name
    key = option.lstrip("-").replace("-", "_")
    if key not in {name for name, *_ in catalogue.keys(conf_folder())} | set(groups()):
        return error
    words = " ".join(sys.argv).partition(option)[2].lstrip("= ").split() or ["VALUE"]
    return click.UsageError(f"{option}: settings are KEY=VALUE: {key}={words[0]}", error.ctx)


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print it."),
    ] = False,
) -> None:
    """Train one image classifier from several hospitals' data, without moving the data."""


app.command()(run.run)
app.command(context_settings={"allow_extra_args": True})(run.resume)  # which it explains
app.command()(sweep.sweep)
app.command()(sweep.report)
app.command()(bench.bench)
app.command()(data.data)
app.command("list")(catalogue.show)
app.command()(run.doctor)
app.command()(student.export)
app.command()(student.predict)
app.command()(rehearse.rehearse)
app.add_typer(privacy.app, name="privacy")
app.add_typer(site.app, name="site")


def main() -> None:
    """Run the command line; an error that the user can mend is one line, with exit code 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a simulation is cleaned up
    try:
        app()
    except (UserError, ProtocolError) as error:
        whole = (" ".join(str(error).split()),)
        for problem in error.problems if isinstance(error, ConfigError) else whole:
            say_failed(f"error: {problem}")
        sys.exit(1)
