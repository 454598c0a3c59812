"""The federation as a method sees it, whichever engine hosts the clients."""

import fcntl
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.accounts.card import plan_of
from fed_dpsd.accounts.secret import noise_of
from fed_dpsd.accounts.tally import Tally
from fed_dpsd.cohort import cohort
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.experiment import Experiment
from fed_dpsd.methods.method import World
from fed_dpsd.models import to_vector
from fed_dpsd.privacy.noise import Noise
from fed_dpsd.protocol import (
    NOTHING,
    OF_WEIGHTS,
    Answer,
    Ask,
    Refusal,
    Releases,
    SumStep,
    Total,
    misfit,
)
from fed_dpsd.server.asks import Asks
from fed_dpsd.server.secure_sum import secure_sum
from fed_dpsd.storage import npz_of, write_atomically, writing
from fed_dpsd.streams import Streams

OF_ROUNDS = ("answers", "train")  # kinds that cohorts are asked, by the number of the round
logger = logging.getLogger("fed_dpsd")


class InUse(UserError):
    """Another process goes on with the run, whose files are its to write."""


def _locked(run_folder: Path) -> IO[bytes]:
    """Keep other processes from going on with the run, for as long as this one lives.

    Raises:
        InUse: another process goes on with it now.
    """
    with writing(run_folder / "lock"):
        run_folder.mkdir(parents=True, exist_ok=True)
        lock = (run_folder / "lock").open("wb")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise InUse(
            f"another process goes on with the run in {run_folder}: stop it, or wait for it"
        ) from None
    return lock


def in_use(run_folder: Path) -> bool:
    """Return whether another process goes on with the run."""
    try:
        with (run_folder / "lock").open("rb") as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class HostedFederation(ABC):
    """The base of every engine: it settles asks, checks and sums answers, and counts bytes.

    Attributes:
        counted: the last round whose asks were counted before. A resumed run may repeat some of
            them, such as fetching weights; they are not counted again.
        bytes_to_clients: payload sent so far, over all clients.
        bytes_to_server: payload received so far.
    """

    engine: str

    def __init__(self, experiment: Experiment, run_folder: Path) -> None:
        self.experiment = experiment
        own_noise = experiment.answers.noise_at == "server"
        secret = noise_of(experiment, run_folder, "server") if own_noise else None
        self._world = World.of(experiment.config, experiment.training, experiment.answers)
        self._lock = _locked(run_folder)
        self._notes, self._asks = run_folder / "sums", Asks(run_folder / "asks")
        self._tally = Tally(run_folder, plan_of(experiment).releases)
        self._noise: Noise = secret or Streams(experiment.config.seed)
        self.counted = -1
        self.bytes_to_clients = 0
        self.bytes_to_server = 0

    def _asked(self, ask: Ask) -> Sequence[int]:
        """Return the clients that an ask is for, in their order: a cohort, or all of them."""
        if ask.kind in OF_ROUNDS:
            return cohort(self.experiment.config, ask.query_id)
        return range(self.experiment.config.num_clients)

    @abstractmethod
    def _deliver(self, ask: Ask) -> dict[int, Answer | Refusal]:
        """Bring an ask to each client that it is for, and return their answers."""

    @abstractmethod
    def _step(self, steps: Mapping[int, SumStep]) -> Mapping[int, Mapping[str, bytes]]:
        """Bring a step of a secure sum to each of some clients, and return their replies."""

    @abstractmethod
    def diagnose(self) -> Iterator[NDArray[np.float32]]:
        """Yield the exact (n, N, K) probabilities of each client's teachers on the test split.

        Simulations only. Clients come in their order, and not at once: thousands of them would
        fill the memory. Teachers that are not trained yet are trained now.
        """

    def settle(self, ask: Ask) -> Ask:
        """Return the ask to send and to learn from: this one, or the one sent in its place."""
        return self._asks.settle(ask)

    @property
    def charges(self) -> dict[int, Releases]:
        """Return what the run has cost each client so far, by its own statement."""
        return self._tally.heard

    def prune(self, rounds: int) -> None:
        """Forget the asks that cannot be sent again, once this many rounds are saved."""
        self._asks.prune(rounds)

    def each(self, ask: Ask) -> dict[int, Answer | Refusal]:
        """Return the checked answer of each client that is asked, in the order of the clients.

        The cost of the answers is written down before anybody learns from them.

        Raises:
            ProtocolError: the run has sent another ask of this id and kind, which was charged.
        """
        if self.settle(ask).digest() != ask.digest():
            raise ProtocolError(
                f"ask {ask.query_id} ({ask.kind}) is not the one that this run has sent before; "
                "send and learn from what `settle` returns"
            )
        answers: dict[int, Answer | Refusal] = {}
        for client, answer in sorted(self._covered(ask).items()):
            new = ask.query_id > self.counted
            self.bytes_to_clients += ask.nbytes * new
            if isinstance(answer, Answer):
                self.bytes_to_server += answer.nbytes * new
                answers[client] = self._receive(ask, client, answer)
            else:
                answers[client] = answer
        return answers

    def _covered(self, ask: Ask) -> dict[int, Answer | Refusal]:
        """Return the answer of each client that is asked, once its cost is in the run's tally."""
        answers = self._deliver(self._with_tally(ask))
        if again := self._tally.take(answers):
            repeated = self._deliver(self._with_tally(ask))
            acknowledged = {client: repeated[client] for client in again}
            self._tally.take(acknowledged)
            answers |= acknowledged
        return answers

    def _with_tally(self, ask: Ask) -> Ask:
        """Return the ask with the tally of the run's charges."""
        return replace(ask, acknowledged=dict(self._tally.acknowledged), heard=self._tally.heard)

    def _receive(self, ask: Ask, client: int, answer: Answer) -> Answer | Refusal:
        """Return an answer with its bad rows, or a bad answer as a whole, replaced by zeros.

        Bad weights become a refusal. The number of teachers stays, so that a bad answer cannot
        change the weight of the others. The problem goes to the server's log.

        Raises:
            ProtocolError: weights are bad in a simulation, where nobody lies.
        """
        teachers = self.experiment.config.teachers_per_client
        if ask.kind == "answers" and self.experiment.answers.noise_at == "distributed":
            return replace(answer, teachers=teachers)  # masked values cannot be checked
        mechanism = self.experiment.answers
        problem = misfit(ask, answer)
        if ask.kind == "counts":
            if problem or not np.isfinite(answer.values).all():
                problem = problem or "values hold NaN or infinity"
                logger.warning("client %d: its class counts are taken as zero: %s", client, problem)
                return Answer(ask.query_id, np.zeros((1, ask.predictions.shape[1])), teachers)
            return answer
        if ask.kind in OF_WEIGHTS:
            models = 1 if ask.kind == "baseline" else teachers
            weights, problem = self._weights(answer, client, models, problem)
            if problem and self.experiment.config.federation.simulation:
                raise ProtocolError(f"client {client} sent invalid weights: {problem}")
            if problem:
                logger.warning("client %d sent invalid weights: %s", client, problem)
                return Refusal(ask.query_id, f"invalid weights: {problem}")
            return replace(answer, values=weights)
        if problem:
            logger.warning("client %d: the answer counts as zero: %s", client, problem)
            return Answer(ask.query_id, np.zeros(ask.predictions.shape), teachers)
        good = np.isfinite(answer.values).all(axis=1)
        values = np.where(good[:, None], answer.values, 0)
        exact = values.astype(np.float64)  # squares of a peer's small integers would wrap around
        good &= mechanism.admissible(exact, ask.predictions, teachers)
        if not good.all():
            count = len(good) - int(good.sum())
            logger.warning("client %d: %d of %d rows count as zero", client, count, len(good))
        return Answer(ask.query_id, np.where(good[:, None], values, 0), teachers)

    def _weights(
        self, answer: Answer, client: int, models: int, problem: str
    ) -> tuple[NDArray[np.float32], str]:
        """Return a client's weights as float32, and the problem with them; "" if they are good."""
        if problem:
            return NOTHING, problem
        with np.errstate(over="ignore"):
            weights = answer.values.astype(np.float32)
        expected = models * len(to_vector(self._world.make_teacher(client)))
        if len(weights) != expected:
            return NOTHING, f"{len(weights)} values, expected {expected}"
        return weights, "" if np.isfinite(weights).all() else "values hold NaN or infinity"

    def total(self, ask: Ask) -> Total:
        """Sum the answers; with `noise_at: server` the noise is drawn here, once for an ask.

        Raises:
            UserError: the noise is distributed, and too few clients are left for a secure sum.
        """
        answers = self.each(ask)
        if self.experiment.answers.noise_at == "distributed":
            return self._secure_total(ask, answers)
        arrived = [answer for answer in answers.values() if isinstance(answer, Answer)]
        if self.experiment.answers.noise_at == "server":
            return self._noisy_total(ask, arrived, _refused(answers))
        total = np.zeros(ask.predictions.shape)
        for answer in arrived:
            total += answer.values
        return Total(total, sum(answer.teachers for answer in arrived), _refused(answers))

    def _noisy_total(self, ask: Ask, answers: Sequence[Answer], refused: dict[int, str]) -> Total:
        """Return the sum with the server's noise, drawn once for an ask of a run and kept.

        A run that is killed and resumed may find other clients there. A second sum, with other
        noise, would be a second release of answers that were charged once.
        """
        path = self._notes / f"{ask.digest()}.npz"
        if path.exists():
            with np.load(path, allow_pickle=False) as kept:
                return Total(kept["sum"], int(kept["count"]), refused)
        if not answers:
            return Total(np.zeros(ask.predictions.shape), 0, refused)
        # Other answers get other noise; otherwise two sums would show their exact difference.
        digest = hashlib.sha256(ask.digest().encode())
        digest.update(b"".join(answer.values.tobytes() for answer in answers))
        rng = self._noise.numpy("server noise", query_id=int(digest.hexdigest(), 16))
        values = np.stack([answer.values for answer in answers])
        noisy = self.experiment.answers.noise(values, ask.predictions, rng)
        count = sum(answer.teachers for answer in answers)
        write_atomically(path, npz_of({"sum": noisy, "count": count}))
        return Total(noisy, count, refused)

    def _secure_total(self, ask: Ask, answers: Mapping[int, Answer | Refusal]) -> Total:
        """Return the sum of masked answers; the server sees nothing else of them."""
        masked = {c: answer for c, answer in answers.items() if isinstance(answer, Answer)}
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
    return {c: answer.reason for c, answer in answers.items() if isinstance(answer, Refusal)}
