"""Co-Boosting: one-shot federated learning in which images and ensemble improve each other.

Dai, Zhang, Li, Liu, Yang, Han: "Enhancing One-Shot Federated Learning Through Data and Ensemble
Co-Boosting", ICLR 2024, arXiv 2402.15070. Where the paper is silent, this follows its code base
rong-dai/Co-Boosting.

The server holds teachers f_1, ..., f_n. Their ensemble has weights w >= 0 with sum 1 and the logits
A_w(x) = sum_k w_k f_k(x); p_w is its softmax. All weights are equal at the start. A round has four
steps:

1. Images. A new generator and its latent vectors make a batch x for random target classes y. They
   minimise the cross-entropy of *hard samples*, which the ensemble is unsure about, and reward
   disagreement between the ensemble and the student S:
   (1 - p_w(x)[y])^h * CE(A_w(x), y) - beta * KL(A_w(x) || S(x)).
   The first factor is constant in the gradient. The best batch is added to the buffer.
2. Ensemble. The weights move against the sign of the gradient of CE(A_w(x), y) on the buffer,
   w <- w - mu * sign(gradient), are cut off at 0, and are divided by their sum.
   mu falls by a constant factor per round.
3. Diversification. Each batch of the student moves in a random direction of the ensemble's outputs:
   x <- x + epsilon * sign(gradient of u . softmax(A_w(x) / T) in x), u uniform in [-1, 1]^K,
   drawn for each image.
4. Student. It learns from A_w on the diversified images, at temperature T on both sides.

Differences from the code base:
- A new batch moves the weights in its own round. In the code base, it does so one round later, so
  the first round moves no weights.
- The weights are divided by their sum after each step. The code base keeps them in [0, 1] and
  divides only where it mixes logits, so its steps shrink as the sum grows.
- Diversified images stay in [0, 1], and epsilon is in units of 1/255; the code base adds 8/255 to
  normalised pixels.
- The buffer is in memory and holds the images of one run. They are neither shifted nor mirrored by
  default; the code base applies the training transforms of the data set.
- Each round's SGD starts without momentum. The learning rate is constant (in the code base, it
  follows a cosine), and there is no weight decay or gradient clipping.
- A client with several teachers has a weight for each.
- There is no loss on BatchNorm statistics; its weight in the code base is 0.
- Networks start from Xavier initialisation.
- The last round is reported, not the best round on the test split.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch.nn import functional

from fed_dpsd.config import STRICT, Positive
from fed_dpsd.methods.method import (
    Federation,
    PublicContext,
    ReplayBuffer,
    Round,
    State,
    named_tensors,
)
from fed_dpsd.methods.white_box import (
    Ensemble,
    Generating,
    Mean,
    divergence,
    fetch_teachers,
    logits_together,
)
from fed_dpsd.models.augmentation import augment
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.streams import Streams

ADVERSARIAL_TEMPERATURE = 3.0  # on both sides, as in the code base
WEIGHTS = "ensemble.weights"  # their name in a state


class WeightedEnsemble(Ensemble):
    """The weighted mean of many teachers' logits, or of their probabilities.

    Attributes:
        weights: (n,) float32, >= 0 with sum 1; equal at the start.
    """

    weights: torch.Tensor

    def __init__(
        self, teachers: Sequence[Classifier], device: torch.device, mean: Mean = "logits"
    ) -> None:
        super().__init__(teachers, mean)
        self.weights = torch.full((len(teachers),), 1 / len(teachers), device=device)

    def combine(self, logits: torch.Tensor) -> torch.Tensor:
        """Map the teachers' (n, B, K) logits to the ensemble's (B, K)."""
        return logits_together(logits, self.mean, self.weights)


@dataclass(frozen=True, config=STRICT)
class CoBoosting(Generating):
    """Co-Boosting; conf/method/co_boosting.yaml explains the fields.

    The optimisers restart in each round, so a run can be resumed from the student, the ensemble's
    weights and the buffer. The buffer's labels are the (B, K) one-hot target classes.
    """

    hardness: NonNegativeFloat
    weight_step: NonNegativeFloat
    weight_step_decay: Positive
    perturbation: NonNegativeFloat

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Add a batch of hard samples, update the ensemble on the buffer, and distil it."""
        teachers = fetch_teachers(federation, context).values()
        every = [each for own in teachers for each in own]
        ensemble = WeightedEnsemble(every, context.device, self.ensemble)
        student = context.make_student(streams.torch("student"))
        buffer: list[ReplayBuffer] = []
        if resume:
            buffer = resume.load(student=student)
            ensemble.weights = resume.tensors[WEIGHTS].to(context.device)
        for number in range(len(buffer) + 1, context.rounds + 1):
            buffer.append(self.hard_samples(ensemble, student, context, streams, number))
            whole = ReplayBuffer.joined(buffer)
            step = self.weight_step * self.weight_step_decay ** (number - 1)
            self.update_weights(ensemble, whole, step, streams.torch("weights", query_id=number))
            rng = streams.torch("replay", query_id=number)
            loss = self.distil(student, self.diversified_batches(ensemble, whole, rng))
            weights = {WEIGHTS: ensemble.weights.clone()}
            yield Round(
                State(number, named_tensors(student=student) | weights, buffer),
                student,
                {"student_loss": loss, "largest_weight": ensemble.weights.max().item()},
                **ensemble.pop_counts(),
            )

    # --- 1. images ---------------------------------------------------------------------------

    def synthesise(self, *args: Any, **kwargs: Any) -> NDArray[np.uint8]:
        """Return only the images of `hard_samples`, which takes the same arguments."""
        return self.hard_samples(*args, **kwargs).images[:]

    def hard_samples(
        self,
        ensemble: Ensemble,
        student: Classifier,
        context: PublicContext,
        streams: Streams,
        number: int,
    ) -> ReplayBuffer:
        """Train a new generator; return its batch with the smallest loss, and the targets."""
        rng = streams.torch("synthesis", query_id=number)
        count, classes = context.queries_per_round, context.num_classes
        targets = torch.randint(classes, (count,), generator=rng)
        wanted = targets.to(context.device)

        def loss_of(images: torch.Tensor) -> torch.Tensor:
            return self.generator_loss(ensemble(images), student(images), wanted)

        best = self.best_batch(student, context, rng, loss_of)
        no_predictions = np.empty((0, classes), np.float32)
        return ReplayBuffer(best, no_predictions, np.eye(classes, dtype=np.float32)[targets])

    def generator_loss(
        self, ensemble_logits: torch.Tensor, student_logits: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss of step 1 for (B, K) logits and (B,) target classes."""
        one_hot = functional.cross_entropy(ensemble_logits, targets, reduction="none")
        hard = hard_sample_weights(ensemble_logits, targets, self.hardness)
        adversarial = divergence(ensemble_logits, student_logits, ADVERSARIAL_TEMPERATURE)
        return self.one_hot_weight * (hard * one_hot).mean() - self.adversarial_weight * adversarial

    # --- 2. ensemble -------------------------------------------------------------------------

    def update_weights(
        self, ensemble: WeightedEnsemble, buffer: ReplayBuffer, step: float, rng: torch.Generator
    ) -> None:
        """Move the ensemble's weights by `step` on each batch of an epoch over the buffer."""
        if step == 0:
            return
        for images, targets in self.epoch(buffer, ensemble.weights.device, rng):
            with torch.no_grad():  # the weights need no gradient through a teacher
                logits, _ = ensemble.teacher_outputs(images)
            ensemble.weights = moved_weights(ensemble.weights, logits, targets, step, self.ensemble)

    # --- 3. and 4. student -------------------------------------------------------------------

    def diversified_batches(
        self, ensemble: WeightedEnsemble, buffer: ReplayBuffer, rng: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield diversified images of the buffer and the ensemble's logits, epoch by epoch."""
        for images, _ in self.epochs(buffer, ensemble.weights.device, rng):
            diversified = self.diversify(ensemble, images, rng)
            with torch.no_grad():
                answers = ensemble(diversified)
            yield diversified, answers

    def diversify(
        self, ensemble: Ensemble, images: torch.Tensor, rng: torch.Generator
    ) -> torch.Tensor:
        """Move (B, C, H, W) images by at most `perturbation` / 255 per pixel, within [0, 1]."""
        if self.perturbation == 0:
            return images
        images = images.detach().requires_grad_(True)
        probabilities = (ensemble(images) / self.temperature).softmax(1)
        directions = 2 * torch.rand(probabilities.shape, generator=rng) - 1
        score = (directions.to(probabilities) * probabilities).sum()
        (gradient,) = torch.autograd.grad(score, images)
        return (images.detach() + self.perturbation / 255 * gradient.sign()).clamp(0, 1)

    def epoch(
        self, buffer: ReplayBuffer, device: torch.device, rng: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the augmented images and the target classes of each batch, in random order."""
        for images, one_hot in super().epoch(buffer, device, rng):
            moved = augment(images, self.shift, self.flip, rng, margin="constant")
            yield moved, one_hot.argmax(1)


def hard_sample_weights(
    logits: torch.Tensor, targets: torch.Tensor, hardness: float
) -> torch.Tensor:
    """Return the (B,) weights (1 - p)^hardness in [0, 1], which are constant in any gradient.

    p is the probability of the target class, from (B, K) logits and (B,) classes.
    """
    sure = logits.detach().softmax(1).gather(1, targets[:, None])[:, 0]
    return (1 - sure).pow(hardness)


def moved_weights(
    weights: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    step: float,
    mean: Mean,
) -> torch.Tensor:
    """Return (n,) weights after a step against the sign of the cross-entropy's gradient.

    The loss depends only on the ratios of the weights. So a step never increases all weights
    equally, which the division by the sum would undo.

    Args:
        weights: (n,), >= 0 with sum 1, like the returned weights.
        logits: (n, B, K) logits of the n teachers.
        targets: (B,) classes.
        step: distance that each weight moves before the division by the sum, >= 0.
        mean: as in `logits_together`.
    """
    free = weights.detach().clone().requires_grad_(True)
    loss = functional.cross_entropy(logits_together(logits, mean, free), targets)
    (gradient,) = torch.autograd.grad(loss, free)
    moved = (weights - step * gradient.sign()).clamp(min=0)
    return moved / moved.sum() if moved.any() else weights  # a large step may set all to 0
