"""The charts of a sweep's page: accuracy against epsilon, setting by setting, over the rounds."""

import math
from collections.abc import Iterator, Mapping, Sequence

from fed_dpsd.report import confusion, curve, progress
from fed_dpsd.report.chart import Axis, Series, chart
from fed_dpsd.report.figure import PANEL, by_data
from fed_dpsd.report.literature import printed_for, published
from fed_dpsd.report.markup import Html, element, paragraphs, table
from fed_dpsd.report.settings import ALPHA, GRID, Row, Setting, names

MOST_ROWS = 60  # settings in a chart of rows
MOST_LINES = 8  # settings in a chart of lines
LARGEST_EPSILON = 100.0  # larger ones say as little as this one
EPSILON = Axis(
    "proven epsilon of a run (record, add_remove)",
    logarithmic=True,
    most=LARGEST_EPSILON,
    bound=True,
)


def main(settings: Sequence[Setting]) -> Iterator[Html]:
    """Yield the chart that compares the settings: over epsilon, or else a row for each."""
    if curves := list(_over_epsilon(settings)):
        yield element("div", curves, class_="charts")
    else:
        yield from _in_rows(settings)


def _accuracy(series: Sequence[Series]) -> Axis:
    """Return the axis of accuracies, which begins above zero where all of them are high."""
    least = min((y for each in series for _, y in each.points), default=0.0)
    low = 10 * math.floor((least - 5) / 10) if least > 50 else 0
    title = "accuracy on the test images, %"
    return Axis(f"{title} (from {low} %)" if low else title, low, 100)


def _over_epsilon(settings: Sequence[Setting]) -> Iterator[Html]:
    """Yield a chart for each data set and alpha, if settings have several finite epsilons."""
    known = curve.comparable(settings)
    for number, (title, group) in enumerate(by_data(known, alphas=True).items()):
        series = [
            Series(
                name,
                [(s.epsilon(curve.CLAIM), s.score("student")[0]) for s in own],
                [s.score("student")[1] for s in own],
            )
            for name, own in curve.by_kind(group).items()
        ]
        series = [_sorted(each) for each in series]
        axis = _accuracy(series)
        papers = published(group[0].values["data"])
        if papers:
            own = [(point.epsilon, point.accuracy) for point in papers]
            points = sorted(point for point in own if point[1] >= (axis.low or 0))
            name = "published by papers at the epsilon they state: not proven"
            series.append(Series(name, points, joined=False, plain=True))
        chance = 100 / int(group[0].values["num_classes"])
        if not axis.low:
            series.append(Series(f"chance: {chance:.0f} %", [(0, chance)], level=True))
        yield chart(
            f"epsilon-{number}",
            f"Accuracy of students against the proven epsilon: {title}",
            "Means over seeds, with one standard deviation. At the right: epsilon is larger, or "
            "infinite, so that nothing meaningful is proven. "
            + "; ".join(
                f"{each.name}: {each.points[0][1]:.1f} to {each.points[-1][1]:.1f} %"
                for each in series
                if not (each.level or each.plain)
            ),
            EPSILON,
            axis,
            series,
        )


def _sorted(series: Series) -> Series:
    """Return the series by ascending x, without points that have no accuracy."""
    pairs = zip(series.points, series.reach, strict=True)
    kept = sorted((point, reach) for point, reach in pairs if not math.isnan(point[1]))
    return Series(series.name, [point for point, _ in kept], [reach for _, reach in kept])


def _in_rows(settings: Sequence[Setting]) -> Iterator[Html]:
    """Yield a bar for each setting, and a paper's number beside it where one is printed."""
    known = [s for s in settings if not math.isnan(s.score("student")[0])]
    if not 1 < len(known) <= MOST_ROWS:
        return
    several = len(by_data(known)) > 1
    for title, group in by_data(known).items():
        rows = []
        for setting, name in zip(group, names(group, PANEL if several else ()), strict=True):
            mean, deviation = setting.score("student")
            printed = _printed(setting)
            text = f"{mean:.1f}" + ("" if math.isnan(deviation) else f" ± {deviation:.1f}") + " %"
            bar = element("span", "", class_="fill", style=f"width:{mean:.1f}%")
            mark = "" if printed is None else element("span", "", style=f"left:{printed:.1f}%")
            rows.append(
                element(
                    "li",
                    element("span", name, class_="name"),
                    element("span", bar, mark, class_="track", aria_hidden="true"),
                    element("span", text, class_="value"),
                    element("span", f"a paper prints {printed:g} %", class_="printed")
                    if printed is not None
                    else "",
                )
            )
        caption = element("figcaption", f"Accuracy of students on the test images: {title}")
        yield element("figure", caption, element("ul", rows, class_="rows"))


def _printed(setting: Setting) -> float | None:
    values = setting.values
    return printed_for(values.get("experiment", ""), values["data"]).get(values.get(GRID, ""))


def over_rounds(settings: Sequence[Setting], rounds: Mapping[str, Sequence[Row]]) -> Iterator[Html]:
    """Yield charts of accuracy against teacher answers and seconds, of the best settings."""
    lines = {id(s): progress.mean_over_seeds(s, rounds) for s in settings}
    known = [setting for setting in settings if len(lines[id(setting)]) > 1]
    for number, (title, group) in enumerate(by_data(known, alphas=True).items()):
        best = sorted(group, key=lambda s: -s.score("student")[0])[:MOST_LINES]
        if len(best) < len(group):
            yield paragraphs(f"{title}: the {MOST_LINES} best of {len(group)} settings.")
        labels = dict(zip(map(id, group), names(group, PANEL), strict=True))
        drawn = []
        for column, name, axis in (
            (0, "answers", Axis("teacher answers so far", logarithmic=True)),
            (1, "seconds", Axis("seconds of rounds so far", 0)),
        ):
            series = [
                Series(
                    labels[id(s)],
                    [(p[column], p[2]) for p in lines[id(s)] if p[column] or column],
                )
                for s in best
            ]
            if any(each.points for each in series):
                heading = f"Accuracy over {axis.title}: {title}"
                said = "; ".join(f"{s.name}: {s.points[-1][1]:.1f} %" for s in series if s.points)
                drawn.append(
                    chart(f"{name}-{number}", heading, said, axis, _accuracy(series), series)
                )
        yield element("div", drawn, class_="charts")


def over_alpha(settings: Sequence[Setting]) -> Iterator[Html]:
    """Yield a chart of accuracy against the Dirichlet alpha, if there are several."""
    known = [setting for setting in settings if setting.values.get(ALPHA)]
    if len({float(setting.values[ALPHA]) for setting in known}) < 2:
        return
    labels = dict(zip(map(id, known), names(known, PANEL), strict=True))
    for number, (title, group) in enumerate(by_data(known).items()):
        lines: dict[str, list[Setting]] = {}
        for setting in group:
            lines.setdefault(labels[id(setting)], []).append(setting)
        best = sorted(lines.items(), key=lambda pair: -max(s.score("student")[0] for s in pair[1]))
        if len(best) > MOST_LINES:
            yield paragraphs(f"{title}: the {MOST_LINES} best of {len(best)} lines.")
        series = [
            _sorted(
                Series(
                    name,
                    [(float(s.values[ALPHA]), s.score("student")[0]) for s in own],
                    [s.score("student")[1] for s in own],
                )
            )
            for name, own in best[:MOST_LINES]
        ]
        axis = Axis("Dirichlet alpha (small: clients differ more)", logarithmic=True)
        heading = f"Accuracy against alpha: {title}"
        said = "; ".join(f"{s.name}: {s.points[-1][1]:.1f} %" for s in series if s.points)
        yield chart(f"alpha-{number}", heading, said, axis, _accuracy(series), series)


def by_class(settings: Sequence[Setting], pairs: Mapping[str, Sequence[Row]]) -> Iterator[Html]:
    """Yield a table of each class's accuracy for each data set; all seeds together."""
    known = [s for s in settings if any(run["key"] in pairs for run in s.runs)]
    for title, group in by_data(known).items():
        rows = []
        for setting, name in zip(group, names(group), strict=True):
            counts = confusion.summed(setting, pairs)
            totals = counts.sum(1)
            cells = [
                f"{100 * counts[k, k] / totals[k]:.0f}" if totals[k] else "-"
                for k in range(len(counts))
            ]
            rows.append([name, *cells])
        header = ["setting", *map(str, range(int(group[0].values["num_classes"])))]
        yield table(
            f"Accuracy of each class, %, all seeds together: {title}", header, rows, wide=True
        )
