"""Scattering: independent of brightness, and whitened with procedural images."""

import numpy as np
import pytest
import torch

from fed_dpsd.models import procedural, scattering
from fed_dpsd.models.fixed_features import to_pixels, whitening
from fed_dpsd.models.scattering import Scattering
from fed_dpsd.streams import Streams

SMALL = (1, 8, 8)


def test_wavelets_are_blind_to_brightness_and_the_mean_is_not():
    for scale in range(scattering.SCALES):
        waves = scattering.wavelets(scale)
        assert len(waves) == 2 * scattering.ORIENTATIONS
        assert waves.sum((1, 2, 3)).abs().max() < 1e-12
        assert waves.abs().sum((1, 2, 3)).min() > 0.1  # the control: they are not all zero
    assert scattering.low_pass().sum() == pytest.approx(1)


def off_diagonal(features):
    """The largest correlation of two features, and their mean one, without signs."""
    correlations = np.abs(np.corrcoef(features.double().numpy().T))
    others = correlations[~np.eye(len(correlations), dtype=bool)]
    return others.max(), others.mean()


def test_whitening_makes_features_of_other_procedural_images_nearly_uncorrelated():
    """2,000 fresh images; the control, the coefficients themselves, is far from it."""
    kinds = procedural.areas, procedural.lines
    fresh = np.concatenate([draw(1_000, SMALL, Streams(2).numpy("test images")) for draw in kinds])
    mean, components = whitening(Scattering, SMALL, 16)
    rows = Scattering.coefficients(to_pixels(torch.from_numpy(fresh)))
    largest, average = off_diagonal((rows - mean) @ components)
    assert largest < 0.3
    assert average < 0.06
    worst, plain = off_diagonal(rows)
    assert worst > 0.9
    assert plain > 0.15
    spreads = ((rows - mean) @ components).std(0)
    assert spreads.argmax() == 0  # the leading components are kept
    raw = (rows - mean) @ torch.linalg.qr(components)[0]
    assert raw.std(0)[0] / raw.std(0)[-1] > 2 * spreads[0] / spreads[-1]  # and levelled
