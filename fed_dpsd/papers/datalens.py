"""DataLens: a generator that follows noisy votes on the signs of its images' largest gradients.

Wang, Wu, Long, Rimanic, Zhang, Li: "DataLens: Scalable Privacy Preserving Training via Gradient
Compression and Aggregation", CCS 2021, arXiv 2103.11109.
"""

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from fed_dpsd.config import STRICT
from fed_dpsd.papers.taught_generative import TaughtByGradients, Teachers
from fed_dpsd.privacy.noise import Rng


@dataclass(frozen=True, config=STRICT)
class DataLens(TaughtByGradients):
    """Teachers vote for the signs of the k largest numbers of each image's gradient (Alg. 1 to 3).

    Signs are deterministic; in the paper they are random.

    Guarantee: a teacher's votes on B images are in {-1, 0, 1}, and at most k B of them are not 0,
    so replacing the teacher moves their sum by at most 2 sqrt(k B); see `TaughtGenerative`.

    Args:
        k: number of a teacher's votes on an image, >= 1, at most the number of its values.
        threshold: beta, fraction of the teachers that must agree, in [0, 1).
    """

    name: ClassVar[str] = "datalens"
    k: PositiveInt
    threshold: Annotated[float, Field(ge=0, lt=1)]

    def direction(
        self,
        teachers: Teachers,
        seen: torch.Tensor,
        classes: torch.Tensor,
        rng: Rng,
        draws: torch.Generator,
    ) -> torch.Tensor:
        """Release the signs that enough teachers vote for; see `TaughtByGradients`."""
        k = min(self.k, seen.shape[1])
        total = torch.zeros_like(seen)
        for gradients in teachers.gradients(seen, classes):
            total += top_k_signs(gradients, k).sum(0)
        noisy = self.release(total, 2 * math.sqrt(k * len(seen)), rng)
        return noisy.sign() * (noisy.abs() > self.threshold * self.teachers)


def top_k_signs(gradients: torch.Tensor, k: int) -> torch.Tensor:
    """Return the signs of the k largest numbers of each row, and 0 elsewhere (Alg. 2).

    A row with NaN or infinity has no votes.
    """
    valid = gradients.isfinite().all(-1, keepdim=True)
    gradients = gradients.where(valid, 0)
    chosen = gradients.abs().topk(k, dim=-1).indices
    return torch.zeros_like(gradients).scatter_(-1, chosen, gradients.gather(-1, chosen).sign())
