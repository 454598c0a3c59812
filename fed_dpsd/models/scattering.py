"""Scattering features: mean energies of edges and bars, by orientation and scale.

Tramer and Boneh use two orders and no whitening: "Differentially Private Learning Needs Better
Features (or Much More Data)", arXiv 2011.11660.
"""

import functools
import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fed_dpsd.models import procedural
from fed_dpsd.models.fixed_features import (
    SIDE,
    FixedFeatures,
    drawn_in_parts,
    halvings,
    in_parts,
    reduced,
)
from fed_dpsd.streams import Streams

SCALES = 2
ORIENTATIONS = 8
STRIDE = 2**SCALES
EXAMPLES = 4_000  # procedural images that whitening uses
PARTS = 4  # along each side of a large image; energies of its details are averaged over each


class Scattering(FixedFeatures):
    """First-order scattering: C * 17 * ceil(S / 4)^2 coefficients of (C, S, S) images, S <= 32.

    Each pixel's neighbourhood is described by its mean brightness and by the square roots of the
    energies of eight orientations at two scales, all averaged over about four pixels.

    A larger image is first reduced to 32 pixels, and its details add C * 128 coefficients for each
    halving of its side that this takes: the energies of the finer scale, before the halving, in 16
    parts of the image. So an image of 224 pixels has 1,472 coefficients in grey and 4,416 in
    colour.
    """

    @staticmethod
    def num_coefficients(shape: tuple[int, ...]) -> int:
        """Return the number of coefficients of an image of `shape`."""
        channels, size, _ = shape
        kept = (1 + SCALES * ORIENTATIONS) * math.ceil(min(size, SIDE) / STRIDE) ** 2
        return channels * (kept + halvings(size) * ORIENTATIONS * PARTS**2)

    @staticmethod
    def coefficients(
        images: torch.Tensor, given: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Map (B, C, S, S) floats to (B, P) coefficients, with rows of length 1."""
        return in_parts(_coefficients, images)

    @staticmethod
    def examples(shape: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
        """Draw 4,000 images, or 2,000 large ones: half areas and half lines."""
        count = EXAMPLES if shape[1] <= SIDE else EXAMPLES // 2
        for draw in (procedural.areas, procedural.lines):
            rng = Streams(0).numpy(f"scattering {draw.__name__}")
            yield from drawn_in_parts(draw, count // 2, shape, rng)


def _coefficients(images: torch.Tensor) -> torch.Tensor:
    batch, channels, size, _ = images.shape
    planes = images.reshape(batch * channels, 1, size, size)
    details = []
    whole = planes
    for _ in range(halvings(size)):
        # An average over many pixels needs only every other one.
        energies = functional.adaptive_avg_pool2d(_moduli(whole, 0, stride=2), PARTS)
        details.append(energies.sqrt().flatten(1))
        whole = functional.avg_pool2d(whole, 2)
    planes = reduced(planes)
    maps = [_filter(planes, low_pass(), STRIDE)]
    for scale in range(SCALES):
        energy = _filter(_moduli(planes, scale).flatten(0, 1)[:, None], low_pass(), STRIDE)
        maps.append(energy.sqrt().unflatten(0, (batch * channels, ORIENTATIONS)).squeeze(2))
    rows = torch.cat(maps, 1)
    if details:
        rows = torch.cat([rows.flatten(1), *details], 1)
    rows = rows.unflatten(0, (batch, channels)).flatten(1)
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-6)


def _moduli(planes: torch.Tensor, scale: int, stride: int = 1) -> torch.Tensor:
    """Return the (N, 8, S, S) moduli of (N, 1, S, S) planes, for each orientation at a scale."""
    tiny = torch.finfo(planes.dtype).tiny  # the derivative of a square root at 0 is infinite
    real, imaginary = _filter(planes, wavelets(scale), stride).chunk(2, dim=1)
    return (real**2 + imaginary**2).clamp_min(tiny).sqrt()


def _filter(planes: torch.Tensor, kernels: torch.Tensor, stride: int) -> torch.Tensor:
    """Convolve (N, 1, S, S) planes with (M, 1, k, k) kernels; planes are mirrored at the border."""
    padded = functional.pad(planes, (kernels.shape[-1] // 2,) * 4, mode="reflect")
    return functional.conv2d(padded, kernels.to(planes), stride=stride)


@functools.cache
def wavelets(scale: int) -> torch.Tensor:
    """Return (16, 1, k, k) Morlet wavelets of eight orientations: real parts, then imaginary."""
    deviation, frequency, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 / ORIENTATIONS
    reach = (3, 5)[scale]
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64)
    row, column = torch.meshgrid(steps, steps, indexing="ij")
    waves = []
    for angle in torch.arange(ORIENTATIONS) * (math.pi / ORIENTATIONS):
        along = angle.cos() * column + angle.sin() * row
        across = angle.cos() * row - angle.sin() * column
        envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
        wave = envelope * torch.exp(1j * frequency * along)
        wave = wave - envelope * wave.sum() / envelope.sum()  # a zero mean ignores brightness
        waves.append(wave * slant / (2 * math.pi * deviation**2))
    return torch.stack([w.real for w in waves] + [w.imag for w in waves])[:, None]


@functools.cache
def low_pass() -> torch.Tensor:
    """Return the (1, 1, k, k) Gaussian of the coarsest scale, with sum 1."""
    steps = torch.arange(-6, 7, dtype=torch.float64)
    bell = torch.exp(-(steps**2) / (2 * (0.8 * 2 ** (SCALES - 1)) ** 2))
    return (bell[:, None] * bell / bell.sum() ** 2)[None, None]
