"""G-PATE: a generator that follows noisy votes on random projections of its images' gradients.

Long, Wang, Yang, Kailkhura, Zhang, Gunter, Li: "G-PATE: Scalable Differentially Private Data
Generator via Private Aggregation of Teacher Discriminators", NeurIPS 2021, arXiv 1906.09338.
"""

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from fed_dpsd.config import STRICT
from fed_dpsd.papers.taught_generative import TaughtByGradients, Teachers
from fed_dpsd.privacy.noise import Rng

CLIP = 1.5  # of projections, whose root mean square is 1


@dataclass(frozen=True, config=STRICT)
class GPATE(TaughtByGradients):
    """Teachers vote for the bins of their projected gradients (Alg. 1 and 2).

    The test for confident votes and the votes' maximum are both functions of one noisy histogram;
    the paper draws noise for each. Gradients are scaled to norm 1; the paper clips them.

    Guarantee: replacing a teacher moves one vote of each histogram, by sqrt(2), and the histograms
    of B images with d projections each by at most sqrt(2 B d); see `TaughtGenerative`.
    """

    name: ClassVar[str] = "g_pate"
    projections: PositiveInt  # d, number of random directions in each step
    bins: Annotated[int, Field(ge=2)]  # number of bins of a histogram
    threshold: Annotated[float, Field(ge=0, lt=1)]  # fraction of the teachers that must agree

    def direction(
        self,
        teachers: Teachers,
        seen: torch.Tensor,
        classes: torch.Tensor,
        rng: Rng,
        draws: torch.Generator,
    ) -> torch.Tensor:
        """Release the bins that enough teachers vote for; see `TaughtByGradients`."""
        size = seen.shape[1]
        axes = torch.randn((size, self.projections), generator=draws)
        total = torch.zeros((len(seen), self.projections, self.bins))
        for gradients in teachers.gradients(seen, classes):
            total += votes(gradients, axes, self.bins).sum(0)
        noisy = self.release(total, math.sqrt(2 * len(seen) * self.projections), rng)
        most, bins = noisy.max(2)
        values = ((bins + 0.5) / self.bins * 2 - 1) * CLIP * (most > self.threshold * self.teachers)
        return values @ axes.T / math.sqrt(self.projections)


def votes(gradients: torch.Tensor, axes: torch.Tensor, bins: int) -> torch.Tensor:
    """Return one-hot (T, B, d, bins) bins of (T, B, D) gradients, projected on (D, d) axes.

    A gradient with NaN or infinity, or of norm 0, has no votes.
    """
    projected = gradients / gradients.norm(dim=2, keepdim=True) @ axes
    valid = projected.isfinite()
    places = (projected.where(valid, 0).clamp(-CLIP, CLIP) / CLIP + 1) / 2 * bins
    one_hot = torch.nn.functional.one_hot(places.long().clamp_max(bins - 1), bins)
    return one_hot * valid[..., None]
