"""Shifting and mirroring of images in a training batch."""

from typing import Literal

import torch
from torch.nn import functional


def augment(
    images: torch.Tensor,
    shift: int,
    flip: bool,
    rng: torch.Generator,
    margin: Literal["constant", "reflect"] = "reflect",
) -> torch.Tensor:
    """Move each of (B, C, H, W) images by up to `shift` pixels; mirror about half with `flip`.

    Margins are filled by reflection, or by zeros with `margin="constant"`.
    """
    if not (shift or flip):
        return images
    count, _, height, width = images.shape
    down, right = torch.randint(0, 2 * shift + 1, (2, count, 1), generator=rng)
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    if flip:
        mirrored = torch.randint(0, 2, (count, 1), generator=rng).bool()
        columns = torch.where(mirrored, columns.flip(1), columns)
    padded = functional.pad(images, (shift,) * 4, margin).movedim(1, 3)
    image = torch.arange(count)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None]].movedim(3, 1)
