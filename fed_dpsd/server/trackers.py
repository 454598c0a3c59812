"""Trackers, which copy a run's numbers to TensorBoard, Weights & Biases or MLflow.

They receive the content of rounds.jsonl and summary.json, and the settings without paths. An
epsilon's name includes its unit, relation and trust, whether its noise is seeded and, if plug-ins
took part, that they have not been reviewed.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fed_dpsd.accounts.words import SEEDED_NOTE
from fed_dpsd.config import leaves
from fed_dpsd.errors import UserError, one_line
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.epsilon import review_of
from fed_dpsd.server.run_folder import sample_path

PROJECT = "fed-dpsd"
logger = logging.getLogger("fed_dpsd")
Numbers = Mapping[str, float]
Settings = Mapping[str, str | int | float | bool]


class Tracker(NamedTuple):
    """An open tracker: it logs numbers of a round, and closes given whether the run completed."""

    log: Callable[[Numbers, int], object]
    close: Callable[[bool], object]


def tensorboard(folder: Path, settings: Settings) -> Tracker:
    """Write numbers and synthetic images to RUN/tensorboard."""
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))
    writer.add_text("settings", f"```\n{json.dumps(settings, indent=2)}\n```")

    def log(numbers: Numbers, step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        picture = sample_path(folder, step)
        if "rounds/seconds" in numbers and picture.exists():
            pixels = np.asarray(Image.open(picture).convert("RGB"))
            writer.add_image("synthetic images", pixels, step, dataformats="HWC")
        writer.flush()

    return Tracker(log, lambda completed: writer.close())


def wandb(folder: Path, settings: Settings) -> Tracker:
    """Log to W&B's project fed-dpsd, or to RUN/wandb with WANDB_MODE=offline.

    W&B adds its own version, Python's and the platform. Nothing else about this machine is sent: no
    command line, paths, code, console or hardware.
    """
    import wandb

    off = ("disable_git", "disable_code", "x_disable_meta", "x_disable_stats")
    private = dict.fromkeys((*off, "x_disable_machine_info"), True) | {"x_save_requirements": False}
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=folder.name,
        id=folder.name,
        resume="allow",
        dir=str(folder),
        config=dict(settings),
        settings=wandb.Settings(console="off", silent=True, **private),
    )
    return Tracker(
        lambda numbers, step: run.log(dict(numbers), step=step),
        lambda completed: run.finish(exit_code=0 if completed else 1),
    )


def mlflow(folder: Path, settings: Settings) -> Tracker:
    """Log to MLflow's experiment fed-dpsd at MLFLOW_TRACKING_URI, by default mlflow.db next to RUN.

    A resumed run continues the MLflow run with its name. MLflow stores infinity as 1.8e308.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    server = os.environ.get("MLFLOW_TRACKING_URI")
    client = MlflowClient(server or f"sqlite:///{folder.parent}/mlflow.db")
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    known = client.get_experiment_by_name(name)
    number = known.experiment_id if known else client.create_experiment(name)
    runs = client.search_runs([number], f"attributes.run_name = '{folder.name}'")
    run = (runs[0] if runs else client.create_run(number, run_name=folder.name)).info.run_id
    client.log_batch(run, params=[Param(key, str(value)) for key, value in settings.items()])

    def log(numbers: Numbers, step: int) -> None:
        now = round(1000 * time.time())
        client.log_batch(run, [Metric(name, value, now, step) for name, value in numbers.items()])

    return Tracker(
        log, lambda completed: client.set_terminated(run, "FINISHED" if completed else "FAILED")
    )


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}  # by package


def require_tracker(name: str) -> None:
    """Check that a tracker's package is installed, without importing it."""
    if name in TRACKERS and find_spec(name) is None:
        raise UserError(
            f"tracker={name} needs a package that is not installed: pip install 'fed-dpsd[{name}]'"
        )


class Tracking:
    """The connection of a run to its configured tracker, if any.

    A tracker that fails during the run is no longer used: the run has spent its clients' budget and
    must not fail because of a tracker.
    """

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self._experiment, self._folder, self._round = experiment, folder, 0
        self._name = experiment.config.tracker
        self._tracker: Tracker | None = None

    def open(self) -> None:
        """Open the tracker."""
        require_tracker(self._name)
        try:
            if self._name in TRACKERS:
                self._tracker = TRACKERS[self._name](self._folder, settings_of(self._experiment))
        except Exception as error:
            raise UserError(
                f"tracker={self._name} cannot be opened ({one_line(error)}); check its settings, "
                "or use tracker=none"
            ) from error

    def log(self, line: Mapping[str, Any]) -> None:
        """Send the numbers of a line of rounds.jsonl."""
        self._round = line["round"]
        self._send(lambda tracker: tracker.log(dict(numbers_of_round(line)), self._round))

    def close(self, summary: Mapping[str, Any]) -> None:
        """Send the numbers of a summary, and close the tracker."""
        self._send(lambda tracker: tracker.log(dict(numbers_of_run(summary)), self._round))
        self._send(lambda tracker: tracker.close(summary["status"] == "completed"))

    def _send(self, work: Callable[[Tracker], object]) -> None:
        try:
            if self._tracker is not None:
                work(self._tracker)
        except Exception as error:
            self._tracker = None
            said = "tracker=%s failed and is no longer used: %s"
            logger.warning(said, self._name, one_line(error))


def settings_of(experiment: Experiment) -> Settings:
    """Return the keys and values of a configuration that are set and are not paths."""
    values = dict(leaves(json.loads(experiment.to_json())))
    texts = {key: json.dumps(each) for key, each in values.items() if isinstance(each, list)}
    known = {key: each for key, each in (values | texts).items() if each not in (None, "", "[]")}
    return {key: value for key, value in known.items() if os.sep not in str(value)}


def numbers_of_round(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line of rounds.jsonl."""
    yield "rounds/refusing_clients", len(line["refused"])
    for key, value in line.items():
        if key not in ("round", "rounds") and _is_number(value):
            yield f"rounds/{key}", float(value)
    if spent := line.get("spent"):
        yield f"rounds/epsilon_spent/{_meaning(spent)}", float(spent["epsilon"])


def numbers_of_run(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a summary, with each epsilon's meaning in its name."""
    for group in ("accuracy", "auroc", "queries", "seconds"):
        for key, value in summary[group].items():
            if _is_number(value):
                yield f"run/{group}/{key}", float(value)
    card = summary["privacy"]
    yield "privacy/epsilon_published/no_guarantee", float(card["epsilon_published"])
    for row in [*card["proven"], *([card["label"]] if card["label"] else [])]:
        meaning = _meaning(row)
        yield f"privacy/epsilon_proven/{meaning}", float(row["epsilon"])
        yield f"privacy/delta/{meaning}", float(row["delta"])
        if "spent" in row:
            yield f"privacy/epsilon_spent/{meaning}", float(row["spent"])


def _meaning(row: Mapping[str, Any]) -> str:
    notes = row.get("notes", ())
    meaning = f"{row['unit']}/{row['relation']}/trust_{row['trust']}"
    meaning += "/seeded_noise" if SEEDED_NOTE in notes else ""
    return meaning + ("/not_reviewed" if review_of(notes) else "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
