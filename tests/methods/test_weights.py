"""Released weights: what is charged and proven, whatever the noise of answers."""

import math

import pytest

from fed_dpsd.accounts.card import privacy_card
from fed_dpsd.privacy.accounting import prove
from tests.proofs import bases, by


# The other methods release weights as one of these two does.
@pytest.mark.parametrize("method", ["ensemble", "fedavg"])
def test_weights_prove_nothing_whatever_noise_answers_would_have(small, method):
    """The control: private training covers them, whatever answers would be."""
    for answers in ("label", "gradient", "votes", "probabilities"):
        settings = f"method={method}", f"answers={answers}", "teacher.same_start=true"
        plain = small(*settings, "training=plain")
        card = privacy_card(plain, plain.plan)
        assert {(row["basis"], row["epsilon"]) for row in card["proven"]} == {("answers", "inf")}
        assert all(row["beside"] == [] for row in card["proven"])
        assert "the teachers' own weights leave the clients" in card["reason"]
        assert card["epsilon_published"] == "inf"
        private = small(*settings, "training=dp_sgd")
        once, *counts = bases(private.plan)["training"]
        averages = private.method.averages
        trainings = private.config.rounds if averages else 1
        assert (once.mechanism, once.requests) == (private.training, trainings)
        # Averages weigh by class counts, which are drawn once; no other student reads them.
        released = [(stage.mechanism.name, stage.requests) for stage in counts]
        assert released == [("class_counts", 1)] * averages
        card = privacy_card(private, private.plan)
        for row in card["proven"]:
            claim = prove([once, *counts], 1e-5, row["unit"], row["relation"]).value
            assert float(row["epsilon"]) == by(row, "training") == claim
            assert (claim < math.inf) == (row["unit"] == "record")
            assert by(row, "answers") == math.inf
