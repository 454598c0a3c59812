"""The charts that compare the settings of a sweep."""

import math
from collections.abc import Mapping, Sequence

from fed_dpsd.report.charts import Axis, Chart, Dots, Series, accuracy_axis
from fed_dpsd.report.figures import method_number
from fed_dpsd.report.literature import printed_for, published
from fed_dpsd.report.settings import ALPHA, GRID, PANEL, Row, Setting, group_by_data, setting_names

MOST_SETTINGS = 60  # dots in one chart
LARGEST_EPSILON = 100.0  # larger epsilons are as meaningless, and drawn beyond the axis
CLAIM = "record_add_remove"
ROUND_COLUMNS = ("round", "student_accuracy", "bytes_to_clients", "bytes_to_server")
# keys with a chart of accuracy against their values: a short name, and the title of the axis
AXES = {
    ALPHA: ("alpha", "Dirichlet alpha (the smaller, the more clients differ)"),
    "answers.epsilon_per_answer": ("answer", "published epsilon of an answer"),
    "answers.noise_multiplier": ("noise", "noise multiplier of an answer"),
}
PUBLISHED = "published at the stated epsilon: not proven"


def looks(settings: Sequence[Setting], names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the look of each named line (see `figures.look`); a method has a colour and a marker.

    Lines of one method differ in dash and fill, and also in colour if there is only one method.
    """
    methods = dict(zip(names, (s.values.get("method", "") for s in settings), strict=True))
    every = list(dict.fromkeys(methods.values()))
    seen = dict.fromkeys(every, 0)
    found = {}
    for name, method in methods.items():
        own = seen[method]
        seen[method] += 1
        found[name] = (method_number(method, every), own) if len(every) > 1 else (own, 0)
    return found


def _labels_and_looks(
    settings: Sequence[Setting], without: Sequence[str] = PANEL
) -> tuple[dict[int, str], dict[str, tuple[int, int]]]:
    """Return each setting's name, by its id, and the look of each name.

    Names leave out the columns in `without`, which a chart shows elsewhere.
    """
    names = setting_names(settings, without)
    return dict(zip(map(id, settings), names, strict=True)), looks(settings, names)


def _accuracy_axis(series: Sequence[Series]) -> Axis:
    pairs = [(y, d) for s in series for (_, y), d in zip(s.points, s.deviations(), strict=True)]
    return accuracy_axis([end for y, d in pairs for end in (y - d, y + d)])


def _score_series(
    name: str, points: Sequence[tuple[float, Setting]], look: tuple[int, int]
) -> Series:
    """Return the series of students' known scores, in ascending order of x."""
    scores = sorted((x, *setting.score("student")) for x, setting in points)
    known = [(x, mean, deviation) for x, mean, deviation in scores if not math.isnan(mean)]
    deviations = [deviation for *_, deviation in known]
    return Series(name, [(x, mean) for x, mean, _ in known], deviations, look=look)


def comparable(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings with an epsilon above 0, if there are several finite ones."""
    known = [s for s in settings if s.epsilon(CLAIM) > 0]
    return known if len({s.epsilon(CLAIM) for s in known} - {math.inf}) > 1 else []


def over_epsilon(settings: Sequence[Setting], most: int | None = None) -> list[Chart]:
    """Return charts of accuracy against the proven epsilon, one for each data set and alpha.

    With fewer than two finite epsilons, there are no charts. Settings with epsilon 0 are omitted.
    """
    known, charts = comparable(settings), []
    lines = _by_mechanism(known)
    look = looks([own[0] for own in lines.values()], list(lines))
    for number, (title, group) in enumerate(group_by_data(known, alphas=True).items()):
        inside = set(map(id, group))
        here = {name: [s for s in own if id(s) in inside] for name, own in lines.items()}
        here = {name: own for name, own in here.items() if own}
        best = _pick_best_lines(here, most)
        note = _omission_note(title, len(here), len(best), "lines")
        students = [
            _score_series(name, [(s.epsilon(CLAIM), s) for s in own], look[name])
            for name, own in best.items()
        ]
        y, series = _accuracy_axis(students), []
        papers = [p for p in published(group[0].values["data"]) if p.accuracy >= (y.low or 0)]
        papers.sort(key=lambda paper: (paper.epsilon, paper.accuracy))
        points = [(paper.epsilon, paper.accuracy) for paper in papers]
        labels = [paper.method for paper in papers]
        series.append(Series(PUBLISHED, points, kind="points", labels=labels))
        chance = 100 / int(group[0].values["num_classes"])
        if (y.low or 0) <= chance:
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
            logarithmic=True,
            most=LARGEST_EPSILON,
            bound=True,
        )
        heading = f"Accuracy of students against the proven epsilon: {title}"
        every = [*students, *series]
        charts.append(Chart(f"epsilon-{number}", heading, text, x, y, every, note, title))
    return charts


def _by_mechanism(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    """Group settings by grid or method, mechanism and number of teachers; name the differences."""
    named = all(setting.values.get(GRID) for setting in settings)
    groups: dict[tuple[str, str, str], list[Setting]] = {}
    for setting in settings:
        values = setting.values
        mechanism, teachers = values["mechanism"], int(values["teachers_per_client"])
        mechanism = "without privacy" if mechanism == "probabilities" else mechanism
        number = f"{teachers} teacher{'s' * (teachers > 1)} per client"
        line = values[GRID if named else "method"] if named or "method" in values else ""
        groups.setdefault((line, mechanism, number), []).append(setting)

    def name(line: str, mechanism: str, number: str) -> str:
        alike = [key for key in groups if key[0] == line or not named]
        shown = {
            line: named or len({key[0] for key in groups}) > 1,
            mechanism: not named or len({key[1] for key in alike}) > 1,
            number: len({key[2] for key in alike}) > 1,
        }
        return ", ".join(part for part, differs in shown.items() if differs)

    return {name(*key): own for key, own in groups.items()}


def dots(settings: Sequence[Setting]) -> list[Dots]:
    """Return a dot for each setting with a known score, by data set; [] for one or too many."""
    known = [s for s in settings if not math.isnan(s.score("student")[0])]
    if not 1 < len(known) <= MOST_SETTINGS:
        return []
    labels, look = _labels_and_looks(known)
    charts = []
    for number, (title, group) in enumerate(group_by_data(known, alphas=True).items()):
        names = [labels[id(setting)] for setting in group]
        rows = [
            (name, *setting.score("student"), _printed(setting))
            for name, setting in zip(names, group, strict=True)
        ]
        heading = f"Accuracy of students on the test images: {title}"
        own = [look[name] for name in names]
        charts.append(Dots(f"settings-{number}", heading, rows, own, panel=title))
    return charts


def _printed(setting: Setting) -> float | None:
    values = setting.values
    return printed_for(values.get("experiment", ""), values["data"]).get(values.get(GRID, ""))


def mean_over_seeds(
    setting: Setting, rounds: Mapping[str, Sequence[Row]]
) -> list[tuple[float, float, float, float]]:
    """Return each round's mean megabytes so far, number and accuracy, and the latter's deviation.

    Megabytes are NaN where a table lacks them, and the deviation for a single seed.
    """
    import pandas  # takes a second to import

    rows = [row for run in setting.runs for row in rounds.get(run["key"], ())]
    known = [row for row in rows if row["student_accuracy"]]
    frame = pandas.DataFrame(known, columns=list(ROUND_COLUMNS), dtype=float)
    frame["megabytes"] = (frame["bytes_to_clients"] + frame["bytes_to_server"]) / 1e6
    frame["number"], frame["score"] = frame["round"], 100 * frame["student_accuracy"]
    by_round = frame.groupby("round")
    means = by_round[["megabytes", "number", "score"]].mean()
    means["deviation"] = by_round["score"].std()
    return list(means.itertuples(index=False, name=None))


def over_rounds(
    settings: Sequence[Setting], rounds: Mapping[str, Sequence[Row]], most: int | None = None
) -> list[Chart]:
    """Return charts of accuracy against bytes and rounds, for each data set and alpha.

    A method of one round is a point; without longer ones, there is no chart.
    """
    lines = {id(setting): mean_over_seeds(setting, rounds) for setting in settings}
    known = [setting for setting in settings if lines[id(setting)]]
    if all(len(lines[id(setting)]) == 1 for setting in known):
        return []
    labels, look = _labels_and_looks(known)
    charts = []
    for number, (title, group) in enumerate(group_by_data(known, alphas=True).items()):
        best = pick_best(group, most)
        note = _omission_note(title, len(group), len(best), "settings")
        for column, name, x in (
            (0, "bytes", Axis("megabytes so far, to and from all clients", logarithmic=True)),
            (1, "rounds", Axis("round", 0)),
        ):
            series = []
            for setting in best:
                points = [p for p in lines[id(setting)] if p[column] > 0]
                drawn = [(p[column], p[2]) for p in points]
                label, deviations = labels[id(setting)], [p[3] for p in points]
                series.append(Series(label, drawn, deviations, "band", look[label]))
            if any(each.points for each in series):
                heading = f"Accuracy over {x.title}: {title}"
                charts.append(_accuracy_chart(f"{name}-{number}", heading, x, series, note, title))
                note = ""
    return charts


def over_key(settings: Sequence[Setting], key: str, most: int | None = None) -> list[Chart]:
    """Return charts of accuracy against a key of AXES, by data set, if its values differ.

    For other keys than alpha, there is a chart for each alpha. Settings whose value is not a finite
    number above 0, such as an infinite epsilon or no noise, are omitted.
    """
    known = [s for s in settings if 0 < _number(s.values.get(key, "")) < math.inf]
    if len({float(setting.values[key]) for setting in known}) < 2:
        return []
    name, title = AXES[key]
    labels, look = _labels_and_looks(known, (*PANEL, key))
    x = Axis(title, logarithmic=True, side_by_side=True)
    charts = []
    for number, (panel, group) in enumerate(group_by_data(known, alphas=key != ALPHA).items()):
        lines: dict[str, list[Setting]] = {}
        for setting in group:
            lines.setdefault(labels[id(setting)], []).append(setting)
        best = _pick_best_lines(lines, most)
        note = _omission_note(panel, len(lines), len(best), "lines")
        series = [
            _score_series(line, [(float(s.values[key]), s) for s in own], look[line])
            for line, own in best.items()
        ]
        heading = f"Accuracy against the {name}: {panel}"
        charts.append(_accuracy_chart(f"{name}-{number}", heading, x, series, note, panel))
    return charts


def over_keys(settings: Sequence[Setting], most: int | None = None) -> dict[str, list[Chart]]:
    """Return the charts of `over_key` for each key of AXES, by its short name."""
    return {name: over_key(settings, key, most) for key, (name, _) in AXES.items()}


def _number(text: str) -> float:
    """Return a value as a number; NaN for others, such as null."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def pick_best(settings: Sequence[Setting], most: int | None) -> list[Setting]:
    """Return the best settings, starting with each method's best; at most `most`, None for all."""
    ranked = sorted(settings, key=_known_score, reverse=True)
    seen: dict[str, int] = {}
    rank = {}
    for setting in ranked:
        method = setting.values.get("method", "")
        rank[id(setting)] = seen[method] = seen.get(method, -1) + 1
    return sorted(ranked, key=lambda s: rank[id(s)] if most else 0)[:most]


def _pick_best_lines(
    lines: Mapping[str, Sequence[Setting]], most: int | None
) -> dict[str, Sequence[Setting]]:
    """Return the lines with the best settings, chosen from each method's best first, in order."""
    tops = {name: max(own, key=_known_score) for name, own in lines.items()}
    kept = list(map(id, pick_best(list(tops.values()), most)))
    return {name: own for name, own in lines.items() if id(tops[name]) in kept}


def _known_score(setting: Setting) -> float:
    score = setting.score("student")[0]
    return -math.inf if math.isnan(score) else score


def _omission_note(title: str, known: int, shown: int, noun: str) -> str:
    return f"{title}: the best {shown} of {known} {noun}." if shown < known else ""


def _accuracy_chart(
    name: str, title: str, x: Axis, series: Sequence[Series], note: str, panel: str
) -> Chart:
    text = "; ".join(f"{s.name}: {s.points[-1][1]:.1f} %" for s in series if s.points)
    return Chart(name, title, text, x, _accuracy_axis(series), series, note, panel)
