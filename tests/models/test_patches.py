"""Patches: responses to every patch come from whitened patterns and depend on form alone."""

import pytest
import torch

from fed_dpsd.models import patches, procedural
from fed_dpsd.models.fixed_features import to_pixels
from fed_dpsd.models.patches import Patches, patterns
from fed_dpsd.streams import Streams

SHAPE = (1, 12, 12)


def leaves(count):
    images = procedural.leaves(count, SHAPE, Streams(3).numpy("test images"))
    return to_pixels(torch.from_numpy(images)).double()


def test_coefficients_are_square_roots_of_mean_responses_to_the_patches_of_a_part():
    """Each patch is taken by itself; the control forgets that a patch's mean is taken off."""
    kernels, offsets = patterns(SHAPE)
    images = leaves(2)
    rows = torch.nn.functional.unfold(images, patches.PATCH).mT  # (2, 49, C * 36)

    def computed(centred):
        deviations = (centred.square().mean(2, keepdim=True) + patches.FLOOR).sqrt()
        responses = (centred / deviations) @ (kernels + 0.01).flatten(1).T - offsets
        signed = torch.cat([responses, -responses], 2) - patches.THRESHOLD
        grid = signed.clamp_min(0).mT.unflatten(2, (7, 7))
        starts, ends = (0, 2, 4), (3, 5, 7)  # a third of seven, and what is left of its ends
        parts = [
            grid[:, :, a:b, c:d].mean((2, 3))
            for a, b in zip(starts, ends, strict=True)
            for c, d in zip(starts, ends, strict=True)
        ]
        expected = torch.stack(parts, 2).flatten(1).sqrt()
        return expected / expected.norm(dim=1, keepdim=True)

    assert torch.allclose(Patches.coefficients(images), computed(rows - rows.mean(2, True)))
    assert not torch.allclose(Patches.coefficients(images), computed(rows), atol=1e-2)


def test_brightness_contrast_and_sign_change_as_they_should():
    """Brightness and contrast do nothing; the negative exchanges a pattern and its negative."""
    images = leaves(20)
    rows = Patches.coefficients(images)
    assert torch.allclose(Patches.coefficients(images + 0.3), rows, atol=1e-6)
    half = (Patches.coefficients(images / 2) - rows).norm(dim=1)
    assert half.mean() < 0.1  # but for the floor under the variance
    other = (rows.roll(1, 0) - rows).norm(dim=1)
    assert other.mean() > 4 * half.mean()  # the control: another image
    negative = Patches.coefficients(-images).unflatten(1, (2, -1)).flip(1).flatten(1)
    patterns_alike = (negative - rows).norm(dim=1)
    assert patterns_alike.mean() < 0.2 * other.mean()


@pytest.mark.slow
def test_patterns_stay_the_same():
    """Other images, constants or numbers of steps would change them, and so results."""
    kernels, offsets = patterns((3, 32, 32))
    assert kernels.std() == pytest.approx(0.1269, rel=1e-2)
    assert offsets.std() == pytest.approx(0.00646, rel=2e-2)
    alike = torch.corrcoef(kernels.flatten(1)).fill_diagonal_(0).abs()
    assert alike.max() == pytest.approx(0.7481, rel=1e-2)
