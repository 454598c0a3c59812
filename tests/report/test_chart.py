"""Charts as SVG: ticks, places, what lies beyond an axis, and the numbers beside them."""

import math
import re

import pytest

from fed_dpsd.report.chart import DASHES, SHAPES, Axis, Series, chart, number
from fed_dpsd.report.markup import element, html, table
from tests.report.runs import Page


def drawn(*series, x=None, y=None):
    x, y = x or Axis("round"), y or Axis("accuracy, %", 0, 100)
    return Page(chart("c", "A chart", "It says.", x, y, series))


@pytest.mark.parametrize(
    ("axis", "ends", "expected"),
    [
        (Axis("", 0, 100), (0, 100), [0, 20, 40, 60, 80, 100]),
        (Axis("", whole=True), (1, 20), [1, 5, 10, 15, 20]),
        (Axis("", whole=True), (1, 3), [1, 2, 3]),
        (Axis("", whole=True), (1, 200), [1, 50, 100, 150, 200]),
        (Axis(""), (0, 0.3), [0, 0.1, 0.2, 0.3]),
        (Axis("", logarithmic=True), (0.9, 12), [1, 2, 5, 10]),
        (Axis("", logarithmic=True), (1, 2e6), [1, 10, 100, 1e3, 1e4, 1e5, 1e6]),
    ],
)
def test_ticks_are_round_and_few(axis, ends, expected):
    assert axis.ticks(*ends) == pytest.approx(expected)


def test_a_single_value_on_a_logarithmic_axis_has_ticks_on_both_sides():
    axis = Axis("epsilon", logarithmic=True, most=100)
    assert axis.ticks(*axis.over([2.99, 51_200])) == [2, 5]


def test_numbers_are_short():
    shown = [number(value) for value in (0.25, 3.0, 12345, 2e6, math.inf)]
    assert shown == ["0.25", "3", "12,345", "2e6", "inf"]


def test_series_differ_in_more_than_colour():
    page = drawn(*(Series(f"s{n}", [(1, n), (2, n)]) for n in range(6)))
    lines = [e.get("stroke-dasharray") for e in page.all("path", class_="line")]
    marks = [e["d"] for e in page.all("path", class_="mark")]
    assert set(lines) == {dash or None for dash in DASHES}
    assert set(marks) == set(SHAPES)
    groups = [e["class"] for e in page.all("g")]
    assert len(set(groups)) == 6


def test_large_values_stand_together_beyond_the_axis_and_keep_their_numbers():
    axis = Axis("epsilon", logarithmic=True, most=100)
    page = drawn(Series("labels", [(1, 50), (10, 60), (51_200, 90), (math.inf, 99)]), x=axis)
    (line,) = [e["d"] for e in page.all("path", class_="line") if "L" in e["d"]]
    assert line.count("L") == 1  # of the two finite ones alone
    places = [
        float(re.search(r"\(([\d.]+)", e["transform"])[1])
        for e in page.all("path", class_="mark")
        if e["parents"][-1]["tag"] == "g"
    ]
    assert places[0] < places[1] < places[2] == places[3]
    rows = page.rows("A chart")
    assert [row["epsilon"] for row in rows] == ["1", "10", "51,200", "inf"]
    assert "> 100" in [e["text"] for e in page.all("text")]


def test_bounds_are_never_rounded_down():
    axis = Axis("epsilon", bound=True)
    page = drawn(Series("s", [(2.987952144403, 5.632237)]), x=axis, y=axis)
    assert page.rows("A chart") == [{"epsilon": "2.988", "s": "5.6323"}]
    (mark,) = (e for e in page.all("title") if e["text"].startswith("s: "))
    assert mark["text"] == "s: 5.6323 (epsilon) at 2.988 (epsilon)"


def test_error_bars_reach_as_far_as_they_say():
    page = drawn(Series("s", [(1, 50), (2, 70)], [10, math.nan]))
    (bar,) = page.all("path", class_="bar")
    top, bottom = (float(n) for n in re.search(r",([\d.]+)V([\d.]+)", bar["d"]).groups())
    assert bottom - top == pytest.approx(20 * (260 - 42 - 26) / 100, abs=0.2)
    assert [row["s"] for row in page.rows("A chart")] == ["50.0 ± 10.0", "70.0"]


def test_a_level_is_a_line_from_edge_to_edge_on_any_axis():
    axis = Axis("epsilon", logarithmic=True)
    page = drawn(Series("s", [(1, 5), (9, 6)]), Series("chance", [(0, 10)], level=True), x=axis)
    (grey,) = [e for e in page.all("path", class_="grey") if e["d"].startswith("M40")]
    assert "H388" in grey["d"]
    assert [row["chance"] for row in page.rows("A chart")] == ["10.0", "10.0"]


def test_what_is_plain_text_is_escaped_once():
    assert html("a < b & `c`") == "a &lt; b &amp; <code>c</code>"
    assert element("p", element("b", "<"), title='"') == '<p title="&quot;"><b>&lt;</b></p>'
    assert html("9 % of") == "9\u00a0% of"
    assert html("delta 1e-05") == 'delta <span class="whole">1e-05</span>'
    page = Page(table("On <x>", ["a", "b < c"], [["r", "1"]]))
    assert page.rows("On <x>") == [{"a": "r", "b < c": "1"}]
    (cell,) = page.all("td")
    assert cell["data-label"] == "b < c"
