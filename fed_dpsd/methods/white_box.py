"""Shared parts of white-box methods, in which the server receives and distils the teachers.

The weights leave the clients, so nothing is proven (epsilon inf) unless the teachers were trained
with DP. The key `answers` has no effect. At the server, each image passed through a teacher counts
as a forward answer, and each gradient through a teacher as a backward answer.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.nn import functional

from fed_dpsd.config import STRICT, Config, Positive
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.losses import SMALLEST_PROBABILITY
from fed_dpsd.methods.method import (
    Federation,
    Method,
    PublicContext,
    ReplayBuffer,
    Round,
    Site,
    State,
    nobody_answers,
)
from fed_dpsd.models import load_vector
from fed_dpsd.models.classifiers import FIXED, Classifier
from fed_dpsd.models.divergence import descend, rates_of
from fed_dpsd.models.inference import batches, to_bytes, to_unit
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.mechanism import Mechanism, Weights
from fed_dpsd.privacy.optimisers import SGD, Adam
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.training import Training
from fed_dpsd.protocol import Refusal, Request, Response
from fed_dpsd.streams import Streams

WEIGHTS = Stage(Weights(), 1, 1)
Mean = Literal["logits", "probabilities"]  # of which an ensemble is the mean


def release_weights(request: Request, site: Site) -> Response:
    """Release the weights of a client's teachers."""
    return site.release(Weights(), site.sensitive_weights(), request)


def fetch_teachers(federation: Federation, context: PublicContext) -> dict[int, list[Classifier]]:
    """Return the teachers of every client that answers, from the released weights.

    Raises:
        UserError: no client answers.
        ProtocolError: weights do not match a client's architecture.
    """
    replies = federation.each(context.request("weights"))
    if not replies.answers:
        raise nobody_answers(replies.refused)
    return {client: read_teachers(own, context, client) for client, own in replies.answers.items()}


def read_teachers(response: Response, context: PublicContext, client: int) -> list[Classifier]:
    """Return the teachers in one client's released weights, in evaluation mode.

    Raises:
        ProtocolError: the weights do not match the client's architecture.
    """
    teachers = []
    for vector in np.array_split(response.values[:, 0].astype(np.float32), response.teachers):
        teacher = context.make_teacher(client)
        try:
            load_vector(teacher, torch.from_numpy(vector))
        except ValueError as error:
            raise ProtocolError(f"client {client} sent {error}") from None
        teachers.append(teacher.eval().requires_grad_(False))
    return teachers


def logits_together(
    logits: torch.Tensor, mean: Mean, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the (B, K) logits of n teachers together, from (n, B, K) logits.

    They are the mean of the logits, or the logarithms of the mean probabilities. (n,) weights of
    any sum > 0 weight the teachers; otherwise all count equally.
    """
    values = logits if mean == "logits" else logits.softmax(2)
    if weights is None:
        together = values.mean(0)
    else:
        together = torch.einsum("n,nbk->bk", weights / weights.sum(), values)
    return together if mean == "logits" else together.clamp_min(SMALLEST_PROBABILITY).log()


class Ensemble(nn.Module):
    """The mean of many teachers' logits, or of their probabilities.

    Args:
        teachers: the networks.
        mean: "logits", or "probabilities", of which a teacher that is wrong and sure moves the mean
            less. The ensemble's logits are then the logarithms of the mean probabilities.

    Attributes:
        forward_answers: number of images times teachers since the last `pop_counts`.
        backward_answers: how many of these had a gradient through the teacher.
    """

    def __init__(self, teachers: Sequence[Classifier], mean: Mean = "logits") -> None:
        super().__init__()
        self.mean = mean
        self.teachers = nn.ModuleList(teachers)
        self._each = list(teachers)
        self.forward_answers = self.backward_answers = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (B, C, H, W) images in [0, 1] to (B, K) logits."""
        return self.logits_and_features(images)[0]

    def logits_and_features(self, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the (B, K) mean logits, and each teacher's (B, F) features."""
        logits, features = self.teacher_outputs(images)
        return self.combine(logits), features

    def teacher_outputs(self, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the n teachers' (n, B, K) logits and (B, F) features; count the answers."""
        num_answers = len(images) * len(self.teachers)
        self.forward_answers += num_answers
        features = [teacher.features(images) for teacher in self._each]
        pairs = zip(self._each, features, strict=True)
        logits = torch.stack([teacher.classifier(own) for teacher, own in pairs])
        if logits.requires_grad:

            def count(_: torch.Tensor) -> None:
                self.backward_answers += num_answers

            logits.register_hook(count)
        return logits, features

    def combine(self, logits: torch.Tensor) -> torch.Tensor:
        """Map the teachers' (n, B, K) logits to the ensemble's (B, K)."""
        return logits_together(logits, self.mean)

    def pop_counts(self) -> dict[str, Any]:
        """Return and reset the counts of answers, by their names in `Round`."""
        counts = {name: getattr(self, name) for name in ("forward_answers", "backward_answers")}
        self.forward_answers = self.backward_answers = 0
        return counts


def fetch_ensemble(
    federation: Federation, context: PublicContext, mean: Mean = "logits"
) -> Ensemble:
    """Return the ensemble of all clients' teachers, with the mean of `Ensemble`.

    Raises:
        UserError: as for `fetch_teachers`.
        ProtocolError: as for `fetch_teachers`.
    """
    teachers = fetch_teachers(federation, context)
    return Ensemble([teacher for own in teachers.values() for teacher in own], mean)


class BatchStatistics:
    """Distance of a batch's statistics from the statistics in the teachers' BatchNorm layers.

    This is the feature regulariser of Yin et al.: "Dreaming to Distill", arXiv 1912.08795, summed
    over all BatchNorm layers of all teachers; 0 if there are none.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        self._distances: list[torch.Tensor] = []
        self._hooks = [
            layer.register_forward_hook(self._compare)
            for layer in ensemble.modules()
            if isinstance(layer, nn.BatchNorm2d)
        ]

    def _compare(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
        if not inputs[0].requires_grad:
            return
        pixels = inputs[0].movedim(1, 3).flatten(0, 2)
        mean = pixels.mean(0)
        variance = pixels.square().mean(0) - mean.square()  # var_mean takes twice as long
        self._distances.append((mean - layer.get_buffer("running_mean")).norm())
        self._distances.append((variance - layer.get_buffer("running_var")).norm())

    def loss(self) -> torch.Tensor:
        """Return the distance of the last batch that went through the ensemble."""
        distances, self._distances = self._distances, []
        return torch.stack(distances).sum() if distances else torch.zeros(())

    def close(self) -> None:
        """Stop observing the ensemble's batches."""
        for hook in self._hooks:
            hook.remove()


@dataclass(frozen=True, config=STRICT)
class WhiteBox(Method):
    """A method in which clients send their teachers' weights once.

    Attributes:
        follows_gradients: whether the method makes images by following gradients through the
            teachers.
    """

    takes_gradients: ClassVar[bool] = True  # asks for no answers
    follows_gradients: ClassVar[bool] = False

    def warnings(self, config: Config, training: Training, answers: Mechanism) -> list[str]:
        """Also warn about teachers with useless gradients: linear models on fixed features."""
        found = super().warnings(config, training, answers)
        names = {config.architecture(client) for client in range(config.num_clients)}
        if self.follows_gradients and (fixed := sorted(names & set(FIXED))):
            found.append(
                f"method={self.name} with model.teacher={fixed[0]}: it makes images by following "
                "gradients through the teachers, which is useless for a linear model on fixed "
                "features, so expect a student near chance; use training=plain model=cnn "
                "model.teacher=cnn_bn model.student=cnn_bn"
            )
        return found

    def plan(self, context: PublicContext) -> Plan:
        """Return the stage of weights; these methods use no class counts."""
        return Plan(context.training, (WEIGHTS,))

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Release the weights."""
        if request.kind != "weights":
            raise ProtocolError(f"method {type(self).__name__} does not answer {request.kind!r}")
        return release_weights(request, site)


@dataclass(frozen=True, config=STRICT)
class Discriminating(Method):
    """A method with generators that are trained against the student or the teacher.

    Args:
        discriminator: "student" or "teacher"; with "teacher", the weights leave the client, so
            nothing is proven unless the teacher was trained with DP.
    """

    discriminator: Literal["student", "teacher"]

    def plan(self, context: PublicContext) -> Plan:
        """Return the method's stages; with the teacher as discriminator, its weights come first."""
        plan, first = super().plan(context), (WEIGHTS,) * (self.discriminator == "teacher")
        return replace(plan, stages=(*first, *plan.stages))

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Also release weights, if the teacher is the discriminator."""
        if request.kind == "weights" and self.discriminator == "teacher":
            return release_weights(request, site)
        return super().client(request, site)

    def fetch_discriminator(
        self, federation: Federation, context: PublicContext
    ) -> Classifier | None:
        """Return the teacher if it is the discriminator, otherwise None."""
        if self.discriminator == "student":
            return None
        (teacher, *_) = fetch_teachers(federation, context)[0]
        return teacher


@dataclass(frozen=True, config=STRICT)
class Distilling(WhiteBox):
    """A method that adds a batch of new images in each round, then distils on all images so far.

    Subclasses define how the images are made. The optimiser restarts in each round, so a run can be
    resumed from the student's weights and the buffer. The ensemble answers each image once, and the
    answer is stored; the papers' code bases query it again whenever the student sees the image.

    Args:
        student_learning_rate: learning rate of SGD with momentum 0.9, > 0.
        batch_size: images per step of the student, >= 1.
        temperature: temperature on both sides of the divergence, > 0.
        student_epochs: epochs over the buffer in each round, >= 1.
        ensemble: "logits" or "probabilities": the ensemble is their mean.
    """

    student_learning_rate: Positive
    batch_size: PositiveInt
    temperature: Positive
    student_epochs: PositiveInt
    ensemble: Mean

    @abstractmethod
    def synthesise(
        self,
        ensemble: Ensemble,
        student: Classifier,
        context: PublicContext,
        streams: Streams,
        number: int,
    ) -> NDArray[np.uint8]:
        """Return (Q, C, H, W) new images."""

    def labels_to_store(
        self, ensemble: Ensemble, images: NDArray[np.uint8], context: PublicContext
    ) -> NDArray[np.float32]:
        """Return the (Q, K) answers to store with new images."""
        return ensemble_logits(ensemble, images, context.device)

    def student_batches(
        self,
        ensemble: Ensemble,
        samples: Iterator[tuple[torch.Tensor, torch.Tensor]],
        rng: torch.Generator,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the student's batches, from the buffer's images and their stored answers."""
        return samples

    def initial_student(
        self, ensemble: Ensemble, context: PublicContext, streams: Streams
    ) -> Classifier:
        """Return the student that the first round starts with."""
        return context.make_student(streams.torch("student"))

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Synthesise images, add them to the buffer with their answers, and distil the buffer."""
        ensemble = fetch_ensemble(federation, context, self.ensemble)
        student = self.initial_student(ensemble, context, streams)
        buffer = resume.load(student=student) if resume else []
        for number in range(len(buffer) + 1, context.rounds + 1):
            images = self.synthesise(ensemble, student, context, streams, number)
            wanted = context.queries_per_round, *context.image_shape
            if images.dtype != np.uint8 or images.shape != wanted:  # a plug-in's
                raise UserError(
                    f"{type(self).__name__}.synthesise: images are {images.dtype} of shape "
                    f"{images.shape}; return uint8 of shape {wanted}"
                )
            logits = self.labels_to_store(ensemble, images, context)
            no_predictions = np.empty((0, context.num_classes), np.float32)
            buffer.append(ReplayBuffer(images, no_predictions, logits))
            rng = streams.torch("replay", query_id=number)
            samples = self.epochs(ReplayBuffer.joined(buffer), context.device, rng)
            loss = self.distil(student, self.student_batches(ensemble, samples, rng))
            yield Round(
                State.of(number, buffer, student=student),
                student,
                {"student_loss": loss},
                **ensemble.pop_counts(),
            )

    def epoch(
        self, buffer: ReplayBuffer, device: torch.device, rng: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the images and the labels of each batch, in random order."""
        labels = torch.from_numpy(buffer.labels)
        for chosen in torch.randperm(len(labels), generator=rng).split(self.batch_size):
            yield to_unit(buffer.images[chosen.numpy()], device), labels[chosen].to(device)

    def epochs(
        self, buffer: ReplayBuffer, device: torch.device, rng: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of `student_epochs` epochs."""
        for _ in range(self.student_epochs):
            yield from self.epoch(buffer, device, rng)

    def distil(
        self, student: Classifier, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> float:
        """Train on batches of images and the ensemble's logits; return the last batch's loss."""
        rate = self.student_learning_rate
        optimiser = SGD(student.parameters(), rate, momentum=0.9, foreach=True)
        student.train()
        losses = (divergence(own, student(seen), self.temperature) for seen, own in batches)
        rates = rates_of(self, "student_learning_rate")
        return descend(optimiser, losses, "the student", rates).item()


@dataclass(frozen=True, config=STRICT)
class Generating(Distilling):
    """A method that trains a new generator for each round's batch of hard samples.

    Args:
        latent_size: length of a latent vector, >= 1.
        generator_steps: steps of a generator and its latent vectors, >= 1.
        generator_learning_rate: learning rate of Adam, > 0.
        one_hot_weight: weight of the ensemble's confidence, >= 0.
        adversarial_weight: weight of the student's disagreement, >= 0.
        shift: largest shift of an image, in pixels, >= 0.
        flip: whether about half of the images are mirrored.
    """

    follows_gradients: ClassVar[bool] = True
    latent_size: PositiveInt
    generator_steps: PositiveInt
    generator_learning_rate: Positive
    one_hot_weight: NonNegativeFloat
    adversarial_weight: NonNegativeFloat
    shift: NonNegativeInt
    flip: bool

    def best_batch(
        self,
        student: Classifier,
        context: PublicContext,
        rng: torch.Generator,
        loss_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> NDArray[np.uint8]:
        """Train a new generator and its latent vectors; return the batch with the smallest loss.

        Args:
            student: the student, which is not trained here.
            context: the public facts.
            rng: random stream for the generator and its latent vectors.
            loss_of: maps a (Q, C, H, W) batch in [0, 1] to its loss.

        Returns:
            (Q, C, H, W) uint8.
        """
        generator = context.make_generator(self.latent_size, rng, normalised=False)
        shape = context.queries_per_round, self.latent_size
        latents = torch.randn(shape, generator=rng).to(context.device).requires_grad_(True)
        learnt, rate = [*generator.parameters(), latents], self.generator_learning_rate
        optimiser = Adam(learnt, rate, (0.5, 0.999))
        student.eval().requires_grad_(False)
        least, best = float("inf"), np.empty(0, np.uint8)

        def losses() -> Iterator[torch.Tensor]:
            nonlocal least, best
            for step in range(self.generator_steps):
                images = generator(latents)
                loss = loss_of(images)
                if step == 0 or loss.item() < least:
                    least, best = loss.item(), to_bytes(images)
                yield loss

        descend(optimiser, losses(), "the generator", rates_of(self, "generator_learning_rate"))
        student.requires_grad_(True)
        return best


def divergence(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the mean KL(teacher || student) of (B, K) logits at temperature T, times T^2.

    Hinton, Vinyals, Dean: "Distilling the Knowledge in a Neural Network", arXiv 1503.02531.
    """
    loss = functional.kl_div(
        (student / temperature).log_softmax(1),
        (teacher / temperature).log_softmax(1),
        reduction="batchmean",
        log_target=True,
    )
    return temperature**2 * loss


@torch.no_grad()
def ensemble_logits(
    ensemble: Ensemble, images: NDArray[np.uint8], device: torch.device
) -> NDArray[np.float32]:
    """Return the ensemble's (B, K) float32 logits on (B, C, H, W) uint8 images."""
    return np.concatenate([ensemble(batch).cpu().numpy() for batch in batches(images, device)])
