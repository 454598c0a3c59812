"""Noisy votes: each teacher votes for a class, the counts get Laplace or Gaussian noise.

Laplace votes of scale 2 / eps0 are those of PATE (arXiv 1610.05755) and of DGD (Ge et al.:
"Learning Privacy-Preserving Student Networks via Discriminative-Generative Distillation", Eq. 3);
Gaussian votes are those of its variant DGD+.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, LaplaceDpEvent
from numpy.typing import NDArray

from fed_dpsd.privacy.mechanism import (
    ONE_TEACHER,
    NoiseAt,
    Relation,
    Shards,
    Trust,
    Unit,
    Values,
    check_noise_at,
    snap,
    trust_of,
    vanishes,
)


@dataclass(frozen=True)
class NoisyVotes:
    """Counts of the teachers' classes plus noise on each of the K counts.

    Guarantee: one changed record replaces one teacher's vote, so one count falls by 1 and another
    rises by 1. With Gaussian noise that is one Gaussian mechanism of L2 sensitivity sqrt(2); with
    Laplace noise two Laplace mechanisms of sensitivity 1, one a count. A client's n votes together
    move one count by n and another by n (replaced), or one count by n (the client is gone): what
    spreads over more counts is dominated by that (docs/privacy.md).

    | input row           | encoded row |
    | ------------------- | ----------- |
    | any NaN or infinity | no vote     |
    | ties                | lower class |

    Args:
        num_classes: K, >= 2.
        noise_multiplier: the noise's standard deviation (gaussian) or scale (laplace), in votes.
        noise: "gaussian" or "laplace".
        noise_at: "client" (each client its own noise) or "server" (once, on the sum; the server
            then sees each client's exact counts and must be trusted).
        shards: the client's teachers.

    Raises:
        ValueError: a parameter is out of its range.
    """

    name: ClassVar[str] = "votes"
    input: ClassVar[Literal["probabilities"]] = "probabilities"
    calibrated_by: ClassVar[str] = "noise_multiplier"
    reason: ClassVar[None] = None
    num_classes: int
    noise_multiplier: float
    noise_law: Literal["gaussian", "laplace"] = "gaussian"
    noise_at: NoiseAt = "client"
    shards: Shards = ONE_TEACHER

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier} must be a finite number > 0"
            )
        if self.noise_law not in ("gaussian", "laplace"):
            raise ValueError(f"noise_law={self.noise_law!r} must be 'gaussian' or 'laplace'")
        check_noise_at(self.noise_at)

    @property
    def trust(self) -> Trust:
        """The server, where it adds the noise; otherwise nobody."""
        return trust_of(self.noise_at)

    def encode(self, sensitive_value: Values, predictions: Values) -> NDArray[np.float64]:
        """A teacher's (B, K) votes: 1 at its class."""
        sensitive_valid = np.isfinite(sensitive_value).all(axis=1, keepdims=True)
        sensitive_class = np.where(sensitive_valid, sensitive_value, 0).argmax(1)
        votes: NDArray[np.float64] = np.eye(self.num_classes)[sensitive_class] * sensitive_valid
        return votes

    def noise(
        self, value: Values, predictions: Values, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """Sum (n, B, K) votes over n and add the noise, once a query."""
        total = np.asarray(value, np.float64).sum(0)
        draw = rng.normal if self.noise_law == "gaussian" else rng.laplace
        return snap(total + draw(0, self.noise_multiplier, total.shape), self.noise_multiplier)

    def admissible(self, values: Values, predictions: Values, teachers: int) -> NDArray[np.bool_]:
        """All rows; where the server adds the noise, counts of at most `teachers` votes."""
        if self.noise_at == "client":
            return np.ones(len(values), bool)
        counts = (values >= 0) & (values == np.round(values))
        return np.asarray(counts.all(axis=1) & (values.sum(axis=1) <= teachers))

    def releases(self, asks: int, queries: int) -> int:
        """One for each query."""
        return asks * queries

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """One Gaussian mechanism, or one or two Laplace mechanisms."""
        moved = self.shards.changed(unit)  # votes that leave a count, and as many that join one
        counts = 1 if vanishes(unit, relation) else 2
        if self.noise_law == "gaussian":
            return GaussianDpEvent(self.noise_multiplier / (moved * math.sqrt(counts)))
        return ComposedDpEvent([LaplaceDpEvent(self.noise_multiplier / moved)] * counts)

    def worst_case(self) -> tuple[Values, Values]:
        """(n, 1, K) probabilities of the teachers in two worlds that differ in one record."""
        first = np.zeros((self.shards.teachers, 1, self.num_classes))
        first[:, 0, 0] = 1
        second = first.copy()
        second[0, 0] = np.eye(self.num_classes)[1]
        return first, second
