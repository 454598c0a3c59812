"""A row of a benchmark, in this process: `python -m fed_dpsd.benchmarks.row FOLDER`.

FOLDER has task.json, which rows.py writes; this process adds result.json.
"""

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fed_dpsd.api import new_job
from fed_dpsd.config.compose import choices, compose
from fed_dpsd.engines.placement import Placement
from fed_dpsd.engines.ready import check_simulated
from fed_dpsd.errors import ConfigError, ProtocolError, UserError, one_line
from fed_dpsd.experiment import Experiment, load_data, one_run, partitions
from fed_dpsd.methods.fedavg import FedAVG
from fed_dpsd.privacy.training import Plain
from fed_dpsd.server.run_folder import versions
from fed_dpsd.server.summary import read_summary, scores_of
from fed_dpsd.storage import client_name, write_json

KEPT = ("accuracy", "queries", "seconds", "student_sha256")
PLACES = ("out", "cache", "run_folder", "ledger")


def main() -> None:
    """Do the task of a folder; report user errors to rows.py."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a simulation is cleaned up
    folder, status = Path(sys.argv[1]), 1
    task = json.loads((folder / "task.json").read_text())
    try:
        try:
            result = check(task) if "rows" in task else measure(task, folder)
        except (UserError, ProtocolError) as error:
            problems = error.problems if isinstance(error, ConfigError) else (one_line(error),)
            result = {"problems": problems}
        write_json(folder / "result.json", result)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a thread of Flower may still be waiting


def check(task: Mapping[str, Any]) -> dict[str, Any]:
    """Check every row before any runs, and describe the machine.

    Raises:
        UserError: a row's configuration, or its partition, has a problem.
    """
    experiments = [composed(row["row"], row["overrides"]) for row in task["rows"]]
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


def composed(row: str, overrides: Sequence[str]) -> Experiment:
    """Return the experiment of a row.

    Raises:
        UserError: its configuration has a problem.
    """
    experiment = one_run(own_overrides(row, overrides), Path.cwd())
    check_simulated(experiment, "overrides=...")
    config = experiment.config
    if row == "fedavg" and len(set(map(config.architecture, range(config.num_clients)))) > 1:
        raise ConfigError(
            [f"model.teachers={list(config.model.teachers)}: row fedavg needs one architecture"]
        )
    return experiment


def own_overrides(row: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a row; DENSE drops the keys of `method` that it does not have."""
    if row != "dense":
        return list(overrides)
    known = compose(["method=dense"])["method"]

    def kept(override: str) -> bool:
        group, _, key = choices(override)[0].partition(".")
        return group != "method" or key in known

    return [*filter(kept, overrides), "method=dense"]


def measure(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run a row, and return its times, its memory and the results of the run.

    Raises:
        UserError: the run failed.
    """
    row = task["row"]
    overrides = own_overrides(row, task["overrides"])
    if row == "fedavg":
        summary = _fedavg(overrides, folder)
    else:
        summary = _ours(overrides, "flower" if row == "flower" else "local")
    ended = time.time()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "ended": ended,
        "begun": summary["begun"],
        "processor_seconds": sum(each.ru_utime + each.ru_stime for each in used),
        "peak_memory": most_memory(),
        "summary": {key: summary[key] for key in KEPT}
        | {"accuracy": scores_of(summary, "accuracy")},
    }


def most_memory() -> int:
    """Return the peak memory of this process in bytes.

    A process inherits `ru_maxrss` from its parent, but not VmHWM of Linux.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# --- the rows: each returns its summary, with `begun` and queries.answered ---


def _ours(overrides: list[str], engine: Literal["local", "flower"]) -> dict[str, Any]:
    """Run the experiment of a row on one of this library's engines."""
    job = new_job(tuple(overrides), engine)
    lines: list[Mapping[str, Any]] = []
    job.run(lines.append)
    summary = read_summary(job.folder)
    summary["queries"]["answered"] = lines[-1]["answered_queries"]
    summary["begun"] = (job.folder / "lock").stat().st_mtime  # its server opens it at the start
    return summary


def _fedavg(overrides: list[str], folder: Path) -> dict[str, Any]:
    """Write each client's records for the plain Flower app, and simulate it here."""
    from flwr.simulation import run_simulation

    from fed_dpsd.benchmarks import flower_fedavg as plain

    experiment = composed("fedavg", overrides)
    config = experiment.config
    data = load_data(config.data, config.cache)
    splits = {
        client_name(client): data.train.take(indices)
        for client, indices in enumerate(partitions(experiment))
    }
    for name, split in {**splits, "test": data.test}.items():
        np.savez(folder / f"{name}.npz", images=split.images, labels=split.labels)
    own = ("num_clients", "rounds", "queries_per_round", "seed", "evaluate_every")
    own += ("threads_client", "threads_server")
    teacher = ("batch_size", "learning_rate", "momentum")
    settings = {
        **{key: getattr(config, key) for key in own},
        **{key: getattr(config.teacher, key) for key in teacher},
        "images_per_round": config.queries_per_round * config.teachers_per_client,
        "epochs": getattr(experiment.method, "local_epochs", None),
        "architecture": config.architecture(0),
        "shape": config.data.shape,
        "num_classes": config.data.num_classes,
        "width": config.model.teacher_width,
    }
    write_json(folder / "settings.json", settings)
    os.environ[plain.FOLDER] = str(folder)
    run_simulation(
        plain.server_app,
        plain.client_app,
        config.num_clients,
        backend_config=Placement().backend,
    )
    return dict(json.loads((folder / "summary.json").read_text()))


if __name__ == "__main__":
    main()
