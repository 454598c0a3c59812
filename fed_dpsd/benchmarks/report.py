"""Tables of a benchmark from the JSON of `fed-dpsd bench`.

All numbers are medians over repetitions, with the minimum and maximum in brackets. A ratio compares
two medians of one file, never of two files, since the load on their machines may differ.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Bench = Mapping[str, Any]
Lines = list[list[str]]
PAIRS = (
    *(("flower", "local"), ("local", "fedavg"), ("flower", "fedavg")),
    *(("local", "pfl"), ("local", "fluke"), ("local", "appfl")),
)
RATIOS = {
    "seconds.total": "seconds",
    "seconds.rounds": "seconds of rounds",
    "processor.seconds": "processor seconds",
    "peak_memory": "peak memory",
}
# Title of a line, path of its number, factor.
MEASURES = {
    "seconds in all": ("seconds.total", 1.0),
    "until the server begins, s": ("seconds.start", 1.0),
    "teachers and diagnostics, s": ("seconds.teachers", 1.0),
    "rounds, s": ("seconds.rounds", 1.0),
    "the rest, s": ("seconds.rest", 1.0),
    "queries per second of rounds": ("queries.per_second", 1.0),
    "student's accuracy, %": ("accuracy.student", 100.0),
    "peak memory, MB": ("peak_memory", 1e-6),
    "processor seconds": ("processor.seconds", 1.0),
    "use of all cores, %": ("processor.share", 100.0),
    "bytes to a client per query": ("queries.bytes_to_client", 1.0),
    "bytes from a client per query": ("queries.bytes_to_server", 1.0),
    "teachers' forward answers": ("queries.forward_answers", 1.0),
    "teachers' backward answers": ("queries.backward_answers", 1.0),
}
NOTHING = "-"


# --- numbers ---


def summarise(repetitions: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median, minimum and maximum of each number that all repetitions have, by path."""
    flat = [dict(_numbers(each)) for each in repetitions]
    found = {}
    for path in flat[0]:
        values = [each[path] for each in flat if path in each]
        if len(values) == len(flat):
            found[path] = {
                "median": statistics.median(values),
                "least": min(values),
                "most": max(values),
            }
    return found


def _numbers(tree: Mapping[str, Any], prefix: str = "") -> Any:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", value


def ratios(bench: Bench) -> dict[str, dict[str, Any]]:
    """Return the cost of a row relative to another, for each of PAIRS that the bench has.

    For one run on two engines, `same_student` says whether all students have the same bits.
    """
    rows = {(row["row"], row["clients"]): row for row in bench["rows"]}
    found = {}
    for first, second in PAIRS:
        for (kind, clients), row in rows.items():
            other = rows.get((second, clients))
            if kind != first or not other:
                continue
            pair: dict[str, Any] = {path: ratio(row, other, path) for path in RATIOS}
            if (first, second) == PAIRS[0]:
                hashes = {r["student_sha256"] for x in (row, other) for r in x["repetitions"]}
                pair["same_student"] = len(hashes) == 1
            found[f"{row['name']}/{other['name']}"] = pair
    return found


def ratio(row: Mapping[str, Any], other: Mapping[str, Any], path: str) -> float:
    """Return the ratio of two rows' medians of a number."""
    return float(row["statistics"][path]["median"] / other["statistics"][path]["median"])


def format_number(value: float | None, scale: float = 1) -> str:
    """Return a number with three significant digits, and all digits before the point."""
    if value is None:
        return NOTHING
    scaled = value * scale
    digits = 2 - math.floor(math.log10(abs(scaled))) if scaled else 0
    return f"{scaled:,.{max(0, digits)}f}"


def _spread(row: Mapping[str, Any], path: str, scale: float = 1) -> str:
    known = row["statistics"].get(path)
    if known is None:
        return NOTHING
    median, least, most = (
        format_number(known[name], scale) for name in ("median", "least", "most")
    )
    return median if least == most else f"{median} ({least} to {most})"


# --- tables ---


def measures(bench: Bench) -> Lines:
    """Return a column for each row of the bench, without measures that no row has."""
    lines = [["", *(row["name"] for row in bench["rows"])]]
    for title, (path, scale) in MEASURES.items():
        if any(path in row["statistics"] for row in bench["rows"]):
            lines.append([title, *(_spread(row, path, scale) for row in bench["rows"])])
    return lines


def ratio_table(bench: Bench) -> Lines:
    """Return the table of ratios."""
    same = {True: "yes", False: "no", None: NOTHING}
    return [
        ["", *RATIOS.values(), "same student"],
        *(
            [
                pair,
                *(format_number(found[path]) for path in RATIOS),
                same[found.get("same_student")],
            ]
            for pair, found in bench["ratios"].items()
        ),
    ]


def clients(bench: Bench) -> Lines:
    """Return costs by number of clients, with slopes from the first row of the same kind."""
    first: dict[str, Mapping[str, Any]] = {}
    lines = [
        [
            *("row", "clients", "s", "peak MB", "processor s", "processor ms per client"),
            *("KB per further client", "processor ms per further client"),
        ]
    ]
    for row in bench["rows"]:
        start, count = first.setdefault(row["row"], row), row["clients"]
        seconds = row["statistics"]["processor.seconds"]["median"] / count
        more_memory = cost_per_client(start, row, "peak_memory")
        more_seconds = cost_per_client(start, row, "processor.seconds")
        lines.append(
            [
                *(row["row"], f"{count:,}", _spread(row, "seconds.total")),
                *(_spread(row, "peak_memory", 1e-6), _spread(row, "processor.seconds")),
                *(format_number(seconds, 1e3), format_number(more_memory, 1e-3)),
                format_number(more_seconds, 1e3),
            ]
        )
    return lines


def peers(bench: Bench) -> Lines:
    """Return costs of the rows that train on the same images, also in other simulators."""
    header = ["row", "clients", "processor s", "s", "peak MB", "images per s", "accuracy, %"]
    measures = (("processor.seconds", 1.0), ("seconds.total", 1.0), ("peak_memory", 1e-6))
    measures += (("images.per_second", 1.0), ("accuracy.student", 100.0))
    return [
        header,
        *(
            [row["row"], f"{row['clients']:,}", *(_spread(row, *measure) for measure in measures)]
            for row in bench["rows"]
            if "images.trained" in row["statistics"]
        ),
    ]


def cost_per_client(first: Mapping[str, Any], row: Mapping[str, Any], path: str) -> float | None:
    """Return the cost of each additional client since the first row; None if there are none."""
    more = row["clients"] - first["clients"]
    if not more:
        return None
    before, now = (each["statistics"][path]["median"] for each in (first, row))
    return float((now - before) / more)


TABLES: dict[str, Callable[[Bench], Lines]] = {
    "measures": measures,
    "ratios": ratio_table,
    "clients": clients,
    "peers": peers,
}


def filled_tables(bench: Bench) -> dict[str, Lines]:
    """Return the tables that have content for this bench, by name."""
    counts = {row["clients"] for row in bench["rows"]}
    tables = {name: table(bench) for name, table in TABLES.items()}
    if len(counts) == 1:
        del tables["clients"]
    return {name: lines for name, lines in tables.items() if len(lines) > 1}


def origin(bench: Bench) -> str:
    """Return the origin of the numbers: commit, machine, load, command and repetitions."""
    machine = bench["machine"]
    repeated = len(bench["rows"][0]["repetitions"])
    load = ", ".join(f"{value:.2f}" for value in machine["load_average"])
    spread = "medians, with minimum and maximum in brackets, of" if repeated > 1 else "from"
    return (
        f"`{bench['command']}`: {spread} {repeated} run{'s' * (repeated > 1)} of each row, in "
        f"turn, each in a separate process. Commit {bench['versions']['commit']}, "
        f"{machine['processor']}, {bench['versions']['machine']}, load average at the start {load}."
    )
