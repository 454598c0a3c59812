"""The main figure: accuracy of students and ensembles against the proven epsilon of a record."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fed_dpsd.report.figure import WIDTH, by_data
from fed_dpsd.report.literature import Published, published
from fed_dpsd.report.settings import Setting

CLAIM = "record_add_remove"
# Okabe and Ito's colours, which colour-blind people can also tell apart.
COLOURS = {
    "label": "#0072b2",
    "gradient": "#d55e00",
    "votes": "#009e73",
    "dp_sgd probabilities": "#cc79a7",
    "probabilities": "#000000",
}
OTHER_COLOUR = "#e69f00"
STYLES = (("-", "o"), ("--", "s"), ("-.", "^"), ((0, (6, 1, 1, 1, 1, 1)), "D"))
NOT_PROVEN = "published, not proven (at the stated epsilon)"


def draw(settings: Sequence[Setting]) -> Figure | None:
    """Draw a panel for each data set and alpha; None if there are fewer than two finite epsilons.

    Methods without any proven epsilon are left out, and so are settings with epsilon 0.
    """
    known = comparable(settings)
    if not known:
        return None
    groups = by_data(known, alphas=True)
    figure = Figure(figsize=(WIDTH, 6 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), squeeze=False)[:, 0]
    for axes, (title, group) in zip(panels, groups.items(), strict=True):
        _panel(axes, title, group)
    return figure


def comparable(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings of methods with a proven epsilon, if there are several epsilons."""
    finite = [s for s in settings if 0 < s.epsilon(CLAIM) < math.inf]
    if len({s.epsilon(CLAIM) for s in finite}) < 2:
        return []
    methods = {setting.values.get("method") for setting in finite}
    return [s for s in settings if s.values.get("method") in methods and s.epsilon(CLAIM) > 0]


def by_kind(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    """Group settings by method, mechanism and number of teachers, under a name for people."""
    methods = {setting.values.get("method", "") for setting in settings}
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        method, mechanism, teachers = _kind(setting)
        groups.setdefault(_named(method, mechanism, teachers, len(methods) > 1), []).append(setting)
    return groups


def _kind(setting: Setting) -> tuple[str, str, int]:
    values = setting.values
    return values.get("method", ""), values["mechanism"], int(values["teachers_per_client"])


def _named(method: str, mechanism: str, teachers: int, several: bool) -> str:
    name = "in the clear" if mechanism == "probabilities" else mechanism
    name = f"{method}, {name}" if several else name
    return f"{name}, {teachers} teacher{'s' * (teachers > 1)} per client"


def _panel(axes: Axes, title: str, settings: Sequence[Setting]) -> None:
    counts = sorted({int(setting.values["teachers_per_client"]) for setting in settings})
    methods = list(dict.fromkeys(setting.values.get("method", "") for setting in settings))
    series: dict[tuple[str, str, int], list[Setting]] = {}
    for setting in settings:
        series.setdefault(_kind(setting), []).append(setting)
    for (method, mechanism, teachers), group in series.items():
        number = counts.index(teachers) + methods.index(method) * len(counts)
        line_style, marker = STYLES[number % len(STYLES)]
        style = {"color": COLOURS.get(mechanism, OTHER_COLOUR), "linestyle": line_style}
        label = _named(method, mechanism, teachers, len(methods) > 1)
        proven = [s for s in group if s.epsilon(CLAIM) < math.inf]
        if proven:
            _line(axes, sorted(proven, key=lambda s: s.epsilon(CLAIM)), style, marker, label)
        for setting in group:
            if setting not in proven:
                mean, _ = setting.score("student")
                axes.axhline(mean, linewidth=1.2, label=f"{label}: nothing proven", **style)
    axes.plot([], [], color="grey", linestyle=":", label="ensemble of the teachers")
    chance = 100 / int(settings[0].values["num_classes"])
    axes.axhline(chance, color="grey", linestyle=(0, (5, 5)), linewidth=0.8, label="chance")
    _published(axes, published(settings[0].values["data"]))
    axes.set(xscale="log", ylim=(0, 102), title=title, ylabel="accuracy on the test split, %")
    axes.set_xlabel(
        "proven epsilon of a run (record, add_remove); bars: standard deviation over seeds"
    )
    finite = [s.epsilon(CLAIM) for s in settings if s.epsilon(CLAIM) < math.inf]
    axes.set_xticks(sorted({float(f"{epsilon:.2g}") for epsilon in finite}))
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    entries = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(entries.values(), entries, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)


def _line(
    axes: Axes, settings: Sequence[Setting], style: dict[str, object], marker: str, label: str
) -> None:
    """Draw a mechanism's students with error bars, and their ensembles as a thin line."""
    x = [setting.epsilon(CLAIM) for setting in settings]
    means, deviations = zip(*(setting.score("student") for setting in settings), strict=True)
    axes.errorbar(x, means, yerr=deviations, marker=marker, capsize=3, label=label, **style)
    ensembles = [setting.score("ensemble")[0] for setting in settings]
    axes.plot(x, ensembles, linewidth=1, **{**style, "linestyle": ":"})


def _published(axes: Axes, points: Sequence[Published]) -> None:
    """Draw published points hollow and grey, with names that do not overlap."""
    if not points:
        return
    x, y = [point.epsilon for point in points], [point.accuracy for point in points]
    axes.scatter(x, y, s=28, facecolors="none", edgecolors="grey", label=NOT_PROVEN)
    above: dict[float, float] = {}  # the height of the last name written at this epsilon
    for point in sorted(points, key=lambda point: -point.accuracy):
        height = min(point.accuracy, above.get(point.epsilon, math.inf) - 3.4)
        above[point.epsilon] = height
        axes.annotate(
            point.method,
            (point.epsilon, point.accuracy),
            (1.3 * point.epsilon, height),
            fontsize=7,
            color="dimgrey",
            va="center",
            zorder=1,  # below what was measured
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
            arrowprops={"arrowstyle": "-", "color": "lightgrey", "linewidth": 0.6},
        )
