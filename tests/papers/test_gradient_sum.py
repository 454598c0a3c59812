"""One noisy sum for all gradients of a request: what it releases, and what it costs."""

import math

import numpy as np
import pytest

from fed_dpsd.papers.gradient_sum import MOST_IMAGES, GradientSum
from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, Shards
from fed_dpsd.privacy.published import published_epsilon
from tests.every import every

REPLACED = "record", "replace_one"
UNIFORM = np.full((256, 10), 0.1, np.float32)


def gradients(rows, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, 10))


@every("normalise", ["sample", "batch"])
def test_the_first_row_is_the_sum_of_the_bounded_gradients(normalise):
    mechanism = GradientSum(10, 100.0, normalise=normalise)
    usual = NormalizedGradient(10, 100.0, normalise=normalise)
    encoded = mechanism.constrain_sensitivity(gradients(256), UNIFORM)
    assert encoded.shape == (256, 10)
    assert encoded[0] == pytest.approx(
        usual.constrain_sensitivity(gradients(256), UNIFORM).sum(axis=0)
    )
    assert not encoded[1:].any()
    assert mechanism.constrain_sensitivity(np.empty((0, 10)), UNIFORM[:0]).shape == (0, 10)


@every(("normalise", "most"), [("sample", 256), ("batch", 16)])
def test_no_change_moves_a_sum_farther_than_is_charged(normalise, most):
    """Equal gradients and their negatives attain 2 bound B, or 2 bound sqrt(B); others do not."""
    mechanism = GradientSum(10, 100.0, normalise=normalise, stability=1e-12)
    equal = np.tile(np.eye(10)[0], (256, 1))
    worst = np.linalg.norm(
        mechanism.constrain_sensitivity(equal, UNIFORM)[0]
        - mechanism.constrain_sensitivity(-equal, UNIFORM)[0]
    )
    bound = 2 * mechanism.bound * most
    assert bound * (1 - 1e-6) < worst <= bound
    other = (
        mechanism.constrain_sensitivity(gradients(256), UNIFORM)[0]
        - mechanism.constrain_sensitivity(-equal, UNIFORM)[0]
    )
    assert np.linalg.norm(other) < bound
    # B^2 or B releases of a shift of 2 bound compose to one of that size.
    releases = mechanism.releases(1, 256)
    assert math.sqrt(releases) * 2 * mechanism.bound == pytest.approx(bound)
    assert mechanism.releases(7, 256) == 7 * releases


def test_noise_is_drawn_once_and_has_its_size():
    """The mean square of 20,000 numbers is within 5 % of its law's for all but one in 10^5 seeds.

    The control draws for every row, as Eq. 3 of DPSD does."""
    mechanism, rng = GradientSum(10, 3.0), np.random.default_rng(0)
    encoded = mechanism.constrain_sensitivity(gradients(4), UNIFORM[:4])
    drawn = np.array(
        [mechanism.add_noise(encoded[None], UNIFORM[:4], rng) - encoded for _ in range(2_000)]
    )
    assert not drawn[:, 1:].any()
    assert np.square(drawn[:, 0]).mean() == pytest.approx(mechanism.scale**2, rel=0.05)
    usual = NormalizedGradient(10, 3.0).add_noise(encoded[None], UNIFORM[:4], rng) - encoded
    assert usual[1:].all()


def test_the_published_settings_prove_what_the_results_state():
    """Theorem 3 of DPDFD counts B queries, as if the sum's terms had noise of their own."""
    proven = {
        normalise: prove(
            [Stage(GradientSum(10, 100.0, normalise=normalise), 200, 256)], 1e-5, *REPLACED
        ).value
        for normalise in ("sample", "batch")
    }
    assert proven["sample"] == pytest.approx(2_929, abs=1)
    assert proven["batch"] == pytest.approx(28.839, abs=1e-2)
    usual = prove([Stage(NormalizedGradient(10, 100.0), 200, 256)], 1e-5, *REPLACED).value
    assert proven["batch"] == pytest.approx(usual, rel=1e-3)
    assert published_epsilon(GradientSum(10, 100.0), 51_200, 1e-5) == pytest.approx(
        0.0456, abs=1e-4
    )


def test_clients_of_several_teachers_pay_as_with_gradients():
    shards = Shards(3)
    for pair in UNITS_AND_RELATIONS:
        mechanism = GradientSum(10, 100.0, shards=shards)
        assert mechanism.event(*pair) == NormalizedGradient(10, 100.0, shards=shards).event(*pair)


@every("normalise", ["sample", "batch"])
def test_an_honest_answer_is_admissible_and_a_longer_one_is_not(normalise):
    mechanism = GradientSum(10, 1.0, normalise=normalise)
    equal = np.tile(np.eye(10)[0], (256, 1))
    encoded = mechanism.constrain_sensitivity(equal, UNIFORM)
    noisy = mechanism.add_noise(np.stack([encoded] * 3), UNIFORM, np.random.default_rng(0))
    assert mechanism.admissible(noisy, UNIFORM, 3).all()
    assert not mechanism.admissible(2 * noisy, UNIFORM, 3)[0]
    noisy[7, 3] = 1e-9
    assert mechanism.admissible(noisy, UNIFORM, 3).sum() == 255


def test_what_a_sum_cannot_do_is_named():
    with pytest.raises(ValueError, match="has a different mask; use mask=private"):
        GradientSum(10, 1.0, k=3)
    with pytest.raises(ValueError, match=r"noise_multiplier=0\.01 must be at least"):
        GradientSum(10, 0.01)
    rows = np.zeros((1, MOST_IMAGES + 1, 10))
    with pytest.raises(ValueError, match=r"1,025 images in a request.*send fewer queries"):
        GradientSum(10, 1.0).add_noise(rows, rows[0], np.random.default_rng(0))
