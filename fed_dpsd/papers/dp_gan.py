"""DP-GAN: a Wasserstein GAN with a critic trained by DP-SGD.

Xie, Lin, Wang, Wang, Zhou: "Differentially Private Generative Adversarial Network", arXiv
1802.06739, Algorithm 1. Samples are Poisson, Adam takes the steps, and the generator's weights are
averaged.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from dp_accounting import DpEvent
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fed_dpsd.config import STRICT, Positive
from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import cnn
from fed_dpsd.papers.generative import ConditionalGenerator, GenerativeTraining
from fed_dpsd.privacy import lattice
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.mechanism import Relation, Unit
from fed_dpsd.privacy.noise import Rng
from fed_dpsd.privacy.optimisers import Adam


@dataclass(frozen=True, config=STRICT)
class DPGAN(GenerativeTraining):
    """DP-SGD steps of a critic, alternating with steps of a generator that sees only the critic.

    The critic has a score for each class, so the game is conditional. A record's gradient is the
    gradient of the mean score of a batch of generated images with uniform classes, minus the
    gradient of the record's score; the paper pairs each record with one generated image. Weights
    are clipped after each step (WGAN).

    Guarantee: the critic's training has the event of DP-SGD with `generator_steps` *
    `critic_steps` steps: generated images are post-processing of earlier steps and of public draws,
    so a record's clipped gradient depends only on this record and the critic's released weights.
    The generator and the teacher are post-processing.
    """

    name: ClassVar[str] = "dp_gan"
    critic_steps: PositiveInt  # steps of the critic before each step of the generator
    sample_rate: float  # q, expected fraction of the records in a critic's step, in (0, 1]
    max_grad_norm: float  # bound of a record's gradient, > 0
    critic_width: PositiveInt  # channels of the critic's first convolution
    critic_learning_rate: Positive  # learning rate of Adam for the critic
    weight_clip: Positive  # c, largest absolute weight of the critic

    def __post_init__(self) -> None:
        _ = self.critic_training  # checks the other fields

    @property
    def critic_training(self) -> DPSGD:
        """Return the DP-SGD of the critic."""
        return DPSGD(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=self.generator_steps * self.critic_steps,
            max_grad_norm=self.max_grad_norm,
            learning_rate=self.critic_learning_rate,
        )

    @property
    def steps(self) -> int:  # type: ignore[override]
        """Return the number of steps of the three networks."""
        return super().steps + self.critic_training.steps

    def describe(self, trainings: int = 1) -> str:
        """Describe how teachers are trained, `trainings` times."""
        return (
            "on images of DP-GAN's generator; its critic by "
            f"{self.critic_training.describe(trainings)}"
        )

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return the event of DP-SGD."""
        return self.critic_training.event(unit, relation)

    def train_generator(
        self,
        generator: ConditionalGenerator,
        images: torch.Tensor,
        labels: torch.Tensor,
        rng: Rng,
        draws: torch.Generator,
    ) -> torch.Tensor:
        """Train critic and generator in turn; see `GenerativeTraining`."""
        num_classes, shape = generator.num_classes, tuple(images.shape[1:])
        mechanism = self.critic_training
        critic = initialise(lambda: cnn(shape, num_classes, self.critic_width), draws)
        critic.to(memory_format=torch.contiguous_format)  # the format of its gradients
        parameters = dict(critic.named_parameters())
        size = sum(parameter.numel() for parameter in parameters.values())
        mechanism.check_size(size)
        uniform = torch.ones(num_classes)
        generated: tuple[torch.Tensor, ...] = ()  # the gradient of the mean score of a batch

        def score(
            weights: dict[str, torch.Tensor], image: torch.Tensor, own: torch.Tensor
        ) -> torch.Tensor:
            return (functional_call(critic, weights, (image[None],))[0] * own).sum()

        score_gradients = vmap(grad(score), (None, 0, 0))

        def gradients_of(batch: torch.Tensor, classes: torch.Tensor) -> list[torch.Tensor]:
            weights = {name: parameter.detach() for name, parameter in parameters.items()}
            one_hot = functional.one_hot(classes, num_classes).to(batch)
            own = score_gradients(weights, batch[:, 0], one_hot).values()
            differences = [g - each for g, each in zip(generated, own, strict=True)]
            return lattice.append_norms([d.nan_to_num_(0.0, 0.0, 0.0) for d in differences])

        def mean_score() -> torch.Tensor:
            classes = torch.multinomial(uniform, self.batch_size, True, generator=draws)
            return critic(generator(classes, draws)).gather(1, classes[:, None]).mean()

        optimiser = Adam(parameters.values(), self.critic_learning_rate, (0.5, 0.9))
        inputs, records = images[:, None], 0

        def losses() -> Iterator[torch.Tensor]:
            nonlocal generated, records
            for _ in range(self.generator_steps):
                for _ in range(self.critic_steps):
                    generated = torch.autograd.grad(mean_score(), list(parameters.values()))
                    records = records or mechanism.records_at_once(gradients_of, inputs, size)
                    noisy = mechanism.noisy_gradients(gradients_of, inputs, labels, records, rng)
                    for parameter, gradient in zip(parameters.values(), noisy, strict=True):
                        parameter.grad = gradient
                    optimiser.step()
                    with torch.no_grad():
                        for parameter in parameters.values():
                            parameter.clamp_(-self.weight_clip, self.weight_clip)
                yield -mean_score()

        self.descend_averaged(generator, losses())
        return uniform
