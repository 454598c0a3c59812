"""A client's account in format 1, which is only read, and put out of use once it is moved.

FOLDER/client_003.jsonl held a header and then one line a charge; FOLDER/client_003/ the answers
and notes, one file each; FOLDER/client_003.lock admitted one process at a time.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fed_dpsd.accounts.errors import LedgerError, other_format, usable
from fed_dpsd.storage import write_atomically

try:
    import fcntl
except ImportError:  # on Windows, where nothing ever wrote this format
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
_SUPERSEDED = 2  # a format that whatever reads format 1 alone refuses
_CHECK = ', "check": "'


@dataclass(frozen=True)
class Moved:
    """All that an account in format 1 holds.

    Args:
        header: its format, data and client; empty where nothing was charged.
        charges: the lines of `Entry.to_json`, oldest first.
        answers: files of NumPy by the digest of their charge.
        notes: by their names.
    """

    header: Mapping[str, Any]
    charges: tuple[str, ...]
    answers: Mapping[str, bytes]
    notes: Mapping[str, bytes]


def exists(path: Path) -> bool:
    """Return whether there is an account in format 1, or what is left of one, at `path`."""
    return path.exists() or path.with_suffix("").is_dir()


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep out every process that writes format 1; the kernel lets go of what a dead one held.

    Raises:
        LedgerError: the lock's file cannot be written.
    """
    with usable(path):
        lock = path.with_suffix(".lock").open("ab")
    with lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_superseded(path: Path) -> bool:
    """Return whether the account was moved, so that no version may go on with it here.

    Raises:
        LedgerError: the file cannot be read, or is corrupt.
    """
    with usable(path):
        lines = _lines(path) if path.exists() else []
        return bool(lines) and json.loads(_content(lines[0]))["format"] == _SUPERSEDED


def supersede(path: Path, header: Mapping[str, Any]) -> None:
    """Have every version that knows format 1 alone refuse the account; keep a copy as it was.

    Raises:
        LedgerError: it cannot be written.
    """
    with usable(path):
        if path.exists():
            write_atomically(path.with_name(f"{path.name}.before-sqlite"), path.read_bytes())
        line = _seal("", json.dumps({**header, "format": _SUPERSEDED}))
        write_atomically(path, f"{line}\n".encode())


def read(path: Path) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the header and the charges of the file at `path`, which is not written to.

    Raises:
        LedgerError: the file cannot be read, is corrupt, was moved, or is of another format.
    """
    with usable(path):
        lines = _lines(path)
        if not lines:
            return {}, ()
        first, *contents = map(_content, lines)
        values = dict(json.loads(first))
        if values["format"] == _SUPERSEDED:
            raise LedgerError(
                f"the ledger {path} is {path.with_suffix('.sqlite')} now; read that one, or "
                "restore it from a backup if it is gone"
            )
        if values["format"] != FORMAT:
            raise other_format(path, values["format"], FORMAT)
        return values, tuple(contents)


def load(path: Path) -> Moved:
    """Return the whole account, every part of it verified; nothing is written.

    Raises:
        LedgerError: as `read` does, or an answer or note is damaged, or an answer lacks its charge.
    """
    header, charges = read(path) if path.exists() else ({}, ())
    folder = path.with_suffix("")
    with usable(path):
        answers = {file.stem: _unsealed(file) for file in sorted(folder.glob("*.npy"))}
        notes = {file.stem: _unsealed(file) for file in sorted(folder.glob("*.note"))}
        if lost := answers.keys() - {json.loads(charge)["digest"] for charge in charges}:
            raise ValueError(f"it lacks the charges of {len(lost)} answers in {folder}")
    return Moved(header, charges, answers, notes)


def _lines(path: Path) -> list[str]:
    """Return the lines, each with the checksum it should have.

    What follows the last newline was cut short by a crash before its fsync returned, so nothing was
    drawn on it: it is left out.
    """
    *complete, _ = path.read_bytes().split(b"\n")
    lines = [line.decode("ascii") for line in complete]
    for number, (previous, line) in enumerate(zip(["", *lines], lines, strict=False), start=1):
        if line != _seal(previous, _content(line)):
            raise ValueError(f"the checksum of line {number} is wrong")
    return lines


def _seal(previous: str, content: str) -> str:
    """Return a line: a JSON object and a checksum over it and the line before."""
    check = hashlib.sha256(f"{previous}\n{content}".encode()).hexdigest()
    return f'{content[:-1]}{_CHECK}{check}"}}'


def _content(line: str) -> str:
    return line.rpartition(_CHECK)[0] + "}"


def _unsealed(path: Path) -> bytes:
    """Return what a file of an answer or a note holds before its checksum."""
    sealed = path.read_bytes()
    content, seal = sealed[:-32], sealed[-32:]
    if seal != hashlib.sha256(path.stem.encode() + content).digest():
        raise ValueError(f"{path} is damaged")
    return content
