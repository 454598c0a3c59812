"""Trouble with a ledger's file, and what its owner is to do about it."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fed_dpsd.errors import UserError, is_full
from fed_dpsd.storage import Unwritable


class LedgerError(UserError):
    """A ledger cannot be read, believed or written: nothing may be drawn."""


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Turn what goes wrong inside with the file at `path` into an error with a remedy.

    Raises:
        LedgerError: the disk or the file's content is at fault.
    """
    try:
        yield
    except Unwritable as error:
        raise LedgerError(f"{error}; until then this client answers nothing") from error
    except (OSError, sqlite3.OperationalError) as error:
        # A statement that does not fit the file's tables, or text that is none, is no trouble of
        # the disk's; SQLite calls it operational nevertheless.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if isinstance(error, sqlite3.OperationalError) and code == sqlite3.SQLITE_ERROR:
            raise _corrupt(path, error) from error
        if code == sqlite3.SQLITE_READONLY_ROLLBACK:
            raise LedgerError(
                f"a write to the ledger {path} was cut short; the client's next start mends it"
            ) from error
        if code == sqlite3.SQLITE_FULL or is_full(error):
            raise LedgerError(
                f"no space left for the ledger {path}; free some: until then this client answers "
                "nothing"
            ) from error
        raise LedgerError(
            f"the ledger {path} cannot be read or written ({error}); free disk space, mend its "
            "permissions, or end the process that holds it: until then this client answers nothing"
        ) from error
    except (sqlite3.Error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(path, error) from error


def _corrupt(path: Path, error: Exception) -> LedgerError:
    return LedgerError(
        f"the ledger {path} is corrupt ({' '.join(str(error).split())}); restore it from a backup: "
        "without it nobody knows what this client has spent"
    )


def other_format(path: Path, found: object, known: int) -> LedgerError:
    """Return the error of a ledger whose format this version does not know."""
    return LedgerError(
        f"the ledger {path} has format {found}, this version of FedDPSD knows only {known}; use "
        "the version that wrote it"
    )
