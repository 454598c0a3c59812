"""A site: a client's data, teachers and ledger. Only a site releases private data."""

import functools
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.accounts.account import Account, BudgetSpent, RecordsChanged, Unplanned
from fed_dpsd.accounts.database import LedgerError
from fed_dpsd.client.secure_sum import SecureSums
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.config import Config
from fed_dpsd.data.intake import Records
from fed_dpsd.errors import ProtocolError
from fed_dpsd.methods.method import Method, TrainingLoss
from fed_dpsd.models.inference import Images, images_of
from fed_dpsd.privacy.mechanism import (
    ExactCounts,
    KeptTeachers,
    Mechanism,
    Noiseless,
    SupportsSecureSum,
    Weights,
)
from fed_dpsd.privacy.noise import Noise, SecretStreams, truncate
from fed_dpsd.privacy.record_sums import MOST_NUMBERS, RecordSums
from fed_dpsd.privacy.secure_sum import SumError
from fed_dpsd.privacy.training import BaselineWeights, ClassCounts, Training, TrainingMechanism
from fed_dpsd.protocol import SUMMED, Refusal, Request, Response, SumStep
from fed_dpsd.streams import Streams

logger = logging.getLogger("fed_dpsd")


class ChargeKeys(NamedTuple):
    """The digests that identify a charge in the ledger, and the charges that it depends on."""

    own: str  # the answer is charged and stored under it
    covering: str  # the private training that covers the answer; "" if none does
    first: str  # the charge that must be paid before; "" if there is none


class Site:
    """A client's data, teachers and ledger.

    Args:
        config: the site's own configuration; budget, trust and limits come from here, never from a
            message.
        training: how this site's teachers are trained.
        answers: the mechanism of this site's answers.
        client: the client's number.
        records: the client's private records.
        shard_ids: (len(records),) permanent id of each record or of its patient, which determines
            the record's shard.
        test: the public test images, for diagnostics; None without diagnostics.
        account: the client's account of the run that it answers in.
        secret: source of the noise; None to use the seeds in `config`.
        secure_sums: the client's part in secure sums; None without secure sums.
    """

    def __init__(
        self,
        config: Config,
        training: Training,
        answers: Mechanism,
        client: int,
        records: Records,
        shard_ids: NDArray[np.int64],
        test: Images | None,
        account: Account,
        secret: SecretStreams | None = None,
        secure_sums: SecureSums | None = None,
    ) -> None:
        self.config = config
        self.client = client
        self.num_records = len(records)
        self.account, self.ledger = account, account.ledger
        self.training, self.answers = training, answers
        self._noise: Noise = secret or Streams(config.seed)
        self._teachers = Teachers(config, training, client, records, shard_ids, secret)
        whole = replace(config, teachers_per_client=1)

        def baseline(own: Training) -> Teachers:
            return Teachers(whole, own, client, records, shard_ids, secret, role="baseline")

        self._baseline = baseline
        self._summed = None
        if isinstance(answers, RecordSums):
            self._summed = Teachers(config, answers.step, client, records, shard_ids, secret)
        self._test = test
        self._paid = False
        self.secure_sums = secure_sums

    def pay_for_training(self) -> None:
        """Charge the teachers' private training, unless this process knows that it has been paid.

        Teachers trained without noise are free here.

        Raises:
            BudgetSpent: the training has not been paid for, and would exceed the budget or the
                plan.
        """
        if not isinstance(self.training, TrainingMechanism) or self._paid:
            return
        identity = self._teachers.identity
        with self.ledger.transaction():
            self.account.pay(self.training, identity, "training")
            if self.account.keeps_teachers:
                digest = hashlib.sha256(f"kept {identity}".encode()).hexdigest()
                self.account.pay(KeptTeachers(), digest, "teachers", training=identity)
        self._paid = True

    def exceeded_limit(self) -> Literal["", "budget", "queries"]:
        """Name the limit that the planned run would exceed after all charges so far; "" if none.

        The teachers' first training costs nothing if it was charged before.
        """
        digests = {self.training.name: self._teachers.identity, ClassCounts.name: self._counts}
        with self.ledger.transaction():
            paid = [name for name, digest in digests.items() if self.account.is_paid(digest)]
            return self.account.exceeded_limit(paid)

    def sensitive_unread(self) -> Iterator[NDArray[np.uint8]]:
        """Yield records that training will read; a simulation's clients read them together."""
        return (self._summed or self._teachers).sensitive_unread()

    def check(self, request: Request) -> None:
        """Check a request before reading anything private, so that errors depend on public facts.

        Raises:
            ProtocolError: images or predictions are not of this client's shape.
        """
        shape, num_classes = self.config.data.shape, self.config.data.num_classes
        if request.images.shape[1:] != shape:
            raise ProtocolError(
                f"images have shape {list(request.images.shape[1:])}; "
                f"this client's teachers take {list(shape)}"
            )
        if request.predictions.shape[1] != num_classes:
            raise ProtocolError(
                f"predictions have {request.predictions.shape[1]} classes; this client's teachers "
                f"have {num_classes}"
            )

    def admit(self, request: Request) -> None:
        """Join the request's run with the current records.

        If teachers must be trained first, a request that `release` would refuse is refused here.

        Raises:
            BudgetSpent: the request was not charged before, and would exceed the budget or the
                plan.
            RecordsChanged: the records differ from before, and the client's policy is to refuse.
        """
        records = int((self._summed or self._teachers).records_digest, 16)
        keyed = self._noise.numpy("records of a run", self.client, records).random(4)
        due = self._due(request)  # computed before the ledger is locked
        with self.ledger.transaction():  # no refusal undoes what is written
            self.account.reconcile(request, self.client)
            if due:
                mechanism, keys = due
                unpaid = bool(keys.first) and not self.account.is_paid(keys.first)
                self.account.due(
                    mechanism, keys.own, request.kind, request, keys.covering, reserved=unpaid
                )
            self.account.join(keyed.tobytes().hex())

    def _due(self, request: Request) -> tuple[Mechanism, ChargeKeys] | None:
        """Return the charge that a request would cause after training.

        It is None if the teachers are ready, and for a baseline, which is paid before training.
        """
        if self._teachers.ready or request.kind == "baseline":  # a baseline is paid before training
            return None
        mechanism: Mechanism = self.answers
        if request.kind in ("weights", "train"):
            mechanism = Weights()
        elif request.kind == "counts" and isinstance(self.training, TrainingMechanism):
            mechanism = ClassCounts(self.training)
        elif request.kind == "counts":
            mechanism = ExactCounts()
        return mechanism, self._keys(mechanism, request)

    def sensitive_probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Return the teachers' (n, B, K) probabilities; private until released."""
        teachers = self._paid_teachers()
        return teachers.sensitive_probabilities(images_of(images)).astype(np.float64)

    def sensitive_weights(self) -> NDArray[np.float32]:
        """Return the teachers' parameters, (1, n * P, 1); private until released."""
        return self._paid_teachers().sensitive_weights()

    def sensitive_baseline(
        self, mechanism: BaselineWeights, request: Request
    ) -> NDArray[np.float32]:
        """Charge the release, then train a classifier on all records; return (1, P, 1) weights.

        The weights are private until `release`, for which they are already charged.

        Raises:
            BudgetSpent: the charge would exceed the budget or the plan; nothing was trained.
            ProtocolError: this site is not part of a simulation, which alone allows such training.
        """
        if not self.config.federation.simulation:
            raise ProtocolError("a classifier is trained on all records only in a simulation")
        digest = self._keys(mechanism, request).own
        with self.ledger.transaction():
            self.account.pay(mechanism, digest, request.kind, request)
        return self._baseline(mechanism.training).sensitive_weights()

    def class_counts(self, request: Request) -> NDArray[np.float64]:
        """Charge and draw (n, 1, K) noisy class counts for `release`; repeated calls agree.

        Raises:
            BudgetSpent: the charge would exceed the budget or the plan; nothing was drawn.
            ProtocolError: the training sets no noise for class counts.
        """
        if not (isinstance(self.training, TrainingMechanism) and self.training.counts_classes):
            raise ProtocolError("this client's mechanism releases no class counts")
        counts = ClassCounts(self.training)
        with self.ledger.transaction():
            self._pay(counts, request, self._keys(counts, request))
        return self._teachers.class_counts

    def sensitive_sum(self, request: Request) -> NDArray[np.float64]:
        """Return the mechanism's sum over the records, (1, P, 1); private until released.

        Raises:
            ProtocolError: the mechanism releases no sums, the sum has more numbers than an event
                covers, or the request's weights belong to another architecture; nothing was
                charged.
        """
        if self._summed is None or not isinstance(self.answers, RecordSums):
            raise ProtocolError("this client's mechanism releases no sums over records")
        if (count := request.summed_shape[0]) > MOST_NUMBERS:
            raise ProtocolError(
                f"this client was asked for {count:,} numbers; a release covers {MOST_NUMBERS:,}"
            )
        return self._summed.sensitive_sum(self.answers, request.weights)

    def sensitive_class_counts(self) -> NDArray[np.float64]:
        """Return the exact class counts of all records, (1, 1, K); private until released."""
        return self._teachers.sensitive_class_counts()

    def retrain(
        self, request: Request, epochs: int, loss: TrainingLoss | None = None
    ) -> NDArray[np.float32]:
        """Train the teachers from the request's weights, after charging private training again.

        `loss` is added to the records' loss (see `added_loss`). It depends on the weights and the
        method's keys alone, so private training covers it as post-processing.

        Returns:
            The teachers' (1, n * P, 1) weights, private until released.

        Raises:
            BudgetSpent: the training would exceed the budget or the plan; nothing was charged.
            ProtocolError: the weights belong to another architecture; nothing was charged.
        """
        try:
            self._teachers.check_weights(request.weights)
        except ValueError as error:
            raise ProtocolError(f"this client was sent {error}") from None
        digest = self._retraining(request)
        if isinstance(self.training, TrainingMechanism):
            with self.ledger.transaction():
                self.account.pay(self.training, digest, "training", request)
        return self._teachers.sensitive_retrained(
            request.weights, request.query_id, digest, epochs, loss
        )

    def release(
        self, mechanism: Mechanism, sensitive_value: NDArray[Any], request: Request
    ) -> Response:
        """Release (n, B, K) private values: bound each, charge the ledger, draw the noise.

        A repeated request returns the same answer and charges nothing. A hospital's is stored, and
        stays the same even if the records have changed. Otherwise, the two answers would reveal
        whether they changed. Nothing is drawn over budget.

        The charge depends on the whole request and every setting, so the same id with different
        content is a separate charge. If answers are summed, it also depends on the sum's tag.
        Secret noise depends on the same. Otherwise, two sums of the same answers over different
        sets of clients would reveal their difference.

        Raises:
            BudgetSpent: the charge would exceed the budget or the plan; nothing was drawn.
            LedgerError: the ledger cannot be read or written; nothing was drawn.
            UserError: a simulated client has another answer to a repeated request; nothing leaves.
            ValueError: the teachers' private training has not been paid for; nothing was drawn.
        """
        self.check(request)
        keys = self._keys(mechanism, request)
        bounded = np.stack(
            [mechanism.constrain_sensitivity(v, request.predictions) for v in sensitive_value]
        )
        with self.ledger.transaction():
            # Without noise to draw in between, charge and answer are written at once.
            noisy = not isinstance(mechanism, Noiseless)
            with nullcontext() if noisy else self.ledger.single_commit():
                self._pay(mechanism, request, keys)
                values = self.ledger.stored_answer(keys.own)
                if values is None:
                    values = self._randomised(mechanism, bounded, keys.own, request)
                    self.ledger.store_answer(keys.own, values, noisy)
            statement = self.account.statement()
        return Response(
            request.query_id, values, self.config.teachers_per_client, statement=statement
        )

    def _randomised(
        self, mechanism: Mechanism, bounded: NDArray[Any], digest: str, request: Request
    ) -> NDArray[Any]:
        """Return the (B, K) sum of (n, B, K) bounded values with the noise that is drawn here."""
        if mechanism.noise_at == "server" and isinstance(mechanism, SupportsSecureSum):
            return truncate(bounded, mechanism.lattice).sum(0)
        hides = hashlib.sha256(digest.encode() + bounded.tobytes()).hexdigest()
        purpose = f"{request.kind}: {mechanism.name}"
        rng = self._noise.noise(purpose, self.client, request.query_id, hides)
        return mechanism.add_noise(bounded, request.predictions, rng)

    def _pay(self, mechanism: Mechanism, request: Request, keys: ChargeKeys) -> None:
        """Charge a release, unless it is already paid.

        Raises:
            BudgetSpent: the charge would exceed the budget or the plan; nothing was charged.
            ValueError: the training that covers it, or reserves its budget, has not been paid for.
        """
        if isinstance(mechanism, ClassCounts) and not self.account.is_paid(keys.first):
            raise ValueError("the training that reserves the class counts has not been paid for")
        self.account.pay(mechanism, keys.own, request.kind, request, keys.covering)

    def diagnose(self) -> NDArray[np.float32]:
        """Return the teachers' exact (n, N, K) probabilities on the test split; NaN over budget.

        Exact functions of private data are for simulations only. For teachers trained with DP, the
        probabilities are post-processing.

        Raises:
            ProtocolError: there is no test split, or the teachers were trained without DP outside a
                simulation.
        """
        private = isinstance(self.training, TrainingMechanism)
        if self._test is None or not (self.config.federation.simulation or private):
            raise ProtocolError("exact diagnostics are refused outside a simulation")
        try:
            return self._paid_teachers().sensitive_probabilities(self._test)
        except BudgetSpent:
            shape = (self.config.teachers_per_client, len(self._test), self.config.data.num_classes)
            return np.full(shape, np.nan, np.float32)

    def _paid_teachers(self) -> Teachers:
        """Charge private training and return the teachers, which are trained at first use."""
        self.pay_for_training()
        return self._teachers

    def _covering(self, mechanism: Mechanism, request: Request) -> str:
        """Return the digest of the private training that covers an answer; "" if there is none."""
        private = isinstance(self.training, TrainingMechanism)
        if not private or not mechanism.from_teachers:
            return ""
        return self._retraining(request) if request.kind == "train" else self._teachers.identity

    @property
    def _counts(self) -> str:
        """Return the key of the noisy class counts, which are drawn once."""
        return hashlib.sha256(f"class counts {self._teachers.identity}".encode()).hexdigest()

    def _keys(self, mechanism: Mechanism, request: Request) -> ChargeKeys:
        """Return the keys of an answer's charge."""
        if isinstance(mechanism, ClassCounts):
            # Noisy counts pass through no teacher, yet they are paid for after the training.
            return ChargeKeys(own=self._counts, covering="", first=self._teachers.identity)
        covering = self._covering(mechanism, request)
        content = f"{request.digest} {mechanism} {self._teachers.settings} {self._method}"
        content += f" {covering}" if covering else ""
        # Devices round differently, so their answers are different releases.
        content += f" {device}" if (device := self._teachers.answers_on) else ""
        if self.secure_sums:
            content += f" {self.secure_sums.tag(request.digest)}"
        elif mechanism.noise_at == "server":  # the server draws different noise in each run
            content += f" {self.account.run}"
        # A run's name may not be valid UTF-8; different names stay different.
        digest = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
        return ChargeKeys(own=digest, covering=covering, first=covering)

    @functools.cached_property
    def _method(self) -> str:
        """Return the method's settings as JSON."""
        return json.dumps(dict(self.config.method), sort_keys=True)

    def _retraining(self, request: Request) -> str:
        """Return the key under which training from the request's weights is charged."""
        content = f"{self._teachers.input_digest} {request.digest} {self._method}"
        return hashlib.sha256(content.encode()).hexdigest()


def answer(method: Method, request: Request, site: Site) -> Response | Refusal:
    """Answer a request; refuse it if the site's limits or its ledger do not allow it.

    A refusal reveals nothing about the ledger except the run's cost so far. The cause of a ledger
    failure goes only to the client's own log.

    Raises:
        ProtocolError: the request does not fit this client or its mechanism.
    """
    try:
        try:
            site.check(request)
            site.admit(request)
            reply = method.client(request, site)
            masks = request.kind in SUMMED and site.answers.noise_at == "distributed"
            if masks and isinstance(reply, Response):
                reply = _masked(reply, request, site)
            if reply.statement:
                return reply
            return replace(reply, statement=site.account.locked_statement())
        except Unplanned as unplanned:
            statement = site.account.locked_statement(unplanned.wanted)
            return Refusal(request.query_id, str(unplanned), statement)
        except (BudgetSpent, RecordsChanged) as refused:
            return Refusal(request.query_id, str(refused), site.account.locked_statement())
    except LedgerError as error:
        logger.error("client %d: %s", site.client, error)
        return Refusal(request.query_id, "the client's ledger cannot be read or written")


def _masked(released: Response, request: Request, site: Site) -> Response:
    """Mask a released answer for a secure sum."""
    if site.secure_sums is None:
        raise ProtocolError("this client takes part in no secure sums")
    return site.secure_sums.masked(released, request)


def take_step(site: Site, step: SumStep) -> dict[str, bytes]:
    """Return a client's second or third message of a secure sum.

    Raises:
        ProtocolError: the client does not take part in that sum, or must not answer this step;
            nothing was opened.
    """
    if site.secure_sums is None:
        raise ProtocolError("this client takes part in no secure sums")
    try:
        return site.secure_sums.step(step)
    except SumError as error:
        raise ProtocolError(str(error)) from None
    except LedgerError as error:
        logger.error("client %d: %s", site.client, error)
        raise ProtocolError("the client's ledger cannot be read or written") from None
