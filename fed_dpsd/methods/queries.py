"""The images that FedDPSD sends in a round: a public mixture, and images from trained generators.

Procedural images (fed_dpsd/models/procedural.py) depend on nothing private. Generators are trained
against the student, which depends on private data only through released answers: Liu et al., arXiv
2601.19090, Eq. 8.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from fed_dpsd import losses
from fed_dpsd.config import STRICT, Positive
from fed_dpsd.methods.method import (
    PublicContext,
    ReplayBuffer,
    counts_of,
    require_fractions,
)
from fed_dpsd.models import procedural
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.divergence import descend, rates_of
from fed_dpsd.models.inference import to_bytes
from fed_dpsd.models.precision import in_float64
from fed_dpsd.models.recombination import recombine
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.streams import Streams


@dataclass(frozen=True, config=STRICT)
class Queries:
    """The mixture of a round's images; conf/method/fed_dpsd.yaml explains the fields.

    Generators make the images that are not procedural, new ones for every few images.
    """

    images_per_generator: Annotated[int, Field(ge=2)]
    latent_size: PositiveInt
    generator_steps: NonNegativeInt
    generator_learning_rate: Positive
    latent_learning_rate: Positive
    one_hot_weight: float
    entropy_weight: float
    activation_weight: float
    noise_fraction: float
    areas_fraction: float
    lines_fraction: float
    leaves_fraction: float
    objects_fraction: float
    recombined_fraction: float
    polarity: Literal["both", "dark", "light", "answers"]

    def __post_init__(self) -> None:
        fractions = self.fractions
        require_fractions(fractions, "generators make the other images")
        if fractions["recombined"] == sum(fractions.values()) > 0:
            raise ValueError(
                f"recombined_fraction={self.recombined_fraction} needs procedural images to start "
                "from; set areas_fraction > 0, for example"
            )

    @property
    def fractions(self) -> dict[str, float]:
        """Return the fractions of procedural images by kind, and of recombined images."""
        return {
            "noise": self.noise_fraction,
            "areas": self.areas_fraction,
            "lines": self.lines_fraction,
            "leaves": self.leaves_fraction,
            "objects": self.objects_fraction,
            "recombined": self.recombined_fraction,
        }

    def mixture(self, queries: int) -> dict[str, int]:
        """Return how many of a round's images are of each kind; generators make the rest."""
        counts = counts_of(self.fractions, queries)
        return {**counts, "generated": queries - sum(counts.values())}

    def draw(
        self,
        discriminator: Classifier,
        context: PublicContext,
        streams: Streams,
        number: int,
        buffer: Sequence[ReplayBuffer] = (),
    ) -> NDArray[np.uint8]:
        """Return a round's (Q, C, H, W) uint8 images, before `apply_polarity`.

        Procedural images come first, then images recombined from the
        buffer (in the first round, from the preceding images) and the generators' images.
        """
        counts = self.mixture(context.queries_per_round)
        recombined, left = counts.pop("recombined"), counts.pop("generated")
        parts = procedural.draw(counts, context.image_shape, streams, number)
        if not buffer and not sum(counts.values()):
            recombined, left = 0, left + recombined  # there is nothing to recombine yet
        if recombined:
            answered = ReplayBuffer.joined(buffer) if buffer else None
            images = answered.images if answered else np.concatenate(parts)
            alike = np.zeros((len(images), context.num_classes))
            labels = answered.labels if answered else alike
            rng = streams.numpy("recombined images", query_id=number)
            parts.append(recombine(images, labels, recombined, rng))
        draws = streams.torch("generators", query_id=number)
        with in_float64(discriminator):
            while left > 0:
                count = min(self.images_per_generator, left)
                parts.append(to_bytes(self.generate(discriminator, context, count, draws)))
                left -= count
        return np.concatenate(parts)

    def infer_polarity(self, buffer: list[ReplayBuffer]) -> procedural.Polarity:
        """Return the polarity of the next images; "both" until answers determine it."""
        if self.polarity != "answers":
            return self.polarity
        if not buffer:
            return "both"
        answered = ReplayBuffer.joined(buffer)
        return procedural.varied_polarity(answered.images, answered.labels)

    def generate(
        self, discriminator: Classifier, context: PublicContext, count: int, rng: torch.Generator
    ) -> torch.Tensor:
        """Train a new generator against the discriminator by Eq. 8; return `count` images."""
        dtype = next(discriminator.parameters()).dtype
        generator = context.make_generator(self.latent_size, rng).to(dtype)
        generator.in_bfloat16 &= dtype == torch.float32
        latents = torch.randn((count, self.latent_size), generator=rng, dtype=torch.float64)
        latents = latents.to(context.device, dtype)
        latents.requires_grad_(True)
        groups = [
            {"params": generator.parameters(), "lr": self.generator_learning_rate},
            {"params": [latents], "lr": self.latent_learning_rate},
        ]
        optimiser = Adam(groups, betas=(0.5, 0.999))
        generator.train()
        discriminator.eval().requires_grad_(False)
        steps = range(self.generator_steps)
        losses = (self.generator_loss(discriminator, generator(latents)) for _ in steps)
        rates = rates_of(self, "generator_learning_rate", "latent_learning_rate")
        descend(optimiser, losses, "the generator", rates)
        discriminator.requires_grad_(True)
        with torch.no_grad():
            return generator(latents)

    def generator_loss(self, discriminator: Classifier, images: torch.Tensor) -> torch.Tensor:
        """Return Eq. 8, which rewards confidence, balance over the classes and active features."""
        features = discriminator.features(images)
        logits = discriminator.classifier(features)
        weights = self.one_hot_weight, self.entropy_weight, self.activation_weight
        return losses.generator_loss(features, logits, *weights)
