"""FedDPSD: differentially private synthetic distillation from several clients' teachers.

Liu, Ge, Wang, Li, Liu: "Privacy-Preserving Model Transcription with Differentially Private
Synthetic Distillation", arXiv 2601.19090, Algorithm 2 (Appendix D).

The server owns generators and a student. Each round it sends synthetic images with the student's
predictions. Each client's teachers answer with normalised gradients, randomised-response labels,
votes or probabilities. The server trains the student on all answers so far. Generators are new for
every few images, and trained against the student before these are asked. So a generator depends on
private data only through released answers.

This is the paper's exchange with a server that learns more from it. The paper's own loop, with one
generator and one step a round, is fed_dpsd/papers/paper_fed_dpsd.py.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd import losses
from fed_dpsd.config import Config, require, require_positive
from fed_dpsd.errors import ProtocolError
from fed_dpsd.methods.class_counts import (
    among,
    counts_stage,
    fetch_class_weights,
    pool,
    release_class_counts,
    weigh,
)
from fed_dpsd.methods.method import (
    Federation,
    Method,
    Plan,
    PublicContext,
    ReplayBuffer,
    Round,
    Site,
    State,
    answers_and_refusals,
    below,
    draw_public,
    nobody_answers,
    tensors_below,
)
from fed_dpsd.models import procedural
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.divergence import check_losses, rates_of
from fed_dpsd.models.inference import learner, predict, to_bytes
from fed_dpsd.models.recombination import recombine
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import Additive, Mechanism, Probabilities
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.training import Training, TrainingMechanism
from fed_dpsd.progress import reported
from fed_dpsd.protocol import Aggregate, Refusal, Request, Response
from fed_dpsd.streams import Streams

# From (B, K) logits and labels, and the (B,) places of their images in the bank, to a loss.
StudentLoss = Callable[[torch.Tensor, torch.Tensor, NDArray[np.int64]], torch.Tensor]


@dataclass(frozen=True)
class FedDPSD(Method):
    """FedDPSD, Algorithm 2; conf/method/fed_dpsd.yaml explains the fields."""

    asks_pictures: ClassVar[bool] = True
    asks_cohorts: ClassVar[bool] = True
    noise_fraction: float
    areas_fraction: float
    lines_fraction: float
    leaves_fraction: float
    recombined_fraction: float
    polarity: Literal["both", "dark", "light", "answers"]
    images_per_generator: int
    latent_size: int
    generator_steps: int
    generator_learning_rate: float
    latent_learning_rate: float
    one_hot_weight: float
    entropy_weight: float
    activation_weight: float
    student_steps: int
    final_student_steps: int
    student_learning_rate: float
    batch_size: int
    distillation: Literal["decoupled", "classic"]
    balance: float
    prediction_weight: float
    label_step: float
    class_counts: bool
    pooling: Literal["mean", "odds"]

    def __post_init__(self) -> None:
        require(self, images_per_generator=2, latent_size=1, generator_steps=0, batch_size=2)
        require(self, student_steps=1, final_student_steps=1, balance=0)
        fractions = self.fractions
        if min(fractions.values()) < 0 or sum(fractions.values()) > 1:
            *others, last = (f"{kind}_fraction={part}" for kind, part in fractions.items())
            raise ValueError(
                f"{', '.join(others)} and {last} must be >= 0 and at most 1 together; generators "
                "make the other images"
            )
        if fractions["recombined"] == sum(fractions.values()) > 0:
            raise ValueError(
                f"recombined_fraction={self.recombined_fraction} needs procedural images to begin "
                "with; give areas_fraction > 0, for example"
            )
        if not 0 <= self.prediction_weight <= 1:
            raise ValueError(f"prediction_weight={self.prediction_weight} must be between 0 and 1")
        require_positive(
            self,
            "generator_learning_rate",
            "latent_learning_rate",
            "student_learning_rate",
            "label_step",
        )

    def check(
        self, config: Config, training: Training | None, answers: Mechanism | None
    ) -> list[str]:
        """Return the problems of the method in an experiment."""
        problems = super().check(config, training, answers)
        counted = not isinstance(training, TrainingMechanism) or training.counts_classes
        known = counted and self.class_counts and isinstance(answers, Probabilities)
        if self.pooling == "odds" and not known:
            problems.append(
                "method.pooling=odds needs answers=probabilities, method.class_counts=true "
                "and, with training=dp_sgd, training.count_fraction; use method.pooling=mean"
            )
        return problems

    def plan(self, context: PublicContext) -> Plan:
        """Return one stage with an answer for each synthetic query; class counts if paid for."""
        answers = Stage(context.answers, context.asked_rounds, context.queries_per_round)
        return Plan(context.training, (*self.counts(context), answers))

    def counts(self, context: PublicContext) -> tuple[Stage, ...]:
        """Return the stage of class counts, by which answers that are seen one by one weigh."""
        seen = context.answers.noise_at == "client"
        clear = isinstance(context.answers, Probabilities)
        return counts_stage(context, clear) if self.class_counts and seen else ()

    # --- client ------------------------------------------------------------------------------

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Release each teacher's answer to every query by the site's mechanism (Fed-FlexPer)."""
        if request.kind == "counts" and self.class_counts:
            return release_class_counts(request, site, isinstance(site.answers, Probabilities))
        if request.kind != "answers":
            raise ProtocolError(f"method {type(self).__name__} does not answer {request.kind!r}")
        site.pay_for_training()
        sensitive = site.sensitive_probabilities(request.images)
        if site.answers.input == "gradient":
            sensitive = self.gradients(sensitive, request.predictions)
        return site.release(site.answers, sensitive, request)

    def gradients(
        self, sensitive: NDArray[np.float64], predictions: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Return each teacher's gradients of Eq. 2, or of classic distillation, (n, B, K)."""
        if self.distillation == "classic":
            return losses.kd_gradients(sensitive, predictions)
        return losses.decoupled_kd_gradients(sensitive, predictions, self.balance)

    # --- server ------------------------------------------------------------------------------

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Run Algorithm 2, with a bank of answered samples and new generators in each round."""
        student = context.make_student(streams.torch("student"))
        discriminator = self.fetch_discriminator(federation, context)
        class_weights = fetch_class_weights(federation, context) if self.counts(context) else {}
        buffer: list[ReplayBuffer] = []
        if resume is not None:
            student.load_state_dict(below("student", resume.tensors))
            buffer = list(resume.buffer)

        for number in range(len(buffer) + 1, context.rounds + 1):
            images = self.draw(discriminator or student, context, streams, number, buffer)
            images = procedural.apply_polarity(images, self.infer_polarity(buffer))
            predictions = self.predictions(student, images, context)
            request = federation.get_or_store(Request(number, images, predictions))
            total = self.request(federation, request, context, class_weights)
            if total.count == 0 and not buffer:
                raise nobody_answers(total.refused)
            exhausted = total.count == 0  # every client's budget is spent
            if not exhausted:
                labels = self.noisy_labels(context, request.predictions, total)
                buffer.append(
                    ReplayBuffer(request.images, request.predictions, labels.astype(np.float32))
                )
            last = exhausted or number == context.rounds
            if last:  # a student that was first trained on few answers never catches up: restart it
                student = context.make_student(streams.torch("last student"))
            metrics = self.train_student(student, buffer, context, streams, number, last)
            generated = self.mixture(len(request.images))["generated"]
            discriminated = generated * self.generator_steps if discriminator else 0
            yield Round(
                State(len(buffer), tensors_below("student", student), buffer),
                student,
                metrics,
                total.refused,
                forward_answers=total.count * len(request.images) + discriminated,
                backward_answers=discriminated,
            )
            if exhausted:
                return

    def request(
        self,
        federation: Federation,
        request: Request,
        context: PublicContext,
        class_weights: Mapping[int, NDArray[np.float64]],
    ) -> Aggregate:
        """Return the sum of the answers, weighted by `class_weights` where there are any."""
        if not class_weights:
            return federation.total(request)
        answers, refused = answers_and_refusals(federation.each(request))
        weighted = {client: own for client, own in answers.items() if client in class_weights}
        if not weighted:
            return Aggregate(np.zeros(request.predictions.shape), 0, refused)
        if len(weighted) < len(class_weights):
            class_weights = among(class_weights, weighted)
        count = sum(own.teachers for own in weighted.values())
        means = {client: own.values / own.teachers for client, own in weighted.items()}
        additive, odds = isinstance(context.answers, Additive), self.pooling == "odds"
        mean = pool(means, class_weights) if odds else weigh(means, class_weights, additive)
        return Aggregate(count * mean, count, refused)

    def fetch_discriminator(
        self, federation: Federation, context: PublicContext
    ) -> nn.Module | None:
        """Return the teacher that generators are trained against; None for the student itself."""
        return None

    @property
    def fractions(self) -> dict[str, float]:
        """Return the fractions of procedural images by kind, and of recombined ones."""
        return {
            "noise": self.noise_fraction,
            "areas": self.areas_fraction,
            "lines": self.lines_fraction,
            "leaves": self.leaves_fraction,
            "recombined": self.recombined_fraction,
        }

    def mixture(self, queries: int) -> dict[str, int]:
        """Return how many of a round's images are of each kind; generators make what is left."""
        counts = {kind: int(fraction * queries) for kind, fraction in self.fractions.items()}
        return {**counts, "generated": queries - sum(counts.values())}

    def draw(
        self,
        discriminator: nn.Module,
        context: PublicContext,
        streams: Streams,
        number: int,
        buffer: Sequence[ReplayBuffer] = (),
    ) -> NDArray[np.uint8]:
        """Return (Q, C, H, W) uint8 images, which the student and the clients both see.

        Procedural images come first, or crops of public pictures in their place, then those
        recombined from the bank, then the generators'. In the first round nothing is answered: then
        these first images are recombined.
        """
        counts = self.mixture(context.queries_per_round)
        recombined, left = counts.pop("recombined"), counts.pop("generated")
        parts = draw_public(counts, context, streams, number)
        if not buffer and not sum(counts.values()):
            recombined, left = 0, left + recombined  # there is nothing to recombine yet
        if recombined:
            answered = np.concatenate([part.images for part in buffer] or parts)
            alike = np.zeros((len(answered), context.num_classes))
            labels = np.concatenate([part.labels for part in buffer]) if buffer else alike
            rng = streams.numpy("recombined images", query_id=number)
            parts.append(recombine(answered, labels, recombined, rng))
        rng = streams.torch("generators", query_id=number)
        while left > 0:
            count = min(self.images_per_generator, left)
            parts.append(to_bytes(self.generate(discriminator, context, count, rng)))
            left -= count
        return np.concatenate(parts)

    def infer_polarity(self, buffer: list[ReplayBuffer]) -> procedural.Polarity:
        """Return the polarity of the next images, "both" where only answers could tell."""
        if self.polarity != "answers":
            return self.polarity
        if not buffer:
            return "both"
        answered = np.concatenate([part.images for part in buffer])
        return procedural.varied_polarity(
            answered, np.concatenate([part.labels for part in buffer])
        )

    def generate(
        self, discriminator: nn.Module, context: PublicContext, count: int, rng: torch.Generator
    ) -> torch.Tensor:
        """Train a new generator on the discriminator by Eq. 8; return `count` of its images."""
        generator = context.make_generator(self.latent_size, rng)
        latents = torch.randn((count, self.latent_size), generator=rng).to(context.device)
        latents.requires_grad_(True)
        groups = [
            {"params": generator.parameters(), "lr": self.generator_learning_rate},
            {"params": [latents], "lr": self.latent_learning_rate},
        ]
        optimiser = torch.optim.Adam(groups, betas=(0.5, 0.999))
        generator.train()
        discriminator.eval().requires_grad_(False)
        seen = []
        for _ in range(self.generator_steps):
            loss = self.generator_loss(discriminator, generator(latents))
            seen.append(loss.detach())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        rates = rates_of(self, "generator_learning_rate", "latent_learning_rate")
        check_losses(seen, "the generator", rates)
        discriminator.requires_grad_(True)
        with torch.no_grad():
            return generator(latents)

    def generator_loss(self, discriminator: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """Return the loss of Eq. 8: confident, balanced over the classes, with active features."""
        features = discriminator.features(images)
        logits = discriminator.classifier(features)
        weights = self.one_hot_weight, self.entropy_weight, self.activation_weight
        return losses.generator_loss(features, logits, *weights)

    def predictions(
        self, student: nn.Module, images: NDArray[np.uint8], context: PublicContext
    ) -> NDArray[np.float32]:
        """Return the (Q, K) predictions to ask with: for gradients, they are nearly uniform.

        Where the student agrees with the teacher, normalisation blows up a gradient that says
        little. Near the uniform prediction the gradient points at the teacher's class.
        """
        predictions = predict(student, images, context.device)
        if not isinstance(context.answers, NormalizedGradient):
            return predictions
        uniform = np.float32(1 / context.num_classes)
        return uniform + np.float32(self.prediction_weight) * (predictions - uniform)

    def noisy_labels(
        self, context: PublicContext, predictions: NDArray[np.float32], total: Aggregate
    ) -> NDArray[np.float64]:
        """Return the (B, K) labels of Eq. 6 from the sum of the answers: free post-processing."""
        mean = total.sum / total.count
        if isinstance(context.answers, NormalizedGradient):  # Eq. 3
            bound = context.answers.row_norm(len(predictions))
            return losses.noisy_label(predictions, mean, bound, self.label_step)
        return mean  # Eq. 5: fractions of the votes; or probabilities

    def train_student(
        self,
        student: Classifier,
        buffer: list[ReplayBuffer],
        context: PublicContext,
        streams: Streams,
        number: int,
        last: bool,
    ) -> dict[str, float]:
        """Train by Eq. 7 on batches from the whole bank, with Adam.

        Returns:
            The last loss, and the wall-clock seconds of all steps, as metrics of the round.
        """
        steps = self.final_student_steps if last else self.student_steps
        images = np.concatenate([part.images for part in buffer])
        model, take = learner(student, images, context.device)
        optimiser = torch.optim.Adam(model.parameters(), self.student_learning_rate, foreach=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, self.student_learning_rate, total_steps=max(steps, 20), pct_start=0.1
        )
        labels = torch.from_numpy(np.concatenate([part.labels for part in buffer]))
        loss_of = self.student_loss(context, np.concatenate([part.predictions for part in buffer]))
        rng = streams.torch("replay", query_id=number)
        student.train()
        seen = []
        started = time.perf_counter()
        for _ in reported("steps of the student", range(steps)):
            chosen = torch.randint(len(images), (self.batch_size,), generator=rng).numpy()
            logits = model(take(chosen))
            loss = loss_of(logits, labels[chosen].to(context.device), chosen)
            seen.append(loss.detach())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        metrics = {"student_loss": loss.item()}  # waits for the device, which the time includes
        check_losses(seen, "the student", rates_of(self, "student_learning_rate"))
        return metrics | {"student_seconds": round(time.perf_counter() - started, 4)}

    def student_loss(self, context: PublicContext, predictions: NDArray[np.float32]) -> StudentLoss:
        """Return L_s: the likelihood of responses, least squares under noise, or cross-entropy.

        Args:
            context: what is public.
            predictions: (N, K) predictions with which the images of the bank were asked.
        """
        mechanism = context.answers
        if isinstance(mechanism, TopKRandomizedResponse) and mechanism.lies == "candidates":
            members = mechanism.members(predictions)
            lies = mechanism.lie_probability(members.sum(1, keepdims=True))
            public = [torch.from_numpy(a).float().to(context.device) for a in (members, lies)]
            return lambda logits, labels, chosen: losses.response_loss(
                logits, labels, *(array[chosen] for array in public)
            )
        loss = losses.squared_loss if isinstance(mechanism, Additive) else losses.student_loss
        return lambda logits, labels, _: loss(logits, labels)
