"""The content of charts in pages and papers: axes, series and tables of numbers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fed_dpsd.privacy.epsilon import rounded_up
from fed_dpsd.report import scores
from fed_dpsd.report.facts import Facts
from fed_dpsd.report.guarantee import review
from fed_dpsd.report.numbers import compact, percent, spread
from fed_dpsd.report.scores import OperatingPoint, Predictions

MOST_BY_CHANCE = 15  # percent; charts of higher accuracies need not show chance
MOST_CLIENTS = 6  # lines of clients in one chart
ACCURACY = "accuracy on the test images, %"
FLAT = "Flat: everything that this number covers was charged once, by the end of the first round."

Point = tuple[float, float]
Numbers = tuple[list[str], list[list[str]]]  # header and rows


@dataclass(frozen=True)
class Axis:
    """An axis."""

    title: str  # the meaning of its values, with the unit
    low: float | None = None  # the lowest displayed value; None for the minimum of the points
    high: float | None = None  # the highest displayed value; None for the maximum of the points
    logarithmic: bool = False  # whether the scale is logarithmic
    # the maximum; larger values are drawn together beyond the end of the axis
    most: float = math.inf
    whole: bool = False  # whether ticks are only at whole numbers
    bound: bool = False  # whether values are upper bounds, which are never rounded down
    # whether lines with equal values are drawn side by side, if x is one of a few choices
    side_by_side: bool = False

    def text(self, value: float, decimals: int | None = None) -> str:
        """Return a value as text; bounds are rounded up."""
        if self.bound:
            return rounded_up(value)
        if decimals is not None:
            return f"{value:,.{decimals}f}"
        return compact(round(value, 3) if abs(value) >= 1 else float(f"{value:.3g}"))

    def beyond(self, value: float) -> bool:
        """Return whether a value is drawn beyond the end of the axis."""
        return value > self.most or math.isinf(value)


@dataclass(frozen=True)
class Series:
    """Points that are drawn as one line or one set of markers, in ascending order of x."""

    name: str  # its name in the legend
    points: Sequence[Point]  # (x, y) pairs
    # one standard deviation for each point, NaN where unknown; () if none is known
    reach: Sequence[float] = ()
    # "line"; "band", a line with shaded deviations; "curve", a line without markers; "mark",
    # markers without a line; "level", a horizontal grey line; "guide", a grey line; "points", grey
    # circles
    kind: str = "line"
    # number and variant, as in `figures.look`; None for the series' number in the figure
    look: tuple[int, int] | None = None
    labels: Sequence[str] = ()  # a name for each point, shown only in wide figures; () for none

    @property
    def coloured(self) -> bool:
        """Return whether the series has its own colour, dash and marker."""
        return self.kind in ("line", "band", "curve", "mark")

    def deviations(self) -> list[float]:
        """Return the deviation of each point; 0 where it is unknown."""
        return [0.0 if math.isnan(r) else r for r in self.reach] or [0.0] * len(self.points)


@dataclass(frozen=True)
class Chart:
    """A chart over two axes."""

    name: str  # its identifier in a page
    title: str  # what it shows
    text: str  # a description for readers who cannot see the chart
    x: Axis
    y: Axis
    series: Sequence[Series]
    note: str = ""  # a sentence on what is omitted; "" for none
    panel: str = ""  # the chart's title among other charts in a figure, such as the data set

    @property
    def caption(self) -> str:
        """Return the caption of the numbers."""
        return f"{self.title}: {self.y.title} by {self.x.title}"

    def numbers(self) -> Numbers:
        """Return a header, and a row for each x, with a column for each series."""
        shown = [s for s in self.series if s.points and s.kind not in ("curve", "guide")]
        places = sorted({x for s in shown if s.kind != "level" for x, _ in s.points})
        rows = {place: [self.x.text(place)] for place in places}
        for series in shown:
            cells: dict[float, list[str]] = {}
            for (x, y), deviation in zip(series.points, series.deviations(), strict=True):
                cell = self.y.text(y, 1) + (f" ± {deviation:,.1f}" if deviation else "")
                for place in places if series.kind == "level" else [x]:
                    cells.setdefault(place, []).append(cell)
            for place in places:
                rows[place].append(", ".join(cells.get(place, ())))
        return [self.x.title, *(s.name for s in shown)], list(rows.values())


@dataclass(frozen=True)
class Dots:
    """A dot for each setting, with its deviation and the number printed in a paper."""

    name: str  # its identifier in a page
    title: str  # what it shows
    # (name, mean, deviation or NaN, printed accuracy or None), in percent
    rows: Sequence[tuple[str, float, float, float | None]]
    looks: Sequence[tuple[int, int]]  # the look of each row, as in `figures.look`
    note: str = ""  # a sentence on what is omitted; "" for none
    panel: str = ""  # the chart's title among other charts in a figure

    @property
    def caption(self) -> str:
        """Return the caption of the numbers."""
        return self.title

    @property
    def text(self) -> str:
        """Return a description for readers who cannot see the dots."""
        return "; ".join(f"{name}: {spread(mean, dev)} %" for name, mean, dev, _ in self.rows)

    def numbers(self) -> Numbers:
        """Return a header, and a row for each dot."""
        rows = [
            [name, spread(mean, deviation), "-" if printed is None else f"{printed:g}"]
            for name, mean, deviation, printed in self.rows
        ]
        return ["setting", "student, %", "printed in a paper, %"], rows


def accuracy_axis(values: Sequence[float]) -> Axis:
    """Return an axis of accuracies in percent that shows differences between `values`.

    It starts at zero if some values are close to chance.
    """
    low, high = min(values, default=0.0), max(values, default=100.0)
    room = 0.08 * max(high - low, 2.0)
    low = low - room if low > MOST_BY_CHANCE else 0.0
    return Axis(ACCURACY, low, min(high + room, 100.0))


# --- one run ---

ROUND = Axis("round", whole=True)


def over_rounds(facts: Facts) -> list[Chart]:
    """Return the charts of a run by round, without charts that would be empty."""
    charts = (_accuracy(facts), _agreement(facts), _spent(facts))
    return [chart for chart in charts if chart]


def _points(facts: Facts, key: str) -> list[Point]:
    return [(line["round"], 100 * line[key]) for line in facts.rounds if line.get(key) is not None]


def _accuracy(facts: Facts) -> Chart | None:
    points = _points(facts, "student_accuracy")
    if not points:
        return None
    series = [Series("student", points)]
    ensemble = facts.summary["accuracy"]["ensemble"]
    if ensemble is not None:
        name = f"ensemble of all teachers: {percent(ensemble)}"
        series.append(Series(name, [(0, 100 * ensemble)], kind="level"))
    common = facts.most_common
    (first, start), (last, end) = points[0], points[-1]
    text = (
        f"The student's accuracy is {start:.1f} % after round {first:.0f} and {end:.1f} % after "
        f"round {last:.0f}"
        + (f"; always answering {common[0]} gives {percent(common[1])}." if common else ".")
    )
    return Chart("accuracy", "Accuracy of the student", text, ROUND, Axis(ACCURACY, 0, 100), series)


def _agreement(facts: Facts) -> Chart | None:
    points = _points(facts, "agreement")
    if not points:
        return None
    text = (
        f"Before learning from them, the student agreed with {points[0][1]:.1f} % of the answers "
        f"of the first round and {points[-1][1]:.1f} % of the last."
    )
    axis = Axis("images with the same class, %", 0, 100)
    series = [Series("student before learning, and answers", points)]
    return Chart("agreement", "Agreement with the answers", text, ROUND, axis, series)


def _spent(facts: Facts) -> Chart | None:
    numbers = [line["round"] for line in facts.rounds]
    row = facts.row(facts.unit, "add_remove")
    planned, unit = float(row["epsilon"]), f"({facts.unit}, add_remove{review(row)})"
    series = []
    for name, points in _by_client(facts.spent, numbers).items():
        if finite := [point for point in points if math.isfinite(point[1])]:
            series.append(Series(name, finite))
    if not series:
        return None
    last = max(s.points[-1][1] for s in series)
    if math.isfinite(planned):
        name = f"the whole plan: {rounded_up(planned)}"
        series.append(Series(name, [(0, planned)], kind="level"))
    text = (
        f"The {facts.clients} with the highest cost has spent epsilon {rounded_up(last)} {unit} "
        f"after round {numbers[-1]}; the plan is {rounded_up(planned)}."
    )
    axis = Axis(f"epsilon {unit}", 0, bound=True)
    title = f"Epsilon spent by each {facts.clients}"
    flat = all(
        len({y for _, y in s.points}) == 1 and s.points[0][0] == numbers[0]
        for s in series
        if s.coloured
    )
    note = FLAT if flat and len(numbers) > 1 else ""
    return Chart("spent", title, text, ROUND, axis, series, note=note)


def _by_client(
    spent: Sequence[Mapping[int, float]], numbers: Sequence[int]
) -> dict[str, list[Point]]:
    """Return a line for each set of clients with equal costs.

    If there are too many sets, return the maximum, the median and the minimum over clients.
    """
    known = list(zip(numbers, spent, strict=False))
    clients = sorted({client for own in spent for client in own})
    paths: dict[tuple[Point, ...], list[int]] = {}
    for client in clients:
        path = tuple((number, own[client]) for number, own in known if client in own)
        paths.setdefault(path, []).append(client)
    if len(paths) == 1 and len(clients) > 1:
        return {f"all {len(clients)} alike": list(*paths)}
    if len(paths) <= MOST_CLIENTS:
        return {_name_clients(group): list(path) for path, group in paths.items()}
    lines: dict[str, list[Point]] = {"most": [], "median": [], "least": []}
    for number, own in known:
        values = [own.get(client, 0.0) for client in clients]
        for name, pick in (("most", max), ("median", statistics.median), ("least", min)):
            lines[name].append((number, float(pick(values))))
    return lines


def _name_clients(clients: Sequence[int]) -> str:
    listed = ", ".join(map(str, clients[:6])) + (" ..." if len(clients) > 6 else "")
    return f"{'client' if len(clients) == 1 else 'clients'} {listed}"


def response_times(facts: Facts) -> list[Chart]:
    """Return a chart of the seconds from a request to its last response; [] for a single point."""
    last = {r["query_id"]: r["seconds"] for r in facts.requests if r["kind"] == "answers"}
    if len(last) < 2:
        return []
    number, longest = max(last.items(), key=lambda item: item[1])
    text = f"The longest wait was {longest:.1f} s, in round {number}."
    series = [Series("seconds until all responded or timed out", sorted(last.items()))]
    title = "Time from a request to the last response"
    return [Chart("times", title, text, ROUND, Axis("seconds", 0), series)]


def _bins(parts: Mapping[str, Any]) -> list[tuple[float, float, int]]:
    columns = zip(parts["confidence"], parts["accuracy"], parts["count"], strict=True)
    return [(100 * sure, 100 * right, count) for sure, right, count in columns if count]


def overconfidence(parts: Mapping[str, Any]) -> float:
    """Return the sum of confidence minus accuracy over all images, in percent."""
    return sum((sure - right) * count for sure, right, count in _bins(parts))


def roc(
    predictions: Predictions | None, points: Sequence[OperatingPoint], positive: str
) -> list[Chart]:
    """Return a student's ROC curve for two classes, with its thresholds; [] if there are none."""
    if predictions is None or not points:
        return []
    curve = [(100 * x, 100 * y) for x, y in scores.roc(predictions)]
    series, said = [Series("student, all test images", curve, kind="curve")], []
    for point in points:
        (seen, ill), (spared, well) = point.positives, point.negatives
        wrong, right = 100 * (1 - spared / well), 100 * seen / ill
        name = f"threshold {point.threshold:.4g}"
        series.append(Series(f"{name}, tested on {point.images}", [(wrong, right)], kind="mark"))
        said.append(f"{name}: {wrong:.1f} % false alarms, sensitivity {right:.1f} %")
    series.append(Series("no better than chance", [(0, 0), (100, 100)], kind="guide"))
    x, y = Axis("false alarms: 100 % minus specificity, %", 0, 100), Axis("sensitivity, %", 0, 100)
    return [Chart("roc", f"ROC curve for {positive}", "; ".join(said), x, y, series)]


def calibration(parts: Mapping[str, Any]) -> list[Chart]:
    """Return the reliability diagram of the student's probabilities."""
    bins = _bins(parts)
    each = "; ".join(f"{x:.0f} % sure, {y:.0f} % right, {n:,} images" for x, y, n in bins)
    return [
        Chart(
            "calibration",
            "Reliability of the student's probabilities",
            f"How often the student is right, by its confidence: {each}",
            Axis("confidence: largest probability, %", 0, 100),
            Axis("accuracy, %", 0, 100),
            [
                Series("student", [(sure, right) for sure, right, _ in bins]),
                Series("perfect", [(0, 0), (100, 100)], kind="guide"),
            ],
        )
    ]
