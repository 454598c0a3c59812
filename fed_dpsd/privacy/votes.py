"""Noisy votes: each teacher votes for a class; Laplace or Gaussian noise is added to the counts.

PATE (arXiv 1610.05755) and DGD (Ge et al.: "Learning Privacy-Preserving Student Networks via
Discriminative-Generative Distillation", Eq. 3) use Laplace votes of scale 2 / eps0; the variant
DGD+ uses Gaussian votes. These methods release only the arg max, like
fed_dpsd/privacy/noisy_max.py; here, all counts are released.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
)
from numpy.typing import NDArray

from fed_dpsd.privacy.events import FinitePrecisionDpEvent
from fed_dpsd.privacy.mechanism import (
    ONE_TEACHER,
    Mechanism,
    NoiseAt,
    Quorum,
    Relation,
    Shards,
    Unit,
    Values,
    additive_squared_snr,
    check_noise,
    check_noise_at,
    noise_share,
    one_class_changed,
)
from fed_dpsd.privacy.noise import (
    FARTHEST,
    GAUSSIAN_LOSS,
    LAPLACE_LOSS,
    Rng,
    lattice_spacing,
    noisy_sum,
)


@dataclass(frozen=True)
class NoisyVotes(Mechanism):
    """Counts of the teachers' classes plus noise on each of the K counts.

    Guarantee: one changed record replaces one teacher's vote, so one count falls by 1 and another
    rises by 1. With Gaussian noise, this is one Gaussian mechanism of L2 sensitivity sqrt(2); with
    Laplace noise, it is two Laplace mechanisms of sensitivity 1, one per count. A client's n votes
    together move two counts by n (replaced), or one count by n (removed). This dominates a change
    that spreads over more counts (docs/proofs.md). Sums of votes are exact: they are integers on
    the noise's lattice, or all zero if the lattice is coarser than a vote.

    | input row           | encoded row |
    | ------------------- | ----------- |
    | any NaN or infinity | no vote     |
    | ties                | lower class |
    """

    name: ClassVar[str] = "votes"
    input: ClassVar[Literal["probabilities"]] = "probabilities"
    calibrated_by: ClassVar[str] = "noise_multiplier"
    uncovered_noise: ClassVar[float] = 100.0
    additive: ClassVar[Literal[True]] = True
    reason: ClassVar[None] = None
    num_classes: int  # K, >= 2
    # the noise's standard deviation (gaussian) or scale (laplace), in votes; 0 adds no noise, and
    # nothing is proven
    noise_multiplier: float
    noise_law: Literal["gaussian", "laplace"] = "gaussian"  # "gaussian" or "laplace"
    # "client" (each client adds its own noise) or "server" (noise is added once, to the sum; the
    # server sees each client's exact counts and must be trusted)
    noise_at: NoiseAt = "client"
    # the quorum of the secure sum; only with noise_at="distributed", where each client adds a noise
    # share
    quorum: Quorum | None = None
    shards: Shards = ONE_TEACHER  # the client's teachers

    def __post_init__(self) -> None:
        check_noise_at(self.noise_at, self.quorum)
        check_noise(self.noise_multiplier, self.noise_at, self.shards.teachers)
        if self.noise_law not in ("gaussian", "laplace"):
            raise ValueError(f"noise_law={self.noise_law!r} must be 'gaussian' or 'laplace'")
        if self.quorum is not None and self.noise_law == "laplace":
            raise ValueError(
                "noise_law='laplace' has no noise shares; use 'gaussian' with distributed noise"
            )

    @property
    def scale(self) -> float:
        """Return the scale of the noise (noise_multiplier) or of a noise share, in votes."""
        return noise_share(self.noise_multiplier, self.quorum)

    @property
    def lattice(self) -> float:
        """Return the spacing of the noise's lattice; see `lattice_spacing`."""
        return lattice_spacing(self.scale)

    def constrain_sensitivity(
        self, sensitive_value: Values, predictions: Values
    ) -> NDArray[np.float64]:
        """Return a teacher's (B, K) votes: 1 at its class."""
        sensitive_valid = np.isfinite(sensitive_value).all(axis=1, keepdims=True)
        sensitive_class = np.where(sensitive_valid, sensitive_value, 0).argmax(1)
        votes: NDArray[np.float64] = np.eye(self.num_classes)[sensitive_class] * sensitive_valid
        return votes

    def add_noise(self, value: Values, predictions: Values, rng: Rng) -> NDArray[np.float64]:
        """Sum (n, B, K) votes over n and add the noise, once per query."""
        if self.noise_multiplier == 0:
            return np.asarray(value.sum(0))
        return noisy_sum(value, self.scale, self.noise_law, rng)

    def admissible(self, values: Values, predictions: Values, teachers: int) -> NDArray[np.bool_]:
        """Mark the rows that are possible with at most `teachers` votes and the noise."""
        if self.noise_at != "server":
            away = np.maximum(-values, values - teachers)
            # Honest noise is farther with a probability of about exp(-FARTHEST^2 / 2).
            most = self.scale * (FARTHEST if self.noise_law == "gaussian" else FARTHEST**2 / 2)
            return np.asarray((away <= most).all(axis=1))
        counts = (values >= 0) & (values == np.round(values))
        return np.asarray(counts.all(axis=1) & (values.sum(axis=1) <= teachers))

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return one Gaussian mechanism, or one or two Laplace mechanisms."""
        if self.noise_multiplier == 0:
            return NonPrivateDpEvent()
        moved = self.shards.changed(unit)  # votes that leave one count and join another
        counts = 1 if self.shards.vanish(unit, relation) else 2
        if self.noise_law == "gaussian":
            noise = GaussianDpEvent(self.noise_multiplier / (moved * math.sqrt(counts)))
            precision = FinitePrecisionDpEvent(self.num_classes * GAUSSIAN_LOSS)
            return ComposedDpEvent([noise, precision])
        # Round the sum up: added to a large shift, the loss would vanish.
        shift = (moved / self.noise_multiplier + self.num_classes * LAPLACE_LOSS) * (1 + 2.0**-50)
        return ComposedDpEvent([LaplaceDpEvent(1 / shift)] * counts)

    def describe(self) -> str:
        """Describe what leaves a client."""
        noise = noise_in_votes(self.noise_law, self.noise_multiplier)
        return f"the teachers' votes for each class, with {noise}"

    def squared_snr(self, clients: int, teachers: int) -> float:
        """Return the squared signal-to-noise ratio of a query's answers."""
        return additive_squared_snr(self.noise_multiplier, self.noise_at, clients, teachers)

    def worst_case(self) -> tuple[Values, Values]:
        """Return the teachers' (n, 1, K) probabilities in two worlds, one record apart."""
        return one_class_changed(self.shards.teachers, self.num_classes)


def noise_in_votes(noise_law: str, noise_multiplier: float) -> str:
    """Describe noise that is measured in votes."""
    law, size = noise_law.capitalize(), noise_multiplier
    return f"{law} noise of {size:g} votes" if size else "no noise of their own"
