"""Budgets and calibration, and the effect of the noise's finite precision on both."""

import math

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
)

from fed_dpsd.privacy.accounting import (
    Stage,
    best_bound,
    prove,
    smallest_budget,
    unchanged_epsilon,
    within_budget,
)
from fed_dpsd.privacy.calibration import calibrate
from fed_dpsd.privacy.clipped_gradients import ClippedGradients
from fed_dpsd.privacy.dp_sgd import DPSGD, MOST_DRAWS, PRECISION_LOSS
from fed_dpsd.privacy.events import FinitePrecisionDpEvent, ReplacedInSampleDpEvent
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.gdp import gaussian_delta
from fed_dpsd.privacy.noise import GAUSSIAN_LOSS, LAPLACE_LOSS
from fed_dpsd.privacy.training import ClassCounts
from fed_dpsd.privacy.votes import NoisyVotes
from tests.every import every
from tests.privacy.ideals import ideal
from tests.privacy.test_accounting import DELTA, EVENTS, dp_sgd, response, times


def one_response(eps0):
    return ideal(response(eps0, 3).event("record", "replace_one"))


def sampled(noise):
    return PoissonSampledDpEvent(0.02, GaussianDpEvent(noise))


# --- budgets ----------------------------------------------------------------------------------


def test_a_budget_admits_exactly_the_answers_it_pays_for():
    for mechanism in (NormalizedGradient(10, 100.0), NoisyVotes(10, 50.0, "laplace")):
        event = mechanism.event("record", "add_remove")
        budget = unchanged_epsilon(times(event, 500), DELTA)
        assert within_budget([event] * 500, budget, DELTA)
        assert not within_budget([event] * 501, budget, DELTA)


def test_gaussians_of_any_noise_share_a_budget_exactly():
    """The filter of Gaussian differential privacy: 1 / z^2 adds up."""
    budget = unchanged_epsilon(GaussianDpEvent(1.0), DELTA)
    # What is left of delta is for settings that change, and for the noise's finite precision.
    part = gaussian_delta(1.0, np.array([budget * (1 - 2.0**-9)]))
    assert part == pytest.approx(0.95 * DELTA * math.exp(-(2.0**-5)))
    halves = [GaussianDpEvent(math.sqrt(2.0))] + [GaussianDpEvent(2.0)] * 2
    assert within_budget(halves, budget * (1 + 1e-9), DELTA)
    assert not within_budget([*halves, GaussianDpEvent(100.0)], budget * (1 + 1e-9), DELTA)


def test_a_training_with_its_counts_is_one_event_however_many_parts_it_has():
    """A budget admits the training calibrated to it; other settings cost more at once."""
    whole, other = (
        DPSGD(noise, 0.02, 5, 0.1, 0.004, 8.0).event("record", "add_remove") for noise in (1.0, 2.0)
    )
    free = times(ComposedDpEvent([]), 3)
    budget = unchanged_epsilon(times(whole, 2), DELTA) * (1 + 1e-9)
    assert within_budget([whole, free, times(whole, 1), free], budget, DELTA)
    assert not within_budget([whole] * 3, budget, DELTA)
    assert not within_budget([whole, other], budget, DELTA)
    assert best_bound(ComposedDpEvent([whole, other]), DELTA).epsilon < budget  # the control


@every(
    "names",
    [["response"], ["gaussian", "laplace"], ["dp_sgd", "response", "laplace"]],
)
def test_the_smallest_budget_admits_the_charges_and_a_smaller_one_does_not(names):
    charges = [times(EVENTS[name], 10) for name in names]
    least = smallest_budget(charges, DELTA)
    assert within_budget(charges, least, DELTA)
    assert not within_budget(charges, least * (1 - 1e-5), DELTA)
    assert least > best_bound(ComposedDpEvent(charges), DELTA).epsilon


def test_nothing_needs_no_budget_and_no_budget_admits_what_has_no_noise():
    assert smallest_budget([], DELTA) == 0
    assert smallest_budget([GaussianDpEvent(1.0), NonPrivateDpEvent()], DELTA) == math.inf


@pytest.mark.slow
def test_changed_settings_are_dearer_than_unchanged_ones_and_never_too_cheap():
    """Everything a budget admits is at least as private as settings fixed in advance."""
    kinds = [
        times(EVENTS["dp_sgd"], 300),
        times(EVENTS["response"], 10),
        times(EVENTS["laplace"], 10),
        times(EVENTS["gaussian"], 50),
    ]
    for budget in (2.0, 20.0):
        admitted = []
        for number in range(200):
            charge = kinds[number % len(kinds)]
            if within_budget([*admitted, charge], budget, DELTA):
                admitted.append(charge)
        assert best_bound(ComposedDpEvent(admitted), DELTA).epsilon <= budget
        assert admitted


@every(
    ("life", "fixed", "budget"),
    [
        ([(GaussianDpEvent(50.0), 600), (one_response(0.1), 200)], 5.718, 6.991),
        ([(one_response(0.1), 300), (one_response(0.2), 75)], 10.065, 12.050),
        ([(LaplaceDpEvent(40.0), 400), (GaussianDpEvent(50.0), 600)], 2.900, 3.647),
        ([(sampled(1.5), 1_000), (sampled(2.5), 2_000)], 2.524, 3.263),
    ],
)
def test_what_a_change_of_settings_costs(life, fixed, budget):
    """The numbers of docs/mechanisms.md, "Lifetime budgets", and two more lifetimes."""
    charges = [times(event, count) for event, count in life]
    assert best_bound(ComposedDpEvent(charges), DELTA).epsilon == pytest.approx(fixed, abs=1e-3)
    assert within_budget(charges, budget + 1e-3, DELTA)
    assert not within_budget(charges, budget - 1e-3, DELTA)


def test_a_budget_never_admits_what_has_no_bound():
    assert not within_budget([NonPrivateDpEvent()], 1e9, DELTA)
    assert not within_budget([EVENTS["gaussian"], EVENTS["dp_sgd, replaced"]], 1e9, DELTA)
    assert within_budget([], 0.0, DELTA)
    assert not within_budget([EVENTS["gaussian"]], 0.0, DELTA)


NOISE = (1e7, 1e-2)

# --- calibration ------------------------------------------------------------------------------


@every(
    ("make", "ends", "target"),
    [
        (lambda value: NormalizedGradient(10, value), NOISE, 0.3),
        (lambda value: NormalizedGradient(10, value), NOISE, 5.0),
        (lambda value: NoisyVotes(10, value), NOISE, 1.0),
        (lambda value: NoisyVotes(10, value, "laplace"), NOISE, 0.3),
        (lambda value: response(value, 3), (1e-7, 20.0), 5.0),
        (lambda value: dp_sgd(value, 0.02, 60), NOISE, 1.0),
    ],
)
@pytest.mark.slow
def test_calibration_never_overshoots_and_wastes_little(make, ends, target):
    def spend(value):
        stage = Stage(make(value), 20, 64)
        return unchanged_epsilon(stage.event("record", "add_remove"), DELTA)

    value = calibrate(spend, target, *ends)
    assert 0.98 * target <= spend(value) <= target
    claim = prove([Stage(make(value), 20, 64)], DELTA, "record", "add_remove")
    assert 0.98 * target <= claim.value <= target


def test_a_target_out_of_reach_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"target_epsilon=1e-30 is less than any .* use 2 or more"):
        calibrate(lambda value: 2.0, 1e-30, *NOISE)
    with pytest.raises(ValueError, match=r"target_epsilon=1: nothing finite is proven for this"):
        calibrate(lambda value: math.inf, 1, *NOISE)
    with pytest.raises(ValueError, match=r"target_epsilon=9 is more than any setting"):
        calibrate(lambda value: 1.0, 9, *NOISE)


# --- finite precision ---


def test_finite_precision_adds_to_epsilon_and_to_nothing_else():
    gaussian, lost = GaussianDpEvent(2.0), FinitePrecisionDpEvent(1e-3)
    alone = best_bound(times(gaussian, 7), DELTA)
    both = best_bound(ComposedDpEvent([times(gaussian, 7), times(lost, 5)]), DELTA)
    assert both.accountant == alone.accountant == "gdp_exact"
    ideal_noise = best_bound(times(gaussian, 7), DELTA * math.exp(-5e-3)).epsilon
    assert both.epsilon == pytest.approx(ideal_noise + 5e-3)
    assert both.epsilon > alone.epsilon + 5e-3
    beyond = ComposedDpEvent([gaussian, FinitePrecisionDpEvent(101.0)])
    assert math.isinf(best_bound(beyond, DELTA).epsilon)
    assert math.isinf(best_bound(ComposedDpEvent([gaussian, lost]), 1e-101).epsilon)
    assert math.isfinite(best_bound(gaussian, 1e-101).epsilon)


def test_a_budget_reserves_a_part_for_finite_precision():
    """Losses of precision alone stop at the reserved part, and the rest is untouched."""
    one = FinitePrecisionDpEvent(2.0**-12)
    assert within_budget([one] * 8, 1.0, DELTA)
    assert not within_budget([one] * 9, 1.0, DELTA)
    assert within_budget([one] * 128, 1_000.0, DELTA)
    assert not within_budget([one] * 129, 1_000.0, DELTA)
    changing = [GaussianDpEvent(300.0), LaplaceDpEvent(300.0)]
    assert within_budget([*changing, *[one] * 8], 1.0, DELTA)
    assert not within_budget([*changing, *[one] * 9], 1.0, DELTA)
    life = times(ComposedDpEvent([GaussianDpEvent(30.0), FinitePrecisionDpEvent(1e-6)]), 10)
    least = unchanged_epsilon(life, DELTA)
    assert within_budget([life], least, DELTA)
    assert not within_budget([life], least * (1 - 1e-6), DELTA)


def test_a_budget_admits_no_noise_of_finite_precision_at_a_delta_that_its_proof_leaves_out():
    """Theorem 8 adds at least 1e-300 to delta: a budget pays for nothing with an infinite claim."""
    gaussian, lost = GaussianDpEvent(30.0), FinitePrecisionDpEvent(1e-9)
    response = ComposedDpEvent([gaussian, lost])
    other = ComposedDpEvent([LaplaceDpEvent(30.0), lost])
    for life in ([response], [response, other]):
        assert within_budget(life, 100.0, 1e-99)
        assert not within_budget(life, 100.0, 1e-101)
    assert within_budget([gaussian], 100.0, 1e-101)
    assert math.isinf(unchanged_epsilon(response, 1e-101))


def test_discrete_gaussian_noise_is_nearly_rounded_ideal_noise():
    """Theorem 8, in small: within exp(70 / u^2) up to 40 u, and not within exp(20 / u^2)."""
    units = 2.0**10
    k = np.arange(0, 40 * int(units))
    nodes, weights = np.polynomial.legendre.leggauss(8)
    # The mass of k divided by its density: the integral of exp(-(2 k x + x^2) / 2 u^2) over |x| <
    # 1/2.
    x = nodes / 2
    ratio = (np.exp(-(2 * k[:, None] * x + x**2) / (2 * units**2)) @ weights) / 2
    worst = np.abs(np.log(ratio)).max() * units**2
    assert 20 < worst < 70


def test_the_losses_of_gaussian_noise_cover_the_theorem():
    """For each number of an answer, and for the largest training, at a scale of 2^25 units."""
    for mechanism, numbers in (
        (NormalizedGradient(10, 1.0), 10),
        (NormalizedGradient(10, 1.0, normalise="batch"), 2**20),
        (NoisyVotes(10, 1.0), 10),
        (ClippedGradients(10, 1.0, 1.0), 2**20),
    ):
        lost = mechanism.event("record", "replace_one").events[-1]
        assert lost == FinitePrecisionDpEvent(numbers * GAUSSIAN_LOSS)
    for laplace in NoisyVotes(10, 1.0, "laplace").event("record", "replace_one").events:
        assert 1 / laplace.noise_multiplier >= 1 + 10 * LAPLACE_LOSS
    assert GAUSSIAN_LOSS >= 2 * 70 / 2.0**50
    assert PRECISION_LOSS >= 2 * MOST_DRAWS / (23 * 2.0**50)
    assert LAPLACE_LOSS >= 1 / (4 * 2.0**50)


@every("relation", ["add_remove", "replace_one"])
def test_a_budget_pays_for_class_counts_with_a_sampled_training(relation):
    """Two settings at once would exhaust the budget; a claim counts only what was released."""
    mechanism = DPSGD(3.0, 0.1, 30, 1.0, 0.02, count_fraction=0.05)
    training, counts = (m.event("record", relation) for m in (mechanism, ClassCounts(mechanism)))
    both = best_bound(ComposedDpEvent([training, counts]), 1e-5).epsilon
    assert best_bound(training, 1e-5).epsilon < both
    needed = smallest_budget([training], 1e-5)
    assert both < needed < 1.02 * both
    assert smallest_budget([training, counts], 1e-5) == needed
    assert within_budget([training, counts], needed, 1e-5)
    assert not within_budget([training, counts], 0.99 * needed, 1e-5)
    twice = smallest_budget([training, counts] * 2, 1e-5)
    assert within_budget([training, counts, training, counts], twice, 1e-5)
    assert needed < twice < 2 * needed


def test_no_budget_admits_settings_without_a_known_divergence():
    """The result is infinite, without an endless search."""
    sampled = [ReplacedInSampleDpEvent(0.1, noise) for noise in (2.0, 3.0)]
    assert smallest_budget(sampled, 1e-5) == math.inf
