"""GS-WGAN: a Wasserstein GAN with a generator that sees only noisy gradients of its images.

Chen, Orekondy, Fritz: "GS-WGAN: A Gradient-Sanitized Approach for Learning Differentially Private
Generators", NeurIPS 2020, arXiv 2006.08265, Algorithm 1. Adam takes the steps, and the generator's
weights are averaged.
"""

import functools
import math
from collections.abc import Iterator
from typing import Annotated, ClassVar

import torch
from dp_accounting import ComposedDpEvent, DpEvent, NonPrivateDpEvent, SelfComposedDpEvent
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

from fed_dpsd.config import STRICT, Positive
from fed_dpsd.models import initialise
from fed_dpsd.papers.generative import ConditionalGenerator, GenerativeTraining
from fed_dpsd.privacy.dp_sgd import MOST_DRAWS, PRECISION_LOSS
from fed_dpsd.privacy.events import FinitePrecisionDpEvent, ReplacedInSampleDpEvent
from fed_dpsd.privacy.lattice import ROOM
from fed_dpsd.privacy.mechanism import Relation, Unit
from fed_dpsd.privacy.noise import Rng, noisy_sum
from fed_dpsd.privacy.optimisers import Adam

PENALTY = 10.0  # weight of the gradient penalty
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, config=STRICT)
class GSWGAN(GenerativeTraining):
    """K discriminators on disjoint random shards, and noisy gradients of generated images.

    Only a generator's step releases anything: for each of its images, the gradient of a
    discriminator's score with respect to the image, clipped to norm 1, plus
    N(0, noise_multiplier^2) on each number. Discriminators have a score for each class, and classes
    of generated images are uniform.

    Guarantee: a record's shard is drawn independently of everything else, so any change of the
    record changes one discriminator. Every image has its own discriminator, drawn uniformly and
    kept secret, so a release is a mixture of Gaussians, in which the centre with weight 1/K
    changes. Any two centres are at most 2 apart, so the event is a `ReplacedInSampleDpEvent` at
    noise_multiplier / 2. Its proof (docs/proofs.md, Theorem 6) uses only that the centre is at most
    2 away from all others and moves by at most 4. It applies to an added, removed or replaced
    record. All `generator_steps` * `batch_size` releases compose, because apart from the noise and
    the shards, on which we condition, these draws are the only secret. It is public which
    discriminators train, when, and on which draws. So each discriminator is a function of its shard
    and of earlier releases alone.

    In the paper, a step draws one discriminator for all its images, and only this discriminator
    trains. One draw for B images moves all of them, and training would depend on earlier draws; the
    paper's accountant covers neither.
    """

    name: ClassVar[str] = "gs_wgan"
    discriminators: Annotated[int, Field(ge=2)]  # K, number of discriminators
    discriminator_width: PositiveInt  # hidden units of a discriminator
    discriminator_learning_rate: Positive  # learning rate of Adam for a discriminator
    discriminator_batch_size: PositiveInt  # records in a discriminator's step
    # number of discriminators that train before a generator's step, a divisor of K
    discriminators_at_once: PositiveInt
    discriminator_steps: PositiveInt  # steps of these discriminators
    first_steps: NonNegativeInt  # steps of every discriminator before the generator's first step

    def __post_init__(self) -> None:
        if self.discriminators % self.discriminators_at_once:
            raise ValueError(
                f"discriminators_at_once={self.discriminators_at_once} must divide "
                f"discriminators={self.discriminators}"
            )

    def describe(self, trainings: int = 1) -> str:
        """Describe how teachers are trained, `trainings` times."""
        repeated = f"{trainings:,} training runs " if trainings > 1 else ""
        return (
            f"GS-WGAN: {repeated}on images of a generator that sees gradients of "
            f"{self.generator_steps * self.batch_size:,} images, each from one of "
            f"{self.discriminators} discriminators, with noise of {self.noise_multiplier:.6g} "
            "times the largest gradient"
        )

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return a mixture of Gaussians for each image of the generator's steps."""
        if unit != "record":
            return NonPrivateDpEvent()
        probability = 1 / self.discriminators + 2.0**-50  # draws have 53 bits
        image = ReplacedInSampleDpEvent(probability, self.noise_multiplier / 2)
        images = SelfComposedDpEvent(image, self.generator_steps * self.batch_size)
        return ComposedDpEvent([images, FinitePrecisionDpEvent(PRECISION_LOSS)])

    def train_generator(
        self,
        generator: ConditionalGenerator,
        images: torch.Tensor,
        labels: torch.Tensor,
        rng: Rng,
        draws: torch.Generator,
    ) -> torch.Tensor:
        """Train the discriminators and the generator; see `GenerativeTraining`."""
        num_classes, shape = generator.num_classes, tuple(images.shape[1:])
        numbers = self.generator_steps * (self.batch_size * math.prod(shape) + 1_600)
        if numbers > MOST_DRAWS:
            raise ValueError(
                f"generator_steps={self.generator_steps:,} of {self.batch_size} images draw more "
                f"than {MOST_DRAWS:,} numbers; use fewer"
            )
        shards = Shards(images, functional.one_hot(labels, num_classes), self.discriminators, rng)
        build = functools.partial(
            discriminator, math.prod(shape), self.discriminator_width, num_classes
        )
        network = initialise(build, draws)
        groups = [
            Group(
                network,
                [initialise(build, draws) for _ in range(self.discriminators_at_once)],
                self.discriminator_learning_rate,
            )
            for _ in range(self.discriminators // self.discriminators_at_once)
        ]
        uniform = torch.ones(num_classes)

        def generate(count: int) -> tuple[torch.Tensor, torch.Tensor]:
            classes = torch.multinomial(uniform, count, True, generator=draws)
            return generator(classes, draws), functional.one_hot(classes, num_classes).float()

        def learn(number: int) -> None:
            """Take a step of each discriminator of a group, all on the same generated images."""
            numbers = (
                torch.arange(self.discriminators_at_once) + number * self.discriminators_at_once
            )
            chosen = torch.rand((len(numbers), self.discriminator_batch_size), generator=draws)
            mixing = torch.rand((self.discriminator_batch_size, 1, 1, 1), generator=draws)
            with torch.no_grad():
                generated = generate(self.discriminator_batch_size)
            groups[number].step(*shards.take(numbers, chosen), *generated, mixing)

        gradients_of = vmap(grad(functools.partial(score, network), 1))

        def losses() -> Iterator[torch.Tensor]:
            for number in range(len(groups)):
                for _ in range(self.first_steps):
                    learn(number)
            for step in range(self.generator_steps):
                for _ in range(self.discriminator_steps):
                    learn(step % len(groups))
                made, classes = generate(self.batch_size)
                secret = (rng.random(self.batch_size) * self.discriminators).astype(int)
                picked = [
                    groups[k // self.discriminators_at_once].weights(
                        k % self.discriminators_at_once
                    )
                    for k in secret
                ]
                weights = {name: torch.stack([each[name] for each in picked]) for name in picked[0]}
                gradients = clip_gradients(
                    gradients_of(weights, made.detach()[:, None], classes[:, None])
                )
                noisy = noisy_sum(
                    gradients.numpy().reshape(1, *made.shape),
                    self.noise_multiplier,
                    "gaussian",
                    rng,
                )
                yield -(made * torch.from_numpy(noisy).to(made)).sum() / self.batch_size

        self.descend_averaged(generator, losses())
        return uniform


class Shards:
    """Records divided into K shards, each record by its own draw."""

    def __init__(self, images: torch.Tensor, one_hot: torch.Tensor, shards: int, rng: Rng) -> None:
        shard = torch.from_numpy((rng.random(len(images)) * shards).astype(int))
        # An empty shard takes the empty record after the last.
        self.images = (
            torch.cat([images, torch.zeros_like(images[:1])])
            if len(images)
            else torch.zeros((1, *images.shape[1:]))
        )
        self.one_hot = torch.cat([one_hot, torch.zeros((1, one_hot.shape[1]), dtype=one_hot.dtype)])
        self.order = torch.cat([shard.argsort(stable=True), torch.tensor([len(images)])])
        self.sizes = shard.bincount(minlength=shards)
        self.starts = self.sizes.cumsum(0) - self.sizes
        self.starts[self.sizes == 0] = len(images)

    def take(self, shards: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (n, b, C, H, W) images and (n, b, K) one-hot labels of n shards.

        Args:
            shards: (n,) numbers of the shards.
            chosen: (n, b) positions in the shards, from 0 to 1.
        """
        places = (chosen * self.sizes[shards, None]).long()
        places = places.minimum((self.sizes[shards, None] - 1).clamp_min(0))
        records = self.order[self.starts[shards, None] + places]
        return self.images[records], self.one_hot[records].float()


class Group:
    """Discriminators that train together, each with its own Adam steps."""

    def __init__(self, network: nn.Module, models: list[nn.Module], rate: float) -> None:
        self.parameters, _ = stack_module_state(models)
        self.optimiser = Adam(self.parameters.values(), rate, (0.5, 0.9))
        self.gradients = vmap(grad(functools.partial(loss, network)), (0, 0, 0, None, None, None))

    def weights(self, index: int) -> Weights:
        """Return the weights of one discriminator."""
        return {name: tensor.detach()[index] for name, tensor in self.parameters.items()}

    def step(self, *batch: torch.Tensor) -> None:
        """Take one step of all discriminators; the arguments are the same as for `loss`."""
        weights = {name: tensor.detach() for name, tensor in self.parameters.items()}
        for name, gradient in self.gradients(weights, *batch).items():
            self.parameters[name].grad = gradient.nan_to_num_(0.0, 0.0, 0.0)
        self.optimiser.step()


def discriminator(inputs: int, width: int, num_classes: int) -> nn.Module:
    """Build a network with one hidden layer and a score for each class."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, num_classes)
    )


def score(
    network: nn.Module, weights: Weights, images: torch.Tensor, own: torch.Tensor
) -> torch.Tensor:
    """Return the sum of a discriminator's scores of images for their (B, K) one-hot classes."""
    return (functional_call(network, weights, (2 * images - 1,)) * own).sum()


def loss(
    network: nn.Module,
    weights: Weights,
    images: torch.Tensor,
    labels: torch.Tensor,
    generated: torch.Tensor,
    classes: torch.Tensor,
    mixing: torch.Tensor,
) -> torch.Tensor:
    """Return the loss of one discriminator, with the penalty of WGAN-GP (arXiv 1704.00028)."""
    gap = score(network, weights, generated, classes) - score(network, weights, images, labels)
    mixed = mixing * images + (1 - mixing) * generated
    slopes = grad(functools.partial(score, network), 1)(weights, mixed, classes)
    lengths = (slopes.flatten(1).square().sum(1) + 1e-12).sqrt()
    return gap / len(images) + PENALTY * (lengths - 1).square().mean()


def clip_gradients(gradients: torch.Tensor) -> torch.Tensor:
    """Clip each image's gradient to norm 1, in float64; non-finite gradients become zero."""
    finite = gradients.flatten(1).double().nan_to_num(0.0, 0.0, 0.0)
    norms = torch.linalg.vector_norm(finite, dim=1, keepdim=True)
    return (finite * (ROOM / norms.clamp_min(1.0))).view_as(gradients)
