"""A row of a benchmark, in this process: `python -m fed_dpsd.benchmarks.row FOLDER`.

FOLDER has task.json, which rows.py writes; this process adds result.json.
"""

import json
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fed_dpsd.api import new_job
from fed_dpsd.engines.ready import check_simulated
from fed_dpsd.errors import ConfigError, ProtocolError, UserError, one_line
from fed_dpsd.experiment import Experiment, load_data, one_run, partitions
from fed_dpsd.methods.fedavg import FedAVG
from fed_dpsd.privacy.training import Plain
from fed_dpsd.server.run_folder import versions
from fed_dpsd.server.summary import read_summary, scores_of
from fed_dpsd.storage import write_json

KEPT = ("accuracy", "queries", "seconds", "student_sha256")
PLACES = ("out", "cache", "run_folder", "ledger")


def main() -> None:
    """Do the task of a folder; report user errors to rows.py."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a simulation is cleaned up
    folder = Path(sys.argv[1])
    task = json.loads((folder / "task.json").read_text())
    try:
        result = check(task) if "rows" in task else measure(task)
    except (UserError, ProtocolError) as error:
        problems = error.problems if isinstance(error, ConfigError) else (one_line(error),)
        result = {"problems": problems}
    write_json(folder / "result.json", result)


def check(task: Mapping[str, Any]) -> dict[str, Any]:
    """Check every row before any runs, and describe the machine.

    Raises:
        UserError: a row's configuration, or its partition, has a problem.
    """
    experiments = [compose_row(row["overrides"]) for row in task["rows"]]
    for experiment in experiments:
        partitions(experiment)
        if task.get("prepared"):
            prepare(experiment, Path(task["prepared"]) / str(experiment.config.num_clients))
    configuration = json.loads(experiments[0].to_json())
    path = configuration["data"]["path"]
    configuration["data"]["path"] = path and Path(path).name
    return {
        "versions": versions(),  # with the commit, and the name of a device
        "clients": [experiment.config.num_clients for experiment in experiments],
        "images": [trained_images(experiment) for experiment in experiments],
        "configuration": {k: v for k, v in configuration.items() if k not in PLACES},
    }


def trained_images(experiment: Experiment) -> int | None:
    """Return the images of all local steps of FedAVG without noise; None for other runs."""
    config, method = experiment.config, experiment.method
    if not isinstance(method, FedAVG) or not isinstance(experiment.training, Plain):
        return None
    sizes = [
        (len(part), min(config.teacher.batch_size, len(part))) for part in partitions(experiment)
    ]
    images = sum(size // batch * batch for size, batch in sizes)
    return images * (config.teacher.epochs + (config.rounds - 1) * method.local_epochs)


def prepare(experiment: Experiment, folder: Path) -> None:
    """Write the data and the settings of FedAVG for other simulators (peers/common.py).

    Raises:
        UserError: they would not do the same work as this library.
    """
    config, method = experiment.config, experiment.method
    sizes = [len(part) for part in partitions(experiment)]
    teacher, problems = config.teacher, []
    if not isinstance(method, FedAVG) or not isinstance(experiment.training, Plain):
        problems.append("other simulators run FedAVG without noise: method=fedavg training=plain")
    elif teacher.momentum != 0 or teacher.epochs != method.local_epochs or teacher.min_steps > 1:
        problems.append(
            "other simulators take the same steps of SGD in each round: teacher.momentum=0 "
            "teacher.min_steps=1, and teacher.epochs as method.local_epochs"
        )
    if config.architecture(0) != "cnn" or config.clients_per_round is not None:
        problems.append("other simulators train all clients' cnn: model=cnn clients_per_round=null")
    if any(size % teacher.batch_size for size in sizes):
        problems.append(
            f"teacher.batch_size={teacher.batch_size} must divide each client's records"
        )
    if problems:
        raise ConfigError(problems)
    folder.mkdir(exist_ok=True)
    data = load_data(config.data, config.cache)
    train = data.train.take(np.concatenate(partitions(experiment)))
    own = {"images": train.images, "labels": train.labels, "sizes": sizes}
    np.savez(folder / "data.npz", **own, test_images=data.test.images, test_labels=data.test.labels)
    channels, side, _ = config.data.shape
    settings = {key: getattr(teacher, key) for key in ("epochs", "batch_size", "learning_rate")}
    network = {"channels": channels, "side": side, "classes": config.data.num_classes}
    settings |= {"network": network | {"width": config.model.teacher_width}}
    write_json(folder / "settings.json", settings | {"rounds": config.rounds, "seed": config.seed})


def compose_row(overrides: Sequence[str]) -> Experiment:
    """Return the experiment of a row.

    Raises:
        UserError: its configuration has a problem.
    """
    experiment = one_run(overrides, Path.cwd())
    check_simulated(experiment, "overrides=...")
    return experiment


def measure(task: Mapping[str, Any]) -> dict[str, Any]:
    """Run a row, and return its times, its memory and the results of the run.

    Raises:
        UserError: the run failed.
    """
    job = new_job(tuple(task["overrides"]), task["row"])
    lines: list[Mapping[str, Any]] = []
    job.run(lines.append)
    summary = read_summary(job.folder)
    summary["queries"]["answered"] = lines[-1]["answered_queries"]
    ended = time.time()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "ended": ended,
        "begun": (job.folder / "lock").stat().st_mtime,  # its server opens it at the start
        "processor_seconds": sum(each.ru_utime + each.ru_stime for each in used),
        "peak_memory": peak_memory(),
        "summary": {key: summary[key] for key in KEPT}
        | {"accuracy": scores_of(summary, "accuracy")},
    }


def peak_memory() -> int:
    """Return the peak memory of this process in bytes.

    A process inherits `ru_maxrss` from its parent, but not VmHWM of Linux.
    """
    status = Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    main()
