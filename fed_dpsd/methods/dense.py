"""DENSE: data-free one-shot federated learning.

Zhang et al.: "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022, arXiv 2112.12371,
Algorithm 1. Where the paper is silent, this follows its code base zj-jayzhang/DENSE.

Each round creates a new generator and trains it together with its latent vectors. The ensemble
should be confident about the images, the student should be wrong about them, and they should match
the statistics of the teachers' BatchNorm layers. The best batch is added to the buffer, on which
the student then trains for an epoch.

Differences from the code base:
- The buffer is in memory and holds the images of one run.
- By default, the ensemble answers an image once, and the answer is stored, so the student sees no
  flipped images. `answer_again` does as the code base does.
- Each round's SGD starts without momentum.
- Networks start from Xavier initialisation.
- BatchNorm statistics count, as in the paper: the code base finds no BatchNorm layers, because it
  keeps the teachers in a list.
- The student's BatchNorm keeps its statistics while images are synthesised; in the code base, only
  from the second round on.
- The last round is reported, not the best round on the test split.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch.nn import functional

from fed_dpsd.config import STRICT
from fed_dpsd.methods.method import PublicContext
from fed_dpsd.methods.white_box import BatchStatistics, Ensemble, Generating
from fed_dpsd.models.augmentation import augment
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.streams import Streams


@dataclass(frozen=True, config=STRICT)
class DENSE(Generating):
    """DENSE, Algorithm 1; conf/method/dense.yaml explains the fields."""

    batch_norm_weight: NonNegativeFloat
    answer_again: bool

    def __post_init__(self) -> None:
        if self.answer_again and not (self.shift or self.flip):
            raise ValueError(
                "answer_again=true answers moved images, and none moves; use shift=4 or flip=true"
            )

    def labels_to_store(
        self, ensemble: Ensemble, images: NDArray[np.uint8], context: PublicContext
    ) -> NDArray[np.float32]:
        """With `answer_again`, store zeros: these answers are replaced before they are read."""
        if self.answer_again:
            return np.zeros((len(images), context.num_classes), np.float32)
        return super().labels_to_store(ensemble, images, context)

    def student_batches(
        self,
        ensemble: Ensemble,
        samples: Iterator[tuple[torch.Tensor, torch.Tensor]],
        rng: torch.Generator,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """With `answer_again`, move each batch and return the ensemble's answers to it."""
        for images, answers in samples:
            if self.answer_again:
                images = augment(images, self.shift, self.flip, rng, margin="constant")
                with torch.no_grad():
                    answers = ensemble(images)
            yield images, answers

    def synthesise(
        self,
        ensemble: Ensemble,
        student: Classifier,
        context: PublicContext,
        streams: Streams,
        number: int,
    ) -> NDArray[np.uint8]:
        """Train a new generator and return its batch with the smallest loss."""
        rng = streams.torch("synthesis", query_id=number)
        count = context.queries_per_round
        targets = torch.randint(context.num_classes, (count,), generator=rng).sort().values
        targets = targets.to(context.device)
        statistics = BatchStatistics(ensemble)

        def loss_of(images: torch.Tensor) -> torch.Tensor:
            seen = augment(images, self.shift, self.flip, rng, margin="constant")
            return self.loss(ensemble, student, seen, targets, statistics)

        best = self.best_batch(student, context, rng, loss_of)
        statistics.close()
        return best

    def loss(
        self,
        ensemble: Ensemble,
        student: Classifier,
        images: torch.Tensor,
        targets: torch.Tensor,
        statistics: BatchStatistics,
    ) -> torch.Tensor:
        """Return the weighted sum of the similarity, stability and transferability losses.

        These are cross-entropy, BatchNorm statistics and disagreement with the student.
        """
        teacher_logits, student_logits = ensemble(images), student(images)
        divergence = functional.kl_div(
            student_logits.log_softmax(1),
            teacher_logits.log_softmax(1),
            reduction="none",
            log_target=True,
        ).sum(1)
        disagree = teacher_logits.argmax(1) != student_logits.argmax(1)
        return (
            self.batch_norm_weight * statistics.loss() / len(ensemble.teachers)
            + self.one_hot_weight * functional.cross_entropy(teacher_logits, targets)
            - self.adversarial_weight * (divergence * disagree).mean()
        )
