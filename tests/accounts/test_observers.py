"""What secure sums prove against each observer, derived from what the observer does not know."""

import math
from pathlib import Path

import pytest
from dp_accounting.pld.privacy_loss_distribution import from_two_probability_mass_functions

from fed_dpsd.accounts.card import privacy_card
from fed_dpsd.accounts.words import PrivacyCard, against, observers, sentences, too_many
from fed_dpsd.privacy.epsilon import rounded_up
from fed_dpsd.privacy.events import ShuffledResponseDpEvent
from fed_dpsd.report.guarantee import split_by_proof
from tests.every import every
from tests.privacy.test_accounting import uniform_and_changed
from tests.proofs import gaussian_epsilon

ROUNDS, NOISE, DELTA = 100, 14.0, 1e-5
SUMS = ("method=dp_fedsgd", "answers=clipped_gradients", "model=scattering", "diagnostics=false")
SUMS += (f"rounds={ROUNDS}", f"answers.noise_multiplier={NOISE:g}")
LABELS = ("training=plain", "answers=label", "answers.epsilon_per_answer=1", "rounds=1")
LABELS += ("queries_per_round=100",)
FOUR = (
    "num_clients=5",
    "answers.noise_at=distributed",
    "answers.quorum={threshold: 4, colluding: 1}",
)
THREE = ("num_clients=3", *FOUR[1:2], "answers.quorum={threshold: 3, colluding: 1}")
PAIR = ("add_remove", "replace_one")
PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"


def card_of(experiment):
    return privacy_card(experiment, experiment.plan)


def of_sums(threshold, colluding, known):
    """Epsilons of the noise of a smallest sum, less the `known` parts of the observer."""
    share = NOISE**2 / (threshold - colluding)  # the variance that each client adds
    mu = math.sqrt(ROUNDS / ((threshold - known) * share))
    return [gaussian_epsilon(mu), gaussian_epsilon(2 * mu)]


def of_labels(threshold, colluding, known):
    """Epsilons of the counts of all responses that the observer does not know, by enumeration."""
    event = ShuffledResponseDpEvent(1.0, 10, threshold - known)
    laws = [
        {key: math.log(chance) for key, chance in uniform_and_changed(event, own).items()}
        for own in (0, 1)
    ]
    losses = from_two_probability_mass_functions(*laws, value_discretization_interval=4e-4)
    return [losses.self_compose(100).get_epsilon_for_delta(DELTA)] * 2


COMMANDS = (
    ((*SUMS, *FOUR), (4, 1), of_sums),
    ((*SUMS, *THREE), (3, 1), of_sums),
    ((*LABELS, *FOUR), (4, 1), of_labels),
)
# The parts that each observer of a card with `colluding` 1 knows, or that nobody adds.
KNOWN = {"the coordinator and any 1": 1, "the coordinator or an outsider": 0, "a client": 2}


@every("number", range(3))
def test_each_observer_has_the_epsilon_of_what_it_does_not_know(small, number):
    """The control: a client that sees the result is not covered by the card's first number."""
    overrides, quorum, derived = COMMANDS[number]
    card = card_of(small(*overrides))
    rows = {(row["unit"], row["relation"]): row["epsilon"] for row in card["proven"]}
    found = {}
    for seen in card["observers"]:
        (start,) = (each for each in KNOWN if seen["observer"].startswith(each))
        assert seen["shares"] == quorum[0] - KNOWN[start]
        own = {row["relation"]: row for row in seen["proven"] if row["unit"] == "record"}
        found[start] = [own[relation]["epsilon"] for relation in PAIR]
        assert all(row["delta"] == DELTA for row in own.values())
        assert found[start] == pytest.approx(derived(*quorum, KNOWN[start]), rel=1e-3)
    outsider, coalition, reader = (found[each] for each in sorted(KNOWN, key=KNOWN.get))
    assert coalition == [rows["record", relation] for relation in PAIR]
    assert all(a < b < c for a, b, c in zip(outsider, coalition, reader, strict=True))


@every("number", range(3))
def test_the_page_of_proofs_has_a_row_for_each_observer(small, number):
    card = card_of(small(*COMMANDS[number][0]))
    _, table = PAGE.read_text().split("| observer |")
    lines = [line for line in table.split("\n\n")[0].splitlines()[2:]]
    cells = {line.split("|")[1].strip(): line.split("|")[3 + number].strip() for line in lines}
    printed = []
    for seen in card["observers"]:
        own = [row["epsilon"] for row in seen["proven"] if row["unit"] == "record"]
        printed.append(" / ".join(dict.fromkeys(rounded_up(value, 4) for value in own)))
    coalition, outsider, reader = printed
    assert cells == {
        "the coordinator and any N clients together": coalition,
        "a client that sees the result, as one of the N": coalition,
        "the coordinator or an outsider alone, if all clients add their noise": outsider,
        "a client that sees the result, besides N colluding clients": reader,
    }


@every("number", range(3))
def test_a_plan_says_whom_each_number_holds_against(small, number):
    experiment = small(*COMMANDS[number][0])
    card = card_of(experiment)
    first, *others = sentences(PrivacyCard(card, "planned"), experiment.seeded)
    assert first.endswith(f"against {against('threshold', 1)}")
    assert f"trust threshold: against {against('threshold', 1)}" in str(PrivacyCard(card))
    assert too_many(card) == "the coordinator together with more than 1 client"
    for seen in card["observers"][1:]:
        (said,) = (each for each in others if each.endswith(f"against {seen['observer']}"))
        (added, replaced) = (row for row in seen["proven"] if row["unit"] == "record")
        assert f"epsilon {rounded_up(added['epsilon'])} (record, add_remove) and " in said
        assert f" {rounded_up(replaced['epsilon'])} (record, replace_one), delta 1e-05" in said


@every(
    ("threshold", "colluding", "shares"),
    [(4, 0, [4, 3]), (4, 1, [3, 4, 2]), (5, 2, [3, 5, 2, 4]), (3, 2, [1, 3, 2]), (1, 0, [1])],
)
def test_every_client_that_sees_the_result_is_among_the_observers(threshold, colluding, shares):
    """With nobody colluding, no number of the coordinator's is said to hold against a client."""
    found = observers(threshold, colluding)
    assert list(found.values()) == shares
    first, *others = found
    readers = [observer for observer in others if "a client that sees the result" in observer]
    assert ("not a client that sees the result" in first) == (colluding == 0)
    assert ("a client that sees the result counts as one" in first) == (colluding > 0)
    # Nobody is left besides the one client that protects the record.
    assert bool(readers) == (threshold - colluding > 1 or colluding > 1)


def test_an_observer_of_the_smallest_noise_has_a_number(small):
    """Less noise would be refused as a setting, but this is what the observer does not know."""
    votes = "training=plain", "answers=votes", "answers.noise_multiplier=1.6e-5", "rounds=1"
    observed = card_of(small(*votes, *FOUR, "queries_per_round=1"))["observers"]
    assert len(observed) == 3
    for seen in observed:
        assert all(math.isfinite(float(row["epsilon"])) for row in seen["proven"])


def test_numbers_that_hold_against_anyone_name_no_observer(small):
    for settings in ((), ("training=dp_sgd", *FOUR), (*SUMS, "answers.noise_at=client")):
        card = card_of(small(*settings))
        trusts = {row["trust"] for row in card["proven"] if row["epsilon"] != "inf"}
        assert ("threshold" in trusts) == bool(card["observers"])
    summed = [{row["unit"] for row in seen["proven"]} for seen in card["observers"]]
    assert all("record" not in units for units in summed)


def test_a_number_next_to_the_smallest_does_not_seem_to_hold_against_every_observer(small):
    """The smallest is the training's, which does."""
    card = card_of(small("training=dp_sgd", *FOUR))
    (row,) = (r for r in card["proven"] if (r["unit"], r["relation"]) == ("record", PAIR[0]))
    assert row["trust"] == "nobody"
    texts = str(PrivacyCard(card)), split_by_proof(card)[0][0][2]
    assert all("trust threshold, may be larger against others" in text for text in texts)
    assert not any("trust nobody, may be" in text for text in texts)
