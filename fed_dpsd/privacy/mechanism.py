"""The contracts every privacy mechanism keeps, and the type an epsilon is.

One frozen object holds the noise and the event derived from it, so they cannot drift apart.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from dp_accounting import DpEvent, NonPrivateDpEvent
from numpy.typing import NDArray

Unit = Literal["record", "patient", "client"]
Relation = Literal["add_remove", "replace_one"]
NoiseAt = Literal["client", "server"]
Trust = Literal["nobody", "server"]
Values = NDArray[Any]


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
        number = "inf" if math.isinf(self.value) else f"{self.value:,.5g}"
        if 1e4 <= self.value < math.inf:
            number = f"{self.value:,.0f}"
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


class Mechanism(Protocol):
    """A mechanism for answers, in two halves: `encode` bounds the value, `noise` randomises it.

    `encode` runs for each teacher. `noise` runs once per query: at each client on its teachers'
    values (`noise_at="client"`), or at the server on the sum (`noise_at="server"`).
    """

    name: ClassVar[str]
    input: ClassVar[Literal["gradient", "probabilities"]]

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

    def sensitivity(self, unit: Unit, relation: Relation) -> float:
        """Largest change of one encoded answer, in the mechanism's own norm."""

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """The event of one query, with sensitivity and relation folded into its parameters."""


class TrainingMechanism(Protocol):
    """A mechanism that trains a teacher privately; its event is charged before the first step."""

    name: ClassVar[str]

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """The event of the whole training."""


@dataclass(frozen=True)
class PostProcessing:
    """Free answers of a teacher that was trained with DP.

    Only a site makes one, over an entry that its ledger already holds.

    Args:
        ledger_entry: identifier of the training's charge.
    """

    name: ClassVar[str] = "post_processing"
    ledger_entry: str


@dataclass(frozen=True)
class NonPrivate:
    """Answers in the clear: (B, K) probabilities leave as they are, and epsilon is `inf`.

    Args:
        reason: one line that says why nothing is proven.
    """

    name: ClassVar[str] = "non_private"
    input: ClassVar[Literal["probabilities"]] = "probabilities"
    noise_at: ClassVar[NoiseAt] = "client"
    trust: ClassVar[Trust] = "nobody"
    reason: str = "answers leave the client without noise"

    def encode(self, sensitive_value: Values, predictions: Values) -> Values:
        """The value itself, as float32; uniform where a row holds NaN or infinity."""
        sensitive_valid = np.isfinite(sensitive_value).all(axis=1, keepdims=True)
        uniform = 1 / np.shape(sensitive_value)[1]
        return np.where(sensitive_valid, sensitive_value, uniform).astype(np.float32)

    def noise(self, value: Values, predictions: Values, rng: np.random.Generator) -> Values:
        """The sum itself: there is no noise."""
        return np.asarray(value.sum(0))

    def sensitivity(self, unit: Unit, relation: Relation) -> float:
        """Infinite: nothing bounds the answer's dependence on the data in any useful way."""
        return math.inf

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """The non-private event, whose epsilon is infinite."""
        return NonPrivateDpEvent()


def top_k(predictions: Values, k: int) -> NDArray[np.bool_]:
    """Mask of each row's k largest entries of (B, K) `predictions`; ties go to the lower class.

    The mask depends on public predictions only, and both sides compute the same one.
    """
    order = np.argsort(-predictions, axis=1, kind="stable")[:, :k]
    mask = np.zeros(predictions.shape, bool)
    np.put_along_axis(mask, order, True, axis=1)
    return mask


def check_teachers(teachers: int) -> None:
    """Raise ValueError unless there is a teacher."""
    if teachers < 1:
        raise ValueError(f"teachers={teachers} must be >= 1")


def check_k(k: int, num_classes: int) -> None:
    """Raise ValueError unless 2 <= k <= num_classes."""
    if not 2 <= k <= num_classes:
        raise ValueError(f"k={k} must be between 2 and the number of classes, {num_classes}")
