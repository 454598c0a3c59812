"""Shifts and mirrors of a batch: what DENSE's teachers see, and what networks learn from."""

import pytest
import torch
from torch import nn

from fed_dpsd.models.augmentation import augment


def images(count):
    return torch.rand((count, 1, 8, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("margin", ["constant", "reflect"])
@pytest.mark.parametrize("flip", [False, True])
def test_every_image_moves_by_at_most_so_many_pixels_and_may_be_mirrored(flip, margin):
    """Each by a draw of its own: margins come in; no other image of the batch does."""
    batch = torch.cat([images(40), images(40) + 2])
    assert augment(batch, 0, False, torch.Generator()) is batch
    moved = augment(batch, 1, flip, torch.Generator().manual_seed(0), margin)
    assert moved.shape == batch.shape
    padded = nn.functional.pad(batch, (1,) * 4, margin)
    allowed = [padded[:, :, d : d + 8, r : r + 8] for d in range(3) for r in range(3)]
    allowed += [each.flip(3) for each in allowed if flip]
    which = torch.stack([(moved == each).flatten(1).all(1) for each in allowed])
    assert (which.sum(0) == 1).all()
    assert set(which.nonzero()[:, 0].tolist()) == set(range(len(allowed)))


def test_gradients_come_back_through_the_augmentation():
    batch = images(5).requires_grad_()
    augment(batch, 2, True, torch.Generator().manual_seed(0), "constant").sum().backward()
    assert batch.grad.unique().tolist() in ([0.0, 1.0], [1.0])
