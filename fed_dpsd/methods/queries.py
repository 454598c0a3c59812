"""The images that FedDPSD sends in a round: a public mixture, and images from trained generators.

Procedural images (fed_dpsd/models/procedural.py) depend on nothing private. Generators are trained
against the student, which depends on private data only through released answers: Liu et al., arXiv
2601.19090, Eq. 8.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

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
from fed_dpsd.models.generators import Generator
from fed_dpsd.models.inference import to_bytes
from fed_dpsd.models.precision import in_float64
from fed_dpsd.models.recombination import recombine
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.streams import Streams


@dataclass(frozen=True, config=STRICT)
class Queries:
    """The mixture of a round's images; conf/method/fed_dpsd.yaml explains the fields.

    Generators make the images that are not procedural: one that is kept and trained in every
    round, or new ones for every few images.
    """

    generators: Literal["kept", "new"]
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
        kept: Generator | None = None,
    ) -> NDArray[np.uint8]:
        """Return a round's (Q, C, H, W) uint8 images, before `apply_polarity`.

        Procedural images come first, then images recombined from the
        buffer (in the first round, from the preceding images) and the generators' images. A kept
        generator is trained first, in place; without it, new ones are made.
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
        starts = range(0, left, self.images_per_generator)
        sizes = [min(self.images_per_generator, left - start) for start in starts]
        with in_float64(discriminator):
            if kept is not None:
                made = iter(self.images_of(kept, discriminator, sizes, draws))
            else:
                made = (self.generate(discriminator, context, count, draws) for count in sizes)
            parts += map(to_bytes, made)
        return np.concatenate(parts)

    def make_kept(self, context: PublicContext, streams: Streams) -> Generator | None:
        """Return the untrained generator that a run keeps; None if it makes new ones, or none."""
        if self.generators == "new" or not self.mixture(context.queries_per_round)["generated"]:
            return None
        return context.make_generator(self.latent_size, streams.torch("generator"))

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
        """Train a new generator and `count` latent vectors by Eq. 8; return their images."""
        generator = context.make_generator(self.latent_size, rng)
        dtype = _match(generator, discriminator)
        latents = torch.randn((count, self.latent_size), generator=rng, dtype=torch.float64)
        latents = latents.to(context.device, dtype).requires_grad_(True)
        groups = [
            {"params": generator.parameters(), "lr": self.generator_learning_rate},
            {"params": [latents], "lr": self.latent_learning_rate},
        ]
        self.descend(groups, discriminator, lambda: generator(latents))
        with torch.no_grad():
            return generator(latents)

    def images_of(
        self,
        kept: Generator,
        discriminator: Classifier,
        counts: Sequence[int],
        rng: torch.Generator,
    ) -> list[torch.Tensor]:
        """Train the kept generator by Eq. 8, on new latent vectors in each step; return batches."""
        dtype = _match(kept, discriminator)
        device = next(kept.parameters()).device

        def images(count: int) -> torch.Tensor:
            latents = torch.randn((count, self.latent_size), generator=rng, dtype=torch.float64)
            return kept(latents.to(device, dtype))

        groups = [{"params": kept.parameters(), "lr": self.generator_learning_rate}]
        self.descend(groups, discriminator, lambda: images(self.images_per_generator))
        with torch.no_grad():
            made = [images(count) for count in counts]
        kept.float()
        return made

    def descend(
        self,
        groups: list[dict[str, Any]],
        discriminator: Classifier,
        images: Callable[[], torch.Tensor],
    ) -> None:
        """Take `generator_steps` steps of Eq. 8 against the discriminator."""
        discriminator.eval().requires_grad_(False)
        losses = (self.generator_loss(discriminator, images()) for _ in range(self.generator_steps))
        rates = rates_of(self, "generator_learning_rate", "latent_learning_rate")
        descend(Adam(groups, betas=(0.5, 0.999)), losses, "the generator", rates)
        discriminator.requires_grad_(True)

    def generator_loss(self, discriminator: Classifier, images: torch.Tensor) -> torch.Tensor:
        """Return Eq. 8, which rewards confidence, balance over the classes and active features."""
        features = discriminator.features(images)
        logits = discriminator.classifier(features)
        weights = self.one_hot_weight, self.entropy_weight, self.activation_weight
        return losses.generator_loss(features, logits, *weights)


def _match(generator: Generator, discriminator: Classifier) -> torch.dtype:
    """Convert a generator to the discriminator's precision, for training; return it."""
    dtype = next(discriminator.parameters()).dtype
    generator.to(dtype).train()
    generator.in_bfloat16 &= dtype == torch.float32
    return dtype
