"""What a client has spent, and what it answered: charged before noise is drawn."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import attrs
import dp_accounting
import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, SelfComposedDpEvent
from numpy.typing import NDArray

from fed_dpsd.config import UserError

_EVENTS = ("GaussianDpEvent", "RandomizedResponseDpEvent", "NonPrivateDpEvent")


@dataclass(frozen=True)
class Entry:
    """One charge: `queries` times `event`, for the ask with this digest."""

    digest: str
    query_id: int
    queries: int
    event: DpEvent

    def to_json(self) -> str:
        """One line that a person can read."""
        event = {"type": type(self.event).__name__, **attrs.asdict(self.event)}
        return json.dumps(
            {
                "digest": self.digest,
                "query_id": self.query_id,
                "queries": self.queries,
                "event": event,
            }
        )

    @classmethod
    def from_json(cls, line: str) -> "Entry":
        """The entry of a line; only known event types are built."""
        values = json.loads(line)
        parameters: dict[str, Any] = dict(values.pop("event"))
        kind = parameters.pop("type")
        if kind not in _EVENTS:
            raise ValueError(f"unknown event {kind!r}")
        return cls(**values, event=getattr(dp_accounting, kind)(**parameters))


class Ledger(Protocol):
    """A client's account. `charge` is durable when it returns."""

    def entries(self) -> Sequence[Entry]:
        """All charges so far, oldest first."""

    def charge(self, entry: Entry) -> None:
        """Write a charge; only then may noise be drawn."""

    def stored(self, digest: str) -> NDArray[Any] | None:
        """The answer already given to the ask with this digest."""

    def store(self, digest: str, values: NDArray[Any]) -> None:
        """Keep an answer, to return it when its ask comes again."""


def spent(ledger: Ledger) -> DpEvent:
    """Everything charged so far, as one event."""
    return ComposedDpEvent([SelfComposedDpEvent(e.event, e.queries) for e in ledger.entries()])


class MemoryLedger:
    """A ledger that lives as long as its process."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._answers: dict[str, NDArray[Any]] = {}

    def entries(self) -> Sequence[Entry]:
        """All charges so far, oldest first."""
        return tuple(self._entries)

    def charge(self, entry: Entry) -> None:
        """Remember a charge."""
        self._entries.append(entry)

    def stored(self, digest: str) -> NDArray[Any] | None:
        """The answer already given to the ask with this digest."""
        return self._answers.get(digest)

    def store(self, digest: str, values: NDArray[Any]) -> None:
        """Remember an answer."""
        self._answers[digest] = values


class FileLedger:
    """One line a charge in FOLDER/CLIENT.jsonl, fsynced; answers beside it, one file an ask.

    It is read afresh each time, since any process may host the client next.
    """

    def __init__(self, folder: Path, client: int) -> None:
        self._path = folder / f"client_{client:03d}.jsonl"
        self._answers = folder / f"client_{client:03d}"
        try:
            self._answers.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the ledger folder {folder} is not writable: {error}") from error

    def entries(self) -> Sequence[Entry]:
        """All charges so far, oldest first.

        A last line cut short by a crash was never acted upon (noise is drawn after the fsync) and
        is skipped; any other unreadable line is an error.
        """
        if not self._path.exists():
            return ()
        lines = self._path.read_text().split("\n")
        complete = lines[:-1]  # what follows the last newline was cut short, or is empty
        try:
            return tuple(Entry.from_json(line) for line in complete)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"the ledger {self._path} is corrupt ({error}); restore it from a backup: "
                "without it nobody knows what this client has spent"
            ) from error

    def charge(self, entry: Entry) -> None:
        """Append a line and fsync it."""
        with self._path.open("a+b") as file:
            file.seek(0)
            content = file.read()
            keep = content.rfind(b"\n") + 1
            if keep < len(content):
                file.truncate(keep)
            file.seek(0, os.SEEK_END)
            file.write(entry.to_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def stored(self, digest: str) -> NDArray[Any] | None:
        """The answer already given to the ask with this digest."""
        path = self._answers / f"{digest}.npy"
        return np.load(path, allow_pickle=False) if path.exists() else None

    def store(self, digest: str, values: NDArray[Any]) -> None:
        """Write an answer atomically."""
        temporary = self._answers / f"{digest}.{os.getpid()}.tmp"
        with temporary.open("wb") as file:
            np.save(file, values)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._answers / f"{digest}.npy")
