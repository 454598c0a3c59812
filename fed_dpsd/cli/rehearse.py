"""The command `fed-dpsd rehearse`: a deployment on this machine."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fed_dpsd.cli.console import OVERRIDE, console, say
from fed_dpsd.errors import UserError
from fed_dpsd.progress import show_progress

if TYPE_CHECKING:
    from fed_dpsd.api import Run
    from fed_dpsd.rehearsal.rehearsal import Rehearsal

RETRY = "federation.retry_seconds=20"  # links on one machine are fast


def rehearse(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings as KEY=VALUE, such as num_clients=3.", click_type=OVERRIDE),
    ] = None,
    out: Annotated[Path, typer.Option(help="Empty folder for all files of the rehearsal.")] = Path(
        "runs/rehearsal"
    ),
) -> None:
    """Rehearse a deployment on this machine: coordinator, hospitals, keys, TLS and processes.

    The last line of stdout is the run folder.

    Example: fed-dpsd rehearse num_clients=3

    Read on: docs/deployment.md
    """
    from fed_dpsd.rehearsal.rehearsal import Rehearsal
    from fed_dpsd.server.words import next_steps

    home = out.absolute()
    if home.exists() and any(home.iterdir()):
        raise UserError(f"--out {out} is not empty; give a new one, or delete it")
    with show_progress(console), Rehearsal(home, [RETRY, *(overrides or [])]) as rehearsal:
        console.print(f"started: {len(rehearsal.hospitals)} hospitals; all files are in {home}")
        finished = _run(rehearsal)
    say(str(finished))
    for line in next_steps(finished.folder, finished.summary, home / "hospital0/state/ledger"):
        say(line)
    print(finished.folder)


def _run(rehearsal: "Rehearsal") -> "Run":
    from fed_dpsd.api import Run, show_rounds
    from fed_dpsd.config.errors import quoted
    from fed_dpsd.rehearsal.rehearsal import COMPLETED
    from fed_dpsd.server.run_folder import read_log
    from fed_dpsd.server.summary import read_summary
    from fed_dpsd.server.words import describe_start

    folder, lines = rehearsal.folder / "run", list[dict[str, Any]]()
    for text in describe_start(rehearsal.experiment, folder):
        say(text)
    with show_rounds(rehearsal.experiment, console) as show:

        def look() -> None:
            for line in read_log(folder, len(lines)):
                lines.append(line)
                show(line)

        # The run has its own deadlines for hospitals; a slow machine may need hours.
        status = rehearsal.wait(
            rehearsal.submit(f"run_folder={quoted(str(folder))}"), math.inf, look
        )
    if status != COMPLETED:
        cause = read_summary(folder).get("error") or f"Flower reports {status}"
        raise UserError(f"the run failed: {cause}; see {rehearsal.folder}/coordinator/log")
    return Run(folder)
