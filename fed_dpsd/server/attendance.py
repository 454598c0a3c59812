"""Hospitals' attendance in a run, from the outcomes of its requests in asks.jsonl."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Attendance:
    """A hospital's attendance in a run.

    Args:
        requests: digests of the requests to the hospital, connected or not.
        answered: digests of the requests that it answered.
        connected: whether it was ever connected when a request was sent.
    """

    requests: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    connected: bool = False

    def __str__(self) -> str:
        if not self.connected:
            return "never connected"
        return f"answered {len(self.answered):,} of {len(self.requests):,} requests"


def requests_of(run_folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's asks.jsonl, which only Flower servers write."""
    path = run_folder / "asks.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def incomplete_attendance(requests: Iterable[Mapping[str, Any]]) -> dict[int, Attendance]:
    """Return the attendance of each hospital that did not answer all of its requests.

    >>> line = {"ask": "aa", "answered": [0], "refused": {"1": "x", "2": "x"}, "unconnected": [1]}
    >>> {client: str(own) for client, own in incomplete_attendance([line]).items()}
    {1: 'never connected', 2: 'answered 0 of 1 requests'}
    """
    found: dict[int, Attendance] = {}
    for line in requests:
        for client in line["answered"]:
            known = found.setdefault(client, Attendance())
            known.connected = True
            known.requests.add(line["ask"])
            known.answered.add(line["ask"])
        for name in line["refused"]:
            known = found.setdefault(int(name), Attendance())
            known.connected |= int(name) not in line.get("unconnected", ())
            known.requests.add(line["ask"])
    return {c: known for c, known in sorted(found.items()) if known.requests != known.answered}
