"""DP-DFD: a pretrained generator, then stages of selective randomised responses and learning.

Liu, Lu, Wang, Zhang, Zeng, Qian, Ge: "Privacy-Preserving Student Learning with Differentially
Private Data-Free Distillation", arXiv 2409.12384, Algorithm 1.

The teacher is the generator's fixed discriminator, so its weights leave the client. Nothing is then
proven for the images, or for anything trained on them, regardless of how labels are randomised.
With `discriminator="student"`, the same stages depend on private data only through the responses,
and their epsilon is finite.

Only the paper's description of the algorithm was available, not the algorithm box. Comments
therefore number the steps of the description. A stage has new images, their responses, steps of the
student (cross-entropy on all pairs so far) and steps of the generator.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from fed_dpsd import losses
from fed_dpsd.config import STRICT, Positive
from fed_dpsd.methods.method import (
    Federation,
    PublicContext,
    ReplayBuffer,
    Round,
    State,
    nobody_answers,
)
from fed_dpsd.methods.white_box import Discriminating
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.divergence import descend, rates_of
from fed_dpsd.models.generators import Generator
from fed_dpsd.models.inference import predict, to_bytes, trainable_part
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.protocol import Request
from fed_dpsd.streams import Streams


@dataclass(frozen=True, config=STRICT)
class DPDataFreeDistillation(Discriminating):
    """DP-DFD, Algorithm 1, one stage per round; conf/method/dp_dfd.yaml explains the fields.

    All optimisers restart in each stage, so a run can be resumed from the weights and the buffer.
    """

    latent_size: PositiveInt
    contrast: Positive
    brightness: float
    pretraining_steps: NonNegativeInt
    generator_steps: NonNegativeInt
    generator_learning_rate: Positive
    one_hot_weight: float
    entropy_weight: float
    activation_weight: float
    student_steps: PositiveInt
    student_learning_rate: Positive
    batch_size: Annotated[int, Field(ge=2)]

    def __post_init__(self) -> None:
        if self.discriminator == "teacher" and not self.pretraining_steps + self.generator_steps:
            raise ValueError(
                "discriminator='teacher' sends the teacher's weights but does not use them if "
                "pretraining_steps=0 and generator_steps=0; set one of them >= 1"
            )

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Run Algorithm 1: data-free generator learning, then stages of student learning."""
        student = context.make_student(streams.torch("student"))
        generator = context.make_generator(self.latent_size, streams.torch("generator"))
        generator.set_levels(self.contrast, self.brightness)
        teacher = self.fetch_discriminator(federation, context)
        discriminator = teacher or student
        rates = rates_of(self, "generator_learning_rate")
        buffer = resume.load(student=student, generator=generator) if resume else []
        if not resume:  # 1: pretrain the generator, with the discriminator fixed
            rng = streams.torch("pretraining latents")
            drawn = (self.draw(context, rng) for _ in range(self.pretraining_steps))
            self.train_generator(generator, drawn, partial(self.generator_loss, discriminator))

        for number in range(len(buffer) + 1, context.rounds + 1):
            latents = self.draw(context, streams.torch("latents", query_id=number))
            with torch.no_grad():
                images = to_bytes(generator.train()(latents), rates)  # 2: synthetic data
            predictions = predict(student, images, context.device)
            # 3: the teacher's labels, by selective responses
            total = federation.total(Request(number, images, predictions))
            request = total.request
            if total.count == 0:
                if not buffer:
                    raise nobody_answers(total.refused)
                return
            labels = context.answers.labels(total.sum, total.count, request.predictions)
            labels = labels.astype(np.float32)
            buffer.append(ReplayBuffer.of(total, labels))
            # 4: data-label pairs
            loss = self.train_student(student, buffer, context, streams, number)
            targets = torch.from_numpy(labels).to(context.device)
            fine_tuning_loss = partial(self.fine_tuning_loss, discriminator, student, targets)
            again = [latents] * self.generator_steps
            self.train_generator(generator, again, fine_tuning_loss)  # 5: on this stage's pairs
            steps = self.generator_steps + (self.pretraining_steps if number == 1 else 0)
            discriminated = steps * len(request.images) if teacher else 0
            yield Round(
                State.of(number, buffer, student=student, generator=generator),
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

    def train_generator(
        self,
        generator: Generator,
        batches: Iterable[torch.Tensor],
        loss: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Take an Adam step on the loss of each batch of latent vectors."""
        rate = self.generator_learning_rate
        optimiser = Adam(generator.parameters(), rate, betas=(0.5, 0.999))
        generator.train()
        losses = (loss(generator(latents)) for latents in batches)
        descend(optimiser, losses, "the generator", rates_of(self, "generator_learning_rate"))

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
        """Return the loss of Eq. 2, plus the student's loss on a stage's (B, K) labels."""
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
        """Train with Adam on batches of all pairs so far; return the last loss.

        The learning rate decays linearly to nearly 0 in the last stage.
        """
        whole = ReplayBuffer.joined(buffer)
        labels = torch.from_numpy(whole.labels)
        model, take = trainable_part(student, whole.images, context.device)
        rate = self.student_learning_rate * (1 - (number - 1) / context.rounds)
        optimiser = Adam(model.parameters(), rate, foreach=True)
        rng = streams.torch("replay", query_id=number)
        student.train()

        def steps() -> Iterator[torch.Tensor]:
            for _ in range(self.student_steps):
                chosen = torch.randint(len(labels), (self.batch_size,), generator=rng).numpy()
                yield losses.student_loss(model(take(chosen)), labels[chosen].to(context.device))

        loss = descend(optimiser, steps(), "the student", rates_of(self, "student_learning_rate"))
        student.eval()  # the generator is trained against it in this mode
        return loss.item()
