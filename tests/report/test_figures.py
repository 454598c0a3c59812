"""Charts and figures: the numbers that they show, and the files that they are written to."""

import itertools
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from fed_dpsd.errors import UserError
from fed_dpsd.report import figures, pages, plots, sweep_charts
from fed_dpsd.report.charts import Axis, Chart, Series
from fed_dpsd.report.literature import published
from fed_dpsd.report.settings import read_settings
from fed_dpsd.storage import templates_folder


def rows_of(columns, *rows):
    """Rows of each run, by the run's key, as they are read."""
    found = {}
    for key, *values in rows:
        row = dict(zip(columns, map(str, values), strict=True))
        found.setdefault(key, []).append(row)
    return found


def rounds(*rows):
    """Key, round, accuracy, and megabytes to and from clients."""
    given = [(key, n, score, 1e6 * there, 1e6 * back) for key, n, score, there, back in rows]
    return rows_of(sweep_charts.ROUND_COLUMNS, *given)


def chart(*series, x=None, y=None):
    x, y = x or Axis("round"), y or Axis("accuracy, %", 0, 100)
    return Chart("c", "A chart", "It says.", x, y, series)


def by_name(chart):
    return {series.name: series for series in chart.series}


# --- drawing ---


def test_32_lines_look_different_in_more_than_colour():
    looks = [tuple(map(str, figures.look(number).values())) for number in range(32)]
    assert len(set(looks)) == 32
    without_colour = {look[1:4] for look in looks[:20]}
    assert len(without_colour) > len(figures.COLOURS)


def test_ticks_are_round_few_and_on_both_sides():
    cases = [
        ((0.9, 12), [1, 2, 5, 10]),
        ((1, 2e6), [1, 10, 100, 1e3, 1e4, 1e5, 1e6]),
        ((1.5, 6), [2, 5]),
    ]
    for ends, expected in cases:
        assert figures.log_ticks(*ends) == pytest.approx(expected), ends
    single = chart(Series("s", [(2.99, 50)]), x=Axis("epsilon", logarithmic=True))
    (axes,) = figures.draw([single]).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["2", "5"]


def test_large_values_stand_together_beyond_the_axis_and_keep_their_numbers():
    axis = Axis("epsilon", logarithmic=True, most=100, bound=True)
    far = chart(Series("labels", [(1, 50), (10, 60), (51_200, 90), (math.inf, 99)]), x=axis)
    (axes,) = figures.draw([far]).axes
    joined, apart = (line for line in axes.lines if line.get_marker() == "o")
    assert list(joined.get_xdata()) == [1, 10]
    assert apart.get_linestyle() == "None"
    first, second = apart.get_xdata()
    assert first == second > 10
    assert "> 100" in [text.get_text() for text in axes.get_xticklabels()]
    assert [row[0] for row in far.numbers()[1]] == ["1", "10", "51,200", "inf"]


def test_the_table_of_a_chart_has_every_number_and_rounds_no_bound_down():
    bound = Axis("epsilon", bound=True)
    shown = chart(Series("s", [(2.987952144403, 5.632237)]), x=bound, y=bound).numbers()
    assert shown == (["epsilon", "s"], [["2.99", "5.64"]])
    several = chart(
        Series("s", [(1, 50), (1, 60), (2, 70)], [10, math.nan, math.nan]),
        Series("chance", [(0, 10)], kind="level"),
        Series("perfect", [(0, 0), (100, 100)], kind="guide"),
    ).numbers()
    rows = [["1", "50.0 ± 10.0, 60.0", "10.0"], ["2", "70.0", "10.0"]]
    assert several == (["round", "s", "chance"], rows)


def test_an_error_bar_reaches_one_deviation():
    (axes,) = figures.draw([chart(Series("s", [(1, 50), (2, 70)], [10, math.nan]))]).axes
    (bars,) = axes.containers
    low, high = (cap.get_ydata()[0] for cap in bars.lines[1])
    assert (low, high) == (40, 60)


def test_svg_is_small_deterministic_and_follows_the_page():
    """Its colours are variables of both themes, and nothing in it is global or from elsewhere."""
    hostile = chart(Series("<script>$\\frac{x&", [(1, 50), (2, 60)]), Series("b", [(1, 2.98795)]))
    box, svg = figures.to_svg(figures.draw([hostile]), "c")
    assert (box, svg) == figures.to_svg(figures.draw([hostile]), "c")
    assert box.startswith("0 0 360 ")
    assert "&lt;script&gt;$\\frac{x&amp;</text>" in svg
    assert len(svg) < 12_000
    used = set(re.findall(r"var\(--(\w+)\)", svg))
    css = (templates_folder(pages.__file__) / "style.css").read_text()
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", part)) for part in css.split("@media")[:2])
    assert {"ink", "soft", "line", "s0", "s1"} <= used <= set(dark)
    assert figures.PALETTE.items() <= light.items()
    assert not re.search(r"#[0-9a-f]{6}\b", svg)
    assert not re.search(r"http|<style|<script|font-family| id=\"(?!c-)|#(?!c-)\w", svg)
    _, other = figures.to_svg(figures.draw([hostile]), "d")
    assert not set(re.findall(r'id="([^"]+)"', svg)) & set(re.findall(r'id="([^"]+)"', other))


@pytest.mark.slow
def test_a_figure_has_a_papers_width_in_every_form(tmp_path):
    lines = [chart(Series("s", [(1, 50), (2, 60)]))]
    for width in (figures.COLUMN, figures.TEXT):
        figure = figures.draw(lines, width)
        picture = Image.open(figures.save(figure, tmp_path / "new" / "a.png"))
        assert picture.size[0] == pytest.approx(300 * width, abs=1)
        pdf, again = (figures.save(figure, tmp_path / f"{n}.pdf").read_bytes() for n in (1, 2))
        assert pdf == again
        assert float(re.search(rb"MediaBox \[ 0 0 ([\d.]+)", pdf)[1]) == pytest.approx(72 * width)
        assert b"/Type3" not in pdf  # journals reject these fonts
        svg = figures.save(figure, tmp_path / "a.svg").read_text()
        assert float(re.search(r'width="([\d.]+)pt"', svg)[1]) == pytest.approx(72 * width)
        sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text()]
        assert min(sizes) >= 6.5
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"a.png cannot be written .*choose another folder"):
        figures.save(figure, tmp_path / "file" / "a.png")


def test_a_long_name_grows_the_figure_and_leaves_the_panel_as_it_is():
    few, many = (
        figures.draw([chart(*(Series("long name " * 9 + str(k), [(1, k)]) for k in range(n)))])
        for n in (1, 12)
    )
    for figure in (few, many):
        figure.draw_without_rendering()  # sets the layout
    heights = [f.axes[0].get_position().height * f.get_figheight() for f in (few, many)]
    assert heights[0] == pytest.approx(heights[1], rel=0.02)
    assert many.get_figheight() > few.get_figheight() + 2


# --- accuracy against epsilon ---


@pytest.fixture
def over_epsilon(table):
    """Labels at two epsilons, DP teachers, and answers without privacy."""
    dp = {"mechanism": "dp_sgd probabilities", "record_add_remove": 0.5, "student": 0.8}
    rows = [
        *({"student": s, "seed": n} for n, s in enumerate((0.2, 0.4))),
        {"record_add_remove": 1, "student": 0.1, "rounds": 1},
        {"mechanism": "label", "teachers_per_client": 50, "record_add_remove": 3, "student": 0.6},
        dp | {"ensemble": ""},
        {"mechanism": "probabilities", "record_add_remove": "inf", "student": 0.97},
    ]
    (found,) = sweep_charts.over_epsilon(read_settings([table(*rows)]))
    return found


def test_each_mechanism_and_number_of_teachers_is_a_series(over_epsilon):
    found = {s.name: s for s in over_epsilon.series if s.coloured}
    assert set(found) == {
        *("label, 1 teacher per client", "label, 50 teachers per client"),
        *("dp_sgd probabilities, 1 teacher per client", "without privacy, 1 teacher per client"),
    }
    label = found["label, 1 teacher per client"]
    assert [x for x, _ in label.points] == [1, 2]
    assert [y for _, y in label.points] == pytest.approx([10, 30])
    assert label.deviations() == pytest.approx([0, 10 * math.sqrt(2)])
    assert found["without privacy, 1 teacher per client"].points[0][0] == math.inf
    assert by_name(over_epsilon)["chance: 10 %"].points == [(0, 10)]


def test_published_points_are_hollow_named_and_never_drawn_as_proven(over_epsilon):
    (axes,) = figures.draw([over_epsilon], figures.TEXT).axes
    (points,) = (found for found in axes.collections if isinstance(found, PathCollection))
    assert not len(points.get_facecolors())
    drawn = sorted((float(x), float(y)) for x, y in points.get_offsets())
    assert drawn == sorted((p.epsilon, p.accuracy) for p in published("mnist"))
    named = sorted(text.get_text() for text in axes.texts)
    assert named == sorted(point.method for point in published("mnist"))
    proven = {(x, y) for line in axes.lines for x, y in zip(*line.get_data(), strict=True)}
    assert not proven & set(drawn)
    assert "not proven" in sweep_charts.PUBLISHED
    narrow = figures.draw([over_epsilon])
    assert not narrow.axes[0].texts  # a page has the names in its table
    legend = [text.get_text() for text in narrow.legends[0].get_texts()]
    assert legend.count(sweep_charts.PUBLISHED) == 1


def test_another_data_set_is_another_chart_and_one_epsilon_makes_none(table):
    other = {"data": "medmnist", "num_classes": 2, "seed": 0, "record_add_remove": 1}
    first, second = sweep_charts.over_epsilon(read_settings([table({"data": "digits"}, other)]))
    assert (first.title[-6:], second.title[-8:]) == ("digits", "medmnist")
    assert by_name(second)["chance: 50 %"]
    assert not any(s.points for c in (first, second) for s in c.series if s.kind == "points")
    one = read_settings([table({}, {"mechanism": "x", "record_add_remove": "inf"})])
    assert sweep_charts.over_epsilon(one) == []


# --- rounds, alphas, settings ---


def test_a_line_is_the_mean_over_seeds_of_each_round_in_a_band_of_one_deviation(table):
    rows = [{"method": "dpsd"}, {"method": "dpsd"}, {"method": "dense", "seed": 0}]
    rows.append({"method": "fedavg", "seed": 0})
    known = rounds(
        *[("curve.csv0", 2, 0.7, 200, 50), ("curve.csv0", 1, 0.2, 100, 25)],
        *[("curve.csv1", 1, 0.4, 100, 75), ("curve.csv1", 2, 0.7, 200, 150)],
        *[("curve.csv2", 1, 0.5, 64, 0), ("curve.csv2", 2, 0.6, 96, 0)],
        ("curve.csv3", 1, 0.3, 8, 8),
        ("a run of another table", 1, 0.5, 64, 0),
    )
    megabytes, number = sweep_charts.over_rounds(read_settings([table(*rows)]), known)
    assert megabytes.note == ""
    dpsd = by_name(megabytes)["dpsd"]
    assert np.array(dpsd.points) == pytest.approx(np.array([[150, 30], [300, 70]]))
    assert dpsd.deviations() == pytest.approx([10 * math.sqrt(2), 0])
    assert [x for x, _ in by_name(megabytes)["dense"].points] == [64, 96]
    assert [x for x, _ in by_name(number)["dpsd"].points] == [1, 2]
    assert by_name(megabytes)["fedavg"].points == [(16, 30)]  # one round is a point
    left, right = figures.draw([megabytes, number], figures.TEXT, 2).axes
    assert (left.get_xscale(), right.get_xscale()) == ("log", "linear")
    colours = [
        [line.get_color() for line in axes.lines if len(line.get_xdata())] for axes in (left, right)
    ]
    assert colours[1][: len(colours[0])] == colours[0]  # a setting looks alike in all panels
    band = left.collections[0].get_paths()[0].vertices
    at_first = band[band[:, 0] == 150][:, 1]
    reach = 10 * math.sqrt(2)
    assert [at_first.min(), at_first.max()] == pytest.approx([30 - reach, 30 + reach])


def test_of_many_settings_a_page_has_the_best(table):
    rows = [{"answers.k": k, "student": k / 10} for k in range(1, 6)]
    known = rounds(*((f"curve.csv{n}", k, 0.5, k, 0) for n in range(5) for k in (1, 2)))
    chart, _ = sweep_charts.over_rounds(read_settings([table(*rows)]), known, 2)
    assert chart.note == "mnist: the best 2 of 5 settings."
    assert [series.name for series in chart.series] == ["k=5", "k=4"]


def test_a_data_set_and_an_alpha_have_charts_of_their_own(table):
    places = [("mnist", 0.5), ("mnist", 0.1), ("digits", 0.5)]
    cells = [{"data": d, "partition.alpha": a, "method": m} for d, a in places for m in "ab"]
    known = rounds(*((f"curve.csv{n}", k, 0.5, k, 0) for n in range(6) for k in (1, 2)))
    found = sweep_charts.over_rounds(read_settings([table(*cells)]), known)
    titles = [f"{data}, alpha {alpha}" for data, alpha in places]
    assert [chart.title.partition(": ")[2] for chart in found[::2]] == titles
    assert all([s.name for s in chart.series] == ["a", "b"] for chart in found)


def test_without_two_known_rounds_there_is_no_line(table):
    settings = read_settings([table({})])
    for known in (
        {},
        rounds(("curve.csv0", 1, 0.5, 1, 0)),
        rounds(("curve.csv0", 1, "", 1, 0)),
    ):
        assert sweep_charts.over_rounds(settings, known) == []


def test_settings_that_differ_in_alpha_alone_are_a_line(table):
    rows = [
        *({"partition.alpha": 0.5, "student": s, "method": "dpsd"} for s in (0.4, 0.6)),
        {"partition.alpha": 0.1, "student": 0.3, "method": "dpsd"},
        {"partition.alpha": 0.1, "student": 0.2, "method": "dense"},
        {"partition": "iid", "student": 0.9, "method": "dense"},
    ]
    (chart,) = sweep_charts.over_key(read_settings([table(*rows)]), "partition.alpha")
    found = by_name(chart)
    assert np.array(found["dpsd"].points) == pytest.approx(np.array([[0.1, 30], [0.5, 50]]))
    assert [x for x, _ in found["dense"].points] == [0.1]
    assert chart.x.logarithmic
    one = read_settings([table({"partition.alpha": 0.5}, {"partition": "iid"})])
    assert sweep_charts.over_key(one, "partition.alpha") == []


def test_a_chart_shows_accuracy_over_an_answers_epsilon_if_nothing_is_proven(table):
    rows = [
        {"answers.k": k, "answers.epsilon_per_answer": e, "partition.alpha": alpha, "student": s}
        for alpha in (0.5, 0.1)
        for k, e, s in ((2, 1, 0.5), (2, 4, 0.8), (10, 1, 0.7), (10, 4, 0.9))
    ]
    charts = sweep_charts.over_key(read_settings([table(*rows)]), "answers.epsilon_per_answer")
    assert [chart.panel for chart in charts] == ["mnist, alpha 0.5", "mnist, alpha 0.1"]
    found = {name: [x for x, _ in own.points] for name, own in by_name(charts[0]).items()}
    assert found == {"k=2": [1, 4], "k=10": [1, 4]}


@pytest.mark.parametrize("value", ["0", "inf", "null"])
def test_a_value_without_a_place_on_the_axis_is_left_out(table, value):
    values = ("1", "2", value)
    rows = [{"answers.noise_multiplier": v, "student": 0.5} for v in values]
    (chart,) = sweep_charts.over_keys(read_settings([table(*rows)]))["noise"]
    assert [x for own in chart.series for x, _ in own.points] == [1, 2]
    figures.draw([chart])


def test_a_dot_shows_mean_and_deviation_and_what_a_table_prints_for_its_grid(table):
    first, second = (
        {"experiment": "table6", "grid": grid} for grid in ("labels, all", "labels, without IE")
    )
    path = table(
        *(first | {"seed": 0, "student": 0.5}, first | {"seed": 1, "student": 0.7}),
        second | {"seed": 0, "student": 0.9},
    )
    (dots,) = sweep_charts.dots(read_settings([path]))
    assert [row[0] for row in dots.rows] == ["labels, all", "labels, without IE"]
    assert dots.rows[0][1:] == pytest.approx((60, 200**0.5, 98.19))
    assert dots.numbers()[1][1] == ["labels, without IE", "90.0", "94.32"]
    (axes,) = figures.draw_dots([dots]).axes
    assert [found.lines[0].get_xdata()[0] for found in axes.containers] == pytest.approx([60, 90])
    assert [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "D"] == [
        *([98.19], [94.32])
    ]
    assert {"60.0 ± 14.1", "90.0"} <= {text.get_text() for text in axes.texts}
    many = [{"grid": f"{number}"} for number in range(sweep_charts.MOST_SETTINGS + 1)]
    assert sweep_charts.dots(read_settings([table(*many)])) == []
    assert sweep_charts.dots(read_settings([table({})])) == []
    assert figures.draw([]) is figures.draw_dots([]) is None


def test_a_method_has_one_colour_and_marker_in_every_chart_and_sweep(table):
    """Its lines differ in dash or fill, and every varied key is in their names."""
    rows = [
        {"method": method, "partition.alpha": alpha, "rounds": number, "grid": grid, "seed": 0}
        for method, grid, number in (
            *(("fedavg", "FedAVG", 1), ("fed_dpsd", "FedDPSD", 1), ("fed_dpsd", "FedDPSD", 2)),
            ("mine", "Mine", 1),
        )
        for alpha in (0.5, 0.1)
    ]
    known = rounds(*((f"curve.csv{n}", k, 0.5, k, 0) for n in range(8) for k in (1, 2)))
    settings = read_settings([table(*rows)])
    found, names = {}, set()
    charts = sweep_charts.over_rounds(settings, known)
    charts += sweep_charts.over_key(settings, "partition.alpha")
    for series in (s for chart in charts for s in chart.series):
        found.setdefault(series.name.partition(",")[0], set()).add(series.look[0])
        names.add((series.name, series.look))
    for dots in sweep_charts.dots(settings):
        for (name, *_), own in zip(dots.rows, dots.looks, strict=True):
            found[name.partition(",")[0]].add(own[0])
            names.add((name, own))
    assert {method: len(numbers) for method, numbers in found.items()} == dict.fromkeys(found, 1)
    assert {name for name, _ in names} == {
        *("FedAVG", "FedDPSD, rounds=1", "FedDPSD, rounds=2", "Mine"),
    }
    assert len(names) == 4  # a line has the same look everywhere
    other = read_settings(
        [table(*({"method": m, "seed": 0} for m in ("dense", "fed_dpsd")), name="o.csv")]
    )
    numbers = sweep_charts.looks(other, ["DENSE", "FedDPSD"])
    assert numbers["FedDPSD"][0] in found["FedDPSD"]
    looks = [figures.look(number, variant) for number, variant in dict(names).values()]
    assert len({(look["color"], look["marker"]) for look in looks}) == 3
    assert len({str(look) for look in looks}) == 4


@pytest.mark.parametrize("kind", ["epsilon", "alpha", "settings"])
def test_axes_show_the_differences_and_no_label_is_printed_over_another(table, kind):
    """Accuracies of 94.7 to 95.4 fill most of the axis, unless one is at chance."""
    rows = [
        {"student": 0.947 + 0.001 * n, "seed": 0, "partition.alpha": (1, 3)[n % 2]}
        | {"record_add_remove": (3000, 4000)[n % 2] / 1000, "method": "abcd"[n // 2]}
        for n in range(8)
    ]
    by_alpha = partial(sweep_charts.over_key, key="partition.alpha")
    charts_of = {"epsilon": sweep_charts.over_epsilon, "alpha": by_alpha}
    for worst, full in ((0.947, True), (0.1, False)):
        settings = read_settings([table(*[rows[0] | {"student": worst}, *rows[1:]])])
        if kind == "settings":
            axes = figures.draw_dots(sweep_charts.dots(settings), figures.COLUMN).axes[0]
            low, high = axes.get_xlim()
        else:
            axes = figures.draw(charts_of[kind](settings), figures.COLUMN).axes[0]
            low, high = axes.get_ylim()
        assert ((high - low) < 3) == full
        assert (low == 0) != full
        assert overlapping(axes) == []


def overlapping(axes):
    """The tick labels that are printed over the one before them."""
    canvas = FigureCanvasAgg(axes.figure)
    canvas.draw()
    found = []
    for axis in (axes.xaxis, axes.yaxis):
        labels = [label for label in axis.get_ticklabels() if label.get_text()]
        boxes = [label.get_window_extent(canvas.get_renderer()) for label in labels]
        pairs = zip(itertools.pairwise(labels), itertools.pairwise(boxes), strict=True)
        found += [two[0].get_text() for two, (a, b) in pairs if a.overlaps(b)]
    return found


def test_overlapping_labels_are_found():
    axes = Figure((3.3, 2)).add_subplot()
    axes.set_xticks([1, 1.01], ["3x10^3", "4x10^3"])
    axes.set_xlim(0, 2)
    assert overlapping(axes) == ["3x10^3"]


# --- clients, attacks ---


def test_a_client_has_a_bar_with_a_part_for_each_class():
    counts = np.array([[3, 0, 2], [1, 4, 0]])
    figure = plots.draw_partition(counts, ["a", "b", "c"])
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == [3, 1, 0, 4, 2, 0]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    assert not plots.draw_partition(np.ones((2, 30), int), [str(k) for k in range(30)]).legends


def test_attacks_have_a_panel_for_each_victim_and_a_cap_only_where_there_is_one(tmp_path):
    rates = np.geomspace(1e-4, 1, 50)
    curves = [
        ("student", "proven", (rates, rates, np.minimum(1, 3 * rates))),
        ("student", "without privacy", (rates, rates**0.5, np.ones(50))),
        ("teachers", "without privacy", (rates, rates**0.5, np.ones(50))),
    ]
    figure = plots.draw_roc(curves)
    titles = [axes.get_title(loc="left").partition("\n")[0] for axes in figure.axes]
    assert titles == ["student", "teachers"]
    assert [len(axes.lines) for axes in figure.axes] == [4, 2]  # with the line of guessing
    assert figures.save(figure, tmp_path / "curves.png").stat().st_size > 1_000
    grey, colour = np.zeros((10, 1, 8, 8), np.uint8), np.zeros((10, 3, 8, 8), np.uint8)
    pictures = plots.draw_pictures([("digits", grey), ("photographs", colour)])
    assert [axes.get_ylabel() for axes in pictures.axes] == ["digits", "photographs"]


# --- files ---


@pytest.mark.slow
def test_what_there_are_no_numbers_for_is_not_written(table, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "save", lambda figure, file: file)  # slow, and tested above
    path = table({"partition.alpha": 1}, {"partition.alpha": 2, "record_add_remove": 1})

    def written(path, *against):
        return [
            file.name
            for file in pages.write(read_settings([path]), [path], tmp_path / "out", *against)
        ]

    def both(kind):
        return {f"curve{kind}.{suffix}" for suffix in ("png", "pdf", "svg")} | {
            f"curve{kind}_column.{suffix}" for suffix in ("pdf", "svg")
        }

    first = ["curve.md", "curve_summary.csv", "curve.tex"]
    found = written(path)
    assert (found[:3], found[-1]) == (first, "curve.html")
    assert set(found[3:-1]) == both("") | both("_alpha")
    columns = ",".join(("key", *sweep_charts.ROUND_COLUMNS))
    lines = f"{columns}\ncurve.csv0,1,0.5,8,8\ncurve.csv0,2,0.6,9,9\n"
    (tmp_path / "curve_rounds.csv").write_text(lines)
    every = set().union(*map(both, ("", "_progress", "_alpha")))
    assert set(written(path)[3:-1]) == every
    old = written(table({"grid": "first"}, {"grid": "second", "seed": 0}, name="old.csv"), "first")
    assert {Path(name).stem for name in old} == {
        *("old", "old_summary", "old_settings", "old_settings_column"),
    }
    for name in ("old.md", "old.html"):
        assert "minus first" in (tmp_path / "out" / name).read_text()
        assert "minus" not in (tmp_path / "out" / name.replace("old", "curve")).read_text()
