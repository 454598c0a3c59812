"""Scattering features: mean energies of edges and bars, by orientation and scale.

Tramer and Boneh use two orders and no whitening: "Differentially Private Learning Needs Better
Features (or Much More Data)", arXiv 2011.11660.
"""

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fed_dpsd.models import procedural
from fed_dpsd.models.fixed_features import FixedFeatures
from fed_dpsd.streams import Streams

SCALES = 2
ORIENTATIONS = 8
STRIDE = 2**SCALES
EXAMPLES = 4_000  # procedural images that whitening uses


class Scattering(FixedFeatures):
    """First-order scattering: C * 17 * ceil(S / 4)^2 coefficients of (C, S, S) images.

    Each pixel's neighbourhood is described by its mean brightness and by the square roots of the
    energies of eight orientations at two scales, all averaged over about four pixels.
    """

    @staticmethod
    def num_coefficients(shape: tuple[int, ...]) -> int:
        """Return the number of coefficients of an image of `shape`."""
        channels, size, _ = shape
        return channels * (1 + SCALES * ORIENTATIONS) * math.ceil(size / STRIDE) ** 2

    @staticmethod
    def coefficients(images: torch.Tensor) -> torch.Tensor:
        """Map (B, C, S, S) floats to (B, C * 17 * ceil(S / 4)^2) coefficients, rows of length 1."""
        batch, channels, size, _ = images.shape
        tiny = torch.finfo(images.dtype).tiny  # the derivative of a square root at 0 is infinite
        planes = images.reshape(batch * channels, 1, size, size)
        maps = [_filter(planes, low_pass(), STRIDE)]
        for scale in range(SCALES):
            real, imaginary = _filter(planes, wavelets(scale), 1).chunk(2, dim=1)
            modulus = (real**2 + imaginary**2).clamp_min(tiny).sqrt()
            energy = _filter(modulus.flatten(0, 1)[:, None], low_pass(), STRIDE)
            maps.append(energy.sqrt().unflatten(0, (batch * channels, ORIENTATIONS)).squeeze(2))
        rows = torch.cat(maps, 1).unflatten(0, (batch, channels)).flatten(1)
        return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-6)

    @staticmethod
    def examples(shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Draw 4,000 images: half areas and half lines."""
        return np.concatenate(
            [
                draw(EXAMPLES // 2, shape, Streams(0).numpy(f"scattering {draw.__name__}"))
                for draw in (procedural.areas, procedural.lines)
            ]
        )


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
