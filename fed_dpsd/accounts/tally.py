"""What the clients of a run were charged, as far as its coordinator knows: charges.json.

A client charges a run no more than the plan, or than what this file holds. So the larger of the two
is at least what any client's ledger holds, whatever crashes.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fed_dpsd.config import UserError
from fed_dpsd.protocol import Answer, ProtocolError, Refusal, Releases, Statement, check_releases
from fed_dpsd.storage import write_atomically

OTHER = "other"  # mechanisms that are none of the run's
TIMES_PLANNED = 100  # more releases than so many plans are not accounted for: the card says `inf`
logger = logging.getLogger("fed_dpsd")


@dataclass
class Known:
    """What is known of one client.

    Args:
        charged: releases by mechanism, never fewer than before.
        forgotten: those that its ledger has lost, because its state was rolled back.
        changed: how many times its records changed during the run.
    """

    charged: Counter[str] = field(default_factory=Counter)
    forgotten: Counter[str] = field(default_factory=Counter)
    changed: int = 0

    def __post_init__(self) -> None:
        self.charged, self.forgotten = Counter(self.charged), Counter(self.forgotten)
        check_releases("charged", self.charged)
        check_releases("forgotten", self.forgotten)
        check_releases("changed", {"": self.changed})


class Tally:
    """The charges of a run, in a file that only grows.

    Args:
        run_folder: the folder of charges.json.
        planned: releases by mechanism that every client is charged for.

    Raises:
        UserError: the file cannot be read.
    """

    def __init__(self, run_folder: Path, planned: Releases) -> None:
        self._path, self._planned = run_folder / "charges.json", planned
        self.acknowledged, self.clients = Counter[str](), dict[int, Known]()
        try:
            if self._path.exists():
                found = json.loads(self._path.read_text())
                check_releases("acknowledged", found["acknowledged"])
                self.acknowledged = Counter(found["acknowledged"])
                clients = found["clients"].items()
                self.clients = {int(client): Known(**known) for client, known in clients}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ProtocolError) as error:
            raise UserError(
                f"{self._path} cannot be read ({error}); restore it: without it nobody knows what "
                "this run has cost"
            ) from None

    @property
    def heard(self) -> dict[int, Releases]:
        """What each client has said that the run has cost it."""
        return {client: dict(known.charged) for client, known in self.clients.items()}

    @property
    def charged(self) -> Counter[str]:
        """The most that any client was or may be charged for, by mechanism."""
        total = Counter(self.acknowledged)
        for known in self.clients.values():
            total |= known.charged
        return total

    def notes(self) -> tuple[str, ...]:
        """Say what a reader of the card must know besides its numbers."""
        lost = sorted(client for client, known in self.clients.items() if +known.forgotten)
        changed = sorted(client for client, known in self.clients.items() if known.changed)
        notes = (
            (lost, "clients {} forgot charges: an older state was restored there"),
            (changed, "clients {} changed records during the run"),
        )
        return tuple(note.format(", ".join(map(str, who))) for who, note in notes if who)

    def take(self, answers: Mapping[int, Answer | Refusal]) -> set[int]:
        """Write down what clients say, once, and return those whose ask is to be sent again.

        Of these the charges are acknowledged, which is durable on return.
        """
        before, again = self._content(), set()
        for client, given in answers.items():
            if given.statement is not None:
                self._hear(client, given.statement)
                wanted = given.statement.wanted
                if wanted and self._acknowledge(client, wanted):
                    again.add(client)
        if self._content() != before:
            write_atomically(self._path, self._content())
        return again

    def _hear(self, client: int, told: Statement) -> None:
        known = self.clients.setdefault(client, Known())
        if (forgotten := self._read(told.forgotten)) - known.forgotten:
            known.forgotten |= forgotten
            logger.warning(
                "client %d: its ledger lacks charges of this run, so an older state was restored "
                "there; the card keeps them",
                client,
            )
        known.charged |= self._read(told.charged)
        if told.changed > known.changed:
            known.changed = told.changed
            logger.warning("client %d: its records changed during the run", client)

    def _read(self, releases: Releases) -> Counter[str]:
        """Return counts of the run's mechanisms, and one of all others together."""
        found = Counter[str]()
        for name, count in releases.items():
            found[name if name in self._planned else OTHER] += min(count, self._most(name) + 1)
        return found

    def _acknowledge(self, client: int, wanted: Releases) -> bool:
        """Put charges beyond the plan on the card, if the plan knows their mechanisms."""
        if any(count > self._most(name) for name, count in wanted.items()):
            return False
        logger.warning("client %d: more is charged than planned, which the card says", client)
        self.acknowledged |= Counter(wanted)
        return True

    def _most(self, name: str) -> int:
        """Return how many releases of a mechanism are accounted for; none of one without a plan."""
        return TIMES_PLANNED * self._planned.get(name, 0)

    def _content(self) -> bytes:
        clients = {client: vars(known) for client, known in sorted(self.clients.items())}
        content = {"acknowledged": self.acknowledged, "clients": clients}
        return (json.dumps(content, indent=2) + "\n").encode()
