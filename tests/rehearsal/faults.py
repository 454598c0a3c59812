"""Random faults in a rehearsed run, checks after its end, and hosts that can lose their link.

`python -m tests.rehearsal.faults KILLS SEED KEY=VALUE...` runs with faults until there were KILLS
of them, repeats each run without faults, and prints a CSV line per fault: results/faults.md.
"""

import contextlib
import csv
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from fed_dpsd.config.errors import quoted
from fed_dpsd.rehearsal.rehearsal import COMPLETED, COORDINATOR, Rehearsal
from fed_dpsd.server.summary import read_summary

GAP_SECONDS = 60.0  # longest time between two faults: a few rounds
DOWN_SECONDS = 10.0  # longest time that a host or a link is down
PATIENCE = 900.0  # seconds for a run to end
CLIENT = "keep("  # in the command line of the process that answers at a hospital
SERVER = "flwr-serverapp"


class Hosts(Rehearsal):
    """A rehearsal whose hosts are network namespaces (Linux, root, iproute2).

    Each is linked to the coordinator's. Where this is not permitted, all hosts are this machine.
    """

    def __init__(self, folder, overrides):
        super().__init__(folder, overrides)
        self._prefix = f"fd{os.getpid() % 10_000}"
        self.apart = os.geteuid() == 0 and shutil.which("ip") is not None
        self.apart = self.apart and ip("netns", "add", self._prefix, check=False)
        if self.apart:
            ip("netns", "del", self._prefix)
            self.listens_on = "0.0.0.0"

    def address(self, number):
        return f"10.77.{number}.1" if self.apart else super().address(number)

    def command_on(self, host, *command):
        inside = ["ip", "netns", "exec", f"{self._prefix}-{host}"] if self.apart else []
        return [*inside, *command]

    def _start(self):
        if self.apart:
            center = f"{self._prefix}-{COORDINATOR}"
            ip("netns", "add", center)
            ip("-n", center, "link", "set", "lo", "up")
            for number in self.hospitals:
                host = f"{self._prefix}-hospital{number}"
                near, far = f"{self._prefix}h{number}", f"{self._prefix}c{number}"
                ip("netns", "add", host)
                ip("link", "add", near, "netns", host, "type", "veth", "peer", far, "netns", center)
                for place, link, last in ((host, near, 2), (center, far, 1)):
                    ip("-n", place, "addr", "add", f"10.77.{number}.{last}/30", "dev", link)
                    ip("-n", place, "link", "set", link, "up")
                ip("-n", host, "link", "set", "lo", "up")
        super()._start()

    def stop(self):
        super().stop()
        for host in (COORDINATOR, *(f"hospital{n}" for n in self.hospitals)) if self.apart else ():
            name = f"{self._prefix}-{host}"
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for process in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            ip("netns", "del", name, check=False)

    def set_link(self, number, state):
        """Take a hospital's link "down" or "up"."""
        center = f"{self._prefix}-{COORDINATOR}"
        ip("-n", center, "link", "set", f"{self._prefix}c{number}", state)

    def kill_matching(self, host, command):
        """Kill the processes of a host that have `command` in their command line."""
        for process in self.processes(host):
            with contextlib.suppress(psutil.Error):
                if command in " ".join(process.cmdline()):
                    process.kill()

    def delete_answers(self):
        """Delete the answers and teachers of every hospital, but keep its secret.

        A repeated request then gets a new answer with the same values.
        """
        for number in self.hospitals:
            for name in ("ledger", "cache"):
                shutil.rmtree(self.hospital(number).folder / name, ignore_errors=True)


def ip(*arguments, check=True):
    """Run iproute2; whether it succeeded."""
    return subprocess.run(["ip", *arguments], capture_output=True, check=check).returncode == 0


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
    down_seconds: float  # time until the host was restarted or the link was back
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
    rehearsal: Hosts,
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
            raise TimeoutError(f"seed={seed}: the run is still {status}; see {rehearsal.folder}")
        time.sleep(rng.uniform(0, gap) if len(faults) < most else 1)
        if len(faults) == most:
            continue
        rounds = _count_lines(folder / "rounds.jsonl")
        kind, host, seconds = _cause_fault(rehearsal, rng)
        outcome = "went on"
        if kind in ("server", "superlink") and rehearsal.wait(run_id, PATIENCE) != COMPLETED:
            started_once = (folder / "config.yaml").exists()
            run_id = (
                rehearsal.submit_app(resume=str(folder))
                if started_once
                else rehearsal.submit(*settings)
            )
            outcome = "resumed"
        faults.append(Fault(first + len(faults), seed, kind, host, rounds, seconds, outcome))
        say(faults[-1])
    assert status == COMPLETED, f"seed={seed}: see {rehearsal.folder}"
    student = read_summary(folder)["student_sha256"]
    differences = tuple(reconcile(rehearsal, folder))
    return FaultyRun(tuple(faults), student, differences, time.monotonic() - started)


def _cause_fault(rehearsal: Hosts, rng: np.random.Generator) -> tuple[str, str, float]:
    """Cause a random fault and repair it; return its kind, host and seconds."""
    kinds = ("link", "client", "hospital", "server", "superlink")
    kind = str(rng.choice(kinds if rehearsal.apart else kinds[1:]))
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


def reconcile(rehearsal: Hosts, run_folder: Path) -> list[str]:
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


def main(kills, seed, *overrides):
    """Print a CSV line per fault, and what each pair of runs says."""
    writer = csv.writer(sys.stdout)
    writer.writerow([field.name for field in dataclasses.fields(Fault)])
    say = lambda fault: writer.writerow(dataclasses.astuple(fault))  # noqa: E731
    with Hosts(Path(tempfile.mkdtemp()), ["federation.retry_seconds=20", *overrides]) as rehearsal:
        done = 0
        while done < kills:
            faulty = run_with_faults(rehearsal, seed, done + 1, kills - done, say)
            clean = run_with_faults(rehearsal, seed, 0, 0, say)
            same = faulty.student == clean.student
            differences = *faulty.differences, *clean.differences
            print(f"seed {seed}: same student: {same}", *differences, file=sys.stderr)
            done, seed = done + len(faulty.faults), seed + 1


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
