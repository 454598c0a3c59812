"""A new event is one class and its law: plans, charges, ledgers and budgets then know it."""

import math

import attrs
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    RandomizedResponseDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from fed_dpsd.accounts.account import Account, needed_budget
from fed_dpsd.accounts.card import ledger_epsilons
from fed_dpsd.accounts.database import read_ledger
from fed_dpsd.accounts.ledger import FileLedger
from fed_dpsd.claims import charges_of_plan, claims
from fed_dpsd.config import PrivacyConfig
from fed_dpsd.privacy import events
from fed_dpsd.privacy.accounting import Stage, best_bound
from fed_dpsd.privacy.events import Law, UnsupportedEventError, law_of, register
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.training import Plain

DELTA, EPSILON = 1e-5, 0.5


@attrs.frozen
class FlippedBitDpEvent(DpEvent):
    """A bit that is true with probability 1 / (1 + exp(-epsilon))."""

    epsilon: float


class FlippedBitLaw(Law):
    @property
    def pure(self):
        return self.event.epsilon

    def renyi(self, order):
        return law_of(same(self.event)).renyi(order)

    @property
    def grid(self):
        return self.pure

    def losses(self, step):
        truth, jump = 1 / (1 + math.exp(-self.pure)), math.ceil(self.pure / step - 1e-9)
        masses = {jump: truth, -jump: 1 - truth}
        return PrivacyLossDistribution.create_from_rounded_probability(masses, 0.0, step)


class FlippedBits(TopKRandomizedResponse):
    """Binary responses that a plan and a ledger count as flipped bits, one a request."""

    def releases(self, requests, queries):
        return requests

    def event(self, unit, relation):
        return FlippedBitDpEvent(self.epsilon_per_answer)


def same(event):
    """The same mechanism, as an event of the library."""
    return RandomizedResponseDpEvent(2 / (1 + math.exp(event.epsilon)), 2)


BITS = FlippedBits(10, EPSILON, k=2)
GRADIENTS = NormalizedGradient(10, 20.0)


@pytest.fixture
def known():
    """Registers the law of flipped bits for one test."""
    register(FlippedBitDpEvent)(FlippedBitLaw)
    yield
    del events.EVENTS["FlippedBitDpEvent"], events._LAWS[FlippedBitDpEvent]


def planned(plan):
    charges = charges_of_plan(plan, plan.releases, "record", "add_remove")
    return claims(charges, DELTA, "record", "add_remove", plan.queries)["answers"].value


def times(event, count):
    return SelfComposedDpEvent(event, count)


def bound(event):
    whole = ComposedDpEvent(event) if isinstance(event, list) else event
    return best_bound(whole, DELTA).epsilon


@pytest.mark.slow(seconds=8)
def test_a_new_event_plans_charges_and_is_read_from_a_ledger(known, tmp_path):
    plan = Plan(Plain(), (Stage(BITS, 100, 1), Stage(GRADIENTS, 1, 3)))
    settings = PrivacyConfig(DELTA, None, None, None)
    settings = PrivacyConfig(DELTA, None, needed_budget(settings, plan), None)
    account = Account(FileLedger(tmp_path, 0, "digits"), settings, plan, "run")
    with account.ledger.transaction():
        assert not account.exceeded_limit(())
        for number in range(100):
            account.pay(BITS, f"bit {number}", "answers")
        account.plan = Plan(Plain(), (Stage(BITS, 1000, 1),))
        assert account.exceeded_limit(()) == "budget"
    entries = read_ledger(tmp_path / "client_000.sqlite")
    assert {entry.costs["record", "add_remove"] for entry in entries} == {BITS.event("record", "")}
    spent = ledger_epsilons(entries[:100], DELTA, "record", "add_remove")["answers"].value
    assert spent == bound(times(FlippedBitDpEvent(EPSILON), 100)) < planned(plan)


def test_a_new_event_has_the_epsilon_of_its_mechanism(known):
    event, other = FlippedBitDpEvent(EPSILON), GaussianDpEvent(2.0)
    for more in ([], [other]):
        ours, known_one = (bound([times(e, 100), *more]) for e in (event, same(event)))
        assert ours == pytest.approx(known_one, rel=1e-6)
        assert bound([times(FlippedBitDpEvent(2 * EPSILON), 100), *more]) > 1.5 * ours
    assert bound(FlippedBitDpEvent(9.0)) == pytest.approx(9, rel=1e-5)


def test_an_event_without_a_law_is_refused():
    with pytest.raises(UnsupportedEventError, match="FlippedBitDpEvent"):
        bound(FlippedBitDpEvent(EPSILON))


def test_no_second_law_replaces_an_events():
    for event in (GaussianDpEvent, events.ReservedDpEvent):
        with pytest.raises(ValueError, match="already known"):
            register(event)
    assert law_of(GaussianDpEvent(2.0)).renyi(2.0) == 0.25


def test_a_release_without_protection_loses_everything():
    law = law_of(NonPrivateDpEvent())
    assert law.pure == law.renyi(2.0) == math.inf
    assert law.losses(0.1).get_delta_for_epsilon(100.0) == 1
