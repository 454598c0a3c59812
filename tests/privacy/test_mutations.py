"""Mutations of the code, each with the check that finds it; the real code passes the same check.

A mutation is a programmer's mistake in the code that hospitals run; no other code knows of it. An
audit of the correct code contradicts its proof with probability at most FAILURE; seeds are fixed.

Planted faults are found by the parts of `fed-dpsd privacy audit`, with fewer runs and draws.
"""

import dataclasses
import functools
import hashlib
import itertools
import math

import pytest
import torch
from dp_accounting import GaussianDpEvent

from fed_dpsd.audits import attacks, canaries, draws, victims
from fed_dpsd.audits.black_box import Proof, audit
from fed_dpsd.audits.canaries import (
    guess_counts,
    guess_steps,
    of_weights,
    steps_advantage,
)
from fed_dpsd.audits.one_run import conclude
from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.gdp import gaussian_mu
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.votes import NoisyVotes
from tests.every import every
from tests.privacy import planted

FAILURE, DELTA, QUERIES = 1e-3, 1e-3, 4
RUNS, TRAININGS = 2_000, 80
GRADIENT = NormalizedGradient(10, 5.56)  # all prove an epsilon of about 2.1 in four answers
VOTES = NoisyVotes(10, 3.93)
LAPLACE = NoisyVotes(10, 3.49, "laplace")
LABEL = TopKRandomizedResponse(10, 0.7)
WHOLE = DPSGD(2.0, 1.0, 2, 1.0, 0.02, count_fraction=1.0)
PATIENTS = dataclasses.replace(WHOLE, unit="patient", records_per_patient=3)


@pytest.fixture(autouse=True)
def _one_thread():
    """Like a client; with such small layers, more threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def advantage(claim):
    return steps_advantage(claim)


@functools.cache
def proof(mechanism):
    return prove([Stage(mechanism, QUERIES, 1)], DELTA, "record", "replace_one")


@pytest.fixture(autouse=True, scope="module")
def _claims():
    """What is proven by the real code, before any mutation, since each proof takes long."""
    for mechanism in (GRADIENT, VOTES, LAPLACE, LABEL):
        proof(mechanism)
    for mechanism in (WHOLE, PATIENTS):
        advantage(uncounted(mechanism))


def uncounted(mechanism):
    return dataclasses.replace(mechanism, count_fraction=None)


def secrets():
    for number in itertools.count():
        yield SecretStreams(hashlib.sha256(f"mutations {number}".encode()).digest())


# --- checks: whether they find a fault ---


def answers(mechanism, runs=RUNS):
    """An audit of released answers, as in `fed-dpsd privacy audit`, with fewer runs."""

    def found(config):
        client = victims.make_client(config, mechanism, secrets(), seeded=False)
        event = mechanism.event("record", "replace_one")
        mu = gaussian_mu(event) and gaussian_mu(event) * QUERIES**0.5
        result = audit(mechanism, client, QUERIES, runs, DELTA, FAILURE, mu is not None)
        return bool(Proof(proof(mechanism), mu).contradicted(result))

    return found


def contradicts(guesses, event, most=None):
    result = conclude(guesses, 1e-5, FAILURE, 0, "", "")
    return result.mu_lower_bound > (gaussian_mu(event) or math.inf) or (
        most is not None and result.advantage_lower_bound > most
    )


def steps(mechanism):
    """An audit of the noisy sums of training."""

    def found(config):
        claim = uncounted(mechanism)
        guesses, _ = guess_steps(claim, claim, of_weights(50, 2), secrets(), TRAININGS)
        return contradicts(guesses, claim.event(claim.unit, "add_remove"), advantage(claim))

    return found


def counts(mechanism):
    """An audit of the class counts."""

    def found(config):
        guesses = guess_counts(mechanism, 500, secrets(), 100)
        return contradicts(guesses, GaussianDpEvent(mechanism.count_noise))

    return found


OF_ANSWERS = [
    (planted.truthful, answers(LABEL)),
    (planted.lies_half_as_often, answers(LABEL, 5_000)),
    (planted.one_key, answers(GRADIENT)),
    (planted.asks_share_noise, answers(GRADIENT)),
    (planted.rows_share_noise, answers(GRADIENT)),
    (planted.rows_share_a_draw, answers(LABEL, 5_000)),
    (planted.unnoised(slice(2, None)), answers(GRADIENT)),
    (planted.unnoised(slice(2, None)), answers(LAPLACE)),
    (planted.unnoised(slice(9, None)), answers(GRADIENT, 5_000)),
    (planted.half_scale, answers(GRADIENT)),
    (planted.half_scale, answers(VOTES)),
    (planted.rounded_to_zero, answers(GRADIENT)),
    (planted.rounded_to_zero, answers(LAPLACE)),
    (planted.laplace_of_half_the_units, answers(LAPLACE, 10_000)),
    (planted.not_normalised, answers(GRADIENT)),
    (planted.counted_twice, answers(VOTES)),
    (planted.sensitivity_of_an_added_vote, answers(VOTES, 5_000)),
    (planted.sends_what_it_encoded, answers(GRADIENT)),
]
OF_TRAININGS = [
    (planted.half_scale, steps(WHOLE)),
    (planted.half_scale, counts(WHOLE)),
    (planted.clipped_to_twice_the_bound, steps(WHOLE)),
    (planted.records_clipped_alone, steps(PATIENTS)),
    (planted.every_record_counted, counts(PATIENTS)),
]
CHECKS = {
    "answers": [*map(answers, (LABEL, GRADIENT, VOTES, LAPLACE))],
    "trainings": [steps(WHOLE), counts(WHOLE), steps(PATIENTS), counts(PATIENTS)],
}
MUTATIONS = {"answers": OF_ANSWERS, "trainings": OF_TRAININGS}
CHECKED = pytest.mark.parametrize("kind", CHECKS)


@pytest.mark.slow
@CHECKED
def test_no_check_finds_anything_in_the_code_as_it_is(kind, small):
    """Fails with probability at most FAILURE for each audit."""

    @every("check", CHECKS[kind])
    def of_row(check):
        assert not check(small().config)

    of_row()


@pytest.mark.slow
@CHECKED
def test_a_mutation_is_found(kind, small, monkeypatch):
    """Most are so far off that seeds hardly matter; `sensitivity...` is missed once in 100."""

    @every(("mutate", "check"), MUTATIONS[kind])
    def of_row(mutate, check, monkeypatch):
        mutate(monkeypatch)
        assert check(small().config)

    of_row(monkeypatch=monkeypatch)


# --- planted faults, and the parts of the audit that must find each ---

LINEAR = ("training=dp_sgd", "model=scattering")
SAMPLED_STEPS = (*LINEAR, "training.sample_rate=0.1")
NETWORK = ("training=dp_sgd", "training.sample_rate=0.1")


def on_answers(experiment):
    return attacks.answer_attacks(experiment, None, print)


def on_sums(experiment):
    return [attacks._attack_sums(experiment, experiment.answers, None, print)]


def on_trainings(experiment):
    return attacks.training_attacks(experiment, None, print)


def on_clipping(experiment):
    """The part of `on_trainings` that clipping takes."""
    own = uncounted(experiment.training)
    return attacks._attack_clipping(experiment, own, None, secrets(), print)


def on_samples(experiment):
    return attacks.check_sampling(experiment, print)


def on_draws(experiment):
    return draws.check_answers(experiment, None, print)


def on_steps(experiment):
    return [draws.check_steps(experiment, print)]


PLAIN = ("training=plain",)
GRADIENTS = (*PLAIN, "answers=gradient")
VOTED = (*PLAIN, "answers=votes", "answers.noise_law=laplace")
RESPONSES = (*PLAIN, "answers=label")
CANDIDATES = (*RESPONSES, "answers.k=3")
BATCH = (*GRADIENTS, "answers.normalise=batch")
SHARES = (*GRADIENTS, "answers.noise_at=distributed", "num_clients=4")
SHARES += ("answers.quorum={threshold: 3, colluding: 1}",)
SUMS = (*PLAIN, "method=dpdfd", "num_clients=1", "answers=gradient_sum")
STATISTICS = (*PLAIN, "method=class_statistics", "answers=class_statistics", "model=scattering")
STATISTICS += ("rounds=1", "diagnostics=false")
STATISTICS_OF_COPIES = (*STATISTICS, "answers.copies=3")
STATISTICS_OF_PATIENTS = (*STATISTICS, "answers.unit=patient", "answers.records_per_patient=3")
STATISTICS_OF_PATIENTS += ("data.records_per_patient=3",)
STEPS_OF_SUMS = (*PLAIN, "method=dp_fedsgd", "answers=clipped_gradients", "model=scattering")
STEPS_OF_SUMS += ("diagnostics=false",)
GUMBEL = (*PLAIN, "answers=noisy_max", "answers.noise_law=gumbel", "teachers_per_client=5")
LAPLACE_MAX = (*PLAIN, "answers=noisy_max", "teachers_per_client=5")
PLANTED = [  # with settings of the audit, and its part
    (planted.noise_without_the_secret, GRADIENTS, on_draws),
    (planted.site_noise_from_the_seed, GRADIENTS, on_draws),
    (planted.noise_without_the_secret, RESPONSES, on_draws),
    (planted.noise_without_the_secret, LINEAR, on_steps),
    (planted.clients_share_noise, GRADIENTS, on_draws),
    (planted.clients_share_noise, RESPONSES, on_draws),
    (planted.asks_share_noise, LINEAR, on_steps),
    (planted.clients_share_noise, SHARES, on_draws),
    *((planted.noise_of_a_query_used_again, each, on_draws) for each in (GRADIENTS, VOTED, BATCH)),
    (planted.noise_of_a_query_used_with_the_other_sign, GRADIENTS, on_draws),
    (planted.noise_of_a_query_used_again_for_the_next_classes, GRADIENTS, on_draws),
    (planted.classes_share_noise, VOTED, on_draws),
    (planted.rows_share_noise, BATCH, on_draws),
    (planted.draws_of_a_response_used_again, CANDIDATES, on_draws),
    (planted.draws_of_a_label_used_again, GUMBEL, on_draws),
    (planted.teachers_share_a_draw, (*RESPONSES, "teachers_per_client=3"), on_draws),
    (planted.gumbel_of_root_of_half_the_scale, GUMBEL, on_draws),
    (planted.root_of_half_the_scale, LAPLACE_MAX, on_draws),
    (planted.responses_among_two_classes, RESPONSES, on_draws),
    *(
        (planted.noise_of_a_request_used_again, each, on_draws)
        for each in (GRADIENTS, SUMS, CANDIDATES, GUMBEL)
    ),
    (planted.rows_far_down_have_no_noise, GRADIENTS, on_draws),
    *((planted.noise_of_a_step_used_again(steps), LINEAR, on_steps) for steps in (3, 20)),
    (planted.noise_of_a_step_used_again(3), NETWORK, on_steps),
    (planted.class_counts_share_noise, LINEAR, on_steps),
    (planted.same_noise_in_every_step, SAMPLED_STEPS, on_steps),
    *(
        (planted.requests_are_counted_instead_of_queries, each, on_draws)
        for each in (GRADIENTS, VOTED, RESPONSES, LAPLACE_MAX)
    ),
    (planted.images_of_a_sum_are_counted, SUMS, on_draws),
    (planted.repeated_requests_are_charged_again, GRADIENTS, on_draws),
    (planted.nothing_is_charged, GRADIENTS, on_draws),
    (planted.ledgers_charge_nothing, GRADIENTS, on_draws),
    (planted.fresh_noise_for_a_repeated_request, GRADIENTS, on_draws),
    (planted.rows_unnormalised_where_the_student_is_sure, GRADIENTS, on_answers),
    (planted.half_the_noise_in_answers, GRADIENTS, on_answers),
    (planted.root_of_half_the_scale, GRADIENTS, on_answers),
    (planted.sensitivity_of_a_removed_teacher, GRADIENTS, on_answers),
    (planted.share_of_one_client_is_missing, SHARES, on_answers),
    (planted.shares_of_one_honest_client_too_many, SHARES, on_answers),
    (planted.features_keep_their_length, STATISTICS, on_sums),
    (planted.copies_are_added, STATISTICS_OF_COPIES, on_sums),
    (planted.copies_are_added, STATISTICS_OF_PATIENTS, on_sums),
    (planted.half_the_noise_in_sums, STATISTICS, on_sums),
    (planted.gradients_keep_their_length, STEPS_OF_SUMS, on_sums),
    (planted.batches_of_fixed_size, SAMPLED_STEPS, on_samples),
    (planted.rate_ignored, SAMPLED_STEPS, on_samples),
    (planted.twice_the_rate, SAMPLED_STEPS, on_samples),
    (planted.cyclic_sampler, SAMPLED_STEPS, on_samples),
    *((planted.sample_used_again(steps), SAMPLED_STEPS, on_samples) for steps in (3, 100)),
    (planted.clipping_error_on_one_class, SAMPLED_STEPS, on_clipping),
    (planted.clipping_error_on_the_bias, SAMPLED_STEPS, on_clipping),
    (planted.biases_have_no_noise, SAMPLED_STEPS, on_clipping),
    (planted.clipping_error_on_the_biases_of_a_network, NETWORK, on_clipping),
    (planted.clipping_error_per_layer, NETWORK, on_clipping),
    (planted.half_the_noise_in_steps, SAMPLED_STEPS, on_trainings),
]
# `on_trainings` and the test on networks include `on_clipping`.
RIGHT = [each for each in dict.fromkeys(case[1:] for case in PLANTED) if each[1] != on_clipping]


@pytest.fixture
def quick(monkeypatch):
    """Fewer runs and draws than in an audit, enough for faults this large."""
    monkeypatch.setattr(attacks, "CLOSE_RUNS", 5_000)
    monkeypatch.setattr(attacks, "CLAIM_RUNS", 20)
    monkeypatch.setattr(attacks, "SUM_RUNS", 500)
    monkeypatch.setattr(attacks, "RUNS", (60, 60))
    monkeypatch.setattr(attacks, "CLIPPED_RUNS", {"weights": 300, "bias": 400, "network": 150})
    monkeypatch.setattr(attacks, "SAMPLED_STEPS", 400)
    monkeypatch.setattr(attacks, "ANSWER_RUNS", (20, 20))
    monkeypatch.setattr(attacks, "OWN_RUNS", (2, 2))
    monkeypatch.setattr(attacks, "COUNTED_RUNS", 50)
    monkeypatch.setattr(canaries, "PILOT", 30)
    monkeypatch.setattr(victims, "PILOT", 5)


PARTS = {
    "draws": (on_draws, on_steps),
    "answers": (on_answers,),
    "trainings": (on_trainings, on_clipping),  # minutes of training; `OF_TRAININGS` are fast
    "samples": (on_samples,),
    "sums": (on_sums,),
}
SLOW = {"draws": 30, "trainings": 25, "sums": 30}
KINDS = pytest.mark.parametrize(
    "parts",
    [
        pytest.param(p, id=name, marks=pytest.mark.slow(seconds=SLOW[name]) if name in SLOW else ())
        for name, p in PARTS.items()
    ],
)


@pytest.fixture
def unnoised(quick, monkeypatch):
    """Samples without the faint noise of their check, which takes four fifths of its time."""
    exact = DPSGD._noisy

    def faint(self, total, size, rng):
        if self.noise_multiplier > canaries.FAINT:
            return exact(self, total, size, rng)
        return total.float() * self.max_grad_norm

    monkeypatch.setattr(DPSGD, "_noisy", faint)


@pytest.mark.slow
@KINDS
@pytest.mark.usefixtures("unnoised")
def test_no_part_of_the_audit_finds_anything_in_the_code_as_it_is(parts, small):
    """Fails with probability at most 0.001 in total; each part takes seconds for its counts."""

    @every(("settings", "part"), [case for case in RIGHT if case[-1] in parts])
    def of_row(settings, part):
        assert not [str(found) for found in part(small(*settings)) if found.contradicts]

    of_row()


@pytest.mark.slow(seconds=60)
def test_no_attack_on_networks_finds_anything_in_the_code_as_it_is(small, quick):
    assert not [str(found) for found in on_trainings(small(*NETWORK)) if found.contradicts]


@pytest.mark.slow(seconds=4)
@KINDS
@pytest.mark.usefixtures("unnoised")
def test_a_planted_fault_is_found(parts, small, monkeypatch):
    """The audit ends with exit code 3 if any part contradicts; this part must contradict."""

    @every(("mutate", "settings", "part"), [case for case in PLANTED if case[-1] in parts])
    def of_row(mutate, settings, part, monkeypatch):
        mutate(monkeypatch)
        assert any(found.contradicts for found in part(small(*settings)))

    of_row(monkeypatch=monkeypatch)
