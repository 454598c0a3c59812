"""The contracts of privacy mechanisms.

One frozen object defines both the noise and the event derived from it, so they always match.
"""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from dp_accounting import DpEvent, NonPrivateDpEvent
from numpy.typing import NDArray

from fed_dpsd import losses
from fed_dpsd.privacy.noise import Rng

Unit = Literal["record", "patient", "client"]
Relation = Literal["add_remove", "replace_one"]
NoiseAt = Literal["client", "server", "distributed"]
Trust = Literal["nobody", "threshold", "server"]  # from the least trust to the most
# What a proof rests on; docs/mechanisms.md, "Two axes"
Basis = Literal["training", "answers", "contraction"]
Values = NDArray[Any]
# Maps (B, K) logits, (B, K) labels and the (B,) positions of their rows in a buffer to a loss.
StudentLoss = Callable[[torch.Tensor, torch.Tensor, NDArray[np.int64]], torch.Tensor]

SMALLEST, LARGEST = 1e-100, 1e100  # limits of bounds and noise
# Default noise_multiplier of answers that a private training covers: a student learns through it,
# and it suits every `noise_at`, unlike 0 (results/two_axes.md).
COVERED_NOISE = 0.1

UNITS_AND_RELATIONS: tuple[tuple[Unit, Relation], ...] = (
    ("record", "add_remove"),
    ("record", "replace_one"),
    ("patient", "add_remove"),
    ("patient", "replace_one"),
    ("client", "add_remove"),
    ("client", "replace_one"),
)


@dataclass(frozen=True)
class Shards:
    """The partition of a client's records among its teachers, one shard for each teacher.

    Args:
        teachers: n >= 1, a public constant.
        by: the id that determines the shard, by a keyed hash. With "record", a patient's records
            may be in all n shards; with "patient", they are in one.
        silent: whether a teacher without records answers zero. A teacher that was privately trained
            on no records, or read from a file, does not.
    """

    teachers: int = 1
    by: Literal["record", "patient"] = "record"
    silent: bool = True

    def __post_init__(self) -> None:
        if self.teachers < 1:
            raise ValueError(f"teachers={self.teachers} must be >= 1")
        if self.by not in ("record", "patient"):
            raise ValueError(f"by={self.by!r} must be 'record' or 'patient'")

    def changed(self, unit: Unit) -> int:
        """Return how many of a client's teachers a change of one `unit` may affect."""
        one = unit == "record" or (unit == "patient" and self.by == "patient")
        return 1 if one else self.teachers

    def vanish(self, unit: Unit, relation: Relation) -> bool:
        """Return whether a change sets values to zero; a removed client still answers."""
        return self.silent and unit == "client" and relation == "add_remove"


ONE_TEACHER = Shards()


@dataclass(frozen=True)
class Quorum:
    """The number of clients that a secure sum needs, and how many need not be trusted.

    Args:
        threshold: the minimum number of clients in a sum; the secret shares of this many
            reconstruct a key.
        colluding: the maximum number of clients that may work with the server. A client that sees
            the result knows its own part, so it counts as one. The noise of the others suffices.
    """

    threshold: int
    colluding: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.colluding < self.threshold:
            raise ValueError(
                f"colluding={self.colluding} must be at least 0 and below "
                f"threshold={self.threshold}"
            )

    @property
    def honest(self) -> int:
        """Return the minimum number of honest clients whose noise is in a sum."""
        return self.threshold - self.colluding

    def check(self, num_clients: int) -> None:
        """Raise ValueError unless at most one sum of a request can be opened."""
        if not num_clients + self.colluding < 2 * self.threshold <= 2 * num_clients:
            raise ValueError(
                f"threshold={self.threshold} must be above half the sum of "
                f"num_clients={num_clients} and colluding={self.colluding}, and at most num_clients"
            )


def noise_share(scale: float, quorum: Quorum | None) -> float:
    """Return the scale of a client's Gaussian noise, so that `quorum.honest` shares have `scale`.

    Without a quorum, a client adds the whole noise.
    """
    return scale / math.sqrt(quorum.honest if quorum else 1)


class Charged(Protocol):
    """A charge of an account, for a mechanism's releases or private training."""

    @property
    def name(self) -> str:
        """Return the name under which releases are counted."""

    @property
    def reason(self) -> str | None:
        """Return why nothing finite is proven for some units."""

    @property
    def noise_at(self) -> NoiseAt:
        """Return where noise is added."""

    @property
    def from_teachers(self) -> bool:
        """Return whether values depend on records only through the client's teachers.

        If so, private training of the teachers covers them.
        """

    def releases(self, requests: int, queries: int) -> int:
        """Return the number of `event`s for `requests` requests with `queries` queries each."""

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return one release's event, with sensitivity and relation folded into its parameters."""

    def describe(self) -> str:
        """Describe in a few words what leaves a client, as in "the teachers' own weights"."""
        return self.name.replace("_", " ")


class Mechanism(Charged, Protocol):
    """A mechanism for answers: `constrain_sensitivity` bounds a value, `add_noise` randomises it.

    All mechanisms derive from this class, including plug-ins' mechanisms.

    `constrain_sensitivity` runs for each teacher. `add_noise` runs once per query: at each client
    on its teachers' values (`noise_at="client"`), or at the server on the sum
    (`noise_at="server"`). With `noise_at="distributed"`, it runs at each client and adds a noise
    share, or less noise than an answer seen on its own would need. A secure sum then hides which
    answer came from which client.

    A mechanism also decodes its answers: `labels` and `student_loss` are post-processing, by the
    server. Their defaults suit any unbiased noise.
    """

    # What a teacher gives to `constrain_sensitivity`: the gradient of a distillation loss in the
    # student's probabilities, or its own probabilities.
    input: ClassVar[Literal["gradient", "probabilities"]]
    exact: ClassVar[bool] = False  # whether answers are the teachers' probabilities, without noise
    # Whether answers are counts or probabilities: numbers >= 0, with the number of teachers as
    # their sum. A student learns from them by cross-entropy, and from others by least squares.
    shares: ClassVar[bool] = False
    # The field that sets the noise: noise_multiplier or epsilon_per_answer.
    calibrated_by: ClassVar[str | None]
    # Noise where the configuration has null and no private training covers the answers.
    uncovered_noise: ClassVar[float | None] = None
    from_teachers: ClassVar[bool] = True

    @classmethod
    def default_noise(cls, covered: bool) -> float | None:
        """Return the noise to use if the configuration has null; None if null is not allowed.

        Args:
            covered: whether the teachers' private training covers the answers.
        """
        if cls.uncovered_noise is None:
            return None
        return COVERED_NOISE if covered else cls.uncovered_noise

    def constrain_sensitivity(self, sensitive_value: Values, predictions: Values) -> Values:
        """Bound a teacher's (B, K) value at the site, given public (B, K) predictions."""

    def add_noise(self, value: Values, predictions: Values, rng: Rng) -> Values:
        """Return the randomised sum, (B, K), of (n, B, K) encoded values."""

    def admissible(self, values: Values, predictions: Values, teachers: int) -> NDArray[np.bool_]:
        """Mark the (B,) rows of a (B, K) answer that a client with `teachers` could honestly give.

        The rows may exceed the bound by as much as honest noise adds.
        """

    def row_norm(self, predictions: Values) -> float:
        """Return the norm of a sure teacher's gradient in an answer, for (B, K) predictions.

        By default, it is measured: near uniform predictions, such a gradient is -K at one class.
        """
        sure = np.eye(predictions.shape[1])[predictions.argmax(1)]
        bounded = self.constrain_sensitivity(-predictions.shape[1] * sure, predictions)
        return float(np.linalg.norm(bounded, axis=1).max())

    def labels(self, total: Values, count: int, predictions: Values, step: float = 1.0) -> Values:
        """Return the (B, K) labels that answers imply: their mean, or a step along gradients.

        A label may leave the simplex. A projection would bias it, and noise would no longer average
        out over many labels.

        Args:
            total: (B, K), the sum of the answers.
            count: the number of teachers that answered, >= 1.
            predictions: (B, K), the predictions that were sent.
            step: how far a gradient of norm `row_norm` moves a label.
        """
        mean = total / count
        if self.input == "probabilities":
            return np.asarray(mean)
        return np.asarray(predictions - step * mean / self.row_norm(predictions))

    def student_loss(self, predictions: Values) -> StudentLoss:
        """Return the student's loss on `labels`, given a buffer's (N, K) predictions as sent."""
        loss = losses.student_loss if self.shares else losses.squared_loss
        return lambda logits, labels, chosen: loss(logits, labels)

    def releases(self, requests: int, queries: int) -> int:
        """Return one release per query."""
        return requests * queries

    def check(self, config: Any, method: Any, training: Any) -> list[str]:
        """Return the problems with these answers in an experiment, each with key, value and remedy.

        Overriding methods extend the returned list.

        Args:
            config: the experiment's Config.
            method: its Method.
            training: its Training.
        """
        problems, field = [], self.calibrated_by
        value = getattr(self, field) if field else None
        silent = value == {"noise_multiplier": 0.0, "epsilon_per_answer": math.inf}.get(field or "")
        if field and silent and not getattr(training, "private", False):
            problems.append(
                f"answers.{field}={value:g}: teachers that are trained without noise need noise in "
                "their answers; use training=dp_sgd, or answers=probabilities, whose epsilon is inf"
            )
        if quorum := quorum_of(self):
            try:
                quorum.check(config.num_clients)
            except ValueError as error:
                problems.append(f"answers.quorum.{error}")
            if config.clients_per_round is not None:
                problems.append(
                    f"clients_per_round={config.clients_per_round}: a secure sum needs all "
                    "clients; use clients_per_round=null, or answers.noise_at=client"
                )
        return problems

    def squared_snr(self, clients: int, teachers: int) -> float:
        """Return the squared signal-to-noise ratio of a query's answers; `inf` if not known.

        It assumes `clients` clients with `teachers` teachers each that all agree; a student needs a
        larger ratio.
        """
        return math.inf


@runtime_checkable
class Additive(Mechanism, Protocol):
    """A mechanism that adds independent, identically distributed noise to each of K coordinates.

    An audit samples the two worlds of `worst_case`.
    """

    additive: ClassVar[Literal[True]]

    @property
    def num_classes(self) -> int:
        """Return K, the number of classes."""

    @property
    def noise_multiplier(self) -> float:
        """Return the noise in units of the bound or in votes; larger is more private."""

    @property
    def noise_law(self) -> Literal["gaussian", "laplace"]:
        """Return the law of a coordinate's noise."""

    def worst_case(self) -> tuple[Values, Values]:
        """Return (n, 1, K) values of a client's teachers in two worlds, one record apart.

        They are not yet bounded by `constrain_sensitivity`.
        """


@runtime_checkable
class SupportsSecureSum(Mechanism, Protocol):
    """A mechanism with answers that secure sums can add, each with a share of the noise.

    Its event counts what `quorum.honest` clients add: if it is `Additive`, each adds a
    `noise_share` of `noise_multiplier`; otherwise, the event reads `quorum.honest` itself.
    """

    @property
    def shards(self) -> Shards:
        """Return the partition of a client's records among its teachers."""

    @property
    def quorum(self) -> Quorum | None:
        """Return the quorum of the secure sum; None if there is none."""

    @property
    def lattice(self) -> float:
        """Return the spacing of the lattice; randomised answers are integer multiples of it."""


def quorum_of(mechanism: Mechanism) -> Quorum | None:
    """Return the quorum of a mechanism's secure sums; None if it has none."""
    distributed = mechanism.noise_at == "distributed"  # first, since isinstance is slow here
    return mechanism.quorum if distributed and isinstance(mechanism, SupportsSecureSum) else None


def with_shares(mechanism: Mechanism, shares: int) -> Mechanism:
    """Return secure sums in which the noise, or the responses, of `shares` clients remain.

    These are the sums as an observer sees them who knows the parts of all other clients. Each
    client's own noise is unchanged.

    Args:
        mechanism: the answers, which have a quorum.
        shares: from 1 to the quorum's threshold.
    """
    quorum, seen = quorum_of(mechanism), copy.copy(mechanism)
    assert quorum is not None
    if shares == quorum.honest:
        return mechanism
    changes: dict[str, Any] = {"quorum": Quorum(quorum.threshold, quorum.threshold - shares)}
    if isinstance(mechanism, Additive):
        # Slightly larger, so that rounding never makes the lattice of a share finer.
        factor = math.sqrt(shares / quorum.honest) * (1 + 2.0**-50)
        changes["noise_multiplier"] = mechanism.noise_multiplier * factor
    for name, value in changes.items():  # unchecked: nothing draws this noise
        object.__setattr__(seen, name, value)
    return seen


@dataclass(frozen=True)
class Noiseless(Mechanism):
    """A release without its own noise, so nothing is proven for the release by itself.

    What it reveals about teachers trained with DP is post-processing of their training.
    """

    input: ClassVar[Literal["probabilities"]] = "probabilities"
    noise_at: ClassVar[NoiseAt] = "client"
    calibrated_by: ClassVar[str | None] = None

    def constrain_sensitivity(self, sensitive_value: Values, predictions: Values) -> Values:
        """Return the value as float32; keep NaN and infinity, which the server refuses."""
        return np.asarray(sensitive_value, np.float32)

    def add_noise(self, value: Values, predictions: Values, rng: Rng) -> Values:
        """Return the unchanged sum."""
        return np.asarray(value.sum(0))

    def admissible(self, values: Values, predictions: Values, teachers: int) -> NDArray[np.bool_]:
        """Mark the rows that are sums of probabilities."""
        total = values.sum(axis=1, dtype=np.float64)
        return np.asarray((values >= 0).all(axis=1) & (np.abs(total - teachers) <= 1e-3 * teachers))

    def releases(self, requests: int, queries: int) -> int:
        """Return one release per query, and one for a request without queries."""
        return requests * max(queries, 1)

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return the non-private event, which has an infinite epsilon."""
        return NonPrivateDpEvent()


@dataclass(frozen=True)
class Probabilities(Noiseless):
    """The teachers' probabilities, without noise."""

    exact: ClassVar[bool] = True
    shares: ClassVar[bool] = True
    name: ClassVar[str] = "probabilities"
    reason: ClassVar[str] = "probabilities leave the clients without noise"

    def describe(self) -> str:
        """Describe what leaves a client."""
        return "the teachers' probabilities, without noise"

    def constrain_sensitivity(self, sensitive_value: Values, predictions: Values) -> Values:
        """Return the value as float32; rows with NaN or infinity become uniform."""
        sensitive_valid = np.isfinite(sensitive_value).all(axis=1, keepdims=True)
        uniform = 1 / np.shape(sensitive_value)[1]
        return np.where(sensitive_valid, sensitive_value, uniform).astype(np.float32)


@dataclass(frozen=True)
class Weights(Noiseless):
    """The teachers' own weights, without noise."""

    name: ClassVar[str] = "weights"
    reason: ClassVar[str] = "the teachers' own weights leave the clients"

    def describe(self) -> str:
        """Describe what leaves a client."""
        return "the teachers' own weights"


@dataclass(frozen=True)
class KeptTeachers(Noiseless):
    """The teachers themselves, if they are the result: a claim must cover their holders too."""

    name: ClassVar[str] = "teachers"
    reason: ClassVar[str] = "the teachers themselves are the result"


@dataclass(frozen=True)
class ExactCounts(Noiseless):
    """The exact class counts of a client's records."""

    name: ClassVar[str] = "class_counts"
    reason: ClassVar[str] = "exact class counts leave the clients"
    from_teachers: ClassVar[bool] = False

    def describe(self) -> str:
        """Describe what leaves a client."""
        return "exact class counts"


def top_k(predictions: Values, k: int) -> NDArray[np.bool_]:
    """Mark each row's k largest entries of (B, K) `predictions`; ties go to the lower class.

    If the predictions are public, both sides compute the same mask.
    """
    order = np.argsort(-predictions, axis=1, kind="stable")[:, :k]
    mask = np.zeros(predictions.shape, bool)
    np.put_along_axis(mask, order, True, axis=1)
    return mask


def one_class_changed(teachers: int, num_classes: int) -> tuple[Values, Values]:
    """Return (n, 1, K) probabilities in two worlds, in which teacher 0 chooses class 0 or 1."""
    first = np.zeros((teachers, 1, num_classes))
    first[:, 0, 0] = 1
    second = first.copy()
    second[0, 0] = np.eye(num_classes)[1]
    return first, second


def additive_squared_snr(
    noise_multiplier: float, noise_at: NoiseAt, clients: int, teachers: int
) -> float:
    """Return the `squared_snr` of a sum of values, with noise added once or once per client."""
    if not noise_multiplier:
        return math.inf
    draws = clients if noise_at == "client" else 1
    return (clients * teachers / noise_multiplier) ** 2 / draws


def check_k(k: int, num_classes: int) -> None:
    """Raise ValueError unless 2 <= k <= num_classes."""
    if not 2 <= k <= num_classes:
        raise ValueError(f"k={k} must be between 2 and the number of classes, {num_classes}")


def trust_of(noise_at: NoiseAt) -> Trust:
    """Return "server" if the server adds the noise, "threshold" if clients add noise shares."""
    trusted: dict[NoiseAt, Trust] = {"server": "server", "distributed": "threshold"}
    return trusted.get(noise_at, "nobody")


def combined_trust(trusts: Iterable[Trust]) -> Trust:
    """Return the trust that several guarantees need together: the most that one of them needs."""
    needed = set(trusts)
    return next((t for t in get_args(Trust)[:0:-1] if t in needed), "nobody")


def check_size(field: str, value: float) -> None:
    """Raise ValueError unless floats can represent the value, its square and a small fraction."""
    if not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{field}={value} must be between {SMALLEST:g} and {LARGEST:g}")


def check_noise(noise_multiplier: float, noise_at: NoiseAt, teachers: int) -> None:
    """Raise ValueError unless the sum of bounded values is exact on their noise's lattice.

    A value is at most 2^26 / noise_multiplier lattice steps, times the square root of the number of
    clients in a secure sum. float64 represents 2^53 steps exactly, which suffices for 2,000 clients
    together. Without noise (for teachers trained with DP), no lattice is needed.
    """
    if noise_multiplier == 0:
        if noise_at != "client":
            raise ValueError(
                f"noise_multiplier=0 adds no noise, so noise_at={noise_at} must be client"
            )
        return
    check_size("noise_multiplier", noise_multiplier)
    least = teachers * 2.0**-16
    if noise_multiplier < least:
        raise ValueError(
            f"noise_multiplier={noise_multiplier:g} must be at least {least:.3g} for "
            f"{teachers} teachers: smaller noise counts as no noise"
        )


def check_noise_at(noise_at: str, quorum: Quorum | None) -> None:
    """Raise ValueError unless `noise_at` is valid, with a quorum if and only if distributed."""
    if noise_at not in ("client", "server", "distributed"):
        raise ValueError(f"noise_at={noise_at} must be client, server or distributed")
    if noise_at == "distributed" and quorum is None:
        raise ValueError(
            "noise_at=distributed needs a quorum: how many must help, and how many may collude, "
            "as in {threshold: 3, colluding: 1}"
        )
    if noise_at != "distributed" and quorum is not None:
        raise ValueError(f"quorum requires noise_at=distributed, not {noise_at}; use quorum=null")
