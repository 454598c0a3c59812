"""Training in one place, and training there that keeps only labels private."""

import pytest

from fed_dpsd import api
from fed_dpsd.accounts.card import planned_run, privacy_card
from fed_dpsd.accounts.words import PARTITION_NOTE, PrivacyCard
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.privacy.label_dp import IMAGES_NOTE
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder
from fed_dpsd.server.summary import result_line
from tests.ledgers import entries_of

COUNTS = f"partition.counts={[[9] * 10]}".replace(" ", "")
PRIVATE = ("method=central", "answers=probabilities", "training=dp_sgd", "model=scattering")
CENTRAL = ("method=central", "answers=probabilities")
LABEL_PRIVATE = ["training=lp_2st", "training=lp_mst", "training=alibi"]


@pytest.fixture(params=LABEL_PRIVATE)
def overrides(request):
    return (*CENTRAL, request.param)


def test_nothing_is_proven_for_records_and_the_labels_epsilon_is_separate(small, overrides):
    experiment = small(*overrides, "training.epsilon=2.0")
    content = privacy_card(experiment, experiment.plan)
    plain = small(*CENTRAL, "training=plain")
    expected = privacy_card(plain, plain.plan)
    assert content["proven"] == expected["proven"]  # all six rows
    assert all(row["epsilon"] == "inf" for row in content["proven"])
    assert content["epsilon_published"] == expected["epsilon_published"] == "inf"
    assert content["reason"] == f"the training protects labels alone; {expected['reason']}"
    assert expected["label"] is None
    label = content["label"]
    assert (label["unit"], label["relation"]) == ("label", "replace_one")
    assert label["epsilon"] == pytest.approx(2, rel=1e-3)
    assert {IMAGES_NOTE, "seeded noise", "per run", "tuning not covered"} <= set(label["notes"])
    *_, line, _ = str(PrivacyCard(content)).splitlines()
    assert "(label, replace_one" in line
    assert line.endswith(f": of labels alone, {IMAGES_NOTE}")
    assert "label" not in str(PrivacyCard(expected))


def test_a_run_charges_nothing_for_labels_and_its_result_states_their_guarantee(small, overrides):
    experiment = small(*overrides)
    folder = new_run_folder(experiment)
    federation = LocalFederation(experiment, folder)
    summary = runs.run(experiment, federation, folder, lambda line: None)
    (site,) = federation._sites.values()
    assert [entry.kind for entry in entries_of(site.ledger)] == ["weights"]
    assert all(row["epsilon"] == row["spent"] == "inf" for row in summary["privacy"]["proven"])
    assert not summary["accuracy"]["covered_by_epsilon"]
    assert summary["privacy"]["label"]["epsilon"] == pytest.approx(1, rel=1e-3)
    *_, records, labels = result_line(experiment, summary).split(" · ")
    assert records.startswith("proven inf (record, add_remove), inf (replace_one)")
    assert labels.startswith("of labels alone 1 (label, replace_one), trust ")
    assert labels.endswith(IMAGES_NOTE)


def test_a_plan_prints_the_labels_epsilon_and_the_records_epsilons():
    text = str(api.plan("method=central", "training=alibi", "training.epsilon=3"))
    label = "3 (label, replace_one, trust nobody, delta 0, pure): of labels alone, "
    assert f"epsilon planned: {label}{IMAGES_NOTE}" in text.splitlines()
    assert text.count("epsilon planned: inf (") == 6


def test_what_leaves_records_out_needs_a_caveat_with_a_single_client_too(small):
    """By labels or places, one file in the folder decides whether others are used."""
    for partition in ("counts", "coins", "iid"):
        counts = [COUNTS] * (partition == "counts")
        plan = planned_run(small(*PRIVATE, f"partition={partition}", *counts))
        assert (PARTITION_NOTE in str(plan)) == (partition != "iid"), partition
