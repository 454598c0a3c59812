"""Patch features: how often an image's patches look like each of 128 whitened patterns.

The patterns come from dead leaves or, for grey images, from areas and lines; no data is used.
Coates and Ng ("Learning Feature Representations with K-means", 2012) cluster patches of the data.
Here, procedural patches and their negatives are clustered on the sphere.
"""

import functools
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fed_dpsd.models import procedural, torch_threads
from fed_dpsd.models.fixed_features import SIDE, FixedFeatures, reduced, to_pixels
from fed_dpsd.streams import Streams

EXAMPLES = 2_000  # procedural images
PATCHES = 25  # of each image
PATCH = 6  # side, in pixels
PATTERNS = 128
ITERATIONS = 10  # of k-means
FLOOR = 10 * (2 / 255) ** 2  # added to a patch's variance, so that noise is not amplified
REGULAR = 0.1  # added to the variances that whitening divides by
THRESHOLD = 0.25  # weaker responses count as zero
PARTS = 3  # along each side of an image; responses are averaged over each of the nine parts
AT_ONCE = 8 * 32**2  # pixels in a batch, which must fit into a processor's cache


class Patches(FixedFeatures):
    """Responses to 128 patterns and their negatives in nine parts of an image: 2,304 coefficients.

    Images of more than 32 pixels are reduced to 32. A patch is centred and divided by its standard
    deviation, so a response depends on form, but not on brightness and contrast. Photographs are as
    likely as their mirror images, so a colour image has the mean responses of both; an X-ray's
    sides differ.
    """

    @staticmethod
    def num_coefficients(shape: tuple[int, ...]) -> int:
        """Return the number of coefficients of an image of any shape."""
        return 2 * PATTERNS * PARTS**2

    @staticmethod
    def coefficients(
        images: torch.Tensor, given: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Map (B, C, S, S) floats in [-1, 1] to (B, 2304) coefficients, with rows of length 1."""
        images = reduced(images)
        found = (given["kernels"], given["offsets"]) if given else patterns(tuple(images.shape[1:]))
        kernels, offsets = (tensor.to(images) for tensor in found)
        cached = AT_ONCE if images.device.type == "cpu" else 4 * AT_ONCE
        at_once = min(32, max(1, cached // images.shape[-1] ** 2))
        # an exported network takes any number of images, so its graph has no parts
        parts = [images] if torch.compiler.is_compiling() else images.split(at_once)
        if images.shape[1] == 1:
            return torch.cat([_coefficients(part, kernels, offsets) for part in parts])
        both = [
            _coefficients(part, kernels, offsets) + _coefficients(part.flip(3), kernels, offsets)
            for part in parts
        ]
        return functional.normalize(torch.cat(both))

    def constants(self) -> dict[str, torch.Tensor]:
        """Return also the patterns."""
        if self.given is not None:
            return dict(self.given)
        side = min(self.shape[1], SIDE)
        kernels, offsets = patterns((self.shape[0], side, side))
        return super().constants() | {"kernels": kernels.float(), "offsets": offsets.float()}

    @staticmethod
    def examples(shape: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
        """Draw 2,000 images: dead leaves for colour images, otherwise half areas and half lines."""
        kinds = [procedural.areas, procedural.lines] if shape[0] == 1 else [procedural.leaves]
        side = min(shape[1], SIDE)
        for draw in kinds:
            rng = Streams(0).numpy(f"patches {draw.__name__}")
            yield draw(EXAMPLES // len(kinds), (shape[0], side, side), rng)


def _coefficients(
    images: torch.Tensor, kernels: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    box = torch.full_like(kernels[:1], 1 / kernels[0].numel())
    mean, square = functional.conv2d(images, box), functional.conv2d(images**2, box)
    # Passes over memory take most of the time, so they change values in place.
    deviation = (square - mean**2).clamp_min_(0).add_(FLOOR).sqrt_()
    responses = functional.conv2d(images, kernels).div_(deviation).sub_(offsets[:, None, None])
    averages = [
        functional.adaptive_avg_pool2d(rectified, PARTS)
        for rectified in (
            (responses - THRESHOLD).relu_(),
            responses.neg_().sub_(THRESHOLD).relu_(),
        )
    ]
    tiny = torch.finfo(images.dtype).tiny  # the derivative of a square root at 0 is infinite
    rows = torch.cat(averages, 1).flatten(1).clamp_min(tiny).sqrt()
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-6)


@functools.cache
def patterns(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return kernels (128, C, 6, 6) and offsets (128,) of responses to patches, in float64.

    A kernel is a whitened pattern in terms of pixels, with its mean subtracted. The inner product
    of a pattern and a whitened patch is the kernel's response to the patch, divided by the patch's
    standard deviation, minus the offset. Using a single thread makes all processes of a machine
    agree to the last bit. Processors with different instructions may find different patterns,
    because rounding can change clusters.
    """
    with torch_threads(1), torch.inference_mode(False), torch.no_grad():
        rng = Streams(0).numpy("patches")
        examples = np.concatenate([*Patches.examples(shape)])
        drawn = to_pixels(torch.from_numpy(_patches(examples, rng)))
        drawn -= drawn.mean(1, keepdim=True)
        drawn /= (drawn.square().mean(1, keepdim=True) + FLOOR).sqrt()
        mean = drawn.mean(0)
        variances, axes = torch.linalg.eigh((drawn - mean).T @ (drawn - mean) / len(drawn))
        whitening = axes / (variances + REGULAR).sqrt() @ axes.T
        centres = _centres((drawn - mean) @ whitening, rng)
        kernels = centres @ whitening
        offsets = kernels @ mean
        kernels -= kernels.mean(1, keepdim=True)
        return kernels.view(-1, shape[0], PATCH, PATCH), offsets


def _patches(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return 25 random patches of each image, as rows."""
    windows = np.lib.stride_tricks.sliding_window_view(images, (PATCH, PATCH), (2, 3))
    places = rng.integers(windows.shape[2], size=(2, len(images), PATCHES))
    chosen = windows[np.arange(len(images))[:, None], :, places[0], places[1]]
    return chosen.reshape(len(images) * PATCHES, -1)


def _centres(rows: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Return the unit centres of spherical k-means, which treats a row and its negative alike."""
    rows = rows[rows.norm(dim=1) > 1]  # a flat patch has no pattern
    chosen = rng.choice(len(rows), PATTERNS, replace=False)
    centres = functional.normalize(rows[torch.from_numpy(chosen)])
    for _ in range(ITERATIONS):
        alike = rows @ centres.T
        nearest = alike.abs().argmax(1)
        signs = alike.gather(1, nearest[:, None]).sign()
        centres = functional.normalize(
            centres.new_zeros(centres.shape).index_add_(0, nearest, signs * rows)
        )
    return centres
