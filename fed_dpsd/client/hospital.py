"""A hospital, which answers only as its own file allows; no message can change that.

The file is YAML with the keys of `Terms`; `fed-dpsd site init` writes one with comments.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fed_dpsd.accounts.account import Account
from fed_dpsd.accounts.database import ledgers_in
from fed_dpsd.accounts.ledger import FileLedger
from fed_dpsd.accounts.secret import exchange_key, load_or_create_secret
from fed_dpsd.client.records import HospitalRecords, count_items, read
from fed_dpsd.client.secure_sum import SecureSums
from fed_dpsd.client.site import Site
from fed_dpsd.client.terms import NotAllowed, Terms, refuse_malformed
from fed_dpsd.config import require_device
from fed_dpsd.config.bind import bind_dataclass, read_yaml
from fed_dpsd.errors import UserError, format_value
from fed_dpsd.experiment import Experiment, calibrated_axis, set_up
from fed_dpsd.models.devices import number_of_gpus, torch_device
from fed_dpsd.models.precision import uses_bfloat16
from fed_dpsd.needs import require_room_of_hospital
from fed_dpsd.privacy.mechanism import quorum_of, trust_of
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.privacy.secure_sum import Party
from fed_dpsd.storage import client_name, expanded

logger = logging.getLogger("fed_dpsd")

KEPT = 400  # teachers kept in addition to a run's own; deleted ones are retrained bit for bit
_REMEDY = "`fed-dpsd site init` writes one"


@dataclass(frozen=True)
class Hospital(Terms):
    """A hospital's side of a federation, which reads, checks and answers under its file's terms."""

    @property
    def folder(self) -> Path:
        """Return `state` as a path."""
        return Path(self.state)

    @property
    def ledger(self) -> FileLedger:
        """Return this data set's ledger.

        Raises:
            UserError: the folder holds another client's ledger.
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
        """Read the records. Raises UserError if they do not match `files`."""
        return read(self.files, self.shape, self.classes, self.fit)

    def problem_of_delta(self, records: int) -> str:
        """Return why `delta` is too large for a number of records; "" if it is not."""
        if self.delta * records < 1:
            return ""
        return (
            f"site.delta={self.delta:g} must be below 1 / {records:,}, the number of records; "
            "else a mechanism that publishes one record satisfies it"
        )

    def experiment(self, text: str, images: int) -> Experiment:
        """Return a coordinator's experiment with this file's budget, data and paths.

        Args:
            text: `Experiment.to_json` of the coordinator.
            images: number of images in the coordinator's current request.

        Raises:
            NotAllowed: the file does not allow the experiment, or the experiment is malformed.
        """
        with refuse_malformed():
            raw = json.loads(text)
            self.check(raw)
            experiment = set_up(self._with_own_settings(raw), None, written=True)
        config, trust = experiment.config, trust_of(experiment.answers.noise_at)
        if images > config.queries_per_round:
            raise NotAllowed(
                f"{images} images in one request; queries_per_round={config.queries_per_round}"
            )
        if trust not in self.trust:
            raise NotAllowed(
                f"answers.noise_at={experiment.answers.noise_at} needs {trust} in trust:, and this "
                f"site's file has {format_value(self.trust)}"
            )
        if experiment.unit:
            self.check_unit(f"{calibrated_axis(experiment)}.unit", experiment.unit)
        return experiment

    def _with_own_settings(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the experiment with the settings that only this site decides."""
        own = {"patient_column": self.files.patient_column, "path": None, "hub": None}
        own["records_per_patient"] = None
        own_budget = ("budget", "delta", "budget_relation")
        budget = {key: getattr(self, key) for key in own_budget}
        places = {"out": str(self.folder), "run_folder": "", "ledger": str(self.folder / "ledger")}
        return {
            **raw,
            **places,
            "cache": str(self.folder / "cache"),
            "threads_client": self.threads,
            "client_device": self.device,
            "precision": self.precision,
            "server_device": "cpu",  # the coordinator's is not on this machine
            "noise": "secure",
            # unused: a hospital has its own records
            "partition": {"_target_": "fed_dpsd.data.partition.IID", "seed": 0},
            "data": {**raw["data"], **own},
            "privacy": {**raw["privacy"], **budget},
            "model": {**raw["model"], **self._own_weights(raw)},
        }

    def _own_weights(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        return {"weights": self.weights} if raw["model"].get("backbone") is not None else {}

    def require_whole_run(self, text: str, run: str) -> str:
        """Check that this hospital will take part in a whole run, without reading its records.

        Args:
            text: `Experiment.to_json` of the coordinator.
            run: the coordinator's name for the run.

        Returns:
            The digest of `keys` if the run has secure sums, otherwise "".

        Raises:
            NotAllowed: the file does not allow the experiment, or the budget is too small for it.
            UserError: the ledger or the secret cannot be read.
        """
        experiment = self.experiment(text, 0)
        summed = quorum_of(experiment.answers) is not None
        if summed:
            self._party(experiment, load_or_create_secret(self.folder / "secret"))
        account, lacking = self._account(experiment, run), ""
        with account.ledger.transaction():
            if experiment.config.clients_per_round is None:  # a plan is of the most rounds of any
                lacking = account.expected_limit()
        if lacking:
            what = "budget" if lacking == "budget" else "number of images (queries:)"
            raise NotAllowed(
                f"the {what} left at this site is not enough for this run; `fed-dpsd site check` "
                "there, with the run's settings, says what is missing"
            )
        return self.digest_of_keys if summed else ""

    @property
    def digest_of_keys(self) -> str:
        """Return the SHA-256 of `keys`, in order, for hospitals to compare their lists.

        Raises:
            ValueError: a key is not hexadecimal.
        """
        return hashlib.sha256(b"".join(map(bytes.fromhex, self.keys))).hexdigest()

    def _account(self, experiment: Experiment, run: str) -> Account:
        return Account(
            *(self.ledger, experiment.config.privacy, experiment.plan, run),
            *(self.queries, self.when_records_change, bool(experiment.config.plugins)),
        )

    def open(self, experiment: Experiment, run: str) -> Site:
        """Read the records again, and return the site that answers for this hospital.

        Args:
            experiment: an experiment returned by the method `experiment`.
            run: the coordinator's name for the run.

        Raises:
            NotAllowed: the secure sums withstand too few colluding clients, or the keys are wrong.
            UserError: the records or the secret cannot be read, the device does not exist, or the
                run does not fit into this machine.
        """
        require_device("device", self.device, number_of_gpus())
        uses_bfloat16(self.precision, torch_device(self.device))  # raises if it lacks it
        require_room_of_hospital(experiment, count_items(self.files))
        content = self.read()
        if content.count.skipped:
            logger.warning("%s", content.count)
        patients = content.records.patients
        self._prune(KEPT + experiment.config.teachers_per_client)
        secret = load_or_create_secret(self.folder / "secret")
        party, account = self._party(experiment, secret), self._account(experiment, run)
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
            secure_sums=SecureSums(party, experiment.answers, account.ledger, run)
            if party
            else None,
        )

    def _prune(self, most: int) -> None:
        """Keep only the `most` last-used teachers, because messages may request any number."""
        paths = (self.folder / "cache" / "teachers").glob("*")
        with contextlib.suppress(FileNotFoundError):  # another process may be deleting them too
            for path in sorted(paths, key=lambda path: -path.stat().st_mtime)[most:]:
                path.unlink(missing_ok=True)

    def _party(self, experiment: Experiment, secret: bytes) -> Party | None:
        """Return the hospital's part in secure sums; None if the mechanism uses none."""
        quorum = quorum_of(experiment.answers)
        if quorum is None:
            return None
        if quorum.colluding < self.colluding:
            raise NotAllowed(
                f"this site's secure sums must withstand {self.colluding} colluding clients "
                f"(colluding: in its file); answers.quorum has colluding: {quorum.colluding}"
            )
        if not self.keys:
            raise NotAllowed("keys: list the keys of all hospitals, from `fed-dpsd site key`")
        try:
            keys = {number: bytes.fromhex(key) for number, key in enumerate(self.keys)}
            return Party(self.client, exchange_key(secret), keys, quorum.threshold)
        except ValueError as error:
            raise NotAllowed(f"keys: {error}; see `fed-dpsd site key`") from None


def open_hospital(path: Path) -> Hospital:
    """Return the hospital described by a site file; relative paths start from the file's folder.

    Raises:
        UserError: the file cannot be read, or does not fit `Hospital`.
    """
    try:
        raw = read_yaml(path)
    except ValueError as error:
        raise UserError(f"{path} is not a site file: {error}; {_REMEDY}") from None
    return _with_absolute_paths(bind_dataclass(Hospital, raw, "site."), path.parent.absolute())


def _with_absolute_paths(hospital: Hospital, folder: Path) -> Hospital:
    """Return the hospital with absolute paths; relative ones start from `folder`."""

    def absolute(key: str, path: str) -> str:
        try:
            return str(folder / expanded(path))
        except UserError as error:
            raise UserError(f"site.{key}={error}") from None

    files = replace(hospital.files, path=absolute("files.path", hospital.files.path))
    weights = hospital.weights and absolute("weights", hospital.weights)
    state = absolute("state", hospital.state)
    return replace(hospital, state=state, files=files, weights=weights)
