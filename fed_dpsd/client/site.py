"""One client: its data, its teachers, its ledger, and the only door for anything private."""

import hashlib
import json
import logging
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.accounts.account import Account, BudgetSpent, RecordsChanged, Unplanned
from fed_dpsd.accounts.ledger import LedgerError
from fed_dpsd.client.secure_sum import Summing
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.config import Config
from fed_dpsd.data.datasets import Split
from fed_dpsd.methods.method import Method
from fed_dpsd.privacy.mechanism import Mechanism, NonPrivate, PostProcessing, Shared
from fed_dpsd.privacy.noise import Noise, SecretStreams, cut_off
from fed_dpsd.privacy.secure_sum import SumError
from fed_dpsd.privacy.training import TrainingMechanism
from fed_dpsd.protocol import Answer, Ask, ProtocolError, Refusal, SumStep
from fed_dpsd.renamed import former_method
from fed_dpsd.streams import Streams

logger = logging.getLogger("fed_dpsd")


class Site:
    """One client's data, teachers and ledger.

    Args:
        config: the site's own configuration: budget, trust and limits are read from it, never from
            a message.
        mechanism: the mechanism this site answers with, or trains its teachers with.
        client: the client's number.
        records: its private records.
        shard_ids: (len(records),) each record's lasting id, or its patient's; it decides the
            record's shard.
        test: the public test split, for diagnostics; None where there are none.
        account: of the run that it answers in.
        secret: what noise is drawn from; None is the seeds of `config`.
        summing: its part in secure sums; None where there are none.
    """

    def __init__(
        self,
        config: Config,
        mechanism: Mechanism,
        client: int,
        records: Split,
        shard_ids: NDArray[np.int64],
        test: Split | None,
        account: Account,
        secret: SecretStreams | None = None,
        summing: Summing | None = None,
    ) -> None:
        self.config = config
        self.client = client
        self.account, self.ledger = account, account.ledger
        self._mechanism, self.noise_at = mechanism, mechanism.noise_at
        self._noise: Noise = secret or Streams(config.seed)
        self._teachers = Teachers(config, mechanism, client, records, shard_ids, secret)
        self._test = test
        self._paid: PostProcessing | None = None
        self.summing = summing

    def pay_for_training(self) -> Mechanism:
        """Charge the teachers' private training, unless this process has seen that it is paid.

        Returns:
            The mechanism that answers are released with: the client's own or, over a paid
            training, post-processing.

        Raises:
            BudgetSpent: the training is not paid for, and would pass the budget or the plan.
        """
        if not isinstance(self._mechanism, TrainingMechanism):
            return self._mechanism
        if self._paid is None:
            digest = self._teachers.identity
            with self.ledger.transaction():
                self.account.pay(self._mechanism, digest, "training")
            self._paid = PostProcessing(digest)
        return self._paid

    def join(self) -> None:
        """Take part in the run with the records as they are.

        Raises:
            RecordsChanged: they were others before.
        """
        digest = int(self._teachers.records_digest, 16)
        keyed = self._noise.numpy("records of a run", self.client, digest).random(4)
        self.account.join(keyed.tobytes().hex())

    def lacking(self) -> Literal["", "budget", "queries"]:
        """What does not last for the run, after all that was charged before; "" where all does.

        The teachers' first training costs nothing again, if it was charged.
        """
        with self.ledger.transaction():
            return self.account.lacking(self.account.is_paid(self._teachers.identity))

    def check(self, ask: Ask) -> None:
        """Look at an ask before anything private is: whatever is wrong with it is public.

        Raises:
            ProtocolError: images or predictions are not of this client's shape.
        """
        shape, num_classes = self.config.data.shape, self.config.data.num_classes
        if ask.images.shape[1:] != shape:
            raise ProtocolError(
                f"images have shape {list(ask.images.shape[1:])}; "
                f"this client's teachers take {list(shape)}"
            )
        if ask.predictions.shape[1] != num_classes:
            raise ProtocolError(
                f"predictions have {ask.predictions.shape[1]} classes; this client's teachers "
                f"know {num_classes}"
            )

    def admit(self, ask: Ask) -> None:
        """Refuse what `release` would refuse, before teachers are trained for it in vain.

        Raises:
            BudgetSpent: the ask was not charged before, and would pass the budget or the plan.
        """
        if self._teachers.ready:
            return
        mechanism, training = self._mechanism, ""
        if isinstance(mechanism, TrainingMechanism):  # whose budget is looked at before it starts
            training = self._retraining(ask) if ask.kind == "train" else self._teachers.identity
            mechanism = PostProcessing(training)
        elif ask.kind in ("weights", "train"):
            mechanism = NonPrivate()
        digest = self._digest(mechanism, ask)
        with self.ledger.transaction():
            more = bool(training) and not self.account.is_paid(training)
            self.account.due(mechanism, digest, ask.kind, ask, more)

    def sensitive_probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """The teachers' (n, B, K) probabilities; private until released."""
        return self._paid_teachers().sensitive_probabilities(images).astype(np.float64)

    def sensitive_weights(self) -> NDArray[np.float32]:
        """The teachers' parameters, (1, n * P, 1); private until released."""
        return self._paid_teachers().sensitive_weights()

    def class_counts(self) -> NDArray[np.float64]:
        """The noisy class counts that the teachers' training released, (n, 1, K).

        Raises:
            ProtocolError: it released none.
        """
        if not (isinstance(self._mechanism, TrainingMechanism) and self._mechanism.counts_classes):
            raise ProtocolError("this client's mechanism releases no class counts")
        return self._paid_teachers().class_counts

    def sensitive_class_counts(self) -> NDArray[np.float64]:
        """The exact class counts of all records, (1, 1, K); private until released."""
        return self._teachers.sensitive_class_counts()

    def retrain(self, ask: Ask, epochs: int) -> tuple[Mechanism, NDArray[np.float32]]:
        """The teachers' (1, n * P, 1) weights after a training that starts at the ask's weights.

        They are private until released, with the mechanism that comes with them: a training
        mechanism's training is charged first, each anew, and what it yields is post-processing.

        Raises:
            BudgetSpent: the training would pass the budget or the plan; nothing was charged.
            ProtocolError: the weights are of another architecture; nothing was charged.
        """
        mechanism: Mechanism = self._mechanism
        try:
            self._teachers.check_weights(ask.weights)
        except ValueError as error:
            raise ProtocolError(f"this client was sent {error}") from None
        digest = self._retraining(ask)
        if isinstance(mechanism, TrainingMechanism):
            with self.ledger.transaction():
                self.account.pay(mechanism, digest, "training", ask)
            mechanism = PostProcessing(digest)
        return mechanism, self._teachers.sensitive_retrained(ask.weights, digest, epochs)

    def release(self, mechanism: Mechanism, sensitive_value: NDArray[Any], ask: Ask) -> Answer:
        """Release (n, B, K) private values: bound each, charge the ledger (fsync), draw the noise.

        An ask that comes again returns the stored answer and charges nothing, whatever the records
        are now: else the two answers would tell whether they changed. Over budget nothing is drawn.
        The noise follows the whole ask and every setting, so the same id with other content gets
        other noise and its own charge. Where answers are summed it follows the sum's tag too: two
        sums of the same answers, over other clients, would show what they differ by.

        Raises:
            BudgetSpent: the charge would pass the budget or the plan; nothing was drawn.
            LedgerError: the ledger cannot be read or written; nothing was drawn.
        """
        self.check(ask)
        digest = self._digest(mechanism, ask)
        bounded = np.stack([mechanism.encode(v, ask.predictions) for v in sensitive_value])
        with self.ledger.transaction():
            self.account.pay(mechanism, digest, ask.kind, ask)
            values = self.ledger.stored(digest)
            if values is None:
                if isinstance(mechanism, Shared) and mechanism.noise_at == "server":
                    values = cut_off(bounded, mechanism.lattice).sum(0)
                else:
                    rng = self._noise.numpy("answer", self.client, int(digest, 16))
                    values = mechanism.noise(bounded, ask.predictions, rng)
                self.ledger.store(digest, values)
        return Answer(ask.query_id, values, self.config.teachers_per_client)

    def diagnose(self) -> NDArray[np.float32]:
        """The teachers' exact (n, N, K) probabilities on the test split; NaN over budget.

        They are exact functions of private data, so a simulation's only; those of teachers that
        were trained with DP are post-processing.

        Raises:
            ProtocolError: the teachers are not private, and this site is not part of a simulation.
        """
        private = isinstance(self._mechanism, TrainingMechanism)
        if self._test is None or not (self.config.federation.simulation or private):
            raise ProtocolError("exact diagnostics are refused outside a simulation")
        try:
            return self._paid_teachers().sensitive_probabilities(self._test.images)
        except BudgetSpent:
            shape = (self.config.teachers_per_client, len(self._test), self.config.data.num_classes)
            return np.full(shape, np.nan, np.float32)

    def _paid_teachers(self) -> Teachers:
        """Return the teachers, which train at their first use, after a private training is paid."""
        self.pay_for_training()
        return self._teachers

    def _digest(self, mechanism: Mechanism, ask: Ask) -> str:
        """Of an answer: what it is stored and charged under, and what its noise follows."""
        method = json.dumps(former_method(self.config.method), sort_keys=True)
        asked = f"{ask.digest()} {mechanism} {self._teachers.settings} {method}"
        if self.summing:
            asked += f" {self.summing.tag(ask.digest())}"
        elif mechanism.noise_at == "server":  # which draws other noise in another run
            asked += f" {self.account.run}"
        return hashlib.sha256(asked.encode()).hexdigest()

    def _retraining(self, ask: Ask) -> str:
        """What a training that starts at the ask's weights is charged under."""
        return hashlib.sha256(f"{self._teachers.identity} {ask.digest()}".encode()).hexdigest()


def answer(method: Method, ask: Ask, site: Site) -> Answer | Refusal:
    """A client's answer; a spent budget and a ledger that cannot be kept are refusals.

    The refusal says nothing of the ledger's content but what the run has cost; the cause goes to
    the client's own log.
    """
    try:
        try:
            site.check(ask)
            site.account.hear(ask, site.client)
            site.admit(ask)
            site.join()
            given = method.client(ask, site)
            if site.noise_at == "distributed" and isinstance(given, Answer):
                if site.summing is None:
                    raise ProtocolError("this client takes part in no secure sums")
                given = site.summing.masked(given, ask)
            return replace(given, statement=site.account.state())
        except Unplanned as unplanned:
            statement = site.account.state(unplanned.wanted)
            return Refusal(ask.query_id, str(unplanned), statement)
        except (BudgetSpent, RecordsChanged) as refused:
            return Refusal(ask.query_id, str(refused), site.account.state())
    except LedgerError as error:
        logger.error("client %d: %s", site.client, error)
        return Refusal(ask.query_id, "the client's ledger cannot be read or written")


def take_step(site: Site, step: SumStep) -> dict[str, bytes]:
    """A client's second or third message of a secure sum.

    Raises:
        ProtocolError: it takes no part in that sum, or not like that; nothing was opened.
    """
    if site.summing is None:
        raise ProtocolError("this client takes part in no secure sums")
    try:
        return site.summing.step(step)
    except SumError as error:
        raise ProtocolError(str(error)) from None
