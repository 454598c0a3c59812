"""The configuration: a single schema for `fed-dpsd run KEY=VALUE ...` and Flower's `--run-config`.

Hydra composes conf/ (overrides.py). The result is bound (binder.py) to the frozen dataclasses
here, whose fields are the keys of the YAML files. No data is read before.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from fed_dpsd.classes import positions, text_of
from fed_dpsd.errors import shown

BUNDLED = "digits"  # the name of the data set that comes with scikit-learn


@dataclass(frozen=True)
class DataConfig:
    """The keys of conf/data: the source of the images. `path`, a folder, wins over `hub`.

    A label is the value of `label_column`, or the one of `label_columns` that is true; records in
    which none is true, or several are, are skipped. An image of another size than `shape` is an
    error; with `resize`, its middle square is scaled to `shape`. Images of 16 bits may use only
    `pixel_bits` of them. With `patient_column`, all records of a patient go to the same teacher of
    one client, and given splits that share a patient are an error unless `shared_patients` is
    "allow". A simulation may make patients up instead: `records_per_patient` records of one class
    at one client each. `classes` are the names of the classes in order, to which every reader,
    hospital, prediction and report refers. set_up takes them, and a `num_classes` of null, from the
    data's folders or labels.
    """

    name: str
    hub: str | None
    path: str | None
    image_column: str
    label_column: str | None
    patient_column: str | None
    shape: tuple[int, ...]
    num_classes: int
    shared_patients: Literal["refuse", "allow"] = "refuse"
    records_per_patient: int | None = None
    resize: bool = False
    label_columns: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    pixel_bits: int = 16

    def __post_init__(self) -> None:
        if self.records_per_patient is not None:
            require(self, records_per_patient=1)
            if self.patient_column is not None:
                raise ValueError(
                    f"records_per_patient={self.records_per_patient} makes patients up, and "
                    f"patient_column={self.patient_column} names them; give one of the two"
                )
        if len(self.shape) != 3 or self.shape[0] not in (1, 3) or self.shape[1] != self.shape[2]:
            raise ValueError(f"shape={list(self.shape)} must be [1 or 3, size, size]")
        if self.shape[1] < 8 or self.shape[1] % 4:
            raise ValueError(f"shape={list(self.shape)}: the size must be a multiple of 4, >= 8")
        require(self, num_classes=2)
        if (self.label_column is None) == (not self.label_columns):
            raise ValueError(
                f"label_column={shown(self.label_column)} and "
                f"label_columns={shown(self.label_columns)}: give one of the two"
            )
        if self.label_columns and len(self.label_columns) != self.num_classes:
            raise ValueError(
                f"label_columns={shown(self.label_columns)} has {len(self.label_columns)} classes, "
                f"but num_classes={self.num_classes}; give a column for each class"
            )
        named = self.classes or self.label_columns  # without names, there may be far too many
        different = {text_of(name) for name in named} - {""}
        if named and not len(named) == len(different) == self.num_classes:
            raise ValueError(
                f"classes=[{', '.join(named)}] must be num_classes={self.num_classes} "
                "different names"
            )
        if not 8 <= self.pixel_bits <= 16:
            raise ValueError(f"pixel_bits={self.pixel_bits} must be between 8 and 16")

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes in order: "0", "1", ... where none are known."""
        return self.classes or self.label_columns or positions(self.num_classes)


@dataclass(frozen=True)
class ModelConfig:
    """The keys of conf/model: architectures (models/classifiers.py) and widths.

    A width is the number of channels of the first layer. `teachers` gives client j the architecture
    at j modulo its length; if it is empty, all clients have `teacher`.
    """

    teacher: str
    teachers: tuple[str, ...]
    teacher_width: int
    student: str
    student_width: int
    generator_width: int

    def __post_init__(self) -> None:
        require(self, teacher_width=1, student_width=1, generator_width=1)


@dataclass(frozen=True)
class TeacherConfig:
    """The settings by which a client trains its teachers: `epochs`, and at least `min_steps` steps.

    With `path`, a safetensors file, the client's teacher of architecture `arch` is read instead.
    "{client}" in the path stands for the client's number.
    """

    path: str | None
    arch: str | None
    seed: int
    epochs: int
    min_steps: int
    batch_size: int
    learning_rate: float
    momentum: float | None
    same_start: bool

    def __post_init__(self) -> None:
        if self.path is not None and self.arch is None:
            raise ValueError(
                f"path={self.path}: the file's architecture is not given; add teacher.arch=cnn, or "
                "whichever it has"
            )
        if self.arch is not None and self.path is None:
            raise ValueError(
                f"arch={self.arch} is for a teacher from a file; add "
                f"teacher.path=FILE.safetensors, or use model.teacher={self.arch} to train one"
            )
        require(self, seed=0, epochs=0, min_steps=1, batch_size=1)
        require_positive(self, "learning_rate")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum} must be in [0, 1), or null for Adam")


@dataclass(frozen=True)
class PrivacyConfig:
    """The keys of `privacy`, which hold for every training and every mechanism of answers.

    `budget` caps the record-level (add_remove) epsilon that a client spends, over all that its
    ledger holds. With `budget_relation="replace_one"` it also caps the epsilon of replaced records.
    Null means no cap. `target_epsilon` sets the noise of the training, or of the answers where the
    training has none, so that the run spends it (record, add_remove; patient, add_remove with
    `training.unit="patient"`).
    """

    delta: float
    epsilon_stated: float | None
    budget: float | None
    target_epsilon: float | None
    budget_relation: Literal["add_remove", "replace_one"] = "add_remove"

    def __post_init__(self) -> None:
        if self.budget_relation not in ("add_remove", "replace_one"):
            raise ValueError(
                f"budget_relation={self.budget_relation} must be add_remove or replace_one"
            )
        if not 0 < self.delta < 1:
            raise ValueError(f"delta={self.delta} must be between 0 and 1, both excluded")
        if self.budget is not None and not 0 <= self.budget < float("inf"):
            raise ValueError(f"budget={self.budget} must be finite and >= 0, or null for no cap")
        if self.target_epsilon is not None:
            require_positive(self, "target_epsilon")


@dataclass(frozen=True)
class FederationConfig:
    """The keys of conf/federation: deadlines, and the least clients that a round goes on with.

    In a `simulation` exact diagnostics are permitted and all clients must answer. `min_clients` of
    null stands for all clients.
    """

    simulation: bool
    min_clients: int | None
    node_timeout_seconds: float
    round_timeout_seconds: float
    retry_seconds: float

    def __post_init__(self) -> None:
        require_positive(self, "node_timeout_seconds", "round_timeout_seconds", "retry_seconds")
        if self.min_clients is not None and self.simulation:
            raise ValueError(
                f"min_clients={self.min_clients}: all clients of a simulation answer; leave it "
                "out, or use federation=deployment"
            )
        if self.min_clients is not None and self.min_clients < 1:
            raise ValueError(f"min_clients={self.min_clients} must be >= 1, or null for all")


@dataclass(frozen=True)
class Config:
    """A whole experiment; experiment.py binds `method`, `partition`, `training` and `answers`."""

    num_clients: int
    teachers_per_client: int
    seed: int
    rounds: int
    queries_per_round: int
    client_device: str
    server_device: str
    threads_client: int
    threads_server: int
    out: str
    cache: str
    run_folder: str
    ledger: str
    noise: str
    data: DataConfig
    model: ModelConfig
    teacher: TeacherConfig
    privacy: PrivacyConfig
    federation: FederationConfig
    training: Mapping[str, Any]
    answers: Mapping[str, Any]
    method: Mapping[str, Any]
    partition: Mapping[str, Any]
    clients_per_round: int | None = None
    evaluate_every: int = 1
    pictures: str = ""
    plugins: tuple[str, ...] = ()
    tracker: Literal["none", "tensorboard", "wandb", "mlflow"] = "none"

    def __post_init__(self) -> None:
        require(self, num_clients=1, teachers_per_client=1, seed=0)
        require(self, rounds=1, queries_per_round=1, threads_client=1, threads_server=1)
        require(self, evaluate_every=1)
        if self.clients_per_round is not None:
            least = self.federation.min_clients or 1
            if not least <= self.clients_per_round <= self.num_clients:
                raise ValueError(
                    f"clients_per_round={self.clients_per_round} must be between {least} "
                    f"(1, or federation.min_clients) and num_clients={self.num_clients}, or null "
                    "for all"
                )
        if self.teacher.path is not None and self.teachers_per_client > 1:
            raise ValueError(
                f"teachers_per_client={self.teachers_per_client} cannot be read from "
                "teacher.path, which holds one teacher a client; use teachers_per_client=1"
            )
        if self.noise not in ("seeded", "secure"):
            raise ValueError(f"noise={self.noise} must be seeded or secure")
        require_device_name(self, "client_device", "server_device")

    def architecture(self, client: int) -> str:
        """Return the name of a client's teacher architecture."""
        if self.teacher.arch is not None:
            return self.teacher.arch
        teachers = self.model.teachers or (self.model.teacher,)
        return teachers[client % len(teachers)]


def require(instance: Any, **minimum: int) -> None:
    """Raise ValueError for the first field below its minimum."""
    for name, least in minimum.items():
        if getattr(instance, name) < least:
            raise ValueError(f"{name}={getattr(instance, name)} must be >= {least}")


def require_positive(instance: Any, *names: str) -> None:
    """Raise ValueError for the first field that is not a finite number above 0."""
    for name in names:
        if not 0 < getattr(instance, name) < float("inf"):
            raise ValueError(f"{name}={getattr(instance, name)} must be a finite number > 0")


def require_device_name(instance: Any, *names: str) -> None:
    """Raise ValueError for the first field that names no device, wherever it may be."""
    for name in names:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", getattr(instance, name)):
            raise ValueError(f"{name}={getattr(instance, name)} must be auto, cpu, cuda or cuda:N")


class _OneValueEach(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which no key is there twice: the last one would win, and not be seen to."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            line = node.start_mark.line + 1
            raise ValueError(f"{twice} is there twice, in the keys from line {line} on; keep one")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping that a YAML file holds.

    Raises:
        ValueError: the file cannot be read, holds no mapping, or has a key twice; the error says
            why.
    """
    try:
        raw = yaml.load(path.read_bytes(), _OneValueEach)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(getattr(error, "strerror", None) or "it is not YAML") from None
    if not isinstance(raw, dict):
        raise ValueError("it is empty")
    return raw


def to_json(config: Config) -> str:
    """Return the whole configuration as JSON, in the layout of conf/, so that it can be bound.

    Without plug-ins it has no key for them. A sweep identifies its cells by this text.
    """
    values = dataclasses.asdict(config)
    if not config.plugins:
        del values["plugins"]
    return json.dumps(values, sort_keys=True)
