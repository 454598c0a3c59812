"""Experiments: the objects of a composed configuration."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray

from fed_dpsd.checks import check, ignored_overrides, missing_public_features, warnings
from fed_dpsd.claims import planned_epsilon
from fed_dpsd.config import BUNDLED, Config, DataConfig, to_json
from fed_dpsd.config.bind import Binder
from fed_dpsd.config.compose import compose_skipping_invalid
from fed_dpsd.config.errors import choices_with_key, file_sets
from fed_dpsd.config.grid import require_one_run
from fed_dpsd.data import datasets, partition, sources
from fed_dpsd.data.datasets import Dataset
from fed_dpsd.data.intake import Records
from fed_dpsd.data.partition import Partition
from fed_dpsd.data.sources import with_classes
from fed_dpsd.errors import ConfigError, UserError, format_value, warn_once
from fed_dpsd.methods.method import Method, PublicContext
from fed_dpsd.models.classifiers import add_networks
from fed_dpsd.privacy.calibration import calibrate
from fed_dpsd.privacy.mechanism import Mechanism
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.randomized_response import LARGEST_EPSILON
from fed_dpsd.privacy.training import (
    TrainedUnit,
    Training,
    TrainingMechanism,
    default_unit,
)
from fed_dpsd.storage import home

PLUGINS_RUN = (
    "plug-ins run with all rights of this process, and nothing is proven about them until their "
    "code and proofs have been reviewed"
)
SHEET = 32  # test images of a contact sheet, at most
# For each field that calibrates a mechanism: the values that spend the least and the most.
CALIBRATED_BETWEEN = {
    "noise_multiplier": (1e7, 1e-2),
    "epsilon_per_answer": (1e-7, LARGEST_EPSILON),
}
# What a class must define itself, by the base of its kind, in addition to its abstract methods.
# A protocol's own methods return None, so they must not stand in for missing ones.
DEFINED: dict[type, tuple[str, ...]] = {
    Method: (),
    Training: ("name", "reads"),
    Mechanism: (
        "name",
        "input",
        "noise_at",
        "calibrated_by",
        "constrain_sensitivity",
        "add_noise",
        "admissible",
        "event",
    ),
    Partition: ("name", "seed", "deal"),
}


@dataclass(frozen=True)
class Experiment:
    """A configuration with the method, training, answers and partition that it names."""

    config: Config
    method: Method
    training: Training
    answers: Mechanism
    partition: Partition
    # the overrides as typed, which only reports show; None if unknown
    overrides: Sequence[str] | None = dataclasses.field(default=None, compare=False)

    @property
    def typed(self) -> dict[str, str]:
        """Return the values as typed, by key."""
        return dict(word.lstrip("+").partition("=")[::2] for word in self.overrides or ())

    @property
    def seeded(self) -> bool:
        """Return whether noise is drawn from the public seeds; in a deployment it never is."""
        return self.config.noise == "seeded" and self.config.federation.simulation

    @property
    def unit(self) -> TrainedUnit | None:
        """The unit with bounded gradients; None if answers alone protect records."""
        return getattr(getattr(self, calibrated_axis(self)), "unit", None)

    @property
    def method_name(self) -> str:
        """The name of the method's file."""
        return self.method.name

    @functools.cached_property
    def public(self) -> PublicContext:
        """The public side of the experiment, without test images."""
        return PublicContext(self.config, self.training, self.answers)

    @functools.cached_property
    def plan(self) -> Plan:
        """The charges that each client should expect."""
        return self.method.plan(self.public)

    @property
    def warnings(self) -> list[str]:
        """Warnings before a run with a student that will not learn, one sentence each."""
        found = warnings(self.config, self.method, self.training, self.answers, self.plan)
        found = [*self.training.warnings(self.config), *found]
        return [*self.method.warnings(self.config, self.training, self.answers), *found]

    def to_json(self) -> str:
        """Return the configuration as JSON, for `from_json` on another machine."""
        return to_json(self.config)

    def to_yaml(self) -> str:
        """Return the same, as `config.yaml` of a run folder holds it."""
        return yaml.safe_dump(json.loads(self.to_json()))

    def for_hospitals(self) -> str:
        """Return `to_json` without this machine's paths, which hospitals replace by their own."""
        config = self.config
        data = dataclasses.replace(config.data, path=None)
        model = dataclasses.replace(config.model, weights=None)
        changed = dataclasses.replace(config, out="", cache="", run_folder="", ledger="")
        return to_json(dataclasses.replace(changed, data=data, model=model))


def from_overrides(
    overrides: Sequence[str], base: Path | None, calibrate: bool = True
) -> Experiment:
    """Compose and bind typed overrides.

    Args:
        overrides: Hydra overrides, such as "rounds=10".
        base: as for `set_up`.
        calibrate: whether to calibrate the noise, which may take seconds; if false, call
            `calibrated` later.

    Raises:
        ConfigError: the overrides or the values have problems, one per line, such as noise that is
            both typed and calibrated. No data was read.
    """
    composition = compose_skipping_invalid(overrides)
    binder = Binder(composition.sources)
    binder.problems += composition.problems
    experiment = _bound(composition.values, base, False, binder)
    experiment = dataclasses.replace(experiment, overrides=list(overrides))
    name = experiment.training.name
    for setting in ignored_overrides(experiment.training, overrides):
        warn_once(f"{setting} has no effect: training={name} has its own keys, training.*")
    _check_target(experiment)
    return calibrated(experiment) if calibrate else experiment


def one_run(overrides: Sequence[str], base: Path | None) -> Experiment:
    """Return the experiment of overrides (see `from_overrides`), which must be a single run.

    Raises:
        ConfigError: the overrides have problems, or declare a grid of several experiments.
    """
    require_one_run(overrides, compose_skipping_invalid(overrides))
    return from_overrides(overrides, base)


def _check_target(experiment: Experiment) -> None:
    """Raise ConfigError if overrides set the noise that privacy.target_epsilon calibrates."""
    target, axis = experiment.config.privacy.target_epsilon, calibrated_axis(experiment)
    key = f"{axis}.{getattr(experiment, axis).calibrated_by}"
    typed = experiment.typed
    if target is not None and typed.get(key, "null") != "null":
        problem = (
            f"{key}={typed[key]} and privacy.target_epsilon={target:g} contradict each other: "
            f"the target sets this noise; leave out {key}, or use privacy.target_epsilon=null"
        )
        raise ConfigError([problem])


def from_json(text: str) -> Experiment:
    """Return the experiment that `Experiment.to_json` wrote."""
    return set_up(json.loads(text), None, written=True)


def set_up(
    raw: Mapping[str, Any],
    base: Path | None,
    written: bool = False,
) -> Experiment:
    """Bind the configuration that Hydra composed; calibrate to `privacy.target_epsilon`, if set.

    Args:
        raw: the composed configuration.
        base: folder that relative paths start from; None makes relative paths errors, where the
            working directory is not the user's.
        written: whether an experiment wrote `raw`, so that its noise is already calibrated.

    Raises:
        ConfigError: the configuration has problems, one per line. No data was read.
    """
    experiment = _bound(raw, base, written, Binder())
    return experiment if written else calibrated(experiment)


def _bound(raw: Mapping[str, Any], base: Path | None, written: bool, binder: Binder) -> Experiment:
    """Bind a configuration without calibrating; `binder` knows the typed settings."""
    names = raw.get("plugins", [])
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        add_networks(names)
        binder.packages = tuple(names)
        if names and not written:
            warn_once(f"{' and '.join(names)}: {PLUGINS_RUN}")
    if isinstance(raw["data"], Mapping) and not written:
        raw = {**raw, "data": with_classes(raw["data"], base, binder.problems)}
    config = binder.bind(Config, raw)
    binder.finish()
    assert config is not None

    patients = config.data.names_patients
    raw = {**raw, "training": _with_unit(binder, config.training, "training", patients)}
    public: dict[str, Any] = {"num_classes": config.data.num_classes}
    own = dict(config.method)
    if "baseline" in own:
        values = own["baseline"] if isinstance(own["baseline"], Mapping) else {}
        values = _with_unit(binder, values, "method.baseline", False)
        raw = {**raw, "method": {**config.method, "baseline": values}}
        own["baseline"] = _bind_class(binder, Training, values, "method.baseline", public)
    method = _bind_class(binder, Method, own, "method", {})
    name = str(own.get("name"))
    training = _bind_class(binder, Training, raw["training"], "training", public, name)
    public["shards"] = _shards(config, training)
    answering = _with_unit(binder, config.answers, "answers", patients)
    raw = {**raw, "answers": _with_noise(binder, answering, training)}
    answers = _bind_class(binder, Mechanism, raw["answers"], "answers", public, name)
    partition = _bind_class(binder, Partition, config.partition, "partition", {})
    binder.finish()

    binder.problems += check(config, method, training, answers, partition)
    resolved = {key: raw[key] for key in ("method", "training", "answers")}
    config = _resolve_paths(binder, dataclasses.replace(config, **resolved), base, written)
    binder.finish()
    return Experiment(config, method, training, answers, partition)


def _with_unit(
    binder: Binder, values: Mapping[str, Any], where: str, patients: bool
) -> Mapping[str, Any]:
    """Return the values of a choice; replace a null unit with the unit that suits the data."""
    cls = binder.locate("fed_dpsd.privacy", values.get("_target_"), f"{where}._target_")
    names = {field.name for field in dataclasses.fields(cls)} if cls else set()
    if values.get("unit") in ("record", "patient"):
        patients = values["unit"] == "patient"
    suited = {key: value for key, value in default_unit(patients).items() if key in names}
    return {**values, **{k: v for k, v in suited.items() if values.get(k) is None}}


def _shards(config: Config, training: Training | None) -> dict[str, Any]:
    """Return the fields of privacy.mechanism.Shards, from public facts."""
    patients = config.data.names_patients or getattr(training, "unit", "record") == "patient"
    # Private training also trains a teacher on an empty shard; a teacher from a file exists
    # before the records.
    silent = not isinstance(training, TrainingMechanism) and config.teacher.path is None
    by = "patient" if patients else "record"
    return {"teachers": config.teachers_per_client, "by": by, "silent": silent}


def _with_noise(
    binder: Binder, answers: Mapping[str, Any], training: Training | None
) -> Mapping[str, Any]:
    """Return the values of `answers`; replace null noise with noise that suits the training."""
    cls: Any = binder.locate("fed_dpsd.privacy", answers.get("_target_"), "answers._target_")
    field: str = getattr(cls, "calibrated_by", None) or ""
    # `_class_of` reports a class that is no mechanism.
    if cls is None or Mechanism not in cls.__mro__ or answers.get(field, 0) is not None:
        return answers
    return {**answers, field: cls.default_noise(training is not None and training.private)}


def calibrated_axis(experiment: Experiment) -> Literal["training", "answers"]:
    """Return the axis with the noise that carries a record's guarantee and is calibrated."""
    return "training" if isinstance(experiment.training, TrainingMechanism) else "answers"


def calibrated(experiment: Experiment) -> Experiment:
    """Calibrate the noise so that the planned run spends privacy.target_epsilon, if it is set.

    The target is per record or, with training.unit or answers.unit=patient, per patient.

    Raises:
        ConfigError: there is no noise to set, or no noise spends this epsilon.
    """
    config = experiment.config
    settings, axis = config.privacy, calibrated_axis(experiment)
    if settings.target_epsilon is None:
        return experiment
    mechanism, target = getattr(experiment, axis), settings.target_epsilon
    field = mechanism.calibrated_by
    if field is None:
        problem = (
            f"privacy.target_epsilon={target}: training=plain and answers={mechanism.name} "
            "have no noise to set; choose others, or target_epsilon=null"
        )
        raise ConfigError([problem])
    unit = experiment.unit or "record"

    def with_value(value: float) -> Experiment:
        changed = dataclasses.replace(mechanism, **{field: value})
        return dataclasses.replace(experiment, **{axis: changed})

    def spend(value: float, combined: bool = False) -> float:
        return planned_epsilon(with_value(value).plan, settings.delta, unit, combined)

    spend_combined = functools.partial(spend, combined=True)
    least, most = CALIBRATED_BETWEEN[field]
    try:
        value = calibrate(spend, target, least, most)
        # A budget does not count the answers of privately trained teachers, so their noise reduces
        # the epsilon only without a budget.
        may_combine = axis == "training" and settings.budget is None
        if may_combine and spend_combined(value) < spend(value) and spend_combined(most) >= target:
            value = calibrate(spend_combined, target, least, most)
    except ValueError as error:
        raise ConfigError([f"privacy.{error}"]) from None
    own: dict[str, Any] = {axis: {**getattr(config, axis), field: value}}
    return dataclasses.replace(with_value(value), config=dataclasses.replace(config, **own))


def _names_images(data: DataConfig) -> bool:
    """Return whether a configuration names a source of images; a coordinator may have none."""
    return data.path is not None or data.hub is not None or data.name == BUNDLED


def test_split(experiment: Experiment) -> Records | None:
    """Return the split that the server tests its student on; None without images."""
    config = experiment.config
    if not (_names_images(config.data) or config.federation.simulation):
        return None
    test = datasets.load_test(config.data, Path(config.cache))
    return test if len(test) else None


def contact_sheet(experiment: Experiment, test: Records | None) -> dict[int, NDArray[np.uint8]]:
    """Return the first (n, C, H, W) test images of each class, by label; at most SHEET in all.

    Never a training record: the copies of training images in a test split are left out.

    Args:
        experiment: the experiment.
        test: its `test_split`; None gives {}.
    """
    if test is None:
        return {}
    config, shown = experiment.config, np.arange(len(test))
    if config.federation.simulation:
        shown = np.flatnonzero(~load_data(config.data, config.cache).copied)
    labels = test.labels[shown]
    classes = np.unique(labels)[:SHEET]
    return {
        int(label): np.asarray(test.images[shown[labels == label][: SHEET // len(classes)]])
        for label in classes
    }


def evaluated_on(experiment: Experiment, test: Records | None) -> str:
    """Describe the images that accuracies are measured on (in a deployment, the coordinator's)."""
    if test is None:
        return "nothing: there are no test images"
    simulation = experiment.config.federation.simulation
    whose = "taken as public in a simulation" if simulation else "the coordinator's own"
    name = experiment.config.data.name
    of = "" if name in ("folder", "imagefolder") else f" of {name}"  # formats, not data sets
    return f"{len(test):,} test images{of}, {whose}"


def _class_of(binder: Binder, base: type, path: Any, where: str) -> type | None:
    """Return the class that a choice names, or None after recording a problem.

    It must derive from `base`, the base of its kind, and define what `base` leaves open.
    """
    cls = binder.locate(base.__module__.rpartition(".")[0], path, f"{where}._target_")
    if cls is None:
        return None
    problems = []
    if base not in cls.__mro__:
        problems.append(f"does not derive from {base.__module__}.{base.__name__}")
    else:
        classes = cls.__mro__[: cls.__mro__.index(base)]
        fields = {field.name for field in dataclasses.fields(cls)}
        defined = fields.union(*map(vars, classes))
        missing = {name: base for name in DEFINED[base] if name not in defined}
        for name in sorted(getattr(cls, "__abstractmethods__", ())):
            missing[name] = next(each for each in cls.__mro__ if name in vars(each))
        problems += [
            f"has no {name}; define it in class {cls.__name__}, as "
            f"{owner.__module__}.{owner.__name__} describes"
            for name, owner in missing.items()
        ]
        noise = getattr(cls, "calibrated_by", None)
        if noise is not None and noise not in CALIBRATED_BETWEEN.keys() & fields:
            problems.append(
                f"has calibrated_by={format_value(noise)}; name a field of class {cls.__name__}, "
                f"{' or '.join(CALIBRATED_BETWEEN)}, or None without noise"
            )
    binder.problems += [f"{where}._target_={path} {problem}" for problem in problems]
    return None if problems else cls


def _bind_class(
    binder: Binder,
    base: type,
    values: Mapping[str, Any],
    where: str,
    public: dict[str, Any],
    method: str = "",
) -> Any:
    """Return an instance of the class that `_target_` names, from its keys and public facts.

    `method` is the chosen method; its file may set keys that the class lacks.
    """
    cls = _class_of(binder, base, values.get("_target_"), where)
    if cls is None:
        return None
    names = {field.name for field in dataclasses.fields(cls)}
    arguments = {key: value for key, value in values.items() if key != "_target_"}
    for key in arguments.keys() - names:
        if fitting := choices_with_key(f"{where}.{key}"):  # the file of another choice sets it
            name = getattr(cls, "name", cls.__name__)
            sets = file_sets("method", method, f"{where}.{key}")
            setter = f"method={method}" if sets else "another choice"
            binder.problems.append(
                f"{where}={name} has no {where}.{key}, which {setter} sets; use {fitting}"
            )
            del arguments[key]
    arguments |= {key: value for key, value in public.items() if key in names}
    return binder.bind(cls, arguments, f"{where}.")


def _resolve_paths(binder: Binder, config: Config, base: Path | None, written: bool) -> Config:
    """Return the configuration with absolute and default paths; check the paths of input files."""

    def absolute(key: str, value: str) -> str:
        return sources.absolute_path(key, value, base, binder.problems)

    changes: dict[str, Any] = {
        "out": absolute("out", config.out) if config.out else str((base or home()) / "runs"),
        "cache": absolute("cache", config.cache) if config.cache else str(home() / "cache"),
        "run_folder": config.run_folder and absolute("run_folder", config.run_folder),
        "ledger": config.ledger and absolute("ledger", config.ledger),
    }
    if config.data.path is not None and config.data.name != BUNDLED:  # bundled data reads no path
        path = sources.data_path(config.data.path, base, binder.problems)
        changes["data"] = dataclasses.replace(config.data, path=path)
    if config.teacher.path is not None:
        path = absolute("teacher.path", config.teacher.path)
        changes["teacher"] = dataclasses.replace(config.teacher, path=path)
        clients = range(config.num_clients if config.federation.simulation and not written else 0)
        files = dict.fromkeys(path.replace("{client}", str(client)) for client in clients)
        if missing := next((file for file in files if not Path(file).is_file()), None):
            binder.problems.append(
                f"teacher.path={config.teacher.path}: {missing} does not exist; give the "
                "safetensors file of a trained teacher"
            )
    if config.model.weights is not None:
        path = absolute("model.weights", config.model.weights)
        changes["model"] = dataclasses.replace(config.model, weights=path)
    config = dataclasses.replace(config, **changes)
    if not written:  # a hospital's errors must not name its files to the coordinator
        binder.problems += missing_public_features(config)
    return config


# --- simulated records ---


@functools.lru_cache(maxsize=2)
def load_data(config: DataConfig, cache: str) -> Dataset:
    """Return a data set, loaded once per process or since `forget_data`."""
    return datasets.load(config, Path(cache))


@functools.lru_cache(maxsize=2)
def count_items(config: DataConfig, cache: str) -> tuple[int | None, bool]:
    """Return `datasets.count_items`, counted once per process or since `forget_data`."""
    return datasets.count_items(config, Path(cache))


def forget_data() -> None:
    """Read data again when it is next needed: its files may have changed."""
    count_items.cache_clear()
    load_data.cache_clear()
    _partitions.cache_clear()


@functools.lru_cache(maxsize=2)
def _partitions(
    data: DataConfig, cache: str, rule: partition.Partition, num_clients: int
) -> list[NDArray[np.int64]]:
    train = load_data(data, cache).train
    return partition.load_or_split(rule, train.labels, num_clients, Path(cache), train.patients)


def partitions(experiment: Experiment) -> list[NDArray[np.int64]]:
    """Return each simulated client's indices into the training split, computed once per process.

    If patients are known, all records of a patient go to one client.
    """
    config = experiment.config
    return _partitions(config.data, config.cache, experiment.partition, config.num_clients)


def partition_digest(experiment: Experiment) -> str:
    """Return 16 hexadecimal digits that depend on the training records and on how they are dealt.

    They depend on pixels, labels and patients, not on the names or the place of files.
    """
    config = experiment.config
    known = load_data(config.data, config.cache).digests
    records = {name: own for name, own in known.items() if name.startswith("training ")}
    facts = json.dumps([records, config.data.records_per_patient])
    digest = hashlib.sha256(facts.encode())
    for part in partitions(experiment):
        digest.update(hashlib.sha256(part.tobytes()).digest())
    return digest.hexdigest()[:16]


def unused_records(experiment: Experiment) -> str:
    """Report how many training records of a simulation are at no client, and why; "" if none.

    The numbers are exact: only the owner of a simulation may see them.
    """
    config = experiment.config
    if not config.federation.simulation:
        return ""
    train, parts = load_data(config.data, config.cache).train, partitions(experiment)
    return partition.unused_records(experiment.partition, train.labels, parts, train.patients)


def data_counts(experiment: Experiment) -> list[str]:
    """Return how many files or rows of a run's data were found, used and skipped, and why.

    In a deployment they are the coordinator's test images. The numbers are exact: only the owner of
    the data may see them.
    """
    config = experiment.config
    try:
        if config.federation.simulation:
            return [*load_data(config.data, config.cache).counts]
        if not _names_images(config.data):
            return []
        return [*filter(None, [datasets.test_count(config.data, Path(config.cache))])]
    except UserError:  # the run itself reports it
        return []


def largest_partition(experiment: Experiment) -> int | None:
    """Return the number of records of the largest simulated client; None if it is not public."""
    if not experiment.config.federation.simulation:
        return None
    try:
        return max(map(len, partitions(experiment)))
    except UserError:  # the run itself reports it
        return None
