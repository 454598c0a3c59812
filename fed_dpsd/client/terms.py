"""The terms of a hospital: the contents of its own file and the experiments that it allows.

A refusal names the rejected value. It is public and depends only on the file.
"""

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import Field, NonNegativeInt

from fed_dpsd.accounts.account import WhenRecordsChange
from fed_dpsd.client.records import HospitalFiles
from fed_dpsd.config import (
    LARGEST_SIDE,
    MOST_CLIENTS,
    MOST_THREADS,
    DataConfig,
    Device,
    Fit,
    Precision,
)
from fed_dpsd.config.bind import bind_dataclass, read_yaml
from fed_dpsd.config.compose import method_values
from fed_dpsd.config.plugins import files_of, search_plugins
from fed_dpsd.errors import ConfigError, ProtocolError, format_value
from fed_dpsd.models.classifiers import CLASSIFIERS, add_networks
from fed_dpsd.models.public_networks import digest_of
from fed_dpsd.privacy.mechanism import Relation, Trust
from fed_dpsd.privacy.training import TrainedUnit
from fed_dpsd.protocol import (
    LONGEST_NAME,
    MOST_CLASSES,
    is_class_list,
    is_hospital_name,
    require_equal_classes,
)

# The largest values that a message may request, by key of conf/; a hospital's file may set others.
LIMITS = {
    "rounds": 10_000,
    "teachers_per_client": 100,
    "queries_per_round": 10_000,
    "model.teacher_width": 64,
    "model.pixels": 512,
    "teacher.epochs": 300,
    "teacher.min_steps": 10_000,
    "teacher.batch_size": 1_024,
    "training.steps": 10_000,
    "training.copies": 5,
    "training.records_per_patient": 16,
    "answers.copies": 5,
    "answers.records_per_patient": 16,
}


class NotAllowed(ProtocolError):
    """A message requests something that this hospital does not allow; the reason is public."""


@contextlib.contextmanager
def refuse_malformed() -> Iterator[None]:
    """Turn the errors of reading a peer's experiment into refusals.

    Raises:
        NotAllowed: the experiment is malformed.
    """
    try:
        yield
    except ConfigError as error:
        raise NotAllowed(f"the experiment is malformed: {error.problems[0]}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise NotAllowed("the experiment is malformed") from None


@dataclass(frozen=True)
class Terms:
    """The contents of a hospital's file: its data, its budget, and the experiments it allows.

    Args:
        name: name of this data set and its ledger. A budget covers the data set's lifetime.
        client: number of the hospital among the federation's `num_clients`, from 0.
        hospital: public name of the hospital, which the coordinator shows next to its number.
        num_clients: number of clients of the federation.
        state: folder of the ledger, the teachers and the noise secret.
        files: its records.
        shape: (C, size, size) of the federation's images.
        fit: how images become square at all hospitals: crop, pad or stretch.
        classes: the names of the federation's classes, in the agreed order; the same list as the
            experiment's.
        budget: lifetime limit on the epsilon (record, add_remove) spent on this data, at `delta`.
        budget_relation: "replace_one" if the budget bounds replaced records too.
        units: the units that private training may protect: "record", "patient" or both; None for
            "patient" if `files` names patients, otherwise for "record". The budget bounds a record
            with either unit.
        delta: failure probability of the budget, between 0 and 1.
        queries: lifetime limit on the number of answered synthetic images. A charge without images,
            such as for training, counts as one.
        threads: CPU threads for its teachers.
        device: device that teachers answer on and plain teachers learn on: auto, cpu, cuda or
            cuda:N.
        precision: precision of plain teachers: auto, float32 or bfloat16.
        methods, training, answers, models: the allowed names of conf/method, conf/training and
            conf/answers, and architectures.
        trust: the trusted parties: "nobody"; "threshold", with `keys` and `colluding`, for secure
            sums; or "server", which then sees answers without noise.
        keys: public keys of all hospitals for secure sums, in the hospitals' order, each printed by
            the hospital's own `fed-dpsd site key`.
        colluding: number of other hospitals that secure sums must withstand together with the
            coordinator; a hospital that sees the result counts as one. Secure sums that withstand
            fewer are refused.
        weights: safetensors file of public features, for experiments with a `model.backbone` and
            this file's digest; None refuses them.
        limits: limits on a message, which override LIMITS.
        plugins: plug-ins that may run here; methods, training, answers and models must allow their
            parts too. Nothing is proven about plug-ins until they have been reviewed.
        when_records_change: policy if records change during a run: "refuse" further requests, or
            "retrain" at an additional charge.

    Raises:
        ValueError: a value is out of its range, or a name is unknown.
    """

    name: str
    client: NonNegativeInt
    num_clients: Annotated[int, Field(ge=1, le=MOST_CLIENTS)]
    state: str
    files: HospitalFiles
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    budget: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    queries: NonNegativeInt
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)]
    methods: tuple[str, ...]
    training: tuple[str, ...]
    answers: tuple[str, ...]
    models: tuple[str, ...]
    trust: tuple[Trust, ...]
    keys: tuple[str, ...]
    colluding: NonNegativeInt
    limits: Mapping[str, Any]
    when_records_change: WhenRecordsChange = "refuse"
    budget_relation: Relation = "add_remove"
    units: tuple[TrainedUnit, ...] | None = None
    device: Device = "cpu"
    precision: Precision = "auto"
    plugins: tuple[str, ...] = ()
    weights: str | None = None
    fit: Fit = "crop"
    hospital: str = ""

    def __post_init__(self) -> None:
        for key, what in (("name", "a name of the data set"), ("state", "a folder")):
            if not getattr(self, key).strip():
                raise ValueError(f"{key}= is empty; give {what}")
        if not is_hospital_name(self.hospital):
            raise ValueError(
                f"hospital={self.hospital!r} must be printable, at most {LONGEST_NAME} long, and "
                "more than a number"
            )
        if (
            len(self.shape) != 3
            or self.shape[0] not in (1, 3)
            or not 0 < self.shape[1] == self.shape[2] <= LARGEST_SIDE
        ):
            raise ValueError(
                f"shape={list(self.shape)} must be [1 or 3, size, size], size <= {LARGEST_SIDE}"
            )
        if not is_class_list(self.classes):
            raise ValueError(
                f"classes=[{', '.join(self.classes)}] must be two or more different names, "
                "printable and not empty: the coordinator's data.classes, in the same order"
            )
        self.files.check(self.classes)
        if self.keys and len(self.keys) != self.num_clients:
            raise ValueError(
                f"keys: {len(self.keys)} of num_clients={self.num_clients}; give each hospital's, "
                "from its `fed-dpsd site key`, or none"
            )
        if self.client >= self.num_clients:
            raise ValueError(
                f"client={self.client} must be below num_clients={self.num_clients}; the first is 0"
            )
        add_networks(self.plugins)
        known_names: dict[str, Collection[str]] = {
            "methods": choices("method", self.plugins),
            "training": choices("training", self.plugins),
            "answers": choices("answers", self.plugins),
            "models": CLASSIFIERS,
        }
        for key in (*known_names, "trust"):
            if not getattr(self, key):
                raise ValueError(f"{key}=[] allows no experiment; name at least one")
        for key, known in known_names.items():
            for name in getattr(self, key):
                if name not in known:
                    raise ValueError(f"{key}: {name!r} is unknown; use {', '.join(known)}")
        for key, most in self.limits.items():
            if key not in LIMITS or isinstance(most, bool) or not isinstance(most, int):
                raise ValueError(f"limits.{key}={most!r}: give numbers for {', '.join(LIMITS)}")
            if most < 0:
                raise ValueError(f"limits.{key}={most} must be >= 0")

    @property
    def num_classes(self) -> int:
        """Return K, the number of the federation's classes."""
        return len(self.classes)

    @property
    def allowed_units(self) -> tuple[TrainedUnit, ...]:
        """Return the units that private training may protect, from `units` or the data."""
        if self.units is not None:
            return self.units
        return ("record",) if self.files.patient_column is None else ("patient",)

    def check(self, raw: Mapping[str, Any]) -> None:
        """Refuse an experiment that the file does not allow, before looking up any Python class.

        Raises:
            NotAllowed: the experiment simulates its clients, has different classes, or requests
                more than the file allows; the message has all such problems.
        """
        if raw["federation"]["simulation"] is not False:
            raise NotAllowed("this is a hospital; run with federation=deployment")
        if problems := list(self._problems(raw)):
            raise NotAllowed("; ".join(problems))

    def _problems(self, raw: Mapping[str, Any]) -> Iterator[str]:
        yield from self._problems_of_classes(raw)
        for plugin in raw.get("plugins", []):
            if plugin not in self.plugins:
                runs = " and ".join(self.plugins) or "no plug-in"
                yield f"plugins={plugin}: this site runs {runs} (plugins: in its file)"
        for group, key, names in (
            ("method", "methods", self.methods),
            ("training", "training", self.training),
            ("answers", "answers", self.answers),
        ):
            if not self._allows(group, raw[group], names):
                yield f"this site allows only {group}={' or '.join(names)} ({key}: in its file)"
        yield from self._problems_of_baseline(raw["method"].get("baseline"))
        if {raw["model"]["teacher"], *raw["model"]["teachers"]} - set(self.models):
            allowed = " or ".join(self.models)
            yield f"this site allows only the teachers {allowed} (models: in its file)"
        if raw["model"].get("backbone") is not None:
            digest = digest_of("weights", self.weights) if self.weights else None
            if digest is None or raw["model"]["digest"] != digest:
                yield (
                    f"model.digest is {digest} at this site (weights: in its file); all sites must "
                    "have the same file of public features"
                )
        window = self.files.window
        facts = {
            "num_clients": self.num_clients,
            "data.shape": list(self.shape),
            # An exported student converts new pictures by the coordinator's settings.
            "data.fit": self.fit,
            "data.window": list(window) if isinstance(window, tuple) else window,
        }
        for key, fact in facts.items():
            if _value_at(raw, key) != fact:
                yield f"{key} is {format_value(fact)} at this site"
        for key, most in {**LIMITS, **self.limits}.items():
            value = _value_at(raw, key, 0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value <= most:
                yield f"{key} is at most {most} at this site"
        if self.files.patient_column is None and raw["data"]["patient_column"] is not None:
            yield "this site has no patient column: data.patient_column must be null"
        if raw["teacher"]["path"] is not None or raw["teacher"]["arch"] is not None:
            yield "this site trains its own teachers: teacher.path must be null"

    def _allows(self, group: str, own: Mapping[str, Any], names: Collection[str]) -> bool:
        """Return whether a choice matches one of the names by class and, for a method, by needs.

        Methods that differ only in settings share a class; a message states their name and needs.
        """
        if own["_target_"] not in [choices(group, self.plugins)[name] for name in names]:
            return False
        if group != "method":
            return True
        if (name := own.get("name")) not in names:
            return False
        allowed = method_values(str(name), self.plugins)
        return all(allowed.get(key) == own.get(key) for key in ("_target_", "needs"))

    def _problems_of_baseline(self, own: Any) -> Iterator[str]:
        """Yield a problem with a second training, by a plug-in's class not in `training`."""
        if not isinstance(own, Mapping) or own["_target_"] in choices("training").values():
            return
        if not self._allows("training", own, self.training):
            yield (
                f"this site allows only method.baseline={' or '.join(self.training)} or one of "
                "FedDPSD's (training: in its file)"
            )

    def check_unit(self, key: str, unit: TrainedUnit) -> None:
        """Refuse a private training if the file does not allow its unit, which `key` sets.

        Without a column of patients, it allows no patients.
        """
        allowed = self.allowed_units
        remedy = "".join(f"use {key}={each}, or " for each in allowed if each != unit)
        if unit == "patient" and self.files.patient_column is None:
            raise NotAllowed(
                f"{key}=patient: this site has no patient column; {remedy}set one in its "
                "file with `patient_column: COLUMN` under `files:`"
            )
        if unit not in allowed:
            named = ", because its data names patients" if self.units is None else ""
            more = (each for each in get_args(TrainedUnit) if each in (*allowed, unit))
            raise NotAllowed(
                f"{key}={unit}: this site trains only by {' or '.join(allowed) or 'none'}"
                f"{named}; {remedy}allow it in its file with `units: [{', '.join(more)}]`"
            )

    def _problems_of_classes(self, raw: Mapping[str, Any]) -> Iterator[str]:
        data = bind_dataclass(DataConfig, raw["data"], "data.")
        if data.num_classes > MOST_CLASSES:  # before writing so many names
            yield f"data.num_classes is at most {MOST_CLASSES:,}"
            return
        try:
            require_equal_classes(self.classes, data.class_names)
        except ProtocolError as error:
            yield str(error)


@functools.cache
def choices(group: str, plugins: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the names in a group of conf/ and plug-ins, with the class of each."""
    with search_plugins(plugins):
        files = {name: read_yaml(path) for name, path in files_of(group).items()}
    # A method's file may also set keys of other groups; its own keys are then below `method`.
    return {name: raw.get(group, raw)["_target_"] for name, raw in files.items()}


def _value_at(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a dotted key, or the default if its last part is missing."""
    *groups, last = key.split(".")
    for group in groups:
        tree = tree[group]
    return tree.get(last, default)
