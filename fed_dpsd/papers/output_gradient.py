"""Training on private records with noise only on the outputs' gradients: nothing is proven.

Liu, Wang, Li, Zeng, Ge: "Model Conversion via Differentially Private Data-Free Distillation",
IJCAI 2023, Sec. 4.4 and Algorithm 3.
"""

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.nn import functional

from fed_dpsd.config import STRICT, Positive
from fed_dpsd.privacy.noise import Rng, noisy_sum
from fed_dpsd.privacy.optimisers import SGD
from fed_dpsd.privacy.published import theorem_1
from fed_dpsd.privacy.training import CustomTraining

SMALLEST_PROBABILITY = 1e-8  # as a divisor, so that quotients are finite
# Least move of a target by a record's gradient, and most noise, with which teachers are known to
# learn: 93.7 % on MNIST; at the paper's settings they stay at chance (results/one_place.md).
LEAST_MOVE, MOST_NOISE = 0.1, 0.01


@dataclass(frozen=True, config=STRICT)
class OutputGradient(CustomTraining):
    """DPDFD's direct training, which backpropagates normalised, noisy output gradients to weights.

    The noise is added to the loss's gradient with respect to the probabilities of a batch. In
    backpropagation, it is multiplied by derivatives at private images. The contribution of one
    record's derivatives is unbounded. If the derivatives of all other records are zero, only this
    record's contribution remains. So nothing is proven for any noise (docs/mechanisms.md), and this
    training runs only in simulations.
    """

    name: ClassVar[str] = "output_gradient"
    reason: ClassVar[str] = (
        "noise on the outputs' gradients passes through the network at private images, where "
        "nothing bounds a record's influence"
    )
    noise_multiplier: Positive  # sigma, noise standard deviation divided by `bound`
    bound: Positive  # C, norm of a record's gradient
    stability: Positive  # e, added to each norm
    label_step: Positive  # gamma, step from a prediction to its new target
    learning_rate: Positive  # gamma_s, learning rate of plain gradient steps
    batch_size: PositiveInt  # B, mean number of records in a step
    steps: PositiveInt  # T
    # "batch" for one noisy mean gradient per batch, as the sum in line 8 suggests; "record" for a
    # noisy gradient of each record, as its index suggests
    mean_over: Literal["batch", "record"]

    def check(self, config: Any, method: Any, partition: Any) -> list[str]:
        """Return the problems with the training in an experiment."""
        problems = super().check(config, method, partition)
        if not config.federation.simulation:
            problems.append(
                "training=output_gradient: nothing is proven for it, so it runs only in a "
                "simulation; use training=dp_sgd, or federation=simulation"
            )
        return problems

    def warnings(self, config: Any) -> list[str]:
        """Warn about steps that teach nothing, as the paper's settings (the defaults) do."""
        move = self.label_step * self.bound
        if move >= LEAST_MOVE and self.noise_multiplier <= MOST_NOISE:
            return []
        return [
            f"training=output_gradient moves a target by {move:.2g}, and its noise "
            f"moves it by {self.noise_multiplier * move:.2g}, so expect teachers near chance; use "
            f"training=dp_sgd, or training.label_step={LEAST_MOVE / self.bound:g} "
            f"training.noise_multiplier={MOST_NOISE:g}"
        ]

    def describe(self, trainings: int = 1) -> str:
        """Describe how teachers are trained, and what this alone protects."""
        return "noise on the gradients of outputs, for which nothing is proven"

    def published(self, trainings: int, num_classes: int, delta: float) -> float:
        """Return the epsilon of DPDFD's Theorem 3 for the steps of all training runs.

        The paper states only that Algorithm 3 runs the same procedures.
        """
        queries = trainings * self.steps * self.batch_size
        return theorem_1(self.bound, self.noise_multiplier, num_classes, queries, delta)

    def train(
        self,
        teacher: nn.Module,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        rng: Rng,
    ) -> None:
        """Run Algorithm 3; comments give the paper's line numbers."""
        optimiser = SGD(teacher.parameters(), self.learning_rate)
        teacher.train()
        for _ in range(self.steps):  # 1
            drawn = rng.random(len(labels)) < self.batch_size / len(labels)
            chosen = torch.from_numpy(np.flatnonzero(drawn))  # 2
            if not len(chosen):
                continue
            logits = teacher(inputs[chosen])
            outputs = logits.detach().softmax(1)
            classes = functional.one_hot(labels[chosen], outputs.shape[1])
            gradients = -classes / outputs.clamp_min(SMALLEST_PROBABILITY)  # 3 to 5, in closed form
            norms = gradients.norm(dim=1, keepdim=True)
            bounded = self.bound * gradients / (norms + self.stability)  # 6
            noisy = self._noisy(bounded, rng)  # 8
            targets = outputs - self.label_step * noisy  # 10
            student_loss = functional.cross_entropy(logits, targets)  # 11
            optimiser.zero_grad()
            student_loss.backward()
            optimiser.step()  # 12

    def _noisy(self, bounded: torch.Tensor, rng: Rng) -> torch.Tensor:
        """Return the noisy mean of line 8, or each record's noisy gradient."""
        scale = self.noise_multiplier * self.bound
        if self.mean_over == "batch":
            mean = noisy_sum(bounded.numpy(), scale, "gaussian", rng) / len(bounded)
            return torch.from_numpy(mean).float()
        return torch.from_numpy(noisy_sum(bounded.numpy()[None], scale, "gaussian", rng)).float()
