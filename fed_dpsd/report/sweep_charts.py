"""The charts that compare the settings of a sweep."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fed_dpsd.report.charts import ACCURACY, ENSEMBLE, Axis, Bars, Chart, Series
from fed_dpsd.report.literature import printed_for, published
from fed_dpsd.report.settings import ALPHA, GRID, Row, Setting, names

PANEL = ("data", "num_classes", ALPHA)  # columns that a title or an axis shows, so names omit them
MOST_SETTINGS = 60  # bars in one chart
LARGEST_EPSILON = 100.0  # a larger epsilon means no more, and is drawn beyond the axis
CLAIM = "record_add_remove"
ROUND_COLUMNS = ("round", "seconds", "forward_answers", "backward_answers", "student_accuracy")
PUBLISHED = "published at the stated epsilon: not proven"


def by_data(settings: Sequence[Setting], alphas: bool = False) -> dict[str, list[Setting]]:
    """Group settings by data set and, with `alphas`, by Dirichlet alpha if there are several."""
    several = alphas and len({setting.values.get(ALPHA) for setting in settings}) > 1
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        alpha = setting.values.get(ALPHA, "")
        title = setting.values["data"] + (f", alpha {alpha}" if several and alpha else "")
        groups.setdefault(title, []).append(setting)
    return groups


def _accuracy_axis(series: Sequence[Series]) -> Axis:
    """Return the axis of accuracies; it starts above zero if all are high."""
    least = min((y for s in series for _, y in s.points), default=0.0)
    low = 10 * math.floor((least - 5) / 10) if least > 50 else 0
    return Axis(f"{ACCURACY} (from {low} %)" if low else ACCURACY, low, 100)


def _scored(name: str, points: Sequence[tuple[float, Setting]], kind: str = "line") -> Series:
    """Return the series of students' known scores by ascending x."""
    scores = sorted((x, *setting.score("student")) for x, setting in points)
    known = [(x, mean, deviation) for x, mean, deviation in scores if not math.isnan(mean)]
    return Series(name, [(x, mean) for x, mean, _ in known], [dev for *_, dev in known], kind)


def comparable(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings of methods with a proven epsilon, if there are several epsilons."""
    finite = [s for s in settings if 0 < s.epsilon(CLAIM) < math.inf]
    if len({s.epsilon(CLAIM) for s in finite}) < 2:
        return []
    methods = {setting.values.get("method") for setting in finite}
    return [s for s in settings if s.values.get("method") in methods and s.epsilon(CLAIM) > 0]


def over_epsilon(settings: Sequence[Setting]) -> list[Chart]:
    """Return accuracy against the proven epsilon, a chart for each data set and alpha.

    There are no charts with fewer than two finite epsilons. Methods without a proven epsilon and
    settings with epsilon 0 are omitted.
    """
    charts = []
    for number, (title, group) in enumerate(by_data(comparable(settings), alphas=True).items()):
        students, series = [], []
        for name, own in _by_mechanism(group).items():
            students.append(_scored(name, [(s.epsilon(CLAIM), s) for s in own]))
            ensembles = [(s.epsilon(CLAIM), s.score("ensemble")[0]) for s in own]
            known = sorted(point for point in ensembles if not math.isnan(point[1]))
            series.append(Series(ENSEMBLE, known, kind="faint", like=name))
        y = _accuracy_axis(students)
        papers = [p for p in published(group[0].values["data"]) if p.accuracy >= (y.low or 0)]
        papers.sort(key=lambda paper: (paper.epsilon, paper.accuracy))
        points = [(paper.epsilon, paper.accuracy) for paper in papers]
        labels = [paper.method for paper in papers]
        series.append(Series(PUBLISHED, points, kind="points", labels=labels))
        if not y.low:
            chance = 100 / int(group[0].values["num_classes"])
            series.append(Series(f"chance: {chance:.0f} %", [(0, chance)], kind="level"))
        ends = "; ".join(
            f"{s.name}: {s.points[0][1]:.1f} to {s.points[-1][1]:.1f} %"
            for s in students
            if s.points
        )
        text = (
            "Means over seeds, with one standard deviation. On the right, epsilon is larger or "
            f"infinite, and nothing meaningful is proven. {ends}"
        )
        x = Axis(
            "proven epsilon of a run (record, add_remove)",
            **{"logarithmic": True, "most": LARGEST_EPSILON, "bound": True},
        )
        heading = f"Accuracy of students against the proven epsilon: {title}"
        every = [*students, *series]
        charts.append(Chart(f"epsilon-{number}", heading, text, x, y, every))
    return charts


def _by_mechanism(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    """Group settings by method, mechanism and number of teachers."""
    several = len({setting.values.get("method", "") for setting in settings}) > 1
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        values = setting.values
        mechanism, teachers = values["mechanism"], int(values["teachers_per_client"])
        mechanism = "without privacy" if mechanism == "probabilities" else mechanism
        method = f"{values.get('method', '')}, " if several else ""
        name = f"{method}{mechanism}, {teachers} teacher{'s' * (teachers > 1)} per client"
        groups.setdefault(name, []).append(setting)
    return groups


def bars(settings: Sequence[Setting]) -> list[Bars]:
    """Return a bar for each setting with a known score, by data set; [] for one or too many."""
    known = [s for s in settings if not math.isnan(s.score("student")[0])]
    if not 1 < len(known) <= MOST_SETTINGS:
        return []
    groups = by_data(known)
    charts = []
    for number, (title, group) in enumerate(groups.items()):
        labels = names(group, PANEL if len(groups) > 1 else ())
        rows = [
            (label, *setting.score("student"), _printed(setting))
            for label, setting in zip(labels, group, strict=True)
        ]
        heading = f"Accuracy of students on the test images: {title}"
        charts.append(Bars(f"settings-{number}", heading, rows))
    return charts


def _printed(setting: Setting) -> float | None:
    values = setting.values
    return printed_for(values.get("experiment", ""), values["data"]).get(values.get(GRID, ""))


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


def over_rounds(
    settings: Sequence[Setting], rounds: Mapping[str, Sequence[Row]], most: int | None = None
) -> list[Chart]:
    """Return accuracy against answers and against seconds, for each data set and alpha.

    Args:
        settings: the settings; a setting with fewer than two known rounds has no line.
        rounds: rows with ROUND_COLUMNS of each run, by the run's key.
        most: the number of settings in a chart, the best first; None for all.
    """
    lines = {id(setting): mean_over_seeds(setting, rounds) for setting in settings}
    known = [setting for setting in settings if len(lines[id(setting)]) > 1]
    labels = dict(zip(map(id, known), names(known, PANEL), strict=True))
    charts = []
    for number, (title, group) in enumerate(by_data(known, alphas=True).items()):
        best, note = _best(title, [(s.score("student")[0], s) for s in group], most, "settings")
        for column, name, x in (
            (0, "answers", Axis("teacher answers so far", logarithmic=True)),
            (1, "seconds", Axis("seconds of rounds so far", 0)),
        ):
            series = []
            for setting in best:
                points = [p for p in lines[id(setting)] if p[column] or not x.logarithmic]
                drawn = [(p[column], p[2]) for p in points]
                series.append(Series(labels[id(setting)], drawn, [p[3] for p in points], "band"))
            if any(each.points for each in series):
                heading = f"Accuracy over {x.title}: {title}"
                charts.append(_against(f"{name}-{number}", heading, x, series, note))
                note = ""
    return charts


def over_alpha(settings: Sequence[Setting], most: int | None = None) -> list[Chart]:
    """Return accuracy against Dirichlet alpha for each data set, if there are several alphas."""
    known = [setting for setting in settings if setting.values.get(ALPHA)]
    if len({float(setting.values[ALPHA]) for setting in known}) < 2:
        return []
    labels = dict(zip(map(id, known), names(known, PANEL), strict=True))
    x = Axis("Dirichlet alpha (small: clients differ more)", logarithmic=True)
    charts = []
    for number, (title, group) in enumerate(by_data(known).items()):
        lines: dict[str, list[tuple[float, Setting]]] = {}
        for setting in group:
            point = (float(setting.values[ALPHA]), setting)
            lines.setdefault(labels[id(setting)], []).append(point)
        every = [_scored(name, points) for name, points in lines.items()]
        scores = [(max((y for _, y in s.points), default=math.nan), s) for s in every]
        series, note = _best(title, scores, most, "lines")
        heading = f"Accuracy against alpha: {title}"
        charts.append(_against(f"alpha-{number}", heading, x, series, note))
    return charts


def _best(
    title: str, scored: Sequence[tuple[float, Any]], most: int | None, noun: str
) -> tuple[list[Any], str]:
    """Return the items with the highest scores, and a note if there are more."""
    if most is None or len(scored) <= most:
        return [item for _, item in scored], ""
    ranked = sorted(scored, key=lambda pair: math.inf if math.isnan(pair[0]) else -pair[0])
    note = f"{title}: the {most} best of {len(scored)} {noun}."
    return [item for _, item in ranked[:most]], note


def _against(name: str, title: str, x: Axis, series: Sequence[Series], note: str) -> Chart:
    text = "; ".join(f"{s.name}: {s.points[-1][1]:.1f} %" for s in series if s.points)
    return Chart(name, title, text, x, _accuracy_axis(series), series, note=note)
