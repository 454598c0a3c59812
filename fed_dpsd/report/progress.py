"""The figure of all rounds: students against what teachers answered, and against seconds."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fed_dpsd.report.figure import PANEL, WIDTH, add_legend, by_data, look
from fed_dpsd.report.settings import ALPHA, Row, Setting, names

COLUMNS = ("round", "seconds", "forward_answers", "backward_answers", "student_accuracy")


def draw(settings: Sequence[Setting], rounds: Mapping[str, Sequence[Row]]) -> Figure | None:
    """Two panels for each data set and alpha, a line for each setting; None without any line.

    A setting of a single round has none, and no method that asks no teacher has one against their
    answers.

    Args:
        settings: what to draw.
        rounds: rows with COLUMNS of each run, by its key.
    """
    lines = {
        id(setting): line
        for setting in settings
        if len(line := mean_over_seeds(setting, rounds)) > 1
    }
    known = [setting for setting in settings if id(setting) in lines]
    if not known:
        return None
    labels = dict(zip(map(id, known), names(known, (*PANEL, ALPHA)), strict=True))
    order = list(dict.fromkeys(labels.values()))
    groups = by_data(known, alphas=True)
    figure = Figure(figsize=(WIDTH, 4 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 2, sharey="row", squeeze=False)
    for (left, right), (title, group) in zip(panels, groups.items(), strict=True):
        for setting in group:
            label = labels[id(setting)]
            style = {"label": label, **look(order.index(label))}
            points = lines[id(setting)]
            _line(left, [(answers, *y) for answers, _, *y in points if answers], style)
            _line(right, [(seconds, *y) for _, seconds, *y in points], style)
        left.set_xscale("log")
        left.set(title=title, ylabel="student's accuracy on the test split, %")
        left.set_xlabel("teacher answers so far, forward and backward")
        right.set(title=title, xlabel="seconds of rounds so far")
        for axes in (left, right):
            axes.grid(alpha=0.25)
    add_legend(figure)
    return figure


def mean_over_seeds(
    setting: Setting, rounds: Mapping[str, Sequence[Row]]
) -> list[tuple[float, float, float, float]]:
    """Of each round: mean answers, seconds and accuracy, and its deviation (NaN of one seed)."""
    found: dict[float, list[Row]] = {}
    for run in setting.runs:
        for row in rounds.get(run["key"], ()):
            if row["student_accuracy"]:
                found.setdefault(float(row["round"]), []).append(row)
    points = []
    for _, rows in sorted(found.items()):
        answers = [float(r["forward_answers"]) + float(r["backward_answers"]) for r in rows]
        scores = [100 * float(row["student_accuracy"]) for row in rows]
        seconds = [float(row["seconds"]) for row in rows]
        deviation = statistics.stdev(scores) if len(scores) > 1 else math.nan
        points.append((*map(statistics.fmean, (answers, seconds, scores)), deviation))
    return points


def _line(
    axes: Axes, points: Sequence[tuple[float, float, float]], style: Mapping[str, str]
) -> None:
    """A line that ends in a dot, in a band of one deviation, through (x, mean, deviation)."""
    if not points:
        return
    x, means, deviations = map(np.array, zip(*points, strict=True))
    axes.plot(x, means, marker="o", markersize=4, markevery=[-1], linewidth=1.3, **style)
    band = {"color": style["color"], "alpha": 0.12, "linewidth": 0}
    axes.fill_between(x, means - deviations, means + deviations, **band)
