"""Procedural images, which are public, free, and more varied than a trained generator's images.

Each function draws (count, C, S, S) uint8 images from one random stream. They compute in float64:
processors round differently, but then almost never to another byte. The procedures use no data,
only two facts: pictures consist of areas and lines, and objects occlude one another. Such
images train a network almost as well as photographs (Baradad et al.: Learning to See by Looking at
Noise, arXiv 2106.05963).

What is measured in pixels scales with images of more than 32. Leaves and textures are between as
blurred as enlarged images of 32 pixels and as sharp as their own pixels allow.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fed_dpsd.models.pictures import Pictures
from fed_dpsd.streams import Streams

Polarity = Literal["both", "dark", "light"]
SIDE = 32  # pixels; larger images are enlarged or have more detail
GROUP = 64  # images of at most SIDE drawn together, with equally coarse areas and lines
LEAVES = 25  # in each image of dead leaves
RADII = 1 / 16, 7 / 16  # of leaves, as fractions of an image's side
COLOURS = 4  # of leaves in one image


def noise(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw independent uniform pixels."""
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8)


def areas(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw smooth random fields, passed through a sigmoid with random threshold and sharpness."""
    size = shape[1]

    def draw(count: int) -> torch.Tensor:
        mode = "bicubic" if rng.random() < 0.5 else "bilinear"
        fields = _fields(count, int(rng.integers(3, min(size, SIDE) // 2 + 1)), size, mode, rng)
        threshold = _uniform(count, -1, 1.5, rng)
        sharpness = _uniform(count, 0, 3, rng).exp()
        return torch.sigmoid(sharpness * (fields - threshold))

    return _coloured(draw, count, shape, rng)


def lines(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw level lines of smooth random fields, with random thickness, in a soft random disc."""
    size = shape[1]
    line = torch.linspace(-1, 1, size, dtype=torch.float64)
    rows, columns = torch.meshgrid(line, line, indexing="ij")

    def draw(count: int) -> torch.Tensor:
        fields = _fields(count, int(rng.integers(2, 7)), size, "bicubic", rng)
        down = fields[:, :, 1:, :-1] - fields[:, :, :-1, :-1]
        right = fields[:, :, :-1, 1:] - fields[:, :, :-1, :-1]
        slope = functional.pad((down**2 + right**2).sqrt(), (0, 1, 0, 1)) + 1e-3
        distance = fields.abs() / slope / enlarged(size)  # to the line, in pixels of SIDE
        line = torch.sigmoid(3 * (_uniform(count, 0.8, 2.5, rng) - distance))
        radius = _uniform(count, 0.4, 1.2, rng)
        row, column = _uniform(count, -0.3, 0.3, rng), _uniform(count, -0.3, 0.3, rng)
        from_centre = ((rows - row) ** 2 + (columns - column) ** 2).sqrt()
        return line * torch.sigmoid(10 * (radius - from_centre))

    return _coloured(draw, count, shape, rng)


def leaves(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw dead leaves: discs, squares and triangles that occlude one another.

    Their radii have the density r^-2, because small things are frequent in photographs. An image
    has few colours. Each leaf has one of two textures with a random spectrum, shading, and an edge
    that is between soft and crisp.
    """
    return _drawn(_dead_leaves, count, shape, rng)


def objects(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw a lit body with limbs and a shadow in front of a background.

    Photographs mostly show one thing that is larger than the things around it. A body has 2 to 6
    parts (ellipses and rounded boxes of two colours) and is shaded by its height. The background is
    textured ground and sky, or dead leaves in 3 of 10 images.
    """
    return _drawn(_objects, count, shape, rng)


PROCEDURES = {"noise": noise, "areas": areas, "lines": lines, "leaves": leaves, "objects": objects}


def draw(
    counts: Mapping[str, int], shape: tuple[int, ...], streams: Streams, number: int
) -> list[NDArray[np.uint8]]:
    """Draw `counts` images by each of some `PROCEDURES`, for round `number`."""
    return [
        PROCEDURES[name](count, shape, streams.numpy(f"{name} images", query_id=number))
        for name, count in counts.items()
    ]


def apply_polarity(images: NDArray[np.uint8], polarity: Polarity) -> NDArray[np.uint8]:
    """Return (B, C, H, W) `images`; images of the other polarity are inverted.

    Drawings are mostly light on dark or dark on light. Teachers know only one of the two
    polarities; with the other, their answers hardly depend on the image.
    """
    if polarity == "both":
        return images
    wrong = _dark(images) != (polarity == "dark")
    return np.where(wrong[:, None, None, None], 255 - images, images)


def varied_polarity(
    answered: NDArray[np.uint8] | Pictures, labels: NDArray[np.floating]
) -> Polarity:
    """Return the polarity with the more varied answers so far.

    On average, noise in the answers adds equally to both variances. If noise dominates the answers,
    chance decides. With fewer than two images of a polarity, the result is "both".

    Args:
        answered: (Q, C, H, W) images that were answered.
        labels: (Q, K) labels of these images, noisy or not.
    """
    dark = _dark(answered)
    if min(dark.sum(), (~dark).sum()) < 2:
        return "both"
    return "dark" if labels[dark].var(0).sum() > labels[~dark].var(0).sum() else "light"


def _dark(images: NDArray[np.uint8] | Pictures) -> NDArray[np.bool_]:
    """Return the (B,) mask of the images that are darker than medium grey."""
    starts = range(0, len(images), GROUP)
    means = [images[start : start + GROUP].mean((1, 2, 3)) for start in starts]
    return np.concatenate([np.empty(0), *means]) < 127.5


def enlarged(size: int) -> float:
    """Return how many times larger than SIDE a side of `size` pixels is, at least 1."""
    return max(1.0, size / SIDE)


def _blurs(count: int, size: int, rng: np.random.Generator) -> torch.Tensor | float:
    """Draw (count, 1, 1, 1) widths of the narrowest edges, in pixels; 1 for images up to SIDE."""
    return 1.0 if size <= SIDE else enlarged(size) ** _uniform(count, 0, 1, rng)


def _fields(
    count: int, coarse: int, size: int, mode: str, rng: np.random.Generator
) -> torch.Tensor:
    """Draw (count, 1, size, size) fields: mean 0, variance 1, smooth over size / coarse pixels."""
    knots = torch.from_numpy(rng.standard_normal((count, 1, coarse, coarse)))
    fields = functional.interpolate(knots, (size, size), mode=mode, align_corners=True)
    fields = fields - fields.mean((1, 2, 3), keepdim=True)
    return fields / fields.std((1, 2, 3), keepdim=True)


def _uniform(count: int, low: float, high: float, rng: np.random.Generator) -> torch.Tensor:
    """Draw (count, 1, 1, 1) uniform numbers."""
    return torch.from_numpy(rng.uniform(low, high, (count, 1, 1, 1)))


def _coloured(
    draw: Callable[[int], torch.Tensor],
    count: int,
    shape: tuple[int, ...],
    rng: np.random.Generator,
) -> NDArray[np.uint8]:
    """Colour masks in [0, 1]; `draw` returns them one group at a time.

    Grey images are light on dark or dark on light; colour images have a random colour on another.
    """

    def pixels(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
        mask = draw(count)
        if shape[0] == 1:
            above = torch.from_numpy(rng.integers(0, 2, (count, 1, 1, 1)).astype(np.float64))
            below = 1 - above
        else:
            above, below = torch.from_numpy(rng.random((2, count, 3, 1, 1)))
        return mask * above + (1 - mask) * below

    return _drawn(pixels, count, shape, rng)


def _drawn(
    draw: Callable[[int, tuple[int, ...], np.random.Generator], torch.Tensor],
    count: int,
    shape: tuple[int, ...],
    rng: np.random.Generator,
) -> NDArray[np.uint8]:
    """Round (count, C, S, S) pixels to bytes; `draw` returns them one group at a time."""
    images = np.empty((count, *shape), np.uint8)
    group = max(1, int(GROUP / enlarged(shape[1]) ** 2))
    for start in range(0, count, group):
        part = images[start : start + group]
        pixels = draw(len(part), shape, rng)
        part[:] = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return images


def _palettes(count: int, channels: int, rng: np.random.Generator) -> torch.Tensor:
    """Draw (count, COLOURS, C) colours, less saturated than uniformly random ones."""
    palettes = torch.from_numpy(rng.random((count, COLOURS, channels)))
    greys = palettes.mean(2, keepdim=True)
    return greys + _uniform(count, 0, 1, rng)[:, 0] * (palettes - greys)


def _textured(count: int, channels: int, size: int, rng: np.random.Generator) -> torch.Tensor:
    """Draw (count, C, S, S) mostly grey textures with mean 0 and random strength."""
    strength, grey = _uniform(count, 0, 0.25, rng), _uniform(count, 0.6, 1, rng)
    fields = _textures(count, channels + 1, size, _blurs(count, size, rng), rng)
    return strength * (grey * fields[:, :1] + (1 - grey) * fields[:, 1:])


def _objects(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Draw (count, C, S, S) floats, roughly between 0 and 1."""
    channels, size, _ = shape
    ground, sky, *paints = _palettes(count, channels, rng)[..., None, None].unbind(1)
    line = torch.linspace(-1, 1, size, dtype=torch.float64)
    rows, columns = torch.meshgrid(line, line, indexing="ij")

    slope, level = _uniform(count, -0.3, 0.3, rng), _uniform(count, -1, 1, rng)
    horizon = torch.sigmoid(_uniform(count, 1, 20, rng) * (rows - level + slope * columns))
    canvas = ground + horizon * (sky - ground) + _textured(count, channels, size, rng)
    leafy = torch.from_numpy(rng.random(count) < 0.3)
    if leafy.any():
        canvas[leafy] = _dead_leaves(int(leafy.sum()), shape, rng)

    height, second = _body(count, rows, columns, rng)
    mask = torch.sigmoid(_uniform(count, 20, 80, rng) * height)
    right, down = (int(rng.integers(low, size // 8 + 1)) for low in (-(size // 8), 1))
    shadow = torch.roll(mask, (down, right), (2, 3))
    canvas = canvas * (1 - _uniform(count, 0, 0.5, rng) * shadow)
    across = functional.pad(height[..., 1:] - height[..., :-1], (0, 1))
    along = functional.pad(height[:, :, 1:] - height[:, :, :-1], (0, 0, 0, 1))
    angle = _uniform(count, 0, 2 * math.pi, rng)
    light = 1 + _uniform(count, 0, 8, rng) * (angle.cos() * across + angle.sin() * along)
    paint = torch.where(second, paints[0], paints[1])
    body = paint * light.clamp(0.2, 1.8) + _textured(count, channels, size, rng)
    return canvas + mask * (body - canvas)


def _body(
    count: int, rows: torch.Tensor, columns: torch.Tensor, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw (count, 1, S, S) heights, positive inside a body, and a mask of the second colour."""
    parts = torch.from_numpy(rng.integers(2, 7, (count, 1, 1, 1)))
    height = torch.full((count, 1, *rows.shape), -9.0, dtype=torch.float64)
    second = torch.zeros(height.shape, dtype=torch.bool)
    centre = _uniform(count, -0.3, 0.3, rng), _uniform(count, -0.3, 0.3, rng)
    for part in range(6):
        angle = _uniform(count, 0, 2 * math.pi, rng)
        long = _uniform(count, 0.25, 0.75, rng) if part == 0 else _uniform(count, 0.08, 0.45, rng)
        short = long * _uniform(count, 0.25, 1, rng)
        away = 0.6 * (part > 0)
        right = columns - centre[0] - _uniform(count, -away, away, rng)
        below = rows - centre[1] - _uniform(count, -away, away, rng)
        across = (angle.cos() * right + angle.sin() * below) / long
        down = (angle.cos() * below - angle.sin() * right) / short
        power = torch.where(_uniform(count, 0, 1, rng) < 0.3, 6.0, 2.0)  # a rounded box, an ellipse
        distance = ((across.abs() + 1e-4) ** power + (down.abs() + 1e-4) ** power) ** (1 / power)
        own = torch.where(parts > part, (1 - distance) * short, -9.0)
        second = torch.where(own > height, torch.tensor(part % 2 == 0), second)
        height = torch.maximum(height, own)
    return height, second


def _dead_leaves(count: int, shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Draw (count, C, S, S) floats, roughly between 0 and 1, leaf by leaf."""
    channels, size, _ = shape
    palettes = _palettes(count, channels, rng)
    images = torch.arange(count)
    line = torch.linspace(-0.5, 0.5, size, dtype=torch.float64)
    rows, columns = torch.meshgrid(line, line, indexing="ij")

    def leaf() -> tuple[torch.Tensor, torch.Tensor]:
        """Draw (count, C + 2, 1, 1) colours and texture choices, and (count, 1, S, S) shades."""
        colours = palettes[images, torch.from_numpy(rng.integers(0, COLOURS, count))]
        colours += torch.from_numpy(rng.normal(0, 0.05, colours.shape))
        textured = torch.eye(2)[torch.from_numpy(rng.integers(0, 2, count))]
        slope, angle = _uniform(count, 0, 0.6, rng), _uniform(count, 0, 2 * math.pi, rng)
        shades = slope * (angle.cos() * columns + angle.sin() * rows)
        return torch.cat([colours, textured], 1)[:, :, None, None], shades

    paint, shades = leaf()
    canvas = paint.expand(-1, -1, size, size).clone()
    blurs = _blurs(count, size, rng)
    for _ in range(LEAVES):
        mask = _leaf_mask(count, size, blurs, rng)
        paint, shade = leaf()
        canvas += mask * (paint - canvas)
        shades.lerp_(shade, mask)
    pixels = canvas[:, :channels] + shades
    strength, grey = _uniform(count, 0, 0.3, rng), _uniform(count, 0.7, 1, rng)
    for texture in range(2):
        fields = _textures(count, channels + 1, size, blurs, rng)
        mixed = grey * fields[:, :1] + (1 - grey) * fields[:, 1:]
        pixels += strength * canvas[:, channels + texture, None] * mixed
    return pixels


def _leaf_mask(
    count: int, size: int, blurs: torch.Tensor | float, rng: np.random.Generator
) -> torch.Tensor:
    """Draw (count, 1, S, S) masks in [0, 1], each a stretched disc, square or triangle."""
    line = torch.arange(size) + 0.5
    rows, columns = torch.meshgrid(line, line, indexing="ij")
    right, below = columns - _uniform(count, 0, size, rng), rows - _uniform(count, 0, size, rng)
    angle, stretch = _uniform(count, 0, 2 * math.pi, rng), _uniform(count, -0.5, 0.5, rng).exp()
    across = stretch * (angle.cos() * right + angle.sin() * below)
    down = (angle.cos() * below - angle.sin() * right) / stretch
    disc = (across**2 + down**2).sqrt()
    across.abs_()
    square = torch.maximum(across, down.abs())
    triangle = 1.5 * torch.maximum(-down, down / 2 + 0.75**0.5 * across)
    kind = torch.from_numpy(rng.integers(0, 3, (count, 1, 1, 1)))
    distances = torch.where(kind == 0, disc, torch.where(kind == 1, square, triangle))
    smallest, largest = (radius * size for radius in RADII)
    radii = 1 / _uniform(count, 1 / largest, 1 / smallest, rng)  # density r^-2
    return torch.sigmoid(_uniform(count, 1, 6, rng) / blurs * (radii - distances))


def _textures(
    count: int, fields: int, size: int, blurs: torch.Tensor | float, rng: np.random.Generator
) -> torch.Tensor:
    """Draw (count, fields, S, S) textures: mean 0, variance 1, spectra f^-a, random directions."""
    rows, columns = torch.fft.fftfreq(size)[:, None], torch.fft.rfftfreq(size)
    angle = _uniform(count * fields, 0, math.pi, rng)[:, 0]
    stretch = _uniform(count * fields, 0, 1.2, rng)[:, 0].exp()
    across = stretch * (angle.cos() * rows + angle.sin() * columns)
    down = (angle.cos() * columns - angle.sin() * rows) / stretch
    frequency = (across**2 + down**2).sqrt().clamp_min(1 / size)
    amplitude = frequency ** -_uniform(count * fields, 0.5, 2.5, rng)[:, 0]
    if size > SIDE:
        waves = (2 * (rows**2 + columns**2).sqrt() * blurs) ** 4  # at 1, a wave has 2 blurs
        amplitude *= torch.exp(-waves).expand(count, fields, -1, -1).flatten(0, 1)
    white = torch.from_numpy(rng.standard_normal((count * fields, size, size)))
    drawn = torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=(size, size))
    drawn = drawn - drawn.mean((1, 2), keepdim=True)
    drawn = drawn / drawn.std((1, 2), keepdim=True)
    return drawn.view(count, fields, size, size)
