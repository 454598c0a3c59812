"""Proven epsilons: the golden numbers, closed forms and the library's two traps."""

import math

import dp_accounting
import mpmath
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
from scipy.optimize import brentq
from scipy.stats import binom

from fed_dpsd.privacy.accounting import (
    UNITS_AND_RELATIONS,
    UnsupportedEventError,
    epsilon,
    prove,
    prove_stages,
)
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import NonPrivate
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse

DELTA = 1e-5
RUN = 51_200


def response(epsilon_per_answer, k):
    return TopKRandomizedResponse(10, float(epsilon_per_answer), k)


@pytest.mark.parametrize(
    ("sigma", "record", "client"),
    [(100, 28.839, 11.651), (200, 11.651, 5.053), (500, 3.901, 1.783), (1000, 1.783, 0.830)],
)
def test_gaussian_golden_numbers(sigma, record, client):
    gradient = NormalizedGradient(10, float(sigma))
    for relation in ("add_remove", "replace_one"):
        assert prove(gradient, RUN, DELTA, "record", relation).value == pytest.approx(
            record, abs=0.01
        )
    assert prove(gradient, RUN, DELTA, "client", "add_remove").value == pytest.approx(
        client, abs=0.01
    )
    assert prove(gradient, RUN, DELTA, "client", "replace_one").value == pytest.approx(
        record, abs=0.01
    )


@pytest.mark.parametrize(("sigma", "target"), [(1688, 1), (629, 3), (226, 10)])
def test_sigma_for_a_target(sigma, target):
    proven = prove(NormalizedGradient(10, float(sigma)), RUN, DELTA, "record", "add_remove")
    assert proven.value == pytest.approx(target, rel=2e-3)  # sigma is rounded


@pytest.mark.parametrize(
    ("mu", "target"), [(0.2681, 1), (0.5016, 2), (0.7191, 3), (0.9249, 4), (1.666, 8), (2.0004, 10)]
)
def test_gaussian_by_mu(mu, target):
    value, delta, accountant = epsilon(GaussianDpEvent(1 / mu), DELTA)
    assert (delta, accountant) == (DELTA, "gdp_exact")
    assert value == pytest.approx(target, abs=0.01)


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
@pytest.mark.parametrize("mu", [0.03, 0.3, 1.0, 4.5, 12.0])
def test_gaussian_is_what_the_librarys_privacy_loss_distribution_bounds(mu, delta):
    """The library's grid errs to the safe side, by less than 0.001 here; so ours lies below it."""
    accountant = dp_accounting.pld.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    accountant.compose(GaussianDpEvent(1 / mu))
    bound = accountant.get_epsilon(delta)
    assert bound - 1e-3 <= epsilon(GaussianDpEvent(1 / mu), delta)[0] <= bound + 1e-6


@pytest.mark.parametrize("mu", [0.01, 0.3, 2.0, 30.0, 226.0, 5_000.0])
def test_gaussian_epsilon_gives_its_delta_back(mu):
    """By the definition, in 60 digits: at our epsilon delta is met, and a hair below it is not."""

    def delta_at(value):
        with mpmath.workdps(60):
            half = mpmath.mpf(mu) / 2
            above = mpmath.ncdf(half - mpmath.mpf(value) / mu)
            return above - mpmath.exp(value) * mpmath.ncdf(-half - mpmath.mpf(value) / mu)

    value = epsilon(GaussianDpEvent(1 / mu), DELTA)[0]
    if value == 0:
        assert delta_at(0) <= DELTA
        return
    assert delta_at(value) <= DELTA < delta_at(value * (1 - 1e-6))


@pytest.mark.parametrize(
    ("queries", "epsilon_per_answer", "expected"),
    [
        (RUN, 10, 512_000),
        (RUN, 1, 19_424.3),
        (RUN, 0.1, 251.89),
        (RUN, 0.01, 9.080),
        (100, 1, 67.92),
        (1_000, 1, 470.6),
        (200, 0.1, 5.186),
        (2_560, 0.1, 25.72),
    ],
)
def test_response_golden_numbers(queries, epsilon_per_answer, expected):
    proven = prove(response(epsilon_per_answer, 3), queries, DELTA, "record", "replace_one")
    assert proven.value == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("epsilon_per_answer", "queries"), [(1, RUN), (0.1, RUN), (0.5, 300)])
def test_binary_response_is_the_binomial_closed_form(epsilon_per_answer, queries):
    truths = np.arange(queries + 1)
    log_weights = binom.logpmf(truths, queries, 1 / (1 + math.exp(-epsilon_per_answer)))
    losses = epsilon_per_answer * (2 * truths - queries)

    def excess(value):
        above = losses > value
        hit = np.exp(log_weights[above]) @ -np.expm1(value - losses[above])
        return hit - DELTA

    expected = brentq(excess, 0, queries * epsilon_per_answer)
    value, _, _ = epsilon(
        SelfComposedDpEvent(response(epsilon_per_answer, 2).event("record", "add_remove"), queries),
        DELTA,
    )
    assert value == pytest.approx(expected, rel=1e-6)
    assert value >= expected * (1 - 1e-9)


def test_response_matches_brute_force():
    """Enumerate all output sequences of four 3-ary responses under two inputs."""
    mechanism, count = response(0.7, 3), 4
    lie = mechanism.lie_probability
    truth = 1 - 2 * lie
    first, second = np.ones(1), np.ones(1)
    for _ in range(count):
        first = np.outer(first, [truth, lie, lie]).ravel()
        second = np.outer(second, [lie, truth, lie]).ravel()
    for delta in (1e-3, 1e-2, 0.1):
        value, _, _ = epsilon(
            SelfComposedDpEvent(mechanism.event("record", "replace_one"), count), delta
        )
        assert np.maximum(first - math.exp(value) * second, 0).sum() <= delta
        slightly_less = np.maximum(first - math.exp(value * 0.999) * second, 0).sum()
        assert slightly_less > delta


def test_a_run_of_certain_truth_is_a_pure_bound():
    proven = prove(response(10, 3), 5_120, DELTA, "record", "replace_one")
    assert (proven.value, proven.delta, proven.accountant) == (51_200, 0, "pure")


EVENTS = [
    NormalizedGradient(10, 100.0).event("record", "add_remove"),
    response(0.3, 3).event("record", "add_remove"),
    NonPrivateDpEvent(),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_composing_n_times_is_the_self_composed_event(event):
    once = epsilon(SelfComposedDpEvent(event, 37), DELTA)
    assert epsilon(ComposedDpEvent([event] * 37), DELTA) == once
    nested = ComposedDpEvent([SelfComposedDpEvent(SelfComposedDpEvent(event, 6), 6), event])
    assert epsilon(nested, DELTA) == once
    assert epsilon(event, DELTA)[0] <= once[0]


@pytest.mark.parametrize("event", EVENTS[:2], ids=lambda event: type(event).__name__)
def test_epsilon_grows_with_queries_and_falls_with_delta(event):
    values = [epsilon(SelfComposedDpEvent(event, n), DELTA)[0] for n in (1, 10, 100, 1_000)]
    assert values == sorted(values)
    assert values[0] < values[-1]
    by_delta = [epsilon(SelfComposedDpEvent(event, 100), d)[0] for d in (1e-9, 1e-5, 1e-2)]
    assert by_delta == sorted(by_delta, reverse=True)


def test_trap_the_library_ignores_the_count_of_a_composed_response():
    event = response(1, 3).event("record", "replace_one")
    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(SelfComposedDpEvent(event, 1_000))
    trapped = accountant.get_epsilon(DELTA)
    ours, _, _ = epsilon(SelfComposedDpEvent(event, 1_000), DELTA)
    assert trapped < 1.01  # one response, whatever the count: the trap is still there
    assert ours > 400


def test_trap_the_library_doubles_the_shift_for_replace_one():
    event = GaussianDpEvent(5.0)
    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(event)
    ours, _, _ = epsilon(event, DELTA)
    assert accountant.get_epsilon(DELTA) > 1.5 * ours
    assert ours == pytest.approx(epsilon(GaussianDpEvent(5.0), DELTA)[0])


def test_rdp_is_never_below_our_numbers():
    for event, relation in (
        (GaussianDpEvent(50.0), dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE),
        (
            response(0.1, 3).event("record", "replace_one"),
            dp_accounting.NeighboringRelation.REPLACE_ONE,
        ),
    ):
        accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
        accountant.compose(event, 2_560)
        ours, _, _ = epsilon(SelfComposedDpEvent(event, 2_560), DELTA)
        assert ours <= accountant.get_epsilon(DELTA)


def test_edges():
    assert epsilon(ComposedDpEvent([]), DELTA) == (0, 0, "pure")
    assert epsilon(SelfComposedDpEvent(EVENTS[0], 0), DELTA)[0] == 0
    free = response(0, 3).event("record", "replace_one")
    assert epsilon(SelfComposedDpEvent(free, 1_000), DELTA)[0] == pytest.approx(0, abs=1e-9)
    assert math.isinf(prove(NonPrivate(), 1, DELTA, "record", "replace_one").value)
    for delta in (0, 1, -1):
        with pytest.raises(ValueError, match="delta"):
            epsilon(EVENTS[0], delta)


@pytest.mark.parametrize(
    "event",
    [
        LaplaceDpEvent(1.0),
        PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)),
        ComposedDpEvent([EVENTS[0], EVENTS[1]]),
        ComposedDpEvent([EVENTS[1], RandomizedResponseDpEvent(0.5, 2)]),
    ],
    ids=str,
)
def test_what_no_proof_covers_is_an_error_not_a_number(event):
    with pytest.raises(UnsupportedEventError, match="DpEvent"):
        epsilon(event, DELTA)


# --- stages of several mechanisms ---


@pytest.mark.parametrize(
    "mechanism",
    [NormalizedGradient(10, 100.0), TopKRandomizedResponse(10, 1.0, 3)],
    ids=lambda mechanism: mechanism.name,
)
def test_two_stages_of_a_mechanism_are_one_of_their_sum(mechanism):
    for unit, relation in UNITS_AND_RELATIONS:
        stages = [(mechanism, 30), (mechanism, 70)]
        together = prove_stages(stages, 1e-5, unit, relation, ("note",))
        assert together == prove(mechanism, 100, 1e-5, unit, relation, ("note",))


def test_one_open_stage_makes_everything_infinite():
    for first in (NormalizedGradient(10, 100.0), TopKRandomizedResponse(10, 1.0, 3)):
        proven = prove_stages([(NonPrivate(), 1), (first, 100)], 1e-5, "record", "add_remove")
        assert math.isinf(proven.value)
        assert proven.queries == 101
        closed = prove_stages([(NonPrivate(), 0), (first, 100)], 1e-5, "record", "add_remove")
        assert math.isfinite(closed.value)


def test_stages_trust_whom_the_most_trusting_of_them_trusts():
    alone = NormalizedGradient(10, 100.0)
    served = NormalizedGradient(10, 100.0, noise_at="server")
    for stages, trust in (([alone], "nobody"), ([alone, served], "server")):
        proven = prove_stages([(m, 1) for m in stages], 1e-5, "record", "add_remove")
        assert proven.trust == trust


def test_a_clients_epsilon_grows_with_its_teachers_and_a_records_does_not():
    one, many = (NormalizedGradient(10, 1000.0, teachers=n) for n in (1, 50))
    for relation in ("add_remove", "replace_one"):
        record = [prove(m, 1_000, 1e-5, "record", relation).value for m in (one, many)]
        client = [prove(m, 1_000, 1e-5, "client", relation).value for m in (one, many)]
        assert record[0] == record[1]
        assert client[1] > 50 * client[0]
