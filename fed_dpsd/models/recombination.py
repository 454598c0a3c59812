"""Images made from answered images, at no cost: images and labels are already released."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fed_dpsd.models import procedural
from fed_dpsd.models.pictures import Pictures

TURN = 0.35  # largest angle, in radians
SCALE = 0.25  # largest logarithm of a factor, for each axis
SHIFT = 0.2  # largest shift, in halves of a side
PASTED = 0.5  # probability of pasting in a second image


def recombine(
    answered: NDArray[np.uint8] | Pictures,
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
    moves = _moves(count, rng)
    areas = procedural.areas(count, (1, *answered.shape[2:]), rng)
    areas[rng.random(count) >= PASTED] = 255
    recombined = np.empty((count, *answered.shape[1:]), np.uint8)
    for start in range(0, count, procedural.GROUP):  # in float64, all would take much memory
        part = slice(start, start + procedural.GROUP)
        area, images = areas[part] / 255, _moved(answered[first[part]], moves[part])
        mixed = area * images + (1 - area) * answered[second[part]]
        recombined[part] = mixed.round().astype(np.uint8)
    return recombined


def _moves(count: int, rng: np.random.Generator) -> torch.Tensor:
    """Draw (count, 2, 3) affine maps that rotate, scale and shift."""
    angles = rng.uniform(-TURN, TURN, count)
    across, down = np.exp(rng.uniform(-SCALE, SCALE, (2, count)))
    right, below = rng.uniform(-SHIFT, SHIFT, (2, count))
    rows = [
        [across * np.cos(angles), -down * np.sin(angles), right],
        [across * np.sin(angles), down * np.cos(angles), below],
    ]
    return torch.from_numpy(np.array(rows)).permute(2, 0, 1)


def _moved(images: NDArray[np.uint8], moves: torch.Tensor) -> NDArray[np.float64]:
    """Move each image by its affine map; new pixels repeat its edge."""
    grid = functional.affine_grid(moves, list(images.shape), align_corners=False)
    pixels = torch.from_numpy(images).double()
    moved = functional.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
    return moved.clamp(0, 255).numpy()
