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
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent

from fed_dpsd.accounts.account import Account
from fed_dpsd.accounts.ledger import FileLedger, MemoryLedger
from fed_dpsd.audits import attacks, canaries, protocol, sampling, victims
from fed_dpsd.audits.black_box import Proof, audit
from fed_dpsd.audits.canaries import (
    guess_counts,
    guess_steps,
    of_weights,
    steps_advantage,
)
from fed_dpsd.audits.one_run import conclude
from fed_dpsd.client.site import Site
from fed_dpsd.errors import ProtocolError
from fed_dpsd.methods.dp_fedsgd import DPFedSGD
from fed_dpsd.methods.fedavg import FedAVG
from fed_dpsd.privacy import lattice
from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.gdp import gaussian_mu
from fed_dpsd.privacy.noise import SecretStreams, SecureGenerator, lattice_spacing
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.votes import NoisyVotes
from fed_dpsd.protocol import Response
from fed_dpsd.streams import Streams
from tests.every import every
from tests.privacy.per_record import clip_records_alone

FAILURE, DELTA, QUERIES = 1e-3, 1e-3, 4
RUNS, TRAININGS = 5_000, 80
GRADIENT = NormalizedGradient(10, 5.56)  # all prove an epsilon of about 2.1 in four answers
VOTES = NoisyVotes(10, 3.93)
LAPLACE = NoisyVotes(10, 3.49, "laplace")
LABEL = TopKRandomizedResponse(10, 0.7)
WHOLE = DPSGD(4.4, 1.0, 10, 1.0, 0.02, count_fraction=1.0)
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


def answers(mechanism):
    """An audit of released answers, as in `fed-dpsd privacy audit`, with fewer runs."""

    def found(config):
        client = victims.make_client(config, mechanism, secrets(), seeded=False)
        event = mechanism.event("record", "replace_one")
        mu = gaussian_mu(event) and gaussian_mu(event) * QUERIES**0.5
        result = audit(mechanism, client, QUERIES, RUNS, DELTA, FAILURE, mu is not None)
        return bool(Proof(proof(mechanism), mu).contradicted(result))

    return found


def contradicts(guesses, event, most=None):
    result = conclude(guesses, 1e-5, FAILURE, 0, "", "")
    return result.mu_lower_bound > (gaussian_mu(event) or np.inf) or (
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


# --- mutations ---


def truthful(patch):
    def add_noise(self, value, predictions, rng):
        return np.eye(self.num_classes)[value.argmax(-1)].sum(0).astype(np.uint8)

    patch.setattr(TopKRandomizedResponse, "add_noise", add_noise)


def lies_half_as_often(patch):
    encode = TopKRandomizedResponse.constrain_sensitivity
    patch.setattr(
        TopKRandomizedResponse,
        "constrain_sensitivity",
        lambda self, *rest: encode(dataclasses.replace(self, epsilon_per_answer=1.4), *rest),
    )


def follow_keys_alone(patch):
    """Let noise depend on its key but not on the values it is added to."""

    def noisy_sum(self, values, scale, law):
        spacing = lattice_spacing(scale)
        drawn = self._gaussian if law == "gaussian" else self._laplace
        sensitive = np.trunc(np.asarray(values, np.float64) / spacing).sum(axis=0)
        noise = drawn(math.ceil(scale / spacing), sensitive.size).reshape(sensitive.shape)
        return (sensitive + noise) * spacing

    patch.setattr(SecureGenerator, "noisy_sum", noisy_sum)


def one_key(patch):
    follow_keys_alone(patch)
    patch.setattr(SecretStreams, "numpy", lambda *_: SecureGenerator(bytes(32)))


def asks_share_noise(patch):
    follow_keys_alone(patch)
    numpy = SecretStreams.numpy
    patch.setattr(
        SecretStreams, "numpy", lambda self, purpose, client=0, query_id=0: numpy(self, purpose)
    )


def rows_share_noise(patch):
    noisy_sum = SecureGenerator.noisy_sum

    def one_row(self, values, scale, law):
        return values.sum(0) + noisy_sum(self, np.zeros_like(values[:, :1]), scale, law)

    patch.setattr(SecureGenerator, "noisy_sum", one_row)


def responses_draw(patch, random):
    """Responses draw `random(rng, shape)`; the generator is unchanged."""
    noise = TopKRandomizedResponse.add_noise

    def add_noise(self, value, predictions, rng):
        changed = SimpleNamespace(random=lambda shape: random(rng, shape))
        return noise(self, value, predictions, changed)

    patch.setattr(TopKRandomizedResponse, "add_noise", add_noise)


def rows_share_a_draw(patch):
    def random(rng, shape):
        return np.broadcast_to(rng.random((shape[0], 1, 1)), shape)

    responses_draw(patch, random)


def unnoised(classes):
    """Omit the noise on some classes."""

    def mutate(patch):
        noisy_sum = SecureGenerator.noisy_sum

        def some(self, values, *rest):
            noisy = noisy_sum(self, values, *rest)
            noisy[..., classes] = values.sum(0)[..., classes]
            return noisy

        patch.setattr(SecureGenerator, "noisy_sum", some)

    mutate.__name__ = f"unnoised_from_{classes.start}"
    return mutate


def half_scale(patch):
    noisy_sum = SecureGenerator.noisy_sum
    patch.setattr(
        SecureGenerator,
        "noisy_sum",
        lambda self, values, scale, law: noisy_sum(self, values, scale / 2, law),
    )


def rounded_to_zero(patch):
    for law in ("_gaussian", "_laplace"):
        patch.setattr(SecureGenerator, law, lambda self, units, count: np.zeros(count, np.int64))


def laplace_of_half_the_units(patch):
    laplace = SecureGenerator._laplace
    patch.setattr(SecureGenerator, "_laplace", lambda self, u, n: laplace(self, u // 2, n))


def not_normalised(patch):
    patch.setattr(
        NormalizedGradient, "constrain_sensitivity", lambda self, value, _: self.bound * value
    )


def counted_twice(patch):
    encode = NoisyVotes.constrain_sensitivity
    patch.setattr(NoisyVotes, "constrain_sensitivity", lambda *arguments: 2 * encode(*arguments))


def sensitivity_of_an_added_vote(patch):
    patch.setattr(NoisyVotes, "event", lambda self, *_: GaussianDpEvent(self.noise_multiplier))


def encoded(mechanism, value, request):
    return np.stack([mechanism.constrain_sensitivity(each, request.predictions) for each in value])


def sends_what_it_encoded(patch):
    release = Site.release

    def unnoised(self, mechanism, value, request):
        response = release(self, mechanism, value, request)
        values = encoded(mechanism, value, request).sum(0)
        return Response(response.query_id, values, response.teachers)

    patch.setattr(Site, "release", unnoised)


def rate_ignored(patch):
    patch.setattr(DPSGD, "_sample", lambda self, count, rng: torch.arange(count))


def clipped_to_twice_the_bound(patch):
    patch.setattr(lattice, "ROOM", 2.0)


def half_the_noise_in_steps(patch):
    noisy = DPSGD._noisy

    def half(self, total, *rest):
        return (total * self.max_grad_norm + noisy(self, total, *rest)).float() / 2

    patch.setattr(DPSGD, "_noisy", half)


def records_clipped_alone(patch):
    """Clip each to the bound: the noise is too small by a factor of a patient's records."""
    clip_records_alone(patch, lambda norms: 1 / norms)


def every_record_counted(patch):
    count = DPSGD.count

    def of_records(self, labels, num_classes, rng):
        one = dataclasses.replace(self, unit="record", records_per_patient=1)
        return count(one, labels.ravel(), num_classes, rng)

    patch.setattr(DPSGD, "count", of_records)


OF_ANSWERS = [
    (truthful, answers(LABEL)),
    (lies_half_as_often, answers(LABEL)),
    (one_key, answers(GRADIENT)),
    (asks_share_noise, answers(GRADIENT)),
    (rows_share_noise, answers(GRADIENT)),
    (rows_share_a_draw, answers(LABEL)),
    (unnoised(slice(2, None)), answers(GRADIENT)),
    (unnoised(slice(2, None)), answers(LAPLACE)),
    (unnoised(slice(9, None)), answers(GRADIENT)),
    (half_scale, answers(GRADIENT)),
    (half_scale, answers(VOTES)),
    (rounded_to_zero, answers(GRADIENT)),
    (rounded_to_zero, answers(LAPLACE)),
    (laplace_of_half_the_units, answers(LAPLACE)),
    (not_normalised, answers(GRADIENT)),
    (counted_twice, answers(VOTES)),
    (sensitivity_of_an_added_vote, answers(VOTES)),
    (sends_what_it_encoded, answers(GRADIENT)),
]
OF_TRAININGS = [
    (half_scale, steps(WHOLE)),
    (half_scale, counts(WHOLE)),
    (clipped_to_twice_the_bound, steps(WHOLE)),
    (records_clipped_alone, steps(PATIENTS)),
    (every_record_counted, counts(PATIENTS)),
]
CHECKS = {
    "answers": [*map(answers, (LABEL, GRADIENT, VOTES, LAPLACE))],
    "trainings": [steps(WHOLE), counts(WHOLE), steps(PATIENTS), counts(PATIENTS)],
}
MUTATIONS = {"answers": OF_ANSWERS, "trainings": OF_TRAININGS}
CHECKED = pytest.mark.parametrize("kind", CHECKS)


@CHECKED
def test_no_check_finds_anything_in_the_code_as_it_is(kind, small):
    """Fails with probability at most FAILURE for each audit."""

    @every("check", CHECKS[kind])
    def of_row(check):
        assert not check(small().config)

    of_row()


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


def noise_without_the_secret(patch):
    """Streams depend only on purpose, client and request, which are all public."""

    def numpy(self, purpose, client=0, query_id=0):
        return SecureGenerator(hashlib.sha256(f"{purpose} {client} {query_id}".encode()).digest())

    patch.setattr(SecretStreams, "numpy", numpy)


def site_noise_from_the_seed(patch):
    """A site draws from its configuration's seed, though it has a secret."""
    init = Site.__init__

    def forgetful(self, *arguments, **named):
        init(self, *arguments, **named)
        self._noise = Streams(self.config.seed)

    patch.setattr(Site, "__init__", forgetful)


def rows_unnormalised_where_the_student_is_sure(patch):
    encode = NormalizedGradient.constrain_sensitivity

    def sure(self, value, predictions):
        rows = predictions.max(axis=1, keepdims=True) > 0.9
        return np.where(rows, value, encode(self, value, predictions))

    patch.setattr(NormalizedGradient, "constrain_sensitivity", sure)


def noise_cut_at_4_sigma(patch):
    draw = SecureGenerator._gaussian
    patch.setattr(
        SecureGenerator,
        "_gaussian",
        lambda self, units, count: np.clip(draw(self, units, count), -4 * units, 4 * units),
    )


def noise_of_steps_cut_at_4_sigma(patch):
    noisy = DPSGD._noisy

    def cut(self, total, *rest):
        most = 4 * self.noise_multiplier * self.max_grad_norm
        return noisy(self, total, *rest).clamp(-most, most)

    patch.setattr(DPSGD, "_noisy", cut)


def uniform_draws_of_8_bits(patch):
    random = SecureGenerator.random
    patch.setattr(SecureGenerator, "random", lambda *a: np.floor(random(*a) * 256) / 256)


def responses_from_draws_of_8_bits(patch):
    """The generator is unchanged: only responses use a part of its draws."""
    responses_draw(patch, lambda rng, shape: np.floor(rng.random(shape) * 256) / 256)


def hidden(bits):
    """Put `bits` of the exact sum's steps into the low byte of the noisy sum's."""

    def mutate(patch):
        noisy_sum = SecureGenerator.noisy_sum

        def leaky(self, values, scale, law):
            spacing = lattice_spacing(scale)
            own = np.trunc(values / spacing).sum(0).astype(np.int64)
            steps = (noisy_sum(self, values, scale, law) / spacing).astype(np.int64)
            return (steps & ~0xFF | bits(own)) * spacing

        patch.setattr(SecureGenerator, "noisy_sum", leaky)

    return mutate


def value_in_the_low_bits_of_the_noise(patch):
    hidden(lambda own: own & 0xFF)(patch)


def sign_in_the_low_bits_of_the_noise(patch):
    hidden(lambda own: own > 0)(patch)


def same_noise_in_every_step(patch):
    noisy, drawn = DPSGD._noisy, {}

    def same(self, total, size, rng):
        key = (id(rng), total.shape)
        if key not in drawn:  # the generator is kept so no other gets its id
            drawn[key] = noisy(self, torch.zeros_like(total), size, rng), rng
        return (total * self.max_grad_norm).float() + drawn[key][0]

    patch.setattr(DPSGD, "_noisy", same)


def batches_of_fixed_size(patch):
    def sample(self, count, rng):
        return torch.from_numpy(np.argsort(rng.random(count))[: round(self.sample_rate * count)])

    patch.setattr(DPSGD, "_sample", sample)


def cyclic_sampler(patch):
    """The true epsilon is 7.51, and 2.383 is claimed."""
    steps = {}

    def sample(self, count, rng):
        number, _ = steps.get(id(rng), (0, rng))
        steps[id(rng)] = number + 1, rng
        period = round(1 / self.sample_rate)
        return torch.arange(count)[number % period :: period]

    patch.setattr(DPSGD, "_sample", sample)


def fresh_noise_for_a_repeated_request(patch):
    """Uncharged, as the request is paid for."""
    release, seen = Site.release, set()

    def fresh(self, mechanism, value, request):
        response = release(self, mechanism, value, request)
        if request.digest in seen:
            bounded = encoded(mechanism, value, request)
            rng = SecureGenerator(hashlib.sha256(str(len(seen)).encode()).digest())
            values = mechanism.add_noise(bounded, request.predictions, rng)
            response = Response(response.query_id, values, response.teachers)
        seen.add(request.digest)
        return response

    patch.setattr(Site, "release", fresh)


def nothing_is_charged(patch):
    patch.setattr(Account, "pay", lambda *_, **__: None)


def ledgers_charge_nothing(patch):
    for ledger in (MemoryLedger, FileLedger):
        patch.setattr(ledger, "charge", lambda self, entry: None)


def clipping_error_on_one_class(patch):
    """Gradients of class 7 count twice."""
    linear_sum = lattice.linear_sum

    def of_class(layer, records, bound):
        extra = records.take(torch.nonzero(records.labels == 7)[:, 0])
        sums = linear_sum(layer, records, bound)
        more = linear_sum(layer, extra, bound)
        return tuple(one + another for one, another in zip(sums, more, strict=True))

    patch.setattr(lattice, "linear_sum", of_class)


def clipping_error_on_the_bias(patch):
    """A linear layer's norms omit the bias: inner products lose its 1."""
    linear_sum = lattice.linear_sum

    def without(layer, records, bound):
        inner = records.inner - lattice._INPUT**-2
        return linear_sum(layer, lattice.Records(records.inputs, inner, records.labels), bound)

    patch.setattr(lattice, "linear_sum", without)


def clipping_error_on_the_biases_of_a_network(patch):
    """A network's norms omit the biases."""
    clipped = lattice.clip

    def without(gradients, bound):
        *parts, _ = gradients
        weights = [part.flatten(1) for part in parts if part.ndim > 2]
        norm = torch.linalg.vector_norm(torch.cat(weights, dim=1).double(), dim=1)
        return clipped([*parts, norm], bound)

    patch.setattr(lattice, "clip", without)


def clipping_error_per_layer(patch):
    """Each parameter is clipped to the bound by itself."""
    clipped = lattice.clip

    def alone(gradients, bound):
        *parts, _ = gradients
        norms = [torch.linalg.vector_norm(part.flatten(1).double(), dim=1) for part in parts]
        return [clipped([p, norm], bound)[0] for p, norm in zip(parts, norms, strict=True)]

    patch.setattr(lattice, "clip", alone)


def half_the_noise_in_answers(patch):
    noise = NormalizedGradient.add_noise

    def half(self, value, *rest):
        return (value.sum(0) + noise(self, value, *rest)) / 2

    patch.setattr(NormalizedGradient, "add_noise", half)


def gradients_leave_without_a_release(patch):
    def client(self, request, site):
        return Response(request.query_id, site.sensitive_gradients(request)[0])

    patch.setattr(DPFedSGD, "client", client)
    patch.setattr(Site, "admit", lambda self, request: None)


def weights_leave_without_a_release(patch):
    def client(self, request, site):
        if request.kind != "weights":
            raise ProtocolError("no weights")
        return Response(request.query_id, site.sensitive_weights()[0])

    patch.setattr(FedAVG, "client", client)
    patch.setattr(Site, "admit", lambda self, request: None)


def on_answers(experiment):
    return attacks.answer_attacks(experiment, None, print)


def on_trainings(experiment):
    return attacks.training_attacks(experiment, None, print)


def on_clipping(experiment):
    """The part of `on_trainings` that clipping takes."""
    own = uncounted(experiment.training)
    return attacks._attack_clipping(experiment, own, None, secrets(), print)


def on_samples(experiment):
    return [attacks.check_sampling(experiment, print)]


def on_sampler(experiment):
    return sampling.sampler_tests(experiment, None, print)


def on_sampler_too(experiment):
    """The same in settings whose noise others have too."""
    return on_sampler(experiment)


def on_protocol(experiment):
    return protocol.protocol_tests(experiment, print)


PLAIN_GRADIENT = ("training=plain", "answers=gradient")
FEDAVG = ("method=fedavg", *PLAIN_GRADIENT)
SUMS = ("method=dp_fedsgd", "answers=clipped_gradients", "model=scattering", "diagnostics=false")
PLANTED = [  # with settings of the audit, and its part
    (noise_without_the_secret, PLAIN_GRADIENT, on_sampler),
    (site_noise_from_the_seed, PLAIN_GRADIENT, on_sampler),
    (rows_unnormalised_where_the_student_is_sure, PLAIN_GRADIENT, on_answers),
    (noise_cut_at_4_sigma, PLAIN_GRADIENT, on_sampler),
    (noise_of_steps_cut_at_4_sigma, LINEAR, on_sampler_too),
    (uniform_draws_of_8_bits, ("training=plain", "answers=label"), on_sampler),
    (responses_from_draws_of_8_bits, ("training=plain", "answers=label"), on_sampler),
    (value_in_the_low_bits_of_the_noise, PLAIN_GRADIENT, on_sampler),
    (sign_in_the_low_bits_of_the_noise, ("training=plain", "answers=votes"), on_sampler),
    (same_noise_in_every_step, SAMPLED_STEPS, on_sampler),
    (batches_of_fixed_size, SAMPLED_STEPS, on_samples),
    (rate_ignored, SAMPLED_STEPS, on_samples),
    (cyclic_sampler, SAMPLED_STEPS, on_samples),
    (fresh_noise_for_a_repeated_request, PLAIN_GRADIENT, on_protocol),
    (nothing_is_charged, PLAIN_GRADIENT, on_protocol),
    (ledgers_charge_nothing, LINEAR, on_protocol),
    (gradients_leave_without_a_release, SUMS, on_protocol),
    (weights_leave_without_a_release, FEDAVG, on_protocol),
    (clipping_error_on_one_class, SAMPLED_STEPS, on_clipping),
    (clipping_error_on_the_bias, SAMPLED_STEPS, on_clipping),
    (clipping_error_on_the_biases_of_a_network, NETWORK, on_clipping),
    (clipping_error_per_layer, NETWORK, on_clipping),
    (half_the_noise_in_answers, PLAIN_GRADIENT, on_answers),
    (half_the_noise_in_steps, SAMPLED_STEPS, on_trainings),
]
RIGHT = [
    *((settings, on_sampler) for settings in (PLAIN_GRADIENT, LINEAR)),
    (("training=plain", "answers=label"), on_sampler),
    (("training=plain", "answers=votes"), on_sampler_too),
    *((settings, on_protocol) for settings in (PLAIN_GRADIENT, LINEAR, SUMS, FEDAVG)),
    *((SAMPLED_STEPS, part) for part in (on_samples, on_trainings)),
    (PLAIN_GRADIENT, on_answers),
]


@pytest.fixture
def quick(monkeypatch):
    """Fewer runs and draws than in an audit, enough for faults this large."""
    monkeypatch.setattr(attacks, "CLOSE_RUNS", 5_000)
    monkeypatch.setattr(attacks, "CLAIM_RUNS", 20)
    monkeypatch.setattr(attacks, "RUNS", (60, 60))
    monkeypatch.setattr(attacks, "CLIPPED_RUNS", {"weights": 300, "bias": 400, "network": 150})
    monkeypatch.setattr(attacks, "SAMPLED_STEPS", 400)
    monkeypatch.setattr(attacks, "ANSWER_RUNS", (20, 20))
    monkeypatch.setattr(attacks, "OWN_RUNS", (2, 2))
    monkeypatch.setattr(attacks, "COUNTED_RUNS", 50)
    monkeypatch.setattr(canaries, "PILOT", 30)
    monkeypatch.setattr(victims, "PILOT", 5)
    monkeypatch.setattr(sampling, "DRAWS", 2**20)
    monkeypatch.setattr(sampling, "OWN_DRAWS", 2**20)


PARTS = {
    "sampler": (on_sampler,),
    "more of the sampler": (on_sampler_too,),
    "protocol and answers": (on_protocol, on_answers),
    "trainings": (on_trainings, on_clipping),  # minutes of training; `OF_TRAININGS` are fast
    "samples": (on_samples,),
}
FAST = "protocol and answers", "samples"  # the samplers take seven seconds each
KINDS = pytest.mark.parametrize(
    "parts",
    [
        pytest.param(p, id=name, marks=[] if name in FAST else pytest.mark.slow(seconds=25))
        for name, p in PARTS.items()
    ],
)


@KINDS
def test_no_part_of_the_audit_finds_anything_in_the_code_as_it_is(parts, small, quick):
    """Fails with probability at most 0.001 in total; each part takes seconds for its counts."""

    @every(("settings", "part"), [case for case in RIGHT if case[-1] in parts])
    def of_row(settings, part):
        assert not [str(found) for found in part(small(*settings)) if found.contradicts]

    of_row()


@pytest.mark.slow(seconds=25)
def test_no_attack_on_networks_finds_anything_in_the_code_as_it_is(small, quick):
    assert not [str(found) for found in on_trainings(small(*NETWORK)) if found.contradicts]


@KINDS
def test_a_planted_fault_is_found(parts, small, quick, monkeypatch):
    """The audit ends with exit code 3 if any part contradicts; this part must contradict."""

    @every(("mutate", "settings", "part"), [case for case in PLANTED if case[-1] in parts])
    def of_row(mutate, settings, part, monkeypatch):
        mutate(monkeypatch)
        assert any(found.contradicts for found in part(small(*settings)))

    of_row(monkeypatch=monkeypatch)
