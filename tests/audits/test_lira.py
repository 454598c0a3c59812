"""LiRA on scores whose best attack is known.

Seeds are fixed; each test states how often a correct implementation would fail with others.
"""

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from fed_dpsd.audits.rates import auc, lira, logits, point_at
from tests.every import every

RECORDS, SHADOWS, TARGETS = 2_000, 64, 4


def simulated(shift, spread, seed=0):
    """Scores of records of varying difficulty, shifted by membership."""
    rng = np.random.default_rng(seed)
    included = rng.random((SHADOWS + TARGETS, RECORDS)) < 0.5
    hardness = spread * rng.normal(size=RECORDS)
    return hardness + shift * included + rng.normal(size=included.shape), included


@every("spread", [0, 10])
def test_lira_comes_close_to_the_best_attack_however_records_differ(spread):
    """The best attack has AUC Phi(shift / sqrt 2) and TPR Phi(shift - z) at a rate with quantile z.

    AUC has a standard error of 0.004, and estimated laws cost less than 0.01; the rate has one of
    0.02. So it fails less than once in 1,000 times.
    """
    scores, included = simulated(2.0, spread)
    guesses = lira(scores[:SHADOWS], included[:SHADOWS], scores[SHADOWS:])
    truth = included[SHADOWS:]
    assert auc(guesses, truth) == pytest.approx(ndtr(2 / np.sqrt(2)), abs=0.02)
    assert point_at(guesses, truth, 0.01).tpr == pytest.approx(ndtr(2 + ndtri(0.01)), abs=0.07)
    # A threshold on the loss, which ignores a record's difficulty, loses if difficulties differ.
    loss = auc(scores[SHADOWS:], truth)
    assert loss == pytest.approx(ndtr(2 / np.sqrt(2 * (1 + spread**2))), abs=0.02)


def test_lira_is_at_chance_where_membership_changes_nothing():
    """The standard error of the AUC is 0.0065, so it fails less than once in 10,000 times."""
    scores, included = simulated(0.0, 3.0)
    guesses = lira(scores[:SHADOWS], included[:SHADOWS], scores[SHADOWS:])
    found = point_at(guesses, included[SHADOWS:], 0.01)
    assert auc(guesses, included[SHADOWS:]) == pytest.approx(0.5, abs=0.027)
    assert found.tpr_low < 0.01 < found.tpr_high
    assert not found.exceeds([(0.0, 0.0)])


def test_a_record_that_all_shadows_hold_is_not_guessed_at():
    scores, included = simulated(2.0, 1.0)
    included[:SHADOWS, 0] = True
    included[:SHADOWS, 1] = False
    guesses = lira(scores[:SHADOWS], included[:SHADOWS], scores[SHADOWS:])
    assert np.all(guesses[:, :2] == 0)
    assert np.isfinite(guesses).all()


def test_answers_that_are_no_numbers_count_as_no_hint():
    found = logits(np.array([[np.nan, np.nan], [0.25, 0.75]]), np.array([0, 1]))
    assert found == pytest.approx([0, np.log(3)])


def test_logits_are_exact_where_probabilities_are_near_one_or_zero():
    probabilities = np.array([[1 - 1e-7, 1e-7], [0.0, 1.0], [0.25, 0.75]], np.float32)
    found = logits(probabilities, np.array([0, 0, 1]))
    assert found[0] == pytest.approx(np.log(1e7), rel=1e-3)
    assert found[1] == pytest.approx(np.log(1e-30))
    assert found[2] == pytest.approx(np.log(3))
    assert probabilities[0, 0] == np.float32(1 - 1e-7)  # the answers are not changed
