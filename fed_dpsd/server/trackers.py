"""Trackers, which copy a run's numbers to TensorBoard, Weights & Biases or MLflow.

They receive the content of rounds.jsonl and summary.json, and the settings without paths.
TensorBoard, which keeps its files in the run folder, also receives pictures of synthetic images. An
epsilon's name includes its unit, relation and trust, whether its noise is seeded and, if plug-ins
took part, that they have not been reviewed.
"""

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fed_dpsd.accounts.card import SEEDED_NOTE
from fed_dpsd.config.keys import leaves
from fed_dpsd.errors import UserError, one_line
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.epsilon import NOT_REVIEWED
from fed_dpsd.server.run_folder import sample_path

PROJECT = "fed-dpsd"
MOST_AT_ONCE = 100  # settings that an MLflow server accepts in one request
logger = logging.getLogger("fed_dpsd")

Numbers = Mapping[str, float]
Settings = Mapping[str, str | int | float | bool]


class TensorBoard:
    """Event files in RUN/tensorboard; `tensorboard --logdir runs` shows all runs."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))
        rows = "".join(f"| {key} | {value} |\n" for key, value in settings.items())
        self._writer.add_text("settings", f"| key | value |\n| --- | --- |\n{rows}", 0)

    def log(self, numbers: Numbers, step: int) -> None:
        """Write a scalar for each number."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def show(self, picture: Path, step: int) -> None:
        """Write a PNG of a round's synthetic images."""
        from torchvision.io import ImageReadMode, read_image  # takes seconds to import

        self._writer.add_image(
            "synthetic images", read_image(str(picture), ImageReadMode.RGB), step
        )
        self._writer.flush()

    def close(self, completed: bool) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project fed-dpsd, which is kept in RUN/wandb with WANDB_MODE=offline.

    Nothing else about this machine is sent: no command line, paths, code, console or hardware.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=folder.name,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )

    def log(self, numbers: Numbers, step: int) -> None:
        """Log the numbers of a step."""
        self._run.log(dict(numbers), step=step)

    def close(self, completed: bool) -> None:
        """Finish the run."""
        self._run.finish(exit_code=0 if completed else 1)


class MLflow:
    """A run of the experiment fed-dpsd at MLFLOW_TRACKING_URI, by default mlflow.db next to RUN.

    A resumed run continues the MLflow run with the same name. MLflow stores infinity as 1.8e308.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        server, parent = os.environ.get("MLFLOW_TRACKING_URI"), folder.parent
        self._client = MlflowClient(tracking_uri=server or f"sqlite:///{parent}/mlflow.db")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if experiment := self._client.get_experiment_by_name(name):
            number = experiment.experiment_id
        else:  # a server chooses its own folder for files; none are sent
            number = self._client.create_experiment(name, None if server else f"{parent}/mlruns")
        known = self._client.search_runs([number], f"attributes.run_name = '{folder.name}'")
        run = known[0] if known else self._client.create_run(number, run_name=folder.name)
        self._run = run.info.run_id
        parameters = [Param(key, str(value)) for key, value in settings.items()]
        for first in range(0, len(parameters), MOST_AT_ONCE):
            self._client.log_batch(self._run, params=parameters[first : first + MOST_AT_ONCE])

    def log(self, numbers: Numbers, step: int) -> None:
        """Log each number as a metric."""
        for name, value in numbers.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self, completed: bool) -> None:
        """Set the run's final status."""
        self._client.set_terminated(self._run, "FINISHED" if completed else "FAILED")


Tracker = TensorBoard | WeightsAndBiases | MLflow
TRACKERS: dict[str, tuple[str, type[Tracker]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WeightsAndBiases),
    "mlflow": ("mlflow", MLflow),
}


def require_tracker(name: str) -> None:
    """Check that a tracker's package is installed, without importing it."""
    if name in TRACKERS and importlib.util.find_spec(TRACKERS[name][0]) is None:
        raise UserError(
            f"tracker={name} needs a package that is not installed: pip install 'fed-dpsd[{name}]'"
        )


class Tracking:
    """The connection of a run to its configured tracker, if any.

    A tracker that fails during the run is no longer used: the run has spent its clients' budget and
    must not fail because of a tracker.
    """

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self._experiment, self._folder = experiment, folder
        self._tracker: Tracker | None = None
        self._round = 0

    def open(self) -> None:
        """Open the tracker."""
        name = self._experiment.config.tracker
        require_tracker(name)
        if name not in TRACKERS:
            return
        try:
            self._tracker = TRACKERS[name][1](self._folder, dict(settings_of(self._experiment)))
        except Exception as error:
            raise UserError(
                f"tracker={name} cannot be opened ({one_line(error)}); check its settings, or "
                "use tracker=none"
            ) from error

    def log(self, line: Mapping[str, Any]) -> None:
        """Send the numbers of a line of rounds.jsonl."""
        self._round = line["round"]
        self._send(lambda tracker: tracker.log(dict(numbers_of_round(line)), self._round))
        picture = sample_path(self._folder, self._round)
        if picture.exists() and isinstance(self._tracker, TensorBoard):
            self._send(lambda tracker: tracker.show(picture, self._round))

    def close(self, summary: Mapping[str, Any]) -> None:
        """Send the numbers of a summary, and close the tracker."""
        self._send(lambda tracker: tracker.log(dict(numbers_of_run(summary)), self._round))
        self._send(lambda tracker: tracker.close(summary["status"] == "completed"))

    def _send(self, work: Callable[[Any], None]) -> None:
        if self._tracker is None:
            return
        try:
            work(self._tracker)
        except Exception as error:
            self._tracker = None
            name = self._experiment.config.tracker
            logger.warning("tracker=%s failed and is no longer used: %s", name, one_line(error))


def settings_of(experiment: Experiment) -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield the keys and values of a configuration that are set and are not paths."""
    for key, value in leaves(json.loads(experiment.to_json())):
        text = value if isinstance(value, str) else json.dumps(value)
        if value not in (None, "", []) and os.sep not in text:
            yield key, text if isinstance(value, list) else value


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
    review = any(note.startswith(NOT_REVIEWED) for note in notes)
    meaning = f"{row['unit']}/{row['relation']}/trust_{row['trust']}"
    return meaning + "/seeded_noise" * (SEEDED_NOTE in notes) + "/not_reviewed" * review


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
