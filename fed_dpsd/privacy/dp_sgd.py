"""Training of teachers with DP-SGD; their answers then cost nothing.

Abadi et al.: "Deep Learning with Differential Privacy", arXiv 1607.00133, Algorithm 1.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.privacy import lattice
from fed_dpsd.privacy.events import (
    FinitePrecisionDpEvent,
    ReplacedInSampleDpEvent,
    ReservedDpEvent,
    ReservingDpEvent,
)
from fed_dpsd.privacy.mechanism import Relation, Unit
from fed_dpsd.privacy.noise import GAUSSIAN_LOSS, UNIFORM_STEP, Rng, noisy_sum
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.privacy.training import TrainedUnit, TrainingMechanism

SPACING = 2.0**-25  # largest spacing of the noise's lattice, over its scale; it truncates sums
# The precision loss of a training run whose steps together draw at most MOST_DRAWS numbers.
PRECISION_LOSS, MOST_DRAWS = 2.0**-17, 2**36
# The precision loss of class counts: replacing a patient of 64 records changes at most 128 counts.
COUNTS_LOSS = 128 * GAUSSIAN_LOSS
RECORDS_AT_ONCE = 32  # in each part of a network's batch, padded with zeros
GRADIENTS_AT_ONCE = 2**28  # numbers in the gradients of all records of a part
RANDOM_LAYERS = (
    "a layer draws random numbers in training, as dropout does, so a record's gradient depends on "
    "how many records precede it; remove the layer"
)
MOST_COPIES = 9  # the unchanged image, and the image shifted by a pixel in eight directions
# Images per patient: their (N, A, A) inner products take no more memory than 128 inputs.
MOST_PLACES = 64


@dataclass(frozen=True)
class SampledGaussian(TrainingMechanism):
    """Training on noisy sums of bounded vectors, with a random part of the records in each sum.

    Guarantee: a record adds a vector of L2 norm at most 1 to the sum of each step, in units in
    which N(0, noise_multiplier^2) is added to each coordinate. A record takes part in a step with
    probability `sample_rate`, independently of all others. So training is `steps` Poisson-sampled
    Gaussian mechanisms; at rate 1, they are not sampled. Class counts, if a method requests them,
    are one more Gaussian mechanism, charged separately: adding or removing a record moves one count
    by 1, and replacing a record moves two. The configuration fixes rate and steps (steps without
    records are taken too). A record is in one shard, so only one teacher is trained on it. Nothing
    is proven for a patient or a client, who may have any number of records.

    With `unit="patient"`, patients replace records: a patient adds one such vector, and contributes
    the mean of the one-hot labels of their `records_per_patient` records to the class counts. So a
    patient has the events that a record has with `unit="record"`. Changing, adding or removing a
    record changes its patient's contribution, so it has the event of a replaced patient. Nothing is
    proven for a client.
    """

    title: ClassVar[str] = "DP-SGD"
    part: ClassVar[str] = "gradient"  # what a record adds to a sum, in words
    calibrated_by: ClassVar[str] = "noise_multiplier"
    # sigma, noise standard deviation divided by the bound of a record's vector, > 0
    noise_multiplier: float
    sample_rate: float  # q, in (0, 1]
    steps: int  # number of training steps, >= 1
    max_grad_norm: float  # bound of one record's, or one patient's, gradient, > 0
    learning_rate: float  # the learning rate of Adam, > 0
    # A, the number of copies of each record's image, in 1..9: augmentation multiplicity (De et al.,
    # arXiv 2204.13650)
    copies: int = 1
    # mu^2 of the class counts as a fraction of mu^2 of the steps (exact at rate 1), > 0; None
    # releases no counts
    count_fraction: float | None = None
    # "record" or "patient", the unit that is sampled and has its gradient clipped
    unit: TrainedUnit = "record"
    # R >= 1, the largest number of records used per patient (`patient_places`); R times `copies` is
    # at most 64. With `unit="record"`, it is 1.
    records_per_patient: int = 1

    def __post_init__(self) -> None:
        for field in ("noise_multiplier", "max_grad_norm", "learning_rate", "count_fraction"):
            value = getattr(self, field)
            if value is not None and not 0 < value <= 1e30:  # a step of float32 numbers holds it
                raise ValueError(f"{field}={value} must be > 0 and at most 1e30")
        if not 1e-6 <= self.max_grad_norm <= 1e6:
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm} must be between 1e-6 and 1e6: float32 "
                "gradients are inexact outside this range"
            )
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be >= 1")
        if not 1 <= self.copies <= MOST_COPIES:
            raise ValueError(f"copies={self.copies} must be between 1 and {MOST_COPIES}")
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate={self.sample_rate} must be above 0 and at most 1")
        if self.unit not in ("record", "patient"):
            raise ValueError(f"unit={self.unit!r} must be 'record' or 'patient'")
        if self.records_per_patient < 1:
            raise ValueError(f"records_per_patient={self.records_per_patient} must be >= 1")
        if self.unit == "record" and self.records_per_patient > 1:
            raise ValueError(
                f"records_per_patient={self.records_per_patient} needs unit=patient: with "
                "unit=record every record is used"
            )
        if self.unit == "patient" and self.places > MOST_PLACES:
            raise ValueError(
                f"records_per_patient={self.records_per_patient} times copies={self.copies} must "
                f"be at most {MOST_PLACES}"
            )

    def describe(self, trainings: int = 1) -> str:
        """Describe how teachers are trained, `trainings` times."""
        repeated = f"{trainings:,} training runs of " if trainings > 1 else ""
        taken = f"about {100 * self.sample_rate:.3g} % of the records"
        return (
            f"{self.title}: {repeated}{self.steps} steps on "
            f"{'all records' if self.sample_rate == 1 else taken}, with noise of "
            f"{self.noise_multiplier:.6g} times the largest {self.part} of a {self.unit}"
        )

    @property
    def reason(self) -> str:
        """Return why nothing is proven for units larger than the training's own."""
        if self.unit == "patient":
            return "a client's number of patients is not bounded"
        return "a patient's or client's number of records is not bounded"

    @property
    def places(self) -> int:
        """Return the number of images that have their gradients clipped together."""
        return self.copies * self.records_per_patient

    @property
    def counts_classes(self) -> bool:
        """Return whether `count_fraction` is set."""
        return self.count_fraction is not None

    @property
    def count_noise(self) -> float:
        """Return the noise standard deviation of each class count; `inf` without counts.

        It is measured in records or, if patients are the unit, in patients. It grows with the noise
        of the steps, so any epsilon can be reached.
        """
        if self.count_fraction is None:
            return math.inf
        return (
            self.noise_multiplier / self.sample_rate / math.sqrt(self.steps * self.count_fraction)
        )

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return `steps` sampled Gaussian mechanisms.

        They hold for the training's unit. Adding, removing or changing a record of a patient
        replaces the patient. Nothing is proven for a unit larger than the training's.
        """
        if not self.bounds(unit):
            return NonPrivateDpEvent()
        replaced = self.replaces(unit, relation)
        step: DpEvent
        if self.sample_rate == 1:
            step = GaussianDpEvent(self.noise_multiplier / (2 if replaced else 1))
        elif replaced:
            step = ReplacedInSampleDpEvent(self.sample_rate, self.noise_multiplier)
        else:
            step = PoissonSampledDpEvent(self.sample_rate, GaussianDpEvent(self.noise_multiplier))
        steps = SelfComposedDpEvent(step, self.steps)
        whole = ComposedDpEvent([steps, FinitePrecisionDpEvent(PRECISION_LOSS)])
        if not self._reserves:
            return whole
        return ReservingDpEvent(whole, self._count_release(replaced))

    def count_event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return the Gaussian mechanism of the class counts."""
        if not self.bounds(unit):
            return NonPrivateDpEvent()
        event = self._count_release(self.replaces(unit, relation))
        return ReservedDpEvent(event) if self._reserves else event

    @property
    def _reserves(self) -> bool:
        """Return whether a budget pays for class counts together with the training.

        Otherwise, sampled steps and counts would be different settings. Gaussians always compose
        exactly.
        """
        return self.counts_classes and self.sample_rate < 1

    def _count_release(self, replaced: bool) -> DpEvent:
        counted = self._count_gaussian(replaced)
        return ComposedDpEvent([counted, FinitePrecisionDpEvent(COUNTS_LOSS)])

    def bounds(self, unit: Unit) -> bool:
        """Return whether a change of one `unit` moves a sum by a bounded length."""
        return unit != "client" and not (unit == "patient" and self.unit == "record")

    def replaces(self, unit: Unit, relation: Relation) -> bool:
        """Return whether a change replaces a unit of the training, as for a patient's record.

        A patient whose only record is removed is replaced by a gradient of zero.
        """
        return relation == "replace_one" or unit != self.unit

    def _count_gaussian(self, replaced: bool) -> DpEvent:
        # Beyond this scale the lattice matters: a record moves a count by one lattice step, a
        # patient, in parts of 1 / R, by one more step for each part (docs/proofs.md, Theorem 15).
        most = 2.0**24 / self.records_per_patient if self.unit == "patient" else 2.0**25
        return GaussianDpEvent(min(self.count_noise, most) / math.sqrt(2 if replaced else 1))

    def count(self, labels: NDArray[np.int64], num_classes: int, rng: Rng) -> NDArray[np.float64]:
        """Count labels by class, (K,), and add noise.

        If patients are the unit, each of (P, R) labels counts 1 / R. Noise is added to integer
        multiples of 1 / R, so the sums are exact.

        Raises:
            ValueError: no counts are released, or there are not R labels for each patient.
        """
        if not self.counts_classes:
            raise ValueError("count_fraction=None releases no class counts")
        shape = (len(labels),) if self.unit == "record" else (len(labels), self.records_per_patient)
        if labels.shape != shape:
            raise ValueError(f"labels of shape {labels.shape} instead of {shape}")
        parts = self.records_per_patient
        sensitive_counts = np.bincount(labels.ravel(), minlength=num_classes).astype(np.float64)
        return noisy_sum(sensitive_counts[None], self.count_noise * parts, "gaussian", rng) / parts

    def _check_inputs(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Raise ValueError for the wrong number of copies, or labels of the wrong shape."""
        if inputs.shape[1] != self.places:
            raise ValueError(
                f"{inputs.shape[1]} copies of each {self.unit} instead of {self.places}"
            )
        shape = inputs.shape[:1] if self.unit == "record" else inputs.shape[:2]
        if labels.shape != shape:
            raise ValueError(f"labels of shape {tuple(labels.shape)} instead of {tuple(shape)}")

    def check_parameters(self, count: int) -> None:
        """Raise ValueError if the event does not cover this many parameters."""
        self.check_size(count)

    def check_size(self, size: int, scale: float = 1.0) -> None:
        """Raise ValueError if the event does not cover `size` numbers with noise of scale z."""
        if self.steps * (size + 1_600) > MOST_DRAWS:
            raise ValueError(
                f"{self.steps:,} steps of {size:,} parameters draw more than {MOST_DRAWS:,} "
                "numbers; use fewer steps or a smaller teacher"
            )
        if SPACING * scale * self.noise_multiplier * math.sqrt(size) >= 0.5:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier:g} is too large for {size:,} parameters: "
                "its lattice would truncate their sums; use less noise or a smaller teacher"
            )

    def _sample(self, count: int, rng: Rng) -> torch.Tensor:
        """Sample a step's units at `sample_rate`, rounded down to a multiple of UNIFORM_STEP."""
        rate = math.floor(self.sample_rate / UNIFORM_STEP) * UNIFORM_STEP
        return torch.from_numpy(rng.random(count) < rate).nonzero()[:, 0]

    def records_at_once(
        self, function: Callable[..., Sequence[torch.Tensor]], inputs: torch.Tensor, size: int
    ) -> int:
        """Return how many records' vectors of `size` numbers to compute at once.

        `function` maps padded inputs and labels to numbers for each record. If a record's numbers
        depend on its position among the others, the result is 1.

        Raises:
            ValueError: there are too many records for exact sums, or a layer draws random numbers.
        """
        lattice.check_rows(len(inputs))
        state = torch.get_rng_state()
        held = min(RECORDS_AT_ONCE * MOST_COPIES // self.places, GRADIENTS_AT_ONCE // size)
        most = min(RECORDS_AT_ONCE, max(1, held))
        independent = lattice.places_agree(function, inputs, most)
        if not torch.equal(state, torch.get_rng_state()):
            raise ValueError(RANDOM_LAYERS)
        return most if independent else 1

    def _sum_of_sample(
        self,
        bounded: Callable[..., Sequence[torch.Tensor]],
        inputs: torch.Tensor,
        labels: torch.Tensor,
        records: int,
        rng: Rng,
    ) -> list[torch.Tensor]:
        """Sample a step's records and add up their numbers exactly, `records` at a time.

        `bounded` maps padded inputs and labels to (B, ...) integers; the sums are float64.
        """
        totals: list[torch.Tensor] = []
        for part in self._sample(len(labels), rng).split(records):
            numbers = bounded(*lattice.pad(inputs[part], labels[part], records))
            sums = [each[: len(part)].sum(0, dtype=torch.float64) for each in numbers]
            totals = list(map(torch.add, totals, sums)) if totals else sums
        return totals


@dataclass(frozen=True)
class DPSGD(SampledGaussian):
    """DP-SGD with Poisson sampling: clipped gradients of a random part of the records, plus noise.

    Guarantee: the guarantee of `SampledGaussian`. A record's vector is its gradient, which is the
    clipped mean over its copies with L2 norm at most `max_grad_norm`; N(0, noise_multiplier^2
    max_grad_norm^2) is added to each coordinate of the sum. A patient's gradient is the clipped
    mean over at most `records_per_patient` of their records. The sum is not divided by a count
    (Adam is insensitive to scale), and there is no hold-out, no early stopping and no batch
    normalisation.
    """

    name: ClassVar[str] = "dp_sgd"

    def train(
        self, teacher: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, rng: Rng
    ) -> None:
        """Take `steps` steps of Adam on noisy sums; draw samples and noise from `rng`.

        A record or patient with a non-finite gradient counts as zero in the sum.

        Raises:
            ValueError: the inputs have the wrong number of copies, the labels have the wrong shape,
                or there are too many records, parameters or steps for the proof's bounds.
            NotImplementedError: a layer (batch normalisation) mixes the records of a batch, so a
                single record's gradient is unbounded.
        """
        self._check_inputs(inputs, labels)
        self.check_parameters(sum(parameter.numel() for parameter in teacher.parameters()))
        if isinstance(teacher, nn.Linear) and teacher.bias is not None:
            self._train_linear(teacher, inputs, labels, rng)
        else:
            self._train_network(teacher, inputs, labels, rng)

    def _noisy(self, total: torch.Tensor, size: int, rng: Rng) -> torch.Tensor:
        """Add noise to a part of a sum of `size` numbers, in units of `max_grad_norm`."""
        noisy = add_gaussian_noise(total, self.noise_multiplier, size, rng)
        return torch.from_numpy(noisy * self.max_grad_norm).float()

    def _train_linear(
        self, layer: nn.Linear, inputs: torch.Tensor, labels: torch.Tensor, rng: Rng
    ) -> None:
        """Train on residuals and inputs, which give the norm of a record's gradient directly."""
        optimiser = Adam(layer.parameters(), self.learning_rate)
        size = layer.weight.numel() + layer.bias.numel()
        records = lattice.Rows.of(inputs, labels)
        for _ in range(self.steps):
            chosen = records.take(self._sample(len(labels), rng))
            with torch.no_grad():
                weight, bias = lattice.linear_sum(layer, chosen, self.max_grad_norm)
            layer.weight.grad = self._noisy(weight, size, rng)
            layer.bias.grad = self._noisy(bias, size, rng)
            optimiser.step()

    def _train_network(
        self, teacher: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, rng: Rng
    ) -> None:
        """Train on the gradient of each record or patient, as computed by Opacus."""
        from opacus import GradSampleModule  # takes seconds to import, and few runs need it

        # Opacus assumes that the weights of a convolution are contiguous.
        teacher.to(memory_format=torch.contiguous_format)
        model = GradSampleModule(teacher.train(), loss_reduction="sum")
        parameters = list(model.parameters())
        optimiser = Adam(parameters, self.learning_rate)
        gradients_of = functools.partial(lattice.single_gradients, model)
        size = sum(parameter.numel() for parameter in parameters)
        records = self.records_at_once(gradients_of, inputs, size)
        for _ in range(self.steps):
            noisy = self.noisy_gradients(gradients_of, inputs, labels, records, rng)
            for parameter, gradient in zip(parameters, noisy, strict=True):
                parameter.grad = gradient
            optimiser.step()
        model.to_standard_module()

    def noisy_gradients(
        self,
        gradients_of: lattice.GradientFunction,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        records: int,
        rng: Rng,
    ) -> list[torch.Tensor]:
        """Sample records and sum their clipped gradients, plus noise: one step of the event.

        Args:
            gradients_of: computes the gradients of `records` records and their norms, as
                `lattice.single_gradients` does; a record's gradients depend on that record alone.
            inputs: (N, A, ...).
            labels: (N,), or (N, A) if copies have their own labels.
            records: the result of `records_at_once`.
            rng: draws the sample and the noise.
        """

        def bounded(*part: torch.Tensor) -> list[torch.Tensor]:
            return lattice.clip(gradients_of(*part), self.max_grad_norm)

        totals = self._sum_of_sample(bounded, inputs, labels, records, rng)
        size = sum(total.numel() for total in totals)
        return [self._noisy(total * lattice.UNIT, size, rng) for total in totals]


def add_gaussian_noise(
    total: torch.Tensor, noise_multiplier: float, size: int, rng: Rng
) -> NDArray[np.float64]:
    """Add noise to a part of a sum of `size` numbers; a record adds a norm of at most 1 to the sum.

    The noise is float64: torch's float32 normals end at 5.77 sigma.
    """
    # Truncation to the lattice may move the sum further, so the noise is larger.
    stddev = noise_multiplier / (1 - SPACING * noise_multiplier * math.sqrt(size))
    return noisy_sum(total.numpy()[None], stddev, "gaussian", rng)
