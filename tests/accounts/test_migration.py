"""A ledger that version 0.1 wrote: three runs of labels, secure sums and a private training."""

import hashlib
import json
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fed_dpsd.accounts import ledger as ledgers
from fed_dpsd.accounts import migration
from fed_dpsd.accounts.card import account, ledger_files
from fed_dpsd.accounts.database import journal
from fed_dpsd.accounts.entry import Entry
from fed_dpsd.accounts.ledger import FileLedger, LedgerError
from fed_dpsd.accounts.reading import header, read
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS

FORMER = Path(__file__).parent / "ledger_format_1"
DATA = json.loads((FORMER / "client_000.jsonl").read_text().splitlines()[0])["data"]
# What version 0.1 printed for this ledger: `fed-dpsd privacy ledger --json`.


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FORMER, tmp_path / "ledger")


def content(folder):
    """All that a ledger in format 1 holds."""
    return migration.load(folder / "client_000.jsonl")


def charges(folder):
    """The charges of a ledger in format 1, of which none names a training that covers it."""
    found = [Entry.from_json(line) for line in content(folder).charges]
    assert not any(entry.training for entry in found)
    return found


def moved_lines(folder):
    """The lines of charges that a moved ledger holds, as they are."""
    with closing(sqlite3.connect(folder / "client_000.sqlite")) as connection:
        rows = connection.execute("SELECT entry FROM charges ORDER BY number").fetchall()
    return [line for (line,) in rows]


def opened(folder):
    file = FileLedger(folder, 0, DATA)
    with file.transaction():
        pass
    return file


def test_everything_is_moved(folder):
    before = content(FORMER)
    file = opened(folder)
    with file.transaction():
        assert list(file.entries()) == charges(FORMER)
        for digest, npy in before.answers.items():
            path = folder / f"{digest}.npy"
            path.write_bytes(npy)
            assert np.array_equal(file.stored(digest), np.load(path))
        assert len(before.notes) > 3
        for name, note in before.notes.items():
            assert file.noted(name) == note
    assert moved_lines(folder) == list(before.charges)
    entries = read(folder / "client_000.sqlite")
    proofs = [account(entries, 1e-5, *pair) for pair in UNITS_AND_RELATIONS]
    spent = [next(iter(found.values())).to_json() for found in proofs]
    # One of its answers was charged without a release, so nothing is proven of all together.
    assert [found["epsilon"] for found in spent] == ["inf"] * len(UNITS_AND_RELATIONS)
    assert header(folder / "client_000.sqlite") == {"format": 2, "data": DATA, "client": 0}


def test_what_was_charged_is_not_charged_again(folder):
    file = opened(folder)
    with file.transaction(), pytest.raises(ValueError, match="is charged already"):
        file.charge(file.entries()[0])
    assert len(read(folder / "client_000.sqlite")) == len(content(FORMER).charges)


def test_the_old_file_is_kept_and_no_version_goes_on_with_it(folder):
    opened(folder)
    kept = folder / "client_000.jsonl.before-sqlite"
    assert kept.read_bytes() == (FORMER / "client_000.jsonl").read_bytes()
    (line,) = (folder / "client_000.jsonl").read_text().splitlines()
    assert json.loads(line)["format"] == 2  # version 0.1 reads format 1 only
    with pytest.raises(LedgerError, match=r"is .*sqlite now; read that one"):
        read(folder / "client_000.jsonl")


def test_an_old_ledger_is_read_without_being_moved(folder):
    (path,) = ledger_files(folder)
    assert path.suffix == ".jsonl"
    assert list(read(path)) == charges(FORMER)
    assert not (folder / "client_000.sqlite").exists()
    opened(folder)
    assert [path.suffix for path in ledger_files(folder)] == [".sqlite"]


def test_a_moved_ledger_that_is_gone_is_no_new_account(folder):
    opened(folder)
    (folder / "client_000.sqlite").unlink()
    with pytest.raises(LedgerError, match="is gone"):
        opened(folder)


def test_a_ledger_that_began_here_is_no_empty_account_to_an_older_version(tmp_path):
    file = FileLedger(tmp_path, 0, DATA)
    with file.transaction():
        pass
    assert not (tmp_path / "client_000.jsonl").exists()  # nothing is charged yet
    with file.transaction():
        file.note("a", b"b")
    (line,) = (tmp_path / "client_000.jsonl").read_text().splitlines()
    assert json.loads(line)["format"] == 2  # version 0.1 reads format 1 only
    (tmp_path / "client_000.jsonl").unlink()  # as after a crash before it was written
    opened(tmp_path)
    assert (tmp_path / "client_000.jsonl").read_text() == f"{line}\n"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", ".sqlite"]
    (tmp_path / "client_000.sqlite").unlink()
    with pytest.raises(LedgerError, match=r"is gone, .*restore it from a backup"):
        opened(tmp_path)


def test_what_an_older_version_began_beside_a_ledger_is_not_put_out_of_use(folder, tmp_path):
    """It began after this version looked, and before this one's first charge."""
    other = tmp_path / "other"
    file = FileLedger(other, 0, DATA)
    with file.transaction():
        shutil.copytree(folder, other, dirs_exist_ok=True)
        file.note("a", b"b")
    before = (folder / "client_000.jsonl").read_bytes()
    assert (other / "client_000.jsonl").read_bytes() == before
    with pytest.raises(LedgerError, match="holds what the ledger .* lacks"), file.transaction():
        pytest.fail("it was let in")


def test_what_an_older_version_wrote_since_is_not_forgotten(folder):
    file = opened(folder)
    lines = (FORMER / "client_000.jsonl").read_text().splitlines()
    entry = json.loads(migration._content(lines[-1])) | {"digest": "0" * 64}
    more = migration._seal(lines[-1], json.dumps(entry))
    (folder / "client_000.jsonl").write_text("\n".join([*lines, more, ""]))
    with pytest.raises(LedgerError, match="an older version of FedDPSD wrote there since"):
        opened(folder)
    with file.transaction():
        assert len(file.entries()) == len(lines) - 1


@pytest.mark.parametrize("damage", ["a byte of a charge", "a byte of an answer", "no charges"])
def test_a_damaged_ledger_is_not_moved(folder, damage):
    path = folder / "client_000.jsonl"
    if damage == "a byte of an answer":
        path = next((folder / "client_000").glob("*.npy"))
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text.splitlines()[0] + b"\n" if damage == "no charges" else text)
    with pytest.raises(LedgerError, match=r"corrupt.*backup"):
        opened(folder)
    assert not (folder / "client_000.sqlite").exists()


def test_a_ledger_of_other_data_is_not_moved(folder):
    with (
        pytest.raises(LedgerError, match="is the account of"),
        FileLedger(folder, 0, "other data").transaction(),
    ):
        pytest.fail("it was let in")
    assert not (folder / "client_000.sqlite").exists()


def hot_journal(tmp_path):
    """A database in its first write, cut short: its bytes, and its journal's."""
    path = tmp_path / "cut.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE large (content BLOB)")
        connection.execute("INSERT INTO large VALUES (zeroblob(900000))")
        return path.read_bytes(), journal(path).read_bytes()


@pytest.mark.parametrize("left", ["nothing in it", "a first write cut short", "its journal alone"])
def test_what_a_killed_process_left_beside_an_old_ledger_does_not_stop_the_move(
    folder, tmp_path, left
):
    database, hot = hot_journal(tmp_path)
    assert database
    assert hot
    path = folder / "client_000.sqlite"
    if left != "its journal alone":
        path.write_bytes(b"" if left == "nothing in it" else database)
    if left != "nothing in it":
        journal(path).write_bytes(hot)
    before = content(FORMER)
    for _ in range(2):
        file = opened(folder)
        with file.transaction():
            assert [entry.to_json() for entry in file.entries()] == list(before.charges)


def test_a_read_of_a_write_that_was_cut_short_says_who_mends_it(folder, tmp_path):
    opened(folder)
    path = folder / "client_000.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        connection.execute("UPDATE notes SET content = zeroblob(900000)")
        files = {each: each.read_bytes() for each in (path, journal(path))}
    for each, bytes_then in files.items():
        each.write_bytes(bytes_then)
    with pytest.raises(LedgerError, match="cut short; the client's next start mends it"):
        read(path)
    opened(folder)
    assert read(path)


def notes_only(folder):
    """What version 0.1 left where it was killed before its first charge."""
    for path in (folder / "client_000").glob("*.npy"):
        path.unlink()
    (folder / "client_000.jsonl").unlink()
    return folder


def test_an_account_of_notes_alone_is_moved_and_a_crash_locks_nobody_out(folder, monkeypatch):
    notes = dict(content(notes_only(folder)).notes)
    assert notes
    with monkeypatch.context() as patch:
        patch.setattr(ledgers.os, "replace", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            opened(folder)
    file = opened(folder)
    with file.transaction():
        assert {name: file.noted(name) for name in notes} == notes
    assert not (folder / "client_000.jsonl.before-sqlite").exists()  # there was no such file


@pytest.mark.parametrize("how", ["deleted", "emptied"])
def test_a_ledger_that_is_gone_is_no_new_account_to_who_held_it(folder, how):
    file, path = opened(folder), folder / "client_000.sqlite"
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes(b"")
    with pytest.raises(LedgerError, match="is gone"), file.transaction():
        pytest.fail("it was let in")


def test_processes_that_move_an_account_wait_for_an_older_version_and_for_each_other(folder):
    former = folder / "client_000.jsonl"
    lines = former.read_text().splitlines()
    entry = json.loads(migration._content(lines[-1])) | {"digest": "0" * 64}
    found = []

    def move():
        file = opened(folder)
        with file.transaction():
            found.append([each.digest for each in file.entries()])

    threads = [threading.Thread(target=move) for _ in range(3)]
    with migration.held(former):  # as version 0.1 does while it answers
        for thread in threads:
            thread.start()
        threads[0].join(0.2)
        assert not found
        more = migration._seal(lines[-1], json.dumps(entry))
        former.write_text("\n".join([*lines, more, ""]))
    for thread in threads:
        thread.join()
    assert [digests[-1] for digests in found] == ["0" * 64] * 3
    assert len({len(digests) for digests in found}) == 1


def test_a_note_that_an_older_version_changed_since_is_not_forgotten(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(migration, "supersede", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            opened(folder)
    note = next((folder / "client_000").glob("*.note"))
    note.write_bytes(b"other" + hashlib.sha256(note.stem.encode() + b"other").digest())
    with pytest.raises(LedgerError, match="an older version of FedDPSD wrote there since"):
        opened(folder)


class Killed(BaseException):
    """A process is gone."""


def test_a_crash_anywhere_leaves_the_old_ledger_or_the_whole_new_one(folder, monkeypatch, tmp_path):
    """Each statement, rename and write of the move is the last once; a second move succeeds."""
    left = [0]

    def step():
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    class Connection:
        def __init__(self, path):
            self.real, self.path = connect(path), path

        def execute(self, *arguments):
            step()
            return self.real.execute(*arguments)

        def close(self):
            files = {p: p.read_bytes() for p in (self.path, journal(self.path)) if p.exists()}
            self.real.close()
            for path, old in files.items() if left[0] <= 0 else ():
                path.write_bytes(old)

    def stepping(work):
        def call(*arguments):
            step()
            return work(*arguments)

        return call

    connect = ledgers.connect
    expected = content(FORMER)
    survived, at = False, 0
    while not survived:
        at += 1
        place = shutil.copytree(FORMER, tmp_path / str(at))
        left[0] = at
        with monkeypatch.context() as patch:
            patch.setattr(ledgers, "connect", Connection)
            patch.setattr(ledgers.os, "replace", stepping(ledgers.os.replace))
            patch.setattr(migration, "write_atomically", stepping(migration.write_atomically))
            try:
                opened(place)
                survived = left[0] > 0
            except Killed:
                pass
        assert list(read(ledger_files(place)[0])) == charges(FORMER)
        file = opened(place)
        with file.transaction():
            assert list(file.entries()) == charges(FORMER)
            assert all(file.noted(name) == note for name, note in expected.notes.items())
            assert all(file.stored(digest) is not None for digest in expected.answers)
        assert moved_lines(place) == list(expected.charges)
    assert at > 40


def test_a_move_that_leaves_out_a_charge_is_noticed(folder, monkeypatch):
    """The control: the checks above can fail."""
    build = FileLedger._build

    def careless(self, found):
        build(self, migration.Moved(found.header, found.charges[1:], {}, found.notes))

    monkeypatch.setattr(FileLedger, "_build", careless)
    opened(folder)
    assert list(read(folder / "client_000.sqlite")) != charges(FORMER)
    assert moved_lines(folder) != list(content(FORMER).charges)
    with sqlite3.connect(folder / "client_000.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM charges").fetchone()[0] > 0
