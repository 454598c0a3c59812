"""Noisy class counts, sums and second moments of records' features, in a single message.

A client's features are described by their first two moments, as in FedCGS (arXiv 2503.06962) and
GH-OFL (arXiv 2602.01186). Noise in sufficient statistics follows Mehta, Krichene, Thakurta,
Kurakin, Cutkosky: "Differentially Private Image Classification from Features", arXiv 2211.13403.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.privacy import lattice
from fed_dpsd.privacy.mechanism import ONE_TEACHER, NoiseAt, Quorum, Shards
from fed_dpsd.privacy.record_sums import RecordSums
from fed_dpsd.privacy.training import TrainedUnit

# Norms of the second moments, the class sums and the class counts of a record; in total 1.
NORMS = 0.6, math.sqrt(1 - 0.6**2 - 0.3**2), 0.3


@dataclass(frozen=True)
class ClassStatistics(RecordSums):
    """The second moments of all records' features, and each class's sum and number, plus noise.

    A record's F features, minus a public centre, are scaled to length 1: u, (F,).

    Guarantee: the guarantee of `RecordSums`. A record's part consists of u u^T, of u for its class
    and of 1 for its class, with norms NORMS (`lattice.moments_sum`; docs/proofs.md, Theorem 24).
    Only the inner product of u for two records may be negative, so replacing moves less than 2:
    `replaced` is a bound, which no record reaches.
    """

    name: ClassVar[str] = "class_statistics"
    kind: ClassVar[Literal["gradients", "statistics"]] = "statistics"
    method: ClassVar[str] = "class_statistics"
    what: ClassVar[str] = "class counts, and sums of its records' features and of their products"
    part: ClassVar[str] = "part"
    replaced: ClassVar[float] = math.sqrt(2 + 2 * NORMS[1] ** 2)
    num_classes: int  # K, >= 2
    noise_multiplier: float  # standard deviation of the noise / the largest norm of a part, > 0
    unit: TrainedUnit = "record"  # the unit with a part of norm at most 1
    records_per_patient: int = 1
    copies: int = 1
    noise_at: NoiseAt = "client"
    quorum: Quorum | None = None
    shards: Shards = ONE_TEACHER

    def sensitive_sum(self, shard: lattice.LinearShard, at: NDArray[np.float32]) -> torch.Tensor:
        """Return the exact sum of the statistics of the records' features minus the (F,) `at`.

        Raises:
            ValueError: there are too many records.
        """
        records = lattice.Rows.of(shard.inputs - torch.from_numpy(at), shard.labels)
        return lattice.moments_sum(records, self.num_classes, NORMS)

    def size_of_request(self, layer: nn.Linear) -> int:
        """Return F."""
        return layer.in_features

    def statistics(
        self, total: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return the (F, F) sum of u u^T, the (K, F) sums of u and the (K,) numbers of records."""
        return lattice.of_moments(total, self.num_classes, NORMS)

    def noise_of_moments(self, draws: float) -> float:
        """Return the standard deviation of the sum of u u^T, on its diagonal.

        Args:
            draws: the number of noise shares of standard deviation `scale` in the sum.
        """
        return self.scale * draws**0.5 / NORMS[0]
