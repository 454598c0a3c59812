"""What a student gets right, class by class, and how far its probabilities can be believed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fed_dpsd.report.chart import Axis, Series, chart
from fed_dpsd.report.facts import Facts
from fed_dpsd.report.markup import Html, element, folded, paragraphs, table
from fed_dpsd.report.numbers import percent, with_interval

MOST_CLASSES = 20  # of a matrix that can be read
PAIRS = 10  # most frequent confusions that are listed
MOST_LETTERS = 40  # of all class names, as columns of a matrix on paper
MOST_SHADE = 0.55  # beyond it, numbers would be hard to read

Counts = Sequence[Sequence[int]]


def classes(facts: Facts) -> Iterator[Html]:
    """Yield the section: a table of the classes, their confusions, and the calibration."""
    counts = facts.summary["confusion"]
    if not counts:
        return
    each = _by_class(facts.classes, counts)
    if len(counts) <= MOST_CLASSES:
        yield each
        yield folded("Confusion matrix", _matrix(facts.classes, counts))
    else:
        yield folded(f"Each of {len(counts)} classes", each)
    if pairs := _pairs(facts.classes, counts):
        title = f"The {len(pairs)} most frequent confusions"
        header = ["true class", "taken for", "images"]
        yield folded(title, table(f"{title} on the test images", header, pairs))
    if parts := facts.summary["calibration"]:
        yield from _calibration(parts)


def right_and_all(facts: Facts) -> tuple[int, int] | None:
    """Return how many test images the student is right on, and how many there are."""
    counts = facts.summary["confusion"]
    accuracy = facts.summary["accuracy"]["student"]
    if not counts or accuracy is None:
        return None
    right = sum(counts[k][k] for k in range(len(counts)))
    # Images with no finite probability are in no cell.
    return right, round(right / accuracy) if accuracy else sum(map(sum, counts))


def _by_class(names: Sequence[str], counts: Counts) -> Html:
    rows = []
    for k, name in enumerate(names):
        images, named = sum(counts[k]), sum(row[k] for row in counts)
        wrong = max((c for c in range(len(names)) if c != k), key=lambda c: counts[k][c], default=k)
        mistaken = counts[k][wrong] if wrong != k else 0
        rows.append(
            [
                *(name, f"{images:,}", with_interval(counts[k][k], images)),
                with_interval(counts[k][k], named),
                f"{names[wrong]} ({mistaken:,})" if mistaken else "-",
            ]
        )
    return table(
        "Each class on the test images, with 95 % intervals (Wilson). Sensitivity: of the images "
        "of the class, how many are given it. Precision: of the images that are given the class, "
        "how many are of it.",
        ["class", "images", "sensitivity", "precision", "most often taken for (images)"],
        rows,
    )


def _matrix(names: Sequence[str], counts: Counts) -> Html:
    """Return the matrix as a table, in which darker cells are larger parts of their row.

    Columns have numbers where names would make it too wide for a page.
    """
    rows, short = [], sum(map(len, names)) <= MOST_LETTERS
    heads = list(names) if short else [str(k) for k in range(len(names))]
    sides = list(names) if short else [f"{k}: {name}" for k, name in enumerate(names)]
    for k, name in enumerate(names):
        total = sum(counts[k]) or 1
        cells = [
            element(
                "td",
                f"{count:,}" if count else "",
                style=f"--a:{MOST_SHADE * count / total:.2f}" if count else None,
                class_="diagonal" if k == c else None,
                title=f"{name} taken for {names[c]}: {count:,}",
            )
            for c, count in enumerate(counts[k])
        ]
        rows.append(element("tr", element("th", sides[k], scope="row"), cells))
    said = (
        "Test images by true class (rows) and named class (columns); the darker, the larger the "
        "part of the row. The diagonal, in frames, is right."
    )
    titles = [element("th", name, scope="col") for name in ("true class", *heads)]
    whole = element(
        "table",
        element("caption", said),
        element("thead", element("tr", titles)),
        element("tbody", rows),
        class_="wide",
    )
    label = "Confusion matrix"
    return element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=label)


def _pairs(names: Sequence[str], counts: Counts) -> list[list[str]]:
    wrong = [
        (counts[k][c], names[k], names[c])
        for k in range(len(names))
        for c in range(len(names))
        if k != c and counts[k][c]
    ]
    wrong.sort(key=lambda pair: -pair[0])
    return [[truth, taken, f"{count:,}"] for count, truth, taken in wrong[:PAIRS]]


def _calibration(parts: Mapping[str, Any]) -> Iterator[Html]:
    yield element("h3", "Calibration: can its probabilities be believed?")
    shown = [
        (100 * sure, 100 * right, count)
        for sure, right, count in zip(
            parts["confidence"], parts["accuracy"], parts["count"], strict=True
        )
        if count
    ]
    sure = sum(each[0] * each[2] for each in shown)
    right = sum(each[1] * each[2] for each in shown)
    tends = "more sure than it is right" if sure > right else "less sure than it is right"
    yield paragraphs(
        f"Expected calibration error: {percent(parts['error'])} (0 is perfect; ten equal parts). "
        f"On the whole the student is {tends}. Points below the grey line: surer than right."
    )
    rows = [[f"{x:.1f} %", f"{y:.1f} %", f"{n:,}"] for x, y, n in shown]
    drawn = chart(
        "calibration",
        "Reliability of the student's probabilities",
        "How often the student is right, by how sure it is: "
        + "; ".join(f"{x:.0f} % sure, {y:.0f} % right, {n:,} images" for x, y, n in shown),
        Axis("how sure: largest probability, %", 0, 100),
        Axis("how often right, %", 0, 100),
        [
            Series("student", [(x, y) for x, y, _ in shown]),
            Series("perfect", [(0, 0), (100, 100)], plain=True),
        ],
        numbers=table(
            "Test images by how sure the student is", ["how sure", "right", "images"], rows
        ),
    )
    yield element("div", drawn, class_="charts")
