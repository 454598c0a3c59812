"""Scattering: independent of brightness, and whitened with procedural images."""

import pytest

from fed_dpsd.models import scattering

SMALL = (1, 8, 8)


def test_wavelets_are_blind_to_brightness_and_the_mean_is_not():
    for scale in range(scattering.SCALES):
        waves = scattering.wavelets(scale)
        assert len(waves) == 2 * scattering.ORIENTATIONS
        assert waves.sum((1, 2, 3)).abs().max() < 1e-12
        assert waves.abs().sum((1, 2, 3)).min() > 0.1  # the control: they are not all zero
    assert scattering.low_pass().sum() == pytest.approx(1)
