"""A client's ledger: everything ever released about one data set, charged before drawing noise."""

import functools
import io
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.accounts.database import (
    FORMAT,
    SCHEMA,
    Content,
    LedgerError,
    check_not_lost,
    checksum,
    connect,
    file_identity,
    ledger_path,
    load,
    marker_path,
    release,
    translate_errors,
)
from fed_dpsd.accounts.entry import Charges, Entry
from fed_dpsd.storage import sync, uninterrupted, write_atomically

_CREATING = threading.Lock()
_MARK = b"This client has a ledger. If the .sqlite file is missing, restore it from a backup.\n"


class Ledger(ABC):
    """A client's account. Call everything except `transaction` inside a transaction.

    A simulated client's is durable only at the end of a request (accounts/simulated.py).
    """

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """Lock out all other processes and threads; transactions must not be nested."""

    def single_commit(self) -> AbstractContextManager[None]:
        """Make everything that the block writes durable at its end; blocks must not be nested."""
        return nullcontext()

    @abstractmethod
    def charges(self) -> Charges:
        """Return all charges so far, indexed for queries."""

    def entries(self) -> Sequence[Entry]:
        """Return all charges so far, oldest first."""
        return self.charges().entries()

    @abstractmethod
    def charge(self, entry: Entry) -> None:
        """Write a charge, durably unless in `single_commit`; only then may noise be drawn."""

    def stored_answer(self, digest: str) -> NDArray[Any] | None:
        """Return the stored answer of the charge with this digest; None if there is none."""
        content = self._read("answers", digest)
        return None if content is None else np.load(io.BytesIO(content), allow_pickle=False)

    def store_answer(self, digest: str, values: NDArray[Any], noisy: bool = True) -> None:
        """Store a charge's answer, durably unless in `single_commit`; only then may it leave.

        `noisy` says whether the answer's noise depends on its values.
        """
        content = io.BytesIO()
        np.save(content, values, allow_pickle=False)
        self._keep("answers", digest, content.getvalue())

    def stored_note(self, name: str) -> bytes | None:
        """Return a note by name; notes hold what a client must remember, apart from its charges."""
        return self._read("notes", name)

    def store_note(self, name: str, content: bytes) -> None:
        """Store a note, durably unless in `single_commit`."""
        self._keep("notes", name, content)

    @abstractmethod
    def _read(self, table: str, name: str) -> bytes | None: ...

    @abstractmethod
    def _keep(self, table: str, name: str, content: bytes) -> None: ...


class MemoryLedger(Ledger):
    """A ledger in memory, lost when the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._charges = Charges()
        self._kept: dict[tuple[str, str], bytes] = {}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep other threads out."""
        with self._lock:
            yield

    def charges(self) -> Charges:
        """Return all charges so far, indexed for queries."""
        return self._charges

    def charge(self, entry: Entry) -> None:
        """Remember a charge."""
        self._charges.add(entry.to_json())

    def _read(self, table: str, name: str) -> bytes | None:
        return self._kept.get((table, name))

    def _keep(self, table: str, name: str, content: bytes) -> None:
        self._kept[table, name] = content


class FileLedger(Ledger):
    """A ledger in a file, which survives crashes and power loss.

    Verified content is kept and trusted as long as the file is unchanged. A process must not open
    the file by other means while one of its ledgers uses it: closing it would release the lock,
    which belongs to the process and not to the open file.

    Args:
        folder: the folder of all clients' ledgers.
        client: the client's number.
        data: the data set's name. A budget covers one data set over all runs.

    Raises:
        LedgerError: in the constructor and in every method, with the path and the remedy.
    """

    def __init__(self, folder: Path, client: int, data: str) -> None:
        self._path = ledger_path(folder, client)
        self._header = {"format": FORMAT, "data": data, "client": client}
        self._marker = marker_path(self._path)
        self._remembered: Content | None = None
        self._left: tuple[int, ...] = ()
        self._connection: sqlite3.Connection | None = None
        self._committing = False
        with translate_errors(self._path):
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Lock out other processes and threads; the kernel releases a dead process's lock.

        A damaged ledger cannot even be read. Ctrl-C takes effect only at the end.
        """
        with uninterrupted():
            with translate_errors(self._path):
                check_not_lost(self._path)
                with _CREATING:
                    if not self._path.exists():
                        self._path.touch()  # with the permissions that new files have here
                connection = connect(self._path)
            try:
                with translate_errors(self._path):
                    self._connection = connection
                    self._verify()
                yield
                if self._remembered and self._remembered.header and not self._marker.exists():
                    with translate_errors(self._path):
                        write_atomically(self._marker, _MARK)
            finally:
                self._left = file_identity(self._path)
                self._connection = None
                with closing(connection):
                    if self._remembered:  # otherwise a write failed, and its journal may be needed
                        release(connection)

    def charges(self) -> Charges:
        """Return all charges so far, indexed for queries."""
        return self._account().charges

    def charge(self, entry: Entry) -> None:
        """Write a charge; see `Ledger.charge`."""
        self.charges().check_new(entry.digest)
        content = entry.to_json()
        with self._written() as account:
            row = account.charge(content), content, account.head
            self._execute("INSERT INTO charges (digest, entry, head) VALUES (?, ?, ?)", *row)

    def _keep(self, table: str, name: str, content: bytes) -> None:
        with self._written() as account:
            seal = checksum(table, name, content)
            account.keep(table, name, seal)
            self._execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)", name, seal, content)

    def _read(self, table: str, name: str) -> bytes | None:
        seal = self._account().seals.get((table, name))
        if seal is None:
            return None
        with translate_errors(self._path):
            row = self._execute(f"SELECT content FROM {table} WHERE name = ?", name).fetchone()
            whole = row is not None and checksum(table, name, row[0]) == seal
        if not whole:
            raise LedgerError(
                f"{name} in {table} of the ledger {self._path} is damaged; restore the ledger from "
                "a backup: drawing an answer again would remove its noise"
            )
        return bytes(row[0])

    def _execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        assert self._connection is not None
        return self._connection.execute(statement, values)

    @contextmanager
    def single_commit(self) -> Iterator[None]:
        """Commit what the block writes at its end, durably: everything or, on an error, nothing."""
        account = self._account()
        before = account.state
        try:
            with translate_errors(self._path):
                if not account.header:
                    self._sync_folders()
                self._execute("BEGIN")
                if not account.header:
                    for statement in SCHEMA:
                        self._execute(statement)
                    account.open(self._header)
                    row = (*self._header.values(), *account.state)
                    self._execute("INSERT INTO account VALUES (?, ?, ?, ?, ?)", *row)
            self._committing = True
            yield
            with translate_errors(self._path):
                if account.state != before:
                    self._execute("UPDATE account SET head = ?, kept = ?", *account.state)
                self._execute("COMMIT")
        except BaseException:
            self._remembered = None  # the file must be read again
            with suppress(sqlite3.Error):
                self._execute("ROLLBACK")
            raise
        finally:
            self._committing = False

    @contextmanager
    def _written(self) -> Iterator[Content]:
        """Commit what the block writes, unless it is part of a larger block of `single_commit`."""
        account = self._account()
        with (
            nullcontext() if self._committing else self.single_commit(),
            translate_errors(self._path),
        ):
            yield account

    def _sync_folders(self) -> None:
        """Sync the folder of a new file and, once per process, the folders above, perhaps new."""
        folder = self._path.parent
        _sync_readable(folder)
        _sync_above(folder, folder.stat().st_ino)

    def _account(self) -> Content:
        assert self._connection is not None, "use a ledger only inside a transaction"
        if self._remembered is None:
            with translate_errors(self._path):
                self._verify()
        assert self._remembered is not None
        return self._remembered

    def _verify(self) -> None:
        """Read and verify the whole account, unless it is unchanged since its last use here."""
        known, connection = self._remembered, self._connection
        assert connection is not None, "use a ledger only inside a transaction"
        as_left = known and known.header and self._left == file_identity(self._path)
        row = connection.execute("SELECT head, kept FROM account").fetchone() if as_left else None
        if known and row == known.state:
            return
        self._remembered = None
        account = load(connection, self._path)
        if not account.header:
            check_not_lost(self._path)  # again, now that no other process can write the file
        _check_header(self._path, account.header, self._header)
        self._remembered = account


def _sync_readable(folder: Path) -> None:
    with suppress(PermissionError):  # we did not create folders that we may not read
        sync(folder)


@functools.lru_cache(maxsize=16)
def _sync_above(folder: Path, number: int) -> None:
    """Sync the folders above a folder; a new inode `number` means that it was made again."""
    while not folder.is_mount():
        folder = folder.parent
        _sync_readable(folder)


def _check_header(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    if found not in ({}, expected):
        raise LedgerError(
            f"the ledger {path} is the account of {_words(found)}, not of {_words(expected)}: a "
            "budget is per data set and client; for the same patients, keep the data set and the "
            "client's number (in a hospital's file, name and client), and for others, use another "
            "ledger folder"
        )


def _words(header: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in reversed([*header.items()]))
