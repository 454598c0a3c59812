"""Mechanisms behind a secure sum: noise shares, costs, and who must be honest."""

import math

import numpy as np
import pytest
from dp_accounting import SelfComposedDpEvent
from scipy import stats

from fed_dpsd.privacy.accounting import best_bound
from fed_dpsd.privacy.events import FinitePrecisionDpEvent, ShuffledResponseDpEvent
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, Quorum, Shards
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.votes import NoisyVotes
from tests.every import every
from tests.privacy.ideals import ideal

FIVE = Quorum(threshold=6, colluding=1)
PREDICTIONS = np.full((500, 10), 0.1, np.float32)
SHARED = (
    NormalizedGradient(10, 3.0, bound=0.5, noise_at="distributed", quorum=FIVE),
    NoisyVotes(10, 3.0, noise_at="distributed", quorum=FIVE),
    TopKRandomizedResponse(10, 1.0, noise_at="distributed", quorum=FIVE),
)


@every("seed", [0, 1, 2])
@every(("mechanism", "unit"), [(SHARED[0], 0.5), (SHARED[1], 1.0)])
def test_shares_of_the_honest_are_the_whole_noise(mechanism, unit, seed):
    """Failure probability 1e-6 each. The control: one missing share is detected."""
    rng = np.random.Generator(np.random.PCG64(seed))
    nothing = np.zeros((1, *PREDICTIONS.shape))
    shares = [mechanism.add_noise(nothing, PREDICTIONS, rng) for _ in range(FIVE.honest)]
    whole = stats.norm(scale=3.0 * unit)
    assert stats.kstest(np.sum(shares, 0).ravel(), whole.cdf).pvalue > 1e-6
    assert stats.kstest(np.sum(shares[:-2], 0).ravel(), whole.cdf).pvalue < 1e-6


def test_a_sum_costs_what_it_costs_with_the_server_adding_the_noise():
    for mechanism, trusting in (
        (SHARED[0], NormalizedGradient(10, 3.0, bound=0.5, noise_at="server")),
        (SHARED[1], NoisyVotes(10, 3.0, noise_at="server")),
    ):
        for pair in UNITS_AND_RELATIONS:
            assert mechanism.event(*pair) == trusting.event(*pair)


def test_counted_responses_say_less_than_seen_ones():
    alone = TopKRandomizedResponse(10, 1.0).event("record", "replace_one")
    counted = ideal(SHARED[2].event("record", "replace_one"))
    assert counted == ShuffledResponseDpEvent(1.0, 10, 5)
    one, other = (
        best_bound(SelfComposedDpEvent(event, 100), 1e-5).epsilon for event in (alone, counted)
    )
    assert other < 0.9 * one


@every(
    ("settings", "unit"),
    [
        ({"shards": Shards(3)}, "client"),
        ({"threshold": 0.1}, "record"),
        ({"epsilon_per_answer": 0.0}, "record"),
    ],
)
def test_where_counting_is_not_proven_to_help_the_response_is_charged(settings, unit):
    values = {"num_classes": 10, "epsilon_per_answer": 1.0} | settings
    counted = TopKRandomizedResponse(**values, noise_at="distributed", quorum=FIVE)
    assert counted.event(unit, "add_remove") == TopKRandomizedResponse(**values).event(
        unit, "add_remove"
    )


def test_all_teachers_of_all_honest_clients_respond():
    counted = TopKRandomizedResponse(
        10, 1.0, k=3, noise_at="distributed", quorum=FIVE, shards=Shards(4)
    )
    assert ideal(counted.event("record", "add_remove")) == ShuffledResponseDpEvent(1.0, 3, 20)


@every(
    ("epsilon_per_answer", "teachers", "charged"),
    [(1.0, 800, 4_000), (1.0, 900, 4_096), (14.0, 800, 2_380), (20.0, 800, 5)],
)
def test_responses_are_charged_up_to_a_cap_and_while_their_precision_costs_nothing(
    epsilon_per_answer, teachers, charged
):
    """More responses reveal less of each. A lie of probability e^-20 hides nobody among 4,000."""
    counted = TopKRandomizedResponse(
        *(10, epsilon_per_answer),
        noise_at="distributed",
        quorum=FIVE,
        shards=Shards(teachers),
    ).event("record", "add_remove")
    assert ideal(counted).responses == charged
    (precision,) = (e.loss for e in counted.events if isinstance(e, FinitePrecisionDpEvent))
    alone = TopKRandomizedResponse(10, epsilon_per_answer).event("record", "add_remove")
    (one,) = (e.loss for e in alone.events if isinstance(e, FinitePrecisionDpEvent))
    assert precision == charged * one <= 2.0**-16


@every(("threshold", "colluding"), [(2, 2), (1, 3), (2, -1)])
def test_a_quorum_has_somebody_honest(threshold, colluding):
    with pytest.raises(ValueError, match=f"colluding={colluding}"):
        Quorum(threshold, colluding)


@every(
    ("quorum", "num_clients", "fits"),
    [
        (Quorum(2, 0), 3, True),
        (Quorum(2, 0), 4, False),  # two halves could open a sum each
        (Quorum(3, 2), 3, True),
        (Quorum(3, 2), 4, False),  # two sets of three, with two in both that are not honest
        (Quorum(4, 0), 3, False),
    ],
)
def test_no_two_sums_of_a_request_can_be_opened(quorum, num_clients, fits):
    if fits:
        quorum.check(num_clients)
    else:
        with pytest.raises(ValueError, match=f"threshold={quorum.threshold} must be above half"):
            quorum.check(num_clients)


@every("kind", [NormalizedGradient, NoisyVotes, TopKRandomizedResponse])
@every("settings", [{"noise_at": "distributed"}, {"quorum": FIVE}, {"noise_at": "everywhere"}])
def test_a_quorum_goes_with_distributed_noise(kind, settings):
    with pytest.raises(ValueError, match="noise_at="):
        kind(10, 1.0, **settings)


def test_responses_are_never_the_servers_to_draw():
    with pytest.raises(ValueError, match="noise_at='server'"):
        TopKRandomizedResponse(10, 1.0, noise_at="server")


def test_laplace_noise_has_no_shares():
    with pytest.raises(ValueError, match="noise_law='laplace' has no noise shares"):
        NoisyVotes(10, 1.0, noise_law="laplace", noise_at="distributed", quorum=FIVE)


def test_shares_lie_on_one_grid():
    """Of a power of two, so that the sum of whole numbers of it is exact."""
    for mechanism in SHARED[:2]:
        assert math.frexp(mechanism.lattice)[0] == 0.5
        share = mechanism.add_noise(
            np.zeros((1, 500, 10)), PREDICTIONS, np.random.Generator(np.random.PCG64(0))
        )
        assert np.array_equal(share % mechanism.lattice, np.zeros_like(share))
