"""A row of a bench, in this process: `python -m fed_dpsd.benchmarks.row FOLDER`.

FOLDER holds task.json, which rows.py writes; this process adds result.json. The numbers are taken
when the run has ended, before anything else is measured.
"""

import functools
import json
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fed_dpsd.api import Engine, new_job
from fed_dpsd.benchmarks.stages import PASSES, Clock, Passes, matmul_peak, timed
from fed_dpsd.config.compose import choices, compose
from fed_dpsd.engines.flower.superlink import run_app
from fed_dpsd.engines.placement import Placement
from fed_dpsd.engines.ready import check_simulated
from fed_dpsd.errors import ConfigError, ProtocolError, UserError, one_line
from fed_dpsd.experiment import Experiment, load_data, partitions
from fed_dpsd.models import torch_threads
from fed_dpsd.server.run_folder import versions
from fed_dpsd.server.summary import read_summary, scores_of
from fed_dpsd.storage import client_name, write_json
from fed_dpsd.sweep.grid import one_run

APP = """[project]
name = "plain-fedavg"
version = "1.0.0"

[tool.flwr.app]
publisher = "fed-dpsd"

[tool.flwr.app.components]
serverapp = "flower_fedavg:server_app"
clientapp = "flower_fedavg:client_app"

[tool.flwr.app.config]
folder = ""
"""
KEPT = ("accuracy", "queries", "seconds", "student_sha256")
PLACES = ("out", "cache", "run_folder", "ledger")


def main() -> None:
    """Do the task of a folder; an error that the user can mend is told to rows.py."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a simulation is cleaned up
    folder = Path(sys.argv[1])
    task = json.loads((folder / "task.json").read_text())
    try:
        result = check(task) if "rows" in task else measure(task, folder)
    except (UserError, ProtocolError) as error:
        problems = error.problems if isinstance(error, ConfigError) else (one_line(error),)
        result = {"problems": problems}
    write_json(folder / "result.json", result)


def check(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the bench ran on; no row may have a problem that shows before it runs.

    Raises:
        UserError: a row's configuration, or its partition, has a problem.
    """
    experiments = [composed(row["row"], row["overrides"]) for row in task["rows"]]
    for experiment in experiments:
        partitions(experiment)
    configuration = json.loads(experiments[0].to_json())
    path = configuration["data"]["path"]
    configuration["data"]["path"] = path and Path(path).name
    return {
        "versions": versions(),  # with the commit, and the name of a device
        "clients": [experiment.config.num_clients for experiment in experiments],
        "configuration": {k: v for k, v in configuration.items() if k not in PLACES},
    }


def composed(row: str, overrides: Sequence[str]) -> Experiment:
    """Return the experiment of a row.

    Raises:
        UserError: its configuration has a problem.
    """
    experiment = one_run(own_overrides(row, overrides), Path.cwd())
    check_simulated(experiment, "overrides=...")
    config = experiment.config
    if row == "fedavg" and len({config.architecture(c) for c in range(config.num_clients)}) > 1:
        raise ConfigError(
            [f"model.teachers={list(config.model.teachers)}: row fedavg averages one architecture"]
        )
    return experiment


def own_overrides(row: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a row; of a method's keys, DENSE takes those that it has too."""
    if row != "dense":
        return list(overrides)
    known = compose(["method=dense"])["method"]

    def kept(override: str) -> bool:
        group, _, key = choices(override)[0].partition(".")
        return group != "method" or key in known

    return [*filter(kept, overrides), "method=dense"]


def measure(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run a row, and return its times, its operations and what became of the run.

    Raises:
        UserError: the run failed.
    """
    clock = Clock()
    overrides = own_overrides(task["row"], task["overrides"])
    with timed(clock) as passes:
        finished = ROWS[task["row"]](overrides, folder)
    ended = time.time()
    own, others = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    memory = most_memory()
    device = None
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        most = torch.cuda.max_memory_allocated()
        peak = matmul_peak(torch.device("cuda"), 8192)
        device = {"peak_memory": most, "matmul_per_second": peak}
    return {
        "ended": ended,
        "begun": finished.begun,
        "stages": {**clock.seconds, **finished.stages},
        "processor_seconds": own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime,
        "peak_memory": memory,
        "device": device,
        "operations": operations(finished.experiment, clock, passes),
        "summary": {key: finished.summary[key] for key in KEPT}
        | {"accuracy": scores_of(finished.summary, "accuracy")},
    }


def operations(experiment: Experiment, clock: Clock, passes: Passes) -> dict[str, float] | None:
    """Return the rate of the teachers' operations, and the most that their threads reached.

    None where no teacher has answered in this process.
    """
    with torch_threads(experiment.config.threads_client):
        total = passes.operations()
        if not total:
            return None
        most = matmul_peak(torch.device("cpu"), 1024)
    rate = total / clock.seconds[PASSES]
    return {
        "teachers_per_second": rate,
        "matmul_per_second": most,
        "share_of_matmul": rate / most,
    }


def most_memory() -> int:
    """Return the most bytes that this process has had in memory.

    A process inherits `ru_maxrss` from the one that started it, which VmHWM of Linux does not.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --- the rows ---


@dataclass(frozen=True)
class Finished:
    """A run that has ended.

    Args:
        experiment: what ran.
        summary: its summary.json, with the number of images `answered` among the queries.
        begun: when its server began, in seconds since the epoch.
        stages: seconds of stages that another process has timed.
    """

    experiment: Experiment
    summary: Mapping[str, Any]
    begun: float
    stages: Mapping[str, float] = field(default_factory=dict)


def _ours(overrides: list[str], folder: Path, engine: Engine) -> Finished:
    """Run the experiment of a row on an engine of ours."""
    job = new_job(tuple(overrides), engine)
    job.run(lambda line: None)
    summary = read_summary(job.folder)
    summary["queries"]["answered"] = _lines(job.folder / "rounds.jsonl")[-1]["answered_queries"]
    requests = job.folder / "asks.jsonl"  # only a Flower server writes it
    stages = (
        {"asks": sum(line["seconds"] for line in _lines(requests))} if requests.exists() else {}
    )
    begun = (job.folder / "config.yaml").stat().st_mtime
    return Finished(job.experiment, summary, begun, stages)


def _lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def _fedavg(overrides: list[str], folder: Path) -> Finished:
    """Write the records of each client for the app, and run it."""
    experiment = composed("fedavg", overrides)
    config = experiment.config
    data = load_data(config.data, config.cache)
    names = {
        client_name(client): data.train.take(indices)
        for client, indices in enumerate(partitions(experiment))
    }
    for name, split in {**names, "test": data.test}.items():
        np.savez(folder / f"{name}.npz", images=split.images, labels=split.labels)
    settings = {
        **{key: getattr(config, key) for key in ("num_clients", "rounds", "queries_per_round")},
        **{key: getattr(config, key) for key in ("seed", "threads_client", "threads_server")},
        **{
            key: getattr(config.teacher, key) for key in ("batch_size", "learning_rate", "momentum")
        },
        "evaluate_every": config.evaluate_every,
        "images_per_round": config.queries_per_round * config.teachers_per_client,
        "architecture": config.architecture(0),
        "shape": config.data.shape,
        "num_classes": config.data.num_classes,
        "width": config.model.teacher_width,
    }
    write_json(folder / "settings.json", settings)
    app = folder / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(APP)
    shutil.copy(Path(__file__).with_name("flower_fedavg.py"), app)
    place, nodes = folder / "run", config.num_clients
    summary = run_app(
        app, {"folder": str(folder)}, experiment, place, nodes, Placement(), lambda line: None
    )
    return Finished(experiment, summary, summary["begun"])


ROWS: dict[str, Callable[[list[str], Path], Finished]] = {
    "local": functools.partial(_ours, engine="local"),
    "flower": functools.partial(_ours, engine="flower"),
    "fedavg": _fedavg,
    "dense": functools.partial(_ours, engine="local"),
}

if __name__ == "__main__":
    main()
