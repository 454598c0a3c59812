"""DP-MERF: a generator that matches one noisy mean of random features.

Harder, Adamczewski, Park: "DP-MERF: Differentially Private Mean Embeddings with Random Features for
Practical Privacy-Preserving Data Generation", AISTATS 2021, arXiv 2002.11603.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import torch
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, NonPrivateDpEvent
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch.nn import functional

from fed_dpsd.config import STRICT, Positive
from fed_dpsd.models.inference import IMAGES_AT_ONCE
from fed_dpsd.papers.generative import ConditionalGenerator, GenerativeTraining
from fed_dpsd.privacy.events import FinitePrecisionDpEvent
from fed_dpsd.privacy.mechanism import Relation, Unit
from fed_dpsd.privacy.noise import GAUSSIAN_LOSS, Rng, noisy_sum
from fed_dpsd.privacy.optimisers import Adam

SPACING = 2.0**-20  # of a record's numbers: their sums are exact in float64
TURN = 2.0**32  # units of an angle in a full turn
ENTRIES = 2**16  # of the table of cosines
MOST_NOISE = 32.0  # beyond it, the noise's lattice is coarser than `SPACING`
MOST_NUMBERS = 2**24


@dataclass(frozen=True, config=STRICT)
class DPMERF(GenerativeTraining):
    """One release of a sum over records, which the generator's images are then trained to match.

    A record's part is the outer product of its one-hot label with its D random Fourier features
    (Sec. 3, Eq. 5) and one constant; the constants sum to the class counts. The paper divides the
    sum by a public number of records and draws labels uniformly. Here, both follow from the noisy
    counts, so the number of records stays private and classes may differ in size.

    Guarantee: a record's part has L2 norm at most 1 and depends on this record alone, to the last
    bit: angles are whole numbers, and cosines come from a table. N(0, noise_multiplier^2) is added
    to each number of the sum. Adding or removing a record is one Gaussian mechanism at
    noise_multiplier; replacing one moves the sum by at most 2.
    """

    name: ClassVar[str] = "dp_merf"
    needs_many: ClassVar[bool] = False
    features: Annotated[int, Field(ge=2, multiple_of=2)]  # D, number of random features
    length_scale: Positive  # length scale of the Gaussian kernel, for pixels in [0, 1]
    # fraction of a record's squared norm that counts classes
    count_fraction: Annotated[float, Field(gt=0, lt=1)]

    def check(self, config: Any, method: Any, partition: Any) -> list[str]:
        """Return the problems with the training in an experiment."""
        problems = super().check(config, method, partition)
        if self.noise_multiplier > MOST_NOISE:
            problems.append(
                f"training.noise_multiplier={self.noise_multiplier:g}: beyond "
                f"{MOST_NOISE:g}, training=dp_merf rounds more coarsely than the proof allows; use "
                "at most that, or a larger epsilon"
            )
        return problems

    def describe(self, trainings: int = 1) -> str:
        """Describe how teachers are trained, `trainings` times."""
        repeated = f"{trainings:,} training runs " if trainings > 1 else ""
        return (
            f"DP-MERF: {repeated}on images of a generator that matches a sum over all records, "
            f"with noise of {self.noise_multiplier:.6g} times a record's largest part"
        )

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return one Gaussian mechanism, with noise counted up to `MOST_NOISE`."""
        if unit != "record":
            return NonPrivateDpEvent()
        moved = 2 if relation == "replace_one" else 1
        precision = FinitePrecisionDpEvent(MOST_NUMBERS * GAUSSIAN_LOSS)
        return ComposedDpEvent(
            [GaussianDpEvent(min(self.noise_multiplier, MOST_NOISE) / moved), precision]
        )

    def train_generator(
        self,
        generator: ConditionalGenerator,
        images: torch.Tensor,
        labels: torch.Tensor,
        rng: Rng,
        draws: torch.Generator,
    ) -> torch.Tensor:
        """Release the noisy sum, and train the generator to match it; see `GenerativeTraining`."""
        num_classes, size = generator.num_classes, math.prod(images.shape[1:])
        if num_classes * (self.features + 1) > MOST_NUMBERS:
            raise ValueError(
                f"features={self.features} times {num_classes} classes must be at most "
                f"{MOST_NUMBERS:,}"
            )
        frequencies = torch.randn((size, self.features // 2), generator=draws, dtype=torch.float64)
        frequencies = (frequencies * TURN / (2 * math.pi * 255 * self.length_scale)).round()
        if 255 * size * frequencies.abs().max() >= 2**53:
            raise ValueError(f"length_scale={self.length_scale} is too small for exact angles")
        total = torch.zeros((num_classes, self.features + 1), dtype=torch.float64)
        for start in range(0, len(images), IMAGES_AT_ONCE):
            batch = slice(start, start + IMAGES_AT_ONCE)
            with torch.no_grad():
                total.index_add_(0, labels[batch], self.exact_features(images[batch], frequencies))
        noisy = torch.from_numpy(
            noisy_sum(total.numpy()[None], self.noise_multiplier, "gaussian", rng)
        )
        counts = (noisy[:, -1] / math.sqrt(self.count_fraction)).clamp_min(1)
        weights = (counts / counts.sum()).float()
        mean = (noisy[:, :-1] / math.sqrt(1 - self.count_fraction) / counts.sum()).float()

        def losses() -> Iterator[torch.Tensor]:
            for _ in range(self.generator_steps):  # Eq. 8
                classes = torch.multinomial(weights, self.batch_size, True, generator=draws)
                own = fourier_features(generator(classes, draws), frequencies)
                one_hot = functional.one_hot(classes, num_classes).to(own)
                yield (one_hot.T @ own / self.batch_size - mean).square().sum()

        optimiser = Adam(generator.parameters(), self.generator_learning_rate)
        self.descend(optimiser, losses())
        return weights

    def exact_features(self, images: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Return (N, D + 1) float64 features and a constant, of norm at most 1, on a lattice."""
        # Whole numbers below 2^53: exact, so no batch or order of operations changes them.
        turns = (images.flatten(1).double() * 255).round() @ frequencies
        place = (turns.remainder(TURN) / (TURN / ENTRIES)).floor().long()
        margin = 1 - 2.0**-30  # for the rounding of the table
        scale = math.sqrt((1 - self.count_fraction) / frequencies.shape[1]) * margin
        angles = 2 * math.pi / ENTRIES * torch.arange(ENTRIES, dtype=torch.float64)
        table = (angles.cos() * scale / SPACING).trunc() * SPACING
        constant = math.trunc(math.sqrt(self.count_fraction) * margin / SPACING) * SPACING
        cosines, sines = table[place], table[(place - ENTRIES // 4) % ENTRIES]
        return torch.cat([cosines, sines, torch.full((len(images), 1), constant).double()], 1)


def fourier_features(images: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Map (B, C, H, W) images to (B, D) random Fourier features with norm 1, up to rounding."""
    angles = images.flatten(1) @ (frequencies * (2 * math.pi * 255 / TURN)).to(images)
    return torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(frequencies.shape[1])
