"""Report noisy max: the teachers vote, and only the class with the largest noisy count is released.

PATE (arXiv 1610.05755) and DGD (Ge et al.: "Learning Privacy-Preserving Student Networks via
Discriminative-Generative Distillation", IEEE TIP 32, Eq. 3) use Laplace noise of scale 2 / eps0,
and the variant DGD+ uses Gaussian noise. With Gumbel noise, it is an exponential mechanism.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import NDArray
from scipy.special import ndtr

from fed_dpsd.privacy.events import BoundedRangeDpEvent
from fed_dpsd.privacy.mechanism import (
    ONE_TEACHER,
    Mechanism,
    NoiseAt,
    Relation,
    Shards,
    Unit,
    Values,
)
from fed_dpsd.privacy.noise import Rng, noisy_argmax
from fed_dpsd.privacy.votes import NoisyVotes, noise_in_votes


@dataclass(frozen=True)
class NoisyMax(Mechanism):
    """The class with the largest noisy vote count, one label per query.

    Guarantee: with Laplace or Gaussian noise, the label is a function of the noisy counts of
    `NoisyVotes`, so by post-processing it has their guarantee, and no smaller epsilon is claimed.
    With Gumbel noise of scale b, class c has probability exp(votes of c / b) divided by the sum of
    these terms: an exponential mechanism. If n votes move between classes, the log-likelihood
    ratios lie in an interval of length 2 n / b; if n votes are removed, in an interval of length n
    / b (docs/proofs.md, Theorem 5b).

    | input row           | encoded row |
    | ------------------- | ----------- |
    | any NaN or infinity | no vote     |
    | ties                | lower class |
    """

    name: ClassVar[str] = "noisy_max"
    input: ClassVar[Literal["probabilities"]] = "probabilities"
    shares: ClassVar[bool] = True
    calibrated_by: ClassVar[str] = "noise_multiplier"
    uncovered_noise: ClassVar[float] = 4.0
    noise_at: ClassVar[NoiseAt] = "client"
    reason: ClassVar[None] = None
    num_classes: int  # K, >= 2
    # the noise's standard deviation (gaussian) or scale (laplace, gumbel), in votes; 0 adds no
    # noise, and nothing is proven
    noise_multiplier: float
    # "laplace", "gaussian" or "gumbel"
    noise_law: Literal["laplace", "gaussian", "gumbel"] = "laplace"
    shards: Shards = ONE_TEACHER  # the client's teachers

    def __post_init__(self) -> None:
        if self.noise_law not in ("laplace", "gaussian", "gumbel"):
            raise ValueError(
                f"noise_law={self.noise_law!r} must be 'laplace', 'gaussian' or 'gumbel'"
            )
        _ = self.votes  # checks the other parameters

    @property
    def votes(self) -> NoisyVotes:
        """Return the mechanism of the noisy counts; with Gumbel noise, use it only for encoding."""
        law: Literal["laplace", "gaussian"] = (
            "laplace" if self.noise_law == "gumbel" else self.noise_law
        )
        return NoisyVotes(self.num_classes, self.noise_multiplier, law, shards=self.shards)

    def constrain_sensitivity(
        self, sensitive_value: Values, predictions: Values
    ) -> NDArray[np.float64]:
        """Return a teacher's (B, K) votes: 1 at its class."""
        return self.votes.constrain_sensitivity(sensitive_value, predictions)

    def add_noise(
        self, value: Values, predictions: Values, rng: Rng
    ) -> NDArray[np.unsignedinteger]:
        """Draw a label for each row of (n, B, K) votes; return (B, K) counts: n at the label."""
        if self.noise_law == "gumbel" and self.noise_multiplier > 0:
            label = noisy_argmax(value.sum(axis=0), self.noise_multiplier, rng)
        else:
            label = self.votes.add_noise(value, predictions, rng).argmax(1)
        smallest = np.min_scalar_type(len(value))
        votes: NDArray[np.unsignedinteger] = (len(value) * np.eye(self.num_classes)[label]).astype(
            smallest
        )
        return votes

    def admissible(self, values: Values, predictions: Values, teachers: int) -> NDArray[np.bool_]:
        """Mark the rows in which one class has the votes of all teachers."""
        single = (values == 0) | (values == teachers)
        return np.asarray(single.all(axis=1) & (values.sum(axis=1, dtype=np.float64) == teachers))

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return the event of the noisy counts, or of the label with Gumbel noise."""
        if self.noise_law != "gumbel" or self.noise_multiplier == 0:
            return self.votes.event(unit, relation)
        moved = self.shards.changed(unit)
        moved *= 1 if self.shards.vanish(unit, relation) else 2
        return BoundedRangeDpEvent(moved / self.noise_multiplier * (1 + 2.0**-50))

    def describe(self) -> str:
        """Describe what leaves a client."""
        noise = noise_in_votes(self.noise_law, self.noise_multiplier)
        return f"the class with the most votes of a client's teachers, counted with {noise}"

    def squared_snr(self, clients: int, teachers: int) -> float:
        """Return the squared signal-to-noise ratio of a query's labels."""
        if not self.noise_multiplier:
            return math.inf
        return clients * self.num_classes * self.label_margin(teachers) ** 2

    def label_margin(self, votes: int) -> float:
        """Return how much more probable a class with all `votes` is than each other class."""
        scale, others = self.noise_multiplier, self.num_classes - 1
        noise = np.linspace(-40.0, 40.0, 8001)  # in scales
        if self.noise_law == "gumbel":
            largest = 1 / (1 + others * math.exp(-votes / scale))
            return largest - (1 - largest) / others
        if self.noise_law == "gaussian":
            density, below = np.exp(-(noise**2) / 2) / math.sqrt(2 * math.pi), ndtr
        else:
            density, below = np.exp(-abs(noise)) / 2, _laplace_below
        largest = float(np.trapezoid(density * below(noise + votes / scale) ** others, noise))
        return largest - (1 - largest) / others

    def worst_case(self) -> tuple[Values, Values]:
        """Return the teachers' (n, 1, K) probabilities in two worlds, one record apart.

        Half of the other teachers vote for each of the two classes, so the label is undecided.
        """
        others = np.eye(self.num_classes)[np.arange(self.shards.teachers) % 2][:, None]
        first, second = others.copy(), others
        first[0, 0], second[0, 0] = np.eye(self.num_classes)[:2]
        return first, second


def _laplace_below(noise: NDArray[np.float64]) -> NDArray[np.float64]:
    tail = np.exp(-abs(noise)) / 2
    return np.where(noise < 0, tail, 1 - tail)
