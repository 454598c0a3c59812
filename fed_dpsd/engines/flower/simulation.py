"""The engine `flower`, which runs a run folder's experiment in a separate Flower simulation.

The process (simulated.py) needs no SuperLink, no port and no bundle. When it ends, whatever is left
of its session is killed.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from fed_dpsd.engines.flower import QUIET, direct
from fed_dpsd.engines.placement import Placement
from fed_dpsd.errors import UserError, encodable
from fed_dpsd.experiment import Experiment
from fed_dpsd.server.run import Progress
from fed_dpsd.server.run_folder import read_log
from fed_dpsd.server.summary import read_summary, write_failure
from fed_dpsd.storage import writing

ENGINE = "flower"
ENDING_SECONDS = 30.0  # for Ray's processes to end


class SimulationFailed(UserError):
    """The simulation did not complete; the message gives the cause in one line."""


def simulate(
    experiment: Experiment, folder: Path, nodes: int, placement: Placement, progress: Progress
) -> dict[str, Any]:
    """Run the experiment of a run folder in a Flower simulation, and return its summary.

    Args:
        experiment: the experiment.
        folder: its run folder.
        nodes: number of simulated SuperNodes, >= 1; they host the clients in turn.
        placement: the GPUs of their processes, if any.
        progress: called with each line of rounds.jsonl as it appears.

    Raises:
        SimulationFailed: the run did not complete. No process is left, and Flower's log is
            flower.log in the run folder.
    """
    if str(folder) != encodable(str(folder)):
        raise UserError(f"run_folder={folder} is not valid UTF-8, which Flower requires; rename it")
    log = folder / "flower.log"
    with writing(log), log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", f"{__package__}.simulated", str(folder), str(nodes)),
                *(json.dumps(placement.backend), str(os.getpid())),
            ],
            env={
                **os.environ,
                **QUIET,
                **direct(os.environ),
                **placement.environment,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _follow(process, folder, progress)
    except (KeyboardInterrupt, SystemExit) as stop:
        _end(process)
        if read_summary(folder).get("status") != "completed":
            write_failure(experiment, folder, ENGINE, stop)
        raise
    finally:
        _end(process)
    summary = read_summary(folder)
    if summary.get("status") == "completed":
        log.unlink()
        return summary
    cause = summary.get("error") or f"its process ended with exit status {process.returncode}"
    failure = SimulationFailed(f"the Flower simulation failed: {cause}")
    if not summary:
        write_failure(experiment, folder, ENGINE, failure)
    raise failure


def _follow(process: subprocess.Popen[bytes], folder: Path, progress: Progress) -> None:
    """Report rounds as they are written, until the process ends or writes a summary."""
    seen, running = 0, True
    while running:
        running = process.poll() is None and not (folder / "summary.json").exists()
        lines = read_log(folder, seen)
        for line in lines:
            progress(line)
        seen += len(lines)
        if running:
            time.sleep(0.2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the simulation, and kill every remaining process of its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_SECONDS)
    left = []
    for each in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(each.pid) == process.pid:
                each.kill()
                left.append(each)
    process.wait()
    psutil.wait_procs(left, ENDING_SECONDS)
