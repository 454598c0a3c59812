"""Attacks on answers: the site, its sampler and its messages (for training: trainings.py).

The attacked hospital may be broken on purpose; the claim never is. An audit's secrets are derived
from the run's seed, so that it can be repeated; they protect nothing.
"""

import math
from collections.abc import Iterator

from fed_dpsd.accounts.card import PrivacyCard, plan_of, privacy_card
from fed_dpsd.audits import victims
from fed_dpsd.audits.black_box import Proof, audit, enumerated
from fed_dpsd.audits.claims import (
    ATTACK_FAILURE,
    CLOSE_DELTA,
    Attack,
    Say,
    close_to,
    own_epsilon,
    secrets_of,
)
from fed_dpsd.experiment import Experiment
from fed_dpsd.privacy.gdp import gaussian_mu
from fed_dpsd.privacy.mechanism import Mechanism
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.published import published_epsilon
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.training import TrainingMechanism

CLOSE_QUERIES, CLOSE_RUNS = 4, 100_000
ALONE_RUNS = 2_000  # fewer if each release needs its own request
CLAIM_RUNS, CLAIM_FAILURE = 300, 1e-6


def answer_attacks(
    experiment: Experiment, broken: victims.Broken | None, say: Say
) -> Iterator[Attack]:
    """Attack answers at settings where audit and proof are close, then at the run's own."""
    mechanism, config = experiment.answers, experiment.config
    alone = mechanism.releases(1, 2) != 2
    plan = plan_of(experiment)
    stages = [stage for stage in plan.stages if stage.mechanism == mechanism]
    asked = sum(stage.requests * stage.queries for stage in stages)
    queries = sum(stage.requests for stage in stages) if alone else asked
    secrets, delta = secrets_of(config, "answers"), config.privacy.delta

    close = close_to(
        mechanism, lambda trial: own_epsilon(trial, CLOSE_QUERIES, CLOSE_DELTA, "replace_one")
    )
    runs = ALONE_RUNS if alone else CLOSE_RUNS
    say(f"the implementation: {runs:,} runs of {CLOSE_QUERIES} answers in each of two worlds")
    client = victims.hospital(config, victims.break_noise(close, broken), secrets, seeded=False)
    proof = _proof(close, CLOSE_QUERIES, CLOSE_DELTA)
    settings = CLOSE_QUERIES, runs, CLOSE_DELTA, ATTACK_FAILURE
    result = audit(close, client, *settings, report_mu=_mu(close, 1) is not None)
    key = "answers_check" if isinstance(experiment.training, TrainingMechanism) else "check"
    yield Attack(key, "the implementation", close, result, proof)

    # Only a single image's gradient is attacked; a sum of many gradients costs more.
    larger = mechanism.releases(1, 2) > 2
    title = "the run's settings"
    if larger:
        title = "the run's noise on requests of one image, which cost less than the run's requests"
    say(f"{title}: {CLAIM_RUNS:,} runs of {queries:,} answers in each of two worlds")
    attacked = victims.break_noise(mechanism, broken)
    if isinstance(attacked, TopKRandomizedResponse):
        result = enumerated(attacked, queries)
    else:
        client = victims.hospital(config, attacked, secrets, experiment.seeded)
        settings = queries, CLAIM_RUNS, delta, CLAIM_FAILURE
        result = audit(mechanism, client, *settings, report_mu=False)
    yield Attack(
        "claim",
        title,
        mechanism,
        result,
        _proof(mechanism, queries, delta),
        published_epsilon(mechanism, asked, delta),
        tests_code=False,
        also=_also_released(experiment, plan),
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


def _mu(mechanism: Mechanism, queries: int) -> float | None:
    mu = gaussian_mu(mechanism.event("record", "replace_one"))
    return None if mu is None else mu * math.sqrt(queries)


def _proof(mechanism: Mechanism, queries: int, delta: float) -> Proof:
    return Proof(own_epsilon(mechanism, queries, delta, "replace_one"), _mu(mechanism, queries))
