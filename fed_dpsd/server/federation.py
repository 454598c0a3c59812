"""The federation as methods see it, independent of the engine that hosts the clients."""

import fcntl
import hashlib
import logging
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.accounts.secret import ledger_folder, noise_of, own_ledger_folder, require_secret
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.experiment import Experiment
from fed_dpsd.methods.cohort import cohort
from fed_dpsd.models import to_vector
from fed_dpsd.privacy.noise import Noise
from fed_dpsd.protocol import (
    NOTHING,
    OF_WEIGHTS,
    SUMMED,
    Aggregate,
    Refusal,
    Releases,
    Replies,
    Request,
    Response,
    SumStep,
    mismatch,
)
from fed_dpsd.server.charge_log import ChargeLog
from fed_dpsd.server.checkpoint import KEPT
from fed_dpsd.server.secure_sum import secure_sum
from fed_dpsd.storage import run_name, to_npz, try_lock, write_atomically, writing
from fed_dpsd.streams import Streams

OF_ROUNDS = (*SUMMED, "train")  # kinds of requests that go to the cohort of a round
logger = logging.getLogger("fed_dpsd")


class InUse(UserError):
    """The run is in use by another process."""


def _lock_run(folder: Path, run: str) -> IO[bytes]:
    with writing(folder / "lock"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = try_lock(folder / "lock")
    if lock is None:
        raise InUse(f"another process is running {run}; stop it or wait for it to finish")
    return lock


def in_use(run_folder: Path) -> bool:
    """Return whether another process is running this run."""
    try:
        with (run_folder / "lock").open("rb") as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class SentRequests:
    """The requests that a run has sent, one file per id and kind.

    A client is charged for the bytes of a request. A resumed run may compute different bytes,
    because rounding depends on the processor and the number of threads, so it sends the stored
    request again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests: dict[str, str] = {}  # of this process's requests, by file name

    def get_or_store(self, request: Request) -> Request:
        """Return the request stored under this id and kind, or store this request and return it.

        The request is durable on return; it must not be sent earlier.

        Raises:
            ProtocolError: this process has stored a different request with this id and kind.
            UserError: the file cannot be read.
        """
        path = self._folder / f"{request.query_id:05d}_{request.kind}.npz"
        digest = request.digest
        if self._digests.setdefault(path.name, digest) != digest:
            raise ProtocolError(
                f"request {request.query_id} ({request.kind}) differs from the one that this "
                "run sent before"
            )
        if not path.exists():
            arrays = {name: getattr(request, name) for name in ("images", "predictions", "weights")}
            write_atomically(path, to_npz(arrays))
            return request
        try:
            with np.load(path, allow_pickle=False) as kept:
                return replace(request, **kept)
        except (OSError, ValueError, TypeError, zipfile.BadZipFile, ProtocolError) as error:
            raise UserError(
                f"the request {path} cannot be read ({error}); restore it, or delete it: clients "
                "then charge the request that replaces it, as the run's privacy card will state"
            ) from None

    def prune(self, rounds: int) -> None:
        """Delete the requests that no checkpoint needs once this many rounds are saved."""
        for path in self._folder.glob("*.npz"):
            if 0 < int(path.name.partition("_")[0]) <= rounds - KEPT:
                path.unlink(missing_ok=True)


class HostedFederation(ABC):
    """The base class of engines: stores requests, checks and sums responses, and counts bytes.

    Attributes:
        last_counted: the last round with counted requests. A resumed run may repeat some of these
            requests, such as fetching weights; they are not counted again.
        bytes_to_clients: payload sent so far, over all clients.
        bytes_to_server: payload received so far.
    """

    engine: str

    def __init__(self, experiment: Experiment, run_folder: Path) -> None:
        self.experiment = experiment
        own_noise = experiment.answers.noise_at == "server"
        require_secret(experiment, run_folder)
        secret = noise_of(experiment, run_folder, "server") if own_noise else None
        self._context = experiment.public
        self._sizes: dict[str, int] = {}
        # Copies of a run folder share the sums with the server's noise: a copy that drew noise for
        # other clients' answers would release them again. They also share secret ledgers.
        shared = ledger_folder(experiment, run_folder) / f"{run_name(run_folder)}.sums"
        self._sums = shared if secret else run_folder / "sums"
        self._lock = _lock_run(run_folder, f"{run_folder}")
        place = shared if secret else None
        if experiment.config.federation.simulation and not experiment.config.ledger:
            place = None if experiment.seeded else own_ledger_folder(run_folder)
        copy = f"{run_folder} or a copy of it"
        self._lock_of_copies = _lock_run(place, copy) if place else None
        self._requests_sent = SentRequests(run_folder / "asks")
        self._charge_log = ChargeLog(run_folder, experiment.plan.releases)
        self._noise: Noise = secret or Streams(experiment.config.seed)
        self.last_counted = -1
        self.bytes_to_clients = 0
        self.bytes_to_server = 0

    def _recipients(self, request: Request) -> Sequence[int]:
        """Return the clients that receive a request, in order: a cohort or all clients."""
        if request.kind in OF_ROUNDS:
            return cohort(self.experiment.config, request.query_id)
        return range(self.experiment.config.num_clients)

    @abstractmethod
    def _deliver(self, request: Request) -> dict[int, Response | Refusal]:
        """Deliver a request to its recipients, and return their responses."""

    @abstractmethod
    def _step(self, steps: Mapping[int, SumStep]) -> Mapping[int, Mapping[str, bytes]]:
        """Deliver a step of a secure sum to some clients, and return their replies."""

    @abstractmethod
    def diagnose(self) -> Iterator[NDArray[np.float32]]:
        """Yield the exact (n, N, K) probabilities of each client's teachers on the test split.

        For simulations only. Clients are yielded one by one, in order, because thousands at once
        would fill the memory. Untrained teachers are trained first.
        """

    @property
    def charges(self) -> dict[int, Releases]:
        """Return the run's cost to each client so far, by the client's own statement."""
        return self._charge_log.heard

    def prune(self, rounds: int) -> None:
        """Delete the requests that cannot be sent again once this many rounds are saved."""
        self._requests_sent.prune(rounds)

    def each(self, request: Request) -> Replies:
        """Return the checked answer of each client of the request, in client order.

        A resumed run repeats the request that it sent before with the same id and kind, because
        clients were charged for that request. The cost of answers is recorded before they are used.

        Raises:
            ProtocolError: this process has sent another request with this id and kind.
        """
        request = self._requests_sent.get_or_store(request)
        replies = Replies(request, {})
        for client, response in sorted(self._deliver_and_log(request).items()):
            new = request.query_id > self.last_counted
            self.bytes_to_clients += request.nbytes * new
            if isinstance(response, Response):
                self.bytes_to_server += response.nbytes * new
                replies[client] = self._receive(request, client, response)
            else:
                replies[client] = response
        return replies

    def _deliver_and_log(self, request: Request) -> dict[int, Response | Refusal]:
        """Deliver a request and record its cost in the charge log, before any answer is used.

        A client that refuses an unplanned charge receives the request again, once the charge is
        acknowledged. It may need one acknowledgement per planned mechanism, such as for class
        counts and then for the training before them.
        """
        answers = self._deliver(self._with_charges(request))
        again = self._charge_log.take(answers)
        for _ in self._charge_log.planned:
            if not again:
                break
            repeated = self._deliver(self._with_charges(request))
            fresh = {
                client: reply
                for client, reply in repeated.items()
                if client in again or not isinstance(answers.get(client), Response)
            }
            again = self._charge_log.take(fresh)
            answers |= fresh
        return answers

    def _with_charges(self, request: Request) -> Request:
        return replace(
            request, acknowledged=dict(self._charge_log.acknowledged), heard=self._charge_log.heard
        )

    def _receive(self, request: Request, client: int, response: Response) -> Response | Refusal:
        """Return an answer with zeros in bad rows, or in all rows if the whole answer is bad.

        Bad weights are turned into a refusal. The number of teachers is unchanged, so a bad answer
        cannot change the weight of other answers. The problem is reported in the server's log.

        Raises:
            ProtocolError: weights are bad in a simulation, where clients are honest.
        """
        teachers = self.experiment.config.teachers_per_client
        if request.kind in SUMMED and self.experiment.answers.noise_at == "distributed":
            return replace(response, teachers=teachers)  # masked values cannot be checked
        mechanism = self.experiment.answers
        problem = mismatch(request, response)
        if request.kind == "counts":
            if problem or not np.isfinite(response.values).all():
                problem = problem or "values hold NaN or infinity"
                logger.warning("client %d: its class counts count as zero: %s", client, problem)
                return Response(
                    request.query_id, np.zeros((1, request.predictions.shape[1])), teachers
                )
            return response
        if request.kind in OF_WEIGHTS:
            models = 1 if request.kind == "baseline" else teachers
            weights, problem = self._weights(response, client, models, problem)
            if problem and self.experiment.config.federation.simulation:
                raise ProtocolError(f"client {client} sent invalid weights: {problem}")
            if problem:
                logger.warning("client %d sent invalid weights: %s", client, problem)
                return Refusal(request.query_id, f"invalid weights: {problem}")
            return replace(response, values=weights)
        if problem:
            logger.warning("client %d: the answer counts as zero: %s", client, problem)
            return Response(request.query_id, np.zeros(request.summed_shape), teachers)
        good = np.asarray(np.isfinite(response.values).all(axis=1))
        values = np.where(good[:, None], response.values, 0)
        exact = values.astype(np.float64)  # squares of small integer types would overflow
        good &= mechanism.admissible(exact, request.predictions, teachers)
        if not good.all():
            count = len(good) - int(good.sum())
            logger.warning("client %d: %d of %d rows count as zero", client, count, len(good))
        return Response(request.query_id, np.where(good[:, None], values, 0), teachers)

    def _weights(
        self, response: Response, client: int, models: int, problem: str
    ) -> tuple[NDArray[np.float32], str]:
        """Return a client's weights as float32, and the problem with them; "" if there is none."""
        if problem:
            return NOTHING, problem
        with np.errstate(over="ignore"):
            weights = response.values.astype(np.float32)
        expected = models * self._size(client)
        if len(weights) != expected:
            return NOTHING, f"{len(weights)} values, expected {expected}"
        return weights, "" if np.isfinite(weights).all() else "values hold NaN or infinity"

    def _size(self, client: int) -> int:
        """Return the number of weights of a client's teacher; clients share architectures."""
        name = self.experiment.config.architecture(client)
        if name not in self._sizes:
            self._sizes[name] = len(to_vector(self._context.make_teacher(client)))
        return self._sizes[name]

    def total(self, request: Request) -> Aggregate:
        """Sum the answers; with `noise_at: server`, the noise is drawn here, once per request.

        Raises:
            UserError: the noise is distributed and too few clients are left for a secure sum.
        """
        replies = self.each(request)
        if self.experiment.answers.noise_at == "distributed":
            return self._secure_total(replies)
        if self.experiment.answers.noise_at == "server":
            return self._noisy_total(replies)
        answers = replies.answers.values()
        total = np.zeros(replies.request.summed_shape)
        for response in answers:
            total += response.values
        teachers = sum(response.teachers for response in answers)
        return Aggregate(replies.request, total, teachers, replies.refused)

    def _noisy_total(self, replies: Replies) -> Aggregate:
        """Return the sum with the server's noise, which is drawn once per request and stored.

        After a run is killed and resumed, other clients may be connected. A second sum with
        different noise would be a second release of answers that were charged only once.
        """
        request, refused, answers = replies.request, replies.refused, [*replies.answers.values()]
        path = self._sums / f"{request.digest}.npz"
        if path.exists():
            with np.load(path, allow_pickle=False) as kept:
                return Aggregate(request, kept["sum"], int(kept["count"]), refused)
        if not answers:
            return Aggregate(request, np.zeros(request.summed_shape), 0, refused)
        mechanism = self.experiment.answers
        digest = hashlib.sha256(f"{request.digest} {mechanism}".encode())
        digest.update(b"".join(response.values.tobytes() for response in answers))
        purpose = f"server noise, {request.kind}"
        rng = self._noise.noise(purpose, 0, request.query_id, hides=digest.hexdigest())
        values = np.stack([response.values for response in answers])
        noisy = mechanism.add_noise(values, request.predictions, rng)
        count = sum(response.teachers for response in answers)
        write_atomically(path, to_npz({"sum": noisy, "count": count}))
        return Aggregate(request, noisy, count, refused)

    def _secure_total(self, replies: Replies) -> Aggregate:
        """Return the sum of masked answers; the server learns nothing else about them."""
        request, masked = replies.request, replies.answers
        if not masked:
            return Aggregate(request, np.zeros(request.summed_shape), 0, replies.refused)

        def deliver(steps: Mapping[int, SumStep]) -> Mapping[int, Mapping[str, bytes]]:
            replies = self._step(steps)
            if request.query_id > self.last_counted:
                self.bytes_to_clients += sum(step.nbytes for step in steps.values())
                self.bytes_to_server += sum(len(b) for r in replies.values() for b in r.values())
            return replies

        total, named = secure_sum(self.experiment, request, masked, self._sums, deliver)
        teachers = len(named) * self.experiment.config.teachers_per_client
        return Aggregate(request, total, teachers, replies.refused)
