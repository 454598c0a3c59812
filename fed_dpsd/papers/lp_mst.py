"""LP-MST: labels randomised in stages, each with the model so far as the prior.

Ghazi, Golowich, Kumar, Manurangsi, Zhang: "Deep Learning with Label Differential Privacy",
arXiv 2102.06062. With two stages, it is LP-2ST; with one, it is plain randomised response.

The prior of stage t is the model of stage t - 1; line 3(b)i of Algorithm 3 prints M(t). Stages have
equal sizes, Adam takes the steps, and there is no mixup.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import NDArray

from fed_dpsd.privacy.accounting import pure_bound
from fed_dpsd.privacy.label_dp import LabelPrivate
from fed_dpsd.privacy.mechanism import top_k
from fed_dpsd.privacy.noise import Rng
from fed_dpsd.privacy.randomized_response import LARGEST_EPSILON, TopKRandomizedResponse
from fed_dpsd.privacy.training import Learner, fixed_targets


@dataclass(frozen=True)
class LPMST(LabelPrivate):
    """Multi-stage training (Algorithm 3) on randomised responses with a prior (Algorithm 2).

    Guarantee: each label is randomised once, in the stage of its record, by a response that is
    epsilon-private for any prior. Priors and the network are functions of images and responses. So
    a label is epsilon-private at delta 0 (docs/proofs.md, Theorem 18).
    """

    name: ClassVar[str] = "lp_mst"
    num_classes: int  # K, >= 2
    epsilon: float  # epsilon of one response and of all training, in 1e-6..20
    stages: int  # T >= 1, the number of equal parts of the records, in random order
    # temperature of the priors, in 0.01..100: a probability p counts as p^(1 / temperature). A
    # temperature below 1 leaves fewer candidates (Appendix E).
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 1e-6 <= self.epsilon <= LARGEST_EPSILON:
            raise ValueError(
                f"epsilon={self.epsilon} must be between 1e-6 and {LARGEST_EPSILON:g} (rarer lies "
                "are never drawn)"
            )
        if self.stages < 1:
            raise ValueError(f"stages={self.stages} must be >= 1")
        if not 0.01 <= self.temperature <= 100:
            raise ValueError(f"temperature={self.temperature} must be between 0.01 and 100")

    def teach(self, learner: Learner, labels: NDArray[np.int64], rng: Rng) -> None:
        """Randomise the labels stage by stage, and fit the learner to all labels so far."""
        order = np.argsort(rng.random(len(labels)), kind="stable")
        responses = np.zeros(len(labels), np.int64)
        prior = np.full((len(labels), self.num_classes), 1 / self.num_classes)
        done = 0
        for stage in np.array_split(order, self.stages):
            if done:
                prior[stage] = self.temper(learner.probabilities(stage))
            responses[stage] = self.respond(labels[stage], prior[stage], rng)
            done += len(stage)
            learner.fit(order[:done], fixed_targets(responses))

    def temper(self, prior: NDArray[np.float64]) -> NDArray[np.float64]:
        """Apply the temperature to (n, K) priors."""
        powers = (prior / prior.max(1, keepdims=True)) ** (1 / self.temperature)
        return np.asarray(powers / powers.sum(1, keepdims=True))

    def respond(
        self, labels: NDArray[np.int64], prior: NDArray[np.float64], rng: Rng
    ) -> NDArray[np.int64]:
        """Draw the (n,) responses to (n,) labels, given their (n, K) priors."""
        response = TopKRandomizedResponse(self.num_classes, self.ideal_epsilon)
        drawn = response.add_noise(self.law(labels, prior)[None], prior, rng)
        return np.asarray(drawn.argmax(1))

    def law(self, labels: NDArray[np.int64], prior: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the (n, K) probabilities of the responses: RRTop-k, with the k of `best_k`."""
        law = top_k(prior, 1).astype(np.float64)  # for k = 1, the same for every label
        sizes = self.best_k(prior)
        for size in set(sizes.tolist()) - {1}:
            rows = sizes == size
            response = TopKRandomizedResponse(self.num_classes, self.ideal_epsilon, size)
            law[rows] = response.constrain_sensitivity(
                np.eye(self.num_classes)[labels[rows]], prior[rows]
            )
        return law

    def best_k(self, prior: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the (n,) values of k that make a true response most probable, from priors alone.

        A label drawn from the prior p is answered truthfully with probability e^epsilon /
        (e^epsilon + k - 1) times the sum of the k largest p: Algorithm 2, w_k.
        """
        likely = np.cumsum(-np.sort(-prior, axis=1), axis=1)
        ranks = np.arange(self.num_classes)
        true = likely / (1 + ranks * np.exp(-self.ideal_epsilon))
        return np.asarray(1 + true.argmax(1))

    @functools.cached_property
    def ideal_epsilon(self) -> float:
        """Return the epsilon of ideal responses; the remainder covers finite-precision draws."""
        return 2 * self.epsilon - pure_bound(self._event(self.epsilon)).epsilon

    def event(self) -> DpEvent:
        """Return the event of one response; two candidates are the worst case."""
        return self._event(self.ideal_epsilon)

    def _event(self, epsilon: float) -> DpEvent:
        any_size = TopKRandomizedResponse(self.num_classes, epsilon, threshold=0.0)
        return any_size.event("record", "replace_one")


@dataclass(frozen=True)
class LP2ST(LPMST):
    """`LPMST` under the name of lp_2st.yaml, which sets two stages."""

    name: ClassVar[str] = "lp_2st"
