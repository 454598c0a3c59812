"""Teachers trained with DP-SGD, so that answers cost nothing.

Abadi et al.: "Deep Learning with Differential Privacy", arXiv 1607.00133, Algorithm 1.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.privacy.events import ReplacedInSampleDpEvent
from fed_dpsd.privacy.mechanism import Clear, Relation, Unit
from fed_dpsd.privacy.noise import Rng, SecureGenerator, noisy_sum

CLIPPING_MARGIN = 1e-5
ROUNDING_MARGIN = 2.0**-8  # more noise, for float32 sums: docs/privacy.md, Theorem 8
GRID = 2.0**-25  # of the noise, at most: sums are cut off to multiples of it
RECORDS_AT_ONCE = 512  # of a batch: bounds the memory of the gradients of single records
CANCELLATION = 4  # copies that cancel each other further leave rounding errors, so they shrink
MOST_COPIES = 9  # an image as it is, and moved by a pixel in eight directions


class TrainingMechanism(Clear, ABC):
    """A mechanism that trains teachers privately, on A = `copies` copies of each record's image.

    Its event is that of a whole training, class counts included. It is charged before the first
    step, once; all answers of the teachers are post-processing, so they leave as they are.
    """

    copies: int

    @property
    @abstractmethod
    def counts_classes(self) -> bool:
        """Whether a training releases noisy class counts too."""

    def releases(self, asks: int, queries: int) -> int:
        """One, the training, however many answers follow."""
        return 1

    @abstractmethod
    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """The event of the whole training of the client's teachers."""

    @abstractmethod
    def count(self, labels: NDArray[np.int64], num_classes: int, rng: Rng) -> NDArray[np.float64]:
        """(K,) noisy class counts of one shard's (N,) labels; to be drawn once."""

    @abstractmethod
    def train(
        self,
        teacher: nn.Module,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        rng: Rng,
    ) -> None:
        """Train a teacher in place on one shard's (N, A, ...) inputs and (N,) labels."""


@dataclass(frozen=True)
class DPSGD(TrainingMechanism):
    """DP-SGD with Poisson sampling: clipped gradients of a random part of the records, plus noise.

    Guarantee: a record's gradient, the clipped mean over its copies, has L2 norm at most
    `max_grad_norm` in the sum of each step, a record takes part in a step with probability
    `sample_rate` whatever the others do, and N(0, noise_multiplier^2 max_grad_norm^2) is added to
    each coordinate of the sum. So a training
    is `steps` Poisson-sampled Gaussian mechanisms; at rate 1 they are plain ones. The class counts
    are one more: a record that is added or removed moves one count by 1, a replaced one moves two.
    Nothing else reads the records: rate and steps are constants of the configuration (a step
    without records is taken too), no count divides the sum (Adam does not mind its scale), and
    there is no hold-out, no early stop and no batch normalisation. A record lies in one shard, so
    it is seen by one training. Nothing is proven for a patient or a client: they may hold any
    number of records.

    Args:
        noise_multiplier: sigma, noise standard deviation divided by `max_grad_norm`, > 0.
        sample_rate: q, in (0, 1].
        steps: of a training, >= 1.
        max_grad_norm: bound of one record's gradient, > 0.
        learning_rate: Adam's, > 0.
        copies: of each record's image, A in 1..9: augmentation multiplicity (De et al., arXiv
            2204.13650).
        count_share: what the class counts may tell of a record, as a share of what the steps tell
            (mu^2 over mu^2, exact at rate 1), > 0; None releases no counts.

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
    copies: int = 1
    count_share: float | None = None

    def __post_init__(self) -> None:
        for field in ("noise_multiplier", "max_grad_norm", "learning_rate", "count_share"):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{field}={value} must be a finite number > 0")
        if not 1e-6 <= self.max_grad_norm <= 1e6:
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm} must be between 1e-6 and 1e6: gradients are "
                "float32, which rounds others away"
            )
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be >= 1")
        if not 1 <= self.copies <= MOST_COPIES:
            raise ValueError(f"copies={self.copies} must be between 1 and {MOST_COPIES}")
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate={self.sample_rate} must be above 0 and at most 1")

    @property
    def counts_classes(self) -> bool:
        """Whether `count_share` is set."""
        return self.count_share is not None

    @property
    def count_noise(self) -> float:
        """Noise standard deviation of each class count, in records; inf without counts.

        It grows with the noise of the steps, so that any epsilon can be asked for.
        """
        if self.count_share is None:
            return math.inf
        return self.noise_multiplier / self.sample_rate / math.sqrt(self.steps * self.count_share)

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """`steps` sampled Gaussian mechanisms for a record, and one for its class's count.

        Nothing for anything larger than a record.
        """
        if unit != "record":
            return NonPrivateDpEvent()
        replaced = relation == "replace_one"
        step: DpEvent
        if self.sample_rate == 1:
            step = GaussianDpEvent(self.noise_multiplier / (2 if replaced else 1))
        elif replaced:
            step = ReplacedInSampleDpEvent(self.sample_rate, self.noise_multiplier)
        else:
            step = PoissonSampledDpEvent(self.sample_rate, GaussianDpEvent(self.noise_multiplier))
        training = SelfComposedDpEvent(step, self.steps)
        if not self.counts_classes:
            return training
        counts = GaussianDpEvent(self.count_noise / math.sqrt(2 if replaced else 1))
        return ComposedDpEvent([training, counts])

    def count(self, labels: NDArray[np.int64], num_classes: int, rng: Rng) -> NDArray[np.float64]:
        """(K,) class counts plus the noise.

        Raises:
            ValueError: no counts are released.
        """
        if not self.counts_classes:
            raise ValueError("count_share=None releases no class counts")
        sensitive_counts = np.bincount(labels, minlength=num_classes).astype(np.float64)
        return noisy_sum(sensitive_counts[None], self.count_noise, "gaussian", rng)

    def train(
        self,
        teacher: nn.Module,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        rng: Rng,
    ) -> None:
        """`steps` steps of Adam on noisy sums; sampling and noise follow `rng`.

        A record whose gradient is not finite counts as zero there.

        Raises:
            ValueError: the inputs hold another number of copies.
            NotImplementedError: a layer (batch normalisation) mixes the records of a batch, so one
                record's gradient has no bound.
        """
        if inputs.shape[1] != self.copies:
            raise ValueError(f"{inputs.shape[1]} copies of each record instead of {self.copies}")
        if isinstance(teacher, nn.Linear) and teacher.bias is not None:
            self._train_linear(teacher, inputs, labels, rng)
        else:
            self._train_network(teacher, inputs, labels, rng)

    @property
    def _clip(self) -> float:
        """A little below the bound, so that float32 cannot carry a norm over it."""
        return self.max_grad_norm * (1 - CLIPPING_MARGIN)

    def _noisy(self, total: torch.Tensor, size: int, rng: Rng) -> torch.Tensor:
        """A part of a sum of `size` numbers with noise from `rng`.

        In float64: torch's float32 normals end at 5.77 sigma.
        """
        stddev = self.noise_multiplier * self.max_grad_norm
        if isinstance(rng, SecureGenerator):
            stddev *= 1 + ROUNDING_MARGIN + GRID * self.noise_multiplier * math.sqrt(size)
        noisy = noisy_sum(total.double().numpy()[None], stddev, "gaussian", rng)
        return torch.from_numpy(noisy).to(total.dtype)

    def _sample(self, count: int, rng: Rng) -> torch.Tensor:
        """The records of a step."""
        return torch.from_numpy(rng.random(count) < self.sample_rate).nonzero()[:, 0]

    @torch.no_grad()
    def _train_linear(
        self,
        layer: nn.Linear,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        rng: Rng,
    ) -> None:
        """A record's gradient is a sum of outer products: its norm is known before it is formed."""
        optimiser = torch.optim.Adam(layer.parameters(), self.learning_rate)
        size = layer.weight.numel() + layer.bias.numel()
        inner = _inner_products(inputs) + 1  # of two copies with the bias's 1
        inputs = torch.nan_to_num(inputs, 0, 0, 0)
        truth = nn.functional.one_hot(labels, layer.out_features)[:, None]
        for _ in range(self.steps):
            chosen = self._sample(len(labels), rng)
            features = inputs[chosen] if len(chosen) < len(inputs) else inputs
            residuals = layer(features).softmax(2) - truth[chosen]  # (B, A, K)
            products = _inner_products(residuals) * inner[chosen]
            lengths = products.diagonal(dim1=1, dim2=2).sqrt().mean(1)  # of the copies' gradients
            norms = products.mean((1, 2)).clamp_min(0).sqrt()  # of their mean
            norms = torch.maximum(norms, lengths / CANCELLATION)
            scale = self._clip / norms.clamp_min(self._clip) / self.copies
            residuals *= scale.float()[:, None, None]
            torch.nan_to_num_(residuals, 0, 0, 0)
            rows = residuals.flatten(0, 1)
            layer.weight.grad = self._noisy(rows.T @ features.flatten(0, 1), size, rng)
            layer.bias.grad = self._noisy(rows.sum(0), size, rng)
            optimiser.step()

    def _train_network(
        self,
        teacher: nn.Module,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        rng: Rng,
    ) -> None:
        """Opacus forms and clips the gradient of each record."""
        from opacus import GradSampleModule  # takes seconds to import, and few runs need it
        from opacus.optimizers import DPOptimizer

        noisy, size = self._noisy, sum(parameter.numel() for parameter in teacher.parameters())

        class Optimizer(DPOptimizer):
            """Noise from `rng`."""

            def add_noise(self) -> None:
                for parameter in self.params:
                    parameter.grad = noisy(parameter.summed_grad, size, rng)

        model = GradSampleModule(teacher.train(), loss_reduction="sum")
        optimiser = Optimizer(
            torch.optim.Adam(model.parameters(), self.learning_rate),
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self._clip,
            expected_batch_size=None,
            loss_reduction="sum",
        )
        for _ in range(self.steps):
            # One empty part if no record was drawn.
            parts = self._sample(len(labels), rng).split(RECORDS_AT_ONCE)
            for number, part in enumerate(parts, start=1):
                optimiser.signal_skip_step(do_skip=number < len(parts))
                logits = model(inputs[part].flatten(0, 1))
                truth = labels[part].repeat_interleave(self.copies)
                loss = nn.functional.cross_entropy(logits, truth, reduction="sum")
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Full backward hook is firing")  # as it must
                    loss.backward()
                for parameter in model.parameters():
                    each = parameter.grad_sample.unflatten(0, (len(part), self.copies))
                    parameter.grad_sample = torch.nan_to_num(each.mean(1), 0, 0, 0)
                self._shorten(list(model.parameters()))
                optimiser.step()
                optimiser.zero_grad()
        model.to_standard_module()

    def _shorten(self, parameters: Sequence[Any]) -> None:
        """Clip each record's gradient by its norm in float64.

        Opacus' own is a sum in float32, which is short by more than the margin on wide layers.
        """
        each = [parameter.grad_sample.flatten(1) for parameter in parameters]
        norms = [torch.linalg.vector_norm(grad, dim=1, dtype=torch.float64) for grad in each]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        scale = (self._clip / norm.clamp_min(self._clip)).float()
        for parameter in parameters:
            parameter.grad_sample.mul_(scale.view(-1, *[1] * (parameter.grad_sample.ndim - 1)))


def _inner_products(rows: torch.Tensor) -> torch.Tensor:
    """(N, A, A) float64, of each record's A copies, (N, A, D)."""
    exact = rows.double()
    return exact @ exact.mT
