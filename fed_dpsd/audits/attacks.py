"""Attacks on answers (the site, its sampler and its messages) and on private training.

The attacked hospital may be broken on purpose; the claim never is. An audit's secrets are derived
from the run's seed, so that it can be repeated; they protect nothing.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from dp_accounting import GaussianDpEvent
from scipy.stats import binom

from fed_dpsd.accounts.card import privacy_card
from fed_dpsd.accounts.words import PrivacyCard
from fed_dpsd.audits import canaries, victims
from fed_dpsd.audits.black_box import (
    Audited,
    Proof,
    audit,
    audit_by_enumeration,
    cost_in_answers,
    rows_are_separate,
)
from fed_dpsd.audits.checks import Check, Count, check_counts, check_lags
from fed_dpsd.audits.claims import (
    ATTACK_FAILURE,
    CLOSE_DELTA,
    Attack,
    Say,
    audit_secrets,
    prove_epsilon,
    with_close_epsilon,
)
from fed_dpsd.audits.one_run import conclude
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.gdp import gaussian_mu
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.published import published_epsilon
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.record_sums import RecordSums
from fed_dpsd.privacy.training import ClassCounts, TrainingMechanism
from fed_dpsd.progress import reporting

CLOSE_QUERIES, CLOSE_RUNS = 4, 100_000
ALONE_RUNS = 2_000  # fewer if each release needs its own request
SUM_RUNS, SUM_NOISE = 1_500, 0.35  # sums, and noise at which a long part is noticed
CLAIM_RUNS, CLAIM_FAILURE = 300, 1e-6
# Enough steps to sample most canaries, and enough runs to count them.
TIMES_SAMPLED, FEWEST_STEPS, STEPS_IN_ALL, RUNS = 3, 10, 12_000, (60, 1_000)
CANARIES, COUNTED_CANARIES, COUNTED_RUNS = {True: 40, False: 20}, 1_000, 200  # linear or not
CLIPPED_STEPS, CLIPPED_RUNS = 2, {"weights": 1_200, "bias": 1_200, "network": 600}
# Largest bounds of the clipping attack: gradients of its canaries are longer.
CLIPPED_BOUNDS = {"weights": 1.0, "bias": 0.25, "network": 1.0}
SAMPLED_STEPS, SAMPLED_CANARIES = 2_000, {True: 50, False: 20}
ANSWER_STEPS, ANSWER_RUNS, OWN_RUNS = 5_000, (100, 500), (10, 50)

STEPS = (
    "the training's steps (worst-case records of all classes, no class counts, weights that do not "
    "move)"
)
WHITE_BOX = "the adversary chooses the records and sees the noisy sums of all steps"
COUNTS = "the adversary chooses the records and sees the class counts"
SUMS = "the adversary chooses the records, knows all others and sees the noisy sum"
BLACK_BOX = "the adversary chooses the records and sees only the released probabilities"


def answer_attacks(
    experiment: Experiment, broken: victims.Broken | None, say: Say
) -> Iterator[Attack]:
    """Attack answers at settings where audit and proof are close, then at the run's own."""
    mechanism, config = experiment.answers, experiment.config
    assert isinstance(mechanism, Audited)
    if isinstance(mechanism, RecordSums):
        yield _attack_sums(experiment, mechanism, broken, say)
    separate = rows_are_separate(mechanism)
    plan = experiment.plan
    stages = [stage for stage in plan.stages if stage.mechanism == mechanism]
    queried = sum(stage.requests * stage.queries for stage in stages)
    queries = queried if separate else sum(stage.requests for stage in stages)
    secrets, delta = audit_secrets(config, "answers"), config.privacy.delta

    close = with_close_epsilon(
        mechanism, lambda trial: prove_epsilon(trial, CLOSE_QUERIES, CLOSE_DELTA, "replace_one")
    )
    runs = CLOSE_RUNS if separate else ALONE_RUNS
    say(f"the implementation: {runs:,} runs of {CLOSE_QUERIES} answers in each of two worlds")
    client = victims.make_client(config, victims.break_noise(close, broken), secrets, seeded=False)
    proof = _answers_proof([Stage(close, CLOSE_QUERIES, 1)], CLOSE_DELTA)
    settings = CLOSE_QUERIES, runs, CLOSE_DELTA, ATTACK_FAILURE
    result = audit(close, client, *settings, report_mu=proof.mu is not None)
    key = "answers_check" if isinstance(experiment.training, TrainingMechanism) else "check"
    # What a label, or one of several responses, reveals is less than is proven (`label_checks`).
    tight = not isinstance(close, NoisyMax) and (
        not isinstance(close, TopKRandomizedResponse)
        or (close.quorum is None and close.shards.teachers == 1)
    )
    yield Attack(key, "the implementation", close, result, proof, tests_code=tight)

    # Only a single image's gradient is attacked; a sum of many gradients costs more.
    title = "the run's settings"
    if not separate and cost_in_answers(mechanism, 2) > 1.5:
        title = "the run's noise on requests of one image, which cost less than the run's requests"
    say(f"{title}: {CLAIM_RUNS:,} runs of {queries:,} answers in each of two worlds")
    attacked = victims.break_noise(mechanism, broken)
    if isinstance(attacked, TopKRandomizedResponse):
        result = audit_by_enumeration(attacked, queries)
    else:
        client = victims.make_client(config, attacked, secrets, experiment.seeded)
        settings = queries, CLAIM_RUNS, delta, CLAIM_FAILURE
        result = audit(mechanism, client, *settings, report_mu=False)
    yield Attack(
        "claim",
        title,
        mechanism,
        result,
        # Of the plan's own stages, as the plan prints it.
        _answers_proof(stages if separate else [Stage(mechanism, queries, 1)], delta),
        published_epsilon(mechanism, queried, delta),
        tests_code=False,
        also=_also_released(experiment, plan),
    )


def _attack_sums(
    experiment: Experiment, mechanism: Any, broken: victims.Broken | None, say: Say
) -> Attack:
    """Attack a sum over records, with little noise, so that a part beyond its bound is noticed."""
    config, delta = experiment.config, experiment.config.privacy.delta
    close = dataclasses.replace(mechanism, noise_multiplier=SUM_NOISE)
    say(f"sums over records: {SUM_RUNS:,} sums, with or without one {close.unit}")
    attacked, secret = victims.break_noise(close, broken), next(audit_secrets(config, "sums"))
    guesses = victims.guess_sums(config, attacked, secret, SUM_RUNS)
    result = conclude(guesses, delta, ATTACK_FAILURE, 1, SUMS, mechanism.what, close.unit)
    proof = Proof(
        prove([Stage(close, 1, 1)], delta, close.unit, "add_remove"),
        gaussian_mu(close.event(close.unit, "add_remove")),
    )
    return Attack(
        "sums", f"sums over records, with or without one {close.unit}", close, result, proof
    )


def _also_released(experiment: Experiment, plan: Plan) -> str:
    """Describe what a run releases in addition to its answers, and its card's total."""
    others = {s.mechanism.name for s in plan.stages if s.mechanism != experiment.answers}
    if not others:
        return ""
    card = PrivacyCard(privacy_card(experiment, plan), "planned")
    return (
        f"this covers the answers alone; the run also releases {' and '.join(sorted(others))}, and "
        f"its card states {card.epsilon('record', 'replace_one')}"
    )


def _answers_proof(stages: Sequence[Stage], delta: float) -> Proof:
    """Return the proof of the answers of stages, which all have one mechanism."""
    mu = gaussian_mu(stages[0].mechanism.event("record", "replace_one"))
    queries = sum(stage.requests * stage.queries for stage in stages)
    return Proof(
        prove(stages, delta, "record", "replace_one"), None if mu is None else mu * queries**0.5
    )


def training_attacks(
    experiment: Experiment, broken: victims.Broken | None, say: Say
) -> Iterator[Attack]:
    """Attack training: steps, clipping, class counts, and teachers (last at the run's settings)."""
    config, mechanism = experiment.config, experiment.training
    assert isinstance(mechanism, DPSGD)
    secrets, delta = audit_secrets(config, "training"), config.privacy.delta
    most = max(FEWEST_STEPS, math.ceil(TIMES_SAMPLED / mechanism.sample_rate))
    few = dataclasses.replace(mechanism, steps=min(mechanism.steps, most), count_fraction=None)
    close = with_close_epsilon(
        few, lambda trial: prove_epsilon(trial, 0, CLOSE_DELTA, "add_remove")
    )
    yield from _attack_steps(experiment, close, broken, secrets, say)
    yield from _attack_clipping(experiment, few, broken, secrets, say)
    if mechanism.counts_classes:
        yield _attack_counts(close, broken, secrets, delta)

    yield from _attack_answers(experiment, close, broken, secrets, say)


def _attack_steps(
    experiment: Experiment,
    close: DPSGD,
    broken: victims.Broken | None,
    secrets: Iterator[SecretStreams],
    say: Say,
) -> Iterator[Attack]:
    config, delta = experiment.config, experiment.config.privacy.delta
    linear = make_teacher(config, 0, 0).fixed
    num_classes = min(config.data.num_classes, canaries.MOST_CLASSES)
    count = max(2 * num_classes, math.ceil(CANARIES[linear] / math.sqrt(close.places)))
    if linear:
        kind = canaries.of_weights(count, num_classes)
    else:
        kind = canaries.of_network(count, num_classes, close.max_grad_norm)
    runs = int(np.clip(STEPS_IN_ALL // close.steps, *RUNS))
    say(f"the steps of training: {runs:,} runs of {close.steps:,} steps, {count} canaries")
    trainings = _report_steps(secrets, [close.steps] * runs)
    attacked = victims.break_noise(close, broken)
    sums, moves = canaries.guess_steps(attacked, close, kind, trainings, runs)
    audited = f"{'a linear layer' if linear else 'a network'} trained by DP-SGD"
    proof = _training_proof(close, 0, delta, canaries.steps_advantage(close))
    what = WHITE_BOX, audited, close.unit, kind.groups
    for key, title, guesses in (
        ("check", STEPS, sums),
        ("differences", "differences between consecutive steps (the same training runs)", moves),
    ):
        result = conclude(guesses, delta, ATTACK_FAILURE, 0, *what)
        # Noise that is too small shows in the sums, so only they test the code.
        yield Attack(key, title, close, result, proof, tests_code=key == "check")


def _attack_clipping(
    experiment: Experiment,
    few: DPSGD,
    broken: victims.Broken | None,
    secrets: Iterator[SecretStreams],
    say: Say,
) -> Iterator[Attack]:
    """Attack clipping at rate 1, not the run's rate: by class, in a bias and across layers."""
    delta = experiment.config.privacy.delta
    num_classes = min(experiment.config.data.num_classes, canaries.MOST_CLASSES)
    whole = dataclasses.replace(few, sample_rate=1.0, steps=CLIPPED_STEPS)
    close = with_close_epsilon(
        whole, lambda trial: prove_epsilon(trial, 0, CLOSE_DELTA, "add_remove")
    )
    advantage = canaries.steps_advantage(close)
    kinds = {
        "weights": canaries.of_weights(max(CANARIES[True], num_classes), num_classes),
        "bias": canaries.of_bias(num_classes),
        "network": canaries.of_network(max(CANARIES[False], 2 * num_classes), num_classes),
    }
    places = {"weights": "a linear layer's weights", "bias": "a bias", "network": "three layers"}
    for name, kind in kinds.items():
        runs = CLIPPED_RUNS[name]
        say(f"clipping in {places[name]}: {runs:,} training runs, {len(kind)} canaries")
        bound = min(few.max_grad_norm, CLIPPED_BOUNDS[name])
        claimed = dataclasses.replace(close, max_grad_norm=bound)
        attacked = victims.break_noise(claimed, broken)
        trainings = _report_steps(secrets, [claimed.steps] * (canaries.PILOT + runs))
        guesses = canaries.guess_clipping(attacked, kind, trainings, runs)
        audited = f"gradients in {places[name]}"
        failure, groups = ATTACK_FAILURE / len(kinds), kind.groups
        yield Attack(
            f"clipping_{name}",
            f"clipping at rate 1: gradients of all classes in {places[name]}",
            claimed,
            conclude(guesses, delta, failure, 0, WHITE_BOX, audited, claimed.unit, groups),
            _training_proof(claimed, 0, delta, advantage),
        )


def _attack_counts(
    close: DPSGD, broken: victims.Broken | None, secrets: Iterator[SecretStreams], delta: float
) -> Attack:
    counting = dataclasses.replace(close, count_fraction=1.0)
    guesses = canaries.guess_counts(
        victims.break_noise(counting, broken), COUNTED_CANARIES, secrets, COUNTED_RUNS
    )
    proven = prove([Stage(ClassCounts(counting), 1, 0)], delta, close.unit, "add_remove")
    return Attack(
        "counts",
        f"the class counts (one {close.unit} per class)",
        counting,
        conclude(guesses, delta, ATTACK_FAILURE, 0, COUNTS, "class counts", close.unit),
        Proof(proven, gaussian_mu(GaussianDpEvent(counting.count_noise))),
    )


def check_sampling(experiment: Experiment, say: Say) -> Iterator[Check]:
    """Check which canaries take part in each step, using sums with hardly any noise.

    Each of many canaries should take part in each step at the run's rate q, independently of other
    canaries and steps. The check counts the steps with the expected number of canaries and with
    many more, the canaries that take part exactly once in about 1 / q steps, the canaries in two
    consecutive steps, and the pairs of consecutive canaries in one step. No sample is used twice,
    at any distance.
    """
    mechanism = experiment.training
    assert isinstance(mechanism, DPSGD)
    linear = make_teacher(experiment.config, 0, 0).fixed
    steps, count = SAMPLED_STEPS, SAMPLED_CANARIES[linear]
    say(f"sample counts: {steps:,} steps, {count} canaries")
    secret = next(audit_secrets(experiment.config, "samples"))
    taken = canaries.participation(mechanism, steps, count, linear, secret)
    rate, sizes = mechanism.sample_rate, taken.sum(axis=1)
    usual, window = math.floor(count * rate), round(1 / rate)
    many = math.ceil(count * rate + 2 * math.sqrt(count * rate * (1 - rate)))
    windows = taken[: steps // window * window].reshape(-1, window, count).sum(axis=1)
    together = taken[:, ::2] & taken[:, 1::2]
    again = taken[::2] & taken[1::2]
    one_of, at_least = binom.pmf(usual, count, rate), binom.sf(many - 1, count, rate)
    events = [
        ("canaries in steps", taken, rate),
        (f"steps with {usual} canaries", sizes == usual, float(one_of)),
        (f"steps with {many} canaries or more", sizes >= many, float(at_least)),
        (f"canaries in one of {window} steps", windows == 1, float(binom.pmf(1, window, rate))),
        ("canaries in two steps in a row", again, rate**2),
        ("two consecutive canaries in a step", together, rate**2),
        *((f"steps of canary {number}", of_one, rate) for number, of_one in enumerate(taken.T)),
    ]
    counts = [Count(what, int(hits.sum()), hits.size, chance) for what, hits, chance in events]
    yield check_counts(f"sample counts at rate {rate:g}", counts)
    yield check_lags("samples: no sample is used twice", taken.T.ravel(), rate)


def _attack_answers(
    experiment: Experiment,
    close: DPSGD,
    broken: victims.Broken | None,
    secrets: Iterator[SecretStreams],
    say: Say,
) -> Iterator[Attack]:
    """Attack the probabilities of trained teachers, at close settings and at the run's own."""
    config, own = experiment.config, experiment.training
    assert isinstance(own, DPSGD)
    # If steps are sampled, one image moves the final weights little.
    exposed = close.sample_rate == 1
    probabilities = "probabilities of trained teachers"
    images = f"the {probabilities} (only images that are far from parallel)"
    for key, title, claimed, most, advantage, tests_code in (
        ("answers", images, close, ANSWER_RUNS, canaries.steps_advantage(close), exposed),
        ("training_claim", f"the run's settings: {probabilities}", own, OWN_RUNS, None, False),
    ):
        runs = int(np.clip(ANSWER_STEPS // claimed.steps, *most))
        say(f"{title}: {runs} training runs of {claimed.steps:,} steps, {victims.CANARIES} images")
        trainings = _report_steps(secrets, [claimed.steps] * (victims.PILOT + runs))
        attacked = victims.break_noise(claimed, broken)
        guesses = victims.guess_answers(config, attacked, trainings, runs)
        queries, delta, unit = victims.CANARIES, config.privacy.delta, claimed.unit
        what = BLACK_BOX, "released probabilities"
        result = conclude(guesses, delta, ATTACK_FAILURE, queries, *what, unit)
        proof = _training_proof(claimed, queries, delta, advantage)
        yield Attack(key, title, claimed, result, proof, tests_code=tests_code)


def _training_proof(mechanism: DPSGD, queries: int, delta: float, advantage: float | None) -> Proof:
    proven = prove_epsilon(mechanism, queries, delta, "add_remove")
    return Proof(proven, gaussian_mu(mechanism.event(mechanism.unit, "add_remove")), advantage)


def _report_steps(
    secrets: Iterator[SecretStreams], steps: Sequence[int]
) -> Iterator[SecretStreams]:
    """Yield a secret for each training run, and report its steps when the next run starts."""
    with reporting("training steps", sum(steps)) as task:
        for count, secret in zip(steps, secrets, strict=False):
            yield secret
            task.advance(count)
