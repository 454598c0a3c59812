"""All figures, drawn with matplotlib: inline SVG for pages; PDF, SVG and PNG for papers.

In pages, colours are CSS variables, so figures follow the light or dark theme. Lines also differ in
dash and marker, so that no meaning depends on colour alone.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
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

from fed_dpsd.report.charts import ACCURACY, Axis, Chart, Dots, Series, accuracy_axis
from fed_dpsd.report.numbers import compact, spread
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
# The methods' numbers in `look`, so that figures of different sweeps agree.
METHODS = (
    *("fed_dpsd", "fedavg", "dense", "fedprox", "ensemble", "feddf", "fedadi", "feddafl"),
    *("co_boosting", "dpsd", "dp_fedavg", "central", "local", "dgd", "dp_dfd", "dpdfd"),
)
STYLE: Any = {
    **{"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10.5},
    **{"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": SOFT, "grid.color": LINE},
    **{"xtick.labelcolor": SOFT, "ytick.labelcolor": SOFT, "xtick.color": SOFT},
    **{"ytick.major.size": 0, "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.spines.left": False, "axes.axisbelow": True, "legend.frameon": False},
    **{"hatch.color": PAPER, "text.parse_math": False},
    **{"svg.hashsalt": "fed-dpsd", "pdf.fonttype": 42},  # journals reject other types of fonts
}
PRINT: Any = STYLE | {
    **{"font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7.5},
    **{"xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "lines.linewidth": 1.2},
    **{"axes.linewidth": 0.6, "grid.linewidth": 0.6, "lines.markersize": 4},
}
# Widths in inches: in a page, and in a paper's column and across its text.
PAGE, COLUMN, TEXT = 5.0, 3.3, 6.8
HEIGHTS = {PAGE: 2.9, COLUMN: 2.4, TEXT: 2.8}  # inches of a chart, without its legend
LINE_LENGTH = 50  # letters of a legend's line
LABEL_LENGTH = 28  # letters of a line next to a dot
MOST_COLUMNS = 3  # of a legend
MOST_MARKERS = 30  # on one line


def style(width: float) -> Any:
    """Return the style of a figure with this width; papers use smaller text than pages."""
    return STYLE if width == PAGE else PRINT


def scale() -> float:
    """Return the size of the current style relative to a page's style."""
    return float(matplotlib.rcParams["font.size"]) / STYLE["font.size"]


def method_number(method: str, methods: Sequence[str]) -> int:
    """Return a method's number in `look`; plug-ins' methods follow ours in order."""
    if method in METHODS:
        return METHODS.index(method)
    return len(METHODS) + [each for each in methods if each not in METHODS].index(method)


def look(number: int, variant: int = 0) -> dict[str, Any]:
    """Return the colour, dash and marker of a line by its number; the first 32 lines differ.

    The first 8 variants of a line share its colour and marker, and differ in fill and dash.
    """
    dash = DASHES[(number + number // len(COLOURS) + variant // 2) % len(DASHES)]
    hollow = (number // len(MARKERS) + variant) % 2
    colour = COLOURS[number % len(COLOURS)]
    return {
        **{"color": colour, "linestyle": (0, dash) if dash else "-"},
        **{"marker": MARKERS[number % len(MARKERS)], "markersize": 5.5 * scale()},
        "markerfacecolor": PAPER if hollow else colour,
    }


def draw(charts: Sequence[Chart], width: float = PAGE, across: int = 1) -> Figure | None:
    """Draw charts, `across` in a row, as wide as PAGE, COLUMN or TEXT; None without charts."""
    if not charts:
        return None
    named = (s.name for chart in charts for s in chart.series if s.coloured)
    numbers = {name: (number, 0) for number, name in enumerate(dict.fromkeys(named))}
    legend: dict[str, Artist] = {}
    several = len({chart.panel for chart in charts}) > 1
    with matplotlib.rc_context(style(width)):
        figure, panels = new_figure(width, [HEIGHTS[width]] * len(charts), across)
        for axes, chart in zip(panels, charts, strict=True):
            legend |= _plot(axes, chart, numbers, width)
            axes.set_title(f"{chart.panel}\n" * several + chart.y.title, loc="left")
        add_legend(figure, legend)
    return figure


def _plot(
    axes: Axes, chart: Chart, numbers: Mapping[str, tuple[int, int]], width: float
) -> dict[str, Artist]:
    drawn = [s for s in chart.series if s.points]
    lines = sum(s.coloured for s in drawn)
    values = [x for s in drawn if s.kind != "level" for x, _ in s.points]
    place = _set_x(axes, chart.x, values, lines)
    pairs = [pair for s in drawn for pair in zip(s.points, s.deviations(), strict=True)]
    heights = [y + reach for (_, y), d in pairs for reach in (-d, d)]
    low, high = _limits(chart.y, heights)
    axes.set_ylim(low, high + 0.03 * (high - low) * (chart.y.high in (None, 100)))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    axes.set_xlabel(chart.x.title)
    axes.grid(axis="y")
    legend: dict[str, Artist] = {}
    for position, series in enumerate(drawn):
        number, variant = series.look or numbers.get(series.name, (0, 0))
        x = [place(value, position) for value, _ in series.points]
        y = [value for _, value in series.points]
        if series.kind == "level":
            legend[series.name] = axes.axhline(
                y[0], color=SOFT, dashes=(4, 3), linewidth=1.5 * scale()
            )
        elif series.kind == "guide":
            (legend[series.name],) = axes.plot(
                x, y, color=SOFT, dashes=(4, 3), linewidth=1.5 * scale()
            )
        elif series.kind == "points":
            hollow: Any = {"facecolors": "none", "edgecolors": SOFT}
            legend[series.name] = axes.scatter(x, y, s=28 * scale() ** 2, zorder=3, **hollow)
            labels = series.labels if width == TEXT else ()
            _name_points(axes, list(zip(x, y, strict=True)), labels)
        else:
            legend[series.name] = _line(axes, chart.x, series, x, look(number, variant))
    return legend


def _line(
    axes: Axes, axis: Axis, series: Series, x: Sequence[float], style: dict[str, Any]
) -> Artist:
    """Draw a series as a line with deviations; points beyond the axis are not connected."""
    y, reach = np.array([y for _, y in series.points]), np.array(series.deviations())
    if series.kind == "band":
        axes.fill_between(x, y - reach, y + reach, color=style["color"], alpha=0.12, linewidth=0)
    elif reach.any():
        bars: Any = {"capsize": 3 * scale(), "elinewidth": 1.2 * scale(), "capthick": 1.2 * scale()}
        axes.errorbar(x, y, reach, fmt="none", ecolor=style["color"], **bars)
    inside = sum(not axis.beyond(value) for value, _ in series.points)
    every = math.ceil(len(x) / (MOST_MARKERS * scale() ** 3))
    marks = slice((inside - 1) % every, None, every)
    style |= {"curve": {"marker": ""}, "mark": {"linestyle": ""}}.get(series.kind, {})
    style |= {"clip_on": False, "in_layout": False}  # an empty line has no place in the layout
    (line,) = axes.plot(x[:inside], y[:inside], **style, markevery=marks)
    axes.plot(x[inside:], y[inside:], **style | {"linestyle": ""})
    return line


def _limits(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if not axis.beyond(value)]
    if axis.logarithmic:
        positive = [value for value in finite if value > 0] or [1.0]
        low, high = min(positive), max(positive)
        room = 1.15 if high > 4 * low else 2.0  # room for ticks around a single value
        return low / room, high * room
    low = axis.low if axis.low is not None else min(finite, default=0.0)
    high = axis.high if axis.high is not None else max(finite, default=1.0)
    return low, high if high > low else low + 1


def _set_x(
    axes: Axes, axis: Axis, values: Sequence[float], lines: int
) -> Callable[[float, int], float]:
    """Set up the x axis; return a function from a value and its line's position to x."""
    low, high = _limits(axis, values)
    if not axis.logarithmic:
        pad = 0.03 * (high - low)
        axes.set_xlim(low - pad, high + pad)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=axis.whole))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
        return lambda value, _: value
    axes.set_xscale("log")
    if axis.side_by_side:  # each value has a tick, and room for the lines next to it
        low, high = min(values) / 1.35, max(values) * 1.35
    ticks = sorted(set(values)) if axis.side_by_side else log_ticks(low, high)
    width, labels = high / low, list(map(compact, ticks))
    if any(map(axis.beyond, values)):
        axes.axvline(high * width**0.07, color=LINE, dashes=(3, 3), linewidth=1)
        ticks = [*ticks, high * width**0.17]
        labels += ["inf" if math.isinf(axis.most) else f"> {compact(axis.most)}"]
        axes.set_xlim(low, high * width**0.27)
    else:
        axes.set_xlim(low, high)
    axes.set_xticks(ticks, labels)
    axes.xaxis.set_minor_locator(NullLocator())

    def place(value: float, position: int) -> float:
        if axis.side_by_side:
            step = min(0.02, 0.05 / lines)  # all lines stay close to their value
            return value * width ** (step * (position - (lines - 1) / 2))
        aside = 0.17 + 0.02 * (position % 5 - 2)  # beyond the axis, series are side by side
        return high * width**aside if axis.beyond(value) else value

    return place


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten, or fewer ticks if their labels would overlap."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tens = [10.0**e for e in exponents if low <= 10.0**e <= high]
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**e for e in exponents for f in factors if low <= f * 10.0**e <= high]
        if sum(len(compact(tick)) + 2 for tick in ticks) <= 42:
            return ticks
    return tens[:: len(tens) // 6 + 1]


def _name_points(axes: Axes, points: Sequence[tuple[float, float]], labels: Sequence[str]) -> None:
    """Write each point's name to its right; stack the names of close points."""
    (low, high), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    if labels:
        axes.set_xlim(low, max(high, max(x for x, _ in points) * (high / low) ** 0.12))
    above: dict[float, float] = {}  # the height of the last name at this x
    for (x, y), label in sorted(zip(points, labels, strict=False), key=lambda p: -p[0][1]):
        height = above[x] = min(y, above.get(x, math.inf) - 0.055 * (top - bottom))
        line: Any = {"arrowstyle": "-", "color": SOFT, "linewidth": 0.4, "relpos": (0, 0.5)}
        line |= {"shrinkA": 0, "shrinkB": 2}
        axes.annotate(
            label,
            (x, y),
            (1.05 * x, height),
            fontsize=6.5,
            color=SOFT,
            va="center",
            arrowprops=line,
            bbox={"facecolor": PAPER, "alpha": 0.8, "linewidth": 0, "pad": 0.3},
        )


def new_figure(
    width: float, heights: Sequence[float], across: int = 1
) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels of these heights in inches, `across` in a row."""
    rows = list(heights[::across])
    figure = Figure((width, sum(rows)), layout="constrained")
    every = figure.subplots(len(rows), across, squeeze=False, height_ratios=rows).ravel()
    for unused in every[len(heights) :]:
        unused.remove()
    return figure, list(every[: len(heights)])


def add_legend(figure: Figure, entries: Mapping[str, Artist]) -> None:
    """Add a legend below the panels, in as many columns as fit; its height is added."""
    labels = [textwrap.fill(name, LINE_LENGTH) for name in entries]
    for columns in range(min(MOST_COLUMNS, len(labels)), 0, -1):
        place: Any = {"loc": "outside lower left", "handlelength": 3.2, "labelspacing": 0.4}
        legend = figure.legend(list(entries.values()), labels, ncols=columns, **place)
        box = legend.get_window_extent()
        if box.width <= figure.bbox.width or columns == 1:
            figure.set_figheight(figure.get_figheight() + box.height / figure.dpi)
            break
        legend.remove()


def draw_dots(groups: Sequence[Dots], width: float = PAGE) -> Figure | None:
    """Draw a labelled dot for each setting, with a panel per data set; None for no settings."""
    if not groups:
        return None
    with matplotlib.rc_context(style(width)):
        size = scale()
        mean_mark: Any = {"color": SOFT, "marker": "o", "markersize": 5.5 * size, "linestyle": ""}
        legend: dict[str, Artist] = {
            "mean and standard deviation over seeds": Line2D([], [], **mean_mark)
        }
        labels = [[textwrap.fill(row[0], LABEL_LENGTH) for row in g.rows] for g in groups]
        lines = [np.array([1.25 + label.count("\n") for label in own]) for own in labels]
        heights = [size * (0.2 * own.sum() + 0.7) for own in lines]
        (figure, panels), ends = new_figure(width, heights), []
        for axes, group, texts, own_lines in zip(panels, groups, labels, lines, strict=True):
            places = np.cumsum(own_lines) - own_lines / 2
            for (_, mean, deviation, printed), at, own in zip(
                group.rows, places, group.looks, strict=True
            ):
                mark = {**look(*own), "linestyle": "", "clip_on": False}
                reach = 0.0 if math.isnan(deviation) else deviation
                bars = {"ecolor": mark["color"], "capsize": 3 * size, "elinewidth": 1.2 * size}
                axes.errorbar(mean, at, xerr=reach or None, **mark, **bars)
                ends += [mean - reach, mean + reach]
                if printed is not None:
                    hollow: Any = {"marker": "D", "color": SOFT, "markerfacecolor": PAPER}
                    hollow |= {"markersize": 5 * size, "linestyle": ""}
                    (legend["published by a paper, not proven"],) = axes.plot(printed, at, **hollow)
                    ends.append(printed)
                axes.annotate(
                    spread(mean, deviation),
                    (1, at),
                    (7, 0),
                    xycoords=axes.get_yaxis_transform(),
                    textcoords="offset points",
                    va="center_baseline",
                )
            axes.set_ylim(own_lines.sum(), 0)
            axes.set_yticks(places, texts)
            axes.tick_params(axis="y", labelcolor=INK)
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
            axes.grid(axis="x")
            axes.set_xlabel(ACCURACY)
            axes.set_title(group.panel * (len(groups) > 1), loc="left")
        axis = accuracy_axis(ends)
        for axes in panels:
            axes.set_xlim(axis.low, axis.high)
        add_legend(figure, legend)
    return figure


# --- files ---


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, PDF or SVG, depending on the suffix of `path`."""
    kind = path.suffix.removeprefix(".")
    metadata: dict[str, dict[str, None]] = {
        "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
        "svg": {"Date": None, "Creator": None},
        "png": {"Software": None},
    }
    # Glyphs in SVG are paths: a paper's authors may not have our font.
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "path"}), replacing(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=300, metadata=metadata[kind])
    return path


def to_svg(figure: Figure, name: str) -> tuple[str, str]:
    """Return the view box and the content of a figure as inline SVG.

    Text remains text, colours of PALETTE become CSS variables, and ids begin with `name`.
    """
    file = io.StringIO()
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    box = root.attrib["viewBox"]
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', file.getvalue()))
    for element in root.iter():
        element.tag = _local_name(element.tag)
        attributes = {_local_name(key): value for key, value in element.attrib.items()}
        identity = attributes.pop("id", None)
        element.attrib = {key: _clean_attribute(value, name) for key, value in attributes.items()}
        if identity in used:
            element.set("id", f"{name}-{identity}")
        element.tail = None
        element.text = element.text if element.tag == "text" else None
    parts = [part for part in root if part.tag != "metadata" and part.find("style") is None]
    return box, "".join(ElementTree.tostring(part, encoding="unicode") for part in parts)


def _local_name(name: str) -> str:
    """Return a name without its XML namespace."""
    return name.rpartition("}")[2]


def _clean_attribute(value: str, name: str) -> str:
    """Return an attribute with the page's ids, font and colours, and with fewer digits."""
    if reference := re.fullmatch(r"(url\()?#(\w+)(\)?)", value):
        return f"{reference[1] or ''}#{name}-{reference[2]}{reference[3]}"
    value = re.sub(r"(\d\.\d\d)\d+", r"\1", value)
    value = re.sub(r"font-family: [^;]*; ", "", value)
    for variable, colour in PALETTE.items():
        value = value.replace(colour, f"var(--{variable})")
    return " ".join(value.split())
