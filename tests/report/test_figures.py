"""Figures of rounds, alphas and confusions: the numbers that they show."""

import csv
import math

import numpy as np
import pytest

from fed_dpsd.errors import UserError
from fed_dpsd.report import alpha, confusion, dots, pages, progress
from fed_dpsd.report.figure import COLOURS, look
from fed_dpsd.report.settings import beside, read


def write(path, columns, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


@pytest.fixture
def rounds(tmp_path):
    """Writes curve_rounds.csv: key, round, seconds, answers (forward, backward) and accuracy."""

    def write_rounds(*rows, name="curve_rounds.csv"):
        write(tmp_path / name, ("key", *progress.COLUMNS), rows)
        return beside([tmp_path / "curve.csv"], "rounds", progress.COLUMNS)

    return write_rounds


@pytest.fixture
def pairs(tmp_path):
    """Writes curve_confusion.csv: key, truth, predicted, count."""

    def write_pairs(*rows):
        write(tmp_path / "curve_confusion.csv", ("key", *confusion.COLUMNS), rows)
        return beside([tmp_path / "curve.csv"], "confusion", confusion.COLUMNS)

    return write_pairs


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def test_32_lines_look_different_and_eight_differ_in_colour_alone():
    looks = [tuple(look(number).values()) for number in range(32)]
    assert len(set(looks)) == 32
    assert [colour for colour, _ in looks[:8]] == list(COLOURS)
    assert {style for _, style in looks[:8]} == {"-"}


# --- rounds ---


def test_a_line_is_the_mean_over_seeds_of_each_round_in_a_band_of_one_deviation(table, rounds):
    dense = {"method": "dense", "seed": 0}
    settings = read([table({"method": "dpsd"}, {"method": "dpsd"}, dense)])
    known = rounds(
        *[("curve.csv0", 2, 3, 200, 50, 0.7), ("curve.csv0", 1, 1, 100, 25, 0.2)],
        *[("curve.csv1", 1, 2, 100, 75, 0.4), ("curve.csv1", 2, 5, 200, 150, 0.7)],
        *[("curve.csv2", 1, 9, 64, 0, 0.5), ("curve.csv2", 2, 19, 96, 0, 0.6)],
        ("a run of another table", 1, 9, 64, 0, 0.5),
    )
    left, right = progress.draw(settings, known).axes
    assert (left.get_xscale(), right.get_xscale()) == ("log", "linear")
    assert set(lines(left)) == set(lines(right)) == {"dpsd", "dense"}
    line = lines(left)["dpsd"]
    assert list(line.get_xdata()) == [150, 300]
    assert list(line.get_ydata()) == pytest.approx([30, 70])
    assert list(lines(left)["dense"].get_xdata()) == [64, 96]
    assert list(lines(right)["dpsd"].get_xdata()) == [1.5, 4]
    band = left.collections[0].get_paths()[0].vertices
    at_first = band[band[:, 0] == 150][:, 1]
    deviation = 10 * math.sqrt(2)
    assert [at_first.min(), at_first.max()] == pytest.approx([30 - deviation, 30 + deviation])
    assert line.get_color() != lines(left)["dense"].get_color()


def test_a_method_that_asks_no_teacher_is_drawn_against_seconds_alone(table, rounds):
    settings = read([table({"method": "fedavg"}, {"method": "dense"})])
    known = rounds(
        *[("curve.csv0", number, number, 0, 0, 0.2) for number in (1, 2)],
        *[("curve.csv1", number, number, 5 * number, 0, 0.4) for number in (1, 2)],
    )
    figure = progress.draw(settings, known)
    left, right = figure.axes
    assert set(lines(left)) == {"dense"}
    assert set(lines(right)) == {"dense", "fedavg"}
    assert lines(left)["dense"].get_color() == lines(right)["dense"].get_color()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(legend) == ["dense", "fedavg"]


def test_a_data_set_has_a_row_of_panels_and_a_setting_one_look(table, rounds):
    places = [("mnist", 0.5), ("mnist", 0.1), ("digits", 0.5)]
    cells = [
        {"data": data, "partition.alpha": alpha, "method": m}
        for data, alpha in places
        for m in ("a", "b")
    ]
    known = rounds(*((f"curve.csv{n}", k, k, 10 * k, 0, 0.5) for n in range(6) for k in (1, 2)))
    panels = progress.draw(read([table(*cells)]), known).axes
    titles = [f"{data}, alpha {alpha}" for data, alpha in places]
    assert [axes.get_title() for axes in panels] == [t for title in titles for t in (title, title)]
    assert all(set(lines(axes)) == {"a", "b"} for axes in panels)
    assert len({lines(axes)["b"].get_color() for axes in panels}) == 1


def test_without_two_known_rounds_there_is_no_line_and_without_a_line_no_figure(table, rounds):
    settings = read([table({})])
    assert progress.draw(settings, {}) is None
    assert progress.draw(settings, rounds(("curve.csv0", 1, 1, 5, 0, 0.5))) is None
    assert progress.draw(settings, rounds(("curve.csv0", 1, 1, 5, 0, ""))) is None


# --- alpha ---


def test_settings_that_differ_in_alpha_alone_are_a_line(table):
    rows = [
        *({"partition.alpha": 0.5, "student": s, "method": "dpsd"} for s in (0.4, 0.6)),
        {"partition.alpha": 0.1, "student": 0.3, "method": "dpsd"},
        {"partition.alpha": 0.1, "student": 0.2, "method": "dense"},
        {"partition": "iid", "student": 0.9, "method": "dense"},
    ]
    (axes,) = alpha.draw(read([table(*rows)])).axes
    first, second = axes.containers
    assert (first.get_label(), list(first[0].get_xdata())) == ("dpsd", [0.1, 0.5])
    assert list(first[0].get_ydata()) == pytest.approx([30, 50])
    assert (second.get_label(), list(second[0].get_xdata())) == ("dense", [0.1])
    assert list(axes.get_xticks()) == [0.1, 0.5]
    assert axes.get_xscale() == "log"


def test_one_alpha_makes_no_figure(table):
    assert alpha.draw(read([table({"partition.alpha": 0.5}, {"partition": "iid"})])) is None


# --- confusion ---

TWO = {"num_classes": 2}


def test_a_panel_is_summed_over_seeds_and_normalised_by_true_class(table, pairs):
    rows = [TWO | {"method": method} for method in ("dpsd", "dpsd", "dense", "local")]
    settings = read([table(*rows)])
    known = pairs(
        *[("curve.csv0", 0, 0, 3), ("curve.csv0", 0, 1, 1), ("curve.csv1", 0, 0, 4)],
        ("curve.csv2", 1, 0, 2),
    )
    first, second = confusion.draw(settings, known).axes
    assert confusion.summed(settings[0], known).tolist() == [[7, 1], [0, 0]]
    shown = np.ma.filled(first.images[0].get_array(), np.nan)
    assert shown[0].tolist() == [7 / 8, 1 / 8]
    assert np.isnan(shown[1]).all()
    assert [text.get_text() for text in first.get_yticklabels()] == ["0: 88 %", "1"]
    assert [text.get_text() for text in second.get_yticklabels()] == ["0", "1: 0 %"]
    assert (first.get_title(), second.get_title()) == ("dpsd", "dense")


def test_many_settings_are_a_grid_without_empty_panels(table, pairs):
    settings = read([table(*(TWO | {"answers.k": k} for k in range(17)))])
    known = pairs(*((f"curve.csv{n}", 0, 0, 1) for n in range(17)))
    panels = confusion.draw(settings, known).axes
    assert [axes.get_title() for axes in panels] == [f"k={k}" for k in range(17)]


def test_without_pairs_there_is_no_figure(table, pairs):
    assert confusion.draw(read([table({})]), pairs()) is None


@pytest.mark.parametrize(("column", "value"), [("truth", 10), ("predicted", -1), ("truth", 0.5)])
def test_a_class_that_there_is_not_is_named(table, pairs, column, value):
    row = {"truth": 0, "predicted": 0} | {column: value}
    known = pairs(("curve.csv0", *row.values(), 3))
    with pytest.raises(UserError, match=rf"{column}={value} of curve.csv0 .*none of 10 classes"):
        confusion.draw(read([table({})]), known)


# --- settings ---


def test_a_row_shows_a_settings_mean_and_deviation_and_what_a_table_prints_for_its_grid(table):
    grids = "labels, all", "labels, without IE"
    first, second = ({"experiment": "table6", "grid": grid} for grid in grids)
    path = table(
        first | {"seed": 0, "student": 0.5},
        first | {"seed": 1, "student": 0.7},
        second | {"seed": 0, "student": 0.9},
    )
    (axes,) = dots.draw(read([path])).axes
    assert tuple(text.get_text() for text in axes.get_yticklabels()) == grids
    bars, printed = axes.containers[0], lines(axes)["published, not proven"]
    assert bars.lines[0].get_xydata() == pytest.approx(np.array([[60, 0], [90, 1]]))
    (segment, _) = bars.lines[2][0].get_segments()
    assert segment[:, 0] == pytest.approx([60 - 200**0.5, 60 + 200**0.5])
    assert printed.get_xydata().tolist() == [[98.19, 0], [94.32, 1]]


def test_without_grids_or_with_too_many_settings_there_is_no_figure_of_settings(table):
    assert dots.draw(read([table({"method": "a"}, {"method": "b"})])) is None
    many = [{"grid": f"{number}"} for number in range(dots.MOST + 1)]
    assert dots.draw(read([table(*many)])) is None
    assert dots.draw(read([table(*many[1:])])) is not None


# --- files ---


def test_what_there_are_no_numbers_for_is_not_written(table, rounds, pairs, tmp_path):
    path = table({"partition.alpha": 1}, {"partition.alpha": 2, "record_add_remove": 1})
    names = ["curve.md", "curve_summary.csv", "curve.png", "curve_alpha.png", "curve.html"]
    assert [written.name for written in pages.write([path], tmp_path / "out")] == names
    rounds(("curve.csv0", 1, 1, 5, 0, 0.5), ("curve.csv0", 2, 2, 9, 0, 0.6))
    pairs(("curve.csv0", 1, 1, 5))
    names[3:4] = ["curve_progress.png", "curve_alpha.png", "curve_confusion.png"]
    assert [written.name for written in pages.write([path], tmp_path / "out")] == names
    assert sorted(names) == sorted(file.name for file in (tmp_path / "out").iterdir())
    old = pages.write([table({}, name="old.csv")], tmp_path)
    assert [written.name for written in old] == ["old.md", "old_summary.csv", "old.html"]


def test_of_a_run_in_two_files_the_last_counts(rounds, tmp_path):
    rounds(("k", 1, 1, 5, 0, 0.5), ("k", 2, 2, 9, 0, 0.6), ("other", 1, 1, 5, 0, 0.5))
    rounds(("k", 1, 1, 5, 0, 0.7), name="again_rounds.csv")
    paths = [tmp_path / "curve.csv", tmp_path / "again.csv", tmp_path / "none.csv"]
    found = beside(paths, "rounds", progress.COLUMNS)
    assert [row["student_accuracy"] for row in found["k"]] == ["0.7"]
    assert len(found["other"]) == 1


HEADER = ",".join(("key", *progress.COLUMNS))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("key,round\n", "curve_rounds.csv has no column 'seconds'"),
        ("round\n", "curve_rounds.csv has no column 'key'"),
        (f"{HEADER}\nk,one,,,,\n", "curve_rounds.csv: round='one' of k is no number"),
        (f"{HEADER}\nk,1,,0,0,\n", "curve_rounds.csv: seconds='' of k is no number"),
    ],
)
def test_a_wrong_file_beside_a_table_is_an_error(table, tmp_path, content, expected):
    path = table({})
    (tmp_path / "curve_rounds.csv").write_text(content)
    with pytest.raises(UserError, match=expected):
        list(pages.write([path], tmp_path / "out"))
    assert not (tmp_path / "out").exists()
