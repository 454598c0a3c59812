"""Reports: numbers of the tables, and what the figure shows as proven."""

import csv
import io
import math

import pytest
from matplotlib.collections import PathCollection

from fed_dpsd.errors import UserError
from fed_dpsd.report.curve import NOT_PROVEN, draw
from fed_dpsd.report.figure import save
from fed_dpsd.report.literature import published
from fed_dpsd.report.settings import NEEDED, RESULTS, names, read
from fed_dpsd.report.table import FIRST_LINE, markdown, summary, write_page, write_summary
from fed_dpsd.sweep import sweep as sweeps
from tests.sweep.test_sweep import TINY, at_once


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def lines(page):
    return [cells(line) for line in page.splitlines() if line.startswith("|")]


# --- the table ---


def test_means_and_sample_deviations_over_seeds(table):
    """Of 0.5, 0.6 and 0.8: mean 63.33 %, deviation sqrt(0.07 / 3) = 15.28 points."""
    areas = {0.5: "", 0.6: 0.9, 0.8: 0.7}
    seeds = [{"student": s, "auroc_student": a, "num_classes": 2} for s, a in areas.items()]
    other = {"num_classes": 2, "rounds": 40, "student": 0.25, "seed": 0, "record_add_remove": "inf"}
    header, _, first, second = lines(markdown(read([table(*seeds, other)])))
    first, second = (dict(zip(header, row, strict=True)) for row in (first, second))
    assert header[:5] == ["rounds", "student", "ensemble", "auroc_student", "seeds"]
    assert first["student"] == "63.3 ± 15.3"
    assert first["auroc_student"] == "80.0 ± 14.1"
    assert first["ensemble"] == "90.0 ± 0.0"
    assert (first["rounds"], first["seeds"]) == ("20", "3")
    assert first["epsilon record, add_remove"] == "2"
    assert first["epsilon record, replace_one"] == "4"
    assert first["epsilon patient, add_remove"] == "inf"
    assert first["epsilon client, add_remove"] == "8"
    assert (second["student"], second["seeds"], second["auroc_student"]) == ("25.0", "1", "")
    assert second["epsilon record, add_remove"] == "inf"


COST = {"forward_answers": 1000, "backward_answers": 500, "bytes_to_clients": 3e6}
COST |= {"bytes_to_server": 250_000, "seconds_rounds": 7}


def test_costs_are_summed_and_averaged_over_seeds(table):
    """Seconds 7 and 9: mean 8, deviation sqrt(2). One run knows no bytes; one setting, nothing."""
    seeds = [COST, COST | {"forward_answers": 2000, "bytes_to_server": "", "seconds_rounds": 9}]
    settings = read([table(*seeds, {"rounds": 40})])
    header, _, first, second = lines(markdown(settings))
    titles = ("teacher answers", "megabytes", "seconds of rounds")
    first, second = (dict(zip(header, row, strict=True)) for row in (first, second))
    assert [first[title] for title in titles] == ["2,000", "3.25", "8.0"]
    assert [second[title] for title in titles] == ["", "", ""]
    first, second = csv.DictReader(io.StringIO(summary(settings)))
    means = [first[f"{title.replace(' ', '_')}_mean"] for title in titles]
    assert [float(mean) for mean in means] == pytest.approx([2000, 3.25, 8])
    assert float(first["seconds_of_rounds_deviation"]) == pytest.approx(math.sqrt(2))
    assert first["megabytes_deviation"] == second["megabytes_mean"] == ""


def test_what_follows_from_a_grids_name_is_left_out(table):
    """`rounds` varies within DENSE, `method` with the grids alone."""
    rows = [
        {"grid": "DENSE", "method": "dense", "rounds": 20, "reason": "weights leave"},
        {"grid": "DENSE", "method": "dense", "rounds": 40},
        {"grid": "bounds", "method": "ensemble", "rounds": 1},
    ]
    settings = read([table(*rows)])
    header, _, first, *_ = lines(markdown(settings))
    assert header[:3] == ["grid", "rounds", "student"]
    assert names(settings) == ["DENSE, rounds=20", "DENSE, rounds=40", "bounds, rounds=1"]
    assert (header[-1], first[-1]) == ("why inf", "weights leave")
    one, *_ = csv.DictReader(io.StringIO(summary(settings)))
    assert (one["method"], one["reason"]) == ("dense", "weights leave")
    settings = read([table(*rows, {"method": "local"}, name="more.csv")])
    assert lines(markdown(settings))[0][:3] == ["grid", "rounds", "method"]


def test_the_epsilon_of_a_label_has_columns_of_its_own_and_is_no_records(table):
    label = {"label_replace_one": 1.00001, "label_delta": "0.0", "label_trust": "nobody"}
    label |= {"record_add_remove": "inf", "method": "central"}
    settings = read([table(label, label | {"label_replace_one": 1.5}, {"method": "dpsd"})])
    page = markdown(settings)
    header, _, private, other = lines(page)
    private, other = (dict(zip(header, row, strict=True)) for row in (private, other))
    title = "epsilon of labels alone, replace_one"
    assert (private[title], private["its delta"], private["its trust"]) == ("1.5", "0.0", "nobody")
    assert private["epsilon record, add_remove"] == "inf"
    assert (other[title], other["its delta"], other["its trust"]) == ("", "", "")
    assert "An epsilon of labels alone protects no image." in " ".join(page.split())
    first, second = csv.DictReader(io.StringIO(summary(settings)))
    assert (first["label_replace_one"], second["label_replace_one"]) == ("1.00001, 1.5", "")
    unlike = markdown(read([table({}, name="others.csv")]))
    assert "label" not in unlike.replace("`mechanism=label`", "")


def test_tables_of_earlier_versions_have_no_costs(table):
    page = markdown(read([table({})]))
    assert "answers" not in page
    assert lines(page)[0][:3] == ["student", "ensemble", "seeds"]


def test_the_summary_has_the_pages_rows_unrounded_and_all_that_was_set(table):
    rows = [{"student": s, "record_add_remove": 1.23451} for s in (0.5, 0.6, 0.8)]
    (row,) = csv.DictReader(io.StringIO(summary(read([table(*rows)]))))
    assert (row["seeds"], row["data"], row["rounds"]) == ("3", "mnist", "20")
    assert float(row["student_mean"]) == pytest.approx(190 / 3)
    assert float(row["student_deviation"]) == pytest.approx(100 * math.sqrt(0.07 / 3))
    assert (row["record_add_remove"], row["patient_add_remove"]) == ("1.23451", "inf")
    assert (row["delta"], row["commit"]) == ("1e-05", "abc")


def test_a_sweeps_table_is_not_overwritten_by_a_summary(table, tmp_path):
    mine = table({}, name="results_summary.csv")
    before = mine.read_text()
    with pytest.raises(UserError, match=r"results_summary.csv was not written by .*another --out"):
        write_summary(read([mine]), mine)
    assert mine.read_text() == before
    written = write_summary(read([mine]), tmp_path / "new" / "results_summary.csv")
    assert write_summary(read([mine]), written) == written


def test_a_name_is_what_sets_a_setting_apart(table):
    rows = [
        {"method": "dpsd", "privacy": "label", "on": "true"},
        {"method": "dense", "privacy": "label", "answers.k": 3, "on": "true"},
        {"method": "dense", "privacy": "votes", "on": "false"},
    ]
    settings = read([table(*rows)])
    assert names(settings) == [
        "dpsd, label, on=true",
        "dense, label, on=true, k=3",
        "dense, votes, on=false",
    ]
    assert names(settings, ("method", "on")) == ["label", "label, k=3", "votes"]
    assert names(settings[:1]) == ["the only setting"]


def test_areas_are_shown_where_there_are_two_classes(table):
    header, *_ = lines(markdown(read([table({"auroc_student": 0.9})])))
    assert "auroc_student" not in header


def test_what_all_rows_share_stands_above_and_equal_columns_once(table):
    rows = [{"privacy": p, "mechanism": p} for p in ("label", "votes")]
    page = markdown(read([table(*rows)]))
    assert lines(page)[0][0] == "mechanism"
    assert "privacy" not in lines(page)[0]
    shared = "In all rows: `data=mnist`, `num_classes=10`, `teachers_per_client=1`"
    assert shared in page.replace("\n", " ")
    assert "Commit abc. Machine: m." in page


def test_an_epsilon_is_rounded_up_and_is_the_largest_of_its_seeds(table):
    page = markdown(read([table({"record_add_remove": 1.00001}, {"record_add_remove": 1.23451})]))
    assert lines(page)[2][3] == "1.2346"


def test_several_tables_are_one_and_a_repeated_key_counts_once(table):
    first = table({}, {"student": 0.7}, name="a.csv")
    second = table({"key": "a.csv1", "seed": 1, "student": 0.9}, {"seed": 2}, name="b.csv")
    (setting,) = read([first, second])
    assert [run["student"] for run in setting.runs] == ["0.5", "0.9", "0.5"]


def test_a_column_that_only_one_table_has_is_a_setting(table):
    paths = table({}, name="a.csv"), table({"answers.k": 3}, name="b.csv")
    assert [setting.values.get("answers.k") for setting in read(paths)] == [None, "3"]


@pytest.mark.parametrize("column", NEEDED)
def test_a_missing_column_is_named_with_its_file(table, column):
    with pytest.raises(UserError, match=rf"curve.csv has no column '{column}'"):
        read([table({}, without=(column,))])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"student": "good"}], r"curve.csv: student='good' of curve.csv0 is no number"),
        ([{"forward_answers": "many"}], r"curve.csv: forward_answers='many' of curve.csv0 is no"),
        ([{"partition.alpha": "[1]"}], r"curve.csv: partition.alpha='\[1\]' of curve.csv0 is no"),
        ([{"record_add_remove": ""}], r"curve.csv: record_add_remove='' of curve.csv0 is no"),
        ([{"seed": 3}, {"seed": 3}], r"seed=3 twice .*curve.csv0 and curve.csv1"),
    ],
)
def test_what_cannot_be_averaged_is_an_error(table, rows, expected):
    with pytest.raises(UserError, match=expected):
        read([table(*rows)])


def test_no_file_and_no_run_are_errors(table, tmp_path):
    with pytest.raises(UserError, match=r"none.csv cannot be read .*No such file"):
        read([tmp_path / "none.csv"])
    (tmp_path / "empty.csv").write_text(",".join(NEEDED) + "\n")
    with pytest.raises(UserError, match="empty.csv: no run to report"):
        read([tmp_path / "empty.csv"])


def test_a_page_that_a_person_wrote_stays(table, tmp_path):
    settings = read([table({})])
    page = tmp_path / "results.md"
    page.write_text("# Mine\n")
    with pytest.raises(UserError, match=r"results.md was not written by .*choose another --out"):
        write_page(settings, page)
    assert page.read_text() == "# Mine\n"
    written = write_page(settings, tmp_path / "new" / "results.md")
    assert written.read_text().startswith(FIRST_LINE)
    assert write_page(settings, written) == written


def test_every_column_of_a_sweep_is_a_result_or_a_setting(tmp_path):
    planned = sweeps.plan((*TINY, "seed=0"), tmp_path / "sweep", tmp_path, print)
    assert not sweeps.run(planned, at_once, tmp_path / "table.csv", print)
    (setting,) = read([tmp_path / "table.csv"])
    given = {override.split("=")[0] for override in TINY}
    fixed = {"method", "data", "num_classes", "num_clients", "teachers_per_client", "mechanism"}
    assert set(setting.values) == given | fixed
    assert set(setting.runs[0]) == given | fixed | RESULTS | {"grid"}  # which is empty here


# --- the figure ---


@pytest.fixture
def axes(table):
    """The panel of labels at two epsilons, DP teachers, and answers without privacy."""
    rows = [
        *({"student": s, "seed": n} for n, s in enumerate((0.2, 0.4))),
        {"record_add_remove": 1, "student": 0.1, "rounds": 1},
        {"mechanism": "label", "teachers_per_client": 50, "record_add_remove": 3, "student": 0.6},
        {
            "mechanism": "dp_sgd probabilities",
            "record_add_remove": 0.5,
            "student": 0.8,
            "ensemble": "",
        },
        {"mechanism": "probabilities", "record_add_remove": "inf", "student": 0.97},
    ]
    (panel,) = draw(read([table(*rows)])).axes
    return panel


def series(axes):
    return {box.get_label(): box for box in axes.containers}


def test_each_mechanism_and_number_of_teachers_is_a_series(axes):
    found = series(axes)
    assert set(found) == {
        *("label, 1 teacher per client", "label, 50 teachers per client"),
        "dp_sgd probabilities, 1 teacher per client",
    }
    line, _, (bars,) = found["label, 1 teacher per client"]
    assert list(line.get_xdata()) == [1, 2]
    assert list(line.get_ydata()) == pytest.approx([10, 30])
    ((_, low), (_, high)) = next(s for s in bars.get_segments() if len(s))
    assert (high - low) / 2 == pytest.approx(100 * 0.1 * math.sqrt(2))
    other = found["label, 50 teachers per client"][0]
    assert other.get_color() == line.get_color()
    assert (other.get_linestyle(), other.get_marker()) != (line.get_linestyle(), line.get_marker())
    assert found["dp_sgd probabilities, 1 teacher per client"][0].get_color() != line.get_color()
    assert axes.get_xscale() == "log"


def test_the_ensemble_is_a_dotted_line_of_its_students_colour(axes):
    student = series(axes)["label, 1 teacher per client"][0]
    dotted = [x for x in axes.lines if x.get_linestyle() == ":" and list(x.get_xdata()) == [1, 2]]
    (line,) = dotted
    assert line.get_color() == student.get_color()
    assert list(line.get_ydata()) == [90, 90]


def test_what_proves_nothing_and_chance_are_horizontal(axes):
    flat = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert list(flat["in the clear, 1 teacher per client: nothing proven"]) == pytest.approx(
        [97, 97]
    )
    assert list(flat["chance"]) == [10, 10]


def test_published_points_are_hollow_named_and_never_drawn_as_proven(axes):
    (points,) = (found for found in axes.collections if isinstance(found, PathCollection))
    assert points.get_label() == NOT_PROVEN
    assert not len(points.get_facecolors())
    drawn = sorted((float(x), float(y)) for x, y in points.get_offsets())
    assert drawn == sorted((p.epsilon, p.accuracy) for p in published("mnist"))
    assert [text.get_text() for text in axes.get_legend().get_texts()].count(NOT_PROVEN) == 1
    assert sorted(text.get_text() for text in axes.texts) == sorted(
        point.method for point in published("mnist")
    )
    proven = {(x, y) for line in axes.lines for x, y in zip(*line.get_data(), strict=True)}
    assert not proven & set(drawn)


def test_another_data_set_is_another_panel_without_mnists_literature(table):
    other = {"data": "medmnist", "num_classes": 2, "seed": 0, "record_add_remove": 1}
    rows = ({"data": "digits"}, other)
    first, second = draw(read([table(*rows)])).axes
    assert (first.get_title(), second.get_title()) == ("digits", "medmnist")
    chance = [line for line in second.lines if line.get_label() == "chance"]
    assert list(chance[0].get_ydata()) == [50, 50]
    for axes in (first, second):
        assert not [found for found in axes.collections if isinstance(found, PathCollection)]


def test_one_epsilon_makes_no_curve(table):
    assert draw(read([table({}, {"mechanism": "x", "record_add_remove": "inf"})])) is None


def test_the_figure_is_written_at_twice_the_readmes_width(table, tmp_path):
    from PIL import Image

    figure = draw(read([table({}, {"rounds": 1, "record_add_remove": 1})]))
    path = save(figure, tmp_path / "new" / "curve.png")
    assert Image.open(path).size[0] == 1800
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"curve.png cannot be written .*choose another folder"):
        save(figure, tmp_path / "file" / "curve.png")
