"""The contracts every privacy mechanism keeps, and the type an epsilon is.

One frozen object holds the noise and the event derived from it, so they cannot drift apart.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, NonPrivateDpEvent
from numpy.typing import NDArray

Unit = Literal["record", "patient", "client"]
Relation = Literal["add_remove", "replace_one"]
NoiseAt = Literal["client", "server"]
Trust = Literal["nobody", "server"]
Values = NDArray[Any]

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


def vanishes(unit: Unit, relation: Relation) -> bool:
    """Whether values become zero rather than others: only where a whole client's do.

    A client without records still answers, zero with its noise. A teacher whose record or patient
    goes is trained on the rest.
    """
    return unit == "client" and relation == "add_remove"


class Mechanism(Protocol):
    """A mechanism for answers, in two halves: `encode` bounds the value, `noise` randomises it.

    `encode` runs for each teacher. `noise` runs once per query: at each client on its teachers'
    values (`noise_at="client"`), or at the server on the sum (`noise_at="server"`).
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

    def noise(self, value: Values, predictions: Values, rng: np.random.Generator) -> Values:
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

    def noise(self, value: Values, predictions: Values, rng: np.random.Generator) -> Values:
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


def snap(values: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """Noisy `values` on a grid of 2^-20 of the noise's scale, or a little less.

    The last bits of a floating-point sum tell which number the noise was added to (Mironov: "On
    significance of the least significant bits for differential privacy", CCS 2012). Rounding is
    post-processing of ideal noise, and hides them; it is no proof for a generator's own noise.
    """
    grid = 2.0 ** (math.floor(math.log2(scale)) - 20)
    return np.asarray(np.round(values / grid) * grid)


def check_k(k: int, num_classes: int) -> None:
    """Raise ValueError unless 2 <= k <= num_classes."""
    if not 2 <= k <= num_classes:
        raise ValueError(f"k={k} must be between 2 and the number of classes, {num_classes}")


def trust_of(noise_at: NoiseAt) -> Trust:
    """The server, where it adds the noise; otherwise nobody."""
    return "server" if noise_at == "server" else "nobody"


def check_noise_at(noise_at: str) -> None:
    """Raise ValueError unless somebody adds the noise."""
    if noise_at not in ("client", "server"):
        raise ValueError(f"noise_at={noise_at!r} must be 'client' or 'server'")
