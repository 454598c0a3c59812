"""PATE-GAN: a generator trained against a student that learns from teachers' noisy votes.

Jordon, Yoon, van der Schaar: "PATE-GAN: Generating Synthetic Data with Differential Privacy
Guarantees", ICLR 2019.
"""

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch.nn import functional

from fed_dpsd.config import STRICT, Positive
from fed_dpsd.models.divergence import descend
from fed_dpsd.papers.generative import ConditionalGenerator
from fed_dpsd.papers.taught_generative import (
    Discriminators,
    TaughtGenerative,
    Teachers,
    adamw,
)
from fed_dpsd.privacy.noise import Rng


@dataclass(frozen=True, config=STRICT)
class PATEGAN(TaughtGenerative):
    """Teachers vote on whether images are real; a student learns from noisy votes (Alg. 1).

    A vote is 1 or -1 for an image that the teacher finds more or less real than images of this
    class on average. With the paper's fixed threshold, teachers soon call every generated image
    fake, and votes are uninformative. The student sees the images of the last `rounds_kept`
    releases. The noise is Gaussian, which composes better than the paper's Laplace noise.

    Guarantee: replacing a teacher moves each of B sums of votes by at most 2, and all of them by at
    most 2 sqrt(B); see `TaughtGenerative`.
    """

    name: ClassVar[str] = "pate_gan"
    student_width: PositiveInt  # hidden units of the student discriminator
    student_steps: PositiveInt  # steps of the student per step of the generator
    student_learning_rate: Positive  # learning rate of Adam for the student
    rounds_kept: PositiveInt  # number of releases that the student learns from

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images_per_class < 2:
            raise ValueError(
                f"images_per_class={self.images_per_class} must be >= 2: teachers compare images"
            )

    @property
    def steps(self) -> int:  # type: ignore[override]
        """Return the number of steps of all networks."""
        return super().steps + self.generator_steps * self.student_steps

    def losses(
        self,
        generator: ConditionalGenerator,
        teachers: Teachers,
        classes: torch.Tensor,
        rng: Rng,
        draws: torch.Generator,
    ) -> Iterator[torch.Tensor]:
        """Yield how unreal the student finds images, after it has learnt from noisy votes."""
        size = teachers.records.shape[1]
        student = Discriminators(1, size, generator.num_classes, self.student_width, draws)
        optimiser = adamw(student, self.student_learning_rate)
        rounds: list[tuple[torch.Tensor, torch.Tensor]] = []
        name = "PATE-GAN's student"
        rates = {"training.student_learning_rate": self.student_learning_rate}
        for step in range(self.generator_steps):
            teachers.learn(generator)
            with torch.no_grad():
                seen = teachers.pool(generator(classes, draws))
            total = votes(teachers.logits(seen, classes), self.images_per_class).sum(0)
            noisy = self.release(total, 2 * math.sqrt(len(classes)), rng)
            rounds = [*rounds, (seen, (noisy > 0).float())][-self.rounds_kept :]
            done = step * self.student_steps
            descend(
                optimiser, self.student_losses(student, rounds, classes, draws), name, rates, done
            )
            chosen = torch.randint(generator.num_classes, (self.batch_size,), generator=draws)
            generated = teachers.pool(generator(chosen, draws))
            yield functional.softplus(-student(generated, chosen)).mean()

    def student_losses(
        self,
        student: Discriminators,
        rounds: list[tuple[torch.Tensor, torch.Tensor]],
        classes: torch.Tensor,
        draws: torch.Generator,
    ) -> Iterator[torch.Tensor]:
        """Yield the student's loss on images and noisy votes of the stored rounds."""
        for _ in range(self.student_steps):
            places = torch.randint(len(rounds), (len(classes),), generator=draws)
            images = torch.stack([rounds[place][0][n] for n, place in enumerate(places)])
            real = torch.stack([rounds[place][1][n] for n, place in enumerate(places)])
            logits = student(images, classes)[0]
            yield functional.binary_cross_entropy_with_logits(logits, real)


def votes(logits: torch.Tensor, images_per_class: int) -> torch.Tensor:
    """Return votes in {-1, 0, 1} of (T, B) logits, compared with their means over each class.

    A logit with a NaN or infinite mean gives no vote.
    """
    by_class = logits.unflatten(1, (-1, images_per_class))
    away = (by_class - by_class.mean(2, keepdim=True)).flatten(1)
    return away.sign().nan_to_num(0)
