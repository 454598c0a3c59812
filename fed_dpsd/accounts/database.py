"""The database in a ledger's file: tables, checksums, locking and errors.

FOLDER/client_003.sqlite holds all charges, answers and notes of a client. FOLDER/client_003.created
prevents a client from starting an empty account after its database was deleted.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fed_dpsd.accounts.entry import Charges, Entry
from fed_dpsd.errors import UserError, is_disk_full
from fed_dpsd.storage import Unwritable, client_name, sync

FORMAT = 2
_PATIENCE = 600.0  # seconds to wait for another process, which holds the lock for milliseconds
# While a process holds the ledger exclusively, SQLite keeps its journal and ends a commit by
# clearing the journal's header. FULL syncs the journal before writing the file, the file before
# clearing the header, and then the header. A second file, such as a write-ahead log, would break
# backups of the first.
_SETTINGS = ("foreign_keys = ON", "synchronous = FULL", "journal_mode = PERSIST")
SCHEMA = (
    "CREATE TABLE account (format INTEGER, data TEXT, client INTEGER, head BLOB, kept BLOB)",
    "CREATE TABLE charges (number INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE,"
    " entry TEXT NOT NULL, head BLOB NOT NULL)",
    "CREATE TABLE answers (name TEXT PRIMARY KEY REFERENCES charges (digest),"
    " seal BLOB NOT NULL, content BLOB NOT NULL)",
    "CREATE TABLE notes (name TEXT PRIMARY KEY, seal BLOB NOT NULL, content BLOB NOT NULL)",
)


@dataclass
class Content:
    """The verified content of a ledger's file, except for the content of answers and notes."""

    # format, data and client; empty if nothing has been written yet
    header: Mapping[str, Any] = field(default_factory=dict)
    head: bytes = b""  # a hash over the header and all charges, in order
    kept: int = 0  # the bitwise xor of the hashes of each answer's and note's name and seal
    charges: Charges = field(default_factory=Charges)
    # a checksum of each answer and note, by table and name
    seals: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def open(self, header: Mapping[str, Any]) -> None:
        """Start the account with its header."""
        self.header, self.head = header, _link(b"", json.dumps(dict(header)))

    def charge(self, content: str) -> str:
        """Add a charge, given as a line of `Entry.to_json`, and return its digest."""
        self.head = _link(self.head, content)
        return self.charges.add(content).digest

    @property
    def state(self) -> tuple[bytes, bytes]:
        """The hash of all charges, and the hash of all answers and notes."""
        return self.head, self.kept.to_bytes(32)

    def keep(self, table: str, name: str, seal: bytes) -> None:
        """Add an answer or a note, or replace it."""
        for each in (self.seals.get((table, name)), seal):
            if each is not None:
                mark = hashlib.sha256(f"{table} {name}\n".encode() + each).digest()
                self.kept ^= int.from_bytes(mark)
        self.seals[table, name] = seal


def load(connection: sqlite3.Connection, path: Path) -> Content:
    """Return the file's content after checking every page, charge and seal."""
    account = Content()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    if not pages:
        return account
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise ValueError(found)
    *values, head, kept = connection.execute("SELECT * FROM account").fetchone()
    if values[0] != FORMAT:
        raise LedgerError(
            f"the ledger {path} has format {values[0]}, but this version of FedDPSD supports only "
            f"{FORMAT}; use the version that wrote it"
        )
    account.open(dict(zip(("format", "data", "client"), values, strict=True)))
    query = "SELECT number, digest, entry, head FROM charges ORDER BY number"
    for number, digest, content, link in connection.execute(query):
        if (digest, link) != (account.charge(content), account.head):
            raise ValueError(f"the checksum of charge {number} is wrong")
    for table in ("answers", "notes"):
        for name, seal in connection.execute(f"SELECT name, seal FROM {table}"):
            account.keep(table, name, seal)
    answered = [name for table, name in account.seals if table == "answers"]
    if lost := sum(account.charges.find(name) is None for name in answered):
        raise ValueError(f"it lacks the charges of {lost} answers")
    if account.state != (head, kept):
        raise ValueError("its last charges, an answer or a note are missing or changed")
    return account


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection with exclusive use of the file, even between transactions."""
    connection = open_connection(path, "rw")
    try:
        for setting in _SETTINGS:
            connection.execute(f"PRAGMA {setting}")
        connection.execute("BEGIN EXCLUSIVE")
        # From here on the lock is kept after a transaction. If the mode were set earlier, two
        # processes could deadlock, each keeping what the other waits for.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("ROLLBACK")  # not COMMIT, which writes a first page to an empty file
        # A process killed before it synced the journal may have left data that everyone sees but a
        # loss of power removes; nothing may rely on it before it is durable.
        if journal_path(path).exists():
            sync(journal_path(path))
    except BaseException:
        connection.close()
        raise
    return connection


def release(connection: sqlite3.Connection) -> None:
    """Release the file to others and delete its journal, which is empty after a commit.

    After a failed write, only close the connection: the journal is needed to repair the file.
    """
    with suppress(sqlite3.Error):
        connection.execute("PRAGMA locking_mode = NORMAL")
        connection.execute("PRAGMA journal_mode = DELETE")


def open_connection(path: Path, mode: Literal["ro", "rw", "rwc"]) -> sqlite3.Connection:
    """Return a connection to a file, which only the mode "rwc" creates."""
    address = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(address, timeout=_PATIENCE, isolation_level=None, uri=True)


def journal_path(path: Path) -> Path:
    """Return the journal that SQLite keeps next to a file while writing."""
    return path.with_name(f"{path.name}-journal")


def holds_anything(path: Path) -> bool:
    """Return whether a file exists and is not empty."""
    return path.exists() and path.stat().st_size > 0


def file_identity(path: Path) -> tuple[int, ...]:
    """Return values that change whenever the file does; empty if there is no file."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return ()


def _link(previous: bytes, content: str) -> bytes:
    return hashlib.sha256(previous + content.encode()).digest()


def checksum(table: str, name: str, content: bytes) -> bytes:
    """Return the seal of an answer or a note, which covers its table and name too."""
    return hashlib.sha256(f"{table} {name}\n".encode() + content).digest()


# --- read-only access to ledgers ---


def ledger_path(folder: Path, client: int) -> Path:
    """Return the file of a client's ledger."""
    return folder / f"{client_name(client)}.sqlite"


def marker_path(path: Path) -> Path:
    """Return the file that records that something was written to the ledger at `path`."""
    return path.with_suffix(".created")


def check_not_lost(path: Path) -> None:
    """Check that the ledger at `path` was not deleted or emptied after its first charge."""
    if marker_path(path).exists() and not holds_anything(path):
        raise LedgerError(
            f"the ledger {path} is missing or empty, but {marker_path(path).name} shows that "
            "it was used; restore it from a backup: without it nobody knows what this client has "
            "spent"
        )


def ledgers_in(folder: Path) -> dict[str, Path]:
    """Return each client's ledger by the client's name, including lost ledgers (unreadable)."""
    with translate_errors(folder):
        found = {path for path in folder.glob("client_*.sqlite") if holds_anything(path)}
        found |= {path.with_suffix(".sqlite") for path in folder.glob("client_*.created")}
        return {path.stem: path for path in sorted(found)}


def read_ledger(path: Path) -> Sequence[Entry]:
    """Return all charges of the ledger at `path`, oldest first.

    This writes nothing and locks out no other process.
    """
    return read_content(path).charges.entries()


def is_database(path: Path) -> bool:
    """Return whether a file is a ledger, by its name or its first bytes."""
    with translate_errors(path), path.open("rb") as file:
        return path.suffix == ".sqlite" or file.read(16) == b"SQLite format 3\0"


def read_content(path: Path) -> Content:
    """Return the verified content of a database at one point in time."""
    check_not_lost(path)
    with translate_errors(path), closing(open_connection(path, "ro")) as connection:
        connection.execute("BEGIN")
        return load(connection, path)


# --- errors ---


class LedgerError(UserError):
    """A ledger cannot be read, trusted or written, so no noise may be drawn."""


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Raise a LedgerError with a remedy for any error of the block about the file at `path`."""
    try:
        yield
    except Unwritable as error:
        raise LedgerError(f"{error}; until then this client answers no requests") from error
    except (OSError, sqlite3.OperationalError) as error:
        # A statement that does not fit the file's tables, or invalid text, is not a problem of the
        # disk, although SQLite calls it operational.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if isinstance(error, sqlite3.OperationalError) and code == sqlite3.SQLITE_ERROR:
            raise _corrupt(path, error) from error
        if code == sqlite3.SQLITE_READONLY_ROLLBACK:
            raise LedgerError(
                f"a write to the ledger {path} was cut short; the client's next start repairs it"
            ) from error
        if code == sqlite3.SQLITE_FULL or is_disk_full(error):
            raise LedgerError(
                f"no space left for the ledger {path}; free some space; until then this "
                "client answers no requests"
            ) from error
        raise LedgerError(
            f"the ledger {path} cannot be read or written ({error}); free disk space, fix its "
            "permissions, or end the process that uses it; until then this client answers no "
            "requests"
        ) from error
    except (sqlite3.Error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(path, error) from error


def _corrupt(path: Path, error: Exception) -> LedgerError:
    return LedgerError(
        f"the ledger {path} is corrupt ({' '.join(str(error).split())}); restore it from a backup: "
        "without it nobody knows what this client has spent"
    )
