"""The hospitals of a run, from hospitals.json, and their attendance, from asks.jsonl.

Flower servers write these files. `fed-dpsd site revoke` writes the nodes that it unregisters.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fed_dpsd.storage import append_line, write_json

FILE, REVOKED = "hospitals.json", "revoked"


@dataclass(frozen=True)
class Member:
    """A hospital as it introduced itself to the coordinator.

    Args:
        client: its number.
        name: its public name; "" if its file has none.
        node: the ID of its Flower node.
    """

    client: int
    name: str
    node: int


def hospital_text(members: Mapping[int, Member], *clients: int) -> str:
    """Return how texts call some hospitals: by number, in order, and by name if it is known.

    >>> members = {1: Member(1, "St Mary's", node=7)}
    >>> hospital_text(members, 0), hospital_text(members, 1, 0)
    ('hospital 0', "hospitals 0, 1 (St Mary's)")
    """
    names = {client: member.name for client, member in members.items() if member.name}
    each = [f"{n} ({names[n]})" if n in names else str(n) for n in sorted(clients)]
    return f"hospital{'s' * (len(each) != 1)} {', '.join(each)}"


def members_of(run_folder: Path) -> dict[int, Member]:
    """Return the hospitals that have connected to a run, by their numbers."""
    path = run_folder / FILE
    read = json.loads(path.read_text())["hospitals"] if path.exists() else []
    return {line["client"]: Member(**line) for line in read}


def revoked_nodes(run_folder: Path) -> set[int]:
    """Return the nodes that `fed-dpsd site revoke` has unregistered, by their IDs."""
    path = run_folder / REVOKED
    return set(map(int, path.read_text().split())) if path.exists() else set()


def store_revoked(run_folder: Path, node: int) -> None:
    """Note that a node was unregistered, so that a run does not wait for it."""
    append_line(run_folder / REVOKED, str(node))


def store_members(run_folder: Path, members: Iterable[Member]) -> None:
    """Write the hospitals that have connected to a run."""
    listed = sorted(members, key=lambda member: member.client)
    write_json(run_folder / FILE, {"hospitals": [asdict(member) for member in listed]})


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
    """Return the lines of a run's asks.jsonl."""
    path = run_folder / "asks.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def last_answers(run_folder: Path) -> dict[int, str]:
    """Return the time of each hospital's last answer, as in 2026-01-31 12:00:00."""
    return {
        client: str(line["at"]).replace("T", " ").removesuffix("Z")
        for line in requests_of(run_folder)
        for client in line["answered"]
    }


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


def absences(run_folder: Path) -> list[str]:
    """Describe the attendance of each hospital that did not answer all of a run's requests."""
    members, missed = members_of(run_folder), incomplete_attendance(requests_of(run_folder))
    return [f"{hospital_text(members, client)} {known}" for client, known in missed.items()]
