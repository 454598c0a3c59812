"""Audits of the code that hospitals run: the site, its sampler, its messages, and the trainer.

The attacked hospital may be broken on purpose; the claim never is. The secrets of an audit follow
the run's seed, so that an audit can be repeated: they protect nothing.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent

from fed_dpsd.accounts.card import PrivacyCard, plan_of, privacy_card
from fed_dpsd.audits import victims
from fed_dpsd.audits.black_box import Audit, Proof, audit, enumerated, verdict
from fed_dpsd.audits.canaries import guess_counts, guess_steps, steps_advantage
from fed_dpsd.audits.one_run import Guesses, conclude
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.config import Config
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import CALIBRATED_BETWEEN, Experiment
from fed_dpsd.methods.method import Plan
from fed_dpsd.models import torch_threads
from fed_dpsd.privacy.accounting import Stage, epsilon, prove
from fed_dpsd.privacy.calibration import calibrate
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.epsilon import Epsilon
from fed_dpsd.privacy.laws import gaussian_mu
from fed_dpsd.privacy.mechanism import Charged, Mechanism, Relation, trust_of
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.privacy.published import published_epsilon
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.progress import reporting

Say = Callable[[str], None]

# Settings at which an attack comes close to the proof: few answers, each of which may tell much.
CLOSE_EPSILON, CLOSE_DELTA, CLOSE_QUERIES, CLOSE_RUNS, CLOSE_FAILURE = 2.1, 1e-3, 4, 100_000, 0.01
ALONE_RUNS = 2_000  # fewer, where each release needs an ask of its own
CLAIM_RUNS, CLAIM_FAILURE = 300, 1e-6
# Trainings: enough steps to sample most canaries, and enough runs to count them.
TIMES_SAMPLED, FEWEST_STEPS, STEPS_IN_ALL, RUNS = 3, 10, 20_000, (60, 1_000)
CANARIES, COUNTED_CANARIES, COUNTED_RUNS = 100, 1_000, 200
ASKED_RUNS, OWN_RUNS = 500, (10, 100)
TRAINING_FAILURE = 0.001

TITLE = "the run's settings"
WHITE_BOX = "the adversary chooses the records and sees the noisy sums of all steps"
COUNTS = "the adversary chooses the records and sees the class counts"
BLACK_BOX = "the adversary chooses the records and sees the released probabilities only"


@dataclass(frozen=True)
class Attack:
    """An audit beside the numbers that it is about.

    Args:
        title: the attacked part, in words.
        mechanism: the claim.
        audit: lower bounds on the leak.
        proof: upper bounds on the leak, if the claim is true.
        published: the paper's number for as many answers; `inf` where none is looked at.
        tests_code: whether a broken implementation must show at these settings.
        beside: what the run releases besides, in a sentence; "" where it releases nothing else.
    """

    title: str
    mechanism: Charged
    audit: Audit
    proof: Proof
    published: float = math.inf
    tests_code: bool = True
    beside: str = ""

    @property
    def contradicts(self) -> bool:
        """Return whether a proven number is refuted."""
        return bool(self.proof.contradicted(self.audit))

    def verdict(self) -> list[str]:
        """Say what is refuted and what is not, in sentences."""
        sentences = verdict(self.audit, self.proof, self.published, self._published_delta)
        if not self.tests_code and self.audit.lower_bound < self.proof.epsilon.value / 10:
            sentences.append("a bound near zero says little: this attack is weak at these settings")
        return sentences + [self.beside] * bool(self.beside)

    @property
    def _published_delta(self) -> float:
        """Return 0 for Theorem 2, which claims a pure bound, and the proof's delta otherwise."""
        pure = isinstance(self.mechanism, TopKRandomizedResponse)
        return 0.0 if pure else self.proof.epsilon.delta

    def to_json(self) -> dict[str, Any]:
        """Return the object of `fed-dpsd privacy audit --json`."""
        proven = self.proof.epsilon.to_json()
        return self.audit.to_json() | {
            "title": self.title,
            "mechanism": str(self.mechanism),
            "epsilon_proven": proven["epsilon"],
            "mu_proven": self.proof.mu,
            "advantage_proven": self.proof.advantage,
            "proven": proven,
            "contradicts": self.contradicts,
            "epsilon_published": "inf" if math.isinf(self.published) else self.published,
            "published_refuted": self.audit.refutes(
                self.published, self._published_delta, self.proof.epsilon.queries
            ),
            "verdict": self.verdict(),
        }


def attacks(experiment: Experiment, broken: victims.Broken | None, say: Say) -> Iterator[Attack]:
    """Attack the implementation, and last the run's own settings.

    Args:
        experiment: the experiment whose training and answers are claimed.
        broken: the attacked hospital's noise: half of it, or next to none; None leaves it.
        say: called with a line of progress.

    Raises:
        UserError: nothing that is released is randomised.
    """
    private = isinstance(experiment.training, DPSGD)
    randomised = not isinstance(experiment.answers.event("record", "add_remove"), NonPrivateDpEvent)
    answered = any(stage.mechanism == experiment.answers for stage in plan_of(experiment).stages)
    if not (private or (randomised and answered)):
        unused = f"method {type(experiment.method).__name__} releases no answers"
        raise UserError(
            f"privacy audit: training={experiment.training.name} and "
            f"answers={experiment.answers.name} leave nothing to audit: "
            f"{unused if randomised else 'no noise is drawn in answers'}, and no epsilon of a "
            "record holds; audit training=dp_sgd, or method=fed_dpsd with answers=gradient, votes, "
            "noisy_max or label"
        )
    with torch_threads(experiment.config.threads_client):
        if private:
            yield from _training(experiment, broken, say)
        if randomised and answered:
            yield from _answers(experiment, broken, say)


# --- answers ----------------------------------------------------------------------------------


def _answers(experiment: Experiment, broken: victims.Broken | None, say: Say) -> Iterator[Attack]:
    mechanism, config = experiment.answers, experiment.config
    alone = mechanism.releases(1, 2) != 2
    plan = plan_of(experiment)
    stages = [stage for stage in plan.stages if stage.mechanism == mechanism]
    asked = sum(stage.asks * stage.queries for stage in stages)
    queries = sum(stage.asks for stage in stages) if alone else asked
    secrets, delta = _secrets(config, "answers"), config.privacy.delta

    close = _close(
        mechanism,
        lambda trial: _own_epsilon(trial, CLOSE_QUERIES, CLOSE_DELTA, "replace_one"),
    )
    runs = ALONE_RUNS if alone else CLOSE_RUNS
    say(f"the implementation: {runs:,} runs of {CLOSE_QUERIES} answers in each of two worlds")
    client = victims.hospital(config, victims.break_noise(close, broken), secrets, seeded=False)
    result = audit(
        close,
        client,
        CLOSE_QUERIES,
        runs,
        CLOSE_DELTA,
        CLOSE_FAILURE,
        report_mu=_answers_mu(close, 1) is not None,
    )
    yield Attack("the implementation", close, result, _answers_proof(close, CLOSE_QUERIES, result))

    # A sum of many gradients costs more than one of a single image, which is what is attacked.
    larger = mechanism.releases(1, 2) > 2
    title = (
        "the run's noise, asks of one image, which cost less than the run's" if larger else TITLE
    )
    say(f"{title}: {CLAIM_RUNS:,} runs of {queries:,} answers in each of two worlds")
    attacked = victims.break_noise(mechanism, broken)
    if isinstance(attacked, TopKRandomizedResponse):
        result = enumerated(attacked, queries)
    else:
        client = victims.hospital(config, attacked, secrets, experiment.seeded)
        result = audit(
            mechanism, client, queries, CLAIM_RUNS, delta, CLAIM_FAILURE, report_mu=False
        )
    yield Attack(
        title,
        mechanism,
        result,
        _answers_proof(mechanism, queries, result, delta),
        published_epsilon(mechanism, asked, delta),
        tests_code=False,
        beside=_beside(experiment, plan),
    )


def _beside(experiment: Experiment, plan: Plan) -> str:
    """Say what a run releases besides its answers, and what its card says of all together."""
    others = {s.mechanism.name for s in plan.stages if s.mechanism != experiment.answers}
    if not others:
        return ""
    card = PrivacyCard(privacy_card(experiment, plan), "planned")
    return (
        f"this is about the answers alone; the run releases {' and '.join(sorted(others))} too, "
        f"and its card says {card.epsilon('record', 'replace_one')}"
    )


def _answers_mu(mechanism: Mechanism, queries: int) -> float | None:
    mu = gaussian_mu(mechanism.event("record", "replace_one"))
    return None if mu is None else mu * math.sqrt(queries)


def _answers_proof(
    mechanism: Mechanism, queries: int, result: Audit, delta: float = CLOSE_DELTA
) -> Proof:
    proven = _own_epsilon(mechanism, queries, delta, result.relation)
    return Proof(proven, _answers_mu(mechanism, queries))


# --- trainings --------------------------------------------------------------------------------


def _training(experiment: Experiment, broken: victims.Broken | None, say: Say) -> Iterator[Attack]:
    config, mechanism = experiment.config, experiment.training
    assert isinstance(mechanism, DPSGD)
    secrets, delta = _secrets(config, "training"), config.privacy.delta
    most = max(FEWEST_STEPS, math.ceil(TIMES_SAMPLED / mechanism.sample_rate))
    few = dataclasses.replace(mechanism, steps=min(mechanism.steps, most), count_fraction=None)
    close = _close(few, lambda trial: _own_epsilon(trial, 0, CLOSE_DELTA, "add_remove"))
    runs = int(np.clip(STEPS_IN_ALL // close.steps, *RUNS))
    own_runs = int(np.clip(STEPS_IN_ALL // mechanism.steps, *OWN_RUNS))
    steps = [close.steps] * (runs + victims.PILOT + ASKED_RUNS)
    trainings = _reported(secrets, steps + [mechanism.steps] * (victims.PILOT + own_runs))
    canaries = math.ceil(CANARIES / math.sqrt(close.places))
    linear = make_teacher(config, 0, 0).fixed
    say(f"the training's steps: {runs:,} trainings of {close.steps:,} steps, {canaries} canaries")
    guesses = guess_steps(
        victims.break_noise(close, broken), close, canaries, linear, trainings, runs
    )
    advantage = steps_advantage(close)
    audited = f"{'a linear layer' if linear else 'a network'} trained by DP-SGD"
    yield Attack(
        "the training's steps (worst-case records, no class counts, weights that stand still)",
        close,
        conclude(guesses, delta, TRAINING_FAILURE, 0, WHITE_BOX, audited, close.unit),
        _training_proof(close, 0, delta, advantage),
    )

    if mechanism.counts_classes:
        counting = dataclasses.replace(close, count_fraction=1.0)
        say(f"the class counts: {COUNTED_RUNS} releases, {COUNTED_CANARIES:,} canaries")
        guesses = guess_counts(
            victims.break_noise(counting, broken), COUNTED_CANARIES, secrets, COUNTED_RUNS
        )
        event = GaussianDpEvent(counting.count_noise)
        yield Attack(
            f"the class counts (one {close.unit} a class)",
            counting,
            conclude(guesses, delta, TRAINING_FAILURE, 0, COUNTS, "class counts", close.unit),
            Proof(_event_epsilon(event, delta, mechanism), gaussian_mu(event)),
        )

    say(f"released probabilities: {ASKED_RUNS} trainings on up to {victims.CANARIES} images")
    attacked = victims.break_noise(close, broken)
    guesses = victims.guess_answers(config, attacked, trainings, ASKED_RUNS)
    yield _black_box(
        "the probabilities of trained teachers (images that are far from parallel, no others)",
        close,
        guesses,
        delta,
        advantage,
        tests_code=close.sample_rate == 1,  # sampled, an image moves final weights by little
    )

    say(f"the run's settings: {own_runs} trainings of {mechanism.steps:,} steps, as before")
    attacked = victims.break_noise(mechanism, broken)
    guesses = victims.guess_answers(config, attacked, trainings, own_runs)
    yield _black_box(
        "the run's settings: probabilities of trained teachers",
        mechanism,
        guesses,
        delta,
        advantage=None,
        tests_code=False,
    )


def _black_box(
    title: str,
    claimed: DPSGD,
    guesses: Guesses,
    delta: float,
    advantage: float | None,
    tests_code: bool,
) -> Attack:
    queries, audited = victims.CANARIES, "released probabilities"
    failure, unit = TRAINING_FAILURE, claimed.unit
    result = conclude(guesses, delta, failure, queries, BLACK_BOX, audited, unit)
    proof = _training_proof(claimed, queries, delta, advantage)
    return Attack(title, claimed, result, proof, tests_code=tests_code)


def _training_proof(mechanism: DPSGD, queries: int, delta: float, advantage: float | None) -> Proof:
    proven = _own_epsilon(mechanism, queries, delta, "add_remove")
    return Proof(proven, gaussian_mu(mechanism.event(mechanism.unit, "add_remove")), advantage)


# --- claims -----------------------------------------------------------------------------------


def _close(mechanism: Any, spend: Callable[[Any], Epsilon]) -> Any:
    """Calibrate the mechanism's noise so that it spends CLOSE_EPSILON."""
    field = mechanism.calibrated_by

    def value_at(setting: float) -> float:
        return spend(dataclasses.replace(mechanism, **{field: setting})).value

    setting = calibrate(value_at, CLOSE_EPSILON, *CALIBRATED_BETWEEN[field])
    return dataclasses.replace(mechanism, **{field: setting})


def _own_epsilon(mechanism: Charged, queries: int, delta: float, relation: Relation) -> Epsilon:
    """Prove an epsilon for `queries` asks of one query each; a training is one release.

    It is for a record, or for the unit that a training bounds.
    """
    if isinstance(mechanism, DPSGD):
        return prove([Stage(mechanism, 1, queries)], delta, mechanism.unit, relation)
    return prove([Stage(mechanism, queries, 1)], delta, "record", relation)


def _event_epsilon(event: DpEvent, delta: float, mechanism: DPSGD) -> Epsilon:
    bound = epsilon(event, delta)
    return Epsilon(
        *(bound.epsilon, bound.delta, mechanism.unit, "add_remove", trust_of(mechanism.noise_at)),
        *(bound.accountant, 0),
    )


def _reported(secrets: Iterator[SecretStreams], steps: Sequence[int]) -> Iterator[SecretStreams]:
    """Yield a secret for each training, and report its steps when the next one begins."""
    with reporting("steps of trainings", sum(steps)) as task:
        for count, secret in zip(steps, secrets, strict=False):
            yield secret
            task.advance(count)


def _secrets(config: Config, purpose: str) -> Iterator[SecretStreams]:
    for number in itertools.count():
        name = f"audit of {purpose} {config.seed} {number}".encode()
        yield SecretStreams(hashlib.sha256(name).digest())
