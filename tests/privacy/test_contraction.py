"""Answers of privately trained teachers: both kinds of noise, by hand and attained."""

import itertools
import math
import statistics

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    RandomizedResponseDpEvent,
    SelfComposedDpEvent,
)
from scipy.integrate import quad

import fed_dpsd
from fed_dpsd.claims import charges_of_plan, proofs
from fed_dpsd.experiment import from_overrides
from fed_dpsd.privacy import laws
from fed_dpsd.privacy.accounting import best_bound, contraction_bound
from fed_dpsd.privacy.contraction import compose_gaussian
from tests.every import every
from tests.proofs import gaussian_delta, gaussian_epsilon

DELTA = 1e-5
NORMAL = statistics.NormalDist()
NOTHING = ComposedDpEvent([])
RESPONSE = RandomizedResponseDpEvent(3 / (math.exp(0.8) + 2), 3)  # epsilon 0.8 among 3 classes


def gaussian(mu):
    return GaussianDpEvent(1 / mu)


def solve(excess, high=50.0):
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def mu_at(eps):
    return solve(lambda mu: eps - gaussian_epsilon(mu, DELTA), 3.0)


def contracted_by_hand(trained, answered, eps):
    a = max(gaussian_delta(trained, eps), 1e-300)
    return a * gaussian_delta(answered, math.log1p(math.expm1(eps) / a))


def thresholds(trained, eps):
    """The probability that training outputs more than the threshold of epsilon, in both worlds."""
    at = eps / trained + trained / 2
    return 1 - NORMAL.cdf(at - trained), 1 - NORMAL.cdf(at)


def attained(trained, eps, first, second):
    """The delta at epsilon of a teacher that reveals on which side of a threshold its training
    fell.

    Its answers have the law `first` on one side and `second` on the other, (N,) masses.
    """
    p, q = thresholds(trained, eps)
    one, other = p * first + (1 - p) * second, q * first + (1 - q) * second
    return np.maximum(one - math.exp(eps) * other, 0).sum()


def shifted(mu):
    """Two Gaussian laws, mu apart, on a fine grid."""
    grid = np.arange(-12, 12 + mu, 1e-4)
    return [1e-4 * np.exp(-((grid - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (mu, 0)]


@every(
    ("trained", "answered", "expected"),
    [(2.988, 1.891, 0.4574), (3, 3, 0.7007), (1, 1, 0.0863)],
)
def test_gaussian_trainings_and_answers_by_hand_and_attained(trained, answered, expected):
    trained, answered = mu_at(trained), mu_at(answered)
    found = contraction_bound(gaussian(trained), gaussian(answered), NOTHING, DELTA)
    by_hand = solve(lambda eps: contracted_by_hand(trained, answered, eps) - DELTA)
    assert found.epsilon == pytest.approx(by_hand, abs=1e-6)
    assert found.epsilon == pytest.approx(expected, abs=1e-3)
    assert found.accountant == "contraction"
    reached = attained(trained, found.epsilon, *shifted(answered))
    assert reached == pytest.approx(DELTA, rel=1e-4)
    # A claim that is one percent smaller is refuted by such a teacher.
    assert attained(trained, 0.99 * found.epsilon, *shifted(answered)) > 1.01 * DELTA


def test_responses_of_a_gaussian_training_are_attained():
    truth, lie = laws.truth_and_lie(RESPONSE)
    first, second = np.array([truth, lie, lie]), np.array([lie, truth, lie])
    trained, delta = mu_at(1.0), 1e-7
    found = contraction_bound(gaussian(trained), RESPONSE, NOTHING, delta)
    assert attained(trained, found.epsilon, first, second) == pytest.approx(delta, rel=1e-2)
    assert found.epsilon < min(0.8, best_bound(gaussian(trained), delta).epsilon)


def test_sampled_trainings_are_bounded_from_above_and_closely():
    """At rate 1 the discretised profile stands for the exact one."""
    answers = gaussian(0.6)
    whole = SelfComposedDpEvent(PoissonSampledDpEvent(1.0, GaussianDpEvent(14.0)), 100)
    sampled = contraction_bound(whole, answers, NOTHING, DELTA).epsilon
    exact = contraction_bound(gaussian(10 / 14), answers, NOTHING, DELTA).epsilon
    assert exact <= sampled <= exact + 1e-3
    rarer = SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GaussianDpEvent(14.0)), 100)
    assert contraction_bound(rarer, answers, NOTHING, DELTA).epsilon < exact / 2


@every(("answers", "answered", "counted"), [(11, 3.0, 0.8), (3, 1.0, 0.02)])
def test_a_gaussian_with_a_profile_with_kinks_is_bounded_from_above(answers, answered, counted):
    """Few responses have few losses; a quadrature between them would miss some."""
    response = RandomizedResponseDpEvent(3 / (math.exp(answered) + 2), 3)

    def alone(epsilons):
        return laws.response_delta(response, answers, epsilons)

    grid = np.linspace(-10, 10, 400_001)
    weights = np.exp(-(grid**2) / 2)
    weights /= weights.sum()
    for epsilon_ in (0.5, 2.0, 0.9 * answers * answered):
        left = epsilon_ - (counted**2 / 2 + counted * grid)
        size = np.abs(left)
        values = alone(size)
        mean = weights @ np.where(left >= 0, values, 1 - np.exp(-size) * (1 - values))
        found = float(compose_gaussian(alone, counted)(np.array([epsilon_]))[0])
        assert mean * (1 - 1e-9) <= found <= mean * (1 + 1e-4)


def test_the_delta_of_responses_is_exact_between_their_losses():
    response = RandomizedResponseDpEvent(3 / (math.exp(0.7) + 2), 3)
    law, missing = laws._sign_sum_law(20, *laws.truth_and_lie(response))
    losses = 0.7 * (np.arange(len(law)) - 20)
    epsilons = np.linspace(0, 15, 301)
    exact = [law @ np.maximum(0, -np.expm1(e - losses)) + missing for e in epsilons]
    assert laws.response_delta(response, 20, epsilons) == pytest.approx(exact, rel=1e-12)


def test_tiny_losses_are_not_lost():
    found = contraction_bound(gaussian(1.0), LaplaceDpEvent(2e6), NOTHING, 1e-9)
    assert found is None or found.epsilon >= 1.89e-7


def composed_by_hand(trained, answered, counted, eps):
    """The mean of the contracted profile over the loss of the counts, by adaptive quadrature."""

    def at(loss):
        left = eps - loss
        size = abs(left)
        value = contracted_by_hand(trained, answered, size) if size > 1e-12 else 0.0
        value = value if left >= 0 else -math.expm1(-size) + math.exp(-size) * value
        return NORMAL.pdf((loss - counted**2 / 2) / counted) / counted * value

    middle = counted**2 / 2
    bounds = sorted((middle - 9 * counted, eps, middle + 9 * counted))
    parts = itertools.pairwise(bounds)
    return sum(quad(at, *part, epsabs=1e-14, epsrel=1e-10, limit=200)[0] for part in parts)


def test_each_release_that_bypasses_the_teachers_counts():
    """Four releases cost as much as one with half of the noise; the control: one costs less."""
    trained, answered = gaussian(0.7), gaussian(0.6)
    once, four, doubled = (
        contraction_bound(trained, answered, others, DELTA).epsilon
        for others in (gaussian(0.1), SelfComposedDpEvent(gaussian(0.1), 4), gaussian(0.2))
    )
    assert four == pytest.approx(doubled, rel=1e-9)
    assert once < 0.99 * four


def test_a_plan_prints_what_training_and_answers_prove_together():
    """With class counts, which pass through no teacher, composed separately."""
    queries = 20 * 256
    scale = 2 * math.sqrt(queries) / 0.6
    overrides = ("answers=gradient", f"answers.noise_multiplier={scale!r}")
    planned = fed_dpsd.plan(*overrides)
    experiment = from_overrides(overrides, None)
    training = experiment.training
    trained, counted = math.sqrt(training.steps) / training.noise_multiplier, training.count_noise
    claim = planned.privacy.epsilon("record", "add_remove")
    (row,) = (r for r in planned.privacy.content["proven"] if r["relation"] == "add_remove"
              and r["unit"] == "record")  # fmt: skip
    assert row["basis"] == claim.accountant == "contraction"
    losses = 2 * (2.0**-17 + 1e-7)  # by finite precision: of the training, and of all answers
    within = (claim.value - losses / 2 + each for each in (-1e-6, 1e-6))
    below, above = (composed_by_hand(trained, 0.6, 1 / counted, epsilon) for epsilon in within)
    assert above < DELTA < below
    assert composed_by_hand(trained, 0.6, 1 / counted, claim.value) <= DELTA
    alone = {each["basis"]: each["epsilon"] for each in row["beside"]}
    assert claim.value < min(alone["answers"], alone["training"])
    assert str(planned).count("by the training and the answers together") == 2


def test_where_nothing_contracts_nothing_is_claimed(small):
    """Labels at 10 per answer reveal the teacher; weights are the teacher; more is not Gaussian."""
    trained = gaussian(0.7)
    strong = SelfComposedDpEvent(RandomizedResponseDpEvent(3 / (math.exp(10) + 2), 3), 100)
    assert contraction_bound(trained, strong, NOTHING, DELTA) is None
    assert contraction_bound(trained, NonPrivateDpEvent(), NOTHING, DELTA) is None
    assert contraction_bound(NonPrivateDpEvent(), trained, NOTHING, DELTA) is None
    assert contraction_bound(trained, trained, RESPONSE, DELTA) is None
    for overrides in (("answers=label",), ("method=fedavg", "teacher.same_start=true")):
        experiment = small("training=dp_sgd", *overrides)
        plan = experiment.plan
        found = proofs(charges_of_plan(plan, plan.releases, "record", "add_remove"), DELTA)
        assert {proof.basis for proof in found} == {"training", "answers"}


def test_a_target_is_reached_by_both_kinds_of_noise(small):
    """Without a budget, which counts the training alone."""
    settings = ("training=dp_sgd", "answers=gradient", "answers.noise_multiplier=80",
                "privacy.target_epsilon=0.5")  # fmt: skip
    together = small(*settings)
    alone = small(*settings, "privacy.budget=0.5")
    assert together.training.noise_multiplier < alone.training.noise_multiplier
    for experiment in (together, alone):
        plan = experiment.plan
        charges = charges_of_plan(plan, plan.releases, "record", "add_remove")
        found = {bound.basis: bound.epsilon for bound in proofs(charges, DELTA)}
        aimed = found["contraction"] if experiment is together else found["training"]
        assert aimed == pytest.approx(0.5, rel=0.01)
        assert aimed <= 0.5
        assert found["contraction"] <= 0.5


def test_extreme_noise_gives_numbers():
    """A claim is never NaN, and never above the claim of either noise alone."""
    for trained in (1e-6, 1.0, 30.0):
        for answered in (1e-6, 1.0, 30.0):
            for others in (NOTHING, gaussian(1e-6), gaussian(5.0)):
                found = contraction_bound(gaussian(trained), gaussian(answered), others, 1e-9)
                alone = [
                    best_bound(ComposedDpEvent([gaussian(mu), others]), 1e-9).epsilon
                    for mu in (trained, answered)
                ]
                assert found is None or 0 <= found.epsilon <= min(alone)


def test_a_profile_beyond_what_a_float_holds_is_not_smaller_than_it_is():
    """3,000 responses at 1 have epsilon 1,279: at 900 a test still distinguishes the worlds."""
    response = RandomizedResponseDpEvent(3 / (math.exp(1) + 2), 3)
    sampled = PoissonSampledDpEvent(0.5, GaussianDpEvent(0.45))
    epsilons = np.array([650.0, 700.0, 900.0])
    assert laws.response_delta(response, 3000, epsilons) == pytest.approx(1.0)
    deltas = laws.discretised_deltas([(sampled, 1200)])(epsilons)  # epsilon 1,300
    assert deltas == pytest.approx(1.0)


def test_a_loss_beyond_what_a_float_holds_contracts_nothing():
    """There is still a claim, by the training or the answers alone."""
    sampled = SelfComposedDpEvent(PoissonSampledDpEvent(0.5, GaussianDpEvent(0.45)), 660)
    assert best_bound(sampled, DELTA).epsilon > 760
    assert contraction_bound(sampled, gaussian(34.5), NOTHING, DELTA) is None
    assert contraction_bound(sampled, gaussian(34.5), gaussian(0.5), DELTA) is None
    assert contraction_bound(gaussian(1.0), gaussian(1.0), gaussian(1e7), DELTA) is None
