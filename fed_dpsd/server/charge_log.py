"""The coordinator's log of a run's costs to its clients, charges.json.

A client charges a run no more than the plan or this file allows, whichever is larger. So the larger
of the two bounds the charges of the run in any client's ledger, even after crashes.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fed_dpsd.claims import OTHER, TIMES_PLANNED
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.protocol import Refusal, Releases, Response, Statement, check_releases
from fed_dpsd.storage import to_json_bytes, write_atomically

logger = logging.getLogger("fed_dpsd")


@dataclass
class Known:
    """What the coordinator knows about one client, from its statements.

    Args:
        charged: releases by mechanism; the numbers never decrease.
        forgotten: releases that the client's ledger has lost because its state was rolled back.
        changed: number of times that the client's records changed during the run.
    """

    charged: Counter[str] = field(default_factory=Counter)
    forgotten: Counter[str] = field(default_factory=Counter)
    changed: int = 0

    def __post_init__(self) -> None:
        self.charged, self.forgotten = Counter(self.charged), Counter(self.forgotten)
        check_releases("charged", self.charged)
        check_releases("forgotten", self.forgotten)
        check_releases("changed", {"": self.changed})


class ChargeLog:
    """The charges of a run, in a file that only grows.

    Args:
        run_folder: the folder of charges.json.
        planned: releases by mechanism that the plan charges every client for.
    """

    def __init__(self, run_folder: Path, planned: Releases) -> None:
        self._path, self.planned = run_folder / "charges.json", planned
        self.acknowledged, self.clients = Counter[str](), dict[int, Known]()
        try:
            if self._path.exists():
                content = json.loads(self._path.read_text())
                check_releases("acknowledged", content["acknowledged"])
                self.acknowledged = Counter(content["acknowledged"])
                clients = content["clients"].items()
                self.clients = {int(client): Known(**known) for client, known in clients}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ProtocolError) as error:
            raise UserError(
                f"{self._path} cannot be read ({error}); restore it: without it, the cost of this "
                "run is unknown"
            ) from None

    @property
    def heard(self) -> dict[int, Releases]:
        """Return the releases that the run has charged to each client, as the client states."""
        return {client: dict(known.charged) for client, known in self.clients.items()}

    @property
    def charged(self) -> Counter[str]:
        """Return the maximum releases that any client was or may be charged for, by mechanism."""
        total = Counter(self.acknowledged)
        for known in self.clients.values():
            total |= known.charged
        return total

    def notes(self) -> tuple[str, ...]:
        """Return the facts that readers of the card must know in addition to the numbers."""
        lost = sorted(client for client, known in self.clients.items() if +known.forgotten)
        changed = sorted(client for client, known in self.clients.items() if known.changed)
        notes = (
            (lost, "clients {} lost charges: an older state was restored there"),
            (changed, "clients {} changed records during the run"),
        )
        return tuple(note.format(", ".join(map(str, group))) for group, note in notes if group)

    def take(self, answers: Mapping[int, Response | Refusal]) -> set[int]:
        """Record the clients' statements, and return the clients that need the request again.

        The acknowledged charges are durable on return.
        """
        before, again = self._content(), set()
        for client, response in answers.items():
            if response.statement is not None:
                self._hear(client, response.statement)
                wanted = response.statement.wanted
                if wanted and self._acknowledge(client, wanted):
                    again.add(client)
        if self._content() != before:
            write_atomically(self._path, self._content())
        return again

    def _hear(self, client: int, statement: Statement) -> None:
        known = self.clients.setdefault(client, Known())
        if (forgotten := self._by_planned(statement.forgotten)) - known.forgotten:
            known.forgotten |= forgotten
            logger.warning(
                "client %d: its ledger lacks charges of this run, so an older state was restored "
                "there; the privacy card keeps them",
                client,
            )
        known.charged |= self._by_planned(statement.charged)
        if statement.changed > known.changed:
            known.changed = statement.changed
            logger.warning("client %d: its records changed during the run", client)

    def _by_planned(self, releases: Releases) -> Counter[str]:
        """Count the releases of each of the run's mechanisms, and of all other mechanisms together.

        Counts are capped at one above the largest number that the accounting covers.
        """
        counts = Counter[str]()
        for name, count in releases.items():
            counts[name if name in self.planned else OTHER] += min(count, self._most(name) + 1)
        return counts

    def _acknowledge(self, client: int, wanted: Releases) -> bool:
        """Add charges beyond the plan to the card; return False if they cannot be accounted for."""
        if any(count > self._most(name) for name, count in wanted.items()):
            return False
        logger.warning("client %d: more was charged than planned; see the privacy card", client)
        self.acknowledged |= Counter(wanted)
        return True

    def _most(self, name: str) -> int:
        """Return how many releases of a mechanism the accounting covers at most; 0 if unplanned."""
        return TIMES_PLANNED * self.planned.get(name, 0)

    def _content(self) -> bytes:
        clients = {client: vars(known) for client, known in sorted(self.clients.items())}
        return to_json_bytes({"acknowledged": self.acknowledged, "clients": clients})


def by_ranges(charges: Mapping[int, Releases]) -> dict[str, dict[str, int]]:
    """Group clients with equal charges; return the charges by ranges of client numbers.

    >>> by_ranges({0: {"label": 64}, 1: {"label": 64}, 2: {"label": 64}, 4: {"label": 32}})
    {'0-2': {'label': 64}, '4': {'label': 32}}
    """
    groups: dict[frozenset[tuple[str, int]], list[int]] = {}
    for client, releases in sorted(charges.items()):
        groups.setdefault(frozenset(releases.items()), []).append(client)
    return {",".join(_runs(clients)): dict(charges[clients[0]]) for clients in groups.values()}


def _runs(numbers: list[int]) -> Iterator[str]:
    """Yield ascending numbers as ranges."""
    first = last = numbers[0]
    for number in [*numbers[1:], -1]:
        if number != last + 1:
            yield str(first) if first == last else f"{first}-{last}"
            first = number
        last = number


def clients_in(ranges: str) -> list[int]:
    """Return the client numbers in a key of `by_ranges`.

    >>> clients_in("0-2,4")
    [0, 1, 2, 4]
    """
    ends = [part.partition("-") for part in ranges.split(",")]
    return [n for first, _, last in ends for n in range(int(first), int(last or first) + 1)]
