"""The ledgers of a run's simulated clients, in one file that is written once per request.

Their noise depends only on the run's secret or seed and on what it hides. If a process dies before
the file is written, the resumed run draws the same noise again, so answers are not stored, and
nothing is charged twice. A hospital's ledger, and one that runs share (`ledger=FOLDER`), is a
`FileLedger`, which is durable before each draw.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fed_dpsd.accounts.database import (
    PATIENCE,
    LedgerError,
    holds_anything,
    ledgers_in,
    open_connection,
    read_ledger,
    translate_errors,
)
from fed_dpsd.accounts.entry import Entry
from fed_dpsd.accounts.ledger import MemoryLedger
from fed_dpsd.storage import client_name

FILE = "simulated.sqlite"
# Numbers only grow, so all rows that a process does not know are above the last one it knows.
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS account (data TEXT PRIMARY KEY)",
    "CREATE TABLE IF NOT EXISTS kept (number INTEGER PRIMARY KEY AUTOINCREMENT,"
    " client INTEGER, kind TEXT, name TEXT, content BLOB, UNIQUE (client, kind, name))",
)
_Row = tuple[int, str, str, bytes]  # client, kind, name and content


class SimulatedLedger(MemoryLedger):
    """A simulated client's ledger, which draws an answer again instead of storing it."""

    def __init__(self, client: int, unwritten: list[_Row]) -> None:
        super().__init__()
        self._client, self._unwritten = client, unwritten

    def charge(self, entry: Entry) -> None:
        """Remember a charge until the end of the request, when it is written."""
        super().charge(entry)
        self._unwritten.append((self._client, "charges", entry.digest, entry.to_json().encode()))

    def stored_answer(self, digest: str) -> NDArray[Any] | None:
        """Return None, so that the answer is drawn again, with the same noise."""
        return None

    def store_answer(self, digest: str, values: NDArray[Any]) -> None:
        """Store nothing."""

    def _keep(self, table: str, name: str, content: bytes) -> None:
        super()._keep(table, name, content)
        self._unwritten.append((self._client, table, name, content))

    def take(self, table: str, name: str, content: bytes) -> None:
        """Take over a row of the file, unless this process has written it."""
        if table != "charges":
            super()._keep(table, name, content)
        elif self._charges.find(name) is None:
            self._charges.add(content.decode())


class SimulatedLedgers:
    """The ledgers of a run's simulated clients.

    Several processes may use them at a time, but not for the same client.

    Args:
        folder: the folder of the run's ledgers.
        data: the name of the data set and of its partition.
    """

    def __init__(self, folder: Path, data: str) -> None:
        self._path, self._data = folder / FILE, data
        self._ledgers: dict[int, SimulatedLedger] = {}
        self._unwritten: list[_Row] = []
        self._last = 0  # the number of the last row that this process knows

    def __getitem__(self, client: int) -> SimulatedLedger:
        if client not in self._ledgers:
            self._ledgers[client] = SimulatedLedger(client, self._unwritten)
        return self._ledgers[client]

    @contextmanager
    def request(self) -> Iterator[None]:
        """Read what other processes have charged and, at the end, write what the block charges.

        Raises:
            LedgerError: the file cannot be read or written, or is the account of other records.
        """
        if self._path.exists():
            self._exchange()
        try:
            yield
        finally:
            if self._unwritten:
                self._exchange()

    def _exchange(self) -> None:
        """Read new rows and write this process's in one transaction, durably."""
        with translate_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, PATIENCE, isolation_level=None)) as database:
                database.execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA:
                    database.execute(statement)
                database.execute("INSERT OR IGNORE INTO account VALUES (?)", (self._data,))
                found = [data for (data,) in database.execute("SELECT data FROM account")]
                if found != [self._data]:
                    raise LedgerError(
                        f"the ledger {self._path} is the account of {found[0]}, not of "
                        f"{self._data}: restore that data set, or start a new run"
                    )
                rows = database.execute("SELECT * FROM kept WHERE number > ?", (self._last,))
                for number, client, *row in rows:
                    self[client].take(*row)
                    self._last = number
                put = "INSERT OR REPLACE INTO kept VALUES (NULL, ?, ?, ?, ?)"
                for unwritten in self._unwritten:
                    self._last = database.execute(put, unwritten).lastrowid or 0
                database.execute("COMMIT")
        self._unwritten.clear()


def entries_in(folder: Path) -> dict[Path, Sequence[Entry]]:
    """Return the charges of each ledger in a folder, oldest first, by the ledger's path.

    The path of a simulated client's ledger is FOLDER/simulated.sqlite/client_000.
    """
    found = {path: read_ledger(path) for path in ledgers_in(folder).values()}
    return found | (entries_of_file(folder / FILE) if holds_anything(folder / FILE) else {})


def entries_of_file(path: Path) -> dict[Path, Sequence[Entry]]:
    """Return the charges in a file of simulated clients' ledgers, by client, as `entries_in`."""
    found: dict[int, list[Entry]] = {}
    with translate_errors(path), closing(open_connection(path, "ro")) as database:
        rows = database.execute("SELECT client, kind, content FROM kept ORDER BY number")
        for client, kind, content in rows:
            own = found.setdefault(client, [])
            if kind == "charges":
                own.append(Entry.from_json(content.decode()))
    return {path / client_name(client): own for client, own in sorted(found.items())}
