"""The hospitals of a deployment: what each has answered, stated as spent, and what went wrong."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fed_dpsd.report.chart import Axis, Series, chart
from fed_dpsd.report.facts import Facts
from fed_dpsd.report.guarantee import review
from fed_dpsd.report.markup import Html, element, paragraphs, table
from fed_dpsd.report.numbers import counted, rounded_up

KINDS = {
    "answers": "images",
    "counts": "class counts",
    "weights": "weights",
    "baseline": "weights",
    "train": "a training",
}


def hospitals(facts: Facts) -> Iterator[Html]:
    """Yield the section: totals of each hospital, the faults that were seen, and the times."""
    if facts.simulated:
        return
    yield paragraphs(
        "As the coordinator saw it: the outcome of every request (asks.jsonl), and what each "
        "hospital "
        "has stated that the run has cost it (charges.json). Hospitals keep their ledgers."
    )
    yield _totals(facts)
    yield element("h3", "Faults seen")
    yield from _faults(facts.requests)
    yield from _times(facts.requests)


def _totals(facts: Facts) -> Html:
    """Return the table with a row for each hospital."""
    known = facts.charges.get("clients", {})
    numbers = range(facts.summary["num_clients"])
    rows = []
    for number in numbers:
        statement = known.get(str(number), {})
        asked = [request for request in facts.requests if _was_asked(request, number)]
        answered = sum(number in request["answered"] for request in asked)
        stated = ", ".join(f"{name} {n:,}" for name, n in statement.get("charged", {}).items())
        spent = facts.costs.get(number)
        rows.append(
            [
                f"hospital {number}",
                f"{answered:,} of {len(asked):,}",
                stated or "nothing stated",
                "unknown" if spent is None else rounded_up(spent),
                facts.ledgers.get(number) or "kept there",
                _remarks(statement),
            ]
        )
    row = facts.row("record", "add_remove")
    return table(
        f"Each hospital. Epsilon spent: (record, add_remove), trust {row['trust']}, delta "
        f"{row['delta']:g}{review(row)}, proven of the releases that the hospital stated.",
        [
            *("hospital", "asks answered", "releases stated, by mechanism"),
            "epsilon spent (record, add_remove)",
            "its ledger, over its life (record, add_remove)",
            "remarks",
        ],
        rows,
    )


def _was_asked(request: Mapping[str, Any], number: int) -> bool:
    return number in request["answered"] or str(number) in request["refused"]


def _remarks(statement: Mapping[str, Any]) -> str:
    remarks = []
    if lost := sum(statement.get("forgotten", {}).values()):
        remarks.append(f"its ledger lost {counted(lost, 'release')}: an older state was restored")
    if changed := statement.get("changed"):
        remarks.append(f"its records changed {counted(changed, 'time')}")
    return "; ".join(remarks) or "-"


def _faults(requests: Sequence[Mapping[str, Any]]) -> Iterator[Html]:
    """Yield each kind of fault once for a hospital, with how often and when it was seen."""
    seen: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for request in requests:
        for number, reason in request["refused"].items():
            seen.setdefault((number, reason), []).append(request)
    repeated = len(requests) - len({(request["kind"], request["query_id"]) for request in requests})
    if repeated:
        yield paragraphs(
            f"The run was resumed, or a request was sent again, {counted(repeated, 'time')}: "
            "the same "
            "ask gets the same answer and is charged once."
        )
    if not seen:
        yield paragraphs(
            f"None: all {counted(len(requests), 'request')} were answered by all." * bool(requests)
        )
        return
    rows = [
        [
            *(f"hospital {number}", reason, f"{len(when):,}"),
            *(_when(when[0]), _when(when[-1]) if len(when) > 1 else "-"),
        ]
        for (number, reason), when in sorted(seen.items(), key=lambda item: int(item[0][0]))
    ]
    yield table(
        "Asks that a hospital did not answer; the round went on without it. Times are UTC.",
        ["hospital", "what happened", "times", "first", "last"],
        rows,
    )


def _when(request: Mapping[str, Any]) -> str:
    asked = KINDS.get(request["kind"], request["kind"])
    where = f"round {request['query_id']}" if request["kind"] in ("answers", "train") else asked
    return f"{where}, {request['at'].replace('T', ' ').removesuffix('Z')}"


def _times(requests: Sequence[Mapping[str, Any]]) -> Iterator[Html]:
    """Yield the chart of the seconds from a request to its last answer."""
    last = {
        request["query_id"]: request["seconds"]
        for request in requests
        if request["kind"] == "answers"
    }
    if len(last) < 2:
        return
    points = sorted((float(number), seconds) for number, seconds in last.items())
    longest = max(points, key=lambda point: point[1])
    drawn = chart(
        "asked",
        "Time from a request to the last answer",
        f"The longest wait was {longest[1]:.1f} s, in round {longest[0]:.0f}.",
        Axis("round", whole=True),
        Axis("seconds", 0),
        [Series("seconds until all had answered, or were given up", points)],
    )
    yield element("div", drawn, class_="charts")
