"""FedADI: images optimised pixel by pixel against the ensemble, and distilled.

Yin et al.: "Dreaming to Distill: Data-free Knowledge Transfer via DeepInversion", CVPR 2020, arXiv
1912.08795: Adaptive DeepInversion, applied to the clients' ensemble as in DENSE's Table 1. Where
the paper is silent, this follows its code base NVlabs/DeepInversion.

Differences from the code base:
- Images start around grey and stay in [0, 1].
- The images of the last step are kept (as bytes), not those with the smallest loss.
- The first BatchNorm layer has the same weight as the others.
"""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch.nn import functional

from fed_dpsd.config import STRICT, Positive
from fed_dpsd.methods.method import PublicContext
from fed_dpsd.methods.white_box import BatchStatistics, Distilling, Ensemble
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.divergence import descend, rates_of
from fed_dpsd.models.inference import to_bytes
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.streams import Streams

COMPETITION_TEMPERATURE = 3.0


@dataclass(frozen=True, config=STRICT)
class FedADI(Distilling):
    """Adaptive DeepInversion; conf/method/fedadi.yaml explains the fields."""

    follows_gradients: ClassVar[bool] = True
    pixel_steps: PositiveInt
    pixel_learning_rate: Positive
    total_variation_weight: NonNegativeFloat
    norm_weight: NonNegativeFloat
    batch_norm_weight: NonNegativeFloat
    competition_weight: NonNegativeFloat
    shift: NonNegativeInt

    def synthesise(
        self,
        ensemble: Ensemble,
        student: Classifier,
        context: PublicContext,
        streams: Streams,
        number: int,
    ) -> NDArray[np.uint8]:
        """Draw noise and move it towards random classes with Adam."""
        rng = streams.torch("synthesis", query_id=number)
        shape = (context.queries_per_round, *context.image_shape)
        targets = torch.randint(context.num_classes, shape[:1], generator=rng).to(context.device)
        images = (0.5 + 0.25 * torch.randn(shape, generator=rng)).clamp(0, 1).to(context.device)
        images.requires_grad_(True)
        optimiser = Adam([images], self.pixel_learning_rate, (0.5, 0.9))
        statistics = BatchStatistics(ensemble)
        student.eval().requires_grad_(False)

        def losses() -> Iterator[torch.Tensor]:
            for _ in range(self.pixel_steps):
                moves = torch.randint(-self.shift, self.shift + 1, (2,), generator=rng).tolist()
                rolled = images.roll(moves, (2, 3))
                yield self.loss(ensemble, student, rolled, targets, statistics)
                with torch.no_grad():
                    images.clamp_(0, 1)  # after the step

        descend(optimiser, losses(), "the images", rates_of(self, "pixel_learning_rate"))
        student.requires_grad_(True)
        statistics.close()
        return to_bytes(images)

    def loss(
        self,
        ensemble: Ensemble,
        student: Classifier,
        images: torch.Tensor,
        targets: torch.Tensor,
        statistics: BatchStatistics,
    ) -> torch.Tensor:
        """Return the weighted sum of the losses of a batch.

        These are cross-entropy, image priors, feature statistics and competition with the student.
        """
        teacher_logits, student_logits = ensemble(images), student(images)
        variation = (
            (images[:, :, 1:] - images[:, :, :-1]).norm()
            + (images[:, :, :, 1:] - images[:, :, :, :-1]).norm()
            + (images[:, :, 1:, 1:] - images[:, :, :-1, :-1]).norm()
            + (images[:, :, 1:, :-1] - images[:, :, :-1, 1:]).norm()
        )
        softened = (
            logits.div(COMPETITION_TEMPERATURE).softmax(1)
            for logits in (teacher_logits, student_logits)
        )
        competition = 1 - jensen_shannon(*softened)
        return (
            functional.cross_entropy(teacher_logits, targets)
            + self.total_variation_weight * variation
            + self.norm_weight * images.norm()
            + self.batch_norm_weight * statistics.loss()
            + self.competition_weight * competition
        )


def jensen_shannon(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the mean Jensen-Shannon divergence of (B, K) probabilities, in nats."""
    middle = (one + other) / 2

    def excess(p: torch.Tensor) -> torch.Tensor:
        return (p * (p.clamp_min(1e-8).log() - middle.clamp_min(1e-8).log())).sum(1)

    return ((excess(one) + excess(other)) / 2).mean()
