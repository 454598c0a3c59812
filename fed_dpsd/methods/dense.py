"""DENSE: data-free one-shot federated learning.

Zhang et al.: "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022, arXiv 2112.12371,
Algorithm 1, and its code base zj-jayzhang/DENSE where the paper is silent.

Each round a generator is drawn anew and trained, together with its latent vectors, towards images
that the ensemble is sure of, that have the statistics of the teachers' BatchNorm layers, and that
the student is wrong about. Its best batch joins the bank, and the student takes an epoch over it.

Unlike the code base: the bank lies in memory and holds one run's images; an image's answer is kept
instead of asked again, so the student sees no image flipped; each round's SGD starts without
momentum; networks start from Xavier's draws and the generator normalises before its sigmoid
(fed_dpsd/models/generators.py); the student's BatchNorm keeps its statistics while images are made;
and what is reported is the last round, not the best one on the test split.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fed_dpsd.config import require, require_positive
from fed_dpsd.methods.method import World
from fed_dpsd.methods.white_box import BatchStatistics, Distilling, Ensemble, to_bytes
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.streams import Streams


@dataclass(frozen=True)
class DENSE(Distilling):
    """Algorithm 1; the fields are conf/method/dense.yaml."""

    latent_size: int
    generator_steps: int
    generator_learning_rate: float
    batch_norm_weight: float
    one_hot_weight: float
    adversarial_weight: float
    shift: int
    flip: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, latent_size=1, generator_steps=1, shift=0)
        require(self, batch_norm_weight=0, one_hot_weight=0, adversarial_weight=0)
        require_positive(self, "generator_learning_rate")

    def synthesise(
        self, ensemble: Ensemble, student: Classifier, world: World, streams: Streams, number: int
    ) -> NDArray[np.uint8]:
        """Data generation: the batch of least loss of a generator that starts from nothing."""
        rng = streams.torch("synthesis", query_id=number)
        count = world.queries_per_round
        targets = torch.randint(world.num_classes, (count,), generator=rng).sort().values
        generator = world.make_generator(self.latent_size, rng)
        latents = torch.randn((count, self.latent_size), generator=rng).to(world.device)
        latents.requires_grad_(True)
        optimiser = torch.optim.Adam(
            [*generator.parameters(), latents], self.generator_learning_rate, (0.5, 0.999)
        )
        statistics = BatchStatistics(ensemble)
        student.eval().requires_grad_(False)
        least, best = float("inf"), None
        for _ in range(self.generator_steps):
            images = generator(latents)
            seen = augmented(images, self.shift, self.flip, rng)
            loss = self.loss(ensemble, student, seen, targets.to(world.device), statistics)
            if best is None or loss.item() < least:
                least, best = loss.item(), to_bytes(images)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        student.requires_grad_(True)
        statistics.forget()
        assert best is not None
        return best

    def loss(
        self,
        ensemble: Ensemble,
        student: Classifier,
        images: torch.Tensor,
        targets: torch.Tensor,
        statistics: BatchStatistics,
    ) -> torch.Tensor:
        """Similarity (cross-entropy), stability (BatchNorm) and transferability (disagreement)."""
        teacher, given = ensemble(images), student(images)
        apart = functional.kl_div(
            given.log_softmax(1), teacher.log_softmax(1), reduction="none", log_target=True
        ).sum(1)
        disagree = teacher.argmax(1) != given.argmax(1)
        return (
            self.batch_norm_weight * statistics.loss()
            + self.one_hot_weight * functional.cross_entropy(teacher, targets)
            - self.adversarial_weight * (apart * disagree).mean()
        )


def augmented(images: torch.Tensor, shift: int, flip: bool, rng: torch.Generator) -> torch.Tensor:
    """(B, C, H, W) images, each moved by up to `shift` pixels (zeros come in), perhaps mirrored."""
    if not (shift or flip):
        return images
    count, _, height, width = images.shape
    down, right = torch.randint(0, 2 * shift + 1, (2, count, 1), generator=rng)
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    if flip:
        turned = torch.randint(0, 2, (count, 1), generator=rng).bool()
        columns = torch.where(turned, columns.flip(1), columns)
    padded = functional.pad(images, (shift,) * 4).movedim(1, 3)
    image = torch.arange(count)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None]].movedim(3, 1)
