"""Baselines with teachers that learn only from the images of a private generator."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from dp_accounting import DpEvent, NonPrivateDpEvent
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fed_dpsd.checks import fixed_networks
from fed_dpsd.config import STRICT, Positive
from fed_dpsd.models import initialise, layers_draw_from
from fed_dpsd.models.divergence import descend
from fed_dpsd.models.generators import Generator
from fed_dpsd.privacy.mechanism import Relation, Unit
from fed_dpsd.privacy.noise import Rng
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.privacy.training import TrainingMechanism

DECAY = 0.98  # of the moving average of a generator's weights


class ConditionalGenerator(nn.Module):
    """A generator of images of given classes.

    Args:
        shape: (C, size, size) of the images; size is a multiple of 4.
        num_classes: K.
        latent_size: length of a latent vector, without the class.
        width: number of channels before the last convolution.
        pooling: images are as smooth as if enlarged from 1 / pooling of their size.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        num_classes: int,
        latent_size: int,
        width: int,
        pooling: int = 1,
    ) -> None:
        super().__init__()
        self.pooling = pooling
        self.latent_size = latent_size
        self.num_classes = num_classes
        self.images = Generator(shape, latent_size + num_classes, width)

    def forward(self, labels: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        """Draw a (B, C, H, W) image in [0, 1] for each of (B,) labels."""
        latents = torch.randn((len(labels), self.latent_size), generator=rng)
        classes = functional.one_hot(labels, self.num_classes).to(latents)
        images = self.images(torch.cat([latents, classes], 1))
        if self.pooling == 1:
            return images
        means = functional.avg_pool2d(images, self.pooling)
        return functional.interpolate(means, images.shape[2:], mode="bilinear")


@dataclass(frozen=True, config=STRICT)
class GenerativeTraining(TrainingMechanism):
    """A training that releases a generator and trains the teacher only on its images.

    Guarantee: the generator's guarantee, for a record; the teacher is post-processing. Nothing is
    proven for a patient or a client, who may have any number of records. This training runs only in
    simulations.
    """

    needs_many: ClassVar[bool] = True  # records
    bounds_gradients: ClassVar[bool] = False  # the teacher's images are not records
    calibrated_by: ClassVar[str] = "noise_multiplier"
    counts_classes: ClassVar[bool] = False
    unit: ClassVar[Literal["record"]] = "record"  # type: ignore[misc]
    copies: ClassVar[int] = 1  # type: ignore[misc]
    records_per_patient: ClassVar[int] = 1  # type: ignore[misc]
    reason: ClassVar[str] = "a patient's or client's number of records is not bounded"
    noise_multiplier: Positive  # noise standard deviation divided by the bound of a record's part
    generator_steps: PositiveInt  # number of the generator's steps
    classifier_steps: PositiveInt  # number of the teacher's steps
    batch_size: Annotated[int, Field(ge=2)]  # images in a step; batch normalisation needs two
    latent_size: PositiveInt  # length of a latent vector
    generator_width: PositiveInt  # channels before the generator's last convolution
    generator_learning_rate: Positive  # learning rate of Adam
    learning_rate: Positive  # learning rate of Adam for the teacher

    @property
    def steps(self) -> int:  # type: ignore[override]
        """Return the number of steps of both networks."""
        return self.generator_steps + self.classifier_steps

    def check(self, config: Any, method: Any, partition: Any) -> list[str]:
        """Return the problems with the training in an experiment."""
        problems = super().check(config, method, partition)
        return problems + baseline_problems(self.name, "generates images", config)

    def warnings(self, config: Any) -> list[str]:
        """Warn about data with too few records for the generator."""
        if not self.needs_many or config.data.name != "digits":
            return []
        return [
            f"training={self.name} needs tens of thousands of records, and data=digits has 1,437, "
            "so expect a student near chance; use data=mnist data.path=FOLDER, or method=dp_merf"
        ]

    def count_event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return the event of class counts, which are not released."""
        return NonPrivateDpEvent()

    def count(self, labels: NDArray[np.int64], num_classes: int, rng: Rng) -> NDArray[np.float64]:
        """Raise ValueError: no class counts are released."""
        raise ValueError(f"training={self.name} releases no class counts")

    def train(
        self,
        teacher: nn.Module,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        rng: Rng,
    ) -> None:
        """Train a generator privately, and the teacher on its images."""
        draws = torch.Generator().manual_seed(int(rng.random(1)[0] * 2**53))
        with torch.no_grad():
            num_classes = teacher.eval()(torch.zeros((1, *inputs.shape[2:]))).shape[1]
        shape = tuple(inputs.shape[2:])
        generator = initialise(lambda: self.make_generator(shape, num_classes), draws)
        generator.images.draw_levels(draws)
        weights = self.train_generator(generator, inputs[:, 0], labels, rng, draws)
        optimiser = Adam(teacher.parameters(), self.learning_rate)
        teacher.train()

        def losses() -> Iterator[torch.Tensor]:
            for _ in range(self.classifier_steps):
                classes = torch.multinomial(weights, self.batch_size, True, generator=draws)
                with torch.no_grad():
                    images = generator(classes, draws)
                yield functional.cross_entropy(teacher(images), classes)

        rates = {"training.learning_rate": self.learning_rate}
        with layers_draw_from(draws, torch.device("cpu")):
            descend(optimiser, losses(), f"the teacher of {self.name}'s images", rates)

    def descend(self, optimiser: torch.optim.Optimizer, losses: Iterable[torch.Tensor]) -> None:
        """Take a step of the generator's optimiser for each loss."""
        rates = {"training.generator_learning_rate": self.generator_learning_rate}
        descend(optimiser, losses, f"{self.name}'s generator", rates)

    def descend_averaged(
        self, generator: ConditionalGenerator, losses: Iterator[torch.Tensor]
    ) -> None:
        """Take Adam's step for each loss; set the generator to its weights' moving average."""
        averaged = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

        def followed() -> Iterator[torch.Tensor]:
            for loss in losses:
                yield loss
                averaged.update_parameters(generator)

        rate = self.generator_learning_rate
        self.descend(Adam(generator.parameters(), rate, (0.5, 0.9)), followed())
        generator.load_state_dict(averaged.module.state_dict())

    def make_generator(self, shape: tuple[int, ...], num_classes: int) -> ConditionalGenerator:
        """Build a generator of (C, H, W) images of K classes."""
        return ConditionalGenerator(shape, num_classes, self.latent_size, self.generator_width)

    @abstractmethod
    def train_generator(
        self,
        generator: ConditionalGenerator,
        images: torch.Tensor,
        labels: torch.Tensor,
        rng: Rng,
        draws: torch.Generator,
    ) -> torch.Tensor:
        """Train the generator on (N, C, H, W) private images in [0, 1], with (N,) labels.

        Everything that depends on a record passes through noise drawn from `rng`; `draws` is
        public.

        Returns:
            The (K,) weights of the classes, for the teacher's images.
        """


def baseline_problems(name: str, action: str, config: Any) -> list[str]:
    """Return the problems with a training of networks on images that runs only in simulations."""
    problems = []
    if not config.federation.simulation:
        problems.append(
            f"training={name} is a baseline for simulations; use training=dp_sgd, or "
            "federation=simulation"
        )
    problems += [
        f"{key}={network}: training={name} {action}, and these features are fixed; use model=cnn"
        for key, network in fixed_networks(config).items()
    ]
    return problems
