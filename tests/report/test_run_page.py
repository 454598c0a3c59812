"""The page of a run and of a deployment: its structure, and what it says of its numbers."""

import copy
import dataclasses
import math
import re

import pytest

from fed_dpsd.accounts import card, words
from fed_dpsd.report import guarantee, rounds
from fed_dpsd.report.facts import Unfinished
from fed_dpsd.report.run_page import page
from tests.report.runs import CARD, SUMMARY, check_structure, deployment, run


def with_card(facts, **changes):
    summary = facts.summary | {"privacy": facts.card | changes}
    return dataclasses.replace(facts, summary=summary)


def epsilon_of_all(card, value, **more):
    return [row | {"epsilon": value} | more for row in card["proven"]]


@pytest.mark.parametrize("make", [run, deployment])
def test_a_page_is_one_file_that_can_be_read_by_ear_and_by_keyboard(make, tmp_path):
    check_structure(page(make(tmp_path)))


def test_the_result_comes_first_with_its_interval_and_what_it_costs(tmp_path):
    shown = check_structure(page(run(tmp_path)))
    lead = shown.text_of("p", class_="lead")
    assert "75.0 % of 40 test images (95 % interval 59.8 to 85.8 %)" in lead
    assert "With secret noise, what left the clients is proven to cost at most epsilon" in lead
    assert "epsilon 2.99 (record, add_remove, trust nobody, delta 1e-05)" in lead
    assert "right in at most 95.3 % of cases" in lead
    main = next(number for number, e in enumerate(shown.elements) if e["tag"] == "main")
    assert shown.elements[main + 1]["class"] == "lead"


def test_no_epsilon_stands_without_its_unit_and_relation(tmp_path):
    """Every number after the word has them near it, or is in a table that says them."""
    facts = run(tmp_path)
    for element in check_structure(page(facts)).elements:
        if element["tag"] not in ("p", "li", "dd", "figcaption", "summary"):
            continue
        for match in re.finditer(r"[Ee]psilon (\d[\d.,]*)", element["text"]):
            after = element["text"][match.start() : match.start() + 90]
            assert re.search(r"record|patient|client|label", after), element["text"]


def test_published_and_proven_numbers_stand_apart(tmp_path):
    shown = check_structure(page(run(tmp_path)))
    apart = shown.text_of("div", class_="apart")
    assert "Epsilon published (no guarantee): 10." in apart
    rows = shown.rows("Bounds of this run")
    assert [row["epsilon of the whole plan"] for row in rows] == ["2.988", "6.5828"]
    assert [row["spent"] for row in rows] == ["2.988", "6.5828"]
    assert {row["who must be trusted"] for row in rows} == {"nobody"}
    assert "epsilon is inf, where all records of a patient at a client are added" in page(
        run(tmp_path)
    )


def test_the_plain_words_are_what_the_definition_gives(tmp_path):
    shown = check_structure(page(run(tmp_path)))
    (said,) = [e["text"] for e in shown.all("p") if e["text"].startswith("In plain words")]
    right, found = (float(n) for n in re.findall(r"at most ([\d.]+) %", said))
    ratio, delta = math.exp(float(CARD["proven"][0]["epsilon"])), 1e-5
    assert 0 <= right - 100 * (ratio + delta) / (1 + ratio) < 0.1  # bounds are rounded up
    assert 0 <= found - 100 * (ratio * 0.01 + delta) < 0.1


@pytest.mark.parametrize(
    ("trust", "who"),
    [
        ("nobody", "Somebody who sees all that left the clients guesses"),
        ("threshold", "Somebody who sees all that the coordinator does, while enough of the"),
        ("server", "Somebody who sees all that the coordinator publishes guesses"),
    ],
)
def test_the_plain_words_bound_nobody_whom_the_proof_does_not_bound(tmp_path, trust, who):
    facts = with_card(run(tmp_path), proven=epsilon_of_all(CARD, 2.0, trust=trust))
    assert page(facts).lower().count(who.lower()) == 2  # in the first sentences, and in plain words


@pytest.mark.parametrize(
    ("epsilon", "lead"),
    [
        (512.0, "epsilon 512 (record, add_remove, trust nobody, delta 1e-05), which protects no"),
        ("inf", "Nothing is proven of the privacy of a record."),
    ],
)
def test_what_protects_nothing_says_so(tmp_path, epsilon, lead):
    facts = with_card(run(tmp_path, meaningful=False), proven=epsilon_of_all(CARD, epsilon))
    shown = check_structure(page(facts))
    assert lead in shown.text_of("p", class_="lead")
    assert "Nothing here protects a single record" in page(facts)
    assert "no meaningful protection" in shown.text_of("dl", class_="tiles")
    assert "of cases" not in shown.text_of("p", class_="lead")


def test_a_run_that_releases_nothing_claims_nothing(tmp_path):
    proven = epsilon_of_all(CARD, 0.0, notes=["nothing is released"])
    facts = with_card(run(tmp_path, verdict=("nothing is released",)), proven=proven)
    shown = check_structure(page(facts))
    assert "Nothing left the clients." in shown.text_of("p", class_="lead")
    assert "nothing leaves" in shown.text_of("dl", class_="tiles")
    assert not shown.all("div", class_="apart")


def test_a_plug_ins_epsilon_is_not_reviewed_wherever_it_stands_first(tmp_path):
    note = "not reviewed: nothing is proven of what a_package does"
    facts = with_card(run(tmp_path), proven=epsilon_of_all(CARD, 3.0, notes=[note]))
    shown = check_structure(page(facts))
    assert "not reviewed" in shown.text_of("dl", class_="tiles")
    assert "delta 1e-05, not reviewed)" in shown.text_of("p", class_="lead")
    assert shown.rows("Bounds of this run")[0]["epsilon of the whole plan"] == "3, not reviewed"
    assert shown.rows("Epsilon spent by each client: epsilon (record, add_remove, not reviewed)")
    assert shown.rows("has cost it (record, add_remove, trust nobody, delta 1e-05, not reviewed)")
    assert any("Not reviewed" in each["text"] for each in shown.all("div", class_="note"))


def test_seeded_noise_is_told_at_once_and_only_where_it_is(tmp_path):
    shown = check_structure(page(run(tmp_path)))
    assert "carry no guarantee" in shown.all("div", class_="note")[0]["text"]
    assert not check_structure(page(deployment(tmp_path))).all("div", class_="note")


def test_a_class_has_its_sensitivity_precision_and_worst_confusion(tmp_path):
    shown = check_structure(page(run(tmp_path)))
    healthy, ill = shown.rows("Each class")
    assert healthy["sensitivity"] == "90.0 % (69.9 to 97.2)"
    assert healthy["precision"] == "69.2 % (50.0 to 83.5)"  # 18 of 26
    assert (ill["class"], ill["most often taken for (images)"]) == ("ill <1>", "healthy (8)")
    assert [row["healthy"] for row in shown.rows("Test images by true class")] == ["18", "8"]
    long = run(tmp_path, classes=("a" * 30, "b" * 30))
    first, _ = check_structure(page(long)).rows("Test images by true class")
    assert (first["true class"], first["0"]) == (f"0: {'a' * 30}", "18")


def test_of_many_classes_the_table_is_folded_and_there_is_no_matrix(tmp_path):
    counts = [[int(k == c) for c in range(30)] for k in range(30)]
    names = tuple(f"class {k}" for k in range(30))
    facts = run(tmp_path, summary=SUMMARY | {"confusion": counts}, classes=names)
    titles = [each["text"] for each in check_structure(page(facts)).all("summary")]
    assert "Each of 30 classes" in titles
    assert "Confusion matrix" not in titles


def test_calibration_is_told_in_words_and_numbers(tmp_path):
    shown = check_structure(page(run(tmp_path)))
    assert any("calibration error: 12.5 % (0 is" in each["text"] for each in shown.all("p"))
    first, second = shown.rows("Test images by how sure")
    assert list(first.values()) == ["55.0 %", "40.0 %", "10"]
    assert second["images"] == "30"
    old = run(tmp_path, summary=copy.deepcopy(SUMMARY) | {"calibration": None})
    assert "Calibration" not in page(old)


def test_curves_have_their_numbers_beside_them(tmp_path):
    shown = check_structure(page(run(tmp_path)))
    assert [row["student"] for row in shown.rows("Accuracy of the student")] == [
        *("15.0", "30.0", "45.0", "60.0", "75.0")
    ]
    spent = shown.rows("Epsilon spent by each client")
    assert spent[-1]["clients 0, 1"] == "2.5"
    assert spent[-1]["client 2"] == "1.25"
    assert spent[-1]["the whole plan: 2.99"] == "2.988"  # of 2.98795, never rounded down
    told = [each["text"] for each in shown.all("desc")]
    assert any("has spent epsilon 2.5 (record, add_remove) after round 5" in text for text in told)


def test_of_many_clients_that_differ_the_most_the_median_and_the_least_are_drawn(tmp_path):
    spent = [{c: 0.1 * c * n for c in range(20)} for n in range(1, 6)]
    shown = check_structure(page(run(tmp_path, spent=spent)))
    last = shown.rows("Epsilon spent by each client")[-1]
    assert (last["most"], last["median"], last["least"]) == ("9.5", "4.75", "0")


def test_logs_of_earlier_versions_have_fewer_curves(tmp_path):
    facts = run(tmp_path)
    old = [{k: v for k, v in line.items() if k != "agreement"} for line in facts.rounds]
    shown = check_structure(page(dataclasses.replace(facts, rounds=old, spent=[{}] * 5, costs={})))
    captions = [each["text"] for each in shown.all("figcaption")]
    assert "Accuracy of the student" in captions
    assert not any("greement" in text or "pent" in text for text in captions)


def test_the_pictures_are_the_first_rows_scaled_down(tmp_path):
    from io import BytesIO

    from PIL import Image

    shown = check_structure(page(run(tmp_path)))
    assert [each["alt"] for each in shown.all("img")] == [
        *("Synthetic images of round 1", "Synthetic images of round 5")
    ]
    path = tmp_path / "large.png"
    Image.new("RGB", (2 + 8 * 226, 2 + 8 * 226), "red").save(path)
    small = Image.open(BytesIO(rounds.first_of(path)))
    assert (small.width, small.height) == (384, 144)
    Image.new("RGB", (2 + 8 * 10, 2 + 8 * 10), "grey").save(path)
    grey = Image.open(BytesIO(rounds.first_of(path)))
    assert (grey.size, grey.mode) == ((82, 32), "L")


def test_each_client_has_its_teachers_scores_its_cost_and_its_refusals(tmp_path):
    said = "has cost it (record, add_remove, trust nobody, delta 1e-05)"
    first, second, third = check_structure(page(run(tmp_path))).rows(said)
    assert list(first.values()) == ["client 0", "50.0 %", "0.700", "2.5", "0"]
    assert (second["refused rounds"], third["own teachers' accuracy"]) == ("1", "unknown")


def test_scores_that_no_epsilon_covers_are_not_on_the_page(tmp_path):
    apart = {"ensemble": 0.917, "clients": [0.523, 0.634, None], "vote": 0.851}
    accuracy = SUMMARY["accuracy"] | dict.fromkeys(apart)
    areas = SUMMARY["auroc"] | {"ensemble": None, "clients": None}
    scores = {"accuracy": accuracy, "auroc": areas, "diagnostics": {"accuracy": apart}}
    shown = page(run(tmp_path, summary=SUMMARY | scores))
    first, *_ = check_structure(shown).rows("Each client: the epsilon that the run has cost it")
    assert list(first) == ["client", "epsilon spent", "refused rounds"]
    hidden = ("91.7", "52.3", "63.4", "85.1")
    assert not any(score in shown for score in hidden)
    control = SUMMARY | {"accuracy": SUMMARY["accuracy"] | apart}
    shown = page(run(tmp_path, summary=control))
    assert all(score in shown for score in hidden[:3])  # a page never shows the vote


def test_every_other_proof_stands_behind_the_smallest(tmp_path):
    others = [
        {"basis": "answers", "trust": "nobody", "epsilon": 1.89147},
        {"basis": "training", "trust": "nobody", "epsilon": 2.98795},
        {"basis": "training", "trust": "nobody", "epsilon": "inf"},
    ]
    proven = epsilon_of_all(CARD, 0.45712, basis="contraction", beside=others)
    row = check_structure(page(with_card(run(tmp_path), proven=proven))).rows("Bounds of this")[0]
    assert row["epsilon of the whole plan"] == "0.45712"
    assert row["proof"] == (
        "gdp_exact, by the training and the answers together; by the answers 1.8915, trust nobody; "
        "by the training 2.988, trust nobody"
    )


def test_traffic_is_in_all_for_each_client_and_for_each_image(tmp_path):
    asked, answered = check_structure(page(run(tmp_path))).rows("Payload")
    assert list(asked.values()) == ["asked, server to clients", "3.0 MB", "1.0 MB", "1.6 kB"]
    assert list(answered.values())[1:] == ["1.9 kB", "640 B", "1 B"]
    facts = run(tmp_path, settings={"clients_per_round": 1})
    asked, _ = check_structure(page(facts)).rows("Payload")
    assert list(asked.values())[1:] == ["3.0 MB", "1.0 MB", "4.7 kB"]  # two clients saw no image


def test_where_weights_leave_no_image_is_said_to_be_asked(tmp_path):
    shown = check_structure(page(with_card(run(tmp_path), answers="weights")))
    assert "images answered" not in shown.text_of("dl", class_="tiles")
    assert list(shown.rows("Payload")[0]) == ["direction", "in all", "for each client"]


def test_the_time_of_a_resumed_run_is_no_less_than_that_of_its_rounds(tmp_path):
    seconds = {"total": 5.0, "teachers": 4.0, "rounds": 60.0}  # total: of the last process
    shown = check_structure(page(run(tmp_path, summary=SUMMARY | {"seconds": seconds})))
    assert "time in all, without pauses64.0 s" in shown.text_of("section", id="traffic")


def test_the_command_and_every_setting_are_there(tmp_path):
    shown = check_structure(page(run(tmp_path)))
    assert shown.text_of("pre") == "fed-dpsd run rounds=5 'model.teachers=[cnn, mlp]'"
    assert "All 4 settings" in [each["text"] for each in shown.all("summary")]
    assert "stand for paths" not in page(run(tmp_path))
    other = run(tmp_path, command="fed-dpsd run data=mnist data.path=FOLDER")
    assert "stand for paths" in page(other)
    assert not check_structure(page(run(tmp_path, command=""))).all("pre")


def test_the_same_bits_are_promised_of_seeded_noise_alone(tmp_path):
    assert "the same student, bit by bit" in page(run(tmp_path))
    secret = page(run(tmp_path, settings={"noise": "secure"}))
    assert "bit by bit" not in secret
    assert "Its noise is secret, so that another run gives another student." in secret


def test_a_ledger_that_runs_share_stands_beside_what_this_run_has_cost(tmp_path):
    facts = run(tmp_path, ledgers={0: "9 charges: epsilon 3.5"})
    shown = check_structure(page(facts))
    first, second, _ = shown.rows("The ledger is one that runs share")
    assert first["its ledger, over its life (record, add_remove)"] == "9 charges: epsilon 3.5"
    assert second["its ledger, over its life (record, add_remove)"] == "unknown"
    assert "except ledger=FOLDER, where charges of other runs stand, too." in page(facts)


def test_where_nothing_is_proven_secret_noise_would_prove_nothing_either(tmp_path):
    facts = with_card(run(tmp_path, meaningful=False), proven=epsilon_of_all(CARD, "inf"))
    shown = check_structure(page(facts))
    assert not shown.all("div", class_="note")
    assert "nothing is proven: no meaningful protection" in shown.text_of("dl", class_="tiles")
    assert "trust nobody" not in shown.text_of("dl", class_="tiles")


def test_images_are_covered_only_by_what_is_proven(tmp_path):
    assert "So the proven epsilons cover them, too." in page(run(tmp_path))
    bare = page(with_card(run(tmp_path, meaningful=False), proven=epsilon_of_all(CARD, "inf")))
    assert "they may show what records look like" in bare
    assert "cover them" not in bare


def test_what_is_not_published_names_no_run(tmp_path):
    facts = run(tmp_path, published="nothing published: the papers' formulas give no epsilon")
    apart = check_structure(page(with_card(facts, epsilon_published="inf")))
    assert "by which papers name" not in apart.text_of("div", class_="apart")


# --- deployments ---


def test_a_deployments_page_has_hospitals_totals(tmp_path):
    shown = check_structure(page(deployment(tmp_path)))
    assert shown.text_of("h1") == "fed_dpsd on digits: a deployment with 3 hospitals"
    assert "how good it is, is unknown here" in shown.text_of("p", class_="lead")
    first, restored, _ = shown.rows("Each hospital")
    assert first["asks answered"] == "6 of 6"
    assert first["releases stated, by mechanism"] == "dp_sgd 1, label 512"
    assert first["epsilon spent (record, add_remove)"] == "2.5"
    assert restored["asks answered"] == "3 of 6"
    assert restored["remarks"] == (
        "its ledger lost 128 releases: an older state was restored; its records changed 1 time"
    )
    assert "spent" not in shown.rows("Bounds of this run")[0]  # hospitals keep their ledgers


def test_faults_are_told_once_each_with_when_they_were_seen(tmp_path):
    shown = check_structure(page(deployment(tmp_path)))
    spent, late = shown.rows("Asks that a hospital did not answer")
    if late["what happened"] != "no answer within 20 s":
        spent, late = late, spent
    assert (late["times"], spent["times"]) == ("2", "1")
    assert late["first"] == "round 2, 2026-11-25 08:52:23"
    assert late["last"].startswith("round 3, ")
    assert (spent["what happened"], spent["last"]) == ("the budget is <spent>", "-")
    assert "sent again, 1 time:" in page(deployment(tmp_path))
    longest = [each["text"] for each in shown.all("desc") if "longest wait" in each["text"]]
    assert longest == ["The longest wait was 20.0 s, in round 2."]


def test_without_faults_that_is_said(tmp_path):
    facts = deployment(tmp_path)
    quiet = [request for request in facts.requests if not request["refused"]]
    text = page(dataclasses.replace(facts, requests=quiet))
    assert "None: all 3 asks were answered by all." in text


def test_a_large_delta_protects_nothing_either(tmp_path):
    proven = epsilon_of_all(CARD, 0.1, delta=0.5)
    shown = page(with_card(run(tmp_path, meaningful=False), proven=proven))
    assert "In plain words: delta is that large, so from what left" in shown
    assert (guarantee.MEANINGFUL, guarantee.MEANINGFUL_DELTA) == (
        words.MEANINGFUL_EPSILON,
        words.MEANINGFUL_DELTA,
    )
    assert guarantee.BY == card.BY


# --- runs that have not completed ---

HALF = Unfinished(
    "a-run", 2, 5, "only 1 of 3 hospitals answered.", False, "flwr run APP federation"
)


def test_an_unfinished_deployment_tells_what_hospitals_have_stated(tmp_path):
    shown = check_structure(page(deployment(tmp_path, unfinished=HALF)))
    lead = shown.text_of("p", class_="lead")
    assert lead.startswith(
        "This deployment is not finished: it has done 2 of 5 rounds. It ended: only"
    )
    assert "the hospitals have stated charges of at most epsilon 2.5 (record, add_remove," in lead
    assert "; a ledger may hold one request more, whose answer was lost." in lead
    assert shown.all("pre")[0]["text"] == HALF.command
    assert "a-run stands for the path" in shown.text_of("main")
    assert "diagnostics" not in shown.text_of("section", id="traffic")  # hospitals give none
    assert "of the whole plan, for a record" in shown.text_of("dl", class_="tiles")
    quiet = page(deployment(tmp_path, unfinished=HALF, costs={}))
    assert "So far no hospital has stated a charge; a ledger may hold one request more" in quiet


@pytest.mark.parametrize(
    ("spent", "said"),
    [
        (0.0, "So far no client has been charged."),
        (1.23451, "cost a client at most epsilon 1.24 (record, add_remove, trust nobody, delta"),
        (
            "inf",
            "So far nothing is proven of what it has released: epsilon inf (record, add_remove)",
        ),
    ],
)
def test_what_an_unfinished_run_has_spent_is_told_first(tmp_path, spent, said):
    facts = with_card(run(tmp_path, unfinished=HALF), proven=epsilon_of_all(CARD, 3.0, spent=spent))
    assert said in check_structure(page(facts)).text_of("p", class_="lead")
