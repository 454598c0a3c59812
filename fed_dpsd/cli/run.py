"""The commands `fed-dpsd run`, `resume` and `doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fed_dpsd.cli.console import Overrides, console, importing, say
from fed_dpsd.errors import UserError
from fed_dpsd.progress import PlainConsole, show_progress, table_of

if TYPE_CHECKING:
    from fed_dpsd.api import Job


def run(
    overrides: Overrides = None,
    engine: Annotated[
        Literal["local", "flower"],
        typer.Option(help="local: in this process; flower: in a separate Flower simulation."),
    ] = "local",
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of nodes with --engine flower. Default: one for each client."
        ),
    ] = None,
    show_config: Annotated[
        bool,
        typer.Option("--show-config", help="Print the whole configuration as YAML; nothing runs."),
    ] = False,
) -> None:
    """Run one experiment. The last line of stdout is its folder.

    Without settings, it runs FedDPSD on scikit-learn's digits with 5 simulated clients. Teachers
    are trained with DP-SGD, at epsilon 3 for a record that is added or removed.

    Example: fed-dpsd run rounds=5

    Or: fed-dpsd run method=dpsd data=mnist

    Read on: docs/commands.md
    """
    with importing():
        from fed_dpsd import api

    if show_config:
        print(api.experiment_of(overrides or ()).to_yaml(), end="")
        return
    if nodes is not None and engine == "local":
        raise UserError(f"--nodes {nodes} needs --engine flower; add that option, or omit --nodes")
    with show_progress(console):  # it reads the data
        job = api.new_job(tuple(overrides or ()), engine, nodes)
    for line in job.warnings:
        say(f"warning: {line}")
    _run_and_print(job)


def resume(
    context: typer.Context,
    run_folder: Annotated[
        Path, typer.Argument(help="Folder of the run (its last line of output).", metavar="RUN")
    ],
) -> None:
    """Continue a stopped run from its last checkpoint in this process, with identical results.

    Example: fed-dpsd resume runs/RUN

    Read on: docs/commands.md
    """
    if context.args:
        context.fail(
            f"{context.args[0]}: resume takes no settings; for a longer run, start a new one "
            "(fed-dpsd run KEY=VALUE...)"
        )
    with importing():
        from fed_dpsd import api

    _run_and_print(api.resumed_job(run_folder))


def _run_and_print(job: "Job") -> None:
    """Run a job, print its result and the next commands, and last its folder, even if it fails."""
    from fed_dpsd import api
    from fed_dpsd.server.words import how_to_continue, next_steps

    try:
        if job.completed:
            say("already completed; nothing to do")
        else:
            api.announce(job, console)
        finished = api.run_and_show(job, console)
        ledgers = Path(job.experiment.config.ledger or job.folder)
        for line in next_steps(job.folder, finished.summary, ledgers):
            say(line)
    except BaseException as error:
        say(how_to_continue(job.folder, error))
        raise
    finally:
        if job.folder.exists():
            print(job.folder, flush=True)


def doctor(overrides: Overrides = None) -> None:
    """Check whether this machine can run these settings, and print a remedy for each problem.

    The run's data is read; nothing is trained or charged.

    Example: fed-dpsd doctor

    Or: fed-dpsd doctor training=plain model=cnn num_clients=20

    Read on: docs/gpus.md
    """
    with importing():
        from fed_dpsd import api
        from fed_dpsd.engines.doctor import examine, examine_run

    table = table_of("check", "state", "remedy")
    with show_progress(console):  # it reads the data
        checks = [*examine(), *examine_run(api.experiment_of(overrides or ()))]
    for check in checks:
        table.add_row(check.name, ("ok: " if check.good else "BAD: ") + check.state, check.remedy)
    PlainConsole().print(table)
    if not all(check.good for check in checks):
        raise typer.Exit(1)
