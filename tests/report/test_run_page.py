"""The page of a run and of a deployment: its structure and the texts about its numbers."""

import dataclasses
import math
import re
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from fed_dpsd.accounts import words
from fed_dpsd.privacy.training import ClassCounts
from fed_dpsd.report import guarantee, pages
from fed_dpsd.report.facts import Unfinished
from fed_dpsd.report.scores import Predictions
from tests.report.runs import (
    CARD,
    SUMMARY,
    check_structure,
    deployment,
    leave_figures_empty,
    run,
)

THRESHOLD = words.against("threshold", 1)


def page(facts):
    return check_structure(pages.run_page(facts))


def with_card(facts, **changes):
    summary = facts.summary | {"privacy": facts.card | changes}
    return dataclasses.replace(facts, summary=summary)


def epsilon_of_all(value, **more):
    return [row | {"epsilon": value} | more for row in CARD["proven"]]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The page of the unchanged run, with its figures."""
    return page(run(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """The page of the unchanged deployment, with its figures."""
    return page(deployment(tmp_path_factory.mktemp("deployment")))


@pytest.fixture(autouse=True)
def _empty_figures(shown, deployed, monkeypatch):
    """All other pages have no lines in their figures."""
    leave_figures_empty(monkeypatch)


# --- privacy ---


def test_the_result_comes_first_with_its_interval_and_its_cost(shown):
    lead = shown.text_of("p", class_="lead")
    assert "75.0 % of 40 test images (95 % interval 59.8 to 85.8 %). Always answering" in lead
    assert "With secret noise, what left the clients is proven to cost at most epsilon" in lead
    assert "epsilon 2.99 (record, add_remove, trust nobody, delta 1e-05)" in lead
    assert "at most 95.3 % of the time (guessing: 50 %)" in lead
    main = next(number for number, e in enumerate(shown.elements) if e["tag"] == "main")
    assert shown.elements[main + 1]["class"] == "lead"


def test_no_epsilon_stands_without_its_unit_and_relation(shown, deployed):
    """Every number after the word has them near it, or is in a table that names them."""
    for each in (shown, deployed):
        for element in each.elements:
            if element["tag"] in ("p", "li", "dd", "figcaption", "summary", "desc"):
                text = " ".join(element["text"].split())
                for match in re.finditer(r"[Ee]psilon (\d[\d.,]*)", text):
                    after = text[match.start() : match.start() + 90]
                    assert re.search(r"record|patient|client|label", after), text


def test_published_and_proven_numbers_stand_apart(shown, tmp_path):
    assert "Epsilon published (no guarantee): 10." in shown.text_of("div", class_="apart")
    assert "Papers state this number" in shown.text_of("div", class_="apart")
    rows = shown.rows("Bounds of this run")
    assert [row["epsilon of the whole plan"] for row in rows] == ["2.99", "6.59"]
    assert [row["spent"] for row in rows] == ["2.99", "6.59"]
    assert {row["who must be trusted"] for row in rows} == {"nobody"}
    infinite = "epsilon is inf, if all records of a patient at a client are added"
    assert infinite in shown.text_of("section", id="privacy")
    facts = run(tmp_path, published="nothing published: the papers' formulas give no epsilon")
    apart = page(with_card(facts, epsilon_published="inf")).text_of("div", class_="apart")
    assert "Papers state this number" not in apart


def test_the_plain_words_are_what_the_definition_gives(shown):
    (said,) = [text for text in shown.texts("p") if text.startswith("In plain words")]
    right, found = (float(n) for n in re.findall(r"at most ([\d.]+) %", said))
    ratio, delta = math.exp(float(CARD["proven"][0]["epsilon"])), 1e-5
    assert 0 <= right - 100 * (ratio + delta) / (1 + ratio) < 0.1  # bounds are rounded up
    assert 0 <= found - 100 * (ratio * 0.01 + delta) < 0.1


def test_the_plain_words_bound_no_attacker_whom_the_proof_does_not_bound(tmp_path):
    cases = {
        "nobody": "An attacker who sees everything that left the clients can tell",
        "threshold": f"{THRESHOLD[0].upper()}{THRESHOLD[1:]}, can tell",
        "server": "An attacker who sees everything that the coordinator publishes can tell",
    }
    for trust, who in cases.items():
        changes = {"proven": epsilon_of_all(2.0, trust=trust), "colluding": 1}
        shown = page(with_card(run(tmp_path), **changes))
        assert shown.text_of("main").count(who) == 2, trust  # first, and in plain words


def test_the_officer_reads_what_is_proven_against_each_observer_of_secure_sums(tmp_path):
    number = {"unit": "record", "relation": "add_remove", "delta": 1e-5, "epsilon": 3.7518}
    observers = [
        {"observer": observer, "proven": [number | {"epsilon": epsilon}]}
        for observer, epsilon in ((THRESHOLD, 2.0), ("a client that sees the result", 3.7518))
    ]
    changes = {"proven": epsilon_of_all(2.0, trust="threshold"), "observers": observers}
    shown = officer(with_card(deployment(tmp_path), **changes, colluding=1))
    trusted = shown.text_of("section", id="trusted")
    hospitals = THRESHOLD.replace("client", "hospital")
    assert f"All hospitals but 1: the bound holds against {hospitals}." in trusted
    assert "Epsilon 3.76 (record, add_remove), delta 1e-05, against a hospital that" in trusted
    assert "who sees everything that the coordinator sees" not in shown.text_of("main")
    assert "all hospitals but 1 have to be trusted" in shown.text_of("p", class_="lead")


def test_what_protects_nothing_says_so(shown, tmp_path):
    control = shown
    cases = [
        (512.0, "epsilon 512 (record, add_remove, trust nobody, delta 1e-05), which protects no"),
        ("inf", "Nothing is proven about the privacy of a record."),
    ]
    for epsilon, lead in cases:
        facts = with_card(run(tmp_path, meaningful=False), proven=epsilon_of_all(epsilon))
        shown = page(facts)
        assert lead in shown.text_of("p", class_="lead")
        assert "of the time" not in shown.text_of("p", class_="lead")
        assert "Nothing here protects a single record" in shown.text_of("main")
        assert "the images may show what records look like" in shown.text_of("section", id="images")
        assert "cover the images" not in shown.text_of("section", id="images")
        assert "no meaningful protection" in shown.text_of("dl", class_="tiles")
    # Where nothing is proven, secret noise would prove nothing, either.
    assert not shown.all("div", class_="note")
    assert "nothing is proven: no meaningful protection" in shown.text_of("dl", class_="tiles")
    assert "trust nobody" not in shown.text_of("dl", class_="tiles")
    proven = epsilon_of_all(0.1, delta=0.5)
    large = page(with_card(run(tmp_path, meaningful=False), proven=proven)).text_of("main")
    assert "In plain words: delta is too large, so an attacker may become sure" in large
    protected = control.text_of("section", id="images")
    assert "So the proven epsilons cover the images, too." in protected


def test_notes_are_those_of_the_account():
    notes = {words.SEEDED_NOTE, words.RUN_NOTE, words.PATIENT_NOTE, words.SAME_IMAGE_NOTE}
    assert set(guarantee.NOTES) == notes | {words.TUNING_NOTE, words.SAME_PATIENT_NOTE}


def test_a_run_that_releases_nothing_claims_nothing(tmp_path):
    proven = epsilon_of_all(0.0, notes=["nothing is released"])
    shown = page(with_card(run(tmp_path, verdict=("nothing is released",)), proven=proven))
    assert "Nothing left the clients." in shown.text_of("p", class_="lead")
    assert "nothing leaves" in shown.text_of("dl", class_="tiles")
    assert not shown.all("div", class_="apart")


def test_a_plug_ins_epsilon_is_not_reviewed_wherever_it_stands_first(tmp_path):
    note = "not reviewed: nothing is proven of what a_package does"
    shown = page(with_card(run(tmp_path), proven=epsilon_of_all(3.0, notes=[note])))
    assert "not reviewed" in shown.text_of("dl", class_="tiles")
    assert "delta 1e-05, not reviewed)" in shown.text_of("p", class_="lead")
    assert shown.rows("Bounds of this run")[0]["epsilon of the whole plan"] == "3, not reviewed"
    assert shown.rows("Epsilon spent by each client: epsilon (record, add_remove, not reviewed)")
    assert shown.rows("has cost it (record, add_remove, trust nobody, delta 1e-05, not reviewed)")
    assert any("Not reviewed" in text for text in shown.texts("div", class_="note"))


def test_seeded_noise_is_reported_first_and_only_where_it_is(shown, deployed):
    assert "carry no guarantee" in shown.texts("div", class_="note")[0]
    assert not deployed.all("div", class_="note")


def test_every_other_proof_stands_behind_the_smallest(tmp_path):
    others = [
        {"basis": "answers", "trust": "nobody", "epsilon": 1.89147},
        {"basis": "training", "trust": "nobody", "epsilon": 2.98795},
        {"basis": "training", "trust": "nobody", "epsilon": "inf"},
    ]
    proven = epsilon_of_all(0.45712, basis="contraction", beside=others)
    row = page(with_card(run(tmp_path), proven=proven)).rows("Bounds of this")[0]
    assert row["epsilon of the whole plan"] == "0.458"
    assert row["proof"] == (
        "gdp_exact, by the training and the answers together; by the answers 1.9, trust nobody; "
        "by the training 2.99, trust nobody"
    )


def test_scores_that_no_epsilon_covers_are_not_on_the_page(tmp_path):
    apart = {"ensemble": 0.917, "clients": [0.523, 0.634, None], "vote": 0.851}
    accuracy = SUMMARY["accuracy"] | dict.fromkeys(apart)
    areas = SUMMARY["auroc"] | {"ensemble": None, "clients": None}
    scores = {"accuracy": accuracy, "auroc": areas, "diagnostics": {"accuracy": apart}}
    facts = run(tmp_path, summary=SUMMARY | scores)
    first, *_ = page(facts).rows("Each client: the epsilon that the run has cost it")
    assert list(first) == ["client", "epsilon spent", "refused rounds"]
    hidden = ("91.7", "52.3", "63.4", "85.1")
    assert not any(score in pages.run_page(facts) for score in hidden)
    control = SUMMARY | {"accuracy": SUMMARY["accuracy"] | apart}
    shown = pages.run_page(run(tmp_path, summary=control))
    assert all(score in shown for score in hidden[:3])  # a page never shows the vote


def test_the_unit_that_was_asked_for_comes_first(shown, tmp_path):
    """The patient's 2.99 stands first, and every attacker is one on patients."""
    rows = {(row["unit"], row["relation"]): row for row in CARD["proven"]}
    for pair, epsilon in (
        (("patient", "add_remove"), 2.98795),
        (("patient", "replace_one"), 6.58276),
        (("record", "add_remove"), 6.56789),
    ):
        rows[pair] = rows[pair] | {"epsilon": epsilon, "spent": epsilon}
    proven = sorted(rows.values(), key=lambda row: row["unit"] != "patient")
    control, shown = shown, page(with_card(run(tmp_path), unit="patient", proven=proven))
    lead = shown.text_of("p", class_="lead")
    assert "epsilon 2.99 (patient, add_remove, trust nobody, delta 1e-05)" in lead
    assert "can tell whether a patient's records were used at most 95.3 % of the time" in lead
    tiles = shown.text_of("dl", class_="tiles")
    assert "epsilon proven for a patient, added or removed 2.99" in tiles
    assert "6.57" not in lead + tiles
    (plain,) = [text for text in shown.texts("p") if text.startswith("In plain words")]
    assert "a patient's records were used at most 95.3 %" in plain
    assert "one patient added or removed" in plain
    assert "the plan is 2.99" in next(text for text in shown.texts("desc") if "spent" in text)
    assert "(patient, add_remove," in shown.text_of("section", id="clients")
    rows = shown.rows("Bounds of this run")
    assert [row["epsilon of the whole plan"] for row in rows] == [*("2.99", "6.59", "6.57", "6.59")]
    note = "counts like replacing its patient"
    assert note in shown.text_of("section", id="privacy")
    assert note not in control.text_of("main")
    assert "for a record, added or removed" in control.text_of("dl", class_="tiles")


# --- how good the student is ---


def scored(facts, **changes):
    """The facts with predictions that have the confusion matrix of SUMMARY."""
    labels = np.repeat([0, 0, 1, 1], [18, 2, 8, 12])
    chance = np.repeat([0.1, 0.7, 0.2, 0.9], [18, 2, 8, 12]).astype(np.float32)
    kept = Predictions(np.stack([1 - chance, chance], 1), labels, np.arange(40) % 2 == 0)
    return dataclasses.replace(facts, predictions=kept, **changes)


def test_the_reference_is_the_most_common_class(tmp_path):
    """A student that finds no healthy image is right on 74.6 %, which is no merit."""
    for counts, student, common, better in (
        ([[0, 254], [0, 746]], 0.746, "ill <1>, the most common class, is right on 74.6 %", False),
        (SUMMARY["confusion"], 0.75, "the most common class, is right on 50.0 %", True),
    ):
        accuracy = SUMMARY["accuracy"] | {"student": student}
        summary = SUMMARY | {"confusion": counts, "accuracy": accuracy}
        lead = page(run(tmp_path, summary=summary)).text_of("p", class_="lead")
        assert common in lead
        assert ("the student is no better than that" not in lead) == better


def test_two_classes_have_an_area_and_a_threshold_with_its_data(tmp_path):
    shown = page(scored(run(tmp_path)))
    lead = shown.text_of("p", class_="lead")
    assert "Its AUROC for ill <1> is 0." in lead
    assert "chosen on one half of the test images and tested on the other half, sensi" in lead
    measures = {row["measure"]: row["value"] for row in shown.rows("Measures on")}
    assert measures["accuracy"] == "75.0 % (59.8 to 85.8)"
    assert measures["balanced accuracy: the mean over classes of sensitivity"][:6] == "75.0 %"
    chosen, fixed = shown.rows("Operating points")
    assert chosen["tested on"] == "the other half"
    assert (fixed["threshold"], fixed["tested on"]) == ("0.5", "all test images")
    assert fixed["sensitivity"] == "60.0 % (38.7 to 78.1)"
    assert fixed["specificity"] == "90.0 % (69.9 to 97.2)"
    curve = shown.rows("ROC curve for ill <1>")
    alarms = "false alarms: 100 % minus specificity, %"
    points = {row[alarms]: row["threshold 0.5, tested on all test images"] for row in curve}
    assert points["10"] == "60.0"
    given, _ = page(scored(run(tmp_path), threshold=0.15)).rows("Operating points")
    assert (given["threshold"], given["tested on"]) == ("0.15", "all test images")
    assert given["sensitivity"].startswith("100.0 %")
    without = page(run(tmp_path))  # predictions were not stored
    assert not any("Operating" in text for text in without.texts("caption"))


def test_more_classes_have_means_over_classes(tmp_path):
    names = ("a", "b", "c")
    counts = [[10, 0, 0], [5, 5, 0], [0, 0, 20]]
    accuracy = SUMMARY["accuracy"] | {"student": 0.875}
    summary = SUMMARY | {"confusion": counts, "accuracy": accuracy}
    shown = page(run(tmp_path, classes=names, summary=summary))
    measures = {row["measure"]: row["value"] for row in shown.rows("Measures on")}
    assert measures["balanced accuracy: the mean over classes of sensitivity"][:6] == "83.3 %"
    assert measures["specificity, mean over classes"] == "94.4 %"  # 25 of 30, 30 of 30, 20 of 20
    assert measures["precision, mean over classes"] == "88.9 %"
    assert measures["mean AUROC over classes"] == "0.800"
    assert not any("Operating" in text for text in shown.texts("caption"))


# --- the privacy officer's page ---


def officer(facts):
    return check_structure(pages.officer_page(facts))


def test_the_officers_numbers_are_the_cards_proven_ones(tmp_path):
    facts = deployment(tmp_path)
    shown = officer(facts)
    rows = shown.rows("Suppose that a fair coin decides")
    finite = [row for row in facts.card["proven"] if row["epsilon"] != "inf"]
    assert len(rows) == len(finite) == 2
    for line, row in zip(rows, finite, strict=True):
        ratio, delta = math.exp(row["epsilon"]), row["delta"]
        bound = 100 * (ratio + delta) / (1 + ratio)
        assert 0 <= float(line["an attacker is right at most"].rstrip(" %")) - bound < 0.1
        assert f"({row['unit']}, {row['relation']})" in line["what changes at a hospital"]
        assert float(line["epsilon"]) >= row["epsilon"]
        assert (line["delta"], line["who must be trusted"]) == ("1e-05", "nobody")
    main = shown.text_of("main")
    assert "Nothing is proven if all records of a patient at a hospital are added or re" in main
    assert "published" not in shown.text_of("section", id="proven")
    assert facts.answered in shown.text_of("section", id="left")
    assert "no message for records" in main
    assert "Nobody else" in shown.text_of("section", id="trusted")


def test_the_officers_page_is_in_plain_words(tmp_path):
    answered = "a label (randomised response, answers.epsilon_per_answer=10); besides, counts leave"
    facts = deployment(tmp_path, answered=answered, trained="as a client can (training.epsilon=3)")
    shown = officer(facts)
    said = "epsilon 2.99 (for a record added or removed; nobody has to be trusted; delta 0.00001)"
    assert said in shown.text_of("p", class_="lead")
    left = shown.text_of("section", id="left")
    assert "took part and answered at most 640 synthetic images each. What left each: a " in left
    assert "each: a label (randomised response); besides, counts." in left
    assert "=" not in left
    assert not [word for word in shown.text_of("main").split() if word.startswith("client")]
    assert "client" in officer(run(tmp_path)).text_of("section", id="left")  # a simulation's
    assert "Teachers are the models that each hospital trains" in left
    facts = deployment(tmp_path, trained=words.NO_TEACHERS)
    for name in ("clipped_gradients", "class_statistics"):
        sums = officer(with_card(facts, answers=name)).text_of("section", id="left")
        assert "synthetic image" not in sums
        assert "eacher" not in sums


def test_plain_words_hold_for_each_unit_relation_and_trust():
    row = {"unit": "client", "relation": "replace_one", "trust": "server", "delta": 0}
    said = guarantee.plain_clause(row | {"epsilon": 2.98795, "notes": ["not reviewed: a"]}, None)
    assert said == (
        "epsilon 2.99 (for a replaced client; the coordinator has to be trusted; delta 0, "
        "not reviewed)"
    )
    label = row | {"unit": "label", "trust": "threshold", "delta": 1e-9, "epsilon": 1, "notes": []}
    said = guarantee.plain_clause(label, 2)
    assert "a replaced label; all clients but 2 have to be trusted" in said
    assert said.endswith("delta 0.000000001)")
    assert guarantee.as_noun_phrase("none: weights leave the clients") == "weights"


def test_what_is_unproven_is_said_once_with_its_reason():
    def said(**infinite):
        rows = [
            {"unit": unit, "relation": relation}
            | {"epsilon": "inf" if relation in infinite.get(unit, ()) else 1.0}
            for unit, relation in guarantee.CHANGES
        ]
        return guarantee.unproven_sentence(
            {"proven": rows, "reason": f"{ClassCounts.reason}; a reason"}
        )

    both = ("add_remove", "replace_one")
    assert said() == ""
    assert said(client=both) == "Nothing is proven for a whole client, because a reason."
    everything = said(record=both, patient=both, client=both)
    assert "for a record, a patient or a whole client, because" in everything
    assert "for a replaced record or a whole" in said(record=["replace_one"], client=both)


def test_each_number_names_whom_to_trust():
    record = {"trust": "nobody", "unit": "record", "relation": "add_remove"}
    patient = {"trust": "server", "unit": "patient", "relation": "replace_one"}
    rows = [(record, "", ""), (patient, "", "")]
    assert guarantee.trusts_needed(rows, None) == [
        ("nobody", "a record added or removed"),
        ("server", "a replaced patient"),
    ]
    assert guarantee.trusts_needed(rows[:1], None) == [("nobody", "")]
    alone = {"trust": "server", "epsilon": 1.0}
    assert guarantee.trusts_needed([], alone) == [("server", "")]


def test_the_officers_page_claims_no_more_than_the_card(tmp_path):
    shown = officer(with_card(run(tmp_path), proven=epsilon_of_all(2.0, trust="server")))
    assert "Nothing is proven against it." in shown.text_of("section", id="trusted")
    assert "Nobody else" not in shown.text_of("main")
    assert "carry no guarantee" in shown.texts("div", class_="note")[0]
    assert "no message for records" not in shown.text_of("main")  # it is a simulation
    infinite = officer(with_card(run(tmp_path, meaningful=False), proven=epsilon_of_all("inf")))
    assert "Nothing is proven about the privacy of a record." in infinite.text_of("main")
    assert not infinite.all("table")
    assert not infinite.all("section", id="trusted")
    large = officer(with_card(run(tmp_path, meaningful=False), proven=epsilon_of_all(12.0)))
    assert {row["an attacker is right at most"] for row in large.rows("Suppose")} == {"100.0 %"}
    note = "not reviewed: nothing is proven of what a_package does"
    plugin = officer(with_card(run(tmp_path), proven=epsilon_of_all(3.0, notes=[note])))
    assert {row["epsilon"] for row in plugin.rows("Suppose")} == {"3, not reviewed"}
    assert any("Not reviewed" in text for text in plugin.texts("div", class_="note"))
    nothing = epsilon_of_all(0.0, notes=["nothing is released"])
    silent = officer(with_card(run(tmp_path), proven=nothing)).text_of("main")
    assert "Nothing left the clients." in silent


# --- classes, rounds, images ---


def test_an_epsilon_is_explained_where_it_is_flat(tmp_path):
    flat = {0: 2.5, 1: 2.5}
    for spent, explained in (
        ([flat | {2: 1.0}] * 5, True),
        ([flat | {1: 0.5 * n} for n in range(1, 6)], False),
        ([*[flat] * 4, flat | {2: 1.0}], False),  # charged later
    ):
        figure = page(run(tmp_path, spent=spent)).text_of("figure", id="spent")
        assert ("charged once" in figure) == explained


def test_a_class_has_its_sensitivity_precision_and_worst_confusion(shown, tmp_path):
    healthy, ill = shown.rows("Each class")
    assert healthy["sensitivity"] == "90.0 % (69.9 to 97.2)"
    assert healthy["precision"] == "69.2 % (50.0 to 83.5)"  # 18 of 26
    assert (ill["class"], ill["most often taken for (images)"]) == ("ill <1>", "healthy (8)")
    assert [row["healthy"] for row in shown.rows("Test images by true class")] == ["18", "8"]
    assert [cell["text"] for cell in shown.all("td", class_="diagonal")] == ["18", "12"]
    long = run(tmp_path, classes=("a" * 30, "b" * 30))
    first, _ = page(long).rows("Test images by true class")
    assert (first["true class"], first["0"]) == (f"0: {'a' * 30}", "18")
    counts = [[int(k == c) for c in range(30)] for k in range(30)]
    names = tuple(f"class {k}" for k in range(30))
    many = page(run(tmp_path, summary=SUMMARY | {"confusion": counts}, classes=names))
    assert "Each of 30 classes" in many.texts("summary")
    assert "Confusion matrix" not in many.texts("summary")


def test_hostile_names_are_text(tmp_path):
    hostile = '<script>alert(1)</script>" onload="x'
    hostile, terminal = f"{hostile}\x1b[31m\u202e", f"{hostile}\\x1b[31m\\u202e"
    facts = run(tmp_path, classes=(hostile, "`b` 1e-05 & 5 %"), name=hostile, command=hostile)
    shown = page(facts)
    assert shown.rows("Each class")[0]["class"] == terminal
    assert shown.text_of("pre") == terminal
    assert not [each for each in shown.elements if "onload" in each]
    assert {"b"} == {each["text"] for each in shown.all("code") if each["text"] in ("b", "`b`")}
    titles = [each["title"] for each in shown.all("td") if each.get("title")]
    assert f"{terminal} taken for `b` 1e-05 & 5 %: 2" in titles


def test_calibration_has_a_row_for_each_bin(shown, tmp_path):
    first, second = shown.rows("Reliability of the student's probabilities")
    assert (list(first.values()), list(second.values())) == (["55", "40.0"], ["87.5", "86.7"])
    assert "30 images" in shown.text_of("desc", id="calibration-text")
    old = run(tmp_path, summary=SUMMARY | {"calibration": None})
    assert "Calibration" not in pages.run_page(old)


def test_curves_have_their_numbers_next_to_them(shown, tmp_path):
    accuracy = [row["student"] for row in shown.rows("Accuracy of the student")]
    assert accuracy == ["15.0", "30.0", "45.0", "60.0", "75.0"]
    assert shown.rows("Accuracy of the student")[0]["ensemble of all teachers: 90.0 %"] == "90.0"
    spent = shown.rows("Epsilon spent by each client")
    assert spent[-1]["clients 0, 1"] == "2.5"
    assert spent[-1]["client 2"] == "1.25"
    assert spent[-1]["the whole plan: 2.99"] == "2.99"  # of 2.98795, never rounded down
    said = [text for text in shown.texts("desc") if "spent" in text]
    assert "has spent epsilon 2.5 (record, add_remove) after round 5; the plan is 2.99" in said[0]
    many = run(tmp_path, spent=[{c: 0.1 * c * n for c in range(20)} for n in range(1, 6)])
    last = page(many).rows("Epsilon spent by each client")[-1]
    assert (last["most"], last["median"], last["least"]) == ("9.5", "4.75", "0")


def test_what_a_log_does_not_have_is_not_drawn(tmp_path):
    facts = run(tmp_path)
    old = [{k: v for k, v in line.items() if k != "agreement"} for line in facts.rounds]
    shown = page(dataclasses.replace(facts, rounds=old, spent=[{}] * 5, costs={}, samples={}))
    captions = shown.texts("figcaption")
    assert "Accuracy of the student" in captions
    assert not any("greement" in text or "pent" in text for text in captions)
    assert "Synthetic images over time" not in shown.texts("h2")
    infinite = page(run(tmp_path, spent=[{0: math.inf}] * 5)).texts("figcaption")
    assert not any("spent" in text for text in infinite)


def test_test_images_are_shown_by_class_and_only_where_there_are_some(shown, tmp_path):
    assert "Test images" not in shown.texts("h2")
    path = tmp_path / "large.png"
    Image.new("RGB", (2_000, 500), "grey").save(path)
    for facts, said in (
        (run(tmp_path), "no training record is among them"),
        (deployment(tmp_path), "They are the coordinator's own."),
    ):
        seen = page(dataclasses.replace(facts, test_images={1: path, 0: path}))
        assert "Test images" in seen.texts("h2")
        alt = [f"Test images of class {name}" for name in facts.classes[:2]]
        assert [each["alt"] for each in seen.all("img") if "Test" in each["alt"]] == alt
        assert said in " ".join(" ".join(seen.texts("p")).split())


def test_the_pictures_are_scaled_down(shown, tmp_path):
    rounds = ["Synthetic images of round 1", "Synthetic images of round 5"]
    assert [each["alt"] for each in shown.all("img")] == rounds
    path = tmp_path / "large.png"
    for colour, side, expected in (("red", 1_810, (400, "RGB")), ("grey", 82, (82, "L"))):
        Image.new("RGB", (side, side), colour).save(path)
        picture = Image.open(BytesIO(pages.shrink_png(path)))
        assert (picture.width, picture.mode) == expected


# --- clients, traffic, settings ---


def test_each_client_has_its_teachers_scores_its_cost_and_its_refusals(shown, tmp_path):
    said = "has cost it (record, add_remove, trust nobody, delta 1e-05)"
    first, second, third = shown.rows(said)
    assert list(first.values()) == ["client 0", "50.0 %", "0.700", "2.5", "0"]
    assert (second["refused rounds"], third["own teachers' accuracy"]) == ("1", "unknown")
    shared = run(tmp_path, ledgers={0: "9 charges: epsilon 3.5"})
    first, second, _ = page(shared).rows("The ledger is shared")
    column = "its ledger, for all runs (record, add_remove)"
    assert (first[column], second[column]) == ("9 charges: epsilon 3.5", "unknown")
    assert "except ledger=FOLDER, which also holds" in page(shared).text_of("section", id="repeat")


def test_traffic_is_in_all_and_for_each_client(shown, tmp_path):
    requests, responses = shown.rows("Payload")
    assert list(requests.values()) == ["requests, server to clients", "3.0 MB", "1.0 MB"]
    assert list(responses.values())[1:] == ["1.9 kB", "640 B"]
    weights = page(with_card(run(tmp_path), answers="weights"))
    assert list(weights.rows("Payload")[0]) == ["direction", "total", "for each client"]
    seconds = {"total": 5.0, "teachers": 4.0, "rounds": 60.0}  # total: of the last process
    resumed = page(run(tmp_path, summary=SUMMARY | {"seconds": seconds}))
    assert "total time, without pauses64.0 s" in resumed.text_of("section", id="traffic")


def test_the_command_and_every_setting_are_there(shown, tmp_path):
    assert shown.text_of("pre") == "fed-dpsd run rounds=5 'model.teachers=[cnn, mlp]'"
    assert "All 4 settings" in shown.texts("summary")
    assert not page(run(tmp_path, command="")).all("pre")
    for changes, repeated in (({}, True), ({"settings": {"noise": "secure"}}, False)):
        text = page(run(tmp_path, **changes)).text_of("section", id="repeat")
        assert ("the same student, bit by bit" in text) == repeated


def test_a_title_is_the_readers_or_of_the_classes(tmp_path):
    generic = SUMMARY | {"data": "imagefolder"}
    for changes, subject in (
        ({}, "fed_dpsd on images of healthy, ill <1>"),
        ({"own_title": "Chest X-rays <2026>"}, "Chest X-rays <2026>"),
        ({"classes": tuple("abcdefg")}, "fed_dpsd on images of 7 classes"),
    ):
        title = run(tmp_path, summary=generic, **changes).title
        assert title == f"{subject}: a simulation with 3 clients"


def test_what_is_unknown_is_left_out(shown, tmp_path):
    assert "commit abc, FedDPSD 0.1.0, machine: m." in shown.text_of("footer")
    versions = {"commit": None, "machine": "m", "torch": "2"}
    footer = page(run(tmp_path, versions=versions)).text_of("footer")
    assert "from the run folder a-run; machine: m." in footer


def test_a_note_on_delta_is_on_each_page_once(tmp_path):
    note = "delta should be below 1 / (records of each client)"
    facts = with_card(run(tmp_path), proven=epsilon_of_all(2.0, notes=[note]))
    for text in (page(facts), officer(facts)):
        assert text.text_of("main").lower().count("below 1 / (") == 1


# --- deployments ---


def test_a_rehearsal_is_called_one_first(deployed, tmp_path):
    shown = page(deployment(tmp_path, rehearsed=True))
    assert shown.text_of("h1") == "fed_dpsd on digits: a rehearsal on one machine with 3 hospitals"
    assert shown.text_of("p", class_="lead").startswith("This is a rehearsal on one machine")
    assert "deployment" not in shown.text_of("header")
    first = officer(deployment(tmp_path, rehearsed=True))
    assert first.text_of("p", class_="lead").startswith("This is a rehearsal on one machine")
    assert "access to the one machine" in first.text_of("section", id="trusted")
    assert "rehearsal" not in deployed.text_of("main") + deployed.text_of("h1")


def test_a_deployments_page_has_hospitals_totals(deployed):
    shown = deployed
    assert shown.text_of("h1") == "fed_dpsd on digits: a deployment with 3 hospitals"
    assert "Its accuracy is unknown" in shown.text_of("p", class_="lead")
    first, restored, _ = shown.rows("Each hospital")
    assert first["requests answered"] == "6 of 6"
    assert first["releases stated, by mechanism"] == "dp_sgd 1, label 512"
    assert first["epsilon spent (record, add_remove)"] == "2.5"
    assert restored["requests answered"] == "3 of 6"
    assert restored["remarks"] == (
        "its ledger lost 128 releases: an older state was restored; its records changed 1 time"
    )
    assert "spent" not in shown.rows("Bounds of this run")[0]  # hospitals keep their ledgers


def test_each_fault_is_reported_once_with_when_it_was_seen(tmp_path):
    facts = deployment(tmp_path)
    shown = page(facts)
    faults = {row["what happened"]: row for row in shown.rows("Requests that a hospital did not")}
    late, spent = faults["no answer in time"], faults["the budget is <spent>"]
    assert (late["times"], spent["times"]) == ("2", "1")
    assert late["first"] == "round 2, 2026-11-25 08:52:23"
    assert late["last"].startswith("round 3, ")
    assert {late["hospital"], spent["hospital"]} == {"hospital 1 (St <Mary>)"}
    assert shown.rows("Each hospital")[1]["hospital"] == "hospital 1 (St <Mary>)"
    assert spent["last"] == "-"
    assert "sent again, 1 time:" in shown.text_of("section", id="hospitals")
    assert "The longest wait was 20.0 s, in round 2." in shown.texts("desc")
    quiet = [each for each in facts.requests if not each["refused"]]
    text = page(dataclasses.replace(facts, requests=quiet)).text_of("section", id="hospitals")
    assert "None: all hospitals answered 3 requests." in text


def test_absent_hospitals_are_counted_and_named_as_absent(tmp_path):
    """Hospital 1 of three never connected: it is in no total, and no wait is invented."""
    away = {"1": "had not connected"}
    sent = {"kind": "answers", "at": "2026-11-25T08:52:23Z", "seconds": 1.5, "answered": [0, 2]}
    requests = [sent | {"query_id": n, "ask": f"{n}", "refused": away} for n in (1, 2)]
    charges = {"clients": {n: {"charged": {"label": 256}} for n in ("0", "2")}}
    facts = deployment(
        tmp_path,
        requests=requests,
        absent={1: "never connected"},
        charges=charges,
        costs={0: 2.5, 2: 2.5},
    )
    shown = page(facts)
    assert shown.text_of("h1") == "fed_dpsd on digits: a deployment with 2 of 3 hospitals"
    assert shown.text_of("p", class_="lead").startswith("Hospital 1 never connected.")
    assert officer(facts).text_of("p", class_="lead").startswith("Hospital 1 never connected.")
    first, never, _ = shown.rows("Each hospital")
    assert (first["remarks"], never["remarks"]) == ("-", "never connected")
    assert never["requests answered"] == "0 of 2"
    assert never["epsilon spent (record, add_remove)"] == "none"
    (fault,) = shown.rows("Requests that a hospital did not")
    assert (fault["what happened"], fault["times"]) == ("never connected", "2")
    requests, _ = shown.rows("Payload")
    assert requests["for each hospital that answered"] == "1.5 MB"


# --- runs that have not completed ---

HALF = Unfinished(
    "a-run", 2, 5, "only 1 of 3 hospitals answered.", False, "flwr run APP federation"
)


def test_an_unfinished_deployment_shows_what_hospitals_have_stated(tmp_path):
    shown = page(deployment(tmp_path, unfinished=HALF))
    lead = shown.text_of("p", class_="lead")
    assert lead.startswith(
        "This deployment is not finished: it has done 2 of 5 rounds. It ended: only"
    )
    assert "the hospitals have stated charges of at most epsilon 2.5 (record, add_remove," in lead
    assert "; a ledger may hold one more request, whose response was lost." in lead
    assert shown.all("pre")[0]["text"] == HALF.command
    assert "a-run stands for the path" in shown.text_of("main")
    assert "diagnostics" not in shown.text_of("section", id="traffic")  # hospitals give none
    assert "of the whole plan, for a record" in shown.text_of("dl", class_="tiles")
    quiet = page(deployment(tmp_path, unfinished=HALF, costs={})).text_of("p", class_="lead")
    assert "So far no hospital has stated a charge; a ledger may hold one more request" in quiet


def test_what_an_unfinished_run_has_spent_comes_first(tmp_path):
    cases = [
        (0.0, "So far no client has been charged."),
        (1.23451, "cost a client at most epsilon 1.24 (record, add_remove, trust nobody, delta"),
        ("inf", "nothing is proven about what it has released: epsilon inf (record, add_remove)"),
    ]
    for spent, said in cases:
        facts = run(tmp_path, unfinished=HALF)
        facts = with_card(facts, proven=epsilon_of_all(3.0, spent=spent))
        assert said in page(facts).text_of("p", class_="lead")
