"""DGD: discriminative-generative distillation, from many teachers' votes on a few images.

Ge, Liu, Wang, Li, Zeng: "Learning Privacy-Preserving Student Networks via Discriminative-Generative
Distillation", IEEE Transactions on Image Processing 32 (2023).

A client trains a baseline (one classifier of all its records) and an ensemble of teachers on
disjoint shards. The server trains a generator against the baseline, and a variational autoencoder
on the generator's images. It sends a few of these images to the ensemble. The student learns from
the resulting labels and from the autoencoder's versions of all other images. With
`answers=noisy_max`, the labels are as in the paper.

The guarantee has two parts that add up: the baseline's training and the votes. The paper counts
only the votes. Without noise in the baseline's training (`training@method.baseline=plain`), nothing
is proven. With `generator_steps=0`, no baseline is needed: none is trained or released, and only
the votes count.

Several clients correspond to the paper's distributed deployment (Sec. III-E). Their releases are
summed, so with `answers=votes`, all their teachers vote together. Each client has its own baseline
and the guarantee of its own releases.

Differences from the paper:
- The client draws the noise of the votes; the paper has a trusted aggregator.
- The generator is ours, and one of its rounds (Sec. III-B) is one step. Eq. 2 rewards activations,
  as the text says, by their mean, as in DAFL; with the printed L1 norm, 5 of 10 classes vanish.
- Eqs 1 and 5 are means over a batch, not sums over all images; Eq. 6 compares features by mean
  square.
- With several clients, each may have any number of teachers, and the mean loss of all baselines
  trains the generator; the paper has one teacher per client and one baseline.
- The student is our small CNN.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from fed_dpsd import losses
from fed_dpsd.checks import dp_sgd_networks
from fed_dpsd.config import STRICT, Config, Positive
from fed_dpsd.methods.method import (
    Federation,
    Method,
    PublicContext,
    ReplayBuffer,
    Round,
    Site,
    State,
    counts_of,
    nobody_answers,
    require_fractions,
)
from fed_dpsd.methods.white_box import read_teachers
from fed_dpsd.models import initialise, procedural
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.divergence import descend, rates_of
from fed_dpsd.models.inference import predict, to_bytes, to_unit
from fed_dpsd.papers.vae import VAE
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.mechanism import Mechanism
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.training import BaselineWeights, Training, TrainingMechanism
from fed_dpsd.protocol import Refusal, Request, Response
from fed_dpsd.streams import Streams

VAE_WIDTH = 16  # channels of the autoencoder's first convolution
GENERATOR_ROUNDS = 80  # steps at a learning rate; it falls to a tenth after them
LOSSES = {"cross_entropy": losses.student_loss, "squared": losses.squared_loss}


@dataclass(frozen=True, config=STRICT)
class DGD(Method):
    """DGD; conf/method/dgd.yaml explains the fields."""

    trainings: ClassVar[tuple[str, ...] | None] = ("plain",)
    baseline: Training
    synthetic_images: PositiveInt
    areas_fraction: float
    lines_fraction: float
    polarity: Literal["both", "dark", "light"]
    latent_size: PositiveInt
    generator_steps: NonNegativeInt
    generator_learning_rate: Positive
    entropy_weight: float
    activation_weight: float
    code_size: Annotated[int, Field(ge=2)]
    vae_steps: NonNegativeInt
    epsilon_1: Positive | None
    perturbation: NonNegativeFloat
    unsupervised_weight: NonNegativeFloat
    label_loss: Literal["cross_entropy", "squared"]
    student_steps: PositiveInt
    learning_rate: Positive
    batch_size: Annotated[int, Field(ge=2)]

    def __post_init__(self) -> None:
        require_fractions(self.fractions, "the generator makes the other images")

    @property
    def fractions(self) -> dict[str, float]:
        """Return the fractions of procedural images by kind."""
        return {"areas": self.areas_fraction, "lines": self.lines_fraction}

    def check(self, config: Config, training: Training, answers: Mechanism) -> list[str]:
        """Return the problems with the method in an experiment."""
        problems = super().check(config, training, answers)
        if self.generator_steps:
            problems += dp_sgd_networks(config, self.baseline, "training@method.baseline")
        if config.teacher.path is not None:
            problems.append(
                f"teacher.path={config.teacher.path}: method={self.name} trains its baseline "
                "itself, with its own training; use teacher.path=null"
            )
        if isinstance(self.baseline, TrainingMechanism) and self.baseline.unit != "record":
            problems.append(
                f"method.baseline.unit={self.baseline.unit}: a baseline's unit can only be the "
                "record; use method.baseline.unit=record"
            )
        if not config.federation.simulation:
            problems.append(
                f"method={self.name} trains a classifier on all records with settings from "
                "a message, which only a simulation allows; use method=fed_dpsd"
            )
        return problems

    def warnings(self, config: Config, training: Training, answers: Mechanism) -> list[str]:
        """Also warn if the generator makes most images, which teach little."""
        found = super().warnings(config, training, answers)
        if sum(self.fractions.values()) < 0.5:
            found.append(
                f"method={self.name}: its generator makes most images, which teach little "
                "(results/family.md), so expect a student far below its teachers; use "
                "method.generator_steps=0 method.areas_fraction=0.5 method.lines_fraction=0.5 and "
                "more queries_per_round"
            )
        return found

    def plan(self, context: PublicContext) -> Plan:
        """Return one client's stages: one baseline, if needed, and an answer per query."""
        before = (Stage(BaselineWeights(self.baseline), 1, 1),) if self.generator_steps else ()
        plan = super().plan(context)
        return replace(plan, stages=(*before, *plan.stages))

    # --- client ------------------------------------------------------------------------------

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Release the baseline's weights, or the ensemble's answers to images."""
        if request.kind == "baseline" and self.generator_steps:
            mechanism = BaselineWeights(self.baseline)
            return site.release(mechanism, site.sensitive_baseline(mechanism, request), request)
        return super().client(request, site)

    # --- server ------------------------------------------------------------------------------

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Run the two streams; each round sends the next synthetic images."""
        generator = context.make_generator(self.latent_size, streams.torch("generator"))
        vae = initialise(
            lambda: VAE(context.image_shape, self.code_size, VAE_WIDTH),
            streams.torch("autoencoder"),
        ).to(context.device)
        student = context.make_student(streams.torch("student"))
        learners = {"student": student, "generator": generator, "vae": vae}
        buffer = resume.load(**learners) if resume else []
        baselines = []
        if not resume and self.generator_steps:
            baselines = fetch_baselines(federation, context)
            self.train_generator(generator, baselines, context, streams)
        images = self.synthesise(generator, context, streams)
        if resume is None and self.unsupervised_weight > 0:  # nothing else reads the autoencoder
            self.train_vae(vae, images, context, streams)

        queries = context.queries_per_round
        for number in range(len(buffer) + 1, context.rounds + 1):
            queried = images[(number - 1) * queries : number * queries]
            predictions = predict(student, queried, context.device)
            total = federation.total(Request(number, queried, predictions))
            if total.count == 0:
                if not buffer:
                    raise nobody_answers(total.refused)
                return
            labels = context.answers.labels(total.sum, total.count, total.request.predictions)
            buffer.append(ReplayBuffer.of(total, hard_labels(labels)))
            loss = self.train_student(student, vae, buffer, images, context, streams, number)
            trained = len(baselines) * self.generator_steps * self.batch_size if number == 1 else 0
            yield Round(
                State.of(number, buffer, **learners),
                student,
                {"student_loss": loss},
                total.refused,
                forward_answers=total.count * len(queried) + trained,
                backward_answers=trained,
            )

    def train_generator(
        self,
        generator: nn.Module,
        baselines: Sequence[Classifier],
        context: PublicContext,
        streams: Streams,
    ) -> None:
        """Train the generator on Eq. 2, averaged over its fixed discriminators, the baselines.

        These are the five steps of Sec. III-B.
        """
        rng = streams.torch("latents")
        optimiser = Adam(generator.parameters(), self.generator_learning_rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, GENERATOR_ROUNDS, 0.1)
        generator.train()

        def losses() -> Iterator[torch.Tensor]:
            for _ in range(self.generator_steps):
                latents = torch.randn((self.batch_size, self.latent_size), generator=rng)
                images = generator(latents.to(context.device))
                yield torch.stack([self.generator_loss(own, images) for own in baselines]).mean()
                schedule.step()

        descend(optimiser, losses(), "the generator", rates_of(self, "generator_learning_rate"))

    def generator_loss(self, baseline: Classifier, images: torch.Tensor) -> torch.Tensor:
        """Return Eq. 2, which rewards confidence, balance over classes and large activations."""
        features = baseline.features(images)
        logits = baseline.classifier(features)
        weights = 1.0, self.entropy_weight, self.activation_weight
        return losses.dafl_loss([features], logits, *weights)

    def synthesise(
        self, generator: nn.Module, context: PublicContext, streams: Streams
    ) -> NDArray[np.uint8]:
        """Return all (N, C, H, W) uint8 synthetic images in random order; the first are sent."""
        needed = max(self.synthetic_images, context.rounds * context.queries_per_round)
        counts = counts_of(self.fractions, needed)
        parts = procedural.draw(counts, context.image_shape, streams, 1)
        rates = rates_of(self, "generator_learning_rate")
        left, rng = needed - sum(counts.values()), streams.torch("synthetic images")
        while left > 0:
            latents = torch.randn((self.batch_size, self.latent_size), generator=rng)
            with torch.no_grad():
                parts.append(to_bytes(generator(latents.to(context.device)), rates)[:left])
            left -= len(parts[-1])
        images = procedural.apply_polarity(np.concatenate(parts), self.polarity)
        return images[streams.numpy("order of images").permutation(needed)]

    def train_vae(
        self, vae: VAE, images: NDArray[np.uint8], context: PublicContext, streams: Streams
    ) -> None:
        """Train the autoencoder on the synthetic images."""
        rng = streams.torch("batches of the autoencoder")
        optimiser = Adam(vae.parameters(), self.learning_rate)
        schedule = decay_to_zero(optimiser, self.vae_steps)

        def losses() -> Iterator[torch.Tensor]:
            for _ in range(self.vae_steps):
                chosen = torch.randint(len(images), (self.batch_size,), generator=rng).numpy()
                yield vae.loss(to_unit(images[chosen], context.device), rng)
                schedule.step()

        descend(optimiser, losses(), "the autoencoder", rates_of(self, "learning_rate"))

    def train_student(
        self,
        student: Classifier,
        vae: VAE,
        buffer: list[ReplayBuffer],
        images: NDArray[np.uint8],
        context: PublicContext,
        streams: Streams,
        number: int,
    ) -> float:
        """Train on labelled and unlabelled images (Eq. 1); return the last loss."""
        whole = ReplayBuffer.joined(buffer)
        labelled, labels = whole.images, torch.from_numpy(whole.labels)
        rng = streams.torch("replay", query_id=number)
        optimiser = Adam(student.parameters(), self.learning_rate, foreach=True)
        schedule = decay_to_zero(optimiser, self.student_steps)
        student.train()
        weight = self.unsupervised_weight
        unlabelled = images[context.rounds * context.queries_per_round :]  # the others are queried

        def losses() -> Iterator[torch.Tensor]:
            for _ in range(self.student_steps):
                chosen = torch.randint(len(labelled), (self.batch_size,), generator=rng).numpy()
                logits = student(to_unit(labelled[chosen], context.device))
                loss = LOSSES[self.label_loss](logits, labels[chosen].to(context.device))  # Eq. 5
                if weight > 0 and len(unlabelled):
                    drawn = torch.randint(len(unlabelled), (self.batch_size,), generator=rng)
                    inputs = to_unit(unlabelled[drawn.numpy()], context.device)
                    loss = loss + weight * self.smoothness(student, vae, inputs, rng)
                yield loss
                schedule.step()

        rates = rates_of(self, "learning_rate")
        return descend(optimiser, losses(), "the student", rates).item()

    def smoothness(
        self, student: Classifier, vae: VAE, images: torch.Tensor, rng: torch.Generator
    ) -> torch.Tensor:
        """Return Eq. 6: changes of features along tangents and normals, and entropies.

        Standard normal codes lie near a sphere. A tangent is orthogonal to a code, and the normal
        is the direction of the code (Eq. 4). The paper prints the negative entropy, which is
        smallest for an undecided student, but its text requires a decided one.
        """
        with torch.no_grad():
            codes = self.noisy_codes(vae.encode(images, rng), rng)
            lengths = codes.norm(dim=1, keepdim=True)
            normals = codes / lengths
            tangents = torch.randn(codes.shape, generator=rng).to(codes)
            tangents -= (tangents * normals).sum(1, keepdim=True) * normals
            tangents /= tangents.norm(dim=1, keepdim=True)
            moves = [self.perturbation * lengths * way for way in (normals, tangents)]
            triple = torch.cat([vae.decode(codes), *(vae.decode(codes + own) for own in moves)])
        features, across, along = student.features(triple).chunk(3)
        moved = (features - across).square().mean() + (features - along).square().mean()
        probabilities = student.classifier(features).softmax(1)
        return moved - losses.sample_entropy_loss(student.classifier(features)) / len(probabilities)

    def noisy_codes(self, codes: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        """Return codes with the Laplace noise for epsilon_1, scaled back to their sphere.

        Without epsilon_1, return them unchanged.

        Codes are divided by their largest entry, so any two codes are at most 2c apart in L1.
        Noise of scale 2c / epsilon_1 hides which synthetic image a code belongs to (Theorem 1). It
        protects no record, because all synthetic images are public.
        """
        if self.epsilon_1 is None:
            return codes
        scale = 2 * self.code_size / self.epsilon_1
        uniform = torch.rand(codes.shape, generator=rng, dtype=torch.float64) - 0.5
        noise = -scale * uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.5 - 1e-12))
        noisy = codes / codes.abs().amax(dim=1, keepdim=True) + noise.to(codes)
        return noisy / noisy.norm(dim=1, keepdim=True) * self.code_size**0.5


def decay_to_zero(
    optimiser: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Decrease the learning rate linearly, to 0 after `steps` steps."""
    return torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, steps)


def fetch_baselines(federation: Federation, context: PublicContext) -> list[Classifier]:
    """Return the baseline of each client that answers, from its released weights."""
    replies = federation.each(context.request("baseline"))
    if not replies.answers:
        raise nobody_answers(replies.refused)
    one_each = {client: replace(own, teachers=1) for client, own in replies.answers.items()}
    return [read_teachers(own, context, client)[0] for client, own in one_each.items()]


def hard_labels(labels: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return the (B, K) one-hot classes of the largest labels (Eq. 3); zeros if all are zero."""
    classes = np.eye(labels.shape[1], dtype=np.float32)[labels.argmax(1)]
    return classes * labels.any(axis=1, keepdims=True)
