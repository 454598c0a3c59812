"""The rows of a benchmark, one after another, each in a process that this one watches.

This process does not import torch: processes share the pages of loaded files, so the watched
processes would seem to need less memory.
"""

import contextlib
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from fed_dpsd.benchmarks.report import ratios, summarise
from fed_dpsd.engines.flower import QUIET
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.storage import write_json

ROWS = ("local", "flower")
# Other simulators: the script in peers/, and what to install in an environment of its own.
PEERS = {
    "fedavg": ("flower_fedavg.py", ""),
    "pfl": ("pfl_research.py", "pfl[pytorch]==0.6.0"),
    "fluke": ("fluke_fl.py", "fluke-fl==0.8.1"),
    "appfl": ("appfl_serial.py", "appfl==1.12.0"),
}
POLL_SECONDS = 0.5
MEMORY_PAUSE = 50  # after a reading of memory, which is slow, in multiples of its time
Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """A row of a bench.

    Args:
        row: one of ROWS or PEERS.
        name: its name in this bench: `row`, with the number of clients if numbers are given.
        overrides: Hydra overrides of the run.
    """

    row: str
    name: str
    overrides: tuple[str, ...]


def plan(overrides: Sequence[str], rows: Sequence[str], clients: Sequence[int]) -> list[Row]:
    """Return the rows of a bench; with numbers of clients, each row once for each number.

    Raises:
        UserError: a row is unknown, or a number is below 1.
    """
    known = (*ROWS, *PEERS)
    if unknown := [row for row in rows if row not in known]:
        raise UserError(f"--rows {','.join(rows)}: {unknown[0]!r} is not one of {', '.join(known)}")
    if wrong := [number for number in clients if number < 1]:
        raise UserError(f"--clients {wrong[0]} must be >= 1")
    if not clients:
        return [Row(row, row, tuple(overrides)) for row in dict.fromkeys(rows)]
    return [
        Row(row, f"{row}@{number}", (*overrides, f"num_clients={number}"))
        for row, number in itertools.product(dict.fromkeys(rows), sorted(set(clients)))
    ]


def command_of(row: str, peers: Path | None) -> list[str]:
    """Return the Python of another simulator's environment, FOLDER/ROW, and its script.

    Flower's environment is this one.

    Raises:
        UserError: no folder is given, or it has no such environment.
    """
    script, what = PEERS[row]
    command = [str(Path(__file__).parent / "peers" / script)]
    if not what:
        return [sys.executable, *command]
    if peers is None:
        raise UserError(f"--rows {row} needs --peers FOLDER, with an environment FOLDER/{row}")
    python = peers.absolute() / row / "bin" / "python"
    if not python.exists():
        place = peers / row
        raise UserError(
            f"--rows {row}: {place} has no Python; make it: uv venv --python 3.11 {place} && "
            f"uv pip install --python {place} '{what}' torch=={version('torch')}"
        )
    return [str(python), *command]


def bench(
    rows: Sequence[Row],
    repeat: int,
    command: Sequence[str],
    out: Path | None,
    say: Say,
    peers: Path | None = None,
) -> dict[str, Any]:
    """Measure the rows, one after the other, `repeat` times; return the content of the JSON.

    With other simulators, every row starts from decoded and split data.

    Args:
        rows: the rows that `plan` returned.
        repeat: repetitions of each row, >= 1.
        command: the words of the command, to be recorded.
        out: the file that the content is written to after every repetition, if any.
        say: called with a line before each repetition.
        peers: the folder of the environments of PEERS, if there are such rows.

    Raises:
        UserError: a row has a problem (checked before any row runs), or a run fails.
    """
    if repeat < 1:
        raise UserError(f"--repeat {repeat} must be >= 1")
    commands = {row.row: command_of(row.row, peers) for row in rows if row.row in PEERS}
    content: dict[str, Any] = {
        "command": " ".join(map(without_folder, command)),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": _machine(),
        "rows": [],
        "ratios": {},
    }
    repetitions: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
    with tempfile.TemporaryDirectory(prefix="fed-dpsd-bench-data-") as folder:
        prepared = Path(folder) if commands else None
        say("checking the configuration of every row")
        facts = _run_task({"rows": [vars(row) for row in rows]}, prepared)
        counts, images = facts["clients"], facts["images"]
        content |= {key: facts[key] for key in ("versions", "configuration")}
        for number, (place, row) in itertools.product(range(1, repeat + 1), enumerate(rows)):
            if out:
                write_json(out, content)
            say(f"repetition {number} of {repeat}: {row.name}")
            try:
                if row.row in commands:
                    found = _run_peer(commands[row.row], Path(folder) / str(counts[place]))
                else:
                    result = _run_task(vars(row), prepared)
                    found = _cost_of_run(result, counts[place], images[place])
            except UserError as error:
                raise UserError(f"row {row.name}: {error}") from None
            repetitions[row.name].append(found)
            content["rows"] = [
                {
                    **vars(each),
                    "overrides": [without_folder(override) for override in each.overrides],
                    "clients": count,
                    "statistics": summarise(repetitions[each.name]),
                    "repetitions": repetitions[each.name],
                }
                for each, count in zip(rows, counts, strict=True)
                if repetitions[each.name]
            ]
            content["ratios"] = ratios(content)
    if out:
        write_json(out, content)
    return content


def without_folder(word: str) -> str:
    """Return a word of a command, with an absolute path reduced to its last part."""
    key, equals, value = word.rpartition("=")
    return f"{key}{equals}{Path(value).name}" if value.startswith("/") else word


# --- processes ---


def _run_task(task: Mapping[str, Any], prepared: Path | None = None) -> dict[str, Any]:
    """Do a task in a separate process; return its result, as `_run_watched` does.

    Every task starts with an empty cache: it decodes its data and trains its teachers. With a
    `prepared` folder, the check of the rows fills it, and a row starts with its data.

    Raises:
        UserError: the process has reported a problem, or has died.
    """
    with tempfile.TemporaryDirectory(prefix="fed-dpsd-bench-") as temporary:
        folder = Path(temporary)
        cache = folder / "cache"
        if prepared and "rows" in task:
            cache = prepared / "cache"
        elif prepared:
            shutil.copytree(prepared / "cache", cache)
        places = (f'out="{folder}/runs"', f'cache="{cache}"')  # an override of these wins
        own = [
            {**row, "overrides": [*places, *row["overrides"]]} for row in task.get("rows", [task])
        ]
        checks = {"rows": own, "prepared": prepared and str(prepared)}
        write_json(folder / "task.json", checks if "rows" in task else own[0])
        paths = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-P", "-m", f"{__package__}.row", str(folder)]
        result = _run_watched(command, folder, {**QUIET, "PYTHONPATH": paths})
    if "problems" in result:
        raise ConfigError(result["problems"])
    return result


def _run_watched(
    command: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Run a command that writes FOLDER/result.json; return its content and when it was spawned.

    A process's own counts are exact. Flower's processes are only sampled, so the larger of both
    numbers counts, for memory and for processor time.
    """
    spawned = time.time()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends this process, which then ends that one
        )
    try:
        memory, seconds = _watch(process)
    finally:
        process.terminate()
        process.wait()
    if not (folder / "result.json").exists():
        last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"its process died ({process.returncode}): {' '.join(last)}")
    result = json.loads((folder / "result.json").read_text())
    return result | {
        "spawned": spawned,
        "peak_memory": max(memory, result.get("peak_memory", 0)),
        "processor_seconds": max(seconds, result.get("processor_seconds", 0.0)),
    }


def _run_peer(command: Sequence[str], data: Path) -> dict[str, Any]:
    """Run another simulator on prepared data; return the cost of the run.

    Args:
        command: its Python and its script, which is given a folder.
        data: a folder with data.npz and settings.json (peers/common.py).

    Raises:
        UserError: its process has died.
    """
    with tempfile.TemporaryDirectory(prefix="fed-dpsd-bench-") as temporary:
        folder = Path(temporary)
        for file in data.iterdir():
            (folder / file.name).symlink_to(file)
        result = _run_watched([*command, temporary], folder, {**QUIET, "PYTHONPATH": ""})
    total, seconds = result["ended"] - result["spawned"], result["processor_seconds"]
    return {
        "seconds": {"total": total, "rounds": result["rounds_seconds"]},
        "images": {"trained": result["images"], "per_second": result["images"] / total},
        "processor": {"seconds": seconds, "share": seconds / total / _cores()},
        "peak_memory": result["peak_memory"],
        "accuracy": {"student": result["accuracy"], "ensemble": None},
        "student_sha256": None,
    }


def _watch(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Wait for a process; return the peak memory and the processor seconds of its process tree.

    Pages that processes share count once. Ended processes keep their last processor time.
    """
    root, peak, due = psutil.Process(process.pid), 0, 0.0
    seconds: dict[psutil.Process, float] = {root: 0.0}
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            seconds = dict.fromkeys(root.children(recursive=True), 0.0) | seconds
        for each in seconds:
            with contextlib.suppress(psutil.Error):
                times = each.cpu_times()
                seconds[each] = times.user + times.system
        if time.monotonic() > due:
            began = time.process_time()
            peak = max(peak, sum(map(_memory, seconds)))
            due = time.monotonic() + MEMORY_PAUSE * (time.process_time() - began)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
    return peak, sum(seconds.values())


def _memory(process: psutil.Process) -> int:
    """Return the bytes that a process holds, with its share of shared ones; 0 if it ended."""
    try:
        held = process.memory_full_info()
    except psutil.Error:
        return 0
    return int(getattr(held, "pss", held.uss))


def _cost_of_run(result: Mapping[str, Any], clients: int, images: int | None) -> dict[str, Any]:
    """Return the cost of one run of a row, from the result of its process."""
    summary, ended, spawned = result["summary"], result["ended"], result["spawned"]
    total, start = ended - spawned, result["begun"] - spawned
    teachers, rounds = summary["seconds"]["teachers"], summary["seconds"]["rounds"]
    seconds, queries = result["processor_seconds"], summary["queries"]
    answers = queries["answered"] * clients  # 0 with a method without queries
    return {
        "seconds": {
            "total": total,
            "start": start,
            "teachers": teachers,
            "rounds": rounds,
            "rest": total - start - teachers - rounds,
        },
        "images": {"trained": images, "per_second": images and images / total},
        "queries": {
            "answered": queries["answered"],
            "per_second": queries["answered"] / rounds,
            "bytes_to_client": queries["bytes_to_clients"] / answers if answers else None,
            "bytes_to_server": queries["bytes_to_server"] / answers if answers else None,
            "forward_answers": queries["forward_answers"],
            "backward_answers": queries["backward_answers"],
        },
        "processor": {"seconds": seconds, "share": seconds / total / _cores()},
        "peak_memory": result["peak_memory"],
        "accuracy": {who: summary["accuracy"][who] for who in ("student", "ensemble")},
        "student_sha256": summary["student_sha256"],
    }


# --- the machine ---


def _machine() -> dict[str, Any]:
    """Describe the machine, without naming the host, and the load on it now."""
    listed = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.+)", listed.read_text() if listed.exists() else "")
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "load_average": list(os.getloadavg()),
    }


def _cores() -> int:
    """Return the number of cores that processes may use here."""
    return len(psutil.Process().cpu_affinity()) if psutil.LINUX else psutil.cpu_count() or 1
