"""Sampler tests: the laws of a client's draws, in answers, in training and by the generator.

Every count is compared with the law stated in docs/privacy.md, which is computed here and not by
the code under test. A Gaussian truncated at up to 4.5 standard deviations is detected in the
sampler itself, and at up to 4.05 in answers and steps.
"""

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.accounts.card import plan_of
from fed_dpsd.audits import victims
from fed_dpsd.audits.black_box import public_rows
from fed_dpsd.audits.canaries import Watched
from fed_dpsd.audits.checks import (
    LAWS,
    Check,
    Count,
    check_counts,
    check_different_secrets,
    check_independence,
    check_low_bits,
    check_residues,
    count_tails,
    count_true,
)
from fed_dpsd.audits.claims import Say, audit_secrets
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import Additive, Values, top_k
from fed_dpsd.privacy.noise import Law, SecretStreams, lattice_spacing, noisy_sum
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.progress import listening

DRAWS, OWN_DRAWS = 2**20, 3 * 2**20  # numbers in answers or steps, and from the sampler itself
AT_ONCE = 2**18  # numbers in one request
ALONE = 250  # requests, if each has only one noisy row
# Distances in scales. The far ones of Gaussian noise are not integers: noise truncated at an
# integer piles up there.
TAILS: dict[Law, tuple[float, ...]] = {
    "gaussian": (0.0, 0.5, 1.0, 2.0, 3.05, 4.05),
    "laplace": (0.0, 0.5, 1.0, 2.0, 4.0, 8.0),
}
FARTHEST: dict[Law, float] = {"gaussian": 4.5, "laplace": 11.0}
WORD_BITS = 53
RARE_EPSILON = 10.0  # lies are rare but occur
FEWEST_STEPS, MOST_STEPS = 2, 1_000  # of a watched training


class _SameIdentity(SecretStreams):
    """A secret with the same identity as all others, so that only its draws differ."""

    @property
    def identity(self) -> str:
        return "0" * 64


def sampler_tests(
    experiment: Experiment, broken: victims.Broken | None, say: Say
) -> Iterator[Check]:
    """Test a client's draws: its generator, and the noise of its answers and training."""
    mechanism = experiment.answers
    secrets = [
        _SameIdentity(s.secret) for s in islice(audit_secrets(experiment.config, "sampler"), 3)
    ]
    say(f"the sampler: {OWN_DRAWS:,} draws")
    yield from _check_generator(secrets)
    if any(stage.mechanism == mechanism for stage in plan_of(experiment).stages):
        say(f"answers: {DRAWS:,} draws")
        attacked = victims.break_noise(mechanism, broken)
        if isinstance(mechanism, TopKRandomizedResponse) and not mechanism.truthful:
            yield from _check_responses(experiment, mechanism, broken, secrets)
        elif isinstance(mechanism, Additive) and mechanism.noise_multiplier > 0:
            yield from _check_additive(experiment, mechanism, attacked, secrets)
        elif isinstance(mechanism, NoisyMax) and mechanism.noise_multiplier > 0:
            pairs = [(attacked, _law_of_most_votes(mechanism), DRAWS // 8)]
            yield from _check_labels(experiment, pairs, secrets)
    if isinstance(experiment.training, DPSGD):
        say(f"the steps of training: {DRAWS:,} draws")
        yield from _check_training(experiment, experiment.training, broken, secrets)


# --- the generator ----------------------------------------------------------------------------


def _check_generator(secrets: Sequence[SecretStreams]) -> Iterator[Check]:
    """Test a secret's streams: uniform draws, both noise laws, and independence of streams."""
    one, other, _ = secrets
    words = (one.numpy("answer", 0, 1).random(DRAWS) * 2.0**WORD_BITS).astype(np.int64)
    bits = [Count(f"bit {b} set", count_true(words >> b), DRAWS, 0.5) for b in range(WORD_BITS)]
    yield check_counts("sampler", "uniform draws have 53 bits", bits)

    streams = {
        "another secret": other.numpy("answer", 0, 1),
        "another purpose": one.numpy("private training", 0, 1),
        "another client": one.numpy("answer", 1, 1),
        "another request": one.numpy("answer", 0, 2),
    }
    first = one.numpy("answer", 0, 1).random(AT_ONCE) < 0.5
    agreeing = [
        Count(f"draws that agree with those for {what}", count_true(first == half), AT_ONCE, 0.5)
        for what, stream in streams.items()
        for half in [stream.random(AT_ONCE) < 0.5]
    ]
    yield check_counts("sampler", "streams depend on secret, purpose, client and request", agreeing)

    again = one.numpy("answer", 0, 1).random(AT_ONCE) < 0.5
    yield _check_repeatable("streams can be repeated", first, again)

    laws: tuple[Law, ...] = ("gaussian", "laplace")
    for law in laws:
        rng = one.numpy(f"audit of {law} noise")
        nothing = np.zeros((1, OWN_DRAWS))
        drawn = noisy_sum(nothing, 1.0, law, rng)
        counts = count_tails(drawn, law, (*TAILS[law], FARTHEST[law]))
        yield check_counts("sampler", f"{law} noise: tails to {FARTHEST[law]:g} scales", counts)
        yield check_low_bits(f"{law} noise", drawn.reshape(-1, 16), lattice_spacing(1.0))


def _check_tails(what: str, drawn: NDArray[np.float64], law: Law) -> Check:
    """Check the tails of draws of unit scale; with few draws, omit the farthest tails."""
    beyond = TAILS[law] if drawn.size > DRAWS // 2 else TAILS[law][:4]
    return check_counts(
        "sampler", f"{what}: tails to {beyond[-1]:g} scales", count_tails(drawn, law, beyond)
    )


def _check_repeatable(title: str, drawn: NDArray[Any], again: NDArray[Any]) -> Check:
    wrong = "" if np.array_equal(drawn, again) else "the same secret and names give different draws"
    return Check("sampler", title, wrong, f"{drawn.size:,} draws")


# --- answers ----------------------------------------------------------------------------------


def _check_additive(
    experiment: Experiment, claimed: Any, attacked: Any, secrets: Sequence[SecretStreams]
) -> Iterator[Check]:
    """Test the noise of released answers, first on constant values, then on random ones."""
    quorum = getattr(claimed, "quorum", None)
    scale = getattr(claimed, "scale", claimed.noise_multiplier)  # of a site's own noise
    spacing, law = lattice_spacing(scale), claimed.noise_law
    first, other, third = secrets

    def released(secret: SecretStreams, constant: bool) -> tuple[Values, Values]:
        return _release_noise(experiment, claimed, attacked, secret, spacing, constant)

    (noise, steady), (more, sensitive) = released(first, True), released(third, False)
    drawn = np.concatenate([noise, more]) / scale / math.sqrt(quorum.honest if quorum else 1)
    yield _check_tails("answers", drawn, law)
    yield check_low_bits("answers", noise + steady, spacing)
    yield check_residues("answers", more + sensitive, sensitive, spacing)
    yield check_independence("answers", drawn, law)
    yield check_different_secrets("answers", noise, released(other, True)[0])
    yield _check_repeatable("answers: noise can be repeated", noise, released(first, True)[0])


def _release_noise(
    experiment: Experiment,
    claimed: Any,
    attacked: Any,
    secret: SecretStreams,
    spacing: float,
    constant: bool,
) -> tuple[Values, Values]:
    """Release answers; return (R, C) noise and the values that it was added to, on its lattice.

    Columns outside a public mask carry no noise and are omitted.
    """
    rng = np.random.default_rng(int(constant))
    first, _ = claimed.worst_case()
    teachers, num_classes = len(first), claimed.num_classes
    row = public_rows(num_classes)[-1:]
    masked = getattr(claimed, "k", None) and getattr(claimed, "mask", "") == "public"
    kept = top_k(row, claimed.k)[0] if masked else np.ones(num_classes, bool)
    rows = max(1, AT_ONCE // num_classes // teachers)
    requests = math.ceil(DRAWS / 2 / num_classes / rows)
    if claimed.releases(1, 2) > 2:  # sums: each request has one noisy row
        rows, requests = 1, ALONE
    predictions = np.tile(row, (rows, 1))

    def values() -> Values:
        if constant:
            return np.tile(first, (1, rows, 1))
        if isinstance(claimed, NormalizedGradient):
            return rng.normal(size=(teachers, rows, num_classes))
        return np.eye(num_classes)[rng.integers(num_classes, size=(teachers, rows))]

    inputs = [values() for _ in range(requests)]
    client = victims.make_client(experiment.config, attacked, iter([secret]), seeded=False)
    noise, sums = [], []
    for response, each in zip(client(inputs, predictions), inputs, strict=True):
        bounded = np.stack([claimed.constrain_sensitivity(own, predictions) for own in each])
        total = (np.trunc(bounded / spacing) * spacing).sum(axis=0)
        noise.append((response - total)[:, kept])
        sums.append(total[:, kept])
    return np.concatenate(noise), np.concatenate(sums)


def _check_responses(
    experiment: Experiment,
    claimed: TopKRandomizedResponse,
    broken: victims.Broken | None,
    secrets: Sequence[SecretStreams],
) -> Iterator[Check]:
    """Test responses with rare lies, and at the run's own epsilon."""
    alone = dataclasses.replace(claimed, quorum=None, noise_at="client")
    own = min(claimed.epsilon_per_answer, RARE_EPSILON)
    pairs = []
    for epsilon, draws in ((RARE_EPSILON, DRAWS // 2), (own, DRAWS // 8)):
        each = dataclasses.replace(alone, epsilon_per_answer=epsilon)
        pairs.append((victims.break_noise(each, broken), _law_of_response(each), draws))
    yield from _check_labels(experiment, pairs, secrets)


def _law_of_response(claimed: TopKRandomizedResponse) -> NDArray[np.float64]:
    """Return the (K,) law of a response when the class is the first of k candidates."""
    size = 2 if claimed.threshold is not None else (claimed.k or claimed.num_classes)
    law = np.zeros(claimed.num_classes)
    law[:size] = 1 / (math.exp(claimed.epsilon_per_answer) + size - 1)
    law[0] *= math.exp(claimed.epsilon_per_answer)
    return law


def _law_of_most_votes(claimed: NoisyMax) -> NDArray[np.float64]:
    """Return the (K,) law of the class with the most noisy votes, in the worst case."""
    votes = claimed.worst_case()[0][:, 0].sum(axis=0) / claimed.noise_multiplier
    points = np.linspace(-45, 45 + votes.max(), 400_001)
    noise, law = LAWS[claimed.noise_law], []
    for place, own in enumerate(votes):
        others = [noise.cdf(points - vote) for number, vote in enumerate(votes) if number != place]
        law.append(np.trapezoid(noise.pdf(points - own) * np.prod(others, axis=0), points))
    return np.array(law) / np.sum(law)


def _check_labels(
    experiment: Experiment,
    pairs: Sequence[tuple[Any, NDArray[np.float64], int]],
    secrets: Sequence[SecretStreams],
) -> Iterator[Check]:
    """Compare released classes, by position after a row's first class, with the claimed laws.

    Each element of `pairs` is a mechanism to attack, its claimed law and a number of rows.
    """
    counts: list[Count] = []
    for attacked, law, draws in pairs:
        answers = _release_classes(experiment, attacked, secrets[0], draws)
        votes, changed = int(answers.sum()), int(answers[:, 1:].sum())
        counts.append(Count("classes other than the first", changed, votes, 1 - float(law[0])))
        for place, (hits, chance) in enumerate(zip(answers.sum(axis=0), law, strict=True)):
            text = f"class at position {place} (probability {chance:.3g})"
            counts.append(Count(text, int(hits), votes, float(chance)))
    yield check_counts(
        "sampler", "answers: each class occurs as often as claimed, even if rare", counts
    )

    attacked, law, draws = pairs[-1]
    if len(attacked.worst_case()[0]) > 1 and not isinstance(attacked, NoisyMax):
        return  # a row holds many responses
    first, other = (
        _release_classes(experiment, attacked, secret, draws).argmax(axis=1)
        for secret in secrets[:2]
    )
    alike, half = float(np.square(law).sum()), len(first) // 2
    for title, what, same in (
        ("draws are independent", "equal neighbours", first[: 2 * half : 2] == first[1::2][:half]),
        ("another secret gives different draws", "equal rows", first == other),
    ):
        yield check_counts(
            "sampler", f"answers: {title}", [Count(what, count_true(same), same.size, alike)]
        )


def _release_classes(
    experiment: Experiment, attacked: Any, secret: SecretStreams, draws: int
) -> NDArray[np.int64]:
    """Release answers to rows of every shift; return (R, K) votes by position after the first."""
    worst, num_classes = attacked.worst_case()[0], attacked.num_classes
    rows = max(1, AT_ONCE // num_classes // len(worst))
    requests = math.ceil(draws / rows)
    order = (np.arange(num_classes) + np.arange(rows)[:, None]) % num_classes  # class by position
    falling = np.linspace(1, 0, num_classes)
    if getattr(attacked, "threshold", None) is not None:
        falling = np.where(np.arange(num_classes) < 2, falling + 1, 0)
    public, values = np.zeros((rows, num_classes)), np.zeros((len(worst), rows, num_classes))
    np.put_along_axis(public, order, np.tile(falling / falling.sum(), (rows, 1)), axis=1)
    np.put_along_axis(values, np.tile(order, (len(worst), 1, 1)), np.tile(worst, (1, rows, 1)), 2)
    client = victims.make_client(experiment.config, attacked, iter([secret]), seeded=False)
    answers = np.concatenate(list(client([values] * requests, public.astype(np.float32))))
    return np.take_along_axis(answers, np.tile(order, (requests, 1)), axis=1).astype(np.int64)


# --- training ---------------------------------------------------------------------------------


def _check_training(
    experiment: Experiment,
    claimed: DPSGD,
    broken: victims.Broken | None,
    secrets: Sequence[SecretStreams],
) -> Iterator[Check]:
    """Test the noise of a site's training without records, and of class counts."""
    first, other, _ = secrets
    attacked = victims.break_noise(claimed, broken)
    few = [
        _noisy_steps(experiment, attacked, FEWEST_STEPS, secret) for secret in (first, other, first)
    ]
    steps = int(np.clip(DRAWS // few[0].shape[1], FEWEST_STEPS, MOST_STEPS))
    drawn = _noisy_steps(experiment, attacked, steps, first) / claimed.noise_multiplier
    yield _check_tails("steps", drawn, "gaussian")
    yield check_independence("steps", drawn, "gaussian")
    yield check_different_secrets("steps", few[0], few[1])
    yield _check_repeatable("steps: noise can be repeated", few[0], few[2])
    if claimed.counts_classes:
        yield from _check_class_counts(claimed, attacked, first)


def _noisy_steps(
    experiment: Experiment, attacked: DPSGD, steps: int, secret: SecretStreams
) -> NDArray[np.float64]:
    """Return the (T, P) noisy sums of training without records, in units of the bound."""
    watched = Watched.like(attacked, steps=steps)
    with tempfile.TemporaryDirectory() as cache, listening(None):  # the audit reports
        site = victims.training_site(experiment.config, watched, cache, secret)
        site.pay_for_training()
        site.sensitive_probabilities(np.zeros((1, *experiment.config.data.shape), np.uint8))
    return watched.sums()


def _check_class_counts(claimed: DPSGD, attacked: DPSGD, secret: SecretStreams) -> Iterator[Check]:
    """Test the noise of class counts, with zero, one and two units of each class in turn."""
    num_classes = AT_ONCE // 3 * 3
    labels = np.arange(num_classes).repeat(np.arange(num_classes) % 3)
    if claimed.unit == "patient":
        labels = labels[:, None].repeat(claimed.records_per_patient, axis=1)
    parts = claimed.records_per_patient
    released = attacked.count(labels, num_classes, secret.numpy("class counts"))
    noise = released - np.arange(num_classes) % 3
    counts = count_tails(noise / claimed.count_noise, "gaussian", TAILS["gaussian"][:4])
    yield check_counts("sampler", "class counts: tails to 2 scales", counts)
    spacing = lattice_spacing(attacked.count_noise * parts)
    yield check_low_bits("class counts", released.reshape(-1, 3) * parts, spacing)
