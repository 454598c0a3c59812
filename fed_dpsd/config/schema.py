"""The schema of an experiment: every key that does not belong to a chosen class, with its meaning.

`fed-dpsd list keys` prints the descriptions. Methods, training, mechanisms and partitions are
plain frozen dataclasses, so that plug-ins need not know pydantic. Comments in their conf/ files
explain their keys: reading descriptions from the classes would import torch at every TAB in a
shell.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from fed_dpsd.classes import positions, text_of
from fed_dpsd.errors import UserError, shown

BUNDLED = "digits"  # the name of the data set that comes with scikit-learn
LARGEST_SHIFT = 7  # pixels; less than the side of the smallest images
STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


def _device_name(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return text


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Device = Annotated[str, AfterValidator(_device_name)]


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The source of the images. `path`, a folder, takes precedence over `hub`.

    Without `resize`, images of a size other than `shape` are an error. Records with no true label
    column, or several, are skipped. With `patient_column`, all records of a patient go to the same
    teacher of one client. `set_up` reads `classes`, and a `num_classes` of null, from the data's
    folders or labels; readers, hospitals, predictions and reports all use this order.
    """

    name: str = Field(description="name of the data set")
    hub: str | None = Field(description="Hugging Face name: OWNER/NAME or OWNER/NAME/SUBSET")
    path: str | None = Field(description="folder or table with the images (docs/howto/own_data.md)")
    image_column: str = Field(description="column of images")
    label_column: str | None = Field(description="column of labels; null with label_columns")
    patient_column: str | None = Field(description="column of patients; null if they are unknown")
    shape: tuple[int, ...] = Field(description="channels (1 or 3), height and width of images")
    num_classes: int = Field(ge=2, description="number of classes; null takes it from the data")
    shared_patients: Literal["refuse", "allow"] = Field(
        "refuse", description="refuse makes a patient in two given splits an error"
    )
    records_per_patient: int | None = Field(
        None, ge=1, description="simulations: N makes up patients of N records of one class"
    )
    resize: bool = Field(False, description="true scales the middle square of images to shape")
    label_columns: tuple[str, ...] = Field((), description="a column of booleans per class")
    classes: tuple[str, ...] = Field((), description="class names in order; [] reads the data's")
    pixel_bits: int = Field(16, ge=8, le=16, description="bits that 16-bit images use")

    def __post_init__(self) -> None:
        if self.records_per_patient is not None and self.patient_column is not None:
            raise ValueError(
                f"records_per_patient={self.records_per_patient} makes up patients, and "
                f"patient_column={self.patient_column} names them; give one of the two"
            )
        if len(self.shape) != 3 or self.shape[0] not in (1, 3) or self.shape[1] != self.shape[2]:
            raise ValueError(f"shape={list(self.shape)} must be [1 or 3, size, size]")
        if self.shape[1] < 8 or self.shape[1] % 4:
            raise ValueError(f"shape={list(self.shape)}: the size must be a multiple of 4, >= 8")
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
        named = self.classes or self.label_columns  # not class_names, which may be far too many
        different = {text_of(name) for name in named} - {""}
        if named and not len(named) == len(different) == self.num_classes:
            raise ValueError(
                f"classes=[{', '.join(named)}] must be num_classes={self.num_classes} "
                "different names"
            )

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes in order: "0", "1", ... where none are known."""
        return self.classes or self.label_columns or positions(self.num_classes)


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """Architectures (models/classifiers.py), and the number of channels of their first layer."""

    teacher: str = Field(description="architecture; `fed-dpsd list models` names all")
    teachers: tuple[str, ...] = Field(description="the clients', in turn; [] uses model.teacher")
    teacher_width: int = Field(ge=1, description="channels of the first layer")
    student: str = Field(description="architecture; `fed-dpsd list models` names all")
    student_width: int = Field(ge=1, description="channels of the first layer")
    generator_width: int = Field(ge=1, description="channels of the first layer")


@dataclass(frozen=True, config=STRICT)
class TeacherConfig:
    """The settings that train a client's teachers, or the file to read a teacher from."""

    path: str | None = Field(
        description="safetensors file of a teacher; {client} is a client's number"
    )
    arch: str | None = Field(description="architecture of that teacher, required with path")
    seed: int = Field(ge=0, description="seed of the training")
    epochs: int = Field(ge=0, description="epochs over a teacher's records")
    min_steps: int = Field(ge=1, description="fewest steps, even for a client with few records")
    batch_size: int = Field(ge=1, description="records in a step")
    learning_rate: Positive = Field(description="learning rate")
    momentum: float | None = Field(ge=0, lt=1, description="momentum of SGD; null selects Adam")
    weight_decay: float = Field(ge=0, description="weight decay")
    one_cycle: bool = Field(
        description="true raises the learning rate to its value in the first fifth of the steps, "
        "and lowers it to 0 after that"
    )
    shift: int = Field(
        ge=0, le=LARGEST_SHIFT, description="largest shift of a record's image in a step, in pixels"
    )
    flip: bool = Field(description="true mirrors about half the images in each step")
    same_start: bool = Field(
        description="true starts all teachers from the same weights, as FedAVG needs"
    )

    def __post_init__(self) -> None:
        if self.path is not None and self.arch is None:
            raise ValueError(
                f"path={self.path}: the file's architecture is not given; add teacher.arch=NAME, "
                "such as cnn"
            )
        if self.arch is not None and self.path is None:
            raise ValueError(
                f"arch={self.arch} is for a teacher from a file; add "
                f"teacher.path=FILE.safetensors, or use model.teacher={self.arch} to train one"
            )


@dataclass(frozen=True, config=STRICT)
class PrivacyConfig:
    """The keys of `privacy`, which apply to every training and every mechanism of answers.

    A budget limits a client's whole ledger (docs/privacy.md). `target_epsilon` applies to a patient
    if `training.unit="patient"`.
    """

    delta: float = Field(gt=0, lt=1, description="delta of every guarantee")
    epsilon_stated: float | None = Field(description="epsilon that a paper states for its result")
    budget: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        description="largest epsilon of a client's ledger (record, add_remove); null is no limit"
    )
    target_epsilon: Positive | None = Field(
        description="Calibrates the noise so that a run spends this (record, add_remove): the "
        "training's noise, or the answers' where training=plain."
    )
    budget_relation: Literal["add_remove", "replace_one"] = Field(
        "add_remove", description="replace_one also bounds replaced records"
    )


@dataclass(frozen=True, config=STRICT)
class FederationConfig:
    """Deadlines, and the smallest number of clients in a round."""

    simulation: bool = Field(description="whether this machine simulates all clients")
    min_clients: int | None = Field(
        ge=1,
        description="fewest hospitals to start with, and fewest replies to a round; null is all",
    )
    node_timeout_seconds: Positive = Field(description="time for all clients to connect")
    round_timeout_seconds: Positive = Field(description="time for a round")
    retry_seconds: Positive = Field(description="time until a silent client gets the request again")

    def __post_init__(self) -> None:
        if self.min_clients is not None and self.simulation:
            raise ValueError(
                f"min_clients={self.min_clients}: all clients of a simulation answer; leave it "
                "out, or use federation=deployment"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """A whole experiment; experiment.py binds `method`, `partition`, `training` and `answers`."""

    num_clients: int = Field(ge=1, description="clients of the federation")
    teachers_per_client: int = Field(ge=1, description="teachers, each with a shard of the records")
    seed: int = Field(ge=0, description="public seed")
    rounds: int = Field(ge=1, description="rounds of queries and answers")
    queries_per_round: int = Field(ge=1, description="synthetic images in a round")
    client_device: Device = Field(description="device for teachers' answers and plain training")
    server_device: Device = Field(description="device that trains the student and generators")
    threads_client: int = Field(ge=1, description="fixed: it affects the last bits of results")
    threads_server: int = Field(ge=1, description="as threads_client")
    out: str = Field(description='parent of the run folder; "" is ./runs (flwr: in FED_DPSD_HOME)')
    cache: str = Field(description='folder of the cache; "" is FED_DPSD_HOME/cache')
    run_folder: str = Field(description='run folder; "" makes a new one below out')
    ledger: str = Field(description='folder of ledgers that runs share; "" is in the run folder')
    noise: Literal["seeded", "secure"] = Field(
        description="Source of the noise in answers and private training: seeded (reproducible, "
        "for experiments) | secure (from a secret next to each client's ledger)."
    )
    data: DataConfig
    model: ModelConfig
    teacher: TeacherConfig
    privacy: PrivacyConfig
    federation: FederationConfig
    training: Mapping[str, Any]
    answers: Mapping[str, Any]
    method: Mapping[str, Any]
    partition: Mapping[str, Any]
    clients_per_round: int | None = Field(
        None,
        description="Clients that answer in a round, drawn from the public seed; null takes all. "
        "A client pays for the rounds in which it answers, and no amplification is claimed.",
    )
    evaluate_every: int = Field(1, ge=1, description="rounds between scores; the last is scored")
    diagnostics: bool = Field(
        True, description="whether simulations score every client's teachers on the test split"
    )
    pictures: str = Field(
        "",
        description="Public pictures whose crops are sent instead of procedural images: "
        'scikit-learn (two photographs) | a folder. "" is none, so that queries are free of data.',
    )
    plugins: tuple[str, ...] = Field(
        (),
        description="Installed packages whose conf/, classes and networks can be chosen too "
        "(docs/extending.md): plugins=NAME or plugins=[NAME,NAME]. Nothing is proven about what "
        "they do until it is reviewed.",
    )
    tracker: Literal["none", "tensorboard", "wandb", "mlflow"] = Field(
        "none",
        description="Where a run's numbers go, in addition to its folder: none | tensorboard | "
        "wandb | mlflow. Each is an extra, as in pip install 'fed-dpsd[wandb]', and has its own "
        "settings, such as WANDB_MODE=offline.",
    )

    def __post_init__(self) -> None:
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
                "teacher.path, which holds one teacher per client; use teachers_per_client=1"
            )

    @property
    def not_reviewed(self) -> tuple[str, ...]:
        """Return the plug-ins, and the functions of teachers, whose code nobody has reviewed.

        What a student computes is post-processing of answers, whatever its network is.
        """
        different = range(min(self.num_clients, len(self.model.teachers) or 1))
        used = dict.fromkeys(map(self.architecture, different))
        return *self.plugins, *(name for name in used if is_function(name))

    def architecture(self, client: int) -> str:
        """Return the name of a client's teacher architecture."""
        if self.teacher.arch is not None:
            return self.teacher.arch
        teachers = self.model.teachers or (self.model.teacher,)
        return teachers[client % len(teachers)]


SECTIONS: Mapping[str, Any] = {
    "": Config,
    "data": DataConfig,
    "model": ModelConfig,
    "teacher": TeacherConfig,
    "privacy": PrivacyConfig,
    "federation": FederationConfig,
}


def is_function(architecture: str) -> bool:
    """Return whether an architecture is the name of a Python function (models/functions.py)."""
    return architecture.endswith("()")


def field_of(key: str) -> FieldInfo | None:
    """Return the field of a key such as "privacy.delta"; None if the key belongs to a class."""
    section, _, name = key.rpartition(".")
    fields: Mapping[str, FieldInfo] = getattr(SECTIONS.get(section), "__pydantic_fields__", {})
    return fields.get(name)


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


def require_device(key: str, name: str, count: int) -> None:
    """Check that a key's device is not a GPU, or is one of the `count` GPUs.

    Raises:
        UserError: the device does not exist; the message names one that does.
    """
    if not name.startswith("cuda"):
        return
    kind, _, number = name.partition(":")
    remedy = "auto or cpu"
    if not count:
        raise UserError(f"{key}={name}: this machine has no usable GPU; use {key}={remedy}")
    if number and int(number) >= count:
        known = " and ".join(f"{kind}:{each}" for each in range(count))
        raise UserError(f"{key}={name}: this machine has only {known}; use {key}=cuda:0, {remedy}")


def to_json(config: Config) -> str:
    """Return the whole configuration as JSON in the layout of conf/, to be bound again.

    Without plug-ins it has no `plugins` key, and with diagnostics no `diagnostics` key. A sweep
    identifies its cells by this text.
    """
    values = dataclasses.asdict(config)
    if config.diagnostics:
        del values["diagnostics"]
    if not config.plugins:
        del values["plugins"]
    return json.dumps(values, sort_keys=True)
