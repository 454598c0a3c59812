"""The ledgers of a run's simulated clients, in one file that is written before replies leave.

If a process dies earlier, nothing has left, and the resumed run repeats the request with the same
noise, which depends only on the run's secret or seed and on what it hides. So a simulated ledger
holds no answers, but digests of those with secret noise: other values would get other noise. A
hospital's ledger, and one that runs share (`ledger=FOLDER`), is a `FileLedger` instead.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fed_dpsd.accounts.database import (
    LedgerError,
    holds_anything,
    ledgers_in,
    open_connection,
    read_ledger,
    translate_errors,
)
from fed_dpsd.accounts.entry import Entry
from fed_dpsd.accounts.ledger import MemoryLedger
from fed_dpsd.errors import UserError
from fed_dpsd.storage import client_name, sync

FILE = "simulated.sqlite"
_SMALL = 4096  # bytes of a note that stays in memory
# Numbers only grow, so all rows that a process does not know are above the last one it knows.
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS account (data TEXT PRIMARY KEY)",
    "CREATE TABLE IF NOT EXISTS kept (number INTEGER PRIMARY KEY AUTOINCREMENT,"
    " client INTEGER, kind TEXT, name TEXT, content BLOB, UNIQUE (client, kind, name))",
)


class SimulatedLedger(MemoryLedger):
    """A simulated client's ledger. Large notes, such as masked answers, are in the file alone."""

    def __init__(self, client: int, ledgers: "SimulatedLedgers") -> None:
        super().__init__()
        self._client, self._ledgers = client, ledgers

    def charge(self, entry: Entry) -> None:
        """Remember a charge until the end of the request, when it is written."""
        self._charges.check_new(entry.digest)
        self._keep("charges", entry.digest, entry.to_json().encode())

    def stored_answer(self, digest: str) -> NDArray[Any] | None:
        """Return None, so that the answer is drawn again."""
        return None

    def store_answer(self, digest: str, values: NDArray[Any], noisy: bool = True) -> None:
        """Keep a digest of an answer with secret noise.

        Raises:
            UserError: this charge had another answer, for example on another kind of processor.
        """
        if not (self._ledgers.secret and noisy):
            return
        drawn = hashlib.sha256(values.tobytes()).digest()
        if (before := self._read("answers", digest)) is None:
            self._keep("answers", digest, drawn)
        elif before != drawn:
            raise UserError(
                f"client {self._client}'s answer differs from the one that was charged, and other "
                "noise would be a second release; resume the run on the machine where it started, "
                "or start a new one"
            )

    def _read(self, table: str, name: str) -> bytes | None:
        kept = super()._read(table, name)
        return kept if kept is None or kept else self._ledgers.read(self._client, table, name)

    def _keep(self, table: str, name: str, content: bytes) -> None:
        self.take(table, name, content)
        self._ledgers.unwritten[self._client, table, name] = content

    def take(self, table: str, name: str, content: bytes) -> None:
        """Take over a row of the file; the content of a large one stays there."""
        if table != "charges":
            super()._keep(table, name, content if len(content) <= _SMALL else b"")
        elif self._charges.find(name) is None:
            self._charges.add(content.decode())


class SimulatedLedgers:
    """The ledgers of a run's simulated clients.

    Several processes may use them at a time, but not for the same client.

    Args:
        folder: the folder of the run's ledgers.
        data: the name of the data set and of its partition.
        secret: whether the noise is secret.
    """

    def __init__(self, folder: Path, data: str, secret: bool) -> None:
        self._path, self._data, self.secret = folder / FILE, data, secret
        self._ledgers: dict[int, SimulatedLedger] = {}
        self.unwritten: dict[tuple[int, str, str], bytes] = {}  # by client, kind and name
        self._last = 0  # the number of the last row that this process has read or written

    def __getitem__(self, client: int) -> SimulatedLedger:
        if client not in self._ledgers:
            ledger = self._ledgers[client] = SimulatedLedger(client, self)
            if self._last:
                query = "SELECT kind, name, content FROM kept WHERE client = ? AND number <= ?"
                rows = self._rows(f"{query} ORDER BY number", client, self._last)
                with translate_errors(self._path):
                    for row in rows:
                        ledger.take(*row)
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
        except BaseException:
            with suppress(LedgerError):  # the first error matters more
                self._write()
            raise
        self._write()

    def read(self, client: int, kind: str, name: str) -> bytes:
        """Return the content of a row."""
        if (content := self.unwritten.get((client, kind, name))) is None:
            query = "SELECT content FROM kept WHERE client = ? AND kind = ? AND name = ?"
            rows = self._rows(query, client, kind, name)
            with translate_errors(self._path):
                ((content,),) = rows
        return content

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with translate_errors(self._path), closing(open_connection(self._path, "ro")) as database:
            return database.execute(query, values).fetchall()

    def _write(self) -> None:
        if self.unwritten:
            self._exchange()

    def _exchange(self) -> None:
        """Read new rows and write this process's in one transaction, durably."""
        with translate_errors(self._path):
            folder, new = self._path.parent, not self._path.exists()
            if new and self._last:
                raise LedgerError(f"the ledger {self._path} is missing; restore it")
            folder.mkdir(parents=True, exist_ok=True)
            with closing(open_connection(self._path, "rwc")) as database:
                database.execute("PRAGMA synchronous = EXTRA")  # also after a loss of power
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
                last = self._last
                query = "SELECT * FROM kept WHERE number > ? ORDER BY number"
                for last, client, *row in database.execute(query, (self._last,)):  # noqa: B007
                    if client in self._ledgers:
                        self._ledgers[client].take(*row)
                put = "INSERT OR REPLACE INTO kept VALUES (NULL, ?, ?, ?, ?)"
                for key, content in self.unwritten.items():
                    last = database.execute(put, (*key, content)).lastrowid or last
                database.execute("COMMIT")
                self._last = last
            if new:
                for each in (folder, folder.parent):
                    sync(each)
        self.unwritten.clear()


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
