"""Readings of the paper's mechanisms that are not ours: what they release, and what is proven."""

import math

import numpy as np
import pytest
from dp_accounting import NonPrivateDpEvent
from scipy.special import log_ndtr

from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.gradient_reading import GradientReading
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, Quorum
from fed_dpsd.privacy.published import published_epsilon
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse

# --- lies among all classes: Eq. 5 as printed ---


def test_lies_among_all_classes_follow_eq_5_and_prove_nothing():
    """A class in I is answered among all ten; one outside I uniformly in I."""
    mechanism = TopKRandomizedResponse(10, 1.0, 3, lies="classes")
    predictions = np.array([[0.5, 0.2, 0.1, *[0.2 / 7] * 7]] * 2, np.float32)
    law = mechanism.encode(np.eye(10)[[1, 7]], predictions)
    truth, lie = math.e / (math.e + 9), 1 / (math.e + 9)
    assert law[0] == pytest.approx([lie, truth, *[lie] * 8])
    assert law[1] == pytest.approx([1 / 3, 1 / 3, 1 / 3, *[0] * 7])
    # Outside I the ratio of the two laws has no bound; among candidates it is e^eps0.
    usual = TopKRandomizedResponse(10, 1.0, 3).encode(np.eye(10)[[1, 2, 7]], predictions[[0, 0, 0]])
    ratios = usual[:, None, :3] / usual[None, :, :3]
    assert ratios.max() == pytest.approx(math.e)
    for pair in UNITS_AND_RELATIONS:
        assert mechanism.event(*pair) == NonPrivateDpEvent()
    assert "the teacher's class is inside" in mechanism.reason
    assert published_epsilon(mechanism, 51_200, 1e-5) == 1
    whole = TopKRandomizedResponse(10, 1.0, None, lies="classes")
    assert whole.event("record", "add_remove") != NonPrivateDpEvent()
    assert whole.reason is None
    assert repr(mechanism).endswith(", lies='classes')")
    assert "lies" not in repr(TopKRandomizedResponse(10, 1.0, 3))
    votes = np.eye(10)[[9]]
    assert mechanism.admissible(votes, predictions[:1], 1).all()
    assert not TopKRandomizedResponse(10, 1.0, 3).admissible(votes, predictions[:1], 1).any()


def test_a_signed_mask_keeps_a_teachers_largest_entries():
    """M_k of the paper's text; by size the entry of the teacher's class would stay."""
    gradient = np.array([[-9.0, 3.0, 2.0, 1.0, 0.5, *[0.0] * 5]])
    predictions = np.full((1, 10), 0.1, np.float32)
    kept = {
        mask: np.flatnonzero(
            NormalizedGradient(10, 1.0, k=3, mask=mask).encode(gradient, predictions)[0]
        ).tolist()
        for mask in ("signed", "private")
    }
    assert kept == {"signed": [1, 2, 3], "private": [0, 1, 2]}
    signed = NormalizedGradient(10, 1.0, k=3, mask="signed")
    noisy = signed.noise(np.zeros((1, 1, 10)), predictions, np.random.default_rng(0))
    assert (noisy != 0).all()  # its support says something of the teacher


# --- noise of Eq. 3 that does not cover the answers ---


@pytest.mark.parametrize("draws", ["one_draw", "inside_mask"])
def test_readings_of_the_noise_leak_and_prove_nothing(draws):
    """What leaks is seen exactly; the usual noise, the control, hides it."""
    predictions = np.full((4, 10), 0.1, np.float32)
    gradients = np.random.default_rng(0).normal(size=(4, 10))
    usual = NormalizedGradient(10, 100.0, k=3, mask="signed")
    reading = GradientReading(10, 100.0, k=3, mask="signed", draws=draws)
    encoded = usual.encode(gradients, predictions)
    assert (reading.encode(gradients, predictions) == encoded).all()

    def leaks(mechanism, rng):
        noisy = mechanism.noise(encoded[None], predictions, rng)
        if draws == "inside_mask":
            return ((noisy != 0) == (encoded != 0)).all()
        return np.allclose(noisy - noisy[0], encoded - encoded[0], atol=1e-5)

    assert leaks(reading, np.random.default_rng(1))
    assert not leaks(usual, np.random.default_rng(1))
    noise = reading.noise(encoded[None], predictions, np.random.default_rng(1)) - encoded
    spread = noise[encoded != 0] if draws == "inside_mask" else noise[0]
    assert 0.3 * reading.scale < spread.std() < 2 * reading.scale
    for pair in UNITS_AND_RELATIONS:
        assert reading.event(*pair) == NonPrivateDpEvent()
        assert usual.event(*pair) != NonPrivateDpEvent()
    assert reading.reason
    assert published_epsilon(reading, 51_200, 1e-5) == published_epsilon(usual, 51_200, 1e-5)


def test_a_reading_has_no_secure_sum():
    with pytest.raises(ValueError, match="has no such reading"):
        GradientReading(10, 100.0, noise_at="distributed", quorum=Quorum(3, 1))
    with pytest.raises(ValueError, match="must be 'one_draw' or 'inside_mask'"):
        GradientReading(10, 100.0, draws="none")


# --- what noise on one teacher's answers proves: conf/experiment/data_sensitive_readings.yaml ---


def epsilon_by_hand(mu, delta=1e-5):
    """Solve delta = Phi(mu / 2 - eps / mu) - e^eps Phi(-mu / 2 - eps / mu), in logarithms."""

    def above(eps):
        first, second = log_ndtr(mu / 2 - eps / mu), eps + log_ndtr(-mu / 2 - eps / mu)
        return first + math.log1p(-math.exp(min(second - first, -1e-300))) > math.log(delta)

    low, high = 0.0, mu**2 + 100 * mu + 100
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) else (low, middle)
    return high


@pytest.mark.parametrize(
    ("sigma", "expected"),
    [
        *[(100, 28.839), (20, 352.1), (7.07, 2_320), (3.79, 7_637), (2.02, 26_050)],
        *[(1, 104_330), (0.390625, 676_029)],
    ],
)
@pytest.mark.parametrize("bound", [1e-3, 5e-3])
def test_one_teachers_answers_prove_what_the_formula_of_gaussian_dp_says(sigma, expected, bound):
    """Whatever beta is: mu = 2 sqrt(E), E = N / sigma^2, for N = 51,200 answers."""
    stage = Stage(NormalizedGradient(10, sigma, bound), 200, 256)
    proven = prove([stage], 1e-5, "record", "replace_one").value
    by_hand = epsilon_by_hand(2 * math.sqrt(51_200) / sigma)
    assert proven == pytest.approx(by_hand, rel=1e-3)
    assert proven == pytest.approx(expected, rel=2e-3)
