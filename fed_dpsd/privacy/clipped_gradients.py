"""Sums of records' clipped gradients plus Gaussian noise: a step of DP-SGD over many clients."""

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


@dataclass(frozen=True)
class ClippedGradients(RecordSums):
    """The sum of all records' clipped gradients plus Gaussian noise, in units of `max_grad_norm`.

    Guarantee: the guarantee of `RecordSums`. A record's part is its gradient, clipped to L2 norm
    `max_grad_norm` (`lattice.linear_sum`).
    """

    name: ClassVar[str] = "clipped_gradients"
    kind: ClassVar[Literal["gradients", "statistics"]] = "gradients"
    method: ClassVar[str] = "dp_fedsgd"
    what: ClassVar[str] = "sums of its records' clipped gradients"
    part: ClassVar[str] = "gradient"
    num_classes: int  # K, >= 2
    noise_multiplier: float  # standard deviation of the noise / max_grad_norm, > 0
    max_grad_norm: float  # bound of one record's, or one patient's, gradient, > 0
    unit: TrainedUnit = "record"  # the unit with clipped gradients
    records_per_patient: int = 1
    copies: int = 1
    noise_at: NoiseAt = "client"
    quorum: Quorum | None = None
    shards: Shards = ONE_TEACHER

    @property
    def largest_part(self) -> float:
        """Return the norm of a gradient that becomes 1 in a sum."""
        return self.max_grad_norm

    def sensitive_sum(self, shard: lattice.LinearShard, at: NDArray[np.float32]) -> torch.Tensor:
        """Return the exact sum of the records' clipped gradients at the layer's weights, (P,)."""
        nn.utils.vector_to_parameters(torch.from_numpy(at), shard.layer.parameters())
        with torch.no_grad():
            total = lattice.linear_sum(shard.layer, shard.records, self.max_grad_norm)
        return torch.cat([part.flatten() for part in total])

    def size_of_request(self, layer: nn.Linear) -> int:
        """Return the number of the layer's weights and biases."""
        return layer.weight.numel() + layer.out_features
