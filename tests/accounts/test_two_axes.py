"""Two axes: what is proven by the training and by the answers, and the charges it relies on."""

import contextlib
import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fed_dpsd.accounts.account import Account, BudgetSpent
from fed_dpsd.accounts.card import ledger_epsilons, ledgers_at, privacy_card
from fed_dpsd.accounts.ledger import MemoryLedger
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import ConfigError, ProtocolError, UserError
from fed_dpsd.methods.fed_dpsd import FedDPSD
from fed_dpsd.privacy.accounting import Stage, best_bound
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, Probabilities
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.training import ClassCounts
from fed_dpsd.protocol import Request
from fed_dpsd.server.run import run
from fed_dpsd.server.run_folder import new_run_folder
from tests import proofs
from tests.every import every
from tests.proofs import bases, gaussian_epsilon, spent

TRAININGS = ("training=plain",), ("training=dp_sgd", "training.steps=2", "model=scattering")
ANSWERS = "label", "gradient", "votes", "probabilities"
COMBINATIONS = list(itertools.product(TRAININGS, ANSWERS))
PRIVATE = *TRAININGS[1], "answers=label", "rounds=1", "queries_per_round=16"
PATIENT = ("patient", "add_remove")


def finished(experiment):
    folder = new_run_folder(experiment)
    return folder, run(experiment, LocalFederation(experiment, folder), folder, lambda line: None)


def row(card, unit="record", relation="add_remove"):
    return next(r for r in card["proven"] if (r["unit"], r["relation"]) == (unit, relation))


def by(card, basis, unit="record", relation="add_remove"):
    """The epsilon of a basis, whether it is the claim or listed with it."""
    return proofs.by(row(card, unit, relation), basis)


@pytest.mark.slow
@every(("training", "answers"), COMBINATIONS)
def test_the_plan_is_what_ledgers_hold_for_every_combination(small, training, answers):
    """By both proofs, for each unit and relation; the claim is the smaller number."""
    experiment = small(*training, f"answers={answers}", "rounds=2", "queries_per_round=16")
    folder, summary = finished(experiment)
    plan, card = experiment.plan, summary["privacy"]
    for entries in ledgers_at(folder).values():
        for unit, relation in UNITS_AND_RELATIONS:
            values = {}
            for basis, stages in bases(plan).items():
                charged = best_bound(spent(entries, unit, relation, basis), 1e-5).epsilon
                events = [stage.event(unit, relation) for stage in stages]
                planned = best_bound(dp_composed(events), 1e-5).epsilon
                assert charged == pytest.approx(planned)
                values[basis] = planned
                assert by(card, basis, unit, relation) == pytest.approx(planned)
            found = row(card, unit, relation)
            if found["basis"] == "contraction":
                assert training != TRAININGS[0]
                assert float(found["epsilon"]) < min(values.values())
            else:
                assert float(found["epsilon"]) == pytest.approx(min(values.values()))
    assert (card["training"], card["answers"]) == (experiment.training.name, answers)


def dp_composed(events):
    from dp_accounting import ComposedDpEvent

    return ComposedDpEvent(events)


@pytest.mark.slow
@settings(
    max_examples=6,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    first=st.sampled_from(COMBINATIONS),
    second=st.sampled_from(COMBINATIONS),
    rounds=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    budget=st.sampled_from([None, 50.0, 2000.0]),
    resumed=st.booleans(),
)
def test_two_runs_on_a_ledger_are_covered_whatever_their_axes(
    small, tmp_path_factory, first, second, rounds, budget, resumed
):
    """Refusals and resumed runs included: each card covers its own charges, by each proof."""
    ledger = tmp_path_factory.mktemp("ledger")
    limit = f"privacy.budget={'null' if budget is None else budget}"
    for (training, answers), count in zip((first, second), rounds, strict=True):
        experiment = small(
            *training,
            f"answers={answers}",
            f"rounds={count}",
            "queries_per_round=8",
            limit,
            f"ledger={ledger}",
            f"out={tmp_path_factory.mktemp('runs')}",
        )
        folder, spent_out = new_run_folder(experiment), False
        for _ in range(1 + resumed):
            try:
                summary = run(
                    experiment, LocalFederation(experiment, folder), folder, lambda line: None
                )
            except (ProtocolError, UserError) as nobody_answers:
                spent_out = "budget is spent" in str(nobody_answers)
                break
        if spent_out:
            return
        for entries in ledgers_at(ledger).values():
            own = [entry for entry in entries if entry.run == folder.name]
            for (unit, relation), basis in itertools.product(
                UNITS_AND_RELATIONS, bases(experiment.plan)
            ):
                charged = best_bound(spent(own, unit, relation, basis), 1e-5).epsilon
                assert charged <= by(summary["privacy"], basis, unit, relation) * (1 + 1e-9)
    for entries in ledgers_at(ledger).values():
        covered = {entry.training for entry in entries} - {""}
        assert covered <= {entry.digest for entry in entries if entry.kind == "training"}
        if budget is not None:
            found = ledger_epsilons(entries, 1e-5, "record", "add_remove")
            assert found.get("training", found["answers"]).value <= budget


# --- the smaller of two true statements, only if nothing else leaves ---


def test_answers_prove_something_for_patients_only_without_class_counts(small):
    counted = privacy_card(e := small(*PRIVATE), e.plan)
    assert row(counted, *PATIENT)["epsilon"] == "inf"
    assert "class counts" in counted["reason"]
    alone = privacy_card(e := small(*PRIVATE, "method.class_counts=false"), e.plan)
    found = row(alone, *PATIENT)
    assert found["epsilon"] == pytest.approx(160, rel=1e-3)  # 16 responses at 10
    assert found["basis"] == "answers"
    assert found["beside"] == [{"basis": "training", "trust": "nobody", "epsilon": "inf"}]
    assert alone["reason"] is None


@every("method", ["fedavg", "ensemble", "dpsd method.discriminator=teacher"])
def test_weights_prove_nothing_for_patients(small, method):
    name, *more = method.split()
    more = [*more, "method.generator_steps=1", "num_clients=1"] if more else []
    e = small(*PRIVATE, f"method={name}", *more)
    card = privacy_card(e, e.plan)
    assert row(card, *PATIENT)["epsilon"] == "inf"
    assert by(card, "answers") == math.inf  # nor for a record, but for the training
    assert row(card)["basis"] == "training"
    assert math.isfinite(row(card)["epsilon"])


@every("leak", ["counts", "weights"])
def test_what_leaks_past_the_plan_is_on_the_card(small, monkeypatch, leak):
    """A method that sends class counts or weights without planning them claims no less."""
    experiment = small(*PRIVATE, "method.class_counts=false")
    assert row(privacy_card(experiment, experiment.plan), *PATIENT)["epsilon"] != "inf"
    answer = FedDPSD.client

    def leaking(self, request, site):
        if leak == "counts":
            shape, classes = site.config.data.shape, site.config.data.num_classes
            asked = Request.without_images("counts", shape, classes)
            site.release(ClassCounts(site.training), site.class_counts(asked), asked)
        else:
            site.release(Probabilities(), site.sensitive_probabilities(request.images), request)
        return answer(self, request, site)

    monkeypatch.setattr(Account, "due", unplanned_is_admitted(Account.due))
    monkeypatch.setattr(FedDPSD, "client", leaking)
    _, summary = finished(experiment)
    assert row(summary["privacy"], *PATIENT)["epsilon"] == "inf"


def unplanned_is_admitted(due):
    """An account that forgets to compare a charge with the plan."""

    def wrong(self, mechanism, digest, kind, request=None, training="", reserved=0):
        self._acknowledged = {mechanism.name: 10**9}
        return due(self, mechanism, digest, kind, request, training, reserved)

    return wrong


# --- budgets, and what is refused ---


def paid(ledger, budget, training, releases):
    """What an account admits: training, and then answers that it covers."""
    answers = TopKRandomizedResponse(10, 10.0)
    plan = Plan(training, (Stage(answers, releases, 1),))
    config = dataclasses.make_dataclass("Settings", ["budget", "delta", "budget_relation"])
    own = Account(ledger, config(budget, 1e-5, "add_remove"), plan, "run")
    with ledger.transaction():
        own.pay(training, "training", "training")
        for number in range(releases):
            request = Request(
                number, np.zeros((1, 1, 8, 8), np.uint8), np.full((1, 10), 0.1, np.float32)
            )
            own.pay(answers, f"answer {number}", "answers", request, "training")
    return own


def test_a_budget_charges_the_training_and_not_what_it_covers():
    training = DPSGD(14.3, 1.0, 100, 1.0, 0.02)
    ledger = MemoryLedger()
    paid(ledger, 4.0, training, 50)
    with ledger.transaction():
        entries = ledger.entries()
    assert best_bound(spent(entries, "record", "add_remove", "training"), 1e-5).epsilon < 4
    assert best_bound(spent(entries, "record", "add_remove", "answers"), 1e-5).epsilon == (
        pytest.approx(500, rel=1e-3)
    )
    with pytest.raises(BudgetSpent, match="budget is spent"):
        paid(MemoryLedger(), 2.0, training, 1)


@pytest.mark.slow
def test_a_ledger_of_private_and_plain_runs_by_hand():
    """Numbers by Gaussian DP alone: mu^2 of training, of answers that it covers, and of others.

    A proof that takes the cheaper of the two for each entry would have the smallest of the three.
    """
    training, ledger = DPSGD(14.3, 1.0, 100, 1.0, 0.02), MemoryLedger()  # releases no counts
    covered = NormalizedGradient(10, 40.0)
    plain = NormalizedGradient(10, 200.0)
    plan = Plan(training, (Stage(covered, 300, 1), Stage(plain, 3000, 1)))
    config = dataclasses.make_dataclass("Settings", ["budget", "delta", "budget_relation"])
    own = Account(ledger, config(3.5, 1e-5, "add_remove"), plan, "run")
    admitted = 0
    with ledger.transaction():
        own.pay(training, "training", "training")
        for number in range(300):
            own.pay(covered, f"covered {number}", "answers", asked(number), "training")
        with contextlib.suppress(BudgetSpent):
            for number in range(3000):
                own.pay(plain, f"plain {number}", "answers", asked(number))
                admitted += 1
        entries = ledger.entries()
    trained, answered, others = 100 / 14.3**2, 300 * (2 / 40) ** 2, admitted * (2 / 200) ** 2
    found = ledger_epsilons(entries, 1e-5, "record", "add_remove")
    by_training, by_answers = found["training"].value, found["answers"].value
    assert by_training == pytest.approx(gaussian_epsilon((trained + others) ** 0.5), rel=1e-3)
    assert by_answers == pytest.approx(gaussian_epsilon((answered + others) ** 0.5), rel=1e-3)
    assert gaussian_epsilon(others**0.5) < 0.7 * min(by_training, by_answers)
    # A budget counts the training and the plain answers, and stops where these reach it.
    assert 100 < admitted < 3000
    assert 0.8 * 3.5 < by_training <= 3.5
    assert {proof.trust for proof in found.values()} == {"nobody"}
    together = found["contraction"].value  # the covered answers contract, the others add up
    assert gaussian_epsilon(others**0.5) < together < min(by_training, by_answers)


def test_a_ledgers_trust_is_what_its_answers_need():
    """Answers whose noise the server added need its honesty, unless the training covers them."""
    training, ledger = DPSGD(14.3, 1.0, 100, 1.0, 0.02), MemoryLedger()
    answers = NormalizedGradient(10, 1000.0, noise_at="server")
    plan = Plan(training, (Stage(answers, 1, 1),))
    config = dataclasses.make_dataclass("Settings", ["budget", "delta", "budget_relation"])
    own = Account(ledger, config(None, 1e-5, "add_remove"), plan, "run")
    with ledger.transaction():
        own.pay(training, "training", "training")
        own.pay(answers, "answer", "answers", asked(0), "training")
        found = ledger_epsilons(ledger.entries(), 1e-5, "record", "add_remove")
    assert {basis: proof.trust for basis, proof in found.items()} == {
        "contraction": "server",
        "answers": "server",
        "training": "nobody",
    }
    assert list(found) == ["contraction", "answers", "training"]  # the smallest first


def asked(number):
    return Request(number, np.zeros((1, 1, 8, 8), np.uint8), np.full((1, 10), 0.1, np.float32))


@every(
    ("answers", "noiseless"),
    [
        ("label", "answers.epsilon_per_answer=inf"),
        ("gradient", "answers.noise_multiplier=0"),
        ("votes", "answers.noise_multiplier=0"),
    ],
)
def test_answers_without_noise_need_a_private_training(small, answers, noiseless):
    with pytest.raises(ConfigError, match=r"need noise in their answers; use training=dp_sgd"):
        small("training=plain", f"answers={answers}", noiseless)
    experiment = small(*PRIVATE, f"answers={answers}", noiseless)
    card = privacy_card(experiment, experiment.plan)
    assert row(card)["basis"] == "training"
    assert by(card, "answers") == math.inf
