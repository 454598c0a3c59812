"""Fixed features: first-order scattering, whitened by procedural images.

With little data or a small privacy budget, a linear classifier on such features does best: it has
few parameters and need not learn how images look. Tramer and Boneh use two orders and no whitening:
"Differentially Private Learning Needs Better Features (or Much More Data)", arXiv 2011.11660.
Nothing here is fitted to private data.
"""

import functools
import hashlib
import math
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional

from fed_dpsd.models import procedural
from fed_dpsd.streams import Streams

SCALES = 2
ORIENTATIONS = 8
STRIDE = 2**SCALES
FITTED_TO = 4_000  # procedural images that whitening uses: half areas, half lines
WHITENING = 0.5  # a principal component is divided by its standard deviation to this power
REMEMBERED = 4_096  # batches whose features are cached


class Scattering(nn.Module):
    """Module from (B, C, S, S) to (B, F), F = min(num_features, C * 17 * ceil(S / 4)^2).

    Each pixel's neighbourhood is described by its mean brightness and by the square roots of the
    energies of eight orientations at two scales, all averaged over about four pixels. The principal
    components of *procedural* images make the features nearly uncorrelated. A row has root mean
    square 1, so the gradient of one record has a known length. There are no parameters.

    Args:
        shape: (C, S, S) of the images, S >= 8.
        num_features: the largest number of features; the leading components are kept.
    """

    def __init__(self, shape: tuple[int, ...], num_features: int) -> None:
        super().__init__()
        self.shape = shape
        self.num_features = min(num_features, num_coefficients(shape))
        # In a simulation all clients answer the same images, so features are cached.
        self._remembered = _remembered(shape, self.num_features)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (B, C, S, S) floats in any range to (B, F) float32."""
        # Features that a generator's gradient goes through are not cached.
        uncached = images.requires_grad or images.device.type != "cpu"
        if uncached or torch.compiler.is_compiling():
            return self._features(images)
        digest = hashlib.blake2b(images.contiguous().numpy().tobytes(), digest_size=16).digest()
        # A different number of threads may change the last bits.
        key = images.shape, images.dtype, torch.get_num_threads(), digest
        if key not in self._remembered:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
            ):  # a classifier may train on them
                self._remembered[key] = self._features(images)
            if len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        return self._remembered[key]

    def _features(self, images: torch.Tensor) -> torch.Tensor:
        mean, components = whitening(self.shape, self.num_features)
        features = (coefficients(images) - mean.to(images)) @ components.to(images)
        length = features.norm(dim=1, keepdim=True).clamp_min(1e-6)
        return features * (self.num_features**0.5 / length)


def num_coefficients(shape: tuple[int, ...]) -> int:
    """Return the number of coefficients of an image of `shape`."""
    channels, size, _ = shape
    return channels * (1 + SCALES * ORIENTATIONS) * math.ceil(size / STRIDE) ** 2


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


def _filter(planes: torch.Tensor, kernels: torch.Tensor, stride: int) -> torch.Tensor:
    """Convolve (N, 1, S, S) planes with (M, 1, k, k) kernels; planes are mirrored at the border."""
    padded = functional.pad(planes, (kernels.shape[-1] // 2,) * 4, mode="reflect")
    return functional.conv2d(padded, kernels.to(planes), stride=stride)


@functools.cache
def wavelets(scale: int) -> torch.Tensor:
    """Return Morlet wavelets of eight orientations, (16, 1, k, k): real, then imaginary parts."""
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
    """Return the Gaussian of the coarsest scale, (1, 1, k, k), with sum 1."""
    steps = torch.arange(-6, 7, dtype=torch.float64)
    bell = torch.exp(-(steps**2) / (2 * (0.8 * 2 ** (SCALES - 1)) ** 2))
    return (bell[:, None] * bell / bell.sum() ** 2)[None, None]


@functools.cache
def whitening(shape: tuple[int, ...], num_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean (P,) and scaled principal components (P, F) of procedural images, in float64.

    A sign convention makes machines agree except for rounding. A single thread makes all processes
    of a machine agree to the bit.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.no_grad():
            return _whitening(shape, num_features)
    finally:
        torch.set_num_threads(threads)


def _whitening(shape: tuple[int, ...], num_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = []
    for draw in (procedural.areas, procedural.lines):
        images = draw(FITTED_TO // 2, shape, Streams(0).numpy(f"scattering {draw.__name__}"))
        for part in torch.from_numpy(images).split(64):
            rows.append(coefficients(2 * part.float() / 255 - 1))
    drawn = torch.cat(rows).double()
    mean = drawn.mean(0)
    covariance = (drawn - mean).T @ (drawn - mean) / len(drawn)
    variances, axes = torch.linalg.eigh(covariance)  # ascending
    variances, axes = variances.flip(0)[:num_features], axes.flip(1)[:, :num_features]
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    return mean, axes / variances.clamp_min(1e-12) ** (WHITENING / 2)


@functools.cache
def _remembered(
    shape: tuple[int, ...], num_features: int
) -> OrderedDict[tuple[object, ...], torch.Tensor]:
    """Return the cache of the last batches' features, by the hash of their pixels."""
    return OrderedDict()
