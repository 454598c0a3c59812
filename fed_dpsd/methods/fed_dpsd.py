"""FedDPSD: differentially private synthetic distillation from several clients' teachers.

Liu, Ge, Wang, Li, Liu: "Privacy-Preserving Model Transcription with Differentially Private
Synthetic Distillation", arXiv 2601.19090, Algorithm 2 (Appendix D).

The server has a generator and a student. In each round, it sends synthetic images with the
student's predictions. Each client's teachers answer with normalised gradients, randomised-response
labels, votes or probabilities. The server trains the student on all answers so far, and the
generator against the student before it draws the next images, so the generator depends on private
data only through released answers.

The messages are as in the paper, but the server learns more from them.
fed_dpsd/papers/paper_fed_dpsd.py is the paper's own loop, with one generator and one step per
round.
"""

import logging
import math
import time
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from fed_dpsd import losses
from fed_dpsd.config import STRICT, Config, Fraction, Positive, Shift
from fed_dpsd.methods.class_counts import (
    KnownCounts,
    average_by_class,
    counts_stage,
    pool_odds,
    release_class_counts,
)
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
from fed_dpsd.methods.queries import Queries
from fed_dpsd.models import procedural
from fed_dpsd.models.augmentation import augment
from fed_dpsd.models.classifiers import FIXED, Classifier
from fed_dpsd.models.divergence import descend, rates_of
from fed_dpsd.models.inference import Images, predict, trainable_part
from fed_dpsd.models.least_squares import fit_log_probabilities
from fed_dpsd.models.precision import in_float64
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.mechanism import Mechanism, StudentLoss
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.training import Training, TrainingMechanism
from fed_dpsd.progress import track
from fed_dpsd.protocol import Aggregate, Refusal, Request, Response
from fed_dpsd.streams import Streams

logger = logging.getLogger("fed_dpsd")


@dataclass(frozen=True, config=STRICT)
class FedDPSD(Queries, Method):
    """FedDPSD, Algorithm 2; conf/method/fed_dpsd.yaml explains the fields.

    methods/queries.py defines the fields for the sent images and the generators.
    """

    takes_gradients: ClassVar[bool] = True
    supports_cohorts: ClassVar[bool] = True
    sends_once: ClassVar[str | None] = "weights_once"
    student_steps: PositiveInt
    final_student_steps: PositiveInt
    final_fit: Literal["steps", "least_squares"]
    student_learning_rate: Positive
    batch_size: Annotated[int, Field(ge=2)]
    temperature: Annotated[float, Field(ge=1)]
    shift: Shift
    flip: bool
    distillation: Literal["decoupled", "classic"]
    balance: NonNegativeFloat
    prediction_weight: Fraction
    label_step: Positive
    class_counts: bool
    pooling: Literal["mean", "odds"]

    def check(self, config: Config, training: Training, answers: Mechanism) -> list[str]:
        """Also check that pooling, temperature, final_fit and augmentation suit the answers."""
        problems = super().check(config, training, answers)
        counted = not isinstance(training, TrainingMechanism) or training.counts_classes
        known = counted and self.class_counts and answers.exact
        if self.pooling == "odds" and not known:
            problems.append(
                "method.pooling=odds needs answers=probabilities, method.class_counts=true "
                "and, with training=dp_sgd, training.count_fraction; use method.pooling=mean"
            )
        uniform = np.full((1, config.data.num_classes), 1 / config.data.num_classes)
        norm = answers.row_norm(uniform) if answers.input == "gradient" else 1.0
        if not 0 < norm < math.inf:
            problems.append(
                f"answers={answers.name}: the gradient of a sure teacher becomes {norm:g} long, "
                f"so labels cannot be scaled; define {type(answers).__name__}.row_norm, or use "
                "answers=gradient"
            )
        if self.temperature != 1 and not answers.exact:
            problems.append(
                f"method.temperature={self.temperature:g} softens probabilities, and "
                f"answers={answers.name} has none; use method.temperature=1"
            )
        linear = config.model.student in FIXED
        if self.final_fit == "least_squares" and not (answers.exact and linear):
            problems.append(
                "method.final_fit=least_squares needs answers=probabilities and a student that is "
                f"linear on fixed features; use model.student={' or '.join(FIXED)} instead of "
                f"{config.model.student}, or method.final_fit=steps"
            )
        if (self.shift or self.flip) and config.model.student in FIXED:
            problems.append(
                f"method.shift={self.shift} and method.flip={str(self.flip).lower()}: "
                f"model.student={config.model.student} computes the features of an image once, so "
                "the image cannot move; use method.shift=0 method.flip=false"
            )
        return problems

    def warnings(self, config: Config, training: Training, answers: Mechanism) -> list[str]:
        """Also warn about a last student with fewer steps than the student before it."""
        found = super().warnings(config, training, answers)
        before = (config.rounds - 1) * self.student_steps
        if self.final_fit == "steps" and self.final_student_steps < before:
            found.append(
                f"method.final_student_steps={self.final_student_steps}: the last student starts "
                f"from new weights, and the one before it takes {before:,} steps, so the last may "
                f"be worse; use method.final_student_steps={4 * before}"
            )
        return found

    def plan(self, context: PublicContext) -> Plan:
        """Return a stage with one answer per synthetic query, after any class counts."""
        answers = Stage(context.answers, context.rounds_per_client, context.queries_per_round)
        return Plan(context.training, (*self.counts(context), answers))

    def counts(self, context: PublicContext) -> tuple[Stage, ...]:
        """Return the stage of class counts, which need a server that sees each client's answers."""
        seen = context.answers.noise_at == "client"
        return counts_stage(context, context.answers.exact) if self.class_counts and seen else ()

    # --- client ------------------------------------------------------------------------------

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Release each teacher's answer to every query with the site's mechanism (Fed-FlexPer)."""
        if request.kind == "counts" and self.class_counts:
            return release_class_counts(request, site, site.answers.exact)
        return super().client(request, site)

    def gradients(
        self, sensitive: NDArray[np.float64], predictions: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Return the teachers' (n, B, K) gradients of Eq. 2, or of classic distillation."""
        if self.distillation == "classic":
            return losses.kd_gradients(sensitive, predictions)
        return losses.decoupled_kd_gradients(sensitive, predictions, self.balance)

    # --- server ------------------------------------------------------------------------------

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Run Algorithm 2, with a buffer of answered samples."""
        student = context.make_student(streams.torch("student"))
        discriminator = self.fetch_discriminator(federation, context)
        counts = KnownCounts(federation, context, requested=bool(self.counts(context)))
        kept = self.make_kept(context, streams)
        generators = {"generator": kept} if kept else {}
        buffer = resume.load(student=student, **generators) if resume else []
        known: list[torch.Tensor] = []  # features of the first batches of the buffer

        for number in range(len(buffer) + 1, context.rounds + 1):
            images = self.draw(discriminator or student, context, streams, number, buffer, kept)
            images = procedural.apply_polarity(images, self.infer_polarity(buffer))
            predictions = self.predictions(student, images, context)
            sent = Request(number, images, predictions)
            total = self.collect(federation, sent, context, counts)
            request = total.request
            if total.count == 0 and not buffer:
                raise nobody_answers(total.refused)
            exhausted = total.count == 0  # every client's budget is spent
            if not exhausted:
                buffer.append(ReplayBuffer.of(total, self.noisy_labels(context, total)))
            last = exhausted or number == context.rounds
            previous = student
            if last:  # a student first trained on few answers never catches up: restart it
                student = context.make_student(streams.torch("last student"))
            with in_float64(student):
                metrics = self.train_student(student, buffer, context, streams, number, last, known)
            if last and number > 1:
                student = self.better_student(student, previous, buffer, context)
                metrics["last_student_kept"] = float(student is not previous)
            generated = self.mixture(len(request.images))["generated"]
            stepped = self.images_per_generator if kept else generated
            discriminated = stepped * self.generator_steps if discriminator else 0
            yield Round(
                State.of(len(buffer), buffer, student=student, **generators),
                student,
                metrics,
                total.refused,
                forward_answers=total.count * len(request.images) + discriminated,
                backward_answers=discriminated,
            )
            if exhausted:
                return

    def collect(
        self,
        federation: Federation,
        request: Request,
        context: PublicContext,
        counts: KnownCounts,
    ) -> Aggregate:
        """Return the sum of the answers, weighted by class counts if these are requested."""
        if not counts.requested:
            return federation.total(request)
        replies = counts.with_counts(federation.each(request))
        request, answers = replies.request, replies.answers
        if not answers:
            return Aggregate(request, np.zeros(request.predictions.shape), 0, replies.refused)
        class_weights = counts.weights(answers)
        count = sum(own.teachers for own in answers.values())
        means = {client: own.values / own.teachers for client, own in answers.items()}
        if self.pooling == "odds":
            mean = pool_odds(means, class_weights, self.pools_by_shares(context.training))
        else:
            mean = average_by_class(means, class_weights, signed=not context.answers.shares)
        return Aggregate(request, count * mean, count, replies.refused)

    def pools_by_shares(self, training: Training) -> bool:
        """Return whether odds are pooled by shares: training is private, the student solved for."""
        return training.private and self.final_fit == "least_squares"

    def fetch_discriminator(
        self, federation: Federation, context: PublicContext
    ) -> Classifier | None:
        """Return the teacher to train generators against; None for the student itself."""
        return None

    def predictions(
        self, student: nn.Module, images: NDArray[np.uint8], context: PublicContext
    ) -> NDArray[np.float32]:
        """Return the (Q, K) predictions to send, which are nearly uniform for gradients.

        If the student agrees with the teacher, normalisation amplifies an uninformative gradient.
        Near the uniform prediction, the gradient points to the teacher's class.
        """
        predictions = predict(student, images, context.device)
        if context.answers.input != "gradient":
            return predictions
        uniform = np.float32(1 / context.num_classes)
        return uniform + np.float32(self.prediction_weight) * (predictions - uniform)

    def noisy_labels(self, context: PublicContext, total: Aggregate) -> NDArray[np.float64]:
        """Return the (B, K) labels of Eq. 6 from the sum of the answers (free post-processing).

        A gradient whose norm is its bound moves a label by `label_step`. (The paper moves it by
        step * bound, which is 0.1 * 0.001 for an epsilon up to 1.)
        """
        predictions = total.request.predictions
        return context.answers.labels(total.sum, total.count, predictions, self.label_step)

    def train_student(
        self,
        student: Classifier,
        buffer: list[ReplayBuffer],
        context: PublicContext,
        streams: Streams,
        number: int,
        last: bool,
        known: list[torch.Tensor] | None = None,
    ) -> dict[str, float]:
        """Train the student by Eq. 7 on batches from the whole buffer, with Adam.

        With `final_fit="least_squares"`, the last student is solved for instead. `known` are
        features of earlier rounds' images, as for `trainable_part`.

        Returns:
            The last loss, and the wall-clock seconds of all steps, as metrics of the round.
        """
        steps = self.final_student_steps if last else self.student_steps
        whole = ReplayBuffer.joined(buffer)
        model, take = trainable_part(student, whole.images, context.device, known=known)
        started = time.perf_counter()
        if last and self.final_fit == "least_squares":
            labels = torch.from_numpy(whole.labels).to(context.device)
            features = take(np.arange(len(labels)))
            fit_log_probabilities(cast(nn.Linear, model), features, labels)
            return _metrics(losses.student_loss(model(features), labels), started)
        optimiser = Adam(model.parameters(), self.student_learning_rate, foreach=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, self.student_learning_rate, total_steps=max(steps, 20), pct_start=0.1
        )
        labels = torch.from_numpy(whole.labels).to(student.classifier.weight.dtype)
        loss_of = self.student_loss(context, whole.predictions)
        rng = streams.torch("replay", query_id=number)
        student.train()

        def batch_losses() -> Iterator[torch.Tensor]:
            for _ in track("steps of the student", range(steps)):
                chosen = torch.randint(len(labels), (self.batch_size,), generator=rng).numpy()
                inputs = augment(take(chosen), self.shift, self.flip, rng)
                yield loss_of(model(inputs), labels[chosen].to(context.device), chosen)
                schedule.step()

        rates = rates_of(self, "student_learning_rate")
        return _metrics(descend(optimiser, batch_losses(), "the student", rates), started)

    def better_student(
        self,
        last: Classifier,
        previous: Classifier,
        buffer: list[ReplayBuffer],
        context: PublicContext,
    ) -> Classifier:
        """Return the student that agrees better with all answers, which are public.

        Noise in the labels raises both losses by about the same. But a student that learnt the
        noise itself has a lower loss, and no public answers are held out to notice it.
        """
        whole = ReplayBuffer.joined(buffer)
        labels, loss_of = (
            torch.from_numpy(whole.labels),
            self.student_loss(context, whole.predictions),
        )
        predicted = Images(whole.images).predict_all([last, previous])
        logits = torch.from_numpy(predicted).clamp_min(losses.SMALLEST_PROBABILITY).log()
        everything = np.arange(len(labels))
        new, old = (loss_of(own, labels, everything).item() for own in logits)
        if new <= old:
            return last
        steps = self.final_fit == "steps"
        logger.warning(
            "method.%s: the last student agrees less with the answers (loss %.4g) than the student "
            "before it (%.4g), which is kept; use %s",
            f"final_student_steps={self.final_student_steps}"
            if steps
            else "final_fit=least_squares",
            *(new, old, "more steps" if steps else "method.final_fit=steps"),
        )
        return previous

    def student_loss(self, context: PublicContext, predictions: NDArray[np.float32]) -> StudentLoss:
        """Return L_s: the mechanism's loss, or the cross-entropy at a temperature.

        Args:
            context: the public facts.
            predictions: (N, K) predictions that were sent with the buffer's images.
        """
        if self.temperature == 1:
            return context.answers.student_loss(predictions)
        return lambda logits, labels, _: losses.student_loss(logits, labels, self.temperature)


def _metrics(loss: torch.Tensor, started: float) -> dict[str, float]:
    """Return the metrics of the student's training, which began at `started`."""
    value = loss.item()  # reading it waits for the device
    return {"student_loss": value, "student_seconds": round(time.perf_counter() - started, 4)}
