"""Audits of the real mechanism objects: never above a proof, near it, and above it when broken.

Each statistical test fixes its seeds and states how often a correct implementation would fail it.
"""

import dataclasses
import math

import numpy as np
import pytest
from scipy.stats import binomtest

from fed_dpsd.audits import black_box as audits
from fed_dpsd.audits import rates
from fed_dpsd.audits.black_box import (
    Audit,
    Proof,
    audit_by_enumeration,
    enumerate_response,
    public_rows,
)
from fed_dpsd.audits.black_box import audit as sampled
from fed_dpsd.audits.black_box import verdict as sentences_on
from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import Shards
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.votes import NoisyVotes
from tests.every import every

DELTA = 1e-3
MU = 0.719
GRADIENT = NormalizedGradient(10, 5.563)  # mu = 2 sqrt(4) / 5.563 in four queries


def straight(mechanism, seed):
    """A client that draws from one generator, without a site around it."""
    rng = np.random.default_rng(seed)

    def client(requests, public):
        for values in requests:
            predictions = public[: values.shape[1]]
            bounded = np.stack(
                [mechanism.constrain_sensitivity(each, predictions) for each in values]
            )
            yield mechanism.add_noise(bounded, predictions, rng)

    return client


def audit(mechanism, queries, runs, delta, failure_probability, seed, report_mu=True, claim=None):
    return sampled(
        *(claim or mechanism, straight(mechanism, seed), queries, runs, delta),
        *(failure_probability, report_mu),
    )


def verdict(result, proven, published, published_delta):
    return sentences_on(result, Proof(proven), published, published_delta)


def proof(mechanism, queries, delta=DELTA):
    return prove([Stage(mechanism, queries, 1)], delta, "record", "replace_one")


class NoNoise(NormalizedGradient):
    def add_noise(self, value, predictions, rng):
        return value.sum(0)


# --- gradients ---


def test_a_gaussian_is_audited_closely():
    """A correct implementation exceeds an upper end with probability at most 0.01."""
    proven = proof(GRADIENT, 4).value
    assert proven == pytest.approx(2.10, abs=0.01)
    result = audit(GRADIENT, 4, 100_000, DELTA, 0.01, 0)
    assert 0.7 * 2.10 <= result.lower_bound <= proven
    assert 0.95 * MU <= result.mu_lower_bound <= MU


def test_no_noise_is_as_certain_as_the_runs_allow():
    """Nothing is random: 1,000 of 1,000 against 0 of 1,000."""
    result = audit(NoNoise(10, 5.563), 4, 1_000, DELTA, 0.01, 0, report_mu=False)
    missed = 0.005 ** (1 / 1_000)
    assert result.lower_bound == pytest.approx(math.log((missed - DELTA) / (1 - missed)))


def test_a_signal_that_drowns_gives_no_bound():
    """Fails with probability at most 0.01: at mu = 4e-6 every epsilon holds at delta 1e-3."""
    result = audit(NormalizedGradient(10, 1e6), 4, 2_000, DELTA, 0.01, 0)
    assert (result.lower_bound, result.mu_lower_bound) == (0.0, 0.0)


def test_a_run_of_any_length_is_split_into_two_requests_or_more(monkeypatch):
    """Without noise a run's ratio is known, and so are the rows and requests it was cut into."""
    mechanism = NoNoise(10, 5.563)
    row = public_rows(10)[:1]
    worlds = [mechanism.constrain_sensitivity(world[0], row)[0] for world in mechanism.worst_case()]
    apart = worlds[0] - worlds[1]
    for values, most in ((10, 1), (40, 4), (200, 20), (2**18, 26_214)):
        monkeypatch.setattr(audits, "VALUES_AT_ONCE", values)
        for queries in (1, 2, 7):
            rows = []

            def client(requests, public, rows=rows):
                rows.append([each.shape[1] for each in requests])
                return straight(mechanism, 0)(requests, public)

            ratios = audits._ratios(mechanism, client, queries, 50)
            each = apart @ worlds[0] * queries
            assert ratios == pytest.approx(np.array([[each], [-each]]).repeat(50, 1))
            assert sum(map(sum, rows)) == 2 * 50 * queries
            assert max(map(max, rows)) <= most
            assert min(map(len, rows)) >= min(queries, 2)


def test_a_request_that_is_one_release_has_one_row():
    rows = []

    def client(requests, public):
        rows.extend(each.shape[1] for each in requests)
        return straight(mechanism, 0)(requests, public)

    mechanism = dataclasses.replace(GRADIENT, normalise="batch")
    audits._ratios(mechanism, client, 3, 2)
    assert rows == [1] * 2 * 2 * 3


# --- the published formula ---


# --- votes and responses ---


def less_noise(mechanism, fraction=0.5):
    multiplier = fraction * mechanism.noise_multiplier
    return [dataclasses.replace(mechanism, noise_multiplier=multiplier)]


def more_epsilon(mechanism):
    return [dataclasses.replace(mechanism, epsilon_per_answer=epsilon) for epsilon in (1.3, 20.0)]


@pytest.mark.slow(seconds=5)
@every(
    ("claim", "queries", "least", "broken"),
    [
        *(
            (votes, queries, least, less_noise(votes))
            for votes, queries, least in (
                (NoisyVotes(10, 1.0, "laplace"), 1, 0.85),
                (NoisyVotes(10, 3.0, "laplace"), 4, 0.5),
                (NoisyVotes(10, 3.0, "laplace", noise_at="server", shards=Shards(3)), 4, 0.5),
                (NoisyVotes(10, 2.2, "gaussian"), 1, 0.5),
                (NoisyVotes(10, 3.9, "gaussian"), 4, 0.5),
                (NoisyVotes(2, 3.9, "gaussian", noise_at="server"), 4, 0.5),
                (NoisyMax(2, 2.0, "gumbel", Shards(3)), 4, 0.5),
            )
        ),
        # The class with the most votes reveals less than its proof, by the counts, allows.
        *(
            (label, 4, 0.2, less_noise(label, 0.1))
            for label in (NoisyMax(2, 3.0), NoisyMax(2, 3.9, "gaussian", Shards(3)))
        ),
        *(
            (response, 4, 0.6, more_epsilon(response))
            for response in (
                TopKRandomizedResponse(10, 0.65),
                TopKRandomizedResponse(10, 0.65, k=3),
                TopKRandomizedResponse(10, 0.65, threshold=0.1),
            )
        ),
        (TopKRandomizedResponse(10, 0.65, k=3, shards=Shards(3)), 4, 0.3, []),
    ],
)
def test_votes_and_responses_are_audited_closely_and_broken_ones_are_caught(
    claim, queries, least, broken
):
    """A correct implementation exceeds its proof, 1.8 to 2.5, with probability at most 0.001."""
    proven = proof(claim, queries).value
    result = audit(claim, queries, 20_000, DELTA, 0.001, 0, report_mu=False)
    assert least * proven < result.lower_bound < proven
    for client in broken:
        found = audit(client, queries, 20_000, DELTA, 0.001, 0, report_mu=False, claim=claim)
        assert found.lower_bound > proven


# --- responses ---


@every("k", [2, 3, 10])
@every("epsilon", [0.1, 1.0, 10.0])
def test_a_response_is_enumerated(k, epsilon):
    mechanism = TopKRandomizedResponse(10, epsilon, k)
    result = audit_by_enumeration(mechanism, 1)
    assert result.lower_bound == pytest.approx(epsilon, rel=1e-9)
    assert (result.method, result.failure_probability, result.delta) == ("enumeration", 0, 0)
    assert (result.runs, result.queries, result.mu_lower_bound) == (0, 1, None)
    about_proof, about_published = verdict(result, proof(mechanism, 1, 1e-12), epsilon, 0.0)
    assert about_proof.startswith("consistent")
    assert about_published.startswith("not refuted: the published epsilon")


def test_the_published_epsilon_of_a_run_of_responses_is_refuted_without_a_doubt():
    """Theorem 2 claims eps0 and no delta, whatever the number of responses: two refute it."""
    mechanism = TopKRandomizedResponse(10, 1.0, 3)
    result = audit_by_enumeration(mechanism, 2)
    assert result.lower_bound == pytest.approx(2)
    _, refuted, not_shown = verdict(result, proof(mechanism, 2), 1.0, 0.0)
    assert refuted.startswith(
        "refuted: the published epsilon 1 as a bound for randomised responses"
    )
    assert "failure probability 0)" in refuted
    assert not_shown.startswith("not shown")


class TwiceTheEpsilon(TopKRandomizedResponse):
    """A bug: the law of twice the epsilon, which the event ignores."""

    def constrain_sensitivity(self, sensitive_value, predictions):
        doubled = TopKRandomizedResponse(self.num_classes, 2 * self.epsilon_per_answer, self.k)
        return doubled.constrain_sensitivity(sensitive_value, predictions)


class NeverOutside(TopKRandomizedResponse):
    """A bug: a teacher whose class lies outside the set never names the student's favourite."""

    def constrain_sensitivity(self, sensitive_value, predictions):
        law = super().constrain_sensitivity(sensitive_value, predictions)
        law[sensitive_value[:, -1] == 1, 0] = 0
        return law


@every(
    ("broken", "bound"), [(TwiceTheEpsilon(10, 1.0, 3), 2.0), (NeverOutside(10, 1.0, 3), math.inf)]
)
def test_a_broken_response_exceeds_its_proof(broken, bound):
    result = audit_by_enumeration(broken, 1)
    assert result.lower_bound == pytest.approx(bound)
    (sentence,) = verdict(result, proof(broken, 1, 1e-12), math.inf, 0.0)
    assert sentence.startswith("contradicts the proven epsilon 1 ")


def test_a_threshold_is_enumerated_at_every_size():
    """The control makes sets of exactly five classes leak."""

    class LeaksAtFive(TopKRandomizedResponse):
        def constrain_sensitivity(self, sensitive_value, predictions):
            five = self.members(predictions).sum(1) == 5
            law = super().constrain_sensitivity(sensitive_value, predictions)
            return np.where(
                five[:, None],
                TwiceTheEpsilon(10, 1.0, 5).constrain_sensitivity(sensitive_value, predictions),
                law,
            )

    assert enumerate_response(TopKRandomizedResponse(10, 1.0, threshold=0.1)) == pytest.approx(1)
    assert enumerate_response(LeaksAtFive(10, 1.0, threshold=0.1)) == pytest.approx(2)


# --- what is said ---


def result(**fields):
    known = {
        "lower_bound": 1.99999,
        "mu_lower_bound": 0.7,
        "failure_probability": 0.01,
        "delta": 1e-3,
        "method": "sampling",
        "assumption": "the worst",
        "runs": 100_000,
        "queries": 4,
        "audited": "noise",
    }
    return Audit(**known | fields)


def test_an_audit_prints_with_its_meaning_and_rounds_down():
    assert str(result()) == (
        "epsilon at least 1.999 and mu at least 0.700 (record, replace_one, lower bound at delta "
        "0.001, failure probability 0.01, sampling of noise, 100,000 runs, queries 4, assuming "
        "that the worst)"
    )
    assert "mu" not in str(result(mu_lower_bound=None))


@every(
    ("claim", "refuted"),
    [
        ((1.9, 1e-3, 4), True),
        ((2.0, 1e-3, 4), False),
        ((1.9, 1e-5, 51_200), True),  # promises more
        ((1.9, 1e-2, 4), False),  # may fail more often
        ((1.9, 1e-3, 3), False),  # answers less
    ],
)
def test_only_a_claim_that_covers_the_audit_is_refuted(claim, refuted):
    assert result().refutes(*claim) is refuted


def test_a_verdict_distinguishes_a_weaker_promise_from_a_broken_one():
    """A removed client moves a sum half as far as a replaced record."""
    proven = proof(GRADIENT, 4)
    strong = result(lower_bound=3.0)
    leaving = dataclasses.replace(proven, unit="client", relation="add_remove")
    looser = dataclasses.replace(proven, delta=0.01)
    assert verdict(strong, proven, math.inf, DELTA)[0].startswith("contradicts")
    assert verdict(strong, leaving, math.inf, DELTA)[0].startswith("says nothing")
    assert verdict(strong, looser, math.inf, DELTA)[0].startswith("says nothing")
    assert verdict(result(), leaving, math.inf, DELTA)[0].startswith("consistent")
    sentences = verdict(result(), proven, 2.5, DELTA)
    assert sentences[1:] == [
        "mu is at least 0.700 (record, replace_one, failure probability 0.01)",
        "not refuted: the published epsilon 2.5, at queries 4 and delta 0.001; that does not prove "
        "it",
    ]


# --- bounds and edges ---


@every("hits", [0, 1, 7, 50, 99, 100])
@every("share", [0.05, 1e-3, 5e-7])
def test_clopper_pearson(hits, share):
    exact = binomtest(hits, 100).proportion_ci(1 - 2 * share, method="exact")
    assert rates.rate_at_least(hits, 100, share) == pytest.approx(exact.low, rel=1e-6, abs=1e-12)
    assert rates.rate_at_most(hits, 100, share) == pytest.approx(exact.high, rel=1e-6)
