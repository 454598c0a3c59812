"""The figure of how unlike the clients are: students against the Dirichlet alpha."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fed_dpsd.report.figure import PANEL, WIDTH, add_legend, by_data, look
from fed_dpsd.report.settings import ALPHA, Setting, names


def draw(settings: Sequence[Setting]) -> Figure | None:
    """A panel for each data set, a line for settings that differ in alpha alone.

    None where there are not two alphas.
    """
    known = [setting for setting in settings if setting.values.get(ALPHA)]
    if len({float(setting.values[ALPHA]) for setting in known}) < 2:
        return None
    labels = dict(zip(map(id, known), names(known, (*PANEL, ALPHA)), strict=True))
    order = list(dict.fromkeys(labels.values()))
    data = by_data(known)
    figure = Figure(figsize=(WIDTH, 5 * len(data)), layout="constrained")
    panels = figure.subplots(len(data), squeeze=False)[:, 0]
    for axes, (title, group) in zip(panels, data.items(), strict=True):
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for setting in group:
            point = (float(setting.values[ALPHA]), *setting.score("student"))
            lines.setdefault(labels[id(setting)], []).append(point)
        for label, points in lines.items():
            alphas, means, deviations = zip(*sorted(points), strict=True)
            style = {"label": label, "marker": "o", "capsize": 3, **look(order.index(label))}
            axes.errorbar(alphas, means, yerr=deviations, **style)
        axes.set(xscale="log", title=title, ylabel="student's accuracy on the test split, %")
        axes.set_xlabel("Dirichlet alpha (small: unlike clients); bars: deviation over seeds")
        axes.set_xticks(sorted({float(setting.values[ALPHA]) for setting in group}))
        axes.xaxis.set_major_formatter("{x:.10g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.25)
    add_legend(figure)
    return figure
