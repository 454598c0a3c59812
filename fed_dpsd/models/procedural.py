"""Images drawn by a procedure alone: public, free, and of more variety than a trained generator's.

Each function draws (count, C, S, S) uint8 images from one random stream. Nothing in them comes from
data; all they know is that pictures are made of areas and of lines. Random procedures teach a
network nearly as well as photographs do (Baradad et al.: Learning to See by Looking at Noise, arXiv
2106.05963).
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fed_dpsd.streams import Streams

GROUP = 64  # images that share a coarseness


def noise(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Independent uniform pixels."""
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8)


def areas(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Smooth random fields behind a sigmoid of random threshold and sharpness: blurred to crisp."""
    size = shape[1]

    def draw(count: int) -> torch.Tensor:
        mode = "bicubic" if rng.random() < 0.5 else "bilinear"
        fields = _fields(count, int(rng.integers(3, size // 2 + 1)), size, mode, rng)
        threshold = _uniform(count, -1, 1.5, rng)
        sharpness = _uniform(count, 0, 3, rng).exp()
        return torch.sigmoid(sharpness * (fields - threshold))

    return _coloured(draw, count, shape, rng)


def lines(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Level lines of smooth random fields, of random thickness, inside a soft random disc."""
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
    """So many images of noise, of areas and of lines, each from the stream of round `number`."""
    return [
        procedure(count, shape, streams.numpy(name, query_id=number))
        for procedure, count, name in zip(
            (noise, areas, lines),
            counts,
            ("noise images", "area images", "line images"),
            strict=True,
        )
    ]


def turned(
    images: NDArray[np.uint8], asked: NDArray[np.uint8], labels: NDArray[np.floating]
) -> NDArray[np.uint8]:
    """`images`, all dark or all light: whichever the answers so far vary more with.

    Pictures of strokes are mostly light on dark or dark on light, and teachers know one of them;
    about the other they say much the same whatever is drawn. Noise in the answers adds the same to
    the variance of both. An image of the wrong side becomes its negative.

    Args:
        images: (B, C, H, W) to turn.
        asked: (Q, C, H, W) images that were answered; with fewer than two of a side nothing turns.
        labels: (Q, K) their labels, noisy or not.
    """
    dark = _dark(asked)
    if min(dark.sum(), (~dark).sum()) < 2:
        return images
    wanted = labels[dark].var(0).sum() > labels[~dark].var(0).sum()
    wrong = (_dark(images) != wanted)[:, None, None, None]
    return np.where(wrong, 255 - images, images)


def _dark(images: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """(B,) whether an image is darker than the mean of all pixels there can be."""
    return images.mean((1, 2, 3)) < 127.5


def _fields(
    count: int, coarse: int, size: int, mode: str, rng: np.random.Generator
) -> torch.Tensor:
    """(count, 1, size, size) fields of mean 0 and variance 1, smooth over size / coarse pixels."""
    grid = torch.from_numpy(rng.standard_normal((count, 1, coarse, coarse), np.float32))
    fields = functional.interpolate(grid, (size, size), mode=mode, align_corners=True)
    fields = fields - fields.mean((1, 2, 3), keepdim=True)
    return fields / fields.std((1, 2, 3), keepdim=True)


def _uniform(count: int, low: float, high: float, rng: np.random.Generator) -> torch.Tensor:
    """(count, 1, 1, 1) uniform numbers."""
    return torch.from_numpy(rng.uniform(low, high, (count, 1, 1, 1)).astype(np.float32))


def _coloured(
    draw: Callable[[int], torch.Tensor],
    count: int,
    shape: tuple[int, ...],
    rng: np.random.Generator,
) -> NDArray[np.uint8]:
    """Masks in [0, 1] from `draw`, a group at a time, as images.

    Grey images are light on dark or dark on light; in colour, a random colour lies on another.
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
