"""PATE for labels: teachers with disjoint labels cast noisy votes on a student's public images.

Malek et al.: "Antipodes of Label Differential Privacy: PATE and ALIBI", arXiv 2106.03408, in
its simple form, without semi-supervised learning.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from dp_accounting import DpEvent, SelfComposedDpEvent
from numpy.typing import NDArray

from fed_dpsd.privacy.accounting import best_bound
from fed_dpsd.privacy.calibration import calibrate
from fed_dpsd.privacy.label_dp import LabelPrivate, Learner, fixed_targets
from fed_dpsd.privacy.mechanism import Shards, Trust
from fed_dpsd.privacy.noise import Rng
from fed_dpsd.privacy.votes import NoisyVotes


@dataclass(frozen=True)
class LabelPATE(LabelPrivate):
    """Training on the most frequent noisy votes of teachers with disjoint labels.

    Guarantee: only one teacher sees a label, so a different label changes at most that teacher's
    vote on each of the `queries` images. Gaussian noise is added once to each image's counts, and
    the student learns only from the images and these counts. So the training is `queries` Gaussian
    mechanisms of sensitivity sqrt(2) for a label (docs/proofs.md, Theorem 20). Teachers see true
    labels, so the party that trains them must be trusted.
    """

    name: ClassVar[str] = "label_pate"
    trust: ClassVar[Trust] = "server"
    num_classes: int  # K, >= 2
    epsilon: float  # epsilon of all training at `delta`, in 0.01..20; it sets the noise
    delta: float  # failure probability, at least 1e-90 and below 1
    # n, number of teachers, in 1..5,000, on equal parts of the records in random order
    teachers: int
    # Q, largest number of records that the teachers label for the student, in 1..1,000,000
    queries: int

    def __post_init__(self) -> None:
        if not 0.01 <= self.epsilon <= 20:
            raise ValueError(f"epsilon={self.epsilon} must be between 0.01 and 20")
        if not 1e-90 <= self.delta < 1:
            raise ValueError(f"delta={self.delta} must be at least 1e-90 and below 1")
        for field, most in (("teachers", 5_000), ("queries", 1_000_000)):
            if not 1 <= getattr(self, field) <= most:
                raise ValueError(f"{field}={getattr(self, field)} must be between 1 and {most:,}")

    @property
    def failure(self) -> float:
        """Return the failure probability, delta."""
        return self.delta

    @functools.cached_property
    def votes(self) -> NoisyVotes:
        """Return the mechanism for one image's votes, with the least noise that proves epsilon."""

        def spend(noise_multiplier: float) -> float:
            return best_bound(self._event(self._votes(noise_multiplier)), self.delta).epsilon

        return self._votes(calibrate(spend, self.epsilon, 1e7, 1e-1))

    def _votes(self, noise_multiplier: float) -> NoisyVotes:
        shards = Shards(self.teachers)
        return NoisyVotes(self.num_classes, noise_multiplier, "gaussian", shards=shards)

    def _event(self, votes: NoisyVotes) -> DpEvent:
        return SelfComposedDpEvent(votes.event("record", "replace_one"), self.queries)

    def event(self) -> DpEvent:
        """Return the event of all images' votes."""
        return self._event(self.votes)

    def train(self, learner: Learner, labels: NDArray[np.int64], rng: Rng) -> None:
        """Fit the teachers one by one, add up their votes, and fit the student to the votes."""
        order = np.argsort(rng.random(len(labels)), kind="stable")
        queried = order[: self.queries]
        counts = np.zeros((len(queried), self.num_classes))
        for shard in np.array_split(order, self.teachers):
            if len(shard):
                learner.fit(shard, fixed_targets(labels))
                answers = learner.probabilities(queried)
                counts += self.votes.constrain_sensitivity(answers, answers)
        noisy = self.votes.add_noise(counts[None], counts, rng)
        winners = np.zeros(len(labels), np.int64)
        winners[queried] = noisy.argmax(1)
        learner.fit(queried, fixed_targets(winners))
