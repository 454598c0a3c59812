"""What methods share whose server holds the clients' teachers: the ensemble, and its distillation.

The weights leave the clients, so nothing is proven (epsilon inf), unless the teachers were trained
with DP. Every image that a teacher sees at the server is a teacher answer, forward; every image
whose gradient goes back through a teacher is one backward.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fed_dpsd.config import require, require_positive
from fed_dpsd.methods.class_counts import release_class_counts, releases_class_counts
from fed_dpsd.methods.method import Bank, Federation, Plan, Round, Site, State, World, below
from fed_dpsd.models import load_vector
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.inference import IMAGES_AT_ONCE, to_unit
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.mechanism import NonPrivate, PostProcessing
from fed_dpsd.privacy.training import TrainingMechanism
from fed_dpsd.protocol import Answer, Ask, ProtocolError, Refusal
from fed_dpsd.streams import Streams

WEIGHTS_LEAVE = NonPrivate("the teachers' own weights leave the clients")


def weights_stage(world: World) -> Stage:
    """What the weights of a client's teachers cost it: for DP teachers, their training."""
    private = isinstance(world.mechanism, TrainingMechanism)
    return Stage(world.mechanism if private else WEIGHTS_LEAVE, 1, 1)


def release_weights(ask: Ask, site: Site) -> Answer:
    """A client's answer to an ask for its teachers' weights."""
    mechanism = site.pay_for_training()
    if not isinstance(mechanism, PostProcessing):
        mechanism = WEIGHTS_LEAVE
    return site.release(mechanism, site.sensitive_weights(), ask)


def fetch_teachers(federation: Federation, world: World) -> dict[int, list[Classifier]]:
    """The teachers of every client that answers, from the weights that it releases.

    Raises:
        ProtocolError: no client answers, or weights do not fit a client's architecture.
    """
    answers = federation.each(world.ask("weights"))
    given = {client: each for client, each in answers.items() if isinstance(each, Answer)}
    if not given:
        reasons = {each.reason for each in answers.values() if isinstance(each, Refusal)}
        raise ProtocolError(f"no client answers: {sorted(reasons)}")
    return {client: read_teachers(each, world, client) for client, each in given.items()}


def read_teachers(answer: Answer, world: World, client: int) -> list[Classifier]:
    """The teachers in one client's released weights, ready to answer."""
    teachers = []
    for vector in np.array_split(answer.values[:, 0].astype(np.float32), answer.teachers):
        teacher = world.make_teacher(client)
        try:
            load_vector(teacher, torch.from_numpy(vector))
        except ValueError as error:
            raise ProtocolError(f"client {client} sent {error}") from None
        teachers.append(teacher.eval().requires_grad_(False))
    return teachers


class Ensemble(nn.Module):
    """The mean of many teachers' logits.

    Attributes:
        forward_answers: images times teachers since it was made.
        backward_answers: of these, those that a gradient went back through.
    """

    def __init__(self, teachers: Sequence[Classifier]) -> None:
        super().__init__()
        self.teachers = nn.ModuleList(teachers)
        self.forward_answers = self.backward_answers = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) images in [0, 1] to (B, K) logits."""
        return self.logits_and_features(images)[0]

    def logits_and_features(self, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(B, K) mean logits, and each teacher's (B, F) features."""
        asked = len(images) * len(self.teachers)
        self.forward_answers += asked
        features = [teacher.features(images) for teacher in self.teachers]
        each = zip(self.teachers, features, strict=True)
        logits = torch.stack([teacher.classifier(own) for teacher, own in each]).mean(0)
        if logits.requires_grad:

            def count(_: torch.Tensor) -> None:
                self.backward_answers += asked

            logits.register_hook(count)
        return logits, features


class BatchStatistics:
    """How far a batch's statistics are from those that the teachers' BatchNorm layers keep.

    The feature regulariser of Yin et al.: "Dreaming to Distill", arXiv 1912.08795; the sum over all
    layers of all teachers. Zero where no teacher has such a layer.
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
        self._distances.append((mean - layer.running_mean).norm())
        self._distances.append((variance - layer.running_var).norm())

    def loss(self) -> torch.Tensor:
        """Of the last batch that went through the ensemble."""
        distances, self._distances = self._distances, []
        return torch.stack(distances).sum() if distances else torch.zeros(())

    def forget(self) -> None:
        """Stop looking at the ensemble's batches."""
        for hook in self._hooks:
            hook.remove()


@dataclass(frozen=True)
class WhiteBox(ABC):
    """A method whose clients send their teachers' weights, once."""

    num_clients: ClassVar[int | None] = None
    mechanisms: ClassVar[tuple[str, ...] | None] = ("non_private", "dp_teacher")
    averages: ClassVar[bool] = False

    def plan(self, world: World) -> Plan:
        """The weights, and the class counts that a private training releases with them."""
        private = isinstance(world.mechanism, TrainingMechanism)
        return Plan((weights_stage(world),), private and releases_class_counts(world.mechanism))

    def client(self, ask: Ask, site: Site) -> Answer | Refusal:
        """The weights, and the class counts that a private training released with them."""
        if ask.kind == "counts" and isinstance(site.pay_for_training(), PostProcessing):
            return release_class_counts(ask, site)
        if ask.kind != "weights":
            raise ProtocolError(f"method {type(self).__name__} does not answer {ask.kind!r}")
        return release_weights(ask, site)

    @abstractmethod
    def server(
        self, federation: Federation, world: World, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """The algorithm box from top to bottom, one yield a round."""


@dataclass(frozen=True)
class Distilling(WhiteBox):
    """Each round: a batch of new images, asked once, then an epoch over all images so far.

    Subclasses say where images come from. A round's optimiser starts anew, so that a run can be
    resumed from the student's weights. An image's answer is kept; the papers' code bases ask the
    teachers again whenever the student sees it.

    Args:
        student_learning_rate: of SGD with momentum 0.9, > 0.
        batch_size: >= 1.
        temperature: of both sides of the divergence, > 0.
        student_epochs: over the bank, each round, >= 1.
    """

    student_learning_rate: float
    batch_size: int
    temperature: float
    student_epochs: int

    def __post_init__(self) -> None:
        require(self, batch_size=1, student_epochs=1)
        require_positive(self, "student_learning_rate", "temperature")

    @abstractmethod
    def synthesise(
        self, ensemble: Ensemble, student: Classifier, world: World, streams: Streams, number: int
    ) -> NDArray[np.uint8]:
        """(Q, C, H, W) new images."""

    def start(self, ensemble: Ensemble, world: World, streams: Streams) -> Classifier:
        """The student that the first round begins with."""
        return world.make_student(streams.torch("student"))

    def server(
        self, federation: Federation, world: World, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Synthesise, keep, distil."""
        teachers = fetch_teachers(federation, world)
        ensemble = Ensemble([teacher for own in teachers.values() for teacher in own])
        student = self.start(ensemble, world, streams)
        bank: list[Bank] = []
        if resume is not None:
            student.load_state_dict(below("student", resume.tensors))
            bank = list(resume.bank)
        for number in range(len(bank) + 1, world.rounds + 1):
            before = ensemble.forward_answers, ensemble.backward_answers
            images = self.synthesise(ensemble, student, world, streams, number)
            logits = answers(ensemble, images, world.device)
            nothing = np.empty((0, world.num_classes), np.float32)
            bank.append(Bank(images, nothing, logits))
            rng = streams.torch("replay", query_id=number)
            loss = self.distil(student, bank, world.device, rng)
            tensors = {f"student.{name}": t.clone() for name, t in student.state_dict().items()}
            yield Round(
                State(number, tensors, bank),
                student,
                {"student_loss": loss},
                forward_answers=ensemble.forward_answers - before[0],
                backward_answers=ensemble.backward_answers - before[1],
            )

    def distil(
        self, student: Classifier, bank: Sequence[Bank], device: torch.device, rng: torch.Generator
    ) -> float:
        """`student_epochs` over the bank; returns the last batch's loss."""
        images = np.concatenate([part.images for part in bank])
        logits = torch.from_numpy(np.concatenate([part.labels for part in bank]))
        rate = self.student_learning_rate
        optimiser = torch.optim.SGD(student.parameters(), rate, momentum=0.9, foreach=True)
        student.train()
        for _ in range(self.student_epochs):
            order = torch.randperm(len(images), generator=rng)
            for chosen in order.split(self.batch_size):
                given = student(to_unit(images[chosen.numpy()], device))
                loss = divergence(logits[chosen].to(device), given, self.temperature)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        return loss.item()


def divergence(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """Mean KL(teacher || student) of (B, K) logits at a temperature, times its square.

    Hinton, Vinyals, Dean: "Distilling the Knowledge in a Neural Network", arXiv 1503.02531.
    """
    wanted, given = teacher / temperature, student / temperature
    loss = functional.kl_div(
        given.log_softmax(1), wanted.log_softmax(1), reduction="batchmean", log_target=True
    )
    return temperature**2 * loss


@torch.no_grad()
def answers(
    ensemble: Ensemble, images: NDArray[np.uint8], device: torch.device
) -> NDArray[np.float32]:
    """(B, K) float32 logits of the ensemble on (B, C, H, W) uint8 images."""
    parts = [
        ensemble(to_unit(images[start : start + IMAGES_AT_ONCE], device)).cpu().numpy()
        for start in range(0, len(images), IMAGES_AT_ONCE)
    ]
    return np.concatenate(parts)


def to_bytes(images: torch.Tensor) -> NDArray[np.uint8]:
    """Float pixels in [0, 1] to the bytes nearest to them."""
    return (images.detach() * 255).round().to(torch.uint8).cpu().numpy()
