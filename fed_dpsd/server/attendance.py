"""Hospitals' participation in a run, from the outcomes of its requests in asks.jsonl."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Attendance:
    """The requests of a run to one hospital, each counted once even if it was sent repeatedly."""

    sent: set[str] = field(default_factory=set)  # the requests for the hospital, connected or not
    answered: set[str] = field(default_factory=set)  # the requests that the hospital answered
    connected: bool = False  # whether the hospital was ever connected when a request was sent

    def __str__(self) -> str:
        if not self.connected:
            return "never connected"
        return f"answered {len(self.answered):,} of {len(self.sent):,} requests"


def requests_of(run_folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's asks.jsonl, which only Flower servers write."""
    path = run_folder / "asks.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def absent(requests: Iterable[Mapping[str, Any]]) -> dict[int, Attendance]:
    """Return the attendance of each hospital that did not answer all of its requests.

    >>> line = {"ask": "aa", "answered": [0], "refused": {"1": "x", "2": "x"}, "unconnected": [1]}
    >>> {client: str(missed) for client, missed in absent([line]).items()}
    {1: 'never connected', 2: 'answered 0 of 1 requests'}
    """
    found: dict[int, Attendance] = {}
    for line in requests:
        for client in line["answered"]:
            known = found.setdefault(client, Attendance())
            known.connected = True
            known.sent.add(line["ask"])
            known.answered.add(line["ask"])
        for name in line["refused"]:
            known = found.setdefault(int(name), Attendance())
            known.connected |= int(name) not in line.get("unconnected", ())
            known.sent.add(line["ask"])
    return {c: known for c, known in sorted(found.items()) if known.sent != known.answered}
