"""Caps by proofs and intervals of rates: exact if the answer has a closed form."""

import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom

from fed_dpsd.audits.rates import FAILURE, Point, auc, point_at, tpr_cap
from fed_dpsd.privacy.gdp import gaussian_epsilon
from tests.every import every


@every(
    ("fpr", "claims", "allowed"),
    [
        (0.01, [], 1),
        (0.01, [(math.inf, 1e-5)], 1),
        (0.01, [(512_000.0, 1e-5)], 1),  # beyond what an exponential holds
        (0.01, [(0.0, 0.0)], 0.01),
        (0.01, [(0.0, 0.05)], 0.06),
        (0.1, [(math.log(3), 0.0)], 0.3),
        (0.5, [(math.log(3), 0.0)], 1 - 0.5 / 3),  # by the other world's bound
        (0.5, [(math.log(3), 0.1)], 1 - 0.4 / 3),
        (0.1, [(math.log(3), 0.0), (math.log(2), 0.05)], 0.25),  # both hold, so the smaller does
        (0.0, [(1.0, 1e-5)], 1e-5),
    ],
)
def test_a_cap_is_the_smaller_of_both_bounds(fpr, claims, allowed):
    assert tpr_cap(fpr, claims) == pytest.approx(allowed)


@every("epsilon", [0.1, 1.0, 5.0])
def test_a_randomised_response_reaches_its_cap(epsilon):
    lie = 1 / (1 + math.exp(epsilon))
    assert tpr_cap(lie, [(epsilon, 0.0)]) == pytest.approx(1 - lie)


@every("mu", [0.5, 2.0])
@every("fpr", [0.001, 0.01, 0.3])
def test_a_gaussian_mechanism_stays_below_the_caps_of_its_profile_and_comes_close(mu, fpr):
    deltas = np.geomspace(1e-6, 0.5, 200)
    profile = [(gaussian_epsilon(mu, delta), delta) for delta in deltas]
    best = ndtr(ndtri(fpr) + mu)
    assert best <= tpr_cap(fpr, profile) <= best + 0.02
    assert best <= tpr_cap(fpr, profile[len(deltas) // 2 :][:1])


@every("rate", [0.001, 0.05, 0.5, 0.97])
def test_an_interval_holds_the_rate_as_often_as_it_says(rate):
    counts = np.arange(201)
    points = [Point(0.01, 1, 200, count, 200) for count in counts]
    holds = [each.tpr_low <= rate <= each.tpr_high for each in points]
    assert binom.pmf(counts, 200, rate)[holds].sum() >= 1 - FAILURE


def test_the_bound_on_false_positives_is_that_of_an_order_statistic():
    """The rate above the k-th largest of n scores is Beta(k, n - k + 1), whatever their law."""
    scores = np.arange(1_000, dtype=float)
    found = point_at(np.append(scores, 2_000), np.append(np.zeros(1_000, bool), True), 0.01)
    assert (found.false_positives, found.true_positives, found.members) == (10, 1, 1)
    assert beta.cdf(found.fpr_high, 11, 990) == pytest.approx(1 - FAILURE / 2)


def test_the_bound_on_false_positives_holds_where_scores_are_equal():
    """Three scores for which a bound by the counts above the threshold fails 4.5 times in 100.

    Of 4,000 draws the standard error is 0.25 %, so a right bound fails here once in 1,000 times.
    """
    rng, above = np.random.default_rng(0), (0.0, 0.0037, 0.0184)
    included = np.arange(1_001) == 0
    failures = 0
    for uniform in rng.random((4_000, 1_001)):
        scores = 3.0 - np.searchsorted(above, uniform)
        found = point_at(scores, included, 0.01)
        threshold = np.sort(scores[1:])[::-1][10]
        assert found.false_positives == (scores[1:] > threshold).sum()
        failures += above[int(2 - threshold)] > found.fpr_high
    assert failures / 4_000 < FAILURE / 2 + 0.008


def test_equal_scores_reveal_nothing():
    included = np.arange(400) % 2 == 0
    found = point_at(np.zeros(400), included, 0.01)
    assert (found.tpr, auc(np.zeros(400), included)) == (0, 0.5)
    assert not found.exceeds([(0.0, 0.0)])


def test_too_few_non_members_resolve_no_small_rate():
    scores, included = np.arange(1_000.0), np.arange(1_000) >= 500
    assert point_at(scores, included, 0.01).resolved
    found = point_at(scores, included, 0.001)
    assert not found.resolved
    assert found.tpr == 1  # at no false positive; the bound on their rate says what that means
    assert found.fpr_high == pytest.approx(1 - (FAILURE / 2) ** (1 / 500))


def test_only_an_interval_above_the_cap_contradicts_a_proof():
    found = Point(0.01, 10, 1_000, 100, 1_000)
    assert tpr_cap(found.fpr_high, [(1.0, 1e-5)]) == pytest.approx(math.e * found.fpr_high + 1e-5)
    assert found.exceeds([(1.0, 1e-5)])  # 8.2 % at least, and 5.0 % are allowed
    assert not found.exceeds([(2.0, 1e-5)])
    assert not found.exceeds([(math.inf, 1e-5)])
    assert not Point(0.01, 10, 1_000, 40, 1_000).exceeds([(1.0, 1e-5)])


def test_auc_is_the_chance_of_the_right_order():
    scores = np.array([3.0, 1.0, 2.0, 2.0])
    included = np.array([True, False, True, False])
    assert auc(scores, included) == pytest.approx((1 + 1 + 1 + 0.5) / 4)
