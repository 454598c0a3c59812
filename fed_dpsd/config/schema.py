"""The schema of an experiment: the keys that do not belong to a chosen class, and their meanings.

`fed-dpsd list keys` prints the descriptions. Methods, training, mechanisms and partitions are plain
frozen dataclasses, so that plug-ins need not use pydantic. Comments in their conf/ files describe
their keys, because reading descriptions from the classes would import torch at every TAB in a
shell.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from fed_dpsd.classes import default_class_names, look_alikes, text_of
from fed_dpsd.errors import UserError, format_value

BUNDLED = "digits"  # the name of the data set that comes with scikit-learn
LARGEST_SHIFT = 7  # pixels; less than the side of the smallest images
STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


def _device_name(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return text


LARGEST_NUMBER = 1e30  # such as a learning rate; a larger step could overflow float32
LARGEST_SIDE = 4_096  # of an image, in pixels
MOST_CLIENTS = 1_000_000
MOST_THREADS = 1_024
Positive = Annotated[float, Field(gt=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Shift = Annotated[int, Field(ge=0, le=LARGEST_SHIFT)]  # of an image, in pixels
Device = Annotated[str, AfterValidator(_device_name)]
Precision = Literal["auto", "float32", "bfloat16"]
Fit = Literal["crop", "pad", "stretch"]


def _window(value: Any) -> Any:
    if value in (None, "header"):
        return value
    numbers = isinstance(value, tuple) and len(value) == 2 and all(map(_is_finite, value))
    if not numbers or value[1] < 1:
        raise ValueError("must be null, header or [CENTRE,WIDTH], a width of at least 1")
    return value


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


# Of grey levels, as in dicom.pixels_of.
Window = Annotated[Literal["header"] | tuple[float, float] | None, BeforeValidator(_window)]


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The source of the images. `path`, a folder, takes precedence over `hub`.

    Without `resize`, images with a size other than `shape` are an error. With label columns,
    records with no true column, or several, are skipped. With `patient_column`, all records of a
    patient go to the same teacher of one client. `set_up` reads `classes`, and `num_classes` if it
    is null, from the data's folders or labels; readers, hospitals, predictions and reports all use
    this order.
    """

    name: str = Field(description="name of the data set")
    hub: str | None = Field(description="Hugging Face name: OWNER/NAME or OWNER/NAME/SUBSET")
    path: str | None = Field(description="folder or table with the images (docs/howto/own_data.md)")
    image_column: str = Field(description="column of images")
    label_column: str | None = Field(description="column of labels; null with label_columns")
    patient_column: str | None = Field(description="column of patients; null if unknown")
    shape: tuple[int, ...] = Field(description="channels (1 or 3), height and width of images")
    num_classes: int = Field(ge=2, description="number of classes; null takes it from the data")
    shared_patients: Literal["refuse", "allow"] = Field(
        "refuse", description="refuse makes it an error if two given splits share a patient"
    )
    records_per_patient: int | None = Field(
        None, ge=1, description="in simulations: N records of one class form a simulated patient"
    )
    resize: bool = Field(False, description="true scales each image to shape, as fit says")
    label_columns: tuple[str, ...] = Field((), description="a column of booleans per class")
    classes: tuple[str, ...] = Field(
        (), description="class names in order; [] reads them from the data"
    )
    pixel_bits: int = Field(16, ge=8, le=16, description="number of bits that 16-bit images use")
    fit: Fit = Field(
        "crop",
        description="how images become square: crop cuts the central square, pad adds black, "
        "stretch scales each side",
    )
    window: Window = Field(
        None,
        description="window of grey DICOM images: header (the file's own) or [CENTRE,WIDTH]; null "
        "uses all stored bits",
    )

    def __post_init__(self) -> None:
        if self.path == "":  # as a path, it would be the working directory
            raise ValueError("path= is empty; give a folder or a table, or leave it out")
        if self.records_per_patient is not None and self.patient_column is not None:
            raise ValueError(
                f"records_per_patient={self.records_per_patient} makes up patients, and "
                f"patient_column={self.patient_column} names them; give one of the two"
            )
        if len(self.shape) != 3 or self.shape[0] not in (1, 3) or self.shape[1] != self.shape[2]:
            raise ValueError(f"shape={list(self.shape)} must be [1 or 3, size, size]")
        if not 8 <= self.shape[1] <= LARGEST_SIDE or self.shape[1] % 4:
            raise ValueError(
                f"shape={list(self.shape)}: the size must be a multiple of 4, from 8 to "
                f"{LARGEST_SIDE}"
            )
        if (self.label_column is None) == (not self.label_columns):
            raise ValueError(
                f"label_column={format_value(self.label_column)} and "
                f"label_columns={format_value(self.label_columns)}: give one of the two"
            )
        if self.label_columns and len(self.label_columns) != self.num_classes:
            raise ValueError(
                f"label_columns={format_value(self.label_columns)} has {len(self.label_columns)} "
                f"classes, but num_classes={self.num_classes}; give a column for each class"
            )
        named = self.classes or self.label_columns  # class_names may be far too many
        different = {text_of(name) for name in named} - {""}
        if named and not len(named) == len(different) == self.num_classes:
            raise ValueError(
                f"classes=[{', '.join(named)}] must be num_classes={self.num_classes} "
                "different names"
            )
        if twins := look_alikes(named):
            raise ValueError(f"classes: {twins}; use one of them, or rename the other class")

    @property
    def names_patients(self) -> bool:
        """Return whether the patient of each record is known."""
        return (self.patient_column, self.records_per_patient) != (None, None)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes in order: "0", "1", ... if unknown."""
        return self.classes or self.label_columns or default_class_names(self.num_classes)


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """Architectures (models/classifiers.py), and the number of channels of their first layer."""

    teacher: str = Field(description="architecture; `fed-dpsd list models` names all")
    teachers: tuple[str, ...] = Field(
        description="architectures for the clients in turn; [] uses model.teacher"
    )
    teacher_width: int = Field(ge=1, description="channels of the first layer")
    student: str = Field(description="architecture; `fed-dpsd list models` names all")
    student_width: int = Field(ge=1, description="channels of the first layer")
    generator_width: int = Field(ge=1, description="channels of the first layer")
    backbone: str | None = Field(
        None,
        description="public network: torchvision/NAME or timm/NAME; null uses EfficientNet-Lite2",
    )
    weights: str | None = Field(None, description="safetensors file of that network's weights")
    digest: str | None = Field(
        None, description='"sha256:" and the SHA-256 of that file, which all sites must have'
    )
    pixels: int = Field(224, ge=8, description="side that images are scaled to for that network")

    def __post_init__(self) -> None:
        if self.digest is not None and not re.fullmatch(r"sha256:[0-9a-f]{64}", self.digest):
            raise ValueError(
                f"digest={self.digest} must be sha256: and 64 hexadecimal digits, as sha256sum "
                "prints them"
            )
        own = {"weights": self.weights, "digest": self.digest}
        for name, value in own.items():
            if value is not None and self.backbone is None:
                raise ValueError(
                    f"{name}={value} names no network; add model.backbone=NAME, such as "
                    "torchvision/resnet50"
                )


@dataclass(frozen=True, config=STRICT)
class TeacherConfig:
    """The settings for training a client's teachers, or the file to read a teacher from."""

    path: str | None = Field(
        description="safetensors file of a teacher; {client} stands for a client's number"
    )
    arch: str | None = Field(description="architecture of that teacher; required with path")
    seed: int = Field(ge=0, description="seed of the training")
    epochs: int = Field(ge=0, description="epochs over a teacher's records")
    min_steps: int = Field(
        ge=1, description="minimum number of steps, even for a client with few records"
    )
    batch_size: int = Field(ge=1, description="records per step")
    learning_rate: Positive = Field(description="learning rate")
    momentum: float | None = Field(ge=0, lt=1, description="momentum of SGD; null selects Adam")
    weight_decay: float = Field(ge=0, description="weight decay")
    one_cycle: bool = Field(
        description="true raises the learning rate to its value in the first fifth of the steps, "
        "then lowers it to 0"
    )
    shift: int = Field(
        ge=0, le=LARGEST_SHIFT, description="largest shift of a record's image in a step, in pixels"
    )
    flip: bool = Field(description="true mirrors about half of the images in each step")
    same_start: bool = Field(
        description="true starts all teachers from the same weights, as FedAVG requires"
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
    """The keys of `privacy`, which apply to every training and every mechanism for answers.

    A budget limits a client's whole ledger (docs/privacy.md). `target_epsilon` applies to a patient
    if `training.unit="patient"`.
    """

    delta: float = Field(gt=0, lt=1, description="delta of every guarantee")
    epsilon_stated: float | None = Field(description="epsilon that a paper states for its result")
    budget: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        description="largest epsilon of a client's ledger (record, add_remove); null sets no limit"
    )
    target_epsilon: Positive | None = Field(
        description="Calibrates the noise so that a run spends this epsilon (record, add_remove): "
        "the noise of training, or of answers if training=plain."
    )
    budget_relation: Literal["add_remove", "replace_one"] = Field(
        "add_remove", description="replace_one also bounds replaced records"
    )


@dataclass(frozen=True, config=STRICT)
class FederationConfig:
    """Deadlines, and the minimum number of clients in a round."""

    simulation: bool = Field(description="whether this machine simulates all clients")
    min_clients: int | None = Field(
        ge=1,
        description="minimum hospitals at the start, and answers to a round; null requires all",
    )
    node_timeout_seconds: Positive = Field(description="time for all clients to connect")
    round_timeout_seconds: Positive = Field(description="time for a round")
    grace_seconds: Positive = Field(
        description="time for the other hospitals once min_clients have answered"
    )
    retry_seconds: Positive = Field(
        description="time until a request is sent again to a silent client"
    )

    def __post_init__(self) -> None:
        if self.min_clients is not None and self.simulation:
            raise ValueError(
                f"min_clients={self.min_clients}: all clients of a simulation answer; leave it "
                "out, or use federation=deployment"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """A whole experiment; experiment.py binds `method`, `partition`, `training` and `answers`."""

    num_clients: int = Field(
        ge=1, le=MOST_CLIENTS, description="number of clients in the federation"
    )
    teachers_per_client: int = Field(
        ge=1, description="teachers of each client, each with a shard of its records"
    )
    seed: int = Field(ge=0, description="public seed")
    rounds: int = Field(ge=1, description="rounds of queries and answers")
    queries_per_round: int = Field(ge=1, description="synthetic images per round")
    client_device: Device = Field(description="device for teachers' answers and plain training")
    server_device: Device = Field(description="device for training the student and generators")
    threads_client: int = Field(
        ge=1, le=MOST_THREADS, description="fixed, because it affects the last bits of results"
    )
    threads_server: int = Field(ge=1, le=MOST_THREADS, description="as threads_client")
    out: str = Field(description='parent of the run folder; "" is ./runs (flwr: in FED_DPSD_HOME)')
    cache: str = Field(description='folder of the cache; "" is FED_DPSD_HOME/cache')
    run_folder: str = Field(description='run folder; "" makes a new one below out')
    ledger: str = Field(description='folder of ledgers shared by runs; "" gives each run its own')
    noise: Literal["seeded", "secure"] = Field(
        description="Source of the noise in answers and private training: seeded (reproducible, "
        "for experiments) | secure (from a secret outside the run folder)."
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
        description="Number of clients that answer in a round, drawn from the public seed; null "
        "uses all. A client pays for the rounds in which it answers, and no amplification is "
        "claimed.",
    )
    evaluate_every: int = Field(
        1, ge=1, description="rounds between scores; the last round is always scored"
    )
    precision: Precision = Field(
        "auto",
        description="Precision of networks without private training: float32 | bfloat16 | auto, "
        "which is bfloat16 on a GPU that has it, and float32 otherwise.",
    )
    diagnostics: bool = Field(
        True, description="whether simulations score every client's teachers on the test split"
    )
    plugins: tuple[str, ...] = Field(
        (),
        description="Packages that provide further conf/ files, classes and networks "
        "(docs/extending.md): plugins=PACKAGE or plugins=[PACKAGE,PACKAGE]. Nothing is proven "
        "about them until they are reviewed.",
    )
    tracker: Literal["none", "tensorboard", "wandb", "mlflow"] = Field(
        "none",
        description="Where a run's numbers go, in addition to its folder: none | tensorboard | "
        "wandb | mlflow. Each is an extra, installed as in pip install 'fed-dpsd[wandb]', with its "
        "own settings, such as WANDB_MODE=offline.",
    )

    def __post_init__(self) -> None:
        if self.clients_per_round is not None:
            least = self.federation.min_clients
            if not (least or 1) <= self.clients_per_round <= self.num_clients:
                fewest = f"federation.min_clients={least}" if least else "1"
                raise ValueError(
                    f"clients_per_round={self.clients_per_round} must be between {fewest} and "
                    f"num_clients={self.num_clients}, or null for all"
                )
        if self.teacher.path is not None and self.teachers_per_client > 1:
            raise ValueError(
                f"teachers_per_client={self.teachers_per_client} cannot be read from "
                "teacher.path, which holds one teacher per client; use teachers_per_client=1"
            )

    @property
    def not_reviewed(self) -> tuple[str, ...]:
        """Return the plug-ins and the functions of teachers, which have not been reviewed.

        A student's computations are post-processing of answers, regardless of its network.
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
    """Return whether an architecture is named after a Python function (models/functions.py)."""
    return architecture.endswith("()")


def fields() -> dict[str, FieldInfo]:
    """Return the fields of all keys, such as "privacy.delta", that do not belong to a class."""
    return {
        f"{section}.{name}".lstrip("."): field
        for section, cls in SECTIONS.items()
        for name, field in cls.__pydantic_fields__.items()
        if field.description
    }


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every key that is not a group of keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
    """Return the configuration as JSON in the layout of conf/, which can be bound again."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True)
