"""All places that print a run's epsilons agree: random experiments, all units."""

import dataclasses
import itertools
import json
import math
import random
from types import SimpleNamespace

import pytest

from fed_dpsd.accounts.account import Account
from fed_dpsd.accounts.card import ledger_epsilons, privacy_card
from fed_dpsd.accounts.ledger import MemoryLedger
from fed_dpsd.accounts.words import PrivacyCard, short
from fed_dpsd.claims import smallest_claim
from fed_dpsd.papers.dgd import DGD
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.epsilon import Epsilon, rounded_up
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, KeptTeachers, Probabilities, Shards
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.training import Plain, TrainingMechanism
from fed_dpsd.privacy.votes import NoisyVotes
from fed_dpsd.report import guarantee
from fed_dpsd.server import cards
from fed_dpsd.server.summary import blank_summary, result_line

METHODS = (
    "fed_dpsd", "fedavg", "ensemble", "dense", "feddf", "local", "central", "dp_dfd", "dgd",
    "dpsd", "paper_fed_dpsd",
)  # fmt: skip
EXPERIMENTS = 1_000


def trainings(draw):
    if draw.random() < 0.25:
        return Plain()
    rate, steps = draw.choice([(1.0, 100), (1.0, 100), (1.0, 10), (0.1, 30)])
    unit = draw.choice(["record", "record", "patient"]) if rate == 1 else "record"
    return DPSGD(
        noise_multiplier=draw.choice([2.0, 14.3, 60.0]) if rate == 1 else 2.0,
        sample_rate=rate,
        steps=steps,
        max_grad_norm=1.0,
        learning_rate=0.02,
        count_fraction=draw.choice([None, 0.05]),
        unit=unit,
        records_per_patient=2 if unit == "patient" else 1,
    )


def answers(draw, shards):
    return draw.choice(
        [
            lambda: NormalizedGradient(10, draw.choice([50.0, 240.0, 900.0]), shards=shards),
            lambda: NormalizedGradient(10, 240.0, noise_at="server", shards=shards),
            lambda: TopKRandomizedResponse(10, draw.choice([0.1, 1.0, 10.0]), shards=shards),
            lambda: TopKRandomizedResponse(10, 0.1, k=3, shards=shards),
            lambda: NoisyVotes(10, draw.choice([30.0, 200.0]), shards=shards),
            lambda: NoisyVotes(10, 200.0, "laplace", shards=shards),
            lambda: NoisyMax(10, 100.0, shards=shards),
            Probabilities,
        ]
    )()


def experiments(small, seed, number):
    """Random experiments: methods, and mechanisms on both axes with random parameters."""
    draw = random.Random(seed)
    known = {}
    for _ in range(number):
        method = draw.choice(METHODS)
        if method not in known:
            more = ["num_clients=1"] if method in ("central", "dp_dfd") else []
            more += ["teacher.same_start=true"] if method == "fedavg" else []
            more += ["answers=noisy_max"] if method == "dgd" else []
            known[method] = small(f"method={method}", *more)
        base, training = known[method], trainings(draw)
        private = isinstance(training, TrainingMechanism)
        by = draw.choice(["record", "patient"])
        by = "patient" if private and training.unit == "patient" else by
        shards = Shards(draw.choice([1, 1, 5]), by, silent=not private)
        config = dataclasses.replace(
            base.config,
            rounds=draw.choice([1, 3]),
            queries_per_round=draw.choice([8, 64]),
            teachers_per_client=shards.teachers,
        )
        chosen = base.method
        if isinstance(chosen, DGD):
            chosen = dataclasses.replace(chosen, baseline=trainings(draw))
        yield dataclasses.replace(
            base, config=config, method=chosen, training=training, answers=answers(draw, shards)
        )


def charged(experiment, plan):
    """The ledger of a client that has paid for the whole plan."""
    ledger = MemoryLedger()
    settings = dataclasses.replace(experiment.config.privacy, budget=None)
    own, numbers = Account(ledger, settings, plan, "run"), itertools.count()

    def request(stage, number):
        return SimpleNamespace(query_id=number, queries=stage.queries, digest=f"{number}")

    with ledger.transaction():
        digests = [f"training {number}" for number in range(plan.trainings)]
        for stage, digest in itertools.product(plan.training_stages, digests):
            own.pay(stage.mechanism, digest, "training")
        for index, stage in enumerate(plan.stages):
            covered = bool(plan.training_stages) and stage.mechanism.from_teachers
            covering = digests[min(index, len(digests) - 1)] if covered else ""
            for _ in range(stage.requests):
                number = next(numbers)
                kept = isinstance(stage.mechanism, KeptTeachers)
                asked = None if kept else request(stage, number)
                own.pay(stage.mechanism, f"{number}", "answers", asked, covering)
        return ledger.entries()


def check(experiment):
    """Compare every place that prints the epsilons of a whole run."""
    plan, delta = experiment.plan, experiment.config.privacy.delta
    entries = charged(experiment, plan)
    planned = privacy_card(experiment, plan)
    card = privacy_card(experiment, plan, [entries], plan.releases)
    summary = blank_summary(experiment, "local") | {"privacy": card}
    bases = set()
    for row, before in zip(card["proven"], planned["proven"], strict=True):
        unit, relation, value = row["unit"], row["relation"], float(row["epsilon"])
        claim = Epsilon.from_json(row)
        ledger = next(iter(ledger_epsilons(entries, delta, unit, relation).values()))
        stated = smallest_claim(plan, plan.releases, delta, unit, relation)
        numbers = [float(before["epsilon"]), float(row["planned"]), float(row["spent"])]
        numbers += [ledger.value, stated.value]
        assert numbers == pytest.approx([value] * 5, rel=1e-9)
        assert (before["basis"], before["trust"]) == (row["basis"], row["trust"])
        assert ledger.trust == row["trust"] or math.isinf(value)
        assert claim.number in cards._cells(row)
        assert guarantee.epsilon_clause(row, card["colluding"]).startswith(
            f"epsilon {rounded_up(value)} ({unit}, "
        )
        assert PrivacyCard(card).epsilon(unit, relation).value == value
        bases.add(row["basis"])
    said = short(PrivacyCard(card))
    assert said in result_line(experiment, summary)
    if plan.stages:
        for row in card["proven"][:2]:
            assert f"{Epsilon.from_json(row).number} (" in said
    assert json.loads(json.dumps(card)) == card
    return bases


@pytest.mark.slow(seconds=12)
@pytest.mark.parametrize("part", range(4))
def test_a_thousand_random_experiments_print_one_number_everywhere(small, part):
    found = set()
    for experiment in experiments(small, part, EXPERIMENTS // 4):
        found |= check(experiment)
    assert found == {"training", "answers", "contraction"}


def test_some_random_experiments_print_one_number_everywhere(small):
    """As above, a fast sample."""
    for experiment in experiments(small, 99, 6):
        check(experiment)


def test_a_ledger_that_forgets_what_the_proof_rests_on_is_found(small):
    """The control: a ledger of local teachers without their release claims that nothing left."""
    experiment = small("method=local", "training=dp_sgd", "training.count_fraction=null")
    plan = experiment.plan
    entries = charged(experiment, plan)
    for pair in UNITS_AND_RELATIONS:
        claim = PrivacyCard(privacy_card(experiment, plan)).epsilon(*pair).value
        right = next(iter(ledger_epsilons(entries, 1e-5, *pair).values())).value
        wrong = next(iter(ledger_epsilons(entries[:1], 1e-5, *pair).values())).value
        assert right == claim > wrong == 0
