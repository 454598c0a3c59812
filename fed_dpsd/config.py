"""The configuration: a single schema for `fed-dpsd run KEY=VALUE ...` and Flower's `--run-config`.

Hydra composes conf/. The result is bound (binder.py) to the frozen dataclasses here, whose fields
are the keys of the YAML files. No data is read before.
"""

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fed_dpsd.errors import ConfigError
from fed_dpsd.renamed import former_privacy
from fed_dpsd.storage import conf_folder

FLAT_KEYS = ("num_clients", "out", "overrides")


@dataclass(frozen=True)
class DataConfig:
    """The keys of conf/data: the source of the images. `path`, a folder, wins over `hub`.

    A label is the value of `label_column`, or the one of `label_columns` that is true; records in
    which none is true, or several are, are left out. An image of another size than `shape` is an
    error; with `resize`, its middle square is scaled to `shape`. With `patient_column`, all records
    of a patient go to the same teacher of a client. A simulation may make patients up instead:
    `records_per_patient` records of one class at one client each.
    """

    name: str
    hub: str | None
    path: str | None
    image_column: str
    label_column: str | None
    patient_column: str | None
    shape: tuple[int, ...]
    num_classes: int
    # The text of a configuration is part of the key that decoded images are cached under. It names
    # none of these, so that keys stay; `datasets` adds the last two where they are set.
    records_per_patient: int | None = dataclasses.field(default=None, repr=False)
    resize: bool = dataclasses.field(default=False, repr=False)
    label_columns: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.records_per_patient is not None:
            require(self, records_per_patient=1)
            if self.patient_column is not None:
                raise ValueError(
                    f"records_per_patient={self.records_per_patient} makes patients up, and "
                    f"patient_column={self.patient_column!r} names them; give one of the two"
                )
        if len(self.shape) != 3 or self.shape[0] not in (1, 3) or self.shape[1] != self.shape[2]:
            raise ValueError(f"shape={list(self.shape)} must be [1 or 3, size, size]")
        if self.shape[1] < 8 or self.shape[1] % 4:
            raise ValueError(f"shape={list(self.shape)}: the size must be a multiple of 4, >= 8")
        require(self, num_classes=2)
        if (self.label_column is None) == (not self.label_columns):
            raise ValueError(
                f"label_column={self.label_column!r} and label_columns={list(self.label_columns)}: "
                "give one of the two"
            )
        if self.label_columns and len(self.label_columns) != self.num_classes:
            raise ValueError(
                f"label_columns={list(self.label_columns)} has {len(self.label_columns)} classes, "
                f"but num_classes={self.num_classes}; give a column for each class"
            )


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
        if (self.path is None) != (self.arch is None):
            raise ValueError(
                f"path={self.path!r} and arch={self.arch!r} go together: give both, or none"
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
                f"budget_relation={self.budget_relation!r} must be 'add_remove' or 'replace_one'"
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
        if self.min_clients is not None and (self.simulation or self.min_clients < 1):
            raise ValueError(
                f"min_clients={self.min_clients} must be >= 1, or null, as in a simulation"
            )


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
            raise ValueError(f"noise={self.noise!r} must be seeded or secure")
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
            raise ValueError(
                f"{name}={getattr(instance, name)!r} must be auto, cpu, cuda or cuda:N"
            )


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping that a YAML file holds.

    Raises:
        ValueError: the file cannot be read, or holds no mapping; the error says why.
    """
    try:
        raw = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(getattr(error, "strerror", None) or "it is not YAML") from None
    if not isinstance(raw, dict):
        raise ValueError("it is empty")
    return raw


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose conf/ with Hydra `overrides` into plain dictionaries.

    `sweep` is left out, and `device`, for which two other keys stand.

    Raises:
        ConfigError: an override has wrong syntax, names an unknown key, or an unknown choice.
    """
    composed = _compose(overrides).items()
    return {key: value for key, value in composed if key not in ("sweep", "device")}


def declared_sweep(experiment: str) -> Any:
    """Return the `sweep` of an experiment's file: overrides, each with choices as for `choices`."""
    return _compose([f"experiment={experiment}"])["sweep"]


def choices(override: str) -> tuple[str, list[str]]:
    """Return the key of an override in Hydra's sweep syntax, and its choices, at least one.

    Raises:
        ConfigError: the syntax is wrong, or the choices cannot be listed.
    """
    try:
        parsed = OverridesParser.create().parse_override(override)
        if parsed.is_sweep_override():
            return parsed.get_key_element(), list(parsed.sweep_string_iterator())
        return parsed.get_key_element(), [parsed.get_value_element_as_str()]
    except HydraException as error:
        raise ConfigError([_explain(str(error), [override])]) from None


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    if problems := list(filter(None, map(former_privacy, overrides))):
        raise ConfigError(problems)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
            composed = hydra.compose("config", overrides=list(overrides))
        return typing.cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_explain(str(error), overrides)]) from None


def _explain(message: str, overrides: Sequence[str]) -> str:
    """Return Hydra's error as one line, with the nearest key that exists."""
    if choice := re.search(r"Could not find '([\w]+)/(.+?)'", message):
        group, name = choice.groups()
        names = sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))
        return f"{group}={name} is unknown; choose one of: {', '.join(names)}"
    if unknown := re.search(r"Could not override '([^']+)'", message):
        key = unknown.group(1)
        groups = [path.name for path in conf_folder().iterdir() if path.is_dir()]
        chosen = [each for each in overrides if each.partition("=")[0] in groups]
        near = difflib.get_close_matches(key, _flat_keys(compose(chosen)), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "; conf/ lists the keys"
        return f"override '{key}' is not a configuration key{hint}"
    first_line = message.strip().splitlines()[0]
    return f"overrides {' '.join(overrides)!r}: {first_line}; write KEY=VALUE, one by one"


def _flat_keys(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = [prefix + key for key in tree]
    for key, value in tree.items():
        if isinstance(value, Mapping):
            keys += _flat_keys(value, f"{prefix}{key}.")
    return keys


def split_overrides(text: str) -> list[str]:
    """Split a string of overrides at blanks outside Hydra's quotes and brackets, keeping both.

    >>> split_overrides("method=dense model.teachers=[cnn, mlp] out='a b'")
    ['method=dense', 'model.teachers=[cnn, mlp]', "out='a b'"]
    """
    tokens, token, quote, depth, escaped = [], "", "", 0, False
    for character in text:
        if not quote and depth == 0 and character.isspace():
            tokens.append(token)
            token = ""
            continue
        token += character
        if quote:
            quote = "" if character == quote and not escaped else quote
        elif character in "'\"" and not escaped:
            quote = character
        else:
            depth += (character in "[{(") - (character in ")}]")
        escaped = character == "\\" and not escaped
    if quote or depth > 0:
        raise ConfigError([f"overrides={text!r}: a quote or bracket is not closed"])
    return [token for token in [*tokens, token] if token]


def from_run_config(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Compose the configuration of `flwr run --run-config`: flat keys, and a string of overrides.

    An empty value means that the key is not set. Flower checks no types, so they are checked here
    and in `bind`.

    Raises:
        ConfigError: a key has a wrong type, or a flat key stands in `overrides` too.
    """
    text = run_config.get("overrides", "")
    if not isinstance(text, str):
        raise ConfigError([f'overrides={text!r} must be a string, as in overrides="rounds=10"'])
    overrides = split_overrides(text)
    flat = {key: run_config[key] for key in FLAT_KEYS[:2] if run_config.get(key, "") != ""}
    if twice := flat.keys() & {override.split("=")[0].lstrip("+") for override in overrides}:
        problem = "is given twice, flat and in overrides; keep one of them"
        raise ConfigError([f"{key} {problem}" for key in sorted(twice)])
    return compose(overrides) | flat


def to_json(config: Config) -> str:
    """Return the whole configuration as JSON, in the layout of conf/, so that it can be bound."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True)
