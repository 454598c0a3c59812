"""The figure of all rounds: students' accuracy against teacher answers and against seconds."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fed_dpsd.report.figure import STUDENT_ACCURACY, WIDTH, add_legend, by_data, labelled_looks
from fed_dpsd.report.settings import Row, Setting

COLUMNS = ("round", "seconds", "forward_answers", "backward_answers", "student_accuracy")


def draw(settings: Sequence[Setting], rounds: Mapping[str, Sequence[Row]]) -> Figure | None:
    """Draw two panels for each data set and alpha, a line for each setting; None if no line exists.

    A setting of a single round has no line. A method that asks no teacher has no line against
    teacher answers.

    Args:
        settings: the settings to draw.
        rounds: rows with COLUMNS of each run, by the run's key.
    """
    lines = {
        id(setting): line
        for setting in settings
        if len(line := mean_over_seeds(setting, rounds)) > 1
    }
    known = [setting for setting in settings if id(setting) in lines]
    if not known:
        return None
    looks = labelled_looks(known)
    groups = by_data(known, alphas=True)
    figure = Figure(figsize=(WIDTH, 4 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 2, sharey="row", squeeze=False)
    for (left, right), (title, group) in zip(panels, groups.items(), strict=True):
        for setting in group:
            style, points = looks[id(setting)], lines[id(setting)]
            _line(left, [(answers, *y) for answers, _, *y in points if answers], style)
            _line(right, [(seconds, *y) for _, seconds, *y in points], style)
        left.set_xscale("log")
        left.set(title=title, ylabel=STUDENT_ACCURACY)
        left.set_xlabel("teacher answers so far, forward and backward")
        right.set(title=title, xlabel="seconds of rounds so far")
        for axes in (left, right):
            axes.grid(alpha=0.25)
    add_legend(figure)
    return figure


def mean_over_seeds(
    setting: Setting, rounds: Mapping[str, Sequence[Row]]
) -> list[tuple[float, float, float, float]]:
    """Return each round's mean answers, seconds and accuracy, and the accuracy's deviation.

    The deviation is NaN for a single seed.
    """
    by_round: dict[float, list[Row]] = {}
    for run in setting.runs:
        for row in rounds.get(run["key"], ()):
            if row["student_accuracy"]:
                by_round.setdefault(float(row["round"]), []).append(row)
    points = []
    for _, rows in sorted(by_round.items()):
        answers = [float(r["forward_answers"]) + float(r["backward_answers"]) for r in rows]
        scores = [100 * float(row["student_accuracy"]) for row in rows]
        seconds = [float(row["seconds"]) for row in rows]
        deviation = statistics.stdev(scores) if len(scores) > 1 else math.nan
        points.append((*map(statistics.fmean, (answers, seconds, scores)), deviation))
    return points


def _line(
    axes: Axes, points: Sequence[tuple[float, float, float]], style: Mapping[str, str]
) -> None:
    """Draw a line through (x, mean, deviation) that ends in a dot, in a band of one deviation."""
    if not points:
        return
    x, means, deviations = map(np.array, zip(*points, strict=True))
    axes.plot(x, means, marker="o", markersize=4, markevery=[-1], linewidth=1.3, **style)
    band = {"color": style["color"], "alpha": 0.12, "linewidth": 0}
    axes.fill_between(x, means - deviations, means + deviations, **band)
