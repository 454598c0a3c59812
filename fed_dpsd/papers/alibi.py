"""ALIBI: one-hot labels with Laplace noise, and Bayesian inference of the labels.

Malek, Mironov, Prasad, Shilov, Tramèr: "Antipodes of Label Differential Privacy: PATE and ALIBI",
arXiv 2106.03408. The noise is Laplace alone, and the posterior is computed in each step, as in its
code.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from dp_accounting import DpEvent
from numpy.typing import NDArray

from fed_dpsd.privacy.label_dp import LabelPrivate
from fed_dpsd.privacy.noise import Rng
from fed_dpsd.privacy.training import Learner
from fed_dpsd.privacy.votes import NoisyVotes


@dataclass(frozen=True)
class ALIBI(LabelPrivate):
    """Training on posteriors of noisy labels, with the network itself as the prior.

    Guarantee: Laplace noise of scale 2 / epsilon is added once to a label's one-hot vector. A
    different label changes two entries by 1 each, an L1 distance of 2. The rest of the training is
    post-processing of the noisy vector. So a label is epsilon-private at delta 0 (docs/proofs.md,
    Theorem 19).

    Args:
        num_classes: K, >= 2.
        epsilon: epsilon of a noisy vector and of all training, in 1e-6..1e4.
    """

    name: ClassVar[str] = "alibi"
    num_classes: int
    epsilon: float

    def __post_init__(self) -> None:
        if not 1e-6 <= self.epsilon <= 1e4:
            raise ValueError(f"epsilon={self.epsilon} must be between 1e-6 and 1e4")

    @property
    def votes(self) -> NoisyVotes:
        """Return the mechanism for one label: a single vote with noise on each class."""
        return NoisyVotes(self.num_classes, 2 / self.epsilon, "laplace")

    def teach(self, learner: Learner, labels: NDArray[np.int64], rng: Rng) -> None:
        """Draw each label's noisy vector once, and fit the learner to the posteriors of the labels.

        Records are fitted in random order, because records in folders are sorted by class.
        """
        order = np.argsort(rng.random(len(labels)), kind="stable")
        one_hot = np.eye(self.num_classes)[labels]
        noisy = torch.from_numpy(self.votes.add_noise(one_hot[None], one_hot, rng))
        learner.fit(order, lambda chosen, logits: self.posterior(noisy[chosen], logits))

    def posterior(self, noisy: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the (B, K) probabilities of the labels, given their noisy vectors.

        The prior is the softmax of the network's logits. Class c has the likelihood exp(-sum over j
        of |o_j - [j = c]| / scale), in which only o_c differs between classes.
        """
        likelihood = (noisy.abs() - (noisy - 1).abs()) / self.votes.scale
        return (logits + likelihood.to(logits)).softmax(1)

    def event(self) -> DpEvent:
        """Return the event of one label's noisy vector."""
        return self.votes.event("record", "replace_one")
