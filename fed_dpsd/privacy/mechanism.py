"""The contracts every privacy mechanism keeps, and the type an epsilon is.

One frozen object holds the noise and the event derived from it, so they cannot drift apart.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, NonPrivateDpEvent
from numpy.typing import NDArray

from fed_dpsd.privacy.noise import Rng

Unit = Literal["record", "patient", "client"]
Relation = Literal["add_remove", "replace_one"]
NoiseAt = Literal["client", "server", "distributed"]
Trust = Literal["nobody", "threshold", "server"]  # the further right, the more
Values = NDArray[Any]

SMALLEST, LARGEST = 1e-100, 1e100  # of bounds and noise

UNITS_AND_RELATIONS: tuple[tuple[Unit, Relation], ...] = (
    ("record", "add_remove"),
    ("record", "replace_one"),
    ("patient", "add_remove"),
    ("patient", "replace_one"),
    ("client", "add_remove"),
    ("client", "replace_one"),
)


@dataclass(frozen=True)
class Epsilon:
    """A proven privacy loss. There is no way to print it without what it means.

    Args:
        value: epsilon, >= 0, `inf` where nothing is proven.
        delta: failure probability fixed in advance, in [0, 1); 0 for a pure guarantee.
        unit: what one change of the private data may touch.
        relation: how it may change.
        trust: who must be honest.
        accountant: which function proved it.
        queries: number of answers it covers.
        notes: caveats that travel with the number.
    """

    value: float
    delta: float
    unit: Unit
    relation: Relation
    trust: Trust
    accountant: str
    queries: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        number = "inf"
        if self.value < math.inf:  # five digits, rounded up: it is an upper bound
            digits = max(0, 4 - math.floor(math.log10(max(self.value, 1e-4))))
            rounded = math.ceil(self.value * 10**digits - 1e-9) / 10**digits
            number = f"{rounded:,.{digits}f}"
            number = number.rstrip("0").rstrip(".") if digits else number
        return (
            f"{number} ({self.unit}, {self.relation}, trust {self.trust}, "
            f"delta {self.delta:g}, {self.accountant})"
        )

    __repr__ = __str__

    def __format__(self, specification: str) -> str:
        return str(self)

    def to_json(self) -> dict[str, Any]:
        """The object of summary.json; infinity is the string "inf"."""
        return {
            "unit": self.unit,
            "relation": self.relation,
            "trust": self.trust,
            "delta": self.delta,
            "epsilon": "inf" if math.isinf(self.value) else self.value,
            "queries": self.queries,
            "accountant": self.accountant,
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Epsilon":
        """What `to_json` wrote; other keys are left aside."""
        fields = {key: row[key] for key in cls.__dataclass_fields__ if key in row}
        return cls(value=float(row["epsilon"]), **fields | {"notes": tuple(row["notes"])})


@dataclass(frozen=True)
class Shards:
    """How a client's records are shared out among its teachers, one shard a teacher.

    Args:
        teachers: n >= 1, a public constant.
        by: whose keyed hash decides the shard. By "record" a patient's records may lie in all n
            shards; by "patient" they lie in one.

    Raises:
        ValueError: there is no teacher.
    """

    teachers: int = 1
    by: Literal["record", "patient"] = "record"

    def __post_init__(self) -> None:
        if self.teachers < 1:
            raise ValueError(f"teachers={self.teachers} must be >= 1")
        if self.by not in ("record", "patient"):
            raise ValueError(f"by={self.by!r} must be 'record' or 'patient'")

    def changed(self, unit: Unit) -> int:
        """The number of a client's teachers that one change of `unit` may change."""
        one = unit == "record" or (unit == "patient" and self.by == "patient")
        return 1 if one else self.teachers


ONE_TEACHER = Shards()


@dataclass(frozen=True)
class Quorum:
    """Who is needed for a secure sum, and who is trusted in it: privacy/secure_sum.py.

    Args:
        threshold: clients that a sum holds at least, and whose shares put a key together.
        colluding: clients that may work for the server, or look at results with what they know of
            their own part; the others' noise is enough.

    Raises:
        ValueError: nobody honest is left in a smallest sum.
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
        """Honest clients whose noise a sum holds at least."""
        return self.threshold - self.colluding

    def check(self, num_clients: int) -> None:
        """Raise ValueError unless no two sums of one ask can be opened."""
        if not num_clients + self.colluding < 2 * self.threshold <= 2 * num_clients:
            raise ValueError(
                f"threshold={self.threshold} must be above half of num_clients={num_clients} "
                f"and colluding={self.colluding} together, and at most num_clients"
            )


def vanishes(unit: Unit, relation: Relation) -> bool:
    """Whether values become zero rather than others: only where a whole client's do.

    A client without records still answers, zero with its noise. A teacher whose record or patient
    goes is trained on the rest.
    """
    return unit == "client" and relation == "add_remove"


class Mechanism(Protocol):
    """A mechanism for answers, in two halves: `encode` bounds the value, `noise` randomises it.

    `encode` runs for each teacher. `noise` runs once per query: at each client on its teachers'
    values (`noise_at="client"`), or at the server on the sum (`noise_at="server"`). With
    `noise_at="distributed"` it runs at each client, adds a share of it or less noise than an answer
    that is seen by itself would need, and a secure sum hides whose is which.
    """

    name: ClassVar[str]
    input: ClassVar[Literal["gradient", "probabilities"]]
    calibrated_by: ClassVar[str | None]  # the field that sets the noise

    @property
    def reason(self) -> str | None:
        """Why nothing finite is proven, for the units where nothing is."""

    @property
    def noise_at(self) -> NoiseAt:
        """Who adds the noise."""

    @property
    def trust(self) -> Trust:
        """Who must be honest for the guarantee to hold."""

    def encode(self, sensitive_value: Values, predictions: Values) -> Values:
        """Bound a teacher's (B, K) value at the site, given the public (B, K) predictions."""

    def noise(self, value: Values, predictions: Values, rng: Rng) -> Values:
        """The randomised sum, (B, K), of (n, B, K) encoded values."""

    def admissible(self, values: Values, predictions: Values, teachers: int) -> NDArray[np.bool_]:
        """(B,) rows of a client's (B, K) answer that its `teachers` could honestly have given.

        A norm is judged only where un-noised values are sent.
        """

    def releases(self, asks: int, queries: int) -> int:
        """The number of `event`s that `asks` asks of `queries` queries each cost."""

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """One release's event, with sensitivity and relation folded into its parameters."""


@runtime_checkable
class Additive(Mechanism, Protocol):
    """A mechanism that adds independent noise of one law to each of K coordinates.

    Its answers are unbiased, so a student learns from them by least squares; and it is audited by
    sampling the two worlds that are hardest to tell apart.
    """

    @property
    def num_classes(self) -> int:
        """K."""

    @property
    def noise_multiplier(self) -> float:
        """The noise, in units of the sensitivity or of a vote; larger is more private."""

    @property
    def noise_law(self) -> Literal["gaussian", "laplace"]:
        """The law of a coordinate's noise."""

    def worst_case(self) -> tuple[Values, Values]:
        """(n, 1, K) values of a client's teachers in two worlds that differ in one record."""


@runtime_checkable
class Shared(Mechanism, Protocol):
    """A mechanism whose answers a secure sum may hide, each with a share of the noise."""

    @property
    def shards(self) -> Shards:
        """The client's teachers."""

    @property
    def quorum(self) -> Quorum | None:
        """Of the secure sum; None where there is none."""

    @property
    def lattice(self) -> float:
        """What randomised answers are whole multiples of."""


@dataclass(frozen=True)
class Clear:
    """What leaves without noise of its own: (B, K) probabilities, summed over the teachers."""

    input: ClassVar[Literal["probabilities"]] = "probabilities"
    noise_at: ClassVar[NoiseAt] = "client"
    trust: ClassVar[Trust] = "nobody"
    calibrated_by: ClassVar[str | None] = None

    def encode(self, sensitive_value: Values, predictions: Values) -> Values:
        """The value itself, as float32; uniform where a row holds NaN or infinity."""
        sensitive_valid = np.isfinite(sensitive_value).all(axis=1, keepdims=True)
        uniform = 1 / np.shape(sensitive_value)[1]
        return np.where(sensitive_valid, sensitive_value, uniform).astype(np.float32)

    def noise(self, value: Values, predictions: Values, rng: Rng) -> Values:
        """The sum itself."""
        return np.asarray(value.sum(0))

    def admissible(self, values: Values, predictions: Values, teachers: int) -> NDArray[np.bool_]:
        """Rows that are sums of probabilities."""
        total = values.sum(axis=1, dtype=np.float64)
        return np.asarray((values >= 0).all(axis=1) & (np.abs(total - teachers) <= 1e-3 * teachers))


@dataclass(frozen=True)
class PostProcessing(Clear):
    """Free answers of a teacher that was trained with DP.

    Only a site makes one, over an entry that its ledger already holds.

    Args:
        ledger_entry: digest of the training's charge.
    """

    name: ClassVar[str] = "post_processing"
    reason: ClassVar[None] = None
    ledger_entry: str

    def releases(self, asks: int, queries: int) -> int:
        """None: everything was paid for when the teacher was trained."""
        return 0

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """The empty composition, whose epsilon is 0."""
        return ComposedDpEvent([])


@dataclass(frozen=True)
class NonPrivate(Clear):
    """Answers in the clear, and epsilon is `inf`.

    Args:
        reason: one line that says why nothing is proven.
    """

    name: ClassVar[str] = "non_private"
    reason: str = "answers leave the client without noise"

    def releases(self, asks: int, queries: int) -> int:
        """One for each query, and one for an ask that has none."""
        return asks * max(queries, 1)

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """The non-private event, whose epsilon is infinite."""
        return NonPrivateDpEvent()


def top_k(predictions: Values, k: int) -> NDArray[np.bool_]:
    """Mask of each row's k largest entries of (B, K) `predictions`; ties go to the lower class.

    Where the mask depends on public predictions only, both sides compute the same one.
    """
    order = np.argsort(-predictions, axis=1, kind="stable")[:, :k]
    mask = np.zeros(predictions.shape, bool)
    np.put_along_axis(mask, order, True, axis=1)
    return mask


def check_k(k: int, num_classes: int) -> None:
    """Raise ValueError unless 2 <= k <= num_classes."""
    if not 2 <= k <= num_classes:
        raise ValueError(f"k={k} must be between 2 and the number of classes, {num_classes}")


def trust_of(noise_at: NoiseAt) -> Trust:
    """The server, where it adds the noise; a number of clients, where each adds a share."""
    trusted: dict[NoiseAt, Trust] = {"server": "server", "distributed": "threshold"}
    return trusted.get(noise_at, "nobody")


def weakest(trusts: Iterable[Trust]) -> Trust:
    """Who must be honest for all of several guarantees; where one trusts the server, it must be."""
    found = set(trusts)
    return next((t for t in get_args(Trust)[:0:-1] if t in found), "nobody")


def check_size(field: str, value: float) -> None:
    """Raise ValueError unless floats can hold the value, its square and a fine part of it."""
    if not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{field}={value} must be between {SMALLEST:g} and {LARGEST:g}")


def check_exact(noise_multiplier: float, teachers: int) -> None:
    """Raise ValueError unless the sum of bounded values is exact on the grid of their noise.

    A value is at most 2^26 / noise_multiplier grid steps, more by the root of a secure sum's
    clients; float64 holds 2^53 of them exactly, of 2,000 clients together.
    """
    least = teachers * 2.0**-16
    if noise_multiplier < least:
        raise ValueError(
            f"noise_multiplier={noise_multiplier:g} must be at least {least:.3g} for "
            f"{teachers} teachers: less is no noise"
        )


def check_noise_at(noise_at: str, quorum: Quorum | None) -> None:
    """Raise ValueError unless somebody adds the noise, and knows how much of it."""
    if noise_at not in ("client", "server", "distributed"):
        raise ValueError(f"noise_at={noise_at!r} must be 'client', 'server' or 'distributed'")
    if (noise_at == "distributed") != (quorum is not None):
        raise ValueError(f"noise_at={noise_at!r} and quorum={quorum}: they go together")
