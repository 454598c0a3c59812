"""Queries made from public pictures: random crops with changed colours.

Crops of a single picture teach a network much of what photographs teach (Asano and Saeed: The
Augmented Image Prior, arXiv 2112.00725). By naming pictures, users declare them public; nothing
here protects them.
"""

import functools
import hashlib
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch.nn import functional

from fed_dpsd.errors import UserError

PACKAGES = {
    "scikit-learn": "china.jpg by danielbuechele and flower.jpg by vultilion, CC BY 2.0",
}
AREA = 0.002, 0.5  # fraction of a picture that a crop shows
# Crops drawn together, from one picture at about one scale; fewer with more pictures.
GROUP = 64


@dataclass(frozen=True)
class Pictures:
    """Public pictures, each with the smaller copies that crops are taken from.

    Attributes:
        source: the name of a package, or a folder.
        levels: for each picture, (1, 3, H, W) floats in [0, 1], each half as large as the previous
            one.
        digest: first 16 hexadecimal digits of the SHA-256 of all pixels.
    """

    source: str
    levels: tuple[tuple[torch.Tensor, ...], ...]
    digest: str

    def __str__(self) -> str:
        """Return the text about the pictures on a privacy card."""
        known = PACKAGES.get(self.source, f"{len(self.levels):,} of a folder")
        return (
            f"queries are made with crops of pictures that are public by assumption: {known}, "
            f"digest {self.digest}"
        )


@functools.lru_cache(maxsize=1)
def load(source: str, size: int) -> Pictures:
    """Read the pictures of a package or of a folder, for crops of `size` pixels.

    Args:
        source: "scikit-learn", or a folder with picture files.
        size: height and width of the crops.

    Raises:
        UserError: the folder has no pictures, or a picture cannot be read.
    """
    content = hashlib.sha256()
    levels = []
    for pixels in _packaged() if source in PACKAGES else _in_folder(Path(source)):
        content.update(f"{pixels.shape}".encode() + pixels.tobytes())
        levels.append(_halved(pixels, size))
    if not levels:
        raise UserError(
            f"pictures={source} holds no picture; give a folder with some, or one of: "
            f"{', '.join(PACKAGES)}"
        )
    return Pictures(source, tuple(levels), content.hexdigest()[:16])


def crops(
    pictures: Pictures, count: int, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Draw (count, C, S, S) crops, rotated, mirrored and stretched, with changed colours.

    Half of the crops have shuffled channels; all have changed saturation, contrast and brightness.
    A grey image is the mean of its channels.
    """
    images = np.empty((count, *shape), np.uint8)
    group = max(4, GROUP // len(pictures.levels))
    for start in range(0, count, group):
        part = images[start : start + group]
        levels = pictures.levels[rng.integers(len(pictures.levels))]
        drawn = _coloured(_cropped(levels, len(part), shape[1], rng), rng)
        drawn = drawn.mean(1, keepdim=True) if shape[0] == 1 else drawn
        part[:] = drawn.clamp_(0, 1).mul_(255).round_().to(torch.uint8).numpy()
    return images


def _cropped(
    levels: Sequence[torch.Tensor], count: int, size: int, rng: np.random.Generator
) -> torch.Tensor:
    """Return (count, 3, size, size) crops of one picture, at about one scale."""
    height, width = levels[0].shape[-2:]
    area = math.exp(rng.uniform(*np.log(AREA)))
    side = np.sqrt(area * height * width * np.exp(rng.uniform(-0.35, 0.35, count)))
    level = int(np.clip(math.log2(max(1, math.sqrt(area * height * width) / size)), 0, None))
    stretch, angle = np.exp(rng.uniform(-0.15, 0.15, count)), rng.uniform(-0.5, 0.5, count)
    mirrored = rng.choice([-1, 1], count)
    across, down = np.minimum(side * stretch / width, 1), np.minimum(side / stretch / height, 1)
    right, below = rng.uniform(-1, 1, (2, count)) * (1 - np.stack([across, down]))
    cos, sin = np.cos(angle), np.sin(angle)
    rows = [
        [mirrored * across * cos, -across * sin, right],
        [mirrored * down * sin, down * cos, below],
    ]
    maps = torch.from_numpy(np.array(rows, np.float32)).permute(2, 0, 1)
    grid = functional.affine_grid(maps, [count, 3, size, size], align_corners=False)
    sampled = functional.grid_sample(
        levels[min(level, len(levels) - 1)],
        grid.reshape(1, count * size, size, 2),
        padding_mode="reflection",
        align_corners=False,
    )
    return sampled.view(3, count, size, size).transpose(0, 1)


def _coloured(crops: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Shuffle channels, and change saturation, contrast and brightness of (B, 3, S, S) crops."""
    count, _, size, _ = crops.shape
    saturation, contrast = rng.uniform(0, 2, (count, 1, 1)), rng.uniform(0.5, 1.5, (count, 1, 1))
    orders = np.where(rng.random((count, 1)) < 0.5, rng.random((count, 3)).argsort(1), range(3))
    mixing = contrast * (saturation * np.eye(3)[orders] + (1 - saturation) / 3)
    means = crops.mean((1, 2, 3)).numpy()[:, None, None]
    offsets = (1 - contrast) * means + rng.uniform(-0.3, 0.3, (count, 1, 1))
    pixels = crops.reshape(count, 3, size**2)
    matrices, added = (torch.from_numpy(a.astype(np.float32)) for a in (mixing, offsets))
    return torch.baddbmm(added, matrices, pixels).view(count, 3, size, size)


def _halved(pixels: NDArray[np.uint8], size: int) -> tuple[torch.Tensor, ...]:
    """Return (H, W, 3) pixels as floats, and smaller copies until a side is below 2 * `size`."""
    levels = [torch.from_numpy(pixels.transpose(2, 0, 1)[None] / np.float32(255))]
    while min(levels[-1].shape[-2:]) >= 2 * size:
        levels.append(functional.avg_pool2d(levels[-1], 2))
    return tuple(levels)


def _packaged() -> Iterator[NDArray[np.uint8]]:
    from sklearn.datasets import load_sample_images

    yield from load_sample_images().images


def _in_folder(folder: Path) -> Iterator[NDArray[np.uint8]]:
    suffixes = {end for end, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if path.suffix.lower() in suffixes:
            yield _decoded(path)


def _decoded(path: Path) -> NDArray[np.uint8]:
    try:
        picture = Image.open(io.BytesIO(path.read_bytes()))
        if picture.mode.startswith(("I", "F")):  # a conversion would make almost all of it white
            raise UserError(
                f"pictures: {path} has more than 8 bits per channel; convert or remove it"
            )
        return np.array(picture.convert("RGB"))
    except UnidentifiedImageError:
        raise UserError(f"pictures: {path} is not a picture; remove it") from None
    except (OSError, Image.DecompressionBombError) as error:
        raise UserError(f"pictures: {path} cannot be read ({error}); remove it") from None
