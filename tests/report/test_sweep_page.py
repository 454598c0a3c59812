"""The page of a sweep: a chart first, few columns, and everything else on demand."""

import pytest

from fed_dpsd.report.facts import Unfinished
from fed_dpsd.report.pages import sweep_page
from fed_dpsd.report.settings import read_settings
from fed_dpsd.report.sweep_charts import ROUND_COLUMNS
from fed_dpsd.report.tables import FIRST_LINE
from tests.report.conftest import write_table
from tests.report.runs import check_structure

OWN = {"epsilon_published": "inf", "caveats": "seeded noise; per run"}
STOPPED = Unfinished("ab12", 2, 5, "the disk is full", False, "fed-dpsd resume ab12")


def page(path, rounds=None, differences=(), unfinished=()):
    text = sweep_page("curve", read_settings([path]), rounds or {}, differences, unfinished)
    assert text.startswith(FIRST_LINE)
    return check_structure(text)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Labels at three epsilons and without privacy, two seeds each; two trust the server."""
    rows = []
    for epsilon, student, trust in (
        *((1, 0.6, "nobody"), (3, 0.8, "nobody"), (51200, 0.9, "server"), ("inf", 0.97, "server")),
    ):
        for seed in (0, 1):
            rows.append(
                OWN
                | {"record_add_remove": epsilon, "record_replace_one": epsilon, "seed": seed}
                | {"student": student + seed / 50, "trust": trust, "target": f"t{epsilon}"}
            )
    path = write_table(tmp_path_factory.mktemp("sweep"), *rows)
    return page(path, unfinished=[STOPPED])


def test_the_best_and_the_best_protected_are_named_before_the_chart(shown, table):
    assert shown.text_of("h1") == "4 settings compared on mnist"
    tags = [e["tag"] for e in shown.elements]
    assert tags.index("svg") < tags.index("h2")
    lead = shown.text_of("p", class_="lead")
    assert "Best student: 98.0 ± 1.4 % (tinf), with nothing proven about a record." in lead
    protected = "at most 10: 81.0 ± 1.4 % (t3), with epsilon 3 (record, add_remove, trust nobody,"
    assert protected in lead
    rows = [{"record_add_remove": 512}, {"record_add_remove": "inf", "rounds": 1}]
    lead = page(table(*rows)).text_of("p", class_="lead")
    assert "No setting has a proven epsilon of 10 or less for a record." in lead
    none = page(table({"student": ""}, {"student": "", "rounds": 1}))
    assert "No setting has a student" in none.text_of("p", class_="lead")
    assert not none.all("svg")


def test_the_table_has_few_columns_and_privacy_among_them(shown, table):
    rows = shown.rows("Mean and standard deviation")
    assert list(rows[0]) == [
        *("setting", "student, %", "ensemble, %", "epsilon, record added or removed"),
        *("epsilon, record replaced", "trust, delta", "seeds"),
    ]
    assert [row["epsilon, record added or removed"] for row in rows] == ["1", "3", "51,200", "inf"]
    assert [row["trust, delta"] for row in rows][1:3] == ["nobody, 1e-05", "server, 1e-05"]
    shared = page(table({"record_add_remove": 1}, {"rounds": 1}))  # by all settings
    (caption,) = [text for text in shared.texts("caption") if "Mean and" in text]
    assert "trust nobody, delta 1e-05" in caption
    assert "trust, delta" not in shared.rows("Mean and")[0]


def test_epsilons_that_say_no_more_than_a_hundred_stand_together(shown):
    assert "> 100" in shown.texts("text")
    rows = shown.rows("Accuracy of students against the proven epsilon")
    own = {row["proven epsilon of a run (record, add_remove)"]: row["label"] for row in rows}
    means = [own[x].split()[0] for x in ("1", "3", "51,200", "inf")]
    assert means == ["61.0", "81.0", "91.0", "98.0"]


def test_without_a_curve_settings_are_dots_with_what_a_paper_prints(table):
    base = {"experiment": "table6", "seed": 0}
    path = table(
        base | {"grid": "labels, all", "student": 0.6, "method": "a"},
        base | {"grid": "other", "student": 0.9, "method": "b"},
    )
    first, second = page(path).rows("Accuracy of students on the test images")
    assert list(first.values()) == ["labels, all", "60.0", "98.19"]
    assert list(second.values()) == ["other", "90.0", "-"]


def test_details_hold_every_epsilon_with_its_meaning_and_the_published_one_apart(shown, table):
    (text,) = [each for each in shown.texts("details") if each.startswith("t3:")]
    assert "epsilon proven (record, add_remove)3; trust nobody, delta 1e-05" in text
    assert "epsilon proven (client, add_remove)8; trust nobody, delta 1e-05" in text
    assert "published by the papers' formulasnothing" in text
    two = {"num_classes": 2, "auroc_student": 0.75, "label_replace_one": 1.00001, "reason": "why"}
    two |= {"label_delta": "0.0", "label_trust": "nobody", "epsilon_published": 3}
    (text, *_) = page(table(two)).texts("details")
    assert "student, accuracy, %50.0" in text
    assert "student, AUROC, %75.0" in text
    assert "(label, replace_one)1.01; delta, trust: 0.0, nobody; it protects no image" in text
    assert "formulas3; it guarantees nothing" in text
    assert "why an epsilon is infwhy" in text
    assert "AUROC" not in shown.text_of("main")


def test_a_plug_ins_epsilon_is_not_reviewed(table):
    note = "not reviewed: nothing is proven of what p does"
    rows = [{"record_add_remove": 1, "caveats": note}, {"rounds": 1, "caveats": note}]
    found = page(table(*rows))
    assert found.rows("Mean and")[0]["epsilon, record added or removed"] == "1, not reviewed"
    assert "not reviewed" in found.text_of("p", class_="lead")


def test_curves_alphas_and_differences_are_there_if_known(shown, table):
    path = table(*({"partition.alpha": a, "seed": 0} for a in (0.1, 0.5)))
    line = dict.fromkeys(ROUND_COLUMNS, 1) | {"student_accuracy": 0.5}
    rounds = {
        "curve.csv0": [{k: str(v) for k, v in line.items()} | {"round": str(n)} for n in (1, 2)]
    }
    differences = [["minus x", "student", "seeds"], ["y", "+1.0", "2"]]
    found = page(path, rounds, differences)
    assert found.texts("h2")[:4] == [
        *("The settings", "Differences, seed by seed", "Over the rounds"),
        "How much clients differ",
    ]
    assert found.rows("Differences between students")[0]["student"] == "+1.0"
    assert "Over the rounds" not in shown.texts("h2")


def test_only_an_experiment_of_ours_is_repeated_by_its_name(table):
    command = "fed-dpsd sweep experiment=ci"
    assert command in page(table({"experiment": "ci"})).text_of("main")
    assert "fed-dpsd sweep" not in page(table({"experiment": "my_grid"})).text_of("main")


def test_text_of_a_table_is_escaped(table):
    found = page(table({"grid": "<script>&"}, {"grid": "other", "rounds": 40}))
    assert found.rows("Mean and")[0]["setting"].startswith("<script>&")
    assert len(found.all("script")) == 1


def test_unfinished_runs_seeded_noise_and_caveats_are_named(shown, table):
    unfinished, seeded = shown.texts("div", class_="note")
    assert "Not complete: 1 run is not included in these numbers." in unfinished
    assert "ab12: it has done 2 of 5 rounds. It ended: the disk is full." in unfinished
    assert "their own files carry no guarantee" in seeded
    both = ("seeded noise; per run; delta is below one over 5", "seeded noise; per run")
    rows = [{"caveats": each, "seed": n, "record_add_remove": "inf"} for n, each in enumerate(both)]
    bare = page(table(*rows))
    assert not bare.all("div", class_="note")  # no finite epsilon rests on the noise
    assert "seeded noise; per run; delta is below one over 5" in bare.text_of("main")
