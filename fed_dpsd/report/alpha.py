"""The figure of the students' accuracy against the Dirichlet alpha."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fed_dpsd.report.figure import STUDENT_ACCURACY, WIDTH, add_legend, by_data, labelled_looks
from fed_dpsd.report.settings import ALPHA, Setting


def draw(settings: Sequence[Setting]) -> Figure | None:
    """Draw a panel for each data set, with a line for settings that differ only in alpha.

    The result is None if there are fewer than two alphas.
    """
    known = [setting for setting in settings if setting.values.get(ALPHA)]
    if len({float(setting.values[ALPHA]) for setting in known}) < 2:
        return None
    looks = labelled_looks(known)
    styles = {own["label"]: own for own in looks.values()}
    groups = by_data(known)
    figure = Figure(figsize=(WIDTH, 5 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), squeeze=False)[:, 0]
    for axes, (title, group) in zip(panels, groups.items(), strict=True):
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for setting in group:
            point = (float(setting.values[ALPHA]), *setting.score("student"))
            label = looks[id(setting)]["label"]
            lines.setdefault(label, []).append(point)
        for label, points in lines.items():
            alphas, means, deviations = zip(*sorted(points), strict=True)
            axes.errorbar(alphas, means, yerr=deviations, marker="o", capsize=3, **styles[label])
        axes.set(xscale="log", title=title, ylabel=STUDENT_ACCURACY)
        axes.set_xlabel(
            "Dirichlet alpha (small: clients differ more); bars: standard deviation over seeds"
        )
        axes.set_xticks(sorted({float(setting.values[ALPHA]) for setting in group}))
        axes.xaxis.set_major_formatter("{x:.10g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.25)
    add_legend(figure)
    return figure
