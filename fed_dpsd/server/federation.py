"""The clients as a method sees them, whatever hosts them; and the host that needs no Flower."""

import fcntl
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.accounts.card import plan_of
from fed_dpsd.accounts.secret import noise_of
from fed_dpsd.accounts.tally import Tally
from fed_dpsd.config import UserError
from fed_dpsd.experiment import Experiment
from fed_dpsd.methods.method import World
from fed_dpsd.models import to_vector
from fed_dpsd.privacy.noise import Noise
from fed_dpsd.protocol import NOTHING, Answer, Ask, ProtocolError, Refusal, SumStep, Total, misfit
from fed_dpsd.server.asks import Asks
from fed_dpsd.server.secure_sum import secure_sum
from fed_dpsd.storage import npz_of, write_atomically
from fed_dpsd.streams import Streams

logger = logging.getLogger("fed_dpsd")


def _locked(run_folder: Path) -> IO[bytes]:
    """Keep other processes from going on with the run, for as long as this one lives.

    Raises:
        UserError: one does.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    lock = (run_folder / "lock").open("wb")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise UserError(
            f"another process goes on with the run in {run_folder}: stop it, or wait for it"
        ) from None
    return lock


class HostedFederation(ABC):
    """What every engine shares: settling asks, checking and summing answers, and counting.

    Attributes:
        counted: the last round whose asks were counted before; what a resumed run repeats of it,
            such as fetching weights, is not counted again.
        bytes_to_clients: payload sent so far, over all clients.
        bytes_to_server: payload received so far.
    """

    engine: str

    def __init__(self, experiment: Experiment, run_folder: Path) -> None:
        self.experiment = experiment
        own = experiment.mechanism.noise_at == "server"
        secret = noise_of(experiment, run_folder, "server") if own else None
        self._world = World.of(experiment.config, experiment.mechanism)
        self._lock = _locked(run_folder)
        self._notes, self._asks = run_folder / "sums", Asks(run_folder / "asks")
        self._tally = Tally(run_folder, plan_of(experiment).releases)
        self._noise: Noise = secret or Streams(experiment.config.seed)
        self.counted = -1
        self.bytes_to_clients = 0
        self.bytes_to_server = 0

    @abstractmethod
    def _deliver(self, ask: Ask) -> dict[int, Answer | Refusal]:
        """Bring an ask to every client and its answers back."""

    @abstractmethod
    def _step(self, steps: Mapping[int, SumStep]) -> Mapping[int, Mapping[str, bytes]]:
        """Bring a step of a secure sum to each of some clients; what came back of it."""

    @abstractmethod
    def diagnose(self) -> dict[int, NDArray[np.float32]]:
        """Exact (n, N, K) probabilities of a client's teachers on the test split; simulation only.

        Teachers that are not trained yet are trained now.
        """

    def settle(self, ask: Ask) -> Ask:
        """Return the ask to send and to learn from: this one, or what was sent in its place."""
        return self._asks.settle(ask)

    def prune(self, rounds: int) -> None:
        """Forget the asks that cannot be sent again, now that so many rounds are saved."""
        self._asks.prune(rounds)

    def each(self, ask: Ask) -> dict[int, Answer | Refusal]:
        """Every client's checked answer, in the order of the clients.

        What the answers cost is written down before anybody learns from them.

        Raises:
            ProtocolError: the run has sent another ask of this id and kind, which was charged.
        """
        if self.settle(ask).digest() != ask.digest():
            raise ProtocolError(
                f"ask {ask.query_id} ({ask.kind}) is not the one that this run has sent before; "
                "send and learn from what `settle` returns"
            )
        answers: dict[int, Answer | Refusal] = {}
        for client, given in sorted(self._covered(ask).items()):
            new = ask.query_id > self.counted
            self.bytes_to_clients += ask.nbytes * new
            if isinstance(given, Answer):
                self.bytes_to_server += given.nbytes * new
                answers[client] = self._receive(ask, client, given)
            else:
                answers[client] = given
        return answers

    def _covered(self, ask: Ask) -> dict[int, Answer | Refusal]:
        """Return every client's answer, once what it costs the client is on the run's card."""
        answers = self._deliver(self._with_tally(ask))
        if again := self._tally.take(answers):
            more = self._deliver(self._with_tally(ask))
            asked = {client: more[client] for client in again}
            self._tally.take(asked)
            answers |= asked
        return answers

    def _with_tally(self, ask: Ask) -> Ask:
        """Return the ask with what is written down of the run's charges."""
        return replace(ask, acknowledged=dict(self._tally.acknowledged), heard=self._tally.heard)

    def _receive(self, ask: Ask, client: int, given: Answer) -> Answer | Refusal:
        """What counts of an answer: a bad one, or its bad rows, count as zero, weights as none.

        The number of teachers stays, so that a bad answer cannot change what the others weigh. What
        was wrong goes to the log of whoever runs the server.

        Raises:
            ProtocolError: weights are bad in a simulation, where nobody lies.
        """
        teachers = self.experiment.config.teachers_per_client
        if ask.kind == "answers" and self.experiment.mechanism.noise_at == "distributed":
            return replace(given, teachers=teachers)  # masked: nobody can tell
        problem = misfit(ask, given)
        if ask.kind == "counts":
            if problem or not np.isfinite(given.values).all():
                problem = problem or "values hold NaN or infinity"
                logger.warning("client %d: its class counts are taken as zero: %s", client, problem)
                return Answer(ask.query_id, np.zeros((1, ask.predictions.shape[1])), teachers)
            return given
        if ask.kind in ("weights", "train"):
            weights, problem = self._weights(given, client, problem)
            if problem and self.experiment.config.federation.simulation:
                raise ProtocolError(f"client {client} sent invalid weights: {problem}")
            if problem:
                logger.warning("client %d sent invalid weights: %s", client, problem)
                return Refusal(ask.query_id, f"invalid weights: {problem}")
            return replace(given, values=weights)
        if problem:
            logger.warning("client %d: the answer counts as zero: %s", client, problem)
            return Answer(ask.query_id, np.zeros(ask.predictions.shape), teachers)
        good = np.isfinite(given.values).all(axis=1)
        values = np.where(good[:, None], given.values, 0)
        mechanism = self.experiment.mechanism
        good &= mechanism.admissible(values, ask.predictions, teachers)
        if not good.all():
            count = len(good) - int(good.sum())
            logger.warning("client %d: %d of %d rows count as zero", client, count, len(good))
        return Answer(ask.query_id, np.where(good[:, None], values, 0), teachers)

    def _weights(self, given: Answer, client: int, problem: str) -> tuple[NDArray[np.float32], str]:
        """A client's weights as float32, and what is wrong with them."""
        if problem:
            return NOTHING, problem
        with np.errstate(over="ignore"):
            weights = given.values.astype(np.float32)
        expected = given.teachers * len(to_vector(self._world.make_teacher(client)))
        if len(weights) != expected:
            return NOTHING, f"{len(weights)} values, expected {expected}"
        return weights, "" if np.isfinite(weights).all() else "values hold NaN or infinity"

    def total(self, ask: Ask) -> Total:
        """The sum of the answers; with `noise_at: server` its noise is drawn here, once a query.

        Raises:
            UserError: the noise is distributed, and too few clients are left for a secure sum.
        """
        answers = self.each(ask)
        if self.experiment.mechanism.noise_at == "distributed":
            return self._secure_total(ask, answers)
        given = [each for each in answers.values() if isinstance(each, Answer)]
        if self.experiment.mechanism.noise_at == "server":
            return self._noisy_total(ask, given, _refused(answers))
        total = np.zeros(ask.predictions.shape)
        for each in given:
            total += each.values
        return Total(total, sum(each.teachers for each in given), _refused(answers))

    def _noisy_total(self, ask: Ask, given: Sequence[Answer], refused: dict[int, str]) -> Total:
        """The sum with the server's noise, drawn once for an ask of a run and kept.

        A run that is killed and resumed may find other clients there; a second sum, with other
        noise, would be a second release of answers that were charged once.
        """
        path = self._notes / f"{ask.digest()}.npz"
        if path.exists():
            with np.load(path, allow_pickle=False) as kept:
                return Total(kept["sum"], int(kept["count"]), refused)
        if not given:
            return Total(np.zeros(ask.predictions.shape), 0, refused)
        # Other answers get other noise: else what two sums differ by would be seen exactly.
        digest = hashlib.sha256(ask.digest().encode())
        digest.update(b"".join(each.values.tobytes() for each in given))
        rng = self._noise.numpy("server noise", query_id=int(digest.hexdigest(), 16))
        values = np.stack([each.values for each in given])
        noisy = self.experiment.mechanism.noise(values, ask.predictions, rng)
        count = sum(each.teachers for each in given)
        write_atomically(path, npz_of({"sum": noisy, "count": count}))
        return Total(noisy, count, refused)

    def _secure_total(self, ask: Ask, answers: Mapping[int, Answer | Refusal]) -> Total:
        """The sum of masked answers, which is all that is seen of them."""
        masked = {c: given for c, given in answers.items() if isinstance(given, Answer)}
        if not masked:
            return Total(np.zeros(ask.predictions.shape), 0, _refused(answers))

        def deliver(steps: Mapping[int, SumStep]) -> Mapping[int, Mapping[str, bytes]]:
            replies = self._step(steps)
            if ask.query_id > self.counted:
                self.bytes_to_clients += sum(step.nbytes for step in steps.values())
                self.bytes_to_server += sum(len(b) for r in replies.values() for b in r.values())
            return replies

        total, named = secure_sum(self.experiment, ask, masked, self._notes, deliver)
        teachers = len(named) * self.experiment.config.teachers_per_client
        return Total(total, teachers, _refused(answers))


def _refused(answers: Mapping[int, Answer | Refusal]) -> dict[int, str]:
    return {client: each.reason for client, each in answers.items() if isinstance(each, Refusal)}
