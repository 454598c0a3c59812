"""GEP: DP-SGD that adds most of its noise outside the subspace of public images' gradients.

Yu, Zhang, Chen, Liu: "Do not let privacy overbill utility: Gradient embedding perturbation for
private learning", ICLR 2021, arXiv 2102.12677, Algorithm 1.

The paper's public images are photographs. Here they are procedural images, so no data is needed.
Their labels are random, as in the paper. One subspace serves all parameters; samples are Poisson,
and Adam takes the steps.
"""

import math
from dataclasses import field
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from fed_dpsd.config import STRICT
from fed_dpsd.models import procedural
from fed_dpsd.models.inference import to_unit
from fed_dpsd.papers.generative import baseline_problems
from fed_dpsd.privacy import lattice
from fed_dpsd.privacy.dp_sgd import GRADIENTS_AT_ONCE, SampledGaussian, add_gaussian_noise
from fed_dpsd.privacy.noise import Rng
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.streams import Streams

CPU = torch.device("cpu")
KINDS = "areas", "lines", "leaves", "objects"  # of procedural images, in equal parts


@dataclass(frozen=True, config=STRICT)
class GEP(SampledGaussian):
    """Gradients in two parts with their own bounds and noise: embedding and residual.

    In each step, a record's gradient g has the embedding B g, for an orthonormal basis B of the
    public images' gradients, and the residual g - B^T B g.

    Guarantee: the guarantee of `SampledGaussian`. A record's vector is the pair of its embedding,
    clipped to L2 norm `max_grad_norm`, and its residual, clipped to `max_residual_norm`, both
    divided by their bounds and by sqrt(2), so that its norm is at most 1 for any basis. The basis
    depends on public images and on the weights, and so on earlier sums. A number that is not finite
    counts as zero.

    Args:
        max_grad_norm: S_1, the bound of one record's, or one patient's, embedding, > 0.
        anchors: m, number of public images, >= 1.
        basis_size: k, number of vectors in the basis, in 1..m.
        power_iterations: steps of the power method that finds the basis, >= 1.
        max_residual_norm: S_2, the bound of a residual, in 1e-6..1e6.
    """

    name: ClassVar[str] = "gep"
    title: ClassVar[str] = "GEP"
    part: ClassVar[str] = "embedding and residual"
    max_residual_norm: float = field(kw_only=True)
    anchors: PositiveInt = field(kw_only=True)
    basis_size: PositiveInt = field(kw_only=True)
    power_iterations: PositiveInt = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-6 <= self.max_residual_norm <= 1e6:
            raise ValueError(
                f"max_residual_norm={self.max_residual_norm} must be between 1e-6 and 1e6: float32 "
                "gradients are inexact outside this range"
            )
        if self.basis_size > self.anchors:
            raise ValueError(
                f"basis_size={self.basis_size} must be at most anchors={self.anchors}, the number "
                "of gradients that span the subspace"
            )

    def check(self, config: Any, method: Any, partition: Any) -> list[str]:
        """Return the problems with the training in an experiment."""
        problems = super().check(config, method, partition)
        return problems + baseline_problems(self.name, "compares gradients of images", config)

    def check_parameters(self, count: int) -> None:
        """Raise ValueError if the event or the memory does not cover this many parameters."""
        self.check_size(count + self.basis_size, math.sqrt(2))
        if self.basis_size > count or self.anchors * count > GRADIENTS_AT_ONCE:
            raise ValueError(
                f"anchors={self.anchors} and basis_size={self.basis_size} do not suit "
                f"{count:,} parameters: use at most {GRADIENTS_AT_ONCE // count:,} anchors, and a "
                f"basis of at most {count:,}"
            )

    def train(
        self,
        teacher: nn.Module,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        rng: Rng,
    ) -> None:
        """Run Algorithm 1 with Adam; comments give the paper's symbols.

        Raises:
            ValueError: the inputs have the wrong number of copies, the labels have the wrong shape,
                or there are too many records, parameters, anchors or steps.
            NotImplementedError: a layer mixes the records of a batch.
        """
        from opacus import GradSampleModule  # takes seconds to import, and few runs need it

        self._check_inputs(inputs, labels)
        size = sum(parameter.numel() for parameter in teacher.parameters())
        self.check_parameters(size)
        draws = torch.Generator().manual_seed(int(rng.random(1)[0] * 2**53))
        teacher.to(memory_format=torch.contiguous_format)
        images, classes = self.public_images(teacher, tuple(inputs.shape[2:]), draws)
        model = GradSampleModule(teacher.train(), loss_reduction="sum")
        parameters = list(model.parameters())
        optimiser = Adam(parameters, self.learning_rate)
        # All later bases have this memory layout, whose kernels `records_at_once` checks.
        basis = torch.linalg.qr(torch.randn((size, self.basis_size), generator=draws)).Q

        def gradients_of(*part: torch.Tensor) -> list[torch.Tensor]:
            return split_by_basis(lattice.single_gradients(model, *part)[:-1], basis)

        def bounded(*part: torch.Tensor) -> list[torch.Tensor]:
            embedding, its_norm, residual, norm = gradients_of(*part)
            return [
                *lattice.clip([embedding, its_norm], self.max_grad_norm),
                *lattice.clip([residual, norm], self.max_residual_norm),
            ]

        records = self.records_at_once(gradients_of, inputs, size)
        each = math.sqrt(2) * self.noise_multiplier  # so both parts have the noise of one vector
        for _ in range(self.steps):
            basis = self.basis(model, images, classes, draws)
            embeddings, residuals = self._sum_of_sample(bounded, inputs, labels, records, rng)
            noisy = add_gaussian_noise(embeddings * lattice.UNIT, each, len(embeddings), rng)
            embedding = torch.from_numpy(noisy * self.max_grad_norm).float()
            noisy = add_gaussian_noise(residuals * lattice.UNIT, each, size, rng)
            residual = torch.from_numpy(noisy * self.max_residual_norm).float()
            whole = basis @ embedding + residual
            for parameter, part in zip(
                parameters, whole.split([p.numel() for p in parameters]), strict=True
            ):
                parameter.grad = part.view_as(parameter)
            optimiser.step()
        model.to_standard_module()

    def public_images(
        self, teacher: nn.Module, shape: tuple[int, ...], draws: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw (m, 1, C, H, W) procedural images in [0, 1] and (m,) random labels."""
        with torch.no_grad():
            num_classes = teacher(torch.zeros((1, *shape))).shape[1]
        seed = int(torch.randint(2**31, (1,), generator=draws))
        counts = {kind: -(-self.anchors // len(KINDS)) for kind in KINDS}
        drawn = torch.cat(
            [to_unit(each, CPU) for each in procedural.draw(counts, shape, Streams(seed), 0)]
        )
        chosen = torch.randperm(len(drawn), generator=draws)[: self.anchors]
        classes = torch.randint(num_classes, (self.anchors,), generator=draws)
        return drawn[chosen, None], classes

    def basis(
        self,
        model: Any,
        images: torch.Tensor,
        classes: torch.Tensor,
        draws: torch.Generator,
    ) -> torch.Tensor:
        """Return B^T, a (P, k) orthonormal basis of about the k main public gradient directions."""
        parts = []
        for part in torch.arange(len(images)).split(128):
            gradients = lattice.single_gradients(model, images[part], classes[part])[:-1]
            parts.append(torch.cat([each.flatten(1) for each in gradients], 1))
        public = torch.cat(parts)  # G_a, (m, P)
        found = torch.randn((public.shape[1], self.basis_size), generator=draws)
        for _ in range(self.power_iterations):
            found = torch.linalg.qr(public.T @ (public @ found)).Q
        return found


def split_by_basis(gradients: list[torch.Tensor], basis: torch.Tensor) -> list[torch.Tensor]:
    """Split records' gradients into embeddings in a basis and residuals.

    Args:
        gradients: a (B, ...) array for each parameter.
        basis: (P, k).

    Returns:
        The (B, k) embeddings, their (B,) float64 norms, the (B, P) residuals, and their norms.
        A number that is not finite counts as zero.
    """
    whole = torch.cat([each.flatten(1) for each in gradients], 1)
    # As columns, records have the same bits at every position (see `places_agree`); as rows, they
    # may not.
    embedding = (basis.T @ whole.T).T.contiguous()
    residual = whole - (basis @ embedding.T).T
    found = []
    for part in (embedding, residual):
        part.nan_to_num_(0.0, 0.0, 0.0)
        found += [part, torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)]
    return found
