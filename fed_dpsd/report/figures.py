"""All figures, drawn with matplotlib: SVG for pages, PNG and PDF for papers.

In SVG, colours are CSS variables of the page, so figures follow its light or dark theme. Lines also
differ in dash and marker, so no meaning depends on colour alone.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from fed_dpsd.report.charts import ENSEMBLE, Axis, Bars, Chart, Series
from fed_dpsd.report.numbers import spread, written
from fed_dpsd.storage import replacing

# The light colours of templates/style.css, by variable. Line colours are close to the palette of
# Okabe and Ito, which is safe for colour-blind readers, and dark enough to be visible on white.
PALETTE = {
    **{"s0": "#0072b2", "s1": "#d55e00", "s2": "#008060", "s3": "#a8518a", "s5": "#9a6a00"},
    **{"ink": "#1b1f24", "soft": "#4f5862", "line": "#c9d1d9", "paper": "#ffffff"},
}
COLOURS = [PALETTE[name] for name in ("s0", "s1", "s2", "s3", "ink", "s5")]
INK, SOFT, LINE, PAPER = (PALETTE[name] for name in ("ink", "soft", "line", "paper"))
DASHES = ((), (7, 4), (2, 3), (10, 3, 2, 3))
MARKERS = "os^Dv"
STYLE: Any = {
    **{"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10.5},
    **{"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": SOFT, "grid.color": LINE},
    **{"xtick.labelcolor": SOFT, "ytick.labelcolor": SOFT, "xtick.color": SOFT},
    **{"ytick.major.size": 0, "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.spines.left": False, "axes.axisbelow": True, "legend.frameon": False},
    **{"hatch.color": PAPER, "text.parse_math": False},
    **{"svg.fonttype": "none", "svg.hashsalt": "fed-dpsd"},
}
NARROW, WIDE = 5.0, 9.0  # inches: one column of a page, and a paper's figure
BELOW = 0.55  # inches below a panel, for tick labels and the title of the x axis
MOST_MARKERS = 30  # on one line


def look(number: int) -> dict[str, Any]:
    """Return the colour, dash and marker of a line by its number; the first 32 lines differ."""
    dash = DASHES[(number + number // len(COLOURS)) % len(DASHES)]
    hollow = number // len(MARKERS) % 2
    colour = COLOURS[number % len(COLOURS)]
    return {
        **{"color": colour, "linestyle": (0, dash) if dash else "-"},
        **{"marker": MARKERS[number % len(MARKERS)], "markersize": 5.5},
        "markerfacecolor": PAPER if hollow else colour,
    }


def draw(charts: Sequence[Chart], across: int = 0) -> Figure | None:
    """Draw charts over two axes; return None without charts.

    Args:
        charts: one chart, or several for a paper.
        across: charts per row of a wide figure with titles; 0 for a narrow figure in a page.
    """
    if not charts:
        return None
    named = (s.name for chart in charts for s in chart.series if s.coloured)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(named))}
    legend: dict[str, Artist] = {}
    with matplotlib.rc_context(STYLE):
        figure = Figure((WIDE if across else NARROW, 1))
        for chart in charts:
            legend |= _plot(figure.add_subplot(), chart, numbers, wide=bool(across))
        titles = [chart.title + "\n" if across else "" for chart in charts]
        titles = [title + chart.y.title for title, chart in zip(titles, charts, strict=True)]
        arrange(figure, titles, [3.2 if across else 2.0] * len(charts), legend, across or 1)
    return figure


def _plot(axes: Axes, chart: Chart, numbers: Mapping[str, int], wide: bool) -> dict[str, Artist]:
    """Draw a chart, and return the entries of its legend."""
    drawn = [s for s in chart.series if s.points and (wide or s.kind != "faint")]
    place = _set_x(axes, chart.x, [x for s in drawn if s.kind != "level" for x, _ in s.points])
    heights = [y + r for s in drawn for (_, y), d in _with_reach(s) for r in (-d, d)]
    low, high = _ends(chart.y, heights)
    axes.set_ylim(low, high + 0.03 * (high - low))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value)))
    axes.set_xlabel(chart.x.title)
    axes.grid(axis="y")
    legend: dict[str, Artist] = {}
    for series in drawn:
        number = numbers.get(series.like or series.name, 0)
        x = [place(value, number) for value, _ in series.points]
        y = [value for _, value in series.points]
        if series.kind == "level":
            legend[series.name] = axes.axhline(y[0], color=SOFT, dashes=(4, 3), linewidth=1.5)
        elif series.kind == "guide":
            (legend[series.name],) = axes.plot(x, y, color=SOFT, dashes=(4, 3), linewidth=1.5)
        elif series.kind == "points":
            hollow = {"facecolors": "none", "edgecolors": SOFT}
            legend[series.name] = axes.scatter(x, y, s=28, **hollow)
            _name_points(axes, list(zip(x, y, strict=True)), series.labels if wide else ())
        elif series.kind == "faint":
            inside = sum(not chart.x.beyond(value) for value, _ in series.points)
            style = {"color": look(number)["color"], "linestyle": ":", "linewidth": 1}
            axes.plot(x[:inside], y[:inside], **style)
            legend[ENSEMBLE] = Line2D([], [], color=SOFT, linestyle=":", linewidth=1)
        else:
            legend[series.name] = _line(axes, chart.x, series, x, number)
    return legend


def _line(axes: Axes, axis: Axis, series: Series, x: Sequence[float], number: int) -> Artist:
    """Draw a series as a line with deviations; points beyond the axis are not connected."""
    y, reach = np.array([y for _, y in series.points]), np.array(series.deviations())
    style = look(number)
    if series.kind == "band":
        axes.fill_between(x, y - reach, y + reach, color=style["color"], alpha=0.12, linewidth=0)
    elif reach.any():
        axes.errorbar(x, y, reach, fmt="none", ecolor=style["color"], capsize=3, elinewidth=1.2)
    inside = sum(not axis.beyond(value) for value, _ in series.points)
    every = math.ceil(len(x) / MOST_MARKERS)
    marks = slice((inside - 1) % every, None, every)
    style |= {"curve": {"marker": ""}, "mark": {"linestyle": ""}}.get(series.kind, {})
    (line,) = axes.plot(x[:inside], y[:inside], **style, markevery=marks, clip_on=False)
    axes.plot(x[inside:], y[inside:], **{**style, "linestyle": ""}, clip_on=False)
    return line


def _with_reach(series: Series) -> Iterable[tuple[tuple[float, float], float]]:
    return zip(series.points, series.deviations(), strict=True)


def _ends(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value to show."""
    finite = [value for value in values if not axis.beyond(value)]
    if axis.logarithmic:
        positive = [value for value in finite if value > 0] or [1.0]
        low, high = min(positive), max(positive)
        room = 1.15 if high > 4 * low else 2.0  # room for ticks around a single value
        return low / room, high * room
    low = axis.low if axis.low is not None else min(finite, default=0.0)
    high = axis.high if axis.high is not None else max(finite, default=1.0)
    return low, high if high > low else low + 1


def _set_x(axes: Axes, axis: Axis, values: Sequence[float]) -> Callable[[float, int], float]:
    """Set up the x axis; return a function from a value and its line's number to x."""
    low, high = _ends(axis, values)
    if not axis.logarithmic:
        pad = 0.03 * (high - low)
        axes.set_xlim(low - pad, high + pad)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=axis.whole))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value)))
        return lambda value, _: value
    axes.set_xscale("log")
    ticks, width = log_ticks(low, high), high / low
    labels = list(map(written, ticks))
    if any(map(axis.beyond, values)):
        axes.axvline(high * width**0.07, color=LINE, dashes=(3, 3), linewidth=1)
        ticks = [*ticks, high * width**0.17]
        labels += ["inf" if math.isinf(axis.most) else f"> {written(axis.most)}"]
        axes.set_xlim(low, high * width**0.27)
    else:
        axes.set_xlim(low, high)
    axes.set_xticks(ticks, labels)
    axes.xaxis.set_minor_locator(NullLocator())

    def place(value: float, number: int) -> float:
        aside = 0.17 + 0.02 * (number % 5 - 2)  # beyond the axis, series are side by side
        return high * width**aside if axis.beyond(value) else value

    return place


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten, or fewer ticks if their labels would overlap."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tens = [10.0**e for e in exponents if low <= 10.0**e <= high]
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**e for e in exponents for f in factors if low <= f * 10.0**e <= high]
        if sum(len(written(tick)) + 2 for tick in ticks) <= 42:
            return ticks
    return tens[:: len(tens) // 6 + 1]


def _name_points(axes: Axes, points: Sequence[tuple[float, float]], labels: Sequence[str]) -> None:
    """Write each point's name to its right; names of close points are below each other."""
    low, high = axes.get_xlim()
    if labels:
        axes.set_xlim(low, max(high, max(x for x, _ in points) * (high / low) ** 0.12))
    above: dict[float, float] = {}  # the height of the last name at this x
    for (x, y), label in sorted(zip(points, labels, strict=False), key=lambda p: -p[0][1]):
        height = above[x] = min(y, above.get(x, math.inf) - 5)
        line = {"arrowstyle": "-", "color": LINE, "linewidth": 0.6}
        axes.annotate(
            *(label, (x, y), (1.05 * x, height)),
            **{"fontsize": 7, "color": SOFT, "va": "center", "arrowprops": line},
            bbox={"facecolor": PAPER, "alpha": 0.8, "linewidth": 0, "pad": 0.3},
        )


def arrange(
    figure: Figure,
    titles: Sequence[str],
    heights: Sequence[float],
    entries: Mapping[str, Artist],
    across: int = 1,
    left: float = 0.5,
) -> None:
    """Place the panels of a figure in rows above a legend, and set the height of the figure.

    Args:
        figure: the figure, with its panels.
        titles: a title for each panel; "" for none.
        heights: the height of each panel, in inches.
        entries: the artists in the legend, by label.
        across: panels per row.
        left: space for the labels of the y axis, in inches.
    """
    whole, line = figure.get_figwidth(), 1.25 * matplotlib.rcParams["font.size"] / 72
    width = whole / across
    wrapped = [
        "\n".join(textwrap.fill(row, int(width / 0.08)) for row in title.split("\n"))
        for title in titles
    ]
    labels = [textwrap.fill(name, int(whole / 0.104)) for name in entries]
    columns = 2 if max(map(len, labels), default=0) < 6.2 * whole - 8 else 1
    legend = line * (sum(name.count("\n") + 1.1 for name in labels) / columns + bool(labels))
    top = line * (max(title.count("\n") for title in wrapped) + 1.5)
    total = sum(top + height + BELOW for height in heights[::across]) + legend
    figure.set_figheight(total)
    bottom = total + BELOW
    for n, axes in enumerate(figure.axes):
        if n % across == 0:
            bottom -= BELOW + top + heights[n]
        x, inside = n % across * width + left, width - left - 0.15
        axes.set_position([x / whole, bottom / total, inside / whole, heights[n] / total])
        axes.set_title(wrapped[n], loc="left", x=-left / inside)
    if labels:
        figure.legend(
            *(list(entries.values()), labels),
            **{"loc": "lower left", "bbox_to_anchor": (0, 0), "ncols": columns, "borderpad": 0},
            **{"labelspacing": 0.4, "handlelength": 3.2},
        )


def draw_bars(groups: Sequence[Bars], wide: bool = False) -> Figure | None:
    """Draw a labelled bar for each setting, in a panel per data set; None for no settings."""
    if not groups:
        return None
    with matplotlib.rc_context(STYLE):
        wrapped = [
            [textwrap.fill(name, 80 if wide else 44) for name, *_ in group.rows] for group in groups
        ]
        figure, heights = Figure((WIDE if wide else NARROW, 1)), []
        legend: dict[str, Artist] = {}
        for group, labels in zip(groups, wrapped, strict=True):
            axes = figure.add_subplot()
            at = 0.0
            for (_, mean, deviation, printed), label in zip(group.rows, labels, strict=True):
                at += 0.8 * (label.count("\n") + 1)
                axes.text(0, at, label, va="bottom")
                at += 0.45
                bar = axes.barh(at, mean, 0.6, color=COLOURS[0])
                legend["student, with one standard deviation over seeds"] = bar
                if not math.isnan(deviation):
                    axes.errorbar(mean, at, xerr=deviation, ecolor=INK, capsize=3)
                if printed is not None:
                    (mark,) = axes.plot(
                        *(printed, at),
                        **{"marker": "D", "color": COLOURS[1], "markerfacecolor": PAPER},
                        linestyle="",
                    )
                    legend["published by a paper, not proven"] = mark
                axes.text(102, at, f"{spread(mean, deviation)} %", va="center", clip_on=False)
                at += 0.6
            axes.set(
                xlim=(0, 120 if wide else 134), ylim=(at, 0), yticks=[], xticks=range(0, 101, 20)
            )
            axes.set_xlabel("accuracy on the test images, %")
            heights.append(0.21 * at)
        arrange(figure, [g.title * wide for g in groups], heights, legend, left=0.05)
    return figure


# --- files ---


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG or PDF, depending on the suffix of `path`; a wide PNG has 1,800 pixels.

    Raises:
        UserError: the file cannot be written.
    """
    kind = "pdf" if path.suffix == ".pdf" else "png"
    metadata = {"Creator": None, "Producer": None, "CreationDate": None}
    with matplotlib.rc_context(STYLE), replacing(path) as temporary:
        figure.savefig(
            *(temporary,),
            **{"format": kind, "dpi": 200},
            metadata=metadata if kind == "pdf" else {"Software": None},
        )
    return path


def to_svg(figure: Figure, name: str) -> tuple[str, str]:
    """Return the view box and the content of a figure as inline SVG.

    Text stays text, colours of PALETTE become CSS variables, and ids begin with `name`.
    """
    file = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    box = root.attrib["viewBox"]
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', file.getvalue()))
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(key): value for key, value in element.attrib.items()}
        identity = attributes.pop("id", None)
        element.attrib = {key: _tidy(value, name) for key, value in attributes.items()}
        if identity in used:
            element.set("id", f"{name}-{identity}")
        element.tail = None
        element.text = element.text if element.tag == "text" else None
    parts = [part for part in root if part.tag != "metadata" and part.find("style") is None]
    return box, "".join(ElementTree.tostring(part, encoding="unicode") for part in parts)


def _local(name: str) -> str:
    """Return a name without its XML namespace."""
    return name.rpartition("}")[2]


def _tidy(value: str, name: str) -> str:
    """Return an attribute with the ids, font and colours of the page, and with fewer digits."""
    if reference := re.fullmatch(r"(url\()?#(\w+)(\)?)", value):
        return f"{reference[1] or ''}#{name}-{reference[2]}{reference[3]}"
    value = re.sub(r"(\d\.\d\d)\d+", r"\1", value)
    value = re.sub(r"font-family: [^;]*; ", "", value)
    for variable, colour in PALETTE.items():
        value = value.replace(colour, f"var(--{variable})")
    return " ".join(value.split())
