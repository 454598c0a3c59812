"""Ledgers that are only looked at: where they are, and what they hold; nothing is written."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fed_dpsd.accounts.database import Content, holds_anything, load, opened
from fed_dpsd.accounts.entry import Entry
from fed_dpsd.accounts.errors import LedgerError, usable
from fed_dpsd.storage import client_name


def ledger_path(folder: Path, client: int) -> Path:
    """Return the file of a client's ledger."""
    return folder / f"{client_name(client)}.sqlite"


def marker_path(path: Path) -> Path:
    """Return the file that records that something was written to the ledger at `path`."""
    return path.with_suffix(".created")


def check_not_lost(path: Path) -> None:
    """Check that the ledger at `path` was not deleted or emptied after its first charge.

    Raises:
        LedgerError: it was.
    """
    if marker_path(path).exists() and not holds_anything(path):
        raise LedgerError(
            f"the ledger {path} is gone or empty, but {marker_path(path).name} shows that it was "
            "used; restore it from a backup: without it nobody knows what this client has spent"
        )


def ledgers_in(folder: Path) -> dict[str, Path]:
    """Return the ledger of each client by its name, lost ones too; reading those raises.

    Raises:
        LedgerError: the folder cannot be read.
    """
    with usable(folder):
        found = {path for path in folder.glob("client_*.sqlite") if holds_anything(path)}
        found |= {path.with_suffix(".sqlite") for path in folder.glob("client_*.created")}
        return {path.stem: path for path in sorted(found)}


def header(path: Path) -> Mapping[str, Any]:
    """Return the format, data and client of the ledger at `path`; empty where nothing was written.

    Raises:
        LedgerError: the file is missing, corrupt or of another format.
    """
    return content_of(path).header


def read(path: Path) -> Sequence[Entry]:
    """Return all charges of the ledger at `path`, oldest first.

    Nothing is written, and no other process is kept out.

    Raises:
        LedgerError: the file is missing, corrupt or of another format.
    """
    return content_of(path).charges.entries()


def is_database(path: Path) -> bool:
    """Return whether a file is a ledger, by its name or its first bytes."""
    with usable(path), path.open("rb") as file:
        return path.suffix == ".sqlite" or file.read(16) == b"SQLite format 3\0"


def content_of(path: Path) -> Content:
    """Return the verified content of a database, as it is at one time.

    Raises:
        LedgerError: the file is missing, corrupt or of another format.
    """
    check_not_lost(path)
    with usable(path), closing(opened(path, "ro")) as connection:
        connection.execute("BEGIN")
        return load(connection, path)
