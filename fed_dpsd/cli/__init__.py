"""The console script `fed-dpsd`: data on stdout, every word for people on stderr."""

import signal
import sys
from typing import Annotated

import typer

from fed_dpsd import __version__
from fed_dpsd.cli import bench, catalogue, privacy, rehearse, run, site, student, sweep
from fed_dpsd.cli.console import say_failed
from fed_dpsd.errors import ConfigError, ProtocolError, UserError, one_line

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


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
app.command()(run.data)
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
        for problem in error.problems if isinstance(error, ConfigError) else (one_line(error),):
            say_failed(f"error: {problem}")
        sys.exit(1)
