"""The epsilon that a run's charges have spent, and clients' charges by ranges."""

import math

from hypothesis import given
from hypothesis import strategies as st

from fed_dpsd.accounts.card import privacy_card
from fed_dpsd.claims import smallest_claim
from fed_dpsd.server.charge_log import by_ranges, clients_in
from tests.every import every

RECORD = ("record", "add_remove")


@every(
    "overrides",
    [
        ("answers=gradient",),
        ("answers=votes",),
        ("answers=label", "answers.epsilon_per_answer=0.1"),
        ("training=dp_sgd", "model=scattering", "training.steps=5"),
    ],
)
def test_all_that_is_planned_costs_what_the_card_plans_and_less_costs_less(small, overrides):
    experiment = small(*overrides)
    plan = experiment.plan
    card = privacy_card(experiment, plan)
    whole = smallest_claim(plan, plan.releases, 1e-5, *RECORD)
    (row,) = (row for row in card["proven"] if (row["unit"], row["relation"]) == RECORD)
    assert (whole.value, whole.trust) == (row["epsilon"], row["trust"])
    half = {name: -(-count // 2) for name, count in plan.releases.items()}
    assert 0 < smallest_claim(plan, half, 1e-5, *RECORD).value <= whole.value
    assert smallest_claim(plan, {}, 1e-5, *RECORD).value == 0


def test_a_training_that_is_not_charged_proves_nothing_of_what_left(small):
    """Otherwise answers without it would look free."""
    experiment = small("training=dp_sgd", "model=scattering", "training.steps=5")
    plan = experiment.plan
    answers = {name: n for name, n in plan.releases.items() if name != "dp_sgd"}
    alone = smallest_claim(plan, answers, 1e-5, *RECORD).value
    assert alone > smallest_claim(plan, plan.releases, 1e-5, *RECORD).value


def test_charges_outside_the_plan_cost_infinity(small):
    plan = small("answers=gradient").plan
    assert math.isinf(smallest_claim(plan, {"other": 1}, 1e-5, *RECORD).value)


@given(st.dictionaries(st.integers(0, 40), st.sampled_from([1, 2, 3]), max_size=30))
def test_clients_by_ranges_are_the_same_clients(counts):
    charges = {client: {"label": n} for client, n in counts.items()}
    ranges = by_ranges(charges)
    assert {c: own for key, own in ranges.items() for c in clients_in(key)} == charges
    assert len(ranges) == len(set(counts.values()))
