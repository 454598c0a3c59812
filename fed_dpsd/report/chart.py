"""Charts as inline SVG: lines and points over two axes, a legend, and the numbers as a table.

A series has a colour, a dash and a marker of its own, so that no meaning rests on colour alone.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fed_dpsd.report.markup import Content, Html, element, folded, html, listed, table
from fed_dpsd.report.numbers import rounded_up

WIDTH, HEIGHT = 400, 260
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 26, 42
COLOURS = 6
DASHES = ("", "7 4", "2 4", "10 3 2 3")
SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "M-3.7,-3.7h7.4v7.4h-7.4z",
    "M0,-4.8L4.6,3.6H-4.6z",
    "M0,-5L5,0L0,5L-5,0z",
    "M0,4.8L4.6,-3.6H-4.6z",
)
MOST_MARKS = 30  # points of a line that are marked each
MOST_LETTERS = 44  # of an axis's labels, with the blanks between them

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of one kind, by ascending x.

    Args:
        name: what the legend calls it.
        points: (x, y); an x above the axis's most stands at the right, beyond it.
        reach: for each point, how far its error bar reaches up and down, NaN for none; () for none.
        joined: whether a line joins the points.
        level: whether the series is one height for all x, drawn as a grey line.
        plain: whether it is grey, for comparison: a line, or hollow circles that none joins.
    """

    name: str
    points: Sequence[Point]
    reach: Sequence[float] = ()
    joined: bool = True
    level: bool = False
    plain: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis.

    Args:
        title: its meaning, with the unit.
        low: the least value shown; None follows the points.
        high: the largest value shown; None follows the points.
        logarithmic: whether equal steps are equal factors.
        most: larger values, which say no more than this one, are drawn together beyond the axis.
        whole: whether values between whole numbers mean nothing.
        bound: whether values are upper bounds, which are never rounded down.
    """

    title: str
    low: float | None = None
    high: float | None = None
    logarithmic: bool = False
    most: float = math.inf
    whole: bool = False
    bound: bool = False

    def written(self, value: float, decimals: int = 3) -> str:
        """Return a value as text, with at most so many decimals; of a bound, five digits."""
        return rounded_up(value, 5) if self.bound else number(round(value, decimals))

    def beyond(self, value: float) -> bool:
        """Return whether a value is drawn beyond the axis."""
        return value > self.most or math.isinf(value)

    def over(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the least and the largest value to show."""
        finite = [value for value in values if not self.beyond(value)]
        low = self.low if self.low is not None else min(finite, default=0.0)
        high = self.high if self.high is not None else max(finite, default=1.0)
        if self.logarithmic:
            room = 1.15 if high > 4 * low else 2.0  # a single value has ticks on both sides
            return (low / room, high * room) if low > 0 else (0.1, 10.0)
        if high <= low:
            high = low + 1
        if self.high is None:
            high = low + (high - low) * 1.05
        return low, high

    def ticks(self, low: float, high: float) -> list[float]:
        """Return round values between both ends."""
        if self.logarithmic:
            return _decades(low, high)
        step = _step((high - low) / 5)
        step = max(1.0, round(step)) if self.whole else step
        first = math.ceil(low / step - 1e-9)
        ticks = [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]
        return [low, *(tick for tick in ticks if tick > low + step / 2)] if self.whole else ticks


def _step(least: float) -> float:
    """Return the next of 1, 2, 2.5, 5, 10 ... that is at least so large."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= least * (1 - 1e-9))


def _decades(low: float, high: float) -> list[float]:
    """Return 1, 2, 5 in each power of ten, or fewer where their labels would not fit."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [10.0**e for e in exponents if low <= 10.0**e <= high]
    for factors in ((1, 2, 5), (1, 3), (1,)):
        some = [f * 10.0**e for e in exponents for f in factors if low <= f * 10.0**e <= high]
        if sum(len(number(tick)) + 2 for tick in some) <= MOST_LETTERS:
            return some
    return found[:: len(found) // 6 + 1]


def number(value: float) -> str:
    """Write a number shortly: 1,000, 0.25, 3."""
    if math.isinf(value):
        return "inf"
    return f"{value:,.10g}" if abs(value) < 1e6 else f"{value:.3g}".replace("e+0", "e")


def chart(
    name: str,
    title: str,
    said: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    decimals: int = 1,
    numbers: Html | None = None,
) -> Html:
    """Return a figure: its title, the SVG, a legend, and its numbers as a folded table.

    Args:
        name: identifies the chart in the page.
        title: what it shows.
        said: a sentence for those who cannot see it.
        x: the horizontal axis.
        y: the vertical axis.
        series: what to draw.
        decimals: digits of y after the point in the table.
        numbers: a table to show in place of that of the points.
    """
    drawn = [each for each in series if each.points]
    own = [each for each in drawn if not (each.level or each.plain)]
    styles = {id(each): style for style, each in enumerate(own)}
    beyond = any(x.beyond(px) for s in drawn if not s.level for px, _ in s.points)
    x_values = [px for s in drawn if not s.level for px, _ in s.points]
    y_values = [py + reach for s in drawn for (_, py), r in _reaches(s) for reach in (-r, r)]
    place_x = _scale(x, x.over(x_values), LEFT, WIDTH - RIGHT - 44 * beyond)
    place_y = _scale(y, y.over(y_values), HEIGHT - BOTTOM, TOP)
    parts: list[Html] = [*_grid(x, y, place_x, place_y, x_values, y_values, beyond)]
    parts += [_grey(each, place_x, place_y) for each in drawn if id(each) not in styles]
    for each in own:
        parts += _drawn(each, styles[id(each)], place_x, place_y, x, y)
    picture = element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", said, id=f"{name}-said"),
        parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"{name}-title {name}-said",
    )
    legend = listed((_entry(each, styles.get(id(each))) for each in drawn), class_="legend")
    told = [each for each in drawn if not (each.plain and each.joined)]
    numbers = numbers or _numbers(title, x, y, told, decimals)
    beside = folded(f"Numbers: {title}", numbers, paper=False)
    return element("figure", element("figcaption", title), picture, legend, beside, id=name)


def _reaches(series: Series) -> Iterator[tuple[Point, float]]:
    """Yield each point with the reach of its error bar, 0 for none."""
    for point, reach in itertools.zip_longest(series.points, series.reach, fillvalue=0.0):
        yield point, 0.0 if math.isnan(reach) else reach


def _scale(
    axis: Axis, ends: tuple[float, float], first: float, last: float
) -> Callable[[float], float]:
    """Return the function from a value of an axis to its place, which may be beyond the end."""
    measure = math.log if axis.logarithmic else float
    low, high = map(measure, ends)

    def place(value: float) -> float:
        if axis.beyond(value):
            return last + 26
        fraction = (measure(value) - low) / (high - low)
        return first + min(1.0, max(0.0, fraction)) * (last - first)

    return place


def _grid(
    x: Axis,
    y: Axis,
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
    x_values: Sequence[float],
    y_values: Sequence[float],
    beyond: bool,
) -> Iterator[Html]:
    """Yield the grid, the ticks' numbers and the axes' titles."""
    bottom = HEIGHT - BOTTOM
    for tick in y.ticks(*y.over(y_values)):
        at = f"{place_y(tick):.1f}"
        yield element("path", d=f"M{LEFT},{at}H{WIDTH - RIGHT}", class_="grid")
        yield _text(LEFT - 7, place_y(tick) + 4.5, number(tick), "end", "soft")
    for tick in x.ticks(*x.over(x_values)):
        yield element("path", d=f"M{place_x(tick):.1f},{bottom}v5", class_="axis")
        yield _text(place_x(tick), bottom + 18, number(tick), "middle", "soft")
    if beyond:
        name = "inf" if math.isinf(x.most) else f"> {number(x.most)}"
        yield _text(place_x(math.inf), bottom + 18, name, "middle", "soft")
        edge = place_x(math.inf) - 22
        yield element(
            "path", d=f"M{edge:.1f},{TOP}V{bottom}", class_="grid", stroke_dasharray="3 3"
        )
    yield element("path", d=f"M{LEFT},{bottom}H{WIDTH - RIGHT}", class_="axis")
    yield _text(0, 13, y.title, "start", "")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x.title, "middle", "")


def _text(x: float, y: float, words: str, anchor: str, kind: str) -> Html:
    return element(
        "text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=kind or None
    )


def _grey(
    series: Series, place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> Html:
    """Return a grey line, from edge to edge where it is level, or hollow circles."""
    stroke = {"class_": "line grey", "stroke_dasharray": "4 4"}
    if series.level:
        at = place_y(series.points[0][1])
        return element("path", d=f"M{LEFT},{at:.1f}H{WIDTH - RIGHT}", **stroke)
    places = [(place_x(px), place_y(py)) for px, py in series.points]
    if not series.joined:
        return element("g", (_mark(0, *place, hollow=True) for place in places), class_="grey")
    return element("path", d="M" + "L".join(f"{px:.1f},{py:.1f}" for px, py in places), **stroke)


def _drawn(
    series: Series,
    style: int,
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
    x: Axis,
    y: Axis,
) -> Iterator[Html]:
    """Yield the line of a series, its error bars, and its markers, whose titles say the numbers."""
    aside = 7 * (style % 5 - 2)  # beyond the axis, series stand beside each other
    places = [(place_x(px) + aside * x.beyond(px), place_y(py)) for px, py in series.points]
    finite = [p for p, (px, _) in zip(places, series.points, strict=True) if not x.beyond(px)]
    marks: list[Html] = []
    if series.joined and len(finite) > 1:
        d = "M" + "L".join(f"{px:.1f},{py:.1f}" for px, py in finite)
        marks.append(element("path", d=d, class_="line", stroke_dasharray=_dash(style)))
    every = -(-len(places) // MOST_MARKS) if series.joined else 1
    for index, ((px, py), reach) in enumerate(_reaches(series)):
        if (len(places) - 1 - index) % every:
            continue
        at_x, at_y = places[index]
        if reach:
            low, high = place_y(py - reach), place_y(py + reach)
            bar = f"M{at_x:.1f},{high:.1f}V{low:.1f}m-4,0h8M{at_x - 4:.1f},{high:.1f}h8"
            marks.append(element("path", d=bar, class_="bar"))
        told = f"{series.name}: {y.written(py)} ({y.title}) at {x.written(px)} ({x.title})"
        marks.append(_mark(style, at_x, at_y, told))
    yield element("g", marks, class_=f"s{style % COLOURS}")


def _dash(style: int) -> str | None:
    return DASHES[(style + style // COLOURS) % len(DASHES)] or None


def _mark(style: int, x: float, y: float, told: str = "", hollow: bool = False) -> Html:
    shape = SHAPES[style % len(SHAPES)]
    inside = element("title", told) if told else ""
    kind = "mark" if hollow or style // len(SHAPES) % 2 else "mark full"
    return element("path", inside, d=shape, class_=kind, transform=f"translate({x:.1f},{y:.1f})")


def _entry(series: Series, style: int | None) -> Html:
    """Return an entry of the legend: a piece of the line, and its name."""
    if style is None:
        line = element("path", d="M1,8H39", class_="line", stroke_dasharray="4 4")
        parts: Content = line if series.joined else _mark(0, 20, 8, hollow=True)
        colour = "grey"
    else:
        line = element("path", d="M1,8H39", class_="line", stroke_dasharray=_dash(style))
        parts, colour = [line if series.joined else "", _mark(style, 20, 8)], f"s{style % COLOURS}"
    sample = element("svg", parts, viewBox="0 0 40 16", aria_hidden="true", class_=colour)
    return html([sample, series.name])


def _numbers(title: str, x: Axis, y: Axis, series: Sequence[Series], decimals: int) -> Html:
    """Return the table of a chart: a row for each x, a column for each series."""
    places = sorted({px for s in series if not s.level for px, _ in s.points})
    known = {id(s): {px: (py, r) for (px, py), r in _reaches(s)} for s in series}

    def cell(each: Series, at: float) -> str:
        point = (each.points[0][1], 0.0) if each.level else known[id(each)].get(at)
        if point is None:
            return ""
        spread = f" ± {point[1]:,.{decimals}f}" if point[1] else ""
        return f"{y.written(point[0]) if y.bound else format(point[0], f',.{decimals}f')}{spread}"

    rows = ([x.written(at), *(cell(each, at) for each in series)] for at in places)
    caption = f"{title}: {y.title} by {x.title}"
    return table(caption, [x.title, *(each.name for each in series)], rows, wide=True)
