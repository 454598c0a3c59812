"""The papers' formulas, evaluated as printed, and how far below the proven numbers they are."""

import math

import pytest

from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import Probabilities
from fed_dpsd.privacy.published import dgd_labels, dpdfd_theorem_3, published_epsilon, theorem_1
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.votes import NoisyVotes
from tests.every import every


@every(("bound", "expected"), [(1e-3, 0.0456), (5e-3, 0.2614)])
def test_theorem_1_as_printed(bound, expected):
    assert theorem_1(bound, 100.0, 10, 51_200, 1e-5) == pytest.approx(expected, abs=1e-4)


def test_theorem_1_with_the_variance_that_is_added():
    """Dividing by sigma^2 beta^2, as the noise is drawn, gives 168.8."""
    assert theorem_1(1.0, 100.0, 10, 51_200, 1e-5) == pytest.approx(168.8, abs=0.1)


def test_theorem_1_is_a_minimum_over_q():
    bound, sigma, queries, delta = 1e-3, 100.0, 51_200, 1e-5
    slope = 2 * bound**2 * 10 * queries / sigma**2
    values = [
        slope * q + math.log((q - 1) / q) - math.log(q * delta) / (q - 1)
        for q in (1.5, 10, 100, 1_000, 10_000)
    ]
    assert theorem_1(bound, sigma, 10, queries, delta) <= min(values)


def test_theorem_2_does_not_depend_on_the_queries():
    label = TopKRandomizedResponse(10, 10.0, 3)
    assert published_epsilon(label, 1, 1e-5) == published_epsilon(label, 51_200, 1e-5) == 10


@every("mechanism", [NormalizedGradient(10, 100.0), TopKRandomizedResponse(10, 1.0, 3)])
def test_published_numbers_are_below_what_can_be_proven(mechanism):
    proven = prove([Stage(mechanism, 200, 256)], 1e-5, "record", "replace_one").value
    assert published_epsilon(mechanism, 51_200, 1e-5) < proven / 100


@every(("queries", "expected"), [(27, 1.314), (400, 5.799), (1_300, 11.901)])
def test_dgds_label_budget_as_printed(queries, expected):
    assert dgd_labels(1 / 20, queries, 1e-5) == pytest.approx(expected, abs=1e-3)
    votes = NoisyVotes(10, 40.0, "laplace")
    assert published_epsilon(votes, queries, 1e-5) == pytest.approx(expected, abs=1e-3)


def test_dgds_label_budget_is_valid_but_loose():
    votes = NoisyVotes(10, 40.0, "laplace")
    proven = prove([Stage(votes, 1, 400)], 1e-5, "record", "replace_one").value
    assert proven < published_epsilon(votes, 400, 1e-5)


def test_dpdfds_theorem_is_theorem_1_and_far_below_its_own_mechanism():
    printed = dpdfd_theorem_3(1e-3, 100.0, 10, 256, 200, 1e-5)
    assert printed == theorem_1(1e-3, 100.0, 10, 51_200, 1e-5)
    assert printed < 0.05 < 2_929


def test_nothing_is_published_for_answers_in_the_clear():
    assert math.isinf(published_epsilon(Probabilities(), 1, 1e-5))
    assert math.isinf(published_epsilon(NoisyVotes(10, 40.0), 1, 1e-5))
