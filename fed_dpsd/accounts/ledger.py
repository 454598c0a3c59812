"""A client's account of everything that ever left about one data set, charged before the noise.

FOLDER/client_003.jsonl holds a header and then one line a charge; FOLDER/client_003/ holds the
answers, one file each; FOLDER/client_003.lock admits one process at a time.
"""

import fcntl
import functools
import hashlib
import io
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.accounts.entry import Entry
from fed_dpsd.config import UserError
from fed_dpsd.storage import client_name

_FORMAT = 1
_CHECK = ', "check": "'
_NEW = os.O_WRONLY | os.O_CREAT


class LedgerError(UserError):
    """A ledger cannot be read, believed or written: nothing may be drawn."""


_entry = functools.lru_cache(maxsize=1 << 14)(Entry.from_json)  # a ledger is read for every ask


class Ledger(Protocol):
    """A client's account. All but `transaction` is called inside a transaction."""

    def transaction(self) -> AbstractContextManager[None]:
        """Keep everyone else out; no transaction lies in another."""

    def entries(self) -> Sequence[Entry]:
        """All charges so far, oldest first."""

    def charge(self, entry: Entry) -> None:
        """Write a charge; it is durable when this returns, and only then may noise be drawn."""

    def stored(self, digest: str) -> NDArray[Any] | None:
        """The answer already given to the charge with this digest."""

    def store(self, digest: str, values: NDArray[Any]) -> None:
        """Keep a charge's answer; it is durable when this returns, and only then may it leave."""

    def noted(self, name: str) -> bytes | None:
        """What was noted under a name: what a client must not forget, beside its charges."""

    def note(self, name: str, content: bytes) -> None:
        """Note it, for ever; it is durable when this returns."""


class MemoryLedger:
    """A ledger that lives as long as its process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._answers: dict[str, NDArray[Any]] = {}
        self._notes: dict[str, bytes] = {}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep other threads out."""
        with self._lock:
            yield

    def entries(self) -> Sequence[Entry]:
        """All charges so far, oldest first."""
        return tuple(self._entries)

    def charge(self, entry: Entry) -> None:
        """Remember a charge."""
        self._entries.append(entry)

    def stored(self, digest: str) -> NDArray[Any] | None:
        """A copy of the answer already given to the charge with this digest."""
        return self._answers[digest].copy() if digest in self._answers else None

    def store(self, digest: str, values: NDArray[Any]) -> None:
        """Remember an answer as it is now."""
        self._answers[digest] = values.copy()

    def noted(self, name: str) -> bytes | None:
        """What was noted under a name."""
        return self._notes.get(name)

    def note(self, name: str, content: bytes) -> None:
        """Remember it."""
        self._notes[name] = content


class FileLedger:
    """A ledger that outlives its process and a loss of power.

    Nothing is kept in memory, since any process may host the client next.

    Args:
        folder: where the ledgers of all clients are.
        client: the client's number.
        data: the data set's name: a budget is per data set, over all runs.

    Raises:
        LedgerError: by this and by every method, with the path and the remedy.
    """

    def __init__(self, folder: Path, client: int, data: str) -> None:
        self._path = ledger_path(folder, client)
        self._answers = self._path.with_suffix("")
        self._header = {"format": _FORMAT, "data": data, "client": client}
        with _usable(self._path):
            self._answers.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep other processes and threads out; the kernel lets go of what a dead one held."""
        with ExitStack() as stack:
            with _usable(self._path):
                lock = stack.enter_context(_opened(self._path.with_suffix(".lock"), _NEW))
                fcntl.flock(lock, fcntl.LOCK_EX)
                # A process killed before its fsync may have left what all see but a loss of power
                # takes away; nothing may rest on it before it is durable.
                for path in filter(Path.exists, (self._path, self._answers)):
                    _sync(path)
            self.entries()  # a damaged ledger answers nothing, not even what is stored
            yield

    def entries(self) -> Sequence[Entry]:
        """All charges so far, oldest first.

        The checksums cannot show that the last lines are gone, or the whole file; the answers can.
        """
        with _usable(self._path):
            answered = {path.stem for path in self._answers.glob("*.npy")}
            found, entries = _load(self._path) if self._path.exists() else ({}, ())
        if found not in ({}, self._header):
            raise LedgerError(
                f"the ledger {self._path} is the account of {found}, not of {self._header}: a "
                "budget is per data set and client; name the ledger folder of this data"
            )
        if lost := answered - {entry.digest for entry in entries}:
            raise LedgerError(
                f"the ledger {self._path} is corrupt: it lacks the charges of {len(lost)} answers "
                f"in {self._answers}; restore it from a newer backup"
            )
        return entries

    def charge(self, entry: Entry) -> None:
        """Append a line and fsync it; where that fails, take it back."""
        content = entry.to_json()
        with _usable(self._path):
            lines = _lines(self._path) if self._path.exists() else []
            if not lines:
                lines = [self._append([], json.dumps(self._header))]
            if len(lines) == 1:
                self._sync_folders()
            self._append(lines, content)

    def _append(self, lines: list[str], content: str) -> str:
        line = _seal(lines[-1] if lines else "", content)
        size = sum(len(line) + 1 for line in lines)
        with _opened(self._path, _NEW | os.O_APPEND) as file:
            try:
                os.ftruncate(file, size)  # cuts off what a crash cut short
                _write(file, f"{line}\n".encode())
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file, size)
                raise
        return line

    def _sync_folders(self) -> None:
        """Make the new file durable, and the folders above it, which may be new too."""
        for folder in self._answers.parents:
            with suppress(PermissionError):  # what we may not read we have not made
                _sync(folder)
            if folder.is_mount():
                break

    def stored(self, digest: str) -> NDArray[Any] | None:
        """The answer already given to the charge with this digest."""
        content = self._read(digest, ".npy")
        return None if content is None else np.load(io.BytesIO(content), allow_pickle=False)

    def noted(self, name: str) -> bytes | None:
        """What was noted under a name."""
        return self._read(name, ".note")

    def store(self, digest: str, values: NDArray[Any]) -> None:
        """Write an answer atomically."""
        content = io.BytesIO()
        np.save(content, values, allow_pickle=False)
        self._keep(digest, ".npy", content.getvalue())

    def note(self, name: str, content: bytes) -> None:
        """Write a note atomically."""
        self._keep(name, ".note", content)

    def _read(self, name: str, suffix: str) -> bytes | None:
        path = self._answers / f"{name}{suffix}"
        with _usable(self._path):
            if not path.exists():
                return None
            sealed = path.read_bytes()
        if sealed != _seal_answer(name, content := sealed[:-32]):
            raise LedgerError(
                f"{path} is damaged; restore it from a backup: to draw an answer again would take "
                "its noise away"
            )
        return content

    def _keep(self, name: str, suffix: str, content: bytes) -> None:
        temporary = self._answers / f"{name}.tmp"
        with _usable(self._path):
            with _opened(temporary, _NEW | os.O_TRUNC) as file:
                _write(file, _seal_answer(name, content))
            os.replace(temporary, self._answers / f"{name}{suffix}")
            _sync(self._answers)


def ledger_path(folder: Path, client: int) -> Path:
    """Return the file of a client's ledger."""
    return folder / f"{client_name(client)}.jsonl"


def header(path: Path) -> Mapping[str, Any]:
    """The format, data and client of the ledger at `path`; empty where nothing was ever charged.

    Raises:
        LedgerError: the file is missing, corrupt or of another format.
    """
    return _load(path)[0]


def read(path: Path) -> Sequence[Entry]:
    """All charges of the ledger at `path`, oldest first; neither locked nor written to.

    Raises:
        LedgerError: the file is missing, corrupt or of another format.
    """
    return _load(path)[1]


def _load(path: Path) -> tuple[Mapping[str, Any], Sequence[Entry]]:
    lines = _lines(path)
    if not lines:
        return {}, ()
    with _usable(path):
        first, *contents = map(_content, lines)
        values = dict(json.loads(first))
        if values["format"] != _FORMAT:
            raise LedgerError(
                f"the ledger {path} has format {values['format']}, this version of FedDPSD knows "
                f"only {_FORMAT}; use the version that wrote it"
            )
        return values, tuple(map(_entry, contents))


def _lines(path: Path) -> list[str]:
    """The lines, each with the checksum it should have.

    What follows the last newline was cut short by a crash before its fsync returned, so nothing was
    drawn on it: it is left out.
    """
    with _usable(path):
        *complete, _ = path.read_bytes().split(b"\n")
        lines = [line.decode("ascii") for line in complete]
        for number, (previous, line) in enumerate(zip(["", *lines], lines, strict=False), start=1):
            if line != _seal(previous, _content(line)):
                raise ValueError(f"the checksum of line {number} is wrong")
    return lines


def _seal(previous: str, content: str) -> str:
    """A line: a JSON object and a checksum over it and the line before."""
    check = hashlib.sha256(f"{previous}\n{content}".encode()).hexdigest()
    return f'{content[:-1]}{_CHECK}{check}"}}'


def _content(line: str) -> str:
    return line.rpartition(_CHECK)[0] + "}"


def _seal_answer(digest: str, values: bytes) -> bytes:
    """An answer's file: NumPy's own, and a checksum over it and its name."""
    return values + hashlib.sha256(digest.encode() + values).digest()


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} cannot be read or written ({error}); free disk space or mend "
            "its permissions: until then this client answers nothing"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(
            f"the ledger {path} is corrupt ({error}); restore it from a backup: "
            "without it nobody knows what this client has spent"
        ) from error


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def _write(file: int, content: bytes) -> None:
    """Write all of it, durably."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]
    os.fsync(file)


def _sync(path: Path) -> None:
    with _opened(path, os.O_RDONLY) as file:
        os.fsync(file)
