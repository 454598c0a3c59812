"""Images made from answered images, at no cost: images and labels are already released."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fed_dpsd.models import procedural

TURN = 0.35  # largest angle, in radians
SCALE = 0.25  # largest logarithm of a factor, for each axis
SHIFT = 0.2  # largest shift, in halves of a side
PASTED = 0.5  # probability of pasting in a second image


def recombine(
    answered: NDArray[np.uint8],
    labels: NDArray[np.floating],
    count: int,
    rng: np.random.Generator,
) -> NDArray[np.uint8]:
    """Draw rotated, scaled and shifted answered images; paste a second one into half of them.

    Teachers assign some classes to few procedural images. An image is drawn with a probability
    proportional to 1 / (1 + the number of images with a label of the same class), so that rare
    classes are queried more often. The second image is drawn in the same way, but not moved; it
    appears in a random area.

    Args:
        answered: (Q, C, S, S) images that were answered.
        labels: (Q, K) labels of these images, noisy or not.
        count: number of images to make.
        rng: random stream.

    Returns:
        (count, C, S, S) uint8.
    """
    classes = labels.argmax(1)
    weights = 1 / (np.bincount(classes, minlength=labels.shape[1]) + 1.0)[classes]
    first, second = rng.choice(len(answered), (2, count), p=weights / weights.sum())
    images = _moved(answered[first], rng)
    areas = procedural.areas(count, (1, *answered.shape[2:]), rng) / 255
    areas[rng.random(count) >= PASTED] = 1
    mixed = areas * images + (1 - areas) * answered[second]
    recombined: NDArray[np.uint8] = mixed.round().astype(np.uint8)
    return recombined


def _moved(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.float64]:
    """Rotate, scale and shift each image; new pixels repeat its edge."""
    count = len(images)
    angles = rng.uniform(-TURN, TURN, count)
    across, down = np.exp(rng.uniform(-SCALE, SCALE, (2, count)))
    right, below = rng.uniform(-SHIFT, SHIFT, (2, count))
    rows = [
        [across * np.cos(angles), -down * np.sin(angles), right],
        [across * np.sin(angles), down * np.cos(angles), below],
    ]
    maps = torch.from_numpy(np.array(rows)).permute(2, 0, 1)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
    pixels = torch.from_numpy(images).double()
    moved = functional.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
    return moved.clamp(0, 255).numpy()
