"""DP-DFD: a pretrained generator, then stages of selective randomised responses and learning.

Liu, Lu, Wang, Zhang, Zeng, Qian, Ge: "Privacy-Preserving Student Learning with Differentially
Private Data-Free Distillation", arXiv 2409.12384, Algorithm 1.

The teacher is the fixed discriminator of the generator, so its weights leave the client. Nothing is
proven of the images then, or of what learns from them, however the labels are randomised. With
`discriminator="student"` the same stages depend on private data through the responses alone, and
their epsilon is finite.

We had the paper's text about the algorithm, and not the box itself. So comments number the steps of
that text, and docs/paper_map.md lists what it leaves open.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from fed_dpsd import losses
from fed_dpsd.config import require, require_positive
from fed_dpsd.errors import ProtocolError
from fed_dpsd.methods.method import (
    Federation,
    Method,
    Plan,
    PublicContext,
    ReplayBuffer,
    Round,
    Site,
    State,
    below,
    nobody_answers,
    tensors_below,
)
from fed_dpsd.methods.white_box import WEIGHTS, fetch_teachers, release_weights
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.divergence import check_losses, rates_of
from fed_dpsd.models.generators import Generator
from fed_dpsd.models.inference import learner, predict, to_bytes
from fed_dpsd.papers.paper_fed_dpsd import step
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.protocol import Refusal, Request, Response
from fed_dpsd.streams import Streams


@dataclass(frozen=True)
class DPDataFreeDistillation(Method):
    """DP-DFD, Algorithm 1, a stage a round; conf/method/dp_dfd.yaml explains the fields.

    Every optimiser starts anew in each stage, so that a run can be resumed from the weights and the
    bank.
    """

    discriminator: Literal["student", "teacher"]
    latent_size: int
    contrast: float
    brightness: float
    pretraining_steps: int
    generator_steps: int
    generator_learning_rate: float
    one_hot_weight: float
    entropy_weight: float
    activation_weight: float
    student_steps: int
    student_learning_rate: float
    batch_size: int

    def __post_init__(self) -> None:
        require(self, latent_size=1, pretraining_steps=0, generator_steps=0)
        require(self, student_steps=1, batch_size=2)
        require_positive(self, "contrast", "generator_learning_rate", "student_learning_rate")
        if self.discriminator not in ("student", "teacher"):
            raise ValueError(f"discriminator={self.discriminator!r} must be 'student' or 'teacher'")
        if self.discriminator == "teacher" and not self.pretraining_steps + self.generator_steps:
            raise ValueError(
                "discriminator='teacher' sends the teacher's weights but does not use them with "
                "pretraining_steps=0 and generator_steps=0; give one of them >= 1"
            )

    def plan(self, context: PublicContext) -> Plan:
        """Return the stage of answers; with the teacher as discriminator, its weights before."""
        answers = Stage(context.answers, context.rounds, context.queries_per_round)
        before = (WEIGHTS,) if self.discriminator == "teacher" else ()
        return Plan(context.training, (*before, answers))

    # --- the server --------------------------------------------------------------------------

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Run Algorithm 1: data-free generator learning, then stages of student learning."""
        student = context.make_student(streams.torch("student"))
        generator = context.make_generator(self.latent_size, streams.torch("generator"))
        generator.set_levels(self.contrast, self.brightness)
        teacher = self.fetch_teacher(federation, context)
        discriminator = teacher or student
        rates = rates_of(self, "generator_learning_rate")
        buffer: list[ReplayBuffer] = []
        if resume is not None:
            student.load_state_dict(below("student", resume.tensors))
            generator.load_state_dict(below("generator", resume.tensors))
            buffer = list(resume.buffer)
        else:  # 1: pretrain the generator, with the discriminator fixed
            rng = streams.torch("pretraining latents")
            drawn = (self.draw(context, rng) for _ in range(self.pretraining_steps))
            self.train_generator(generator, drawn, partial(self.generator_loss, discriminator))

        for number in range(len(buffer) + 1, context.rounds + 1):
            latents = self.draw(context, streams.torch("latents", query_id=number))
            with torch.no_grad():
                images = to_bytes(generator.train()(latents), rates)  # 2: synthetic data
            predictions = predict(student, images, context.device)
            request = federation.get_or_store(Request(number, images, predictions))
            total = federation.total(request)  # 3: the teacher's labels, by selective responses
            if total.count == 0:
                if not buffer:
                    raise nobody_answers(total.refused)
                return
            labels = (total.sum / total.count).astype(np.float32)
            buffer.append(ReplayBuffer(request.images, request.predictions, labels))
            loss = self.train_student(
                student, buffer, context, streams, number
            )  # 4: data-label pairs
            targets = torch.from_numpy(labels).to(context.device)
            fine_tuning_loss = partial(self.fine_tuning_loss, discriminator, student, targets)
            again = [latents] * self.generator_steps
            self.train_generator(generator, again, fine_tuning_loss)  # 5: on this stage's pairs
            steps = self.generator_steps + (self.pretraining_steps if number == 1 else 0)
            discriminated = steps * len(request.images) if teacher else 0
            yield Round(
                State(
                    number,
                    tensors_below("student", student) | tensors_below("generator", generator),
                    buffer,
                ),
                student,
                {"student_loss": loss},
                total.refused,
                forward_answers=total.count * len(request.images) + discriminated,
                backward_answers=discriminated,
            )

    def draw(self, context: PublicContext, rng: torch.Generator) -> torch.Tensor:
        """Draw normal latent vectors, one for each image of a stage."""
        shape = context.queries_per_round, self.latent_size
        return torch.randn(shape, generator=rng).to(context.device)

    def fetch_teacher(self, federation: Federation, context: PublicContext) -> Classifier | None:
        """Return the teacher if it is the discriminator, otherwise None."""
        if self.discriminator == "student":
            return None
        (teacher, *_) = fetch_teachers(federation, context)[0]
        return teacher

    def train_generator(
        self,
        generator: Generator,
        batches: Iterable[torch.Tensor],
        loss: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Take a step down the loss of the images of each batch of latent vectors, by Adam."""
        rate = self.generator_learning_rate
        optimiser = torch.optim.Adam(generator.parameters(), rate, betas=(0.5, 0.999))
        generator.train()
        seen = []
        for latents in batches:
            generator_loss = loss(generator(latents))
            seen.append(generator_loss.detach())
            step(optimiser, generator_loss)
        check_losses(seen, "the generator", rates_of(self, "generator_learning_rate"))

    def generator_loss(self, discriminator: Classifier, images: torch.Tensor) -> torch.Tensor:
        """Return the loss of Eq. 2: cross-entropy, information entropy and activation."""
        features = discriminator.features(images)
        logits = discriminator.classifier(features)
        weights = self.one_hot_weight, self.entropy_weight, self.activation_weight
        return losses.generator_loss(features, logits, *weights)

    def fine_tuning_loss(
        self,
        discriminator: Classifier,
        student: Classifier,
        targets: torch.Tensor,
        images: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss of Eq. 2, and the student's on (B, K) labels of a stage's images."""
        student_loss = losses.student_loss(student(images), targets)
        return self.generator_loss(discriminator, images) + student_loss

    def train_student(
        self,
        student: Classifier,
        buffer: list[ReplayBuffer],
        context: PublicContext,
        streams: Streams,
        number: int,
    ) -> float:
        """Train on batches of all pairs so far, by Adam; return the last loss.

        The learning rate falls in a straight line, to nearly 0 in the last stage.
        """
        labels = torch.from_numpy(np.concatenate([part.labels for part in buffer]))
        images = np.concatenate([part.images for part in buffer])
        model, take = learner(student, images, context.device)
        rate = self.student_learning_rate * (1 - (number - 1) / context.rounds)
        optimiser = torch.optim.Adam(model.parameters(), rate, foreach=True)
        rng = streams.torch("replay", query_id=number)
        student.train()
        seen = []
        for _ in range(self.student_steps):
            chosen = torch.randint(len(images), (self.batch_size,), generator=rng).numpy()
            loss = losses.student_loss(model(take(chosen)), labels[chosen].to(context.device))
            seen.append(loss.detach())
            step(optimiser, loss)
        check_losses(seen, "the student", rates_of(self, "student_learning_rate"))
        student.eval()  # as the generator sees it
        return loss.item()

    # --- the client --------------------------------------------------------------------------

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Release a response to each image; the weights only for the teacher discriminator."""
        if request.kind == "weights" and self.discriminator == "teacher":
            return release_weights(request, site)
        if request.kind != "answers":
            raise ProtocolError(f"method {type(self).__name__} does not answer {request.kind!r}")
        site.pay_for_training()
        return site.release(site.answers, site.sensitive_probabilities(request.images), request)
