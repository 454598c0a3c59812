"""Procedural images: public, free of charge, and more varied than a trained generator's.

Each function draws (count, C, S, S) uint8 images from one random stream. The procedures use no
data, only the fact that pictures consist of areas and lines. Such images teach a network nearly as
well as photographs do (Baradad et al.: Learning to See by Looking at Noise, arXiv 2106.05963).
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fed_dpsd.streams import Streams

Polarity = Literal["both", "dark", "light"]
GROUP = 64  # number of images with the same coarseness


def noise(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw independent uniform pixels."""
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8)


def areas(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw smooth random fields through a sigmoid of random threshold, from blurred to crisp."""
    size = shape[1]

    def draw(count: int) -> torch.Tensor:
        mode = "bicubic" if rng.random() < 0.5 else "bilinear"
        fields = _fields(count, int(rng.integers(3, size // 2 + 1)), size, mode, rng)
        threshold = _uniform(count, -1, 1.5, rng)
        sharpness = _uniform(count, 0, 3, rng).exp()
        return torch.sigmoid(sharpness * (fields - threshold))

    return _coloured(draw, count, shape, rng)


def lines(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw level lines of smooth random fields, of random thickness, in a soft random disc."""
    size = shape[1]
    rows, columns = torch.meshgrid(
        torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij"
    )

    def draw(count: int) -> torch.Tensor:
        fields = _fields(count, int(rng.integers(2, 7)), size, "bicubic", rng)
        down = fields[:, :, 1:, :-1] - fields[:, :, :-1, :-1]
        right = fields[:, :, :-1, 1:] - fields[:, :, :-1, :-1]
        slope = functional.pad((down**2 + right**2).sqrt(), (0, 1, 0, 1)) + 1e-3
        distance = fields.abs() / slope  # to the line, in pixels
        line = torch.sigmoid(3 * (_uniform(count, 0.8, 2.5, rng) - distance))
        radius = _uniform(count, 0.4, 1.2, rng)
        row, column = _uniform(count, -0.3, 0.3, rng), _uniform(count, -0.3, 0.3, rng)
        from_centre = ((rows - row) ** 2 + (columns - column) ** 2).sqrt()
        return line * torch.sigmoid(10 * (radius - from_centre))

    return _coloured(draw, count, shape, rng)


def draw(
    counts: tuple[int, int, int], shape: tuple[int, ...], streams: Streams, number: int
) -> list[NDArray[np.uint8]]:
    """Draw `counts` images of noise, areas and lines, each from its stream of round `number`."""
    return [
        procedure(count, shape, streams.numpy(name, query_id=number))
        for procedure, count, name in zip(
            (noise, areas, lines),
            counts,
            ("noise images", "area images", "line images"),
            strict=True,
        )
    ]


def turned(images: NDArray[np.uint8], polarity: Polarity) -> NDArray[np.uint8]:
    """Return (B, C, H, W) `images`, those of the other polarity as their negatives.

    Pictures of strokes are mostly light on dark or dark on light, and teachers know only one of the
    two: for the other their answers hardly depend on the image.
    """
    if polarity == "both":
        return images
    wrong = _dark(images) != (polarity == "dark")
    return np.where(wrong[:, None, None, None], 255 - images, images)


def varied_polarity(answered: NDArray[np.uint8], labels: NDArray[np.floating]) -> Polarity:
    """Return the polarity with the more varied answers so far.

    Noise in the answers adds the same to the variance of both on average. If it is larger than what
    they say, chance decides.

    Args:
        answered: (Q, C, H, W) images that were answered; "both" with fewer than two of either.
        labels: (Q, K) labels of these images, noisy or not.
    """
    dark = _dark(answered)
    if min(dark.sum(), (~dark).sum()) < 2:
        return "both"
    return "dark" if labels[dark].var(0).sum() > labels[~dark].var(0).sum() else "light"


def _dark(images: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return whether each image is darker than medium grey, (B,)."""
    return images.mean((1, 2, 3)) < 127.5


def _fields(
    count: int, coarse: int, size: int, mode: str, rng: np.random.Generator
) -> torch.Tensor:
    """Draw (count, 1, size, size) fields, mean 0, variance 1, smooth over size / coarse pixels."""
    knots = torch.from_numpy(rng.standard_normal((count, 1, coarse, coarse), np.float32))
    fields = functional.interpolate(knots, (size, size), mode=mode, align_corners=True)
    fields = fields - fields.mean((1, 2, 3), keepdim=True)
    return fields / fields.std((1, 2, 3), keepdim=True)


def _uniform(count: int, low: float, high: float, rng: np.random.Generator) -> torch.Tensor:
    """Draw (count, 1, 1, 1) uniform numbers."""
    return torch.from_numpy(rng.uniform(low, high, (count, 1, 1, 1)).astype(np.float32))


def _coloured(
    draw: Callable[[int], torch.Tensor],
    count: int,
    shape: tuple[int, ...],
    rng: np.random.Generator,
) -> NDArray[np.uint8]:
    """Colour masks in [0, 1], which `draw` returns one group at a time.

    Grey images are light on dark or dark on light; colour images have a random colour on another.
    """
    images = np.empty((count, *shape), np.uint8)
    for start in range(0, count, GROUP):
        part = images[start : start + GROUP]
        mask = draw(len(part))
        if shape[0] == 1:
            above = torch.from_numpy(rng.integers(0, 2, (len(part), 1, 1, 1)).astype(np.float32))
            below = 1 - above
        else:
            above, below = torch.from_numpy(rng.random((2, len(part), 3, 1, 1), np.float32))
        part[:] = ((mask * above + (1 - mask) * below) * 255).round().to(torch.uint8).numpy()
    return images
