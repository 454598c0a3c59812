"""Weights that leave: what is proven of them, whatever noise answers would have."""

import math

import pytest

from fed_dpsd.accounts.card import plan_of, privacy_card
from fed_dpsd.privacy.accounting import prove


@pytest.mark.parametrize("answers", ["label", "gradient", "votes", "probabilities"])
@pytest.mark.parametrize("method", ["ensemble", "dense", "feddf", "fedadi", "feddafl", "fedavg"])
def test_weights_prove_nothing_whatever_noise_answers_would_have(small, method, answers):
    """The control: a private training covers them, whatever answers would be."""
    settings = f"method={method}", f"answers={answers}", "teacher.same_start=true"
    plain = small(*settings, "training=plain")
    card = privacy_card(plain, plan_of(plain))
    assert {(row["basis"], row["epsilon"]) for row in card["proven"]} == {("answers", "inf")}
    assert all(row["beside"] is None for row in card["proven"])
    assert "the teachers' own weights leave the clients" in card["reason"]
    assert card["epsilon_published"] == "inf"
    private = small(*settings, "training=dp_sgd")
    (once,) = plan_of(private).bases["training"]
    trainings = private.config.rounds if method == "fedavg" else 1
    assert (once.mechanism, once.asks) == (private.training, trainings)
    card = privacy_card(private, plan_of(private))
    for row in card["proven"]:
        claim = prove([once], 1e-5, row["unit"], row["relation"]).value
        assert float(row["epsilon"]) == claim
        assert (claim < math.inf) == (row["unit"] == "record")
        other = row["beside"] if row["basis"] == "training" else row
        assert (other["epsilon"], other["basis"]) == ("inf", "answers") or claim == math.inf
