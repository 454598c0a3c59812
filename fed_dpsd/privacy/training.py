"""The contract of teachers' training, and the releases of private training."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from dp_accounting import DpEvent
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.privacy.mechanism import NoiseAt, Noiseless, Relation, Unit
from fed_dpsd.privacy.noise import Rng

TrainedUnit = Literal["record", "patient"]
# A function of (B,) record numbers and the network's (B, K) logits on their images; it returns the
# targets of the cross-entropy: (B,) classes or (B, K) probabilities.
Targets = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fixed_targets(targets: NDArray[np.int64]) -> Targets:
    """Return the records' (N,) classes as targets."""
    classes = torch.from_numpy(targets)
    return lambda chosen, _: classes[chosen]


class Learner(Protocol):
    """The teacher of a shard, which learns from the shard's records, numbered from 0."""

    def fit(self, records: NDArray[np.int64], targets: Targets) -> None:
        """Train on these records' images as `teacher` configures, from the initial weights."""

    def probabilities(self, records: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the network's (n, K) probabilities on these records' images."""

    def features(self, training: "Training") -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
        """Return the network's trainable part, and the inputs and labels that training reads.

        Private training reads (N, A, ...) inputs, with an axis of copies, and other training
        (N, ...). Labels are (N,); `TrainingMechanism.train` describes patients' labels.
        """


class Training(ABC):
    """How teachers learn from the records of their shards.

    `reads` states what `teach` reads of a shard, which also decides where and how it computes:

    - "images": it fits the learner to images and labels, without noise, in the configured
      `precision` and on the client's device.
    - "labels": it fits the learner on the CPU. The images are public, and labels pass through
      noise.
    - "features": it trains on `Learner.features` with steps and noise of its own, in float32 on
      the CPU. Exact sums (`privacy.lattice`) are proven for CPU arithmetic. The keys of `teacher`
      have no effect.
    """

    name: ClassVar[str]
    calibrated_by: ClassVar[str | None] = None
    private: ClassVar[bool] = False  # whether it is a `TrainingMechanism`
    reads: ClassVar[Literal["images", "labels", "features"]]
    # The unit that private training protects, with A copies of each record's image and R records
    # of each patient.
    unit: TrainedUnit = "record"
    copies: int = 1
    records_per_patient: int = 1

    @property
    def reason(self) -> str | None:
        """Return why nothing is proven for some units; None if there is nothing to say."""
        return None

    def check(self, config: Any, method: Any, partition: Any) -> list[str]:
        """Return the problems with the training in an experiment, each with key, value and remedy.

        Overriding methods extend the returned list.

        Args:
            config: the experiment's Config.
            method: its Method.
            partition: its Partition.
        """
        return []

    def warnings(self, config: Any) -> list[str]:
        """Return a sentence for each setting with which nothing is learned, naming its key."""
        return []

    def describe(self, trainings: int = 1) -> str:
        """Describe how teachers are trained, `trainings` times, and what training protects."""
        return "without noise: only the noise of the answers, if any, protects records"

    def published(self, trainings: int, num_classes: int, delta: float) -> float:
        """Return the paper's epsilon of all that the teachers release; `inf` if it claims none."""
        return math.inf

    @abstractmethod
    def teach(self, learner: Learner, labels: NDArray[np.int64], rng: Rng) -> None:
        """Train the learner on one shard's (N,) labels; draw noise, if any, from `rng`."""


@dataclass(frozen=True)
class Plain(Training):
    """Training without noise, configured by `teacher`; only the answers' noise protects records."""

    name: ClassVar[str] = "plain"
    reads: ClassVar[Literal["images"]] = "images"

    def teach(self, learner: Learner, labels: NDArray[np.int64], rng: Rng) -> None:
        """Fit the learner to all records of a shard, N >= 1."""
        learner.fit(np.arange(len(labels)), fixed_targets(labels))


@dataclass(frozen=True)
class CustomTraining(Training):
    """Training with its own steps; unless it is a `TrainingMechanism`, it protects no records.

    Only the answers' noise then protects records. `reason` explains why the training's noise does
    not.
    """

    reads: ClassVar[Literal["features"]] = "features"

    def check(self, config: Any, method: Any, partition: Any) -> list[str]:
        """Return the problems with the training in an experiment."""
        return teacher_file_problems(self.name, config)

    def describe(self, trainings: int = 1) -> str:
        """Describe how teachers are trained, and what training alone protects."""
        return f"{self.name.replace('_', ' ')}, {super().describe(trainings)}"

    def teach(self, learner: Learner, labels: NDArray[np.int64], rng: Rng) -> None:
        """Train on the learner's features with the training's own steps."""
        self.train(*learner.features(self), rng)

    @abstractmethod
    def train(
        self, teacher: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, rng: Rng
    ) -> None:
        """Train a teacher in place on one shard's (N, ...) inputs and (N,) labels."""


class TrainingMechanism(CustomTraining):
    """A mechanism that trains teachers privately on A = `copies` copies of each record's image.

    With `unit="patient"`, it uses R = `records_per_patient` records of each patient
    (`patient_places`), and so R * A images; with `unit="record"`, R is 1.

    Its event covers all steps and is charged once, before the first step. The teachers' answers are
    post-processing. Class counts are a separate release (`ClassCounts`).
    """

    calibrated_by: ClassVar[str]
    private: ClassVar[bool] = True
    # Whether it bounds each record's gradient, so that no layer may mix records.
    bounds_gradients: ClassVar[bool] = True
    from_teachers: ClassVar[bool] = False
    noise_at: ClassVar[NoiseAt] = "client"
    steps: int

    @property
    @abstractmethod
    def reason(self) -> str:
        """Return why nothing is proven for some units."""

    @property
    @abstractmethod
    def counts_classes(self) -> bool:
        """Return whether noisy class counts may be released too."""

    def check(self, config: Any, method: Any, partition: Any) -> list[str]:
        """Return the problems with the training in an experiment, as `Plain.check` does."""
        problems = super().check(config, method, partition)
        return problems + patient_problems("training", self.unit, config)

    def check_parameters(self, count: int) -> None:
        """Raise ValueError if it cannot train a network with this many parameters."""

    def describe(self, trainings: int = 1) -> str:
        """Describe how teachers are trained, `trainings` times."""
        repeated = f"{trainings:,} private training runs" if trainings > 1 else "private training"
        return f"{repeated} of {self.steps:,} steps ({self.name})"

    def releases(self, requests: int, queries: int) -> int:
        """Return the number of training runs, regardless of the number of answers."""
        return requests

    @abstractmethod
    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return the event of training all of the client's teachers."""

    @abstractmethod
    def count_event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return the event of a release of class counts."""

    @abstractmethod
    def count(self, labels: NDArray[np.int64], num_classes: int, rng: Rng) -> NDArray[np.float64]:
        """Draw (K,) noisy class counts of one shard's labels; call this only once.

        The labels are (N,), or (P, R) for P patients.
        """

    @abstractmethod
    def train(
        self, teacher: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, rng: Rng
    ) -> None:
        """Train a teacher in place on one shard's (N, A, ...) inputs and (N,) labels.

        With patients as the unit, inputs are (P, R * A, ...) and labels are (P, R * A).
        """


def default_unit(patients: bool) -> dict[str, Any]:
    """Return the keys of the unit that suits data, given whether it names `patients`.

    Six places hold each record of a patient with 1, 2, 3 or 6 records equally often.
    """
    if patients:
        return {"unit": "patient", "records_per_patient": 6}
    return {"unit": "record", "records_per_patient": 1}


def patient_problems(key: str, unit: TrainedUnit, config: Any) -> list[str]:
    """Return a problem if a simulation's unit is the patient but its records name no patients."""
    if unit == "record" or not config.federation.simulation or config.data.names_patients:
        return []
    return [
        f"{key}.unit=patient: the records name no patients; give data.patient_column, or "
        "data.records_per_patient=N to make up patients of N records, or federation=deployment to "
        "plan for hospitals, whose files name theirs"
    ]


def teacher_file_problems(name: str, config: Any) -> list[str]:
    """Return a problem if teachers come from files but `training` trains its own teachers."""
    if config.teacher.path is None:
        return []
    return [
        f"teacher.path={config.teacher.path}: training={name} trains its teachers itself; use "
        "teacher.path=null"
    ]


def patient_places(patients: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return the (P, R) numbers of the records that represent each patient, R = `most`.

    A patient's first R records are taken in order; if there are fewer, they are repeated in turn.
    Records with known patients are in the order of their digests (`Records.in_order`), so a
    patient's row depends only on this patient's records.
    """
    order = np.argsort(patients, kind="stable")
    _, first, count = np.unique(patients[order], return_index=True, return_counts=True)
    return np.asarray(order[first[:, None] + np.arange(most) % count[:, None]])


@dataclass(frozen=True)
class ClassCounts(Noiseless):
    """Noisy class counts of a client's records, released once, for any number of teachers."""

    name: ClassVar[str] = "class_counts"
    reason: ClassVar[str] = "class counts have no bound for larger units than their training"
    from_teachers: ClassVar[bool] = False
    training: TrainingMechanism

    def describe(self) -> str:
        """Describe what leaves a client."""
        return "noisy class counts"

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return the event of the counts."""
        return self.training.count_event(unit, relation)


@dataclass(frozen=True)
class BaselineWeights(Noiseless):
    """The weights of one classifier of all a client's records, in addition to its teachers.

    All noise is drawn during the classifier's training. It does not cover the teachers' answers,
    which are charged separately.
    """

    name: ClassVar[str] = "baseline"
    from_teachers: ClassVar[bool] = False
    training: Training

    @property
    def reason(self) -> str:
        """Return why nothing is proven for some units, or for any."""
        if isinstance(self.training, TrainingMechanism):
            return self.training.reason
        return "the weights of a classifier trained on all records leave the clients"

    def describe(self) -> str:
        """Describe what leaves a client."""
        return "the weights of a classifier trained on all records"

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return the event of training, which is not private if it draws no noise."""
        if isinstance(self.training, TrainingMechanism):
            return self.training.event(unit, relation)
        return super().event(unit, relation)
