"""Sums over a client's records of bounded parts, plus Gaussian noise.

Classes define the part of a record: a clipped gradient, or statistics of its features.
"""

import math
from abc import abstractmethod
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, NonPrivateDpEvent
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.events import FinitePrecisionDpEvent
from fed_dpsd.privacy.lattice import LinearShard
from fed_dpsd.privacy.mechanism import (
    Mechanism,
    NoiseAt,
    Quorum,
    Relation,
    Shards,
    Unit,
    Values,
    check_noise_at,
    check_size,
    noise_share,
)
from fed_dpsd.privacy.noise import FARTHEST, GAUSSIAN_LOSS, Rng, lattice_spacing, noisy_sum
from fed_dpsd.privacy.training import TrainedUnit, patient_problems

MOST_NUMBERS = 2**20  # of a sum
MOST_STEPS = 2.0**48  # of the lattice, in a client's sum; the sums of 2^14 clients fit in 63 bits


class RecordSums(Mechanism):
    """The sum of all records' parts, each of L2 norm at most 1, plus Gaussian noise.

    Subclasses are data classes with these fields, in an order of their own.

    Guarantee: a record moves the exact sum of its client by a norm of at most 1
    (`sensitive_sum`). Truncating the d numbers of a sum to the noise's lattice of spacing g
    moves two sums at most g sqrt(d) further apart, and limiting their size moves none apart. With
    `noise_at="distributed"`, the shares of threshold - colluding honest clients have the whole
    variance. So a release is a Gaussian mechanism of noise multiplier noise_multiplier / (1 + g
    sqrt(d)), divided by `replaced` for a replaced record (docs/proofs.md, Theorem 23). With
    `unit="patient"`, patients replace records, as in `SampledGaussian`. Nothing is proven for a
    client, whose records may be any number.

    Attributes:
        kind: the kind of its requests.
        method: the method that learns from these sums.
        what: a description of the sums, and `part` of what a record adds.
        replaced: a bound on the norm of the difference between two parts.
    """

    input: ClassVar[Literal["gradient"]] = "gradient"
    calibrated_by: ClassVar[str] = "noise_multiplier"
    additive: ClassVar[Literal[True]] = True
    noise_law: ClassVar[Literal["gaussian"]] = "gaussian"
    from_teachers: ClassVar[bool] = False
    kind: ClassVar[Literal["gradients", "statistics"]]
    method: ClassVar[str]
    what: ClassVar[str]
    part: ClassVar[str]
    replaced: ClassVar[float] = 2.0
    num_classes: int  # K, >= 2
    # standard deviation of the noise / the largest norm of a part, > 0
    noise_multiplier: float
    unit: TrainedUnit  # the unit with a part of norm at most 1
    records_per_patient: int  # as for `SampledGaussian`
    copies: int  # as for `SampledGaussian`
    # "client" (each client adds the whole noise) or "distributed" (each adds a share)
    noise_at: NoiseAt
    quorum: Quorum | None  # of the secure sum; only with noise_at="distributed"
    shards: Shards

    def __post_init__(self) -> None:
        check_noise_at(self.noise_at, self.quorum)
        if self.noise_at == "server":
            raise ValueError("noise_at=server: no server may see these sums; use distributed")
        _ = self.step  # checks the other fields
        check_size("noise_multiplier", self.noise_multiplier)

    @property
    def largest_part(self) -> float:
        """Return the norm of a part that becomes 1 in a sum."""
        return 1.0

    @abstractmethod
    def sensitive_sum(self, shard: LinearShard, at: NDArray[np.float32]) -> torch.Tensor:
        """Return the exact sum of the records' parts, (P,) float64.

        Args:
            shard: a linear layer and all records.
            at: the public numbers of the request, which parts may depend on.
        """

    @abstractmethod
    def size_of_request(self, layer: nn.Linear) -> int:
        """Return how many numbers a request must have."""

    @property
    def step(self) -> DPSGD:
        """Return the step of DP-SGD on all records of all clients with the same event."""
        return DPSGD(
            noise_multiplier=self.noise_multiplier,
            sample_rate=1.0,
            steps=1,
            max_grad_norm=self.largest_part,
            learning_rate=1.0,  # the server's
            copies=self.copies,
            unit=self.unit,
            records_per_patient=self.records_per_patient,
        )

    @property
    def reason(self) -> str:
        """Return why nothing is proven for larger units."""
        return self.step.reason

    @property
    def scale(self) -> float:
        """Return the standard deviation of a client's noise, or noise share."""
        return noise_share(self.noise_multiplier, self.quorum)

    @property
    def lattice(self) -> float:
        """Return the spacing of the noise's lattice; see `lattice_spacing`."""
        return lattice_spacing(self.scale)

    def constrain_sensitivity(
        self, sensitive_value: Values, predictions: Values
    ) -> NDArray[np.float64]:
        """Limit the (P, 1) numbers of a sum, so that sums of clients are exact."""
        most = MOST_STEPS * self.lattice
        return np.clip(np.nan_to_num(np.asarray(sensitive_value, np.float64)), -most, most)

    def add_noise(self, value: Values, predictions: Values, rng: Rng) -> NDArray[np.float64]:
        """Sum (n, P, 1) `value` over n and add noise of `scale` to each number.

        Raises:
            ValueError: there are more numbers than an event covers.
        """
        if value[0].size > MOST_NUMBERS:
            raise ValueError(f"{value[0].size:,} numbers; a release covers {MOST_NUMBERS:,}")
        return noisy_sum(value, self.scale, self.noise_law, rng)

    def admissible(self, values: Values, predictions: Values, teachers: int) -> NDArray[np.bool_]:
        """Mark the (P,) rows that are not too large."""
        most = MOST_STEPS * self.lattice + FARTHEST * self.scale
        return np.asarray((np.abs(values) <= most).all(axis=1))

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return one Gaussian mechanism; truncation to the lattice lowers its multiplier."""
        if not self.step.bounds(unit):
            return NonPrivateDpEvent()
        most = self.replaced if self.step.replaces(unit, relation) else 1
        moved = most * (1 + self.lattice * math.sqrt(MOST_NUMBERS))
        return ComposedDpEvent(
            [
                GaussianDpEvent(self.noise_multiplier / moved),
                FinitePrecisionDpEvent(MOST_NUMBERS * GAUSSIAN_LOSS),
            ]
        )

    def check(self, config: Any, method: Any, training: Any) -> list[str]:
        """Return the problems with these answers in an experiment."""
        problems = super().check(config, method, training)
        if getattr(method, "sums", None) != self.name:
            problems.append(f"answers={self.name} releases {self.what}; use method={self.method}")
        return problems + patient_problems("answers", self.unit, config)

    def describe(self) -> str:
        """Describe what leaves a client."""
        noise = "a share of the noise of" if self.quorum else "noise of"
        return (
            f"{self.what}, with {noise} {self.noise_multiplier:.6g} times the largest "
            f"{self.part} of a {self.unit}"
        )

    def worst_case(self) -> tuple[Values, Values]:
        """Return the (1, 1, K) sums of two worlds, which are `replaced` apart."""
        first = self.replaced / 2 * np.eye(1, self.num_classes)[None]
        return first, -first
