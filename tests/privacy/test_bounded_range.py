"""Bounded-range losses: adaptive composition by brute force, and what composes with it."""

import functools
import math

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent

from fed_dpsd.privacy import bounded_range, gdp, laws
from fed_dpsd.privacy.accounting import best_bound, within_budget
from fed_dpsd.privacy.events import BoundedRangeDpEvent, law_of
from tests.every import every

DELTA = 1e-5


def two_outcomes(loss_range, loss):
    """Return the probability of `loss`; the other of the two outcomes has loss - range."""
    return math.expm1(loss - loss_range) / math.expm1(-loss_range)


def adaptive_delta(loss_range, releases, eps, losses):
    """Try all strategies: before each release the adversary takes the best of some intervals."""

    @functools.cache
    def best(left, spent):
        if not left:
            return max(0.0, -math.expm1(eps - spent))
        return max(
            two_outcomes(loss_range, loss) * best(left - 1, spent + loss)
            + (1 - two_outcomes(loss_range, loss)) * best(left - 1, spent + loss - loss_range)
            for loss in losses
        )

    return best(releases, 0.0)


def bound(loss_range, releases, eps):
    losses, chance, certain = bounded_range.losses(loss_range, releases)
    return certain + float(np.maximum(0, -np.expm1(eps - losses)) @ chance)


@every("loss_range", [0.1, 1.0, 4.0])
@every("releases", [1, 2, 3])
def test_the_bound_holds_for_adaptive_intervals_and_is_attained(loss_range, releases):
    """Against 33 intervals per release, by dynamic programming; the control: a smaller range."""
    intervals = [loss_range * i / 32 for i in range(33)]
    for part in (0.0, 0.25, 0.5, 0.875):
        exact = adaptive_delta(loss_range, releases, part * loss_range, intervals)
        assert exact <= bound(loss_range, releases, part * loss_range) <= 1.04 * exact + 1e-11
        assert bound(0.9 * loss_range, releases, part * loss_range) < exact


def test_blocks_of_releases_are_dearer_than_one_and_not_much(monkeypatch):
    part = [(BoundedRangeDpEvent(0.05), 200)]
    whole = laws.discretised_epsilon(part, DELTA)
    monkeypatch.setattr(bounded_range, "MOST_RELEASES", 64)
    assert whole < laws.discretised_epsilon(part, DELTA) < 1.02 * whole


@pytest.mark.slow
@every("loss_range", [1e-7, 0.05, 1.0, 10.0, 30.0])
@every("releases", [1, 400, 3_000])
def test_epsilon_lies_between_fixed_intervals_and_renyi_divergences(loss_range, releases):
    """Fixed intervals in the middle are responses of two classes, of epsilon range / 2."""
    event = BoundedRangeDpEvent(loss_range)
    value = best_bound(SelfComposedDpEvent(event, releases), DELTA).epsilon
    truth = 1 / (1 + math.exp(-loss_range / 2))
    law, losses = np.array([1 - truth, truth]), loss_range * np.array([-0.5, 0.5])
    if releases == 1:
        assert law @ np.maximum(0, -np.expm1(value - losses)) <= DELTA
    assert value <= releases * loss_range * (1 + 1e-9)
    assert value <= laws.renyi_epsilon([(event, releases)], DELTA)
    assert value >= 0.98 * min(
        gdp.gaussian_epsilon(math.sqrt(releases) * loss_range / 2, DELTA),
        releases * loss_range / 2,
    )


def test_renyi_divergences_bound_every_interval():
    for order in (1.1, 2.0, 8.0, 100.0):
        for loss_range in (0.1, 1.0, 5.0):
            worst = 0.0
            for loss in np.linspace(0, loss_range, 101)[1:-1]:
                high = two_outcomes(loss_range, loss)
                moments = np.log([high, 1 - high]) + (order - 1) * np.array(
                    [loss, loss - loss_range]
                )
                worst = max(worst, float(np.logaddexp.reduce(moments)) / (order - 1))
            ours = law_of(BoundedRangeDpEvent(loss_range)).renyi(order)
            assert worst <= ours * (1 + 1e-12)
            assert worst > law_of(BoundedRangeDpEvent(0.6 * loss_range)).renyi(order)


def test_labels_compose_with_other_noise():
    labels = SelfComposedDpEvent(BoundedRangeDpEvent(0.05), 400)
    gaussian = GaussianDpEvent(2.0)
    alone = [best_bound(event, DELTA).epsilon for event in (labels, gaussian)]
    together = best_bound(ComposedDpEvent([labels, gaussian]), DELTA).epsilon
    limit = gdp.gaussian_epsilon(math.hypot(math.sqrt(400) * 0.05 / 2, 1 / 2.0), DELTA)
    assert max(alone) < limit < together < 1.01 * limit < sum(alone)


def test_a_budget_admits_as_many_labels_as_it_pays_for():
    event = BoundedRangeDpEvent(0.05)
    budget = best_bound(SelfComposedDpEvent(event, 300), 0.9 * DELTA).epsilon
    assert within_budget([event], budget, DELTA, [290])
    assert not within_budget([event], budget, DELTA, [310])
