"""The command `fed-dpsd rehearse`: a deployment on this machine, with or without faults."""

import csv
import dataclasses
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fed_dpsd.cli.console import OVERRIDE, console, say
from fed_dpsd.errors import UserError
from fed_dpsd.progress import reporting, show_progress

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
    kills: Annotated[
        int,
        typer.Option(
            help="Number of random faults; each run is repeated without faults, for comparison."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the first run, and of its faults.")] = 0,
    loopback: Annotated[
        bool,
        typer.Option(
            "--loopback", help="Run all hosts on this machine, over its loopback interface."
        ),
    ] = False,
) -> None:
    """Rehearse a deployment on this machine: coordinator, hospitals, keys, TLS and processes.

    Hosts are network namespaces where permitted (Linux, root); otherwise all share this machine's
    namespace. With --kills, stdout has a CSV line per fault; otherwise, its last line is the run
    folder.

    Example: fed-dpsd rehearse num_clients=3

    Read on: docs/deployment.md
    """
    from fed_dpsd.rehearsal.rehearsal import Rehearsal, can_make_hosts
    from fed_dpsd.server.words import next_steps

    home = out.absolute()
    if home.exists() and any(home.iterdir()):
        raise UserError(f"--out {out} is not empty; give a new one, or delete it")
    if kills < 0:
        raise UserError(f"--kills {kills} must be >= 0; 0 rehearses without faults")
    hosts = not loopback and can_make_hosts()
    console.print(f"hosts: {'network namespaces' if hosts else 'this one, over loopback'}")
    with show_progress(console), Rehearsal(home, [RETRY, *(overrides or [])], hosts) as rehearsal:
        console.print(f"started: {len(rehearsal.hospitals)} hospitals; all files are in {home}")
        if kills:
            _run_with_faults(rehearsal, kills, seed)
            return
        finished = _run(rehearsal)
    say(str(finished))
    for line in next_steps(finished.folder, finished.summary, home / "hospital0/state/ledger"):
        say(line)
    print(finished.folder)


def _run(rehearsal: "Rehearsal") -> "Run":
    from fed_dpsd.api import Run, show_rounds
    from fed_dpsd.config.errors import quoted
    from fed_dpsd.rehearsal.faults import COMPLETED
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


def _run_with_faults(rehearsal: "Rehearsal", kills: int, seed: int) -> None:
    """Run with faults until `kills` faults have occurred, and repeat each run without faults."""
    from fed_dpsd.rehearsal.faults import Fault, run_with_faults

    writer = csv.writer(sys.stdout)
    writer.writerow([field.name for field in dataclasses.fields(Fault)])

    wrong = []
    with reporting("faults", kills) as task:

        def say(fault: Fault) -> None:
            writer.writerow(dataclasses.astuple(fault))
            sys.stdout.flush()
            task.advance()

        while task.done < kills:
            faulty = run_with_faults(rehearsal, seed, task.done + 1, kills - task.done, say)
            clean = run_with_faults(rehearsal, seed, 0, 0, say)
            same = "the same student" if faulty.student == clean.student else "A DIFFERENT STUDENT"
            console.print(
                f"seed {seed}: {len(faulty.faults)} faults, {faulty.seconds:.0f} s; without them "
                f"{same}, {clean.seconds:.0f} s; {len(faulty.differences)} differences between "
                "ledgers and requests"
            )
            wrong += [f"seed {seed}: {line}" for line in (*faulty.differences, *clean.differences)]
            if faulty.student != clean.student:
                wrong.append(f"seed {seed}: the students differ")
            seed += 1
    if wrong:
        raise UserError("; ".join(wrong))
