"""Proven epsilons: golden numbers, closed forms, conformance, and the library's two traps."""

import functools
import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    RandomizedResponseDpEvent,
    SelfComposedDpEvent,
)
from scipy.optimize import brentq
from scipy.stats import binom, norm

from fed_dpsd.privacy import events, gdp, laws, shuffled
from fed_dpsd.privacy.accounting import (
    Stage,
    best_bound,
    prove,
    within_budget,
)
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.events import (
    BoundedRangeDpEvent,
    ReplacedInSampleDpEvent,
    ShuffledResponseDpEvent,
    UnsupportedEventError,
    law_of,
)
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import (
    UNITS_AND_RELATIONS,
    ExactCounts,
    Probabilities,
    Shards,
    Weights,
)
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.training import Plain
from fed_dpsd.privacy.votes import NoisyVotes
from tests.every import every
from tests.privacy.ideals import ideal
from tests.proofs import bases

DELTA = 1e-5
RUN = 51_200
ADD = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dp_accounting.NeighboringRelation.REPLACE_ONE


@pytest.fixture(autouse=True, scope="module")
def _composed_once():
    """A privacy loss distribution does not depend on delta, and serves many deltas."""
    compose = functools.lru_cache(maxsize=2)(lambda parts: original(list(parts)))
    original = laws._composed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laws, "_composed", lambda parts: compose(tuple(parts)))
        yield


def response(epsilon_per_answer, k):
    return TopKRandomizedResponse(10, float(epsilon_per_answer), k)


def dp_sgd(noise_multiplier, sample_rate=256 / 12_000, steps=705):
    return DPSGD(noise_multiplier, sample_rate, steps, 0.1, 0.004)


def times(event, count):
    return SelfComposedDpEvent(event, count)


def proven(mechanism, queries, unit="record", relation="add_remove", requests=1):
    return prove([Stage(mechanism, requests, queries)], DELTA, unit, relation)


# --- golden numbers ---------------------------------------------------------------------------


def gaussian(sigma, **fields):
    return NormalizedGradient(10, float(sigma), **fields)


@every(
    ("sigma", "record", "client"),
    [(100, 28.839, 11.651), (200, 11.651, 5.053), (500, 3.901, 1.783), (1000, 1.783, 0.830)],
)
def test_gaussian_golden_numbers(sigma, record, client):
    for unit, relation in UNITS_AND_RELATIONS:
        expected = client if (unit, relation) == ("client", "add_remove") else record
        value = proven(gaussian(sigma), RUN, unit, relation).value
        assert value == pytest.approx(expected, abs=0.01)


def responses(eps0, queries):
    return times(response(eps0, 3).event("record", "replace_one"), queries)


@pytest.mark.slow
@every(
    ("event", "expected", "error"),
    [
        # Sigma for a target, rounded.
        *(
            (times(gaussian(sigma).event("record", "add_remove"), RUN), target, 2e-3 * target)
            for sigma, target in ((1688, 1), (629, 3), (226, 10))
        ),
        *(
            (GaussianDpEvent(1 / mu), target, 0.01)
            for mu, target in (
                *((0.2681, 1), (0.5016, 2), (0.7191, 3), (0.9249, 4), (1.666, 8), (2.0004, 10)),
            )
        ),
        # DPDFD's Eq. 4, one mean gradient: sensitivity 2 beta b, so z = sigma / (2 b), T times.
        (times(GaussianDpEvent(100 / (2 * 256)), 200), 2_929, 0.5),
        *(
            (responses(eps0, queries), expected, 1e-3 * expected)
            for queries, eps0, expected in (
                *((RUN, 10, 512_000), (RUN, 1, 19_424.3), (RUN, 0.1, 251.89), (RUN, 0.01, 9.080)),
                *((100, 1, 67.92), (1_000, 1, 470.6), (200, 0.1, 5.186), (2_560, 0.1, 25.72)),
            )
        ),
        *(
            (times(ShuffledResponseDpEvent(0.1, 3, responders), 512), expected, 1e-3)
            for responders, expected in ((5, 3.642), (50, 1.008), (250, 0.418), (1_000, 0.197))
        ),
    ],
)
def test_golden_numbers(event, expected, error):
    assert best_bound(event, DELTA).epsilon == pytest.approx(expected, abs=error)


def test_a_batch_normalised_as_a_whole_is_one_release():
    whole = proven(gaussian(100, normalise="batch"), 256, requests=200)
    assert (whole.value, whole.queries) == (pytest.approx(1.061, abs=0.01), RUN)


@every("mu", [0.01, 0.3, 2.0, 30.0, 226.0, 5_000.0])
def test_gaussian_epsilon_gives_its_delta_back(mu):
    """By the definition, in 60 digits: our epsilon meets delta, a slightly smaller one does not."""

    def delta_at(value):
        with mpmath.workdps(60):
            half = mpmath.mpf(mu) / 2
            above = mpmath.ncdf(half - mpmath.mpf(value) / mu)
            return above - mpmath.exp(value) * mpmath.ncdf(-half - mpmath.mpf(value) / mu)

    value = best_bound(GaussianDpEvent(1 / mu), DELTA).epsilon
    if value == 0:
        assert delta_at(0) <= DELTA
        return
    assert delta_at(value) <= DELTA < delta_at(value * (1 - 1e-6))


@every(("epsilon_per_answer", "queries"), [(1, RUN), (0.1, RUN), (0.5, 300)])
def test_binary_response_is_the_binomial_closed_form(epsilon_per_answer, queries):
    truths = np.arange(queries + 1)
    log_weights = binom.logpmf(truths, queries, 1 / (1 + math.exp(-epsilon_per_answer)))
    losses = epsilon_per_answer * (2 * truths - queries)

    def excess(value):
        above = losses > value
        hit = np.exp(log_weights[above]) @ -np.expm1(value - losses[above])
        return hit - DELTA

    expected = brentq(excess, 0, queries * epsilon_per_answer)
    event = response(epsilon_per_answer, 2).event("record", "add_remove")
    value = best_bound(times(event, queries), DELTA).epsilon
    assert value == pytest.approx(expected, rel=1e-6)
    assert value >= expected * (1 - 1e-9)


def test_response_matches_brute_force():
    """Enumerate all output sequences of four 3-ary responses under two inputs."""
    mechanism, count = response(0.7, 3), 4
    lie = float(mechanism.lie_probability(3))
    truth = 1 - 2 * lie
    first, second = np.ones(1), np.ones(1)
    for _ in range(count):
        first = np.outer(first, [truth, lie, lie]).ravel()
        second = np.outer(second, [lie, truth, lie]).ravel()
    for delta in (1e-3, 1e-2, 0.1):
        value = best_bound(times(mechanism.event("record", "replace_one"), count), delta).epsilon
        assert np.maximum(first - math.exp(value) * second, 0).sum() <= delta
        slightly_less = np.maximum(first - math.exp(value * 0.999) * second, 0).sum()
        assert slightly_less > delta


def test_a_run_of_certain_truth_is_a_pure_bound():
    claim = proven(response(10, 3), 5_120)
    assert (claim.value, claim.delta, claim.accountant) == (pytest.approx(51_200), 0, "pure")
    assert claim.value > 51_200  # by the finite precision of its draws


@every(("queries", "expected"), [(27, 0.644), (400, 2.924), (1_300, 5.780)])
def test_laplace_votes_golden_numbers(queries, expected):
    """DGD: Laplace of scale 2 / eps0 = 40 on two counts."""
    votes = NoisyVotes(10, 40.0, "laplace")
    assert proven(votes, queries).value == pytest.approx(expected, abs=0.01)


@pytest.mark.slow
@every(("sigma", "add_remove", "replace_one"), [(2.286, 1.000, 1.977), (0.652, 10.00, 12.64)])
def test_dp_sgd_golden_numbers(sigma, add_remove, replace_one):
    """Charged once, whatever the teachers answer afterwards."""
    plan = Plan(dp_sgd(sigma), (Stage(Probabilities(), 200, 256),))
    for relation, expected, error in (
        ("add_remove", add_remove, 0.012),
        ("replace_one", replace_one, 0.02),
    ):
        claim = prove(bases(plan)["training"], DELTA, "record", relation, (), plan.queries)
        assert claim.value == pytest.approx(expected, abs=error)
        assert claim.queries == RUN


def test_the_rdp_bound_of_mixed_sizes_is_used_where_the_exact_law_is_too_long():
    event = ideal(response(1, 3).event("record", "replace_one"))
    few, many = times(event, RUN), times(event, 50 * RUN)
    assert best_bound(few, DELTA).accountant == "rr_exact"
    assert best_bound(many, DELTA).accountant == "rdp"
    assert best_bound(many, DELTA).epsilon < 50 * best_bound(few, DELTA).epsilon


# --- conformance: every event -----------------------------------------------------------------

EVENTS = {
    "gaussian": GaussianDpEvent(50.0),
    "laplace": LaplaceDpEvent(20.0),
    "response": ideal(response(0.3, 3).event("record", "add_remove")),
    "binary response": ideal(response(0.3, 2).event("record", "add_remove")),
    "dp_sgd": PoissonSampledDpEvent(0.02, GaussianDpEvent(1.0)),
    "dp_sgd, replaced": ReplacedInSampleDpEvent(0.02, 1.0),
    "shuffled": ShuffledResponseDpEvent(0.3, 3, 20),
    "bounded range": BoundedRangeDpEvent(0.1),
}
UNKNOWN = dp_accounting.dp_event.DiscreteLaplaceDpEvent(1.0, 1)
EVERY = every("event", EVENTS.values())


@pytest.mark.slow
@EVERY
def test_composing_n_times_is_the_self_composed_event(event):
    once = best_bound(times(event, 37), DELTA)
    assert best_bound(ComposedDpEvent([event] * 37), DELTA) == once
    nested = ComposedDpEvent([times(times(event, 6), 6), event])
    assert best_bound(nested, DELTA) == once
    assert 0 <= best_bound(event, DELTA).epsilon <= once.epsilon


@pytest.mark.slow
@EVERY
def test_epsilon_grows_with_releases_and_falls_with_delta(event):
    values = [best_bound(times(event, n), DELTA).epsilon for n in (1, 10, 100)]
    assert values == sorted(values)
    assert values[0] < values[-1]
    by_delta = [best_bound(times(event, 100), d).epsilon for d in (1e-9, 1e-5, 1e-2)]
    assert by_delta == sorted(by_delta, reverse=True)


@pytest.mark.slow
@every(
    ("weaker", "stronger"),
    [
        (GaussianDpEvent(5.0), GaussianDpEvent(6.0)),
        (LaplaceDpEvent(5.0), LaplaceDpEvent(6.0)),
        (ideal(response(0.6, 3).event("record", "add_remove")), EVENTS["response"]),
        (EVENTS["binary response"], EVENTS["response"]),
        (EVENTS["dp_sgd"], PoissonSampledDpEvent(0.02, GaussianDpEvent(1.2))),
        (EVENTS["dp_sgd"], PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))),
        (EVENTS["dp_sgd, replaced"], EVENTS["dp_sgd"]),
        (ShuffledResponseDpEvent(0.3, 3, 5), EVENTS["shuffled"]),
        (EVENTS["bounded range"], BoundedRangeDpEvent(0.09)),
    ],
)
def test_more_noise_is_more_private(weaker, stronger):
    assert (
        best_bound(times(weaker, 64), DELTA).epsilon
        > best_bound(times(stronger, 64), DELTA).epsilon
    )


@pytest.mark.slow
@EVERY
def test_a_grid_is_an_upper_bound_and_rdp_a_looser_one(event):
    part = [(event, 200)]
    grid, ours = laws.discretised_epsilon(part, DELTA), best_bound(times(event, 200), DELTA).epsilon
    assert ours <= grid * (1 + 1e-7)
    assert grid <= laws.renyi_epsilon(part, DELTA)
    assert ours >= grid * 0.98  # the grid is not far off


@every(("mu", "releases", "delta"), [(2.43, 20_898, 7.7e-14), (2.64, 1_849, 3.2e-10)])
def test_no_grid_is_below_the_exact_epsilon_at_a_small_delta(mu, releases, delta):
    """The transforms of long compositions lose tails of about 1e-16 per release."""
    part = [(GaussianDpEvent(math.sqrt(releases) / mu), releases)]
    exact = gdp.gaussian_epsilon(mu, delta)
    assert laws.discretised_epsilon(part, delta) >= exact
    assert laws.discretised_epsilon(part, 1e-9) < 1.01 * gdp.gaussian_epsilon(mu, 1e-9)


def test_an_unknown_divergence_is_within_no_budget():
    assert not laws.renyi_to_epsilon(math.nan, 2.0, DELTA) <= 1e9


def test_the_librarys_rdp_agrees_with_ours():
    for event, relation in (
        (EVENTS["gaussian"], ADD),
        (EVENTS["laplace"], ADD),
        (EVENTS["response"], REPLACE),
        (EVENTS["dp_sgd"], ADD),
    ):
        for order in (1.5, 4.0, 32.0):
            accountant = dp_accounting.rdp.RdpAccountant([order], relation)
            accountant.compose(event)
            ours = law_of(event).renyi(order)
            assert ours == pytest.approx(accountant.rdp[0], rel=1e-6), (event, order)


def test_a_shuffled_response_by_enumeration():
    """Four 3-ary responders, one query: all sequences of answers, counted."""
    event = ShuffledResponseDpEvent(1.0, 3, 4)
    lie = 1 / (math.e + 2)
    truth = 1 - 2 * lie
    laws_of = [np.full(3, lie) + np.eye(3)[c] * (truth - lie) for c in range(3)]
    for others in ((0, 0, 0), (0, 1, 2), (2, 2, 2)):
        worlds = []
        for own in (0, 1):
            counts = {}
            for index in np.ndindex(3, 3, 3, 3):
                chance = math.prod(
                    laws_of[c][a] for c, a in zip((own, *others), index, strict=True)
                )
                key = tuple(np.bincount(index, minlength=3))
                counts[key] = counts.get(key, 0) + chance
            worlds.append(counts)
        for delta in (1e-3, 1e-2, 0.1):
            value = best_bound(event, delta).epsilon
            for first, second in (worlds, worlds[::-1]):
                gap = sum(max(0, first[c] - math.exp(value) * second[c]) for c in first)
                assert gap <= delta


def uniform_and_changed(event, own):
    """Enumerate the uniform answers; {(number of uniform answers, counts): probability}."""
    k, others = event.k, event.responses - 1
    lie = 1 / (math.exp(event.epsilon_per_answer) + k - 1)
    law = {}
    for uniform in range(others + 1):
        chance = binom.pmf(uniform, others, k * lie) / k**uniform
        for answers in itertools.product(range(k), repeat=uniform):
            for last in range(k):
                key = (uniform, *sorted((*answers, last)))
                mine = lie if last != own else 1 - (k - 1) * lie
                law[key] = law.get(key, 0) + chance * mine
    return law


@pytest.mark.slow
@every(("k", "responses", "queries"), [(2, 9, 1), (3, 6, 1), (3, 4, 2), (4, 3, 3), (2, 1, 2)])
@every("epsilon_per_answer", [0.2, 1.0, 3.0])
def test_shuffled_responses_have_the_losses_of_an_enumeration(
    epsilon_per_answer, k, responses, queries
):
    """The control: with one more response in the event, the enumeration exceeds it."""
    event = ShuffledResponseDpEvent(epsilon_per_answer, k, responses)
    laws_of = [uniform_and_changed(event, own) for own in (0, 1)]
    first, second = (np.array([law[key] for key in laws_of[0]]) for law in laws_of)
    up, down = (functools.reduce(np.outer, [law] * queries).ravel() for law in (first, second))
    part, more = (
        [(ShuffledResponseDpEvent(epsilon_per_answer, k, m), queries)]
        for m in (responses, responses + 1)
    )
    for candidate in (0.0, 0.3 * epsilon_per_answer, 0.8 * epsilon_per_answer):
        exact = np.maximum(up - math.exp(candidate) * down, 0).sum()
        assert exact <= laws.discretised_delta(part, candidate) <= exact * (1 + 1e-4) + 1e-11
        assert laws.discretised_delta(more, candidate) < exact


def test_many_shuffled_responses_are_rounded_to_the_safe_side_and_little(monkeypatch):
    event = ShuffledResponseDpEvent(0.3, 2, 3_000)
    rounded = laws.discretised_epsilon([(event, 100)], DELTA)
    monkeypatch.setattr(shuffled, "COARSE", 0.0)
    monkeypatch.setattr(events, "_losses", events._losses.__wrapped__)
    exact = laws.discretised_epsilon([(event, 99), (event, 1)], DELTA)  # not the cached sum
    assert exact < rounded < 1.002 * exact


@pytest.mark.slow
def test_a_replaced_record_in_a_sample_by_integration():
    """delta(eps) of one step, integrated on a fine grid of outputs, both ways round."""
    z, q = 0.8, 0.1
    x = np.linspace(-12, 12, 200_001)
    step = x[1] - x[0]
    base = (1 - q) * norm.pdf(x, 0, z)
    up, down = base + q * norm.pdf(x, 1, z), base + q * norm.pdf(x, -1, z)
    for delta in (1e-4, 1e-2):
        value = best_bound(ReplacedInSampleDpEvent(q, z), delta).epsilon
        gap = np.maximum(up - math.exp(value) * down, 0).sum() * step
        assert gap == pytest.approx(delta, rel=0.02)
        assert gap <= delta * (1 + 1e-6)


@pytest.mark.slow
def test_mixtures_are_at_least_their_parts_and_at_most_their_sum():
    parts = [times(EVENTS["response"], 30), times(EVENTS["gaussian"], 300), EVENTS["laplace"]]
    parts.append(times(EVENTS["dp_sgd"], 200))
    together = best_bound(ComposedDpEvent(parts), DELTA)
    assert together.accountant == "pld"
    alone = [best_bound(part, DELTA).epsilon for part in parts]
    share = [best_bound(part, DELTA / len(parts)).epsilon for part in parts]
    assert max(alone) < together.epsilon < sum(share)


def test_responses_of_two_settings_by_brute_force():
    first, second = response(0.5, 2), response(0.9, 2)
    event = ComposedDpEvent([times(m.event("record", "replace_one"), 3) for m in (first, second)])
    up, down = np.ones(1), np.ones(1)
    for mechanism in (first, second):
        lie = float(mechanism.lie_probability(2))
        for _ in range(3):
            up = np.outer(up, [1 - lie, lie]).ravel()
            down = np.outer(down, [lie, 1 - lie]).ravel()
    for delta in (1e-3, 1e-2, 0.1):
        value = best_bound(event, delta).epsilon
        assert np.maximum(up - math.exp(value) * down, 0).sum() <= delta
        less = np.maximum(up - math.exp(value * 0.98 - 0.01) * down, 0).sum()
        assert less > delta


@every("epsilon_per_answer", [0.0, 1e-9, 1e-6, 1e-4, 0.01])
@every("k", [2, 3, 10])
def test_faint_responses_with_other_noise_take_nothing_away(epsilon_per_answer, k):
    gaussian = GaussianDpEvent(4.0)
    faint = times(response(epsilon_per_answer, k).event("record", "replace_one"), 20)
    alone = best_bound(gaussian, DELTA).epsilon
    value = best_bound(ComposedDpEvent([gaussian, faint]), DELTA).epsilon
    assert alone - 1e-6 <= value <= alone + 20 * epsilon_per_answer + 0.003


def test_pure_bounds_are_printed_where_they_are_as_good():
    assert best_bound(LaplaceDpEvent(0.1), 1e-9).epsilon == pytest.approx(10, rel=1e-6)
    few = best_bound(times(response(3, 3).event("record", "add_remove"), 2), 1e-9)
    assert (few.accountant, few.delta) == ("pure", 0)


# --- the library's traps ----------------------------------------------------------------------


def test_losses_too_large_for_the_library_have_no_bound():
    """Calibration tries such noise; the library's own steps overflow there."""
    event = ReplacedInSampleDpEvent(1e-3, 1e-4)
    assert laws.discretised_epsilon([(event, 32_000)], DELTA) == math.inf
    assert laws.discretised_epsilon([(ReplacedInSampleDpEvent(1e-3, 1.0), 10)], DELTA) < 1


# --- edges ------------------------------------------------------------------------------------


def test_edges():
    nothing = best_bound(ComposedDpEvent([]), DELTA)
    assert (nothing.epsilon, nothing.delta, nothing.accountant) == (0, 0, "pure")
    assert best_bound(times(EVENTS["gaussian"], 0), DELTA).epsilon == 0
    free = response(0, 3).event("record", "replace_one")
    assert best_bound(times(free, 1_000), DELTA).epsilon == pytest.approx(0, abs=1e-9)
    certain = RandomizedResponseDpEvent(0.0, 3)  # never lies
    assert math.isinf(best_bound(certain, DELTA).epsilon)
    assert math.isinf(best_bound(GaussianDpEvent(1e-200), DELTA).epsilon)
    for clear in (Probabilities(), Weights(), ExactCounts()):
        assert math.isinf(proven(clear, 1).value)
        assert math.isinf(proven(clear, 0).value)  # a request without images
    for delta in (0, 1, -1):
        with pytest.raises(ValueError, match="delta"):
            best_bound(EVENTS["gaussian"], delta)


@every(
    "event",
    [
        UNKNOWN,
        PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0)),
        ComposedDpEvent([EVENTS["gaussian"], times(UNKNOWN, 3)]),
    ],
)
def test_what_no_proof_covers_is_an_error_not_a_number(event):
    with pytest.raises(UnsupportedEventError, match="DpEvent"):
        best_bound(event, DELTA)
    with pytest.raises(UnsupportedEventError, match="DpEvent"):
        within_budget([event], 1.0, DELTA)


@every(
    "answers",
    [Probabilities(), Weights(), NormalizedGradient(10, 100.0), response(1, 3)],
)
def test_what_privately_trained_teachers_give_adds_nothing_to_their_training(answers):
    """By the training it is post-processing; by the answers it costs what any teacher costs."""
    training = dp_sgd(2.0)
    plan = Plan(training, (Stage(answers, 1, 100),))
    for unit, relation in UNITS_AND_RELATIONS:
        by = {
            basis: prove(stages, DELTA, unit, relation, (), plan.queries)
            for basis, stages in bases(plan).items()
        }
        assert by["training"].value == proven(training, 0, unit, relation).value
        assert by["answers"] == proven(answers, 100, unit, relation)
        assert by["training"].queries == by["answers"].queries == 100
    assert list(bases(Plan(Plain(), plan.stages))) == ["answers"]


def test_a_patient_is_one_teacher_only_where_shards_are_by_patient():
    for by, teachers in (("record", 5), ("patient", 1)):
        gradient = NormalizedGradient(10, 100.0, shards=Shards(5, by))
        many = proven(gradient, 100, "patient").value
        one = proven(NormalizedGradient(10, 100.0 / teachers), 100).value
        assert many == pytest.approx(one)


# --- stages -----------------------------------------------------------------------------------


@every(
    "mechanism",
    [NormalizedGradient(10, 100.0), TopKRandomizedResponse(10, 1.0, 3)],
)
def test_two_stages_of_a_mechanism_are_one_of_their_sum(mechanism):
    for unit, relation in UNITS_AND_RELATIONS:
        stages = [Stage(mechanism, 3, 10), Stage(mechanism, 1, 70)]
        together = prove(stages, DELTA, unit, relation, ("note",))
        assert together == prove([Stage(mechanism, 1, 100)], DELTA, unit, relation, ("note",))


def test_one_open_stage_makes_everything_infinite():
    for first in (NormalizedGradient(10, 100.0), TopKRandomizedResponse(10, 1.0, 3)):
        claim = prove(
            [Stage(Probabilities(), 1, 1), Stage(first, 1, 100)], DELTA, "record", "add_remove"
        )
        assert math.isinf(claim.value)
        assert claim.queries == 101


def test_one_trusting_stage_makes_the_whole_trusting():
    stages = [
        Stage(NormalizedGradient(10, 9.0), 1, 1),
        Stage(NormalizedGradient(10, 9.0, noise_at="server"), 1, 1),
    ]
    assert prove(stages, DELTA, "record", "add_remove").trust == "server"
