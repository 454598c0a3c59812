"""The page of a sweep: a chart first, few columns, and everything else on demand."""

import pytest

from fed_dpsd.report.facts import Unfinished
from fed_dpsd.report.pages import sweep_page
from fed_dpsd.report.settings import read
from fed_dpsd.report.tables import FIRST_LINE
from tests.report.runs import check_structure

OWN = {"epsilon_published": "inf", "caveats": "seeded noise; per run"}


def shown(settings, rounds=None, pairs=None, differences=(), unfinished=()):
    text = sweep_page("curve", settings, rounds or {}, pairs or {}, differences, unfinished)
    assert text.startswith(FIRST_LINE)
    return check_structure(text)


@pytest.fixture
def settings(table):
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
    return read([table(*rows)])


def test_the_title_says_what_it_is_and_the_chart_comes_first(settings):
    page = shown(settings)
    assert page.text_of("h1") == "4 settings compared on mnist"
    tags = [e["tag"] for e in page.elements]
    assert tags.index("svg") < tags.index("h2")


def test_the_best_is_named_and_so_is_the_best_that_is_protected(settings):
    lead = shown(settings).text_of("p", class_="lead")
    assert "Best student: 98.0 ± 1.4 % (tinf), with nothing proven about a record." in lead
    assert (
        "at most 10: 81.0 ± 1.4 % (t3), with epsilon 3 (record, add_remove, trust nobody," in lead
    )


def test_without_protection_the_page_says_so(table):
    rows = [{"record_add_remove": 512}, {"record_add_remove": "inf", "rounds": 1}]
    lead = shown(read([table(*rows)])).text_of("p", class_="lead")
    assert "No setting has a proven epsilon of 10 or less for a record." in lead


def test_the_table_has_few_columns_and_privacy_among_them(settings):
    rows = shown(settings).rows("Mean and standard deviation")
    assert list(rows[0]) == [
        *("setting", "student, %", "ensemble, %", "epsilon, record added or removed"),
        *("epsilon, record replaced", "trust, delta", "seeds"),
    ]
    assert [row["epsilon, record added or removed"] for row in rows] == ["1", "3", "51,200", "inf"]
    assert [row["trust, delta"] for row in rows][1:3] == ["nobody, 1e-05", "server, 1e-05"]


def test_what_all_settings_share_is_in_the_caption(table):
    page = shown(read([table({"record_add_remove": 1}, {"rounds": 1})]))
    (caption,) = [e["text"] for e in page.all("caption") if "Mean and" in e["text"]]
    assert "trust nobody, delta 1e-05" in caption
    assert "trust, delta" not in page.rows("Mean and")[0]


def test_epsilons_that_say_no_more_than_a_hundred_stand_together(settings):
    page = shown(settings)
    assert "> 100" in [e["text"] for e in page.all("text")]
    rows = page.rows("Accuracy of students against the proven epsilon")
    numbers = {row["proven epsilon of a run (record, add_remove)"]: row for row in rows}
    own = {x: row["label, 1 teacher per client"] for x, row in numbers.items()}
    assert [own[x].split()[0] for x in ("1", "3", "51,200", "inf")] == [
        "61.0",
        "81.0",
        "91.0",
        "98.0",
    ]


def test_without_a_curve_settings_are_bars_with_what_a_paper_prints(table):
    base = {"experiment": "table6", "seed": 0}
    path = table(
        base | {"grid": "labels, all", "student": 0.6, "method": "a"},
        base | {"grid": "other", "student": 0.9, "method": "b"},
    )
    first, second = shown(read([path])).rows("Accuracy of students on the test images")
    assert list(first.values()) == ["labels, all", "60.0", "98.19"]
    assert list(second.values()) == ["other", "90.0", "-"]


def test_details_hold_every_epsilon_with_its_meaning_and_the_published_one_apart(settings):
    page = shown(settings)
    (text,) = [each for each in page.texts("details") if each.startswith("t3:")]
    assert "epsilon proven (record, add_remove)3; trust nobody, delta 1e-05" in text
    assert "epsilon proven (client, add_remove)8; trust nobody, delta 1e-05" in text
    assert "published by the papers' formulasnothing" in text


def test_a_plug_ins_epsilon_is_not_reviewed(table):
    note = "not reviewed: nothing is proven of what p does"
    rows = [{"record_add_remove": 1, "caveats": note}, {"rounds": 1, "caveats": note}]
    page = shown(read([table(*rows)]))
    row = page.rows("Mean and")[0]
    assert row["epsilon, record added or removed"] == "1, not reviewed"
    assert "not reviewed" in page.text_of("p", class_="lead")


def test_curves_alphas_classes_and_differences_are_there_if_known(table):
    rows = [{"partition.alpha": a, "seed": 0} for a in (0.1, 0.5)]
    path = table(*rows)
    settings = read([path])
    line = {"seconds": 1, "forward_answers": 10, "backward_answers": 0, "student_accuracy": 0.5}
    rounds = {
        "curve.csv0": [{k: str(v) for k, v in line.items()} | {"round": str(n)} for n in (1, 2)]
    }
    pairs = {"curve.csv0": [{"truth": "1", "predicted": "1", "count": "5"}]}
    differences = [["minus x", "student", "seeds"], ["y", "+1.0", "2"]]
    page = shown(settings, rounds, pairs, differences)
    titles = [e["text"] for e in page.all("h2")]
    assert titles[:5] == [
        *(
            "The settings",
            "Differences, seed by seed",
            "Over the rounds",
            "How much clients differ",
        ),
        "Class by class",
    ]
    assert page.rows("Accuracy of each class")[0]["1"] == "100"
    assert page.rows("Differences between students")[0]["student"] == "+1.0"
    bare = shown(settings)
    assert "Over the rounds" not in [e["text"] for e in bare.all("h2")]


def test_text_of_a_table_is_escaped(table):
    page = shown(read([table({"grid": "<script>&"}, {"grid": "other", "rounds": 40})]))
    assert page.rows("Mean and")[0]["setting"].startswith("<script>&")
    assert len(page.all("script")) == 1


def test_runs_that_have_not_completed_are_named_before_the_numbers(settings):
    stopped = Unfinished("ab12", 2, 5, "the disk is full", False, "fed-dpsd resume ab12")
    note = shown(settings, unfinished=[stopped]).texts("div", class_="note")[0]
    assert "Not complete: 1 run is in none of these numbers." in note
    assert "ab12: it has done 2 of 5 rounds. It ended: the disk is full." in note
    assert "Not complete" not in shown(settings).text_of("main")


def test_seeded_noise_is_reported_where_a_finite_epsilon_rests_on_it(table, settings):
    (note,) = shown(settings).all("div", class_="note")
    assert "their own files carry no guarantee" in note["text"]
    bare = read([table(OWN | {"record_add_remove": "inf"})])
    assert not shown(bare).all("div", class_="note")


def test_a_caveat_that_two_seeds_have_is_shown_once(table):
    both = ("seeded noise; per run; delta is below one over 5", "seeded noise; per run")
    (setting,) = read([table(*({"caveats": each, "seed": n} for n, each in enumerate(both)))])
    assert setting.caveats == ["seeded noise", "per run", "delta is below one over 5"]
    assert "per run; delta is below one over 5" in shown([setting]).text_of("main")
