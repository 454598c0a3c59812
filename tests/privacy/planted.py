"""Faults to plant in the code that hospitals run: a programmer's mistakes, as functions of a patch.

No other code knows of them. Tests show which checks find each.
"""

import dataclasses
import hashlib
import itertools
import math
from types import SimpleNamespace

import numpy as np
import torch
from dp_accounting import GaussianDpEvent

from fed_dpsd.accounts.account import Account
from fed_dpsd.accounts.ledger import FileLedger, MemoryLedger
from fed_dpsd.client.site import Site
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.papers.gradient_sum import GradientSum
from fed_dpsd.privacy import lattice
from fed_dpsd.privacy.class_statistics import ClassStatistics
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import Mechanism, top_k
from fed_dpsd.privacy.noise import SecretStreams, SecureGenerator, lattice_spacing
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.record_sums import RecordSums
from fed_dpsd.privacy.votes import NoisyVotes
from fed_dpsd.protocol import Response
from fed_dpsd.streams import Streams
from tests.privacy.per_record import clip_records_alone

KEY = bytes(32)


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
    patch.setattr(SecretStreams, "numpy", lambda *_: SecureGenerator(KEY))


def asks_share_noise(patch):
    follow_keys_alone(patch)
    numpy = SecretStreams.numpy
    patch.setattr(SecretStreams, "numpy", lambda self, purpose, *_: numpy(self, purpose.split()[0]))


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


def sensitivity_of_a_removed_teacher(patch):
    """A replaced one changes the sum by twice as much."""
    patch.setattr(NormalizedGradient, "sensitivity", lambda self, *_: self.bound)


def shares_of_one_honest_client_too_many(patch):
    """Their sum has less noise than the claim."""
    scale = NormalizedGradient.scale.fget
    patch.setattr(
        NormalizedGradient,
        "scale",
        property(lambda self: scale(self) * (self.quorum.honest / (self.quorum.honest + 1)) ** 0.5),
    )


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


def root_of_half_the_scale(patch):
    noisy_sum = SecureGenerator.noisy_sum
    patch.setattr(
        SecureGenerator,
        "noisy_sum",
        lambda self, values, scale, law: noisy_sum(self, values, scale / 2**0.5, law),
    )


def gumbel_of_root_of_half_the_scale(patch):
    noisy_argmax = SecureGenerator.noisy_argmax
    patch.setattr(
        SecureGenerator,
        "noisy_argmax",
        lambda self, votes, scale: noisy_argmax(self, votes, scale / 2**0.5),
    )


def used_again(rows):
    """Replace rows 3 to 5 of each six by the rows three before."""
    return rows[np.arange(len(rows)) // 6 * 6 + np.arange(len(rows)) % 3]


def change_noise(patch, changed):
    """Change the (B, K) noise of a request's sums."""
    noisy_sum = SecureGenerator.noisy_sum

    def another(self, values, scale, law):
        spacing = lattice_spacing(scale)
        exact = (np.trunc(np.asarray(values, np.float64) / spacing) * spacing).sum(axis=0)
        return exact + changed(noisy_sum(self, values, scale, law) - exact)

    patch.setattr(SecureGenerator, "noisy_sum", another)


def noise_of_a_query_used_again(patch):
    """For the query three later."""
    change_noise(patch, used_again)


def noise_of_a_query_used_with_the_other_sign(patch):
    """For the next query, so that their sum has none."""

    def antithetic(noise):
        noise[1::2] = -noise[: len(noise) // 2 * 2 : 2]
        return noise

    change_noise(patch, antithetic)


def noise_of_a_query_used_again_for_the_next_classes(patch):
    """For the next query: what one class had, the next class has."""
    change_noise(patch, lambda noise: np.stack([np.roll(noise[0], n) for n in range(len(noise))]))


def classes_share_noise(patch):
    change_noise(patch, lambda noise: np.broadcast_to(noise[:, :1], noise.shape))


def draws_of_a_response_used_again(patch):
    """For the query three later."""
    responses_draw(
        patch, lambda rng, shape: used_again(rng.random(shape).swapaxes(0, 1)).swapaxes(0, 1)
    )


def draws_of_a_label_used_again(patch):
    """For the query three later; the maximum is drawn with real Gumbel noise."""

    def argmax(self, votes, scale):
        noise = -np.log(-np.log(used_again(self.random(votes.shape)) + 1e-300))
        return (votes + scale * noise).argmax(axis=1)

    patch.setattr(SecureGenerator, "noisy_argmax", argmax)


def teachers_share_a_draw(patch):
    def random(rng, shape):
        return np.broadcast_to(rng.random((1, *shape[1:])), shape)

    responses_draw(patch, random)


def noise_of_a_step_used_again(distance):
    """For the step `distance` later."""

    def mutate(patch):
        noisy, drawn = DPSGD._noisy, {}

        def again(self, total, size, rng):
            noises, _ = drawn.setdefault((id(rng), total.shape), ([], rng))  # keeps the generator
            noises.append(noisy(self, torch.zeros_like(total), size, rng))
            number = len(noises) - 1
            noise = noises[number - distance * (number // distance % 2)]
            return (total * self.max_grad_norm).float() + noise

        patch.setattr(DPSGD, "_noisy", again)

    mutate.__name__ = f"noise_of_a_step_used_again_after_{distance}"
    return mutate


def class_counts_share_noise(patch):
    """All teachers and clients do."""
    follow_keys_alone(patch)
    count = DPSGD.count
    patch.setattr(
        DPSGD, "count", lambda self, labels, k, rng: count(self, labels, k, SecureGenerator(KEY))
    )


def requests_are_counted_instead_of_queries(patch):
    for cls in (Mechanism, NormalizedGradient):
        patch.setattr(cls, "releases", lambda self, requests, queries: requests)


def images_of_a_sum_are_counted(patch):
    """Each costs as much as all of them."""
    patch.setattr(GradientSum, "releases", lambda self, requests, queries: requests * queries)


def clients_share_noise(patch):
    """Neither keys nor settings contain a client's number; one secret may be several clients'."""
    numpy, settings = SecretStreams.numpy, Teachers.settings.func
    patch.setattr(
        SecretStreams,
        "numpy",
        lambda self, purpose, client=0, query_id=0: numpy(self, purpose, 0, query_id),
    )

    def anonymous(self):
        number, self._client = self._client, 0
        found = settings(self)
        self._client = number
        return found

    patch.setattr(Teachers, "settings", property(anonymous))


def noise_of_a_request_used_again(patch):
    """For the request three later, if the teachers answer the same."""

    def again(self, mechanism, bounded, digest, request):
        rng = SecretStreams.numpy(self._noise, "answer", self.client, request.query_id % 3)
        return mechanism.add_noise(bounded, request.predictions, rng)

    patch.setattr(Site, "_randomised", again)


def rows_far_down_have_no_noise(patch):
    """As if noise were drawn for a batch of 500 rows."""
    noisy_sum = SecureGenerator.noisy_sum

    def some(self, values, scale, law):
        noisy = noisy_sum(self, values, scale, law)
        noisy[500:] = values.sum(axis=0)[500:]
        return noisy

    patch.setattr(SecureGenerator, "noisy_sum", some)


def biases_have_no_noise(patch):
    noisy = DPSGD._noisy

    def weights_alone(self, total, size, rng):
        if total.ndim > 1:
            return noisy(self, total, size, rng)
        return (total * self.max_grad_norm).float()

    patch.setattr(DPSGD, "_noisy", weights_alone)


def sample_used_again(distance):
    """For the step `distance` later."""

    def mutate(patch):
        sample, drawn = DPSGD._sample, {}

        def again(self, count, rng):
            samples, _ = drawn.setdefault(id(rng), ([], rng))  # keeps the generator
            samples.append(sample(self, count, rng))
            number = len(samples) - 1
            return samples[number - distance * (number // distance % 2)]

        patch.setattr(DPSGD, "_sample", again)

    mutate.__name__ = f"sample_used_again_after_{distance}"
    return mutate


def share_of_one_client_is_missing(patch):
    randomised = Site._randomised

    def missing(self, mechanism, bounded, digest, request):
        if self.client == 1:
            return bounded.sum(axis=0)
        return randomised(self, mechanism, bounded, digest, request)

    patch.setattr(Site, "_randomised", missing)


def responses_among_one_class_more(patch):
    """A set of k + 1 classes, though k are charged."""
    patch.setattr(
        TopKRandomizedResponse,
        "members",
        lambda self, predictions: top_k(predictions, (self.k or 2) + 1),
    )


def responses_among_two_classes(patch):
    patch.setattr(
        TopKRandomizedResponse, "members", lambda self, predictions: top_k(predictions, 2)
    )


def twice_the_rate(patch):
    sample = DPSGD._sample

    def doubled(self, count, rng):
        return sample(dataclasses.replace(self, sample_rate=2 * self.sample_rate), count, rng)

    patch.setattr(DPSGD, "_sample", doubled)


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


def repeated_requests_are_charged_again(patch):
    due, numbers = Account.due, itertools.count()
    patch.setattr(
        Account,
        "due",
        lambda self, mechanism, digest, *rest: due(
            self, mechanism, f"{digest} {next(numbers)}", *rest
        ),
    )


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
        return linear_sum(layer, lattice.Rows(records.inputs, inner, records.labels), bound)

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


def features_keep_their_length(patch):
    """Inputs of 1/16 times the number of features are not scaled to length 1."""
    patch.setattr(lattice, "_sqrt", lambda values: torch.full_like(values, 16.0))


def pairs_of_features_count_twice(patch):
    """Numbers off the diagonal stand for two, but are twice as large instead of sqrt(2) times."""
    patch.setattr(lattice, "OFF_DIAGONAL", 2.0)


def copies_are_added(patch):
    """A record with copies, or a patient, counts as many records."""
    moments_sum = lattice.moments_sum

    def alone(records, *rest):
        inner = records.inner.diagonal(dim1=1, dim2=2).reshape(-1, 1, 1)
        inputs, copies = records.inputs.flatten(0, 1)[:, None], records.inputs.shape[1]
        labels = lattice._labels(records.labels, copies)
        return moments_sum(lattice.Rows(inputs, inner, labels), *rest)

    patch.setattr(lattice, "moments_sum", alone)


def features_centred_on_the_records_own_mean(patch):
    sensitive_sum = ClassStatistics.sensitive_sum

    def centred(self, shard, at):
        return sensitive_sum(self, shard, shard.inputs.mean((0, 1)).numpy())

    patch.setattr(ClassStatistics, "sensitive_sum", centred)


def moments_in_single_precision(patch):
    moments_sum = lattice.moments_sum
    patch.setattr(lattice, "moments_sum", lambda *rest: moments_sum(*rest).float().double())


def gradients_keep_their_length(patch):
    patch.setattr(lattice, "_scale", lambda residuals, inner, bound: inner[:, 0, 0] * 0 + 1)


def half_the_noise_in_sums(patch):
    noise = RecordSums.add_noise

    def half(self, value, *rest):
        return (value.sum(0) + noise(self, value, *rest)) / 2

    patch.setattr(RecordSums, "add_noise", half)
