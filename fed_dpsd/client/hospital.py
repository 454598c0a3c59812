"""A hospital: its own file, never a message, sets what it answers, by what means and how much.

The file is YAML with the keys of `Hospital`; `fed-dpsd site init` writes one with a line on each.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from fed_dpsd.accounts.account import Account, WhenRecordsChange
from fed_dpsd.accounts.card import plan_of
from fed_dpsd.accounts.ledger import FileLedger
from fed_dpsd.accounts.reading import ledgers_in
from fed_dpsd.accounts.secret import exchange_key, secret_of
from fed_dpsd.binder import Binder
from fed_dpsd.client.records import HospitalFiles, HospitalRecords, read
from fed_dpsd.client.secure_sum import Summing
from fed_dpsd.client.site import Site
from fed_dpsd.config import DataConfig, read_yaml, require, require_device_name
from fed_dpsd.errors import ConfigError, ProtocolError, UserError
from fed_dpsd.experiment import Experiment, set_up
from fed_dpsd.models.classifiers import CLASSIFIERS, add_networks
from fed_dpsd.models.devices import number_of_gpus, require_device
from fed_dpsd.plugins import files_of, find, searching
from fed_dpsd.privacy.mechanism import Relation, Trust, quorum_of, trust_of
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.privacy.secure_sum import Party
from fed_dpsd.privacy.training import TrainedUnit, TrainingMechanism
from fed_dpsd.protocol import MOST_CLASSES, are_classes, compare_classes
from fed_dpsd.storage import client_name

logger = logging.getLogger("fed_dpsd")

# The most that a message may ask for, by the key of conf/; a hospital's file may set other limits.
LIMITS = {
    "rounds": 10_000,
    "teachers_per_client": 100,
    "queries_per_round": 10_000,
    "model.teacher_width": 64,
    "teacher.epochs": 300,
    "teacher.min_steps": 10_000,
    "teacher.batch_size": 1_024,
    "training.steps": 10_000,
    "training.copies": 5,
    "training.records_per_patient": 16,
}
KEPT = 400  # teachers on disk besides a run's own; a deleted one is trained again, to the same bits
_REMEDY = "`fed-dpsd site init` writes one"


class NotAllowed(ProtocolError):
    """A message asks for something that this hospital does not do; the reason is public."""


@dataclass(frozen=True)
class Hospital:
    """A hospital's side of a federation.

    Args:
        name: name of this data set, borne by the ledger. A budget is per data set, for life.
        client: its number among the federation's `num_clients`, from 0.
        num_clients: number of clients of the federation.
        state: folder of the ledger, the teachers and the secret that noise is drawn from.
        files: its records.
        shape: (C, size, size) of the federation's images.
        classes: the names of the federation's classes, in the order that all agreed on: the same
            list as the experiment's.
        budget: epsilon (record, add_remove) that may ever be spent on this data, at `delta`.
        budget_relation: "replace_one" where the budget bounds replaced records too.
        units: the units by which a private training may protect: "record", "patient" or both. The
            budget bounds a record under either, so both are allowed unless the file says otherwise.
        delta: failure probability of the budget, between 0 and 1.
        queries: number of synthetic images that may ever be answered. A charge without images,
            such as a training, counts as one.
        threads: processor threads for its teachers.
        device: where its teachers answer, and plain ones learn: auto, cpu, cuda or cuda:N.
        methods, training, answers, models: names of conf/method, conf/training and conf/answers,
            and architectures, that it allows.
        trust: the parties that it trusts: "nobody"; "threshold", with `keys` and `colluding`, for
            secure sums; "server", which then sees answers without noise.
        keys: public keys for secure sums, of all hospitals in their order, each from the
            hospital's own `fed-dpsd site key`.
        colluding: number of hospitals that may work for the coordinator in secure sums, or look
            at their results. A secure sum that withstands fewer is refused.
        limits: limits on a message in place of those in LIMITS.
        plugins: plug-ins whose code may run here, besides what methods, training, answers and
            models allow of them. Nothing is proven of them until somebody has reviewed them.
        when_records_change: policy if records change during a run: "refuse" its further asks, or
            "retrain", which is charged.

    Raises:
        ValueError: a value is out of its range, or a name is unknown.
    """

    name: str
    client: int
    num_clients: int
    state: str
    files: HospitalFiles
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    budget: float
    delta: float
    queries: int
    threads: int
    methods: tuple[str, ...]
    training: tuple[str, ...]
    answers: tuple[str, ...]
    models: tuple[str, ...]
    trust: tuple[Trust, ...]
    keys: tuple[str, ...]
    colluding: int
    limits: Mapping[str, Any]
    when_records_change: WhenRecordsChange = "refuse"
    budget_relation: Relation = "add_remove"
    units: tuple[TrainedUnit, ...] = get_args(TrainedUnit)
    device: str = "cpu"
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self, client=0, num_clients=1, queries=0, threads=1)
        require(self, colluding=0)
        require_device_name(self, "device")
        if (
            len(self.shape) != 3
            or self.shape[0] not in (1, 3)
            or not 0 < self.shape[1] == self.shape[2]
        ):
            raise ValueError(f"shape={list(self.shape)} must be [1 or 3, size, size]")
        if not are_classes(self.classes):
            raise ValueError(
                f"classes=[{', '.join(self.classes)}] must be two or more different names, "
                "printable and not empty: those of the coordinator's data.classes, in their order"
            )
        self.files.check(self.classes)
        if self.keys and len(self.keys) != self.num_clients:
            raise ValueError(
                f"keys: {len(self.keys)} of num_clients={self.num_clients}; give each hospital's, "
                "from its `fed-dpsd site key`, or none"
            )
        if self.client >= self.num_clients:
            raise ValueError(
                f"client={self.client} must be below num_clients={self.num_clients}: the first is 0"
            )
        if not 0 <= self.budget < float("inf"):
            raise ValueError(f"budget={self.budget} must be finite and >= 0")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta={self.delta} must be between 0 and 1, both excluded")
        add_networks(find(self.plugins))
        known_names: dict[str, Collection[str]] = {
            "methods": _choices("method", self.plugins),
            "training": _choices("training", self.plugins),
            "answers": _choices("answers", self.plugins),
            "models": CLASSIFIERS,
        }
        for key, known in known_names.items():
            for name in getattr(self, key):
                if name not in known:
                    raise ValueError(f"{key}: {name!r} is unknown; there are {', '.join(known)}")
        for key, most in self.limits.items():
            if key not in LIMITS or isinstance(most, bool) or not isinstance(most, int):
                raise ValueError(f"limits.{key}={most!r}: give numbers for {', '.join(LIMITS)}")

    @property
    def num_classes(self) -> int:
        """Return K, the number of the federation's classes."""
        return len(self.classes)

    @property
    def folder(self) -> Path:
        """Return `state` as a path."""
        return Path(self.state)

    @property
    def ledger(self) -> FileLedger:
        """Return the ledger of this data set.

        Raises:
            UserError: the folder holds the ledger of another client number.
        """
        folder, own = self.folder / "ledger", client_name(self.client)
        others = ledgers_in(folder).keys() - {own}
        if others:
            raise UserError(
                f"client={self.client}: {folder} holds the account of {min(others)}; a hospital "
                "keeps its number for as long as it keeps its data"
            )
        with contextlib.suppress(OSError):  # the ledger reports the cause when it is opened
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return FileLedger(folder, self.client, self.name)

    def read(self) -> HospitalRecords:
        """Read its records.

        Raises:
            UserError: the records are not as `files` says.
        """
        return read(self.files, self.shape, self.classes)

    def experiment(self, text: str, images: int) -> Experiment:
        """Return a coordinator's experiment, with budget, data and places from this file instead.

        Args:
            text: `Experiment.to_json` of the coordinator.
            images: number of images that the coordinator now asks about.

        Raises:
            NotAllowed: the file does not allow the experiment, or it is malformed.
        """
        with _reading():
            raw = json.loads(text)
            self._check(raw)
            experiment = set_up(self._with_own_settings(raw), None, written=True)
        config, trust = experiment.config, trust_of(experiment.answers.noise_at)
        if images > config.queries_per_round:
            raise NotAllowed(
                f"{images} images in one ask; queries_per_round={config.queries_per_round}"
            )
        if trust not in self.trust:
            raise NotAllowed(f"this site does not trust the {trust}")
        if isinstance(experiment.training, TrainingMechanism):
            self._check_unit(experiment.training.unit)
        return experiment

    def check_classes(self, text: str) -> None:
        """Compare the classes of a coordinator's experiment with those of the file.

        Args:
            text: `Experiment.to_json` of the coordinator.

        Raises:
            NotAllowed: they are others, in another order, or malformed.
        """
        with _reading():
            self._check_classes(json.loads(text))

    def _check_classes(self, raw: Mapping[str, Any]) -> None:
        binder = Binder()
        data = binder.bind(DataConfig, raw["data"], "data.")
        binder.finish()
        assert data is not None
        if data.num_classes > MOST_CLASSES:  # before the names of so many are written
            raise NotAllowed(f"data.num_classes is at most {MOST_CLASSES:,}")
        try:
            compare_classes(self.classes, data.class_names)
        except ProtocolError as error:
            raise NotAllowed(str(error)) from None

    def _check_unit(self, unit: TrainedUnit) -> None:
        """Refuse a private training that bounds a unit which the file does not allow or name."""
        if unit not in self.units:
            raise NotAllowed(
                f"training.unit={unit}: this site trains by {' or '.join(self.units) or 'none'} "
                f"only; its file would allow it with `units: [{', '.join((*self.units, unit))}]`"
            )
        if unit == "patient" and self.files.patient_column is None:
            raise NotAllowed(
                "training.unit=patient: this site knows no patients; its file would name them with "
                "`patient_column: COLUMN` under `files:`"
            )

    def _check(self, raw: Mapping[str, Any]) -> None:
        """Refuse an experiment that the file does not allow, before any class is looked up."""
        self._check_classes(raw)
        own = list(map(str, find(self.plugins)))
        for plugin in raw.get("plugins", []):
            if plugin not in own:
                raise NotAllowed(
                    f"plugins={plugin}: this site runs {' and '.join(own) or 'no plug-in'} "
                    "(plugins: in its file)"
                )
        for group, key, names in (
            ("method", "methods", self.methods),
            ("training", "training", self.training),
            ("answers", "answers", self.answers),
        ):
            classes = [_choices(group, self.plugins)[name] for name in names]
            if raw[group]["_target_"] not in classes:
                raise NotAllowed(
                    f"this site allows {group}={' or '.join(names)} only ({key}: in its file)"
                )
        for model in (raw["model"]["teacher"], *raw["model"]["teachers"]):
            if model not in self.models:
                raise NotAllowed(f"this site's teachers are {' or '.join(self.models)} only")
        facts: dict[str, Any] = {"num_clients": self.num_clients, "data.shape": list(self.shape)}
        for key, fact in facts.items():
            if _value_at(raw, key) != fact:
                raise NotAllowed(f"{key} is {fact} at this site")
        for key, most in {**LIMITS, **self.limits}.items():
            value = _value_at(raw, key, 0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value <= most:
                raise NotAllowed(f"{key} is at most {most} at this site")
        if self.files.patient_column is None and raw["data"]["patient_column"] is not None:
            raise NotAllowed("this site knows no patients: data.patient_column must be null")
        if raw["teacher"]["path"] is not None or raw["teacher"]["arch"] is not None:
            raise NotAllowed("this site trains its own teachers: teacher.path must be null")

    def _with_own_settings(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the experiment with all settings that only this site decides."""
        own = {"patient_column": self.files.patient_column, "path": None, "hub": None}
        own["records_per_patient"] = None
        own_budget = ("budget", "delta", "budget_relation")
        budget = {key: getattr(self, key) for key in own_budget}
        places = {"out": str(self.folder), "run_folder": "", "ledger": str(self.folder / "ledger")}
        return {
            **raw,
            **places,
            "pictures": "",  # only a server draws questions; its folders are none of this machine
            "cache": str(self.folder / "cache"),
            "threads_client": self.threads,
            "client_device": self.device,
            "server_device": "cpu",  # the coordinator's is none of this machine
            "noise": "secure",
            "data": {**raw["data"], **own},
            "privacy": {**raw["privacy"], **budget},
            "federation": {**raw["federation"], "simulation": False},
        }

    def open(self, experiment: Experiment, run: str) -> Site:
        """Read the records anew, and return the site that answers for this hospital.

        Args:
            experiment: an experiment that the method `experiment` has returned.
            run: the coordinator's name of the run.

        Raises:
            NotAllowed: its secure sums withstand too few colluding clients.
            UserError: the records or the secret cannot be read, the keys are wrong, or the device
                is not there.
        """
        require_device("device", self.device, number_of_gpus())
        content = self.read()
        if content.count.skipped:
            logger.warning("%s", content.count)
        patients = content.records.patients
        self._prune(KEPT + experiment.config.teachers_per_client)
        secret, ledger = secret_of(self.folder / "secret"), self.ledger
        party = self._party(experiment, secret)
        account = Account(
            *(ledger, experiment.config.privacy, plan_of(experiment), run),
            *(self.queries, self.when_records_change, bool(experiment.config.plugins)),
        )
        return Site(
            config=experiment.config,
            training=experiment.training,
            answers=experiment.answers,
            client=self.client,
            records=content.records,
            shard_ids=content.ids if patients is None else patients,
            test=None,
            account=account,
            secret=SecretStreams(secret),
            summing=party and Summing(party, experiment.answers, ledger, run),
        )

    def _prune(self, most: int) -> None:
        """Delete all but the `most` teachers used last: messages may ask for any number of them."""
        paths = (self.folder / "cache" / "teachers").glob("*")
        with contextlib.suppress(FileNotFoundError):  # another process may be deleting them too
            for path in sorted(paths, key=lambda path: -path.stat().st_mtime)[most:]:
                path.unlink(missing_ok=True)

    def _party(self, experiment: Experiment, secret: bytes) -> Party | None:
        """Return its part in secure sums; None where the mechanism has none.

        Raises:
            NotAllowed: the sums withstand fewer colluding clients than the file demands.
            UserError: the file's keys are not those of all hospitals, its own in its place.
        """
        quorum = quorum_of(experiment.answers)
        if quorum is None:
            return None
        if quorum.colluding < self.colluding:
            raise NotAllowed(f"this site's sums hold against {self.colluding} colluding clients")
        try:
            keys = {number: bytes.fromhex(key) for number, key in enumerate(self.keys)}
            return Party(self.client, exchange_key(secret), keys, quorum.threshold)
        except ValueError as error:
            raise UserError(f"keys: {error}; see `fed-dpsd site key`") from None


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Refuse an experiment that cannot be read: a peer wrote it.

    Raises:
        NotAllowed: it is malformed.
    """
    try:
        yield
    except ConfigError as error:
        raise NotAllowed(f"the experiment is malformed: {error.problems[0]}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise NotAllowed("the experiment is malformed") from None


def open_file(path: Path) -> Hospital:
    """Return the hospital of a site's file; relative paths in it start from the file's folder.

    Raises:
        UserError: the file cannot be read, or is not as `Hospital` says.
    """
    try:
        raw = read_yaml(path)
    except ValueError as error:
        raise UserError(f"{path} is no site's file: {error}; {_REMEDY}") from None
    files = raw.get("files")
    if isinstance(files, Mapping) and "classes" in files:
        raise UserError(
            f"{path}: files.classes is no key. Name the federation's classes in order at the top, "
            "such as `classes: [normal, pneumonia]`; where your labels have other names, say so "
            "under files, such as `labels: {NORMAL: normal}`"
        )
    binder = Binder()
    hospital = binder.bind(Hospital, raw, "site.")
    binder.finish()
    assert hospital is not None
    return _with_absolute_paths(hospital, path.parent.absolute())


def _with_absolute_paths(hospital: Hospital, folder: Path) -> Hospital:
    """Return the hospital with absolute paths; relative ones start from `folder`."""

    def absolute(path: str) -> str:
        return str(folder / Path(path).expanduser())

    files = replace(hospital.files, path=absolute(hospital.files.path))
    return replace(hospital, state=absolute(hospital.state), files=files)


@functools.cache
def _choices(group: str, plugins: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the names of a group of conf/ and of plug-ins, with the class of each."""
    with searching(find(plugins)):
        files = {name: read_yaml(path) for name, path in files_of(group).items()}
    # A method's file may set other groups' keys too; its own are below `method` then.
    return {name: raw.get(group, raw)["_target_"] for name, raw in files.items()}


def _value_at(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a dotted key, or the default where its last part is missing."""
    *groups, last = key.split(".")
    for group in groups:
        tree = tree[group]
    return tree.get(last, default)
