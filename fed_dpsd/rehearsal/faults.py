"""Random faults in a rehearsed run, and checks after its end."""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fed_dpsd.config.errors import quoted
from fed_dpsd.errors import UserError
from fed_dpsd.rehearsal.rehearsal import COORDINATOR, SERVER, Rehearsal
from fed_dpsd.server.summary import read_summary

GAP_SECONDS = 60.0  # longest time between two faults: a few rounds
DOWN_SECONDS = 10.0  # longest time that a host or a link is down
PATIENCE = 900.0  # seconds for a run to end
COMPLETED = "finished:completed"
CLIENT = "keep("  # in the command line of the process that answers at a hospital


@dataclass(frozen=True)
class Fault:
    """A fault in a run."""

    number: int  # number of the fault, from 1
    seed: int  # seed of the run
    # what fails. "link" goes down and up again. "client" is a hospital's answering process, and
    # "hospital" is its whole host. "server" is the coordinator's process of the run, and
    # "superlink" is its whole host. All except the link are killed by SIGKILL.
    kind: str
    host: str  # the host with the fault
    rounds: int  # number of rounds finished before the fault
    seconds: float  # time until the host was restarted or the link was back
    outcome: str  # "went on", or "resumed" by a new run from the checkpoint


@dataclass(frozen=True)
class FaultyRun:
    """A finished run, with its faults if there were any."""

    faults: tuple[Fault, ...]
    student: str  # SHA-256 of its student
    # a line for each difference between the hospitals' ledgers and the coordinator's log of answers
    differences: tuple[str, ...]
    seconds: float  # wall-clock time from its submission to its end


def run_with_faults(
    rehearsal: Rehearsal,
    seed: int,
    first: int,
    most: int,
    say: Callable[[Fault], None],
    gap: float = GAP_SECONDS,
) -> FaultyRun:
    """Run the experiment with a seed and up to `most` random faults.

    Neither the run's name nor the noise of its secure sums depends on the faults.

    Args:
        rehearsal: the running rehearsal.
        seed: seed of the run and of its faults.
        first: number of the first fault.
        most: largest number of faults; 0 for a run without faults.
        say: called with each fault.
        gap: longest time between two faults, in seconds.
    """
    rng, started = np.random.default_rng(seed), time.monotonic()
    rehearsal.delete_answers()
    folder = rehearsal.folder / "runs" / ("faults" if most else "peace") / f"seed{seed}"
    settings = f"seed={seed}", f"run_folder={quoted(str(folder))}"
    run_id, faults = rehearsal.submit(*settings), list[Fault]()
    while not (status := rehearsal.status(run_id)).startswith("finished"):
        if time.monotonic() > started + PATIENCE + len(faults) * GAP_SECONDS * 5:
            raise UserError(f"seed={seed}: the run is still {status}; see {rehearsal.folder}")
        time.sleep(rng.uniform(0, gap) if len(faults) < most else 1)
        if len(faults) == most:
            continue
        rounds = _count_lines(folder / "rounds.jsonl")
        kind, host, seconds = _cause_fault(rehearsal, rng)
        outcome = "went on"
        if kind in ("server", "superlink") and rehearsal.wait(run_id, PATIENCE) != COMPLETED:
            started_once = (folder / "config.yaml").exists()
            run_id = rehearsal.resume(folder) if started_once else rehearsal.submit(*settings)
            outcome = "resumed"
        faults.append(Fault(first + len(faults), seed, kind, host, rounds, seconds, outcome))
        say(faults[-1])
    if status != COMPLETED:
        raise UserError(f"seed={seed}: the run is {status}; see {rehearsal.folder}")
    student = read_summary(folder)["student_sha256"]
    differences = tuple(reconcile(rehearsal, folder))
    return FaultyRun(tuple(faults), student, differences, time.monotonic() - started)


def _cause_fault(rehearsal: Rehearsal, rng: np.random.Generator) -> tuple[str, str, float]:
    """Cause a random fault and repair it; return its kind, host and seconds."""
    kinds = ("link", "client", "hospital", "server", "superlink")
    kind = str(rng.choice(kinds if rehearsal.hosts else kinds[1:]))
    number, seconds = int(rng.integers(len(rehearsal.hospitals))), rng.uniform(0, DOWN_SECONDS)
    host = f"hospital{number}" if kind in ("link", "client", "hospital") else COORDINATOR
    if kind in ("client", "server"):
        rehearsal.kill_matching(host, CLIENT if kind == "client" else SERVER)
        return kind, host, 0.0
    if kind == "link":
        rehearsal.set_link(number, "down")
    else:
        rehearsal.kill(host)
    time.sleep(seconds)
    if kind == "link":
        rehearsal.set_link(number, "up")
    elif kind == "hospital":
        rehearsal.start_hospital(number)
    else:
        rehearsal.start_superlink()
    return kind, host, round(seconds, 1)


def reconcile(rehearsal: Rehearsal, run_folder: Path) -> list[str]:
    """List the differences between hospitals' ledgers and the received answers, per request."""
    lines = [json.loads(line) for line in (run_folder / "asks.jsonl").read_text().splitlines()]
    differences = []
    for number in rehearsal.hospitals:
        received = {line["ask"] for line in lines if number in line["answered"]}
        ledger = rehearsal.hospital(number).ledger
        with ledger.transaction():
            charged = Counter(entry.request for entry in ledger.entries() if entry.request)
        name = f"hospital {number}"
        unpaid, lost = received - set(charged), set(charged) - received
        differences += [f"{name}: {request:.12} was answered but not charged" for request in unpaid]
        differences += [f"{name}: {request:.12} was charged but not received" for request in lost]
        repeated = {request: count for request, count in charged.items() if count > 1}
        differences += [
            f"{name}: {request:.12} was charged {n} times" for request, n in repeated.items()
        ]
    return differences


def _count_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0
