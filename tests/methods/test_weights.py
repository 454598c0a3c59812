"""Released weights: what is charged and proven, whatever the noise of answers."""

import math

import pytest
from dp_accounting import ComposedDpEvent, SelfComposedDpEvent

from fed_dpsd.accounts.card import plan_of, privacy_card
from fed_dpsd.privacy.accounting import epsilon, prove
from tests.ledgers import entries_of
from tests.methods.test_white_box import CLEAR, PRIVATE
from tests.proofs import bases, by, spent
from tests.running import finish, not_refused

METHODS = ("ensemble", "dense", "co_boosting", "feddf", "fedadi", "feddafl", "fedavg", "fedprox")


# The other methods release weights as one of these two does.
EACH = [
    pytest.param(m, marks=() if m in ("ensemble", "fedavg") else pytest.mark.slow) for m in METHODS
]


@pytest.mark.parametrize("method", EACH)
def test_weights_prove_nothing_whatever_noise_answers_would_have(small, method):
    """The control: private training covers them, whatever answers would be."""
    for answers in ("label", "gradient", "votes", "probabilities"):
        settings = f"method={method}", f"answers={answers}", "teacher.same_start=true"
        plain = small(*settings, "training=plain")
        card = privacy_card(plain, plan_of(plain))
        assert {(row["basis"], row["epsilon"]) for row in card["proven"]} == {("answers", "inf")}
        assert all(row["beside"] == [] for row in card["proven"])
        assert "the teachers' own weights leave the clients" in card["reason"]
        assert card["epsilon_published"] == "inf"
        private = small(*settings, "training=dp_sgd")
        once, *counts = bases(plan_of(private))["training"]
        averages = private.method.averages
        trainings = private.config.rounds if averages else 1
        assert (once.mechanism, once.requests) == (private.training, trainings)
        # Averages weigh by class counts, which are drawn once; no other student reads them.
        released = [(stage.mechanism.name, stage.requests) for stage in counts]
        assert released == [("class_counts", 1)] * averages
        card = privacy_card(private, plan_of(private))
        for row in card["proven"]:
            claim = prove([once, *counts], 1e-5, row["unit"], row["relation"]).value
            assert float(row["epsilon"]) == by(row, "training") == claim
            assert (claim < math.inf) == (row["unit"] == "record")
            assert by(row, "answers") == math.inf


def test_every_private_round_is_charged_and_proven(small, tmp_path):
    """Two rounds cost two training runs; without private training the method is refused."""
    experiment = small(*PRIVATE, "method=dp_fedavg", "rounds=2")
    federation, _ = finish(experiment, tmp_path)
    plan = plan_of(experiment)
    one = experiment.training.event("record", "add_remove")
    counts = experiment.training.count_event("record", "add_remove")
    paid = ComposedDpEvent([SelfComposedDpEvent(one, 2), counts])  # counts are drawn once
    for site in federation._sites.values():
        trainings = [e for e in entries_of(site.ledger) if e.kind == "training"]
        assert [e.event("record", "add_remove") for e in trainings] == [
            SelfComposedDpEvent(one, 1)
        ] * 2
        rest = [e for e in entries_of(site.ledger) if e.kind != "training"]
        covered = {e.training for e in rest if e.kind != "counts"}
        assert covered == {e.digest for e in trainings}
        assert [e.training for e in rest if e.kind == "counts"] == [""]
        whole = spent(entries_of(site.ledger), "record", "add_remove", "training")
        assert epsilon(whole, 1e-5) == epsilon(paid, 1e-5)
    twice = prove(bases(plan)["training"], 1e-5, "record", "add_remove").value
    assert epsilon(one, 1e-5).epsilon < twice < math.inf
    assert twice == epsilon(paid, 1e-5).epsilon
    error = "training=plain: method=dp_fedavg does not support it; use"
    assert not not_refused(small, [("method=dp_fedavg", error)], *CLEAR)
