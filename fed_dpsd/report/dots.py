"""The figure of an experiment's grids: a row for each setting, beside what a paper prints."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from fed_dpsd.report.figure import COLOURS, PANEL, STUDENT_ACCURACY, WIDTH, add_legend, by_data
from fed_dpsd.report.literature import printed_for
from fed_dpsd.report.settings import GRID, Setting, names

MOST = 40  # rows that can be read


def draw(settings: Sequence[Setting]) -> Figure | None:
    """Draw a panel for each data set; None without named grids, or for too many settings.

    A published accuracy is in the rows of its grid.
    """
    known = [s for s in settings if GRID in s.values and not math.isnan(s.score("student")[0])]
    if not 1 < len(known) <= MOST:
        return None
    labels = dict(zip(map(id, known), names(known, PANEL), strict=True))
    groups = by_data(known)
    figure = Figure(figsize=(WIDTH, 1.5 * len(groups) + 0.28 * len(known)), layout="constrained")
    heights = [len(group) + 2 for group in groups.values()]
    panels = figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, group) in zip(panels, groups.items(), strict=True):
        means, deviations = zip(*(setting.score("student") for setting in group), strict=True)
        rows = range(len(group))
        bars = {"fmt": "o", "capsize": 3, "color": COLOURS[0]}
        axes.errorbar(means, rows, xerr=deviations, label="ours, with one deviation", **bars)
        papers = {
            row: printed
            for row, setting in enumerate(group)
            if (printed := _published(setting)) is not None
        }
        if papers:
            style = {"marker": "D", "linestyle": "", "markerfacecolor": "none", "color": "grey"}
            axes.plot([*papers.values()], [*papers], label="published, not proven", **style)
        axes.set_yticks(rows, [labels[id(setting)] for setting in group], fontsize=8)
        axes.set(xlim=(0, 102), title=title, xlabel=STUDENT_ACCURACY)
        axes.invert_yaxis()
        axes.grid(alpha=0.25)
    add_legend(figure)
    return figure


def _published(setting: Setting) -> float | None:
    """Return the accuracy that a paper prints for the setting's grid; None if none does."""
    values = setting.values
    return printed_for(values.get("experiment", ""), values["data"]).get(values[GRID])
