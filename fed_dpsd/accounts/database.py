"""The database that a ledger's file is: its tables, their checksums, and who may use it when."""

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fed_dpsd.accounts.charges import Charges
from fed_dpsd.accounts.errors import other_format
from fed_dpsd.storage import sync

FORMAT = 2
_PATIENCE = 600.0  # seconds to wait for another process; what it holds it holds for milliseconds
# While a process holds the ledger alone, SQLite keeps its journal and ends a commit by emptying
# the journal's header. FULL syncs the journal before the file is written, the file before the
# header is emptied, and then the header. A second file, as write-ahead logs have, would break
# backups of the one.
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
    """The verified content of a ledger's file, without the content of answers and notes.

    Args:
        header: format, data and client; empty where nothing was written yet.
        head: a hash over the header and all charges, in their order.
        kept: the sum of hashes over the name and seal of each answer and note, by bitwise xor.
        charges: all of them.
        seals: a checksum of each answer and note, by its table and name.
    """

    header: Mapping[str, Any] = field(default_factory=dict)
    head: bytes = b""
    kept: int = 0
    charges: Charges = field(default_factory=Charges)
    seals: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def open(self, header: Mapping[str, Any]) -> None:
        """Begin the account with its header."""
        self.header, self.head = header, _link(b"", json.dumps(dict(header)))

    def charge(self, content: str) -> str:
        """Add the charge of a line of `Entry.to_json`, and return its digest."""
        self.head = _link(self.head, content)
        return self.charges.add(content).digest

    @property
    def state(self) -> tuple[bytes, bytes]:
        """The hashes that stand for all charges, and for all answers and notes."""
        return self.head, self.kept.to_bytes(32)

    def keep(self, table: str, name: str, seal: bytes) -> None:
        """Add an answer or a note, or replace it."""
        for each in (self.seals.get((table, name)), seal):
            if each is not None:
                mark = hashlib.sha256(f"{table} {name}\n".encode() + each).digest()
                self.kept ^= int.from_bytes(mark)
        self.seals[table, name] = seal


def load(connection: sqlite3.Connection, path: Path) -> Content:
    """Return what the file holds, after a look at every page, charge and seal of it."""
    account = Content()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    if not pages:
        return account
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise ValueError(found)
    *values, head, kept = connection.execute("SELECT * FROM account").fetchone()
    if values[0] != FORMAT:
        raise other_format(path, values[0], FORMAT)
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
        raise ValueError("its last charges, an answer or a note are gone, or not what they were")
    return account


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection that alone may use the file, between its transactions too."""
    connection = opened(path, "rw")
    try:
        for setting in _SETTINGS:
            connection.execute(f"PRAGMA {setting}")
        connection.execute("BEGIN EXCLUSIVE")
        # From here on the end of a transaction keeps the lock. Had the mode been set before, two
        # processes that wait for each other would both keep what the other waits for.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("ROLLBACK")  # and not COMMIT, which writes a first page where none is
        # A process killed before it synced the journal may have left what all see but a loss of
        # power takes away; nothing may rest on it before it is durable.
        if journal(path).exists():
            sync(journal(path))
    except BaseException:
        connection.close()
        raise
    return connection


def let_go(connection: sqlite3.Connection) -> None:
    """Let others use the file, and delete its journal, which holds nothing after a commit.

    After a write that failed the journal is what mends the file: then a connection is only closed.
    """
    with suppress(sqlite3.Error):
        connection.execute("PRAGMA locking_mode = NORMAL")
        connection.execute("PRAGMA journal_mode = DELETE")


def opened(path: Path, mode: Literal["ro", "rw"]) -> sqlite3.Connection:
    """Return a connection to a file that is there already."""
    address = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(address, timeout=_PATIENCE, isolation_level=None, uri=True)


def journal(path: Path) -> Path:
    """Return the file that SQLite keeps beside a file while it writes there."""
    return path.with_name(f"{path.name}-journal")


def holds_anything(path: Path) -> bool:
    """Return whether anything was ever written to a file that may not be there."""
    return path.exists() and path.stat().st_size > 0


def identity(path: Path) -> tuple[int, ...]:
    """Return what changes when a file does; empty where there is none."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return ()


def _link(previous: bytes, content: str) -> bytes:
    return hashlib.sha256(previous + content.encode()).digest()


def checksum(table: str, name: str, content: bytes) -> bytes:
    """Return the seal of an answer or a note: over what it is, too, not over its content alone."""
    return hashlib.sha256(f"{table} {name}\n".encode() + content).digest()
