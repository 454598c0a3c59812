"""FedDPSD as printed: the paper's own loop, line by line.

Liu, Ge, Wang, Li, Liu: "Privacy-Preserving Model Transcription with Differentially Private
Synthetic Distillation", arXiv 2601.19090, Algorithm 2 (Appendix D).

One generator is used for the whole run. In each of T rounds (the paper's iterations), it makes b
images, the clients answer them once, the student takes one step on the answers, and the generator
takes one step against the student.

Appendix D takes the generator's settings from FastDFKD (its reference [25]), where an iteration is
an epoch: several steps of the generator, and hundreds of the student on a bank of all images so
far. `generator_steps`, `student_steps` and `bank` are this reading. fed_dpsd/methods/fed_dpsd.py
has all other improvements.

Where the printed algorithm contradicts itself, the text or its references, a key chooses the
reading (conf/method/paper_fed_dpsd.yaml, docs/papers.md). What it leaves open:
- Images are sent as bytes, from which the student learns.
- L_s of line 18 is computed again after the student's step, before rounding.
- L_t is differentiated in each probability as an independent coordinate, and nothing is
  differentiated through a label's prediction.
- Networks are in evaluation mode for predictions and in training mode for steps; the generator
  normalises by its batch.
- m of line 14 is the number of teachers that answered.
- gamma_s is two keys, `label_step` and `student_learning_rate`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass
from scipy.special import softmax
from torch import nn

from fed_dpsd import losses
from fed_dpsd.config import STRICT, Config, Positive
from fed_dpsd.methods.method import (
    Federation,
    Method,
    PublicContext,
    ReplayBuffer,
    Round,
    State,
    named_tensors,
    nobody_answers,
    tensors_of,
)
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.divergence import descend, rates_of
from fed_dpsd.models.inference import predict, to_bytes, to_unit
from fed_dpsd.privacy.mechanism import Mechanism
from fed_dpsd.privacy.optimisers import SGD, Adam
from fed_dpsd.privacy.training import Training
from fed_dpsd.protocol import Aggregate, Request
from fed_dpsd.streams import Streams

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": Adam,
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9, weight_decay=1e-4),
}


@dataclass(frozen=True, config=STRICT)
class PaperFedDPSD(Method):
    """FedDPSD, Algorithm 2, as printed; conf/method/paper_fed_dpsd.yaml explains the fields."""

    takes_gradients: ClassVar[bool] = True
    latent_size: PositiveInt
    latents: Literal["drawn", "kept"]
    contrast: Positive
    brightness: float
    label_step: Positive
    student_learning_rate: Positive
    student_learning_rate_falls: bool
    generator_learning_rate: NonNegativeFloat
    student_steps: PositiveInt
    generator_steps: PositiveInt
    bank: bool
    student_optimiser: Literal["adam", "sgd", "momentum"]
    generator_optimiser: Literal["adam", "sgd"]
    distillation: Literal["decoupled", "classic"]
    balance: NonNegativeFloat
    divisor: Literal["target", "own"]
    gradients_of: Literal["probabilities", "logits"]
    label: Literal["step", "gradient"]
    mean_over: Literal["clients", "batch"]
    one_hot_weight: float
    entropy_weight: float
    activation_weight: float
    entropy: Literal["mean", "samples"]
    activation: Literal["minus", "plus"]
    student_loss_sign: Literal["plus", "minus"]

    # --- the server: Alg. 2, lines 1 to 20 ---------------------------------------------------

    def warnings(self, config: Config, training: Training, answers: Mechanism) -> list[str]:
        """Also warn about gradients, from which the printed loop learns nothing.

        With the settings of conf/experiment/low_noise_controls.yaml, it learns from them.
        """
        found = super().warnings(config, training, answers)
        changed = self.mean_over == "clients" and self.balance == self.generator_learning_rate == 0
        if answers.input == "gradient" and not changed:
            found.append(
                f"method={self.name} as printed learns nothing from gradients, even without noise "
                "(results/one_teacher.md), so expect a student near chance; use answers=label "
                f"or method={'dpsd' if config.num_clients == 1 else 'fed_dpsd'} answers=gradient"
            )
        return found

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Run Algorithm 2; comments give the paper's line numbers."""
        student, generator, latents = self.start(context, streams)
        student_optimiser, generator_optimiser = self.optimisers(student, generator, latents)
        learners: dict[str, Learner] = {
            **{"student": student, "generator": generator},
            **{"student_optimiser": student_optimiser, "generator_optimiser": generator_optimiser},
        }
        student_rate = rates_of(self, "student_learning_rate")
        generator_rate = rates_of(self, "generator_learning_rate")
        buffer = restore(learners, latents, resume) if resume else []

        for number in range(len(buffer) + 1, context.rounds + 1):  # 1
            if self.latents == "drawn":
                draw = streams.torch("latents", query_id=number)
                latents = torch.randn(latents.shape, generator=draw).to(context.device)  # 3
            generator.train()
            images = to_bytes(generator(latents), generator_rate)  # 4, sent as bytes
            predictions = predict(student, images, context.device)  # 5
            # 6 to 12; with noise_at=server, the noise of 14 too
            total = federation.total(Request(number, images, predictions))
            request = total.request
            if total.count == 0:
                if not buffer:
                    raise nobody_answers(total.refused)
                return
            labels = self.noisy_labels(context, total).astype(np.float32)  # 14
            buffer.append(ReplayBuffer.of(total, labels))
            student.train()
            for group in student_optimiser.param_groups:
                group["lr"] = self.rate(number, context.rounds)
            done = number - 1
            steps = self.student_losses(student, buffer, context, streams)  # 15
            taken = done * self.student_steps
            loss = descend(student_optimiser, steps, "the student", student_rate, taken)  # 16
            metrics = {"student_loss": loss.item()}
            if self.generator_learning_rate > 0:
                targets = torch.from_numpy(labels).to(context.device)
                steps = (
                    self.generator_loss(student, generator(latents), targets)  # 17
                    for _ in range(self.generator_steps)
                )
                either = student_rate | generator_rate  # either may be the cause
                taken = done * self.generator_steps
                loss = descend(generator_optimiser, steps, "the generator", either, taken)  # 18
                metrics["generator_loss"] = loss.item()
            yield Round(
                State(number, state_tensors(learners, latents), buffer),
                student,
                metrics,
                total.refused,
                forward_answers=total.count * len(request.images),
            )  # 19, 20

    def start(
        self, context: PublicContext, streams: Streams
    ) -> tuple[Classifier, nn.Module, torch.Tensor]:
        """Return the student and the generator, with Xavier weights, and normal latent vectors."""
        student = context.make_student(streams.torch("student"))
        generator = context.make_generator(self.latent_size, streams.torch("generator"))
        generator.set_levels(self.contrast, self.brightness)
        shape = context.queries_per_round, self.latent_size
        latents = torch.randn(shape, generator=streams.torch("latents")).to(context.device)
        return student, generator, latents.requires_grad_(self.latents == "kept")

    def optimisers(
        self, student: nn.Module, generator: nn.Module, latents: torch.Tensor
    ) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """Return the student's optimiser, and the optimiser of the generator and learnt latents."""
        learnt = [latents] if self.latents == "kept" else []
        drawing = [*generator.parameters(), *learnt]
        return (
            OPTIMISERS[self.student_optimiser](student.parameters(), self.student_learning_rate),
            OPTIMISERS[self.generator_optimiser](drawing, self.generator_learning_rate),
        )

    def rate(self, number: int, rounds: int) -> float:
        """Return the student's learning rate in round `number`, 1 to `rounds`."""
        falls = (number - 1) / rounds if self.student_learning_rate_falls else 0
        return self.student_learning_rate * (1 - falls)

    def noisy_labels(self, context: PublicContext, total: Aggregate) -> NDArray[np.float64]:
        """Return the (B, K) labels of Eq. 6, or of Alg. 2 line 14, from the clients' sum.

        Except for gradients, the mechanism gives the labels.
        """
        if context.answers.input != "gradient":
            return context.answers.labels(total.sum, total.count, total.request.predictions)
        mean = total.sum / total.count
        if self.mean_over == "batch":  # Eq. 3 has one gradient for all labels of a batch
            mean = np.broadcast_to(mean.mean(axis=0), mean.shape)
        if self.label == "gradient":  # line 14 has neither the prediction nor a step
            return np.asarray(mean)
        predictions, step = total.request.predictions, self.label_step * mean
        if self.gradients_of == "logits":
            logits = np.log(np.maximum(predictions, losses.SMALLEST_PROBABILITY))
            return np.asarray(softmax(logits - step, axis=1))
        return np.asarray(predictions - step)

    def student_losses(
        self,
        student: Classifier,
        buffer: list[ReplayBuffer],
        context: PublicContext,
        streams: Streams,
    ) -> Iterator[torch.Tensor]:
        """Yield L_s of each of the student's steps, on the last images or on b of the bank."""
        source = ReplayBuffer.joined(buffer if self.bank else buffer[-1:])
        size = len(buffer[-1].labels)
        chosen, rng = np.arange(size), streams.torch("bank", query_id=len(buffer))
        for _ in range(self.student_steps):
            if self.bank:
                chosen = torch.randint(len(source.labels), (size,), generator=rng).numpy()
            images = to_unit(source.images[chosen], context.device)
            labels = torch.from_numpy(source.labels[chosen]).to(context.device)
            yield self.student_loss(student(images), labels)

    def student_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return L_s of Eq. 7: the sum of the cross-entropies."""
        return len(logits) * losses.student_loss(logits, labels)

    def generator_loss(
        self, student: Classifier, images: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return L_s + L_g of Eq. 8 for the generator's images, with the updated student.

        A generator that competes with the student uses -L_s.
        """
        features = student.features(images)
        logits = student.classifier(features)
        samples, norms = len(logits), features.norm(dim=1).sum()
        balance = (
            samples * losses.entropy_loss(logits)
            if self.entropy == "mean"
            else losses.sample_entropy_loss(logits)
        )
        student_loss = self.student_loss(logits, labels)
        return (
            (student_loss if self.student_loss_sign == "plus" else -student_loss)
            + self.one_hot_weight * samples * losses.one_hot_loss(logits)
            + self.entropy_weight * balance
            + self.activation_weight * (norms if self.activation == "plus" else -norms)
        )

    # --- the clients: Fed-FlexPer, lines 21 to 35 --------------------------------------------

    def gradients(
        self, sensitive: NDArray[np.float64], predictions: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Return the teachers' (n, B, K) gradients of Eq. 2, or of classic distillation."""
        own = (
            losses.kd_gradients(sensitive, predictions)
            if self.distillation == "classic"
            else losses.decoupled_kd_gradients(sensitive, predictions, self.balance, self.divisor)
        )
        return losses.in_logits(own, predictions) if self.gradients_of == "logits" else own


Learner = nn.Module | torch.optim.Optimizer


def state_tensors(learners: dict[str, Learner], latents: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return copies of all tensors that a resumed run needs, named LEARNER.NAME."""
    tensors = {"latents": latents.detach().clone()}
    for name, learner in learners.items():
        if isinstance(learner, nn.Module):
            tensors |= named_tensors(**{name: learner})
        else:
            for number, moments in learner.state_dict()["state"].items():
                tensors |= {f"{name}.{number}.{key}": t.clone() for key, t in moments.items()}
    return tensors


def restore(
    learners: dict[str, Learner], latents: torch.Tensor, state: State
) -> list[ReplayBuffer]:
    """Load the tensors of `state_tensors` in place, and return the buffer."""
    with torch.no_grad():
        latents.copy_(state.tensors["latents"])
    for name, learner in learners.items():
        own = tensors_of(name, state.tensors)
        if isinstance(learner, nn.Module):
            learner.load_state_dict(own)
            continue
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for path, tensor in own.items():
            number, key = path.split(".")
            moments.setdefault(int(number), {})[key] = tensor
        learner.load_state_dict(learner.state_dict() | {"state": moments})
    return list(state.buffer)
