"""Tables of sweeps and of attacks: reading them, and the numbers written."""

import csv
import io
import math
import re

import numpy as np
import pytest
from scipy.stats import ttest_rel

from fed_dpsd.errors import UserError
from fed_dpsd.report.settings import NEEDED, RESULTS, read_settings, rows_by_key, setting_names
from fed_dpsd.report.sweep_charts import ROUND_COLUMNS
from fed_dpsd.report.tables import (
    FIRST_LINE,
    SUMMARY_START,
    Grid,
    csv_text,
    differences,
    markdown,
    markdown_table,
    summary,
    write_own,
)
from fed_dpsd.sweep import sweep as sweeps
from fed_dpsd.sweep.reported import settings_in
from tests.sweep.test_sweep import TINY, at_once


def lines(page):
    """The rows of the last Markdown table as dictionaries by its header, and the header."""
    last = next(part for part in reversed(page.split("\n\n")) if part.startswith("|"))
    found = [line.strip("|").split("|") for line in last.splitlines()]
    header, _, *rows = ([cell.strip() for cell in line] for line in found)
    return header, [dict(zip(header, row, strict=True)) for row in rows]


def test_means_and_sample_deviations_over_seeds(table):
    """Of 0.5, 0.6 and 0.8: mean 63.33 %, deviation sqrt(0.07 / 3) = 15.28 points."""
    areas = {0.5: "", 0.6: 0.9, 0.8: 0.7}
    seeds = [{"student": s, "auroc_student": a, "num_classes": 2} for s, a in areas.items()]
    other = {"num_classes": 2, "rounds": 40, "student": 0.25, "seed": 0, "record_add_remove": "inf"}
    settings = read_settings([table(*seeds, other)])
    header, (first, second) = lines(markdown(settings))
    assert header[:5] == ["rounds", "student", "ensemble", "auroc_student", "seeds"]
    claims = ("record, add_remove", "record, replace_one", "patient, add_remove")
    claims += ("client, add_remove",)
    assert [first[c] for c in header[:5]] == ["20", "63.3 ± 15.3", "90.0 ± 0.0", "80.0 ± 14.1", "3"]
    assert [first[f"epsilon {claim}"] for claim in claims] == ["2", "4", "inf", "8"]
    assert (second["student"], second["seeds"], second["auroc_student"]) == ("25.0", "1", "")
    assert second["epsilon record, add_remove"] == "inf"
    row, _ = csv.DictReader(io.StringIO(summary(settings)))
    assert (row["seeds"], row["data"], row["rounds"], row["delta"]) == ("3", "mnist", "20", "1e-05")
    assert float(row["student_mean"]) == pytest.approx(190 / 3)
    assert float(row["student_deviation"]) == pytest.approx(100 * math.sqrt(0.07 / 3))
    ten = read_settings([table({"auroc_student": 0.9}, name="ten.csv")])
    assert "auroc_student" not in markdown(ten)  # areas are for two classes


def test_an_epsilon_is_rounded_up_and_is_the_largest_of_its_seeds(table):
    settings = read_settings(
        [table({"record_add_remove": 1.00001}, {"record_add_remove": 1.23451})]
    )
    _, (row,) = lines(markdown(settings))
    assert row["epsilon record, add_remove"] == "1.24"
    (row,) = csv.DictReader(io.StringIO(summary(settings)))
    assert row["record_add_remove"] == "1.23451"  # unrounded


def test_costs_are_summed_and_averaged_over_seeds(table):
    """Seconds 7 and 9: mean 8, deviation sqrt(2). One run knows no bytes; one setting, nothing."""
    cost = {"forward_answers": 1000, "backward_answers": 500, "bytes_to_clients": 3e6}
    cost |= {"bytes_to_server": 250_000, "seconds_rounds": 7}
    seeds = [cost, cost | {"forward_answers": 2000, "bytes_to_server": "", "seconds_rounds": 9}]
    settings = read_settings([table(*seeds, {"rounds": 40})])
    titles = ("teacher answers", "megabytes", "seconds of rounds")
    _, (first, second) = lines(markdown(settings))
    assert [first[title] for title in titles] == ["2,000", "3.25", "8.0"]
    assert [second[title] for title in titles] == ["", "", ""]
    first, second = csv.DictReader(io.StringIO(summary(settings)))
    means = [first[f"{title.replace(' ', '_')}_mean"] for title in titles]
    assert [float(mean) for mean in means] == pytest.approx([2000, 3.25, 8])
    assert float(first["seconds_of_rounds_deviation"]) == pytest.approx(math.sqrt(2))
    assert first["megabytes_deviation"] == second["megabytes_mean"] == ""
    assert "answers" not in markdown(read_settings([table({}, name="none.csv")]))


def test_the_epsilon_of_a_label_has_columns_of_its_own_and_is_no_records(table):
    label = {"label_replace_one": 1.00001, "label_delta": "0.0", "label_trust": "nobody"}
    label |= {"record_add_remove": "inf", "method": "central"}
    settings = read_settings([table(label, label | {"label_replace_one": 1.5}, {"method": "dpsd"})])
    _, (private, other) = lines(markdown(settings))
    title = "epsilon of labels alone, replace_one"
    assert (private[title], private["its delta"], private["its trust"]) == ("1.5", "0.0", "nobody")
    assert private["epsilon record, add_remove"] == "inf"
    assert (other[title], other["its delta"], other["its trust"]) == ("", "", "")
    assert "labels alone protects no image" in " ".join(markdown(settings).split())
    first, second = csv.DictReader(io.StringIO(summary(settings)))
    assert (first["label_replace_one"], second["label_replace_one"]) == ("1.00001, 1.5", "")


def test_a_setting_is_named_by_what_sets_it_apart(table):
    """Columns that follow from a grid's name, and equal columns, are left out."""
    rows = [
        {"method": "dpsd", "privacy": "label", "on": "true"},
        {"method": "dense", "privacy": "label", "answers.k": 3, "on": "true"},
        {"method": "dense", "privacy": "votes", "on": "false"},
    ]
    settings = read_settings([table(*rows)])
    assert setting_names(settings) == [
        *("dpsd, label, on=true", "dense, label, on=true, k=3", "dense, votes, on=false"),
    ]
    assert setting_names(settings, ("method", "on")) == ["label", "label, k=3", "votes"]
    assert setting_names(settings[:1]) == ["the only setting"]
    grids = [
        {"grid": "DENSE", "method": "dense", "rounds": 20, "reason": "weights leave"},
        {"grid": "DENSE", "method": "dense", "rounds": 40},
        {"grid": "bounds", "method": "ensemble", "rounds": 1},
    ]
    settings = read_settings([table(*grids)])
    header, (first, *_) = lines(markdown(settings))
    assert header[:3] == ["grid", "rounds", "student"]
    assert setting_names(settings) == ["DENSE, rounds=20", "DENSE, rounds=40", "bounds"]
    assert first["why inf"] == "weights leave"
    equal = markdown(
        read_settings([table(*({"privacy": p, "mechanism": p} for p in ("label", "votes")))])
    )
    assert lines(equal)[0][0] == "mechanism"
    assert "`data=mnist`, `num_classes=10`, `teachers_per_client=1`" in " ".join(equal.split())
    assert "Commit abc. Machine: m." in equal


def test_several_tables_are_one_and_a_repeated_key_counts_once(table):
    first = table({}, {"student": 0.7}, name="a.csv")
    second = table({"key": "a.csv1", "seed": 1, "student": 0.7}, {"seed": 2}, name="b.csv")
    (setting,) = read_settings([first, second])
    assert [run["student"] for run in setting.runs] == ["0.5", "0.7", "0.5"]
    paths = table({}, name="a.csv"), table({"answers.k": 3}, name="b.csv")
    assert [each.values.get("answers.k") for each in read_settings(paths)] == [None, "3"]


def test_what_cannot_be_read_is_an_error_that_names_file_and_cell(table, tmp_path):
    cases = [
        ([{"student": "good"}], r"curve.csv: student='good' of curve.csv0 is not a number"),
        ([{"forward_answers": "many"}], r"curve.csv: forward_answers='many' of curve.csv0 is not"),
        ([{"partition.alpha": "[1]"}], r"curve.csv: partition.alpha='\[1\]' of curve.csv0 is not"),
        ([{"record_add_remove": ""}], r"curve.csv: record_add_remove='' of curve.csv0 is not a"),
        ([{"seed": 3}, {"seed": 3}], r"seed=3 occurs twice .*curve.csv0 and curve.csv1"),
    ]
    for rows, expected in cases:
        with pytest.raises(UserError, match=expected):
            read_settings([table(*rows)])
    for column in NEEDED:
        with pytest.raises(UserError, match=rf"curve.csv has no column '{column}'"):
            read_settings([table({}, without=(column,))])
    with pytest.raises(UserError, match=r"none.csv cannot be read .*No such file"):
        read_settings([tmp_path / "none.csv"])
    for header in (",".join(NEEDED), "key"):  # a sweep begins with the latter
        (tmp_path / "empty.csv").write_text(f"{header}\n")
        with pytest.raises(UserError, match="empty.csv: no run to report"):
            read_settings([tmp_path / "empty.csv"])


def test_a_wrong_file_next_to_a_table_is_an_error_and_of_two_files_the_last_counts(tmp_path):
    columns = ROUND_COLUMNS
    header = ",".join(("key", *columns))
    cases = {
        "key,round\n": "curve_rounds.csv has no column 'student_accuracy'",
        "round\n": "curve_rounds.csv has no column 'key'",
        f"{header}\nk,one,,,\n": "curve_rounds.csv: round='one' of k is not a number",
        f"{header}\nk,1,a,0,0\n": "curve_rounds.csv: student_accuracy='a' of k is not a number",
    }
    for name in ("curve.csv", "again.csv"):
        (tmp_path / name).write_text("key,commit\nk,abc\nother,abc\n")
    for content, expected in cases.items():
        (tmp_path / "curve_rounds.csv").write_text(content)
        with pytest.raises(UserError, match=expected):
            rows_by_key([tmp_path / "curve.csv"], "rounds", columns)
    (tmp_path / "curve_rounds.csv").write_text(f"{header}\nk,1,0.5,,\nother,1,0.5,,\n")
    (tmp_path / "again_rounds.csv").write_text("key,round,seconds,student_accuracy\nk,1,5,0.7\n")
    paths = [tmp_path / "curve.csv", tmp_path / "again.csv", tmp_path / "none.csv"]
    found = rows_by_key(paths, "rounds", columns)
    assert [row["student_accuracy"] for row in found["k"]] == ["0.7"]
    assert len(found["other"]) == 1


def test_a_file_that_the_report_did_not_write_stays(table, tmp_path):
    settings = read_settings([table({})])
    for name, text, start in (
        ("results.md", markdown(settings), FIRST_LINE),
        ("results_summary.csv", summary(settings), SUMMARY_START),
    ):
        mine = tmp_path / name
        mine.write_text("key\n")
        with pytest.raises(UserError, match=rf"{name} was not written by .*choose another --out"):
            write_own(mine, text, start)
        assert mine.read_text() == "key\n"
        written = write_own(tmp_path / "new" / name, text, start)
        assert write_own(written, text, start) == written


def test_every_column_of_a_sweep_is_a_result_or_a_setting(tmp_path):
    planned = sweeps.plan((*TINY, "seed=0"), tmp_path / "sweep", tmp_path, print)
    assert not sweeps.run(planned, at_once, tmp_path / "table.csv", print)
    (setting,) = read_settings([tmp_path / "table.csv"])
    given = {override.split("=")[0] for override in TINY}
    fixed = {"method", "data", "num_classes", "num_clients", "teachers_per_client", "mechanism"}
    assert set(setting.values) == given | fixed
    assert set(setting.runs[0]) == given | fixed | RESULTS | {"grid"}  # which is empty here


def test_one_run_of_two_tables_with_other_results_is_not_dropped(table):
    row = {"key": "run", "student": 0.5, "data_sha256": "1"}
    tables = [table(row, name="a.csv"), table(row | {"student": 0.9}, name="b.csv")]
    with pytest.raises(UserError, match="run@table 1 and run@table 2"):
        read_settings(tables)
    tables[1] = table(row | {"student": 0.9, "data_sha256": "2"}, name="b.csv")
    settings = settings_in(tables)
    assert [s.values["data contents"] for s in settings] == ["1", "2"]
    assert [run["student"] for s in settings for run in s.runs] == ["0.5", "0.9"]
    header = ",".join(("key", *ROUND_COLUMNS))
    for path, score in zip(tables, (0.5, 0.9), strict=True):
        path.with_stem(f"{path.stem}_rounds").write_text(f"{header}\nrun,1,{score},8,8\n")
    rounds = rows_by_key(tables, "rounds", ROUND_COLUMNS)
    found = [rounds[run["key"]][0]["student_accuracy"] for s in settings for run in s.runs]
    assert found == ["0.5", "0.9"]
    third = table(row | {"commit": "1ced"}, name="c.csv")
    scores = [run["student"] for s in settings_in([*tables, third]) for run in s.runs]
    assert scores == ["0.5", "0.9", "0.5"]


def test_one_grid_of_two_commits_is_compared_and_not_merged(table):
    rows = [{"key": f"{g}{n}", "grid": g, "seed": n} for g in "ab" for n in range(3)]
    old = table(*(row | {"student": 0.5 + 0.01 * row["seed"]} for row in rows), name="old.csv")
    new = table(*(row | {"student": 0.6, "commit": "1ced"} for row in rows), name="new.csv")
    for path, score in ((old, 0.5), (new, 0.6)):
        lines = [f"{row['key']},{n},{score},8,8" for row in rows for n in (1, 2)]
        header = ",".join(("key", *ROUND_COLUMNS))
        path.with_stem(f"{path.stem}_rounds").write_text("\n".join([header, *lines, ""]))
    settings = read_settings([old, new])
    names = ["a, commit abc", "b, commit abc", "a, commit 1ced", "b, commit 1ced"]
    assert setting_names(settings) == names
    assert [len(setting.runs) for setting in settings] == [3] * 4
    known = rows_by_key([old, new], "rounds", ROUND_COLUMNS)
    scores = [known[run["key"]][0]["student_accuracy"] for s in settings for run in s.runs]
    assert scores == ["0.5"] * 6 + ["0.6"] * 6
    _, *found = differences(settings, "commit abc")
    assert [(row[0], row[1].partition(" (")[0]) for row in found] == [
        ("a, commit 1ced", "+9.0 ± 1.0"),
        ("b, commit 1ced", "+9.0 ± 1.0"),
    ]
    part = table({**rows[0], "key": "other", "commit": "1ced"}, name="part.csv")  # another key
    assert setting_names(read_settings([old, part])) == ["a, commit abc", "b", "a, commit 1ced"]
    same = [table(*rows, name=name) for name in ("one.csv", "two.csv")]
    assert setting_names(read_settings(same)) == ["a", "b"]  # the control: one commit


# --- paired differences ---

FIRST, SECOND = (0.70, 0.90, 0.80), (0.75, 0.92, 0.86)


def runs(grid, students, **more):
    return [{"grid": grid, "seed": n, "student": s} | more for n, s in enumerate(students)]


def test_an_interval_is_that_of_a_paired_test(table):
    """An unpaired interval, for such different students, would be three times as wide."""
    path = table(*runs("first", FIRST), *runs("second", SECOND))
    header, (name, cell, pairs) = differences(read_settings([path]), "first")
    assert (header, name, pairs) == (["minus first", "student", "pairs"], "second", "3")
    test = ttest_rel(SECOND, FIRST)
    low, high = test.confidence_interval(0.95)
    assert f" ± {100 * np.std(np.subtract(SECOND, FIRST), ddof=1):.1f} " in cell
    numbers = [float(number) for number in re.findall(r"[+-][\d.]+", cell)]
    mean = sum(SECOND) / 3 - sum(FIRST) / 3
    assert numbers == pytest.approx([100 * mean, 100 * low, 100 * high], abs=0.05)


def test_two_pairs_have_no_interval(table):
    for number, interval in ((2, False), (3, True)):
        path = table(*runs("first", FIRST[:number]), *runs("second", SECOND[:number]))
        _, (_, cell, pairs) = differences(read_settings([path]), "first")
        assert (pairs, " to " in cell, " ± " in cell) == (str(number), interval, True)


def test_only_seeds_that_both_have_are_compared(table):
    two = {"num_classes": 2, "auroc_student": 0.9}
    cases = [  # rows of the second setting in any order, and what is shown
        (list(reversed(runs("second", (*SECOND[:2], 0.1))[:2])), ["second", "+3.5 ± 2.1", "2"]),
        (runs("second", SECOND[:1]), ["second", "+5.0", "1"]),
        ([{"grid": "second", "seed": 5, "student": 0.5}], ["second", "", "0"]),
    ]
    for others, expected in cases:
        _, row = differences(read_settings([table(*runs("first", FIRST), *others)]), "first")
        assert [row[0], row[1].partition(" (")[0], row[2]] == expected
    path = table(*runs("first", FIRST, **two), *runs("second", SECOND[:1], **two))
    header, row = differences(read_settings([path]), "first")
    assert header == ["minus first", "student", "auroc_student", "pairs"]
    assert row[2] == "+0.0"
    with pytest.raises(UserError, match="--against='third' is not .*; give one of: first; second"):
        differences(read_settings([path]), "third")
    path = table(*({"grid": "one", "rounds": rounds} for rounds in (1, 2)), {"grid": "two"})
    with pytest.raises(UserError, match="give one of: one; two; one, rounds=1; one, rounds=2"):
        differences(read_settings([path]), "rounds=3")
    with pytest.raises(UserError, match="^--against='x': there is one setting, .*; leave out --ag"):
        differences(read_settings([table({}, {"seed": 1})]), "x")


def test_runs_are_paired_by_seed_and_by_every_varied_key(table):
    """Alphas that differ far more than methods do not widen the interval."""
    rows = [
        {"grid": grid, "method": grid, "partition.alpha": alpha, "seed": seed}
        | {"student": base + 0.01 * seed + more}
        for grid, more in (("a", 0.0), ("b", 0.02))
        for alpha, base in ((0.5, 0.9), (0.1, 0.5))
        for seed in range(3)
    ]
    rows[-1]["student"] = 0.55
    settings = read_settings([table(*rows)])
    header, *found = differences(settings, "a")
    assert header == ["minus a", "student", "pairs"]
    assert [(row[0], row[1].partition(" (")[0], row[2]) for row in found] == [
        ("b, alpha=0.5", "+2.0 ± 0.0", "3"),
        ("b, alpha=0.1", "+2.3 ± 0.6", "3"),
    ]
    _, *found = differences(settings, "a, alpha=0.5")
    assert {row[0]: row[2] for row in found} == {
        **{"a, alpha=0.1": "0", "b, alpha=0.5": "3", "b, alpha=0.1": "0"},
    }


# --- lines by alpha ---


def test_a_table_has_a_line_for_each_method_and_a_column_for_each_alpha(table):
    rows = [
        {"method": method, "partition.alpha": alpha, "seed": seed, "student": student}
        | {"record_add_remove": epsilon, "caveats": "seeded noise"}
        for method, epsilon, students in (
            ("feddf", "inf", {0.5: (0.9, 0.96), 0.1: (0.4, 0.5)}),
            ("a_b", 1.0001, {0.5: (0.89, 0.9), 0.1: (0.7, 0.7)}),
            ("c", 2, {0.5: (0.6, 0.7)}),
        )
        for alpha, own in students.items()
        for seed, student in enumerate(own)
    ]
    grid = Grid.of(read_settings([table(*rows)]))
    assert grid.markdown().splitlines()[-5:] == [
        "|  | mnist, alpha 0.5 | mnist, alpha 0.1 | epsilon |",
        "| --- | --- | --- | --- |",
        "| feddf | **93.0 ± 4.2** | 45.0 ± 7.1 | inf |",
        "| a_b | **89.5 ± 0.7** | **70.0 ± 0.0** | 1.01 |",
        "| c | 65.0 ± 7.1 | - | 2 |",
    ]
    for text in ("trust nobody", "delta 1e-05", "record, add_remove", "seeded noise", "2 seeds"):
        assert text in grid.caption
    latex = grid.latex("curve")
    assert r"a\_b & \textbf{89.5} $\pm$ 0.7 & \textbf{70.0} $\pm$ 0.0 & 1.01 \\" in latex
    assert r"c & 65.0 $\pm$ 7.1 & -- & 2 \\" in latex
    assert r"\label{tab:curve}" in latex
    assert not re.search(r"(?<!\\)[%_]", latex.partition("\n")[2])


def test_a_table_has_the_columns_of_all_rows():
    assert csv_text([{"a": 1}, {"a": 2, "b": 0.1}, {"b": math.nan}]) == "a,b\n1,\n2,0.1\n,\n"
    assert markdown_table([["x", "y"], ["1", "2"]]) == "| x | y |\n| --- | --- |\n| 1 | 2 |"
