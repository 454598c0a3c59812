"""Bounds from guesses at canaries: valid for the worst algorithm, close for a good one.

Each statistical test fixes its seeds and states how often a correct implementation would fail it.
"""

import math

import numpy as np
import pytest
from scipy.special import expit, ndtr
from scipy.stats import binom

from fed_dpsd.audits.one_run import (
    Guesses,
    advantage_at_least,
    approximate_dp,
    conclude,
    joint_claim,
    largest_refuted,
    refutes,
    refutes_any,
)
from fed_dpsd.privacy.gdp import gaussian_epsilon
from tests.every import every


def gaussian_guesses(mu, runs, canaries, seed=0):
    """Scores of canaries that a Gaussian mechanism of this mu hides from each other."""
    rng = np.random.default_rng(seed)
    included = rng.random((runs, canaries)) < 0.5
    return Guesses(included, mu * included + rng.normal(size=included.shape) - mu / 2)


def least_refuted(claim, made, failure):
    """The fewest correct guesses that refute a claim."""
    return next(
        (right for right in range(made + 1) if refutes(claim, made, made, right, failure)),
        math.inf,
    )


@every("failure", [0.05, 1e-3, 1e-6])
@every(("made", "epsilon"), [(40, 0.5), (100, 1.0), (1_000, 0.1), (1_000, 1.0)])
def test_a_pure_claim_stands_against_randomised_response_and_falls_soon_after(
    made, epsilon, failure
):
    """Responses of that epsilon are right binomially often, and no pure algorithm more often.

    So the exact test refutes from the binomial's quantile on, and ours never earlier.
    """
    exact = int(binom.isf(failure, made, expit(epsilon))) + 1
    assert exact <= least_refuted(approximate_dp(epsilon, 0.0), made, failure) <= exact + 2


def test_a_profile_is_refuted_where_it_is_too_small_and_not_where_it_holds():
    """A right one is refuted less than once in 100 times; here mu is 1."""
    guesses = gaussian_guesses(1.0, 4, 2_000)
    deltas = np.geomspace(1e-6, 0.5, 24)
    right, wrong = ([(gaussian_epsilon(mu, delta), delta) for delta in deltas] for mu in (1, 0.5))
    assert not refutes_any(joint_claim(right), guesses, 0.01)
    assert refutes_any(joint_claim(wrong), guesses, 0.01)
    # One pair of the wrong profile allows more than all together do.
    assert not refutes_any(joint_claim(wrong[:1]), guesses, 0.01)


def test_nothing_is_claimed_where_no_epsilon_is_finite():
    assert joint_claim([(math.inf, 1e-5), (512_000.0, 1e-5)]) is None


def test_all_canaries_given_away_at_once_do_not_fool_the_bound():
    """With probability delta a (0, delta) private algorithm reveals every coin: 1,000 of 1,000.

    A bound that assumes independent guesses would be wrong that often.
    """
    for failure in (0.005, 0.0101):
        assert refutes(approximate_dp(0.0, 0.01), 1_000, 1_000, 1_000, failure) == (failure > 0.01)


@every("mu", [0.3, 0.72, 2.0])
def test_bounds_stay_below_what_is_true_and_come_near(mu):
    """Fails with probability at most 3 * 0.002: each bound may be too large in one of a thousand.

    The mean over 1,000 runs comes within a tenth or 0.05.
    """
    guesses = gaussian_guesses(mu, 1_000, 100)
    advantage = 2 * ndtr(mu / 2) - 1
    assert max(0.9 * advantage - 0.02, 0) < advantage_at_least(guesses, 1e-3) <= advantage
    pooled = Guesses(guesses.included[:100].ravel()[None], guesses.scores[:100].ravel()[None])
    epsilon = largest_refuted(lambda value: approximate_dp(value, 1e-6), pooled, 1e-3)
    assert 0.05 < epsilon <= gaussian_epsilon(mu, 1e-6)


def test_guesses_in_the_dark_show_nothing():
    """Fails with probability at most 0.001: scores do not depend on the coins."""
    rng = np.random.default_rng(1)
    blind = Guesses(rng.random((50, 200)) < 0.5, rng.normal(size=(50, 200)))
    result = conclude(blind, 1e-5, 0.001, 7, "nothing", "noise")
    assert (result.lower_bound, result.advantage_lower_bound) == (0.0, pytest.approx(0, abs=1e-9))
    assert (result.relation, result.runs, result.canaries) == ("add_remove", 50, 200)
    assert (result.queries, result.delta, result.failure_probability) == (7, 1e-5, 0.001)


def test_few_runs_are_never_trusted_however_many_canaries_are_right():
    """Only runs are independent: two perfect runs may be luck and prove little."""
    perfect = np.ones((2, 10_000), bool)
    assert advantage_at_least(Guesses(perfect, np.ones((2, 10_000))), 0.001) == pytest.approx(
        0, abs=1e-9
    )
    many = np.ones((100, 10), bool)
    assert advantage_at_least(Guesses(many, np.ones((100, 10))), 0.001) > 0.8
