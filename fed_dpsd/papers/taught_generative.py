"""Baselines with a generator that learns from noisy votes of teachers on disjoint shards.

Unlike the papers' analyses, the proofs hold for any votes, whether or not teachers agree.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import torch
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    SelfComposedDpEvent,
)
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from fed_dpsd.config import STRICT, Positive
from fed_dpsd.papers.generative import ConditionalGenerator, GenerativeTraining
from fed_dpsd.privacy.events import FinitePrecisionDpEvent
from fed_dpsd.privacy.mechanism import Relation, Unit
from fed_dpsd.privacy.noise import GAUSSIAN_LOSS, Rng, noisy_sum

# Initial hidden weights, relative to their usual standard deviation: small, so that teachers agree
# because of their records rather than their common start.
INITIAL_SCALE = 0.1
MOST_NUMBERS = 2**26  # noisy votes in a training run
MOST_STDDEV = 2.0**26  # beyond it, the noise's lattice is coarser than a vote
MOST_TEACHERS = 2**24  # whose votes add up exactly in float32
TEACHERS_AT_ONCE = 250  # with gradients in memory at the same time


class Discriminators(nn.Module):
    """Class-conditional discriminators with one hidden layer, sharing only their initial weights.

    They are computed as one batched network. A discriminator's outputs, gradients and steps of an
    element-wise optimiser depend only on its own weights and inputs, to the last bit (like Theorem
    14 of docs/proofs.md, this assumes that a kernel's order depends only on shapes).

    Args:
        count: T, number of discriminators.
        size: D, number of values of an image.
        num_classes: K.
        width: W, number of hidden units of each.
        rng: draws the weights, which are the same for all.
    """

    def __init__(
        self, count: int, size: int, num_classes: int, width: int, rng: torch.Generator
    ) -> None:
        super().__init__()
        hidden = torch.randn((width, size), generator=rng) * INITIAL_SCALE * math.sqrt(2 / size)
        output = torch.randn((num_classes, width), generator=rng) / math.sqrt(width)
        self.hidden = nn.Parameter(hidden.repeat(count, 1, 1))
        self.shift = nn.Parameter(torch.zeros((count, 1, width)))
        self.output = nn.Parameter(output.repeat(count, 1, 1))
        self.level = nn.Parameter(torch.zeros((count, num_classes)))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return (T, B) logits of being real, for (T, B, D) or shared (B, D) images."""
        count, width, _ = self.hidden.shape
        inputs = 2 * images - 1
        if images.ndim == 2:
            seen = inputs @ self.hidden.flatten(0, 1).T
            seen = seen.unflatten(1, (count, width)).transpose(0, 1)
        else:
            seen = inputs @ self.hidden.transpose(1, 2)
        units = functional.leaky_relu(seen + self.shift, 0.2)
        return (units * self.output[:, labels]).sum(2) + self.level[:, labels]


class Teachers:
    """Discriminators that learn on disjoint shards of the records, against one generator.

    A record is in the shard of one teacher, drawn independently of all other records. The number
    and choice of a shard's records affect only this teacher: all teachers take equally many images
    in a step, of public classes. A teacher without records of a class ignores this class. So
    adding, removing or replacing a record changes one teacher.

    Args:
        images: (N, C, H, W) private images in [0, 1].
        labels: (N,) their classes.
        num_classes: K.
        settings: the training that they are part of.
        rng: draws the shards; secret, as noise is.
        draws: public; draws weights, classes, and positions in shards.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        num_classes: int,
        settings: "TaughtGenerative",
        rng: Rng,
        draws: torch.Generator,
    ) -> None:
        count, self.settings, self.draws = settings.teachers, settings, draws
        shards = np.minimum(rng.random(len(labels)) * count, count - 1).astype(np.int64)
        parts = torch.from_numpy(shards) * num_classes + labels
        seen = self.pool(images)
        empty = seen.new_zeros((1, seen.shape[1]))  # for a shard without the class
        self.records = torch.cat([seen[parts.argsort(stable=True)], empty])
        self.sizes = parts.bincount(minlength=count * num_classes).unflatten(0, (count, -1))
        self.starts = (self.sizes.flatten().cumsum(0) - self.sizes.flatten()).view_as(self.sizes)
        size, width = seen.shape[1], settings.teacher_width
        self.networks = Discriminators(count, size, num_classes, width, draws)
        rate = settings.teacher_learning_rate
        self.optimiser = adamw(self.networks, rate, settings.teacher_weight_decay)

    def pool(self, images: torch.Tensor) -> torch.Tensor:
        """Average pixels of (B, C, H, W) images; return the (B, D) values that teachers see."""
        return functional.avg_pool2d(images, self.settings.pooling).flatten(1)

    def learn(self, generator: ConditionalGenerator) -> None:
        """Take `teacher_steps` steps of each teacher to distinguish its records from new images."""
        count, num_classes = self.sizes.shape
        batch = self.settings.teacher_batch_size
        for _ in range(self.settings.teacher_steps):
            labels = torch.randint(num_classes, (batch,), generator=self.draws)
            places = torch.rand((count, batch), dtype=torch.float64, generator=self.draws)
            sizes = self.sizes[:, labels]
            chosen = self.starts[:, labels] + torch.minimum((places * sizes).long(), sizes - 1)
            real = self.records[torch.where(sizes > 0, chosen, -1)]
            with torch.no_grad():
                generated = self.pool(generator(labels, self.draws))
            losses = functional.softplus(-self.networks(real, labels))
            losses = losses + functional.softplus(self.networks(generated, labels))
            self.optimiser.zero_grad()
            (losses * (sizes > 0)).mean(1).sum().backward()
            self.optimiser.step()

    @torch.no_grad()
    def logits(self, seen: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return (T, B) logits of (B, D) images of (B,) classes; NaN if a class has no records."""
        return self.networks(seen, labels).where(self.sizes[:, labels] > 0, torch.nan)

    @torch.no_grad()
    def gradients(self, seen: torch.Tensor, labels: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield (t, B, D) gradients of the logits with respect to images, for t teachers at a time.

        Gradients for a class without records are NaN.
        """
        for start in range(0, len(self.sizes), TEACHERS_AT_ONCE):
            some = slice(start, start + TEACHERS_AT_ONCE)
            hidden = self.networks.hidden[some]
            units = (2 * seen - 1) @ hidden.flatten(0, 1).T
            units = units.unflatten(1, hidden.shape[:2]).transpose(0, 1)
            units = units + self.networks.shift[some]
            slopes = torch.where(units > 0, 1.0, 0.2) * self.networks.output[some][:, labels]
            known = self.sizes[some][:, labels, None] > 0
            yield (2 * slopes @ hidden).where(known, torch.nan)


@dataclass(frozen=True, config=STRICT)
class TaughtGenerative(GenerativeTraining, ABC):
    """A generator that learns from noisy sums of the votes of teachers on disjoint shards.

    Guarantee: a record is in one teacher's shard for the whole run; everything else depends only on
    released sums and public draws. So a step is one Gaussian mechanism. Its sensitivity is the most
    that one teacher's votes, which are whole numbers, can move when the teacher is replaced. Adding
    or removing a record replaces its teacher too, so both relations have the same event.

    Classes are public, and each has the same number of generated images.

    Args:
        noise_multiplier: noise standard deviation divided by that sensitivity, > 0.
        teachers: T, number of teacher discriminators, 1 to 2^24.
        teacher_width: hidden units of each, >= 1.
        teacher_steps: steps of each teacher per step of the generator, >= 1.
        teacher_batch_size: real and generated images in each of these steps, >= 1.
        teacher_learning_rate: learning rate of AdamW for teachers, > 0.
        teacher_weight_decay: weight decay of teachers, >= 0; it dampens oscillation.
        images_per_class: generated images of each class in a release, >= 1.
        pooling: teachers see means of pooling x pooling pixels; must divide the image size.
    """

    teachers: Annotated[int, Field(ge=1, le=MOST_TEACHERS)]
    teacher_width: PositiveInt
    teacher_steps: PositiveInt
    teacher_batch_size: PositiveInt
    teacher_learning_rate: Positive
    teacher_weight_decay: float
    images_per_class: PositiveInt
    pooling: PositiveInt

    def __post_init__(self) -> None:
        if not 0 <= self.teacher_weight_decay * self.teacher_learning_rate < 1:
            raise ValueError(
                f"teacher_weight_decay={self.teacher_weight_decay} must be >= 0 and below "
                f"1 / teacher_learning_rate={self.teacher_learning_rate}"
            )

    @property
    def steps(self) -> int:  # type: ignore[override]
        """Return the number of steps of all networks."""
        return self.generator_steps * (self.teacher_steps + 1) + self.classifier_steps

    def check(self, config: Any, method: Any, partition: Any) -> list[str]:
        """Return the problems with the training in an experiment."""
        problems, size = super().check(config, method, partition), config.data.shape[-1]
        if size % self.pooling:
            problems.append(
                f"training.pooling={self.pooling} does not divide the image size, {size}; use "
                "training.pooling=1"
            )
        return problems

    def describe(self, trainings: int = 1) -> str:
        """Describe how teachers are trained, `trainings` times."""
        repeated = f"{trainings:,} training runs " if trainings > 1 else ""
        return (
            f"{self.name}: {repeated}on images of a generator that follows the votes of "
            f"{self.teachers:,} discriminators in {self.generator_steps:,} steps, with noise of "
            f"{self.noise_multiplier:.6g} times what one of them can change"
        )

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return one Gaussian mechanism for each of the generator's steps."""
        if unit != "record":
            return NonPrivateDpEvent()
        step = SelfComposedDpEvent(GaussianDpEvent(self.noise_multiplier), self.generator_steps)
        return ComposedDpEvent([step, FinitePrecisionDpEvent(MOST_NUMBERS * GAUSSIAN_LOSS)])

    def make_generator(self, shape: tuple[int, ...], num_classes: int) -> ConditionalGenerator:
        """Build a generator of images that are as smooth as the teachers see them."""
        width = self.generator_width
        return ConditionalGenerator(shape, num_classes, self.latent_size, width, self.pooling)

    def release(self, votes: torch.Tensor, sensitivity: float, rng: Rng) -> torch.Tensor:
        """Add noise to whole numbers of votes; call this once per step of the generator.

        Args:
            votes: a tensor of any shape.
            sensitivity: L2 bound of the votes' change if one teacher is replaced.
            rng: draws the noise.
        """
        stddev = self.noise_multiplier * sensitivity
        if self.generator_steps * votes.numel() > MOST_NUMBERS:
            raise ValueError(
                f"generator_steps={self.generator_steps:,} releases of {votes.numel():,} numbers "
                f"are more than {MOST_NUMBERS:,}; use fewer steps or images_per_class"
            )
        if stddev > MOST_STDDEV:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier:g} draws noise of {stddev:g} votes, and "
                f"at most {MOST_STDDEV:g} is proven; use less noise"
            )
        noisy = noisy_sum(votes.double().numpy()[None], stddev, "gaussian", rng)
        return torch.from_numpy(noisy).float()

    def train_generator(
        self,
        generator: ConditionalGenerator,
        images: torch.Tensor,
        labels: torch.Tensor,
        rng: Rng,
        draws: torch.Generator,
    ) -> torch.Tensor:
        """Train the generator on the teachers' noisy votes; see `GenerativeTraining`."""
        generator.images.set_levels(1.0, -2.0)
        teachers = Teachers(images, labels, generator.num_classes, self, rng, draws)
        classes = torch.arange(generator.num_classes).repeat_interleave(self.images_per_class)
        losses = self.losses(generator, teachers, classes, rng, draws)
        optimiser = adamw(generator, self.generator_learning_rate)
        mean = AveragedModel(generator)

        def averaged() -> Iterator[torch.Tensor]:
            for step, loss in enumerate(losses):
                if 2 * step > self.generator_steps:
                    mean.update_parameters(generator)
                yield loss

        self.descend(optimiser, averaged())
        mean.update_parameters(generator)
        generator.load_state_dict(mean.module.state_dict())
        return torch.ones(generator.num_classes)

    @abstractmethod
    def losses(
        self,
        generator: ConditionalGenerator,
        teachers: Teachers,
        classes: torch.Tensor,
        rng: Rng,
        draws: torch.Generator,
    ) -> Iterator[torch.Tensor]:
        """Yield the generator's loss in each of `generator_steps` steps, with a release in each."""


@dataclass(frozen=True, config=STRICT)
class TaughtByGradients(TaughtGenerative, ABC):
    """A generator that follows the noisy directions in which teachers find images more real.

    Args:
        step_size: gamma, how far a pixel moves in a step, > 0.

    Raises:
        ValueError: a parameter is out of its range.
    """

    step_size: Positive

    def losses(
        self,
        generator: ConditionalGenerator,
        teachers: Teachers,
        classes: torch.Tensor,
        rng: Rng,
        draws: torch.Generator,
    ) -> Iterator[torch.Tensor]:
        """Yield the distance between images and the images moved in the teachers' direction."""
        for _ in range(self.generator_steps):
            teachers.learn(generator)
            seen = teachers.pool(generator(classes, draws))
            direction = self.direction(teachers, seen.detach(), classes, rng, draws)
            target = (seen.detach() + self.step_size * direction).clamp(0, 1)
            yield (seen - target).square().sum() / (2 * len(classes))

    @abstractmethod
    def direction(
        self,
        teachers: Teachers,
        seen: torch.Tensor,
        classes: torch.Tensor,
        rng: Rng,
        draws: torch.Generator,
    ) -> torch.Tensor:
        """Release a (B, D) direction for (B, D) images, as the teachers see them."""


def adamw(
    network: nn.Module, learning_rate: float, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Return AdamW as GANs use it."""
    parameters, betas = network.parameters(), (0.5, 0.999)
    return torch.optim.AdamW(parameters, learning_rate, betas, weight_decay=weight_decay)
