"""The curves of a run's page: accuracy, agreement and epsilon spent, and the images asked."""

import base64
import io
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from PIL import Image

from fed_dpsd.report.chart import Axis, Series, chart
from fed_dpsd.report.facts import Facts
from fed_dpsd.report.guarantee import review
from fed_dpsd.report.markup import Html, element, html, paragraphs
from fed_dpsd.report.numbers import percent, rounded_up

ROUND = Axis("round", whole=True)
MOST_LINES = 6  # of clients that differ
PICTURES = 6
ACROSS, DOWN = 8, 3  # images that a picture shows of the run's own
LARGEST_IMAGE = 48  # pixels; larger ones are scaled down


def curves(facts: Facts) -> Iterator[Html]:
    """Yield the charts over rounds, each with its numbers."""
    drawn = [part for part in (_accuracy(facts), _agreement(facts), _spent(facts)) if part]
    if drawn:
        yield element("div", drawn, class_="charts")


def _accuracy(facts: Facts) -> Html | None:
    """Draw the student's accuracy over rounds, with that of the ensemble and of chance."""
    points = _points(facts, "student_accuracy")
    if not points:
        return None
    series = [Series("student", points)]
    ensemble = facts.summary["accuracy"]["ensemble"]
    if ensemble is not None:
        name = f"ensemble of all teachers: {percent(ensemble)}"
        series.append(Series(name, [(0, 100 * ensemble)], level=True))
    chance = 100 / len(facts.classes)
    said = (
        f"The student's accuracy goes from {points[0][1]:.1f} % after round "
        f"{points[0][0]:.0f} to {points[-1][1]:.1f} % after round {points[-1][0]:.0f}; chance is "
        f"{chance:.1f} %."
    )
    axis = Axis("accuracy on the test images, %", 0, 100)
    return chart("accuracy", "Accuracy of the student", said, ROUND, axis, series)


def _agreement(facts: Facts) -> Html | None:
    """Draw how often the student had named the class that the answers then did."""
    points = _points(facts, "agreement")
    if not points:
        return None
    said = (
        f"Before it learned from a round's answers, the student named their class for "
        f"{points[0][1]:.1f} % of the images in the first round and {points[-1][1]:.1f} % in the "
        "last."
    )
    axis = Axis("images with the same class, %", 0, 100)
    series = [Series("student before learning, and answers", points)]
    return chart("agreement", "Agreement with the answers", said, ROUND, axis, series)


def _points(facts: Facts, key: str) -> list[tuple[float, float]]:
    return [(line["round"], 100 * line[key]) for line in facts.rounds if line.get(key) is not None]


def _spent(facts: Facts) -> Html | None:
    """Draw the epsilon that each client has spent; clients that spent the same are one line."""
    numbers = [line["round"] for line in facts.rounds]
    lines = _by_line(facts.spent, numbers)
    row = facts.row("record", "add_remove")
    planned = float(row["epsilon"])
    drawn = {
        name: [point for point in points if math.isfinite(point[1])]
        for name, points in lines.items()
    }
    if not any(drawn.values()):
        return None
    series = [Series(name, points) for name, points in drawn.items()]
    if math.isfinite(planned):
        name = f"the whole plan: {rounded_up(planned)}"
        series.append(Series(name, [(0, planned)], level=True))
    last = max(points[-1][1] for points in drawn.values() if points)
    said = (
        f"The {facts.clients} that spent most has spent epsilon {rounded_up(last)} (record, "
        f"add_remove{review(row)}) after round {numbers[-1]}; the plan is {rounded_up(planned)}."
    )
    axis = Axis(f"epsilon (record, add_remove{review(row)})", 0, bound=True)
    title = f"Epsilon spent by each {facts.clients}"
    return chart("spent", title, said, ROUND, axis, series)


def _by_line(
    spent: Sequence[Mapping[int, float]], numbers: Sequence[int]
) -> dict[str, list[tuple[float, float]]]:
    """Return a line for each group of clients, or for the most, the median and the least."""
    known = list(zip(numbers, spent, strict=False))
    clients = sorted({client for own in spent for client in own})
    if not clients:
        return {}
    paths: dict[tuple[tuple[float, float], ...], list[int]] = {}
    for client in clients:
        path = tuple((number, own[client]) for number, own in known if client in own)
        paths.setdefault(path, []).append(client)
    if len(paths) == 1 and len(clients) > 1:
        return {f"all {len(clients)} alike": list(*paths)}
    if len(paths) <= MOST_LINES:
        return {_named(group): list(path) for path, group in paths.items()}
    lines: dict[str, list[tuple[float, float]]] = {"most": [], "median": [], "least": []}
    for number, own in known:
        values = [own.get(client, 0.0) for client in clients]
        for name, pick in (("most", max), ("median", statistics.median), ("least", min)):
            lines[name].append((number, float(pick(values))))
    return lines


def _named(clients: Sequence[int]) -> str:
    listed = ", ".join(map(str, clients[:6])) + (" ..." if len(clients) > 6 else "")
    return f"{'client' if len(clients) == 1 else 'clients'} {listed}"


# --- synthetic images ---


def pictures(facts: Facts) -> Iterator[Html]:
    """Yield pictures of the images that were asked, from the first round to the last."""
    rounds = sorted(facts.samples)
    if not rounds:
        return
    some = {rounds[round(i * (len(rounds) - 1) / (PICTURES - 1))] for i in range(PICTURES)}
    yield paragraphs(
        "The server made these images, with no other knowledge of the records than what the "
        f"{facts.clients}s had released. "
        + (
            "So the proven epsilons cover them, too. "
            if facts.meaningful
            else "Nothing meaningful is proven of that, so they may show what records look like. "
        )
        + "Each picture shows the first of a round."
    )
    shown = []
    for number in sorted(some):
        source = (
            f"data:image/png;base64,{base64.b64encode(first_of(facts.samples[number])).decode()}"
        )
        line = next((line for line in facts.rounds if line["round"] == number), {})
        agreed = line.get("agreement")
        caption = f"round {number}" + (f", agreement {percent(agreed, 0)}" if agreed else "")
        image = element("img", src=source, alt=f"Synthetic images of round {number}")
        shown.append(element("figure", image, element("figcaption", caption)))
    yield element("div", shown, class_="pictures")


def first_of(path: Path) -> bytes:
    """Return a PNG of the first rows of a run's picture of images, small enough for a page."""
    with Image.open(path) as whole:
        tile = (whole.width - 2) / ACROSS  # each image has a margin of two pixels
        rows = min(DOWN, max(1, round((whole.height - 2) / tile)))
        part = whole.convert("RGB").crop((0, 0, whole.width, round(rows * tile) + 2))
    if tile > LARGEST_IMAGE + 2:
        scale = LARGEST_IMAGE / tile
        part = part.resize((round(part.width * scale), round(part.height * scale)))
    content = io.BytesIO()
    if part.getextrema()[0] == part.getextrema()[1] == part.getextrema()[2]:
        part = part.convert("L")
    part.save(content, "PNG", optimize=True)
    return content.getvalue()


def whole_run(facts: Facts) -> Html:
    """Return the section on the rounds."""
    return html(
        [
            paragraphs(
                "Agreement: on how many of a round's synthetic images the student, before it "
                "learned from them, named the class that the answers then named. It needs no test "
                "images, so hospitals can read it where accuracy is unknown."
                if any(line.get("agreement") is not None for line in facts.rounds)
                else ""
            ),
            *curves(facts),
        ]
    )
