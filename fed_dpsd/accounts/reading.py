"""Ledgers that are only looked at: where they are, and what they hold; nothing is written."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fed_dpsd.accounts import migration
from fed_dpsd.accounts.charges import Charges
from fed_dpsd.accounts.database import Content, holds_anything, load, opened
from fed_dpsd.accounts.entry import Entry
from fed_dpsd.accounts.errors import usable
from fed_dpsd.storage import client_name


def ledger_path(folder: Path, client: int) -> Path:
    """Return the file of a client's ledger."""
    return folder / f"{client_name(client)}.sqlite"


def ledgers_in(folder: Path) -> dict[str, Path]:
    """Return the ledger of each client by its name; in format 1 where it has not been moved yet.

    Raises:
        LedgerError: the folder cannot be read.
    """
    with usable(folder):
        old = {path.stem: path for path in sorted(folder.glob("client_*.jsonl"))}
        new = {path.stem: path for path in sorted(folder.glob("client_*.sqlite"))}
        return old | {name: path for name, path in new.items() if holds_anything(path)}


def header(path: Path) -> Mapping[str, Any]:
    """Return the format, data and client of the ledger at `path`; empty where nothing was written.

    Raises:
        LedgerError: the file is missing, corrupt or of another format.
    """
    return content_of(path).header if is_database(path) else migration.read(path)[0]


def read(path: Path) -> Sequence[Entry]:
    """Return all charges of the ledger at `path`, oldest first; in format 1 too.

    Nothing is written, and no other process is kept out.

    Raises:
        LedgerError: the file is missing, corrupt or of another format.
    """
    if is_database(path):
        return content_of(path).charges.entries()
    charges = Charges()
    with usable(path):
        for content in migration.read(path)[1]:
            charges.add(content)
    return charges.entries()


def is_database(path: Path) -> bool:
    """Return whether a ledger is in today's format: by its first bytes, whatever its name is."""
    with usable(path), path.open("rb") as file:
        return path.suffix == ".sqlite" or file.read(16) == b"SQLite format 3\0"


def content_of(path: Path) -> Content:
    """Return the verified content of a database, as it is at one time.

    Raises:
        LedgerError: the file is missing, corrupt or of another format.
    """
    with usable(path), closing(opened(path, "ro")) as connection:
        connection.execute("BEGIN")
        return load(connection, path)
