"""Teachers trained with DP-SGD, so that answers cost nothing.

Abadi et al.: "Deep Learning with Differential Privacy", arXiv 1607.00133, Algorithm 1.
"""

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from torch import nn

from fed_dpsd.privacy.events import ReplacedInSampleDpEvent
from fed_dpsd.privacy.mechanism import Clear, Relation, Unit

CLIPPING_MARGIN = 1e-5
RECORDS_AT_ONCE = 512  # of a batch: bounds the memory of the gradients of single records


class TrainingMechanism(Clear, ABC):
    """A mechanism that trains teachers privately.

    Its event is that of a whole training. It is charged before the first step, once; all answers
    of the teachers are post-processing, so they leave as they are.
    """

    def releases(self, asks: int, queries: int) -> int:
        """One, the training, however many answers follow."""
        return 1

    @abstractmethod
    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """The event of the whole training of the client's teachers."""

    @abstractmethod
    def train(
        self,
        teacher: nn.Module,
        images: torch.Tensor,
        labels: torch.Tensor,
        rng: np.random.Generator,
    ) -> None:
        """Train a teacher in place on one shard's (N, C, H, W) images and (N,) labels."""


@dataclass(frozen=True)
class DPSGD(TrainingMechanism):
    """DP-SGD with Poisson sampling: clipped gradients of a random part of the records, plus noise.

    Guarantee: a record's gradient has L2 norm at most `max_grad_norm` in the sum of each step, a
    record takes part in a step with probability `sample_rate` whatever the others do, and
    N(0, noise_multiplier^2 max_grad_norm^2) is added to each coordinate of the sum. So a training
    is `steps` Poisson-sampled Gaussian mechanisms. Nothing else reads the records: rate and steps
    are constants of the configuration (a step without records is taken too), no count divides the
    sum (Adam does not mind its scale), and there is no hold-out, no early stop and no batch
    normalisation. A record lies in one shard, so it is seen by one training. Nothing is proven for
    a patient or a client: they may hold any number of records.

    Args:
        noise_multiplier: sigma, noise standard deviation divided by `max_grad_norm`, > 0.
        sample_rate: q, in (0, 1].
        steps: of a training, >= 1.
        max_grad_norm: bound of one record's gradient, > 0.
        learning_rate: Adam's, > 0.

    Raises:
        ValueError: a parameter is out of its range.
    """

    name: ClassVar[str] = "dp_teacher"
    calibrated_by: ClassVar[str | None] = "noise_multiplier"
    reason: ClassVar[str] = (
        "DP-SGD bounds one record; a patient's or client's number of records has no bound"
    )
    noise_multiplier: float
    sample_rate: float
    steps: int
    max_grad_norm: float
    learning_rate: float

    def __post_init__(self) -> None:
        for field in ("noise_multiplier", "max_grad_norm", "learning_rate"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(f"{field}={getattr(self, field)} must be a finite number > 0")
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be >= 1")
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate={self.sample_rate} must be above 0 and at most 1")

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """`steps` sampled Gaussian mechanisms for a record; nothing for anything larger."""
        if unit != "record":
            return NonPrivateDpEvent()
        step: DpEvent = PoissonSampledDpEvent(
            self.sample_rate, GaussianDpEvent(self.noise_multiplier)
        )
        if relation == "replace_one":
            step = ReplacedInSampleDpEvent(self.sample_rate, self.noise_multiplier)
        return SelfComposedDpEvent(step, self.steps)

    def train(
        self,
        teacher: nn.Module,
        images: torch.Tensor,
        labels: torch.Tensor,
        rng: np.random.Generator,
    ) -> None:
        """`steps` steps of Adam on noisy sums; sampling and noise follow `rng`.

        A record whose gradient is not finite counts as zero there.

        Raises:
            NotImplementedError: a layer (batch normalisation) mixes the records of a batch, so one
                record's gradient has no bound.
        """
        from opacus import GradSampleModule  # takes seconds to import, and few runs need it
        from opacus.optimizers import DPOptimizer

        class Optimizer(DPOptimizer):
            """Noise from `rng` in float64: torch's float32 normals end at 5.77 deviations."""

            def add_noise(self) -> None:
                stddev = self.noise_multiplier * self.max_grad_norm
                for parameter in self.params:
                    noise = torch.from_numpy(rng.normal(0, stddev, parameter.shape))
                    noisy = parameter.summed_grad.double() + noise
                    parameter.grad = noisy.to(parameter.dtype)

        model = GradSampleModule(teacher.train(), loss_reduction="sum")
        optimiser = Optimizer(
            torch.optim.Adam(model.parameters(), self.learning_rate),
            # Clipped a little lower, so that float32 cannot carry a norm over the bound.
            noise_multiplier=self.noise_multiplier / (1 - CLIPPING_MARGIN),
            max_grad_norm=self.max_grad_norm * (1 - CLIPPING_MARGIN),
            expected_batch_size=None,
            loss_reduction="sum",
        )
        for _ in range(self.steps):
            sampled = torch.from_numpy(rng.random(len(labels)) < self.sample_rate)
            parts = sampled.nonzero()[:, 0].split(RECORDS_AT_ONCE)  # one empty part if none is
            for number, part in enumerate(parts, start=1):
                optimiser.signal_skip_step(do_skip=number < len(parts))
                loss = nn.functional.cross_entropy(
                    model(images[part]), labels[part], reduction="sum"
                )
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Full backward hook is firing")  # as it must
                    loss.backward()
                for parameter in model.parameters():
                    torch.nan_to_num_(parameter.grad_sample, 0, 0, 0)
                optimiser.step()
                optimiser.zero_grad()
        model.to_standard_module()
