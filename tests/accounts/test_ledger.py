"""Ledgers: charges are permanent, and damaged content is rejected."""

import io
import multiprocessing
import os
import re
import resource
import sqlite3
import threading
from contextlib import closing, nullcontext
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    RandomizedResponseDpEvent,
    SelfComposedDpEvent,
)

from fed_dpsd.accounts import database
from fed_dpsd.accounts import ledger as ledgers
from fed_dpsd.accounts.database import ledgers_in, open_connection, read_content, read_ledger
from fed_dpsd.accounts.entry import Entry
from fed_dpsd.accounts.ledger import FileLedger, LedgerError, MemoryLedger
from fed_dpsd.errors import UserError
from fed_dpsd.privacy.accounting import best_bound
from fed_dpsd.privacy.events import (
    BoundedRangeDpEvent,
    ReplacedInSampleDpEvent,
    ShuffledResponseDpEvent,
)
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS
from tests.every import every
from tests.proofs import spent

EVENTS = [
    GaussianDpEvent(0.1 + 0.2),
    LaplaceDpEvent(1e-300),
    RandomizedResponseDpEvent(0.3, 3),
    NonPrivateDpEvent(),
    PoissonSampledDpEvent(1 / 3, GaussianDpEvent(2.0)),
    SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(2.0)), 700),
    ComposedDpEvent([LaplaceDpEvent(2.0), ComposedDpEvent([]), GaussianDpEvent(5)]),
    ReplacedInSampleDpEvent(0.1, 1.5),
    ShuffledResponseDpEvent(0.1, 3, 250),
    BoundedRangeDpEvent(0.05),
]


def entry(digest="a", event=EVENTS[0], releases=5, other=None):
    costs = {
        pair: other if other and pair[0] == "client" else event for pair in UNITS_AND_RELATIONS
    }
    return Entry.now(
        **{"digest": digest, "kind": "answers", "query_id": 1, "queries": 5, "releases": releases},
        **{"mechanism": f"Möbius({digest})", "trust": "nobody", "costs": costs},
    )


def charge(ledger, *digests):
    for digest in digests:
        with ledger.transaction():
            ledger.charge(entry(digest))


def digests(ledger):
    with ledger.transaction():
        return [e.digest for e in ledger.entries()]


def begun(folder):
    """A ledger in a folder, and its file."""
    return FileLedger(folder, 3, "digits"), folder / "client_003.sqlite"


@pytest.fixture
def file(tmp_path):
    return begun(tmp_path)[0]


@pytest.fixture
def path(tmp_path):
    return begun(tmp_path)[1]


@pytest.fixture(params=["memory", "file"])
def ledger(request, file):
    return MemoryLedger() if request.param == "memory" else file


# --- entries --------------------------------------------------------------------------------------


@every("event", EVENTS)
def test_an_entry_comes_back_from_its_line(event):
    made = entry(event=event, other=NonPrivateDpEvent())
    line = made.to_json()
    assert Entry.from_json(line) == made
    assert entry(event=event, releases=0).event("record", "add_remove") == NonPrivateDpEvent()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", made.at)
    assert "\n" not in line


@every("event", [NoOpDpEvent(), ComposedDpEvent([NoOpDpEvent()])])
def test_an_event_of_an_unknown_type_is_never_written(ledger, event):
    with (
        pytest.raises(TypeError, match="not an event that a ledger may hold"),
        ledger.transaction(),
    ):
        ledger.charge(entry(event=event))
    assert digests(ledger) == []


def test_an_event_of_an_unknown_type_is_never_built():
    line = entry().to_json().replace("GaussianDpEvent", "NoOpDpEvent")
    with pytest.raises(KeyError, match="NoOpDpEvent"):
        Entry.from_json(line)


def test_an_entry_must_have_all_costs_and_no_negative_count():
    with pytest.raises(ValueError, match="releases=-1 must be >= 0"):
        entry(releases=-1)
    with pytest.raises(ValueError, match="queries=-1, releases=5 must be >= 0"):
        replace(entry(), queries=-1)
    with pytest.raises(ValueError, match="costs lack.*'client', 'replace_one'"):
        Entry("a", "answers", 1, 5, 5, "", "nobody", {}, "")


def test_spent_is_the_composition_of_all_charges(ledger):
    for number in range(4):
        with ledger.transaction():
            ledger.charge(entry(str(number), GaussianDpEvent(50.0), 128, GaussianDpEvent(25.0)))
    with ledger.transaction():
        entries = ledger.entries()
    for unit, multiplier in [("record", 50.0), ("client", 25.0)]:
        whole = SelfComposedDpEvent(GaussianDpEvent(multiplier), 512)
        for basis in ("training", "answers"):
            all_of_it = spent(entries, unit, "add_remove", basis)
            assert best_bound(all_of_it, 1e-5) == best_bound(whole, 1e-5)


def test_what_is_spent_rests_on_the_trainings_or_on_all_that_left():
    """A covered answer adds nothing to its training, and the training nothing to answers."""
    training = replace(entry("t", GaussianDpEvent(5.0), 1), kind="training")
    covered = replace(entry("c", GaussianDpEvent(50.0), 128), training="t")
    other = entry("o", GaussianDpEvent(20.0), 3)

    def epsilon_of(basis, *entries):
        return best_bound(spent(entries, "record", "add_remove", basis), 1e-5)

    def alone(*parts):
        return best_bound(ComposedDpEvent([SelfComposedDpEvent(*part) for part in parts]), 1e-5)

    large, small = (GaussianDpEvent(5.0), 1), (GaussianDpEvent(50.0), 128)
    uncovered = GaussianDpEvent(20.0), 3
    assert epsilon_of("training", training, covered) == alone(large)
    assert epsilon_of("answers", training, covered) == alone(small)
    assert epsilon_of("training", training, covered, other) == alone(large, uncovered)
    assert epsilon_of("answers", training, covered, other) == alone(small, uncovered)


def test_charges_are_counted_together_only_if_a_budget_counts_them_equally(ledger):
    """Else an answer to one image, or of a private teacher, would stand for all that follow."""
    made = [entry("one", releases=1), entry("more"), replace(entry("covered"), training="t")]
    made += [entry("another", LaplaceDpEvent(5.0)), entry("more again")]
    with ledger.transaction():
        for each in made:
            ledger.charge(each)
        alike = ledger.charges().by_cost()
    assert alike == [(made[0], 1), (made[1], 2), (made[2], 1), (made[3], 1)]


# --- both ledgers ---------------------------------------------------------------------------------


def test_charges_are_kept_in_order(ledger):
    entries = [entry(f"digest{i}", event, i) for i, event in enumerate(EVENTS)]
    for made in entries:
        with ledger.transaction():
            ledger.charge(made)
    with ledger.transaction():
        assert list(ledger.entries()) == entries


@every("dtype", [np.uint8, np.float32, np.float64])
def test_answers_are_stored_by_digest_as_they_were(ledger, dtype):
    values, name = np.eye(3, dtype=dtype), dtype.__name__
    charge(ledger, name)
    with ledger.transaction():
        assert ledger.stored_answer(name) is None
        ledger.store_answer(name, values)
        values[:] = 7
        ledger.stored_answer(name)[:] = 7
        assert (ledger.stored_answer(name) == np.eye(3)).all()
        assert ledger.stored_answer(name).dtype == dtype
        assert ledger.stored_answer("b") is None


def test_a_transaction_waits_for_the_one_before_it(ledger):
    order = []

    def second():
        with ledger.transaction():
            order.append("second")

    with ledger.transaction():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


# --- files ----------------------------------------------------------------------------------------


def test_reading_needs_and_leaves_nothing_but_the_file(tmp_path, file, path):
    charge(file, "a", "b")
    alone = tmp_path / "copy" / "account.sqlite"
    alone.parent.mkdir()
    alone.write_bytes(path.read_bytes())
    alone.chmod(0o400)
    assert [e.digest for e in read_ledger(alone)] == ["a", "b"]
    assert read_content(alone).header == {"format": 2, "data": "digits", "client": 3}
    assert list(alone.parent.iterdir()) == [alone]
    with pytest.raises(LedgerError, match=r"other.sqlite cannot be read"):
        read_ledger(tmp_path / "other.sqlite")
    assert not (tmp_path / "other.sqlite").exists()


def test_a_reader_waits_for_a_writer_and_a_writer_for_a_reader(file, path):
    charge(file, "a")
    with closing(open_connection(path, "ro")) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM charges").fetchone() == (1,)
        writer = threading.Thread(target=charge, args=(file, "b"))
        writer.start()
        writer.join(0.1)
        assert writer.is_alive()
        reader.execute("COMMIT")
    writer.join()
    with file.transaction():
        file.charge(entry("c"))
        found = []
        thread = threading.Thread(target=lambda: found.extend(read_ledger(path)))
        thread.start()
        thread.join(0.1)
        assert not found
    thread.join()
    assert [e.digest for e in found] == ["a", "b", "c"]


def test_a_ledger_that_was_opened_and_never_written_to_belongs_to_nobody(tmp_path, file, path):
    assert digests(file) == []
    assert (read_content(path).header, read_ledger(path)) == ({}, ())
    assert ledgers_in(tmp_path) == {}
    charge(FileLedger(tmp_path, 3, "mnist"), "a")
    assert ledgers_in(tmp_path) == {"client_003": path}


@every("how", ["deleted", "emptied"])
def test_a_ledger_that_is_lost_is_no_new_account(tmp_path, how):
    """The control: without the marker it would be one."""
    file, path = begun(tmp_path)
    charge(file, "a")
    path.unlink()
    if how == "emptied":
        path.touch()
    for use in (
        lambda: digests(file),
        lambda: digests(begun(tmp_path)[0]),
        lambda: read_ledger(path),
        lambda: read_content(path),
    ):
        with pytest.raises(LedgerError, match=r"is missing or empty, .*restore it from a backup"):
            use()
    assert ledgers_in(tmp_path) == {"client_003": path}  # so a card cannot omit it
    path.with_suffix(".created").unlink()
    assert digests(file) == digests(begun(tmp_path)[0]) == []


def test_a_ledger_that_is_lost_while_a_client_waits_for_it_is_no_new_account(
    tmp_path, file, path, monkeypatch
):
    charge(file, "a")

    def late(path):
        path.write_bytes(b"")
        return database.connect(path)

    monkeypatch.setattr(ledgers, "connect", late)
    with pytest.raises(LedgerError, match="is missing or empty"):
        digests(begun(tmp_path)[0])


def test_the_marker_follows_the_first_write_and_is_written_again(tmp_path, file, path):
    assert digests(file) == []
    assert not path.with_suffix(".created").exists()  # nothing is charged yet
    with file.transaction():
        file.store_note("a", b"b")
    path.with_suffix(".created").unlink()  # as after a crash before it was written
    assert digests(FileLedger(tmp_path, 3, "digits")) == []
    assert path.with_suffix(".created").exists()


def test_a_read_of_a_write_that_was_cut_short_names_the_remedy(file, path):
    charge(file, "a")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO notes VALUES ('b', x'00', zeroblob(900000))")
        files = {each: each.read_bytes() for each in (path, database.journal_path(path))}
    for each, content in files.items():
        each.write_bytes(content)
    with pytest.raises(LedgerError, match="cut short; the client's next start repairs it"):
        read_ledger(path)
    assert digests(file) == [entry.digest for entry in read_ledger(path)] == ["a"]


def test_a_ledger_of_other_data_or_another_client_is_an_error(tmp_path, file, path):
    charge(file, "a")
    with pytest.raises(LedgerError, match="account of client 3, data digits, .*not of .*mnist"):
        digests(FileLedger(tmp_path, 3, "mnist"))
    path.rename(tmp_path / "client_004.sqlite")
    with pytest.raises(LedgerError, match="of client 3, .*, not of client 4, "):
        digests(FileLedger(tmp_path, 4, "digits"))


def test_a_ledger_of_another_format_is_an_error_that_names_it(tmp_path, file, path):
    charge(file, "a")
    change(path, "UPDATE account SET format = 3")
    for use in (lambda: digests(FileLedger(tmp_path, 3, "digits")), lambda: read_ledger(path)):
        with pytest.raises(LedgerError, match="has format 3.*only 2; use the version that wrote"):
            use()


def test_new_files_have_the_permissions_that_files_have_here(file, path):
    mask = os.umask(0o027)
    try:
        charge(file, "a")
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_block_that_ends_leaves_no_journal_and_settings_that_guard_it(tmp_path, file, path):
    with file.transaction():
        file.charge(entry("a"))
        found = {
            setting: file._connection.execute(f"PRAGMA {setting}").fetchone()[0]
            for setting in ("synchronous", "foreign_keys", "journal_mode", "locking_mode")
        }
        assert found == {
            "synchronous": 2,  # FULL
            "foreign_keys": 1,
            "journal_mode": "persist",
            "locking_mode": "exclusive",
        }
    assert sorted(tmp_path.iterdir()) == [path.with_suffix(".created"), path]


def change(path, *statements):
    """A change to a ledger made with SQLite's own tools."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


MOVE = "UPDATE charges SET number = {} WHERE number = {}"
DAMAGE = {
    "an edited charge": ["UPDATE charges SET entry = replace(entry, 's\": 5', 's\": 4')"],
    "an edited last charge": [
        "UPDATE charges SET entry = replace(entry, 'nobody', 'server') WHERE number = 3"
    ],
    "an edited header": ["UPDATE account SET client = 4"],
    "another digest": ["UPDATE charges SET digest = 'd' WHERE number = 3"],
    "another space": ["UPDATE charges SET entry = replace(entry, ', ', ',  ')"],
    "no header": ["DELETE FROM account"],
    "a removed charge": ["DELETE FROM charges WHERE number = 2"],
    "a removed last charge": ["DELETE FROM charges WHERE number = 3"],
    "no charge": ["DELETE FROM charges"],
    "a duplicate": ["INSERT INTO charges SELECT 9, 'd', entry, head FROM charges WHERE number = 3"],
    "another order": [MOVE.format(9, 1), MOVE.format(1, 2), MOVE.format(2, 9)],
    "rubbish": ["INSERT INTO charges VALUES (4, 'd', 'rubbish', x'00')"],
    "not text": ["UPDATE charges SET entry = CAST(x'ff' AS TEXT) WHERE number = 2"],
    "a blob": ["UPDATE charges SET entry = x'00' WHERE number = 2"],
    "another chain": ["UPDATE account SET head = x'00'"],
    "a removed answer": ["DELETE FROM answers"],
    "another answer's name": ["UPDATE answers SET name = 'b'"],
    "a removed note": ["DELETE FROM notes"],
    "an older note": ["UPDATE notes SET seal = x'00'"],
    "no table": ["DROP TABLE notes"],
    "other columns": ["ALTER TABLE answers DROP COLUMN seal"],
}


@every("damage", DAMAGE.values())
def test_a_damaged_ledger_answers_nothing_and_names_the_remedy(tmp_path, damage):
    file, path = begun(tmp_path)
    charge(file, "a", "b", "c")
    with file.transaction():
        file.store_answer("a", np.ones(2))
        file.store_note("x", b"1")
    assert digests(begun(tmp_path)[0]) == ["a", "b", "c"]
    change(path, *damage)
    message = r"client_003.sqlite is (corrupt.*restore it from a backup|the account of.*not of)"
    opened = FileLedger(tmp_path, 3, "digits")
    with pytest.raises(LedgerError, match=message), opened.transaction():
        pytest.fail("a damaged ledger let somebody in")
    with pytest.raises(LedgerError, match=message), file.transaction():
        pytest.fail("verified content is trusted although the file has changed")
    with pytest.raises(LedgerError, match=message):
        read_ledger(path)


def test_without_the_chain_an_edited_ledger_would_be_believed(tmp_path, file, path, monkeypatch):
    charge(file, "a", "b", "c")
    monkeypatch.setattr(database, "_link", lambda previous, content: b"")
    other = FileLedger(tmp_path, 4, "digits")
    charge(other, "a", "b", "c")
    change(tmp_path / "client_004.sqlite", *DAMAGE["an edited charge"])
    assert [e.releases for e in read_ledger(tmp_path / "client_004.sqlite")] == [4, 4, 4]


def test_a_ledger_that_lost_its_end_is_found_by_its_answers(tmp_path, file, path):
    charge(file, "a", "b")
    with file.transaction():
        file.store_answer("b", np.ones(2))
    change(path, "DELETE FROM charges WHERE digest = 'b'")
    with pytest.raises(LedgerError, match="lacks the charges of 1 answers.*from a backup"):
        digests(FileLedger(tmp_path, 3, "digits"))


def test_an_answer_needs_its_charge(file):
    with file.transaction(), pytest.raises(LedgerError, match="FOREIGN KEY"):
        file.store_answer("a", np.ones(2))
    charge(file, "a")
    with file.transaction():
        assert file.stored_answer("a") is None


def test_nothing_is_charged_twice(ledger):
    charge(ledger, "a")
    with ledger.transaction(), pytest.raises(ValueError, match="a is already charged"):
        ledger.charge(entry("a"))
    assert digests(ledger) == ["a"]


@every("other", ["x'00'", "NULL", "'text'", "(SELECT content || x'00' FROM notes)"])
def test_a_damaged_answer_is_an_error_and_never_drawn_again(tmp_path, other):
    file, path = begun(tmp_path)
    charge(file, "a", "b")
    with file.transaction():
        file.store_answer("a", np.zeros(2))
        file.store_answer("b", np.ones(2))
        file.store_note("x", b"1")
    change(path, "PRAGMA ignore_check_constraints = ON", "PRAGMA writable_schema = ON")
    if other == "NULL":
        change(path, "DELETE FROM answers WHERE name = 'a'")
    else:
        change(path, f"UPDATE answers SET content = {other} WHERE name = 'a'")
    again = FileLedger(tmp_path, 3, "digits")
    with pytest.raises(LedgerError, match=r"damaged.*backup|corrupt.*backup"), again.transaction():
        again.stored_answer("a")
    if other != "NULL":
        with again.transaction():
            assert again.stored_answer("b").tolist() == [1, 1]


def test_an_answer_is_never_unpickled(tmp_path, file):
    charge(file, "a")
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], object), allow_pickle=True)
    with file.transaction():
        file._keep("answers", "a", pickled.getvalue())
        with pytest.raises(ValueError, match="allow_pickle"):
            file.stored_answer("a")


def test_what_another_process_wrote_is_seen_at_once(tmp_path, file, monkeypatch):
    """Even if the file's size is the same, and its clock too coarse to show the write."""
    monkeypatch.setattr(ledgers, "file_identity", lambda path: (1,))
    other = FileLedger(tmp_path, 3, "digits")
    for number in range(20):
        charge((file, other)[number % 2], str(number))
        with (other, file)[number % 2].transaction():
            found = (other, file)[number % 2]
            assert found.charges().find(str(number))
            found.store_note("last", str(number).encode())
        with file.transaction():
            assert file.stored_note("last") == str(number).encode()


def test_notes_are_replaced(ledger):
    with ledger.transaction():
        assert ledger.stored_note("x") is None
        ledger.store_note("x", b"1")
        ledger.store_note("x", b"2")
    with ledger.transaction():
        assert ledger.stored_note("x") == b"2"


# --- disks ----------------------------------------------------------------------------------------


class Broken:
    """A disk on which SQLite statements that start with certain words fail."""

    def __init__(self, monkeypatch):
        self.fails, connect = (), ledgers.connect
        code = {"sqlite_errorcode": sqlite3.SQLITE_IOERR}

        class Connection:
            def __init__(self, path):
                self.real = connect(path)

            def __getattr__(self, name):
                return getattr(self.real, name)

            def execute(self, statement, *values):
                if statement.startswith(disk.fails):
                    error = sqlite3.OperationalError("disk I/O error")
                    vars(error).update(code)
                    raise error
                return self.real.execute(statement, *values)

        disk = self
        monkeypatch.setattr(ledgers, "connect", Connection)


@every("fails", ["BEGIN", "CREATE", "INSERT", "UPDATE", "COMMIT"])
@every("charged", [0, 1])
def test_a_charge_that_cannot_be_written_is_taken_back(tmp_path, monkeypatch, fails, charged):
    (file, _), disk = begun(tmp_path), Broken(monkeypatch)
    charge(file, *"a"[:charged])
    with file.transaction():
        disk.fails = ("never",) if (fails, charged) == ("CREATE", 1) else (fails,)
        if disk.fails != ("never",):
            with pytest.raises(LedgerError, match=r"003.sqlite cannot be .*written.*free disk"):
                file.charge(entry("b"))
        disk.fails = ("never",)
        assert [e.digest for e in file.entries()] == [*"a"[:charged]]
    charge(file, "c")
    assert digests(file) == [*"a"[:charged], "c"]


@every("fails", ["BEGIN", "INSERT", "UPDATE", "COMMIT"])
def test_an_answer_that_cannot_be_written_is_not_stored(tmp_path, monkeypatch, fails):
    (file, _), disk = begun(tmp_path), Broken(monkeypatch)
    charge(file, "a")
    with file.transaction():
        disk.fails = (fails,)
        with pytest.raises(LedgerError, match=r"003.sqlite cannot be .*written"):
            file.store_answer("a", np.zeros(2))
        disk.fails = ("never",)
        assert file.stored_answer("a") is None
        file.store_answer("a", np.ones(2))
        assert file.stored_answer("a").tolist() == [1, 1]


@every("fails", [(), ("BEGIN",), ("INSERT",), ("INSERT OR REPLACE",), ("UPDATE",), ("COMMIT",)])
@every("charged", [0, 1])
def test_what_is_written_together_is_there_together(tmp_path, monkeypatch, fails, charged):
    """Another process sees the charge and its answer at the end of the block, or neither."""
    (file, path), disk = begun(tmp_path), Broken(monkeypatch)
    charge(file, *"a"[:charged])
    before = path.read_bytes() if charged else b""
    with file.transaction():
        disk.fails = fails or ("never",)
        with pytest.raises(LedgerError) if fails else nullcontext(), file.single_commit():
            file.charge(entry("b"))
            file.store_answer("b", np.ones(2))
            assert path.read_bytes() == before
        disk.fails = ("never",)
        assert [e.digest for e in file.entries()] == [*"a"[:charged], *"b"[bool(fails) :]]
        assert (file.stored_answer("b") is None) == bool(fails)
    assert digests(FileLedger(tmp_path, 3, "digits")) == [*"a"[:charged], *"b"[bool(fails) :]]


def test_an_error_in_a_block_that_writes_together_takes_everything_back(file):
    def fail():
        with file.single_commit():
            file.charge(entry("b"))
            raise KeyError  # which is no sign of a damaged file

    charge(file, "a")
    with file.transaction():
        with pytest.raises(KeyError):
            fail()
        with file.single_commit():
            pass  # writes nothing
        file.charge(entry("c"))
    assert digests(file) == ["a", "c"]


def test_a_first_charge_is_no_charge_before_its_folders_are_durable(tmp_path, monkeypatch):
    synced, fails = [], [True]

    def sync(path):
        if fails[0]:
            raise OSError("Input/output error")
        synced.append(path)

    monkeypatch.setattr(ledgers, "sync", sync)
    folder = tmp_path / "new" / "folder"
    file = FileLedger(folder, 3, "digits")
    with file.transaction():
        with pytest.raises(LedgerError, match="Input/output error"):
            file.charge(entry("a"))
        fails[0] = False
        assert file.entries() == ()
        file.charge(entry("a"))
        assert synced[:3] == [folder, folder.parent, tmp_path]
        synced.clear()
        file.charge(entry("b"))
        assert not synced


def test_a_folder_above_that_nobody_may_read_is_not_in_the_way(tmp_path, file, monkeypatch):
    def sync(path):
        if path == tmp_path.parent:
            raise PermissionError

    monkeypatch.setattr(ledgers, "sync", sync)
    charge(file, "a")
    assert digests(file) == ["a"]


def test_what_a_killed_process_left_is_durable_before_anything_rests_on_it(path, file, monkeypatch):
    """It may have cleared the journal's header without syncing it."""
    charge(file, "a")
    journal, synced = path.with_name(f"{path.name}-journal"), []
    journal.write_bytes(bytes(512))
    monkeypatch.setattr(database, "sync", synced.append)
    with file.transaction():
        assert synced == [journal]
    assert not journal.exists()
    journal.write_bytes(bytes(512))

    def fails(path):
        raise OSError("Input/output error")

    monkeypatch.setattr(database, "sync", fails)
    with pytest.raises(LedgerError, match="Input/output error"), file.transaction():
        pytest.fail("somebody came in")


def _fill(file, limit, looks, reported):
    """Charge on a disk that rejects bytes beyond a limit, and then on a repaired one."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    with file.transaction():
        for write in (
            lambda: file.charge(entry("b")),
            lambda: file.store_answer("b", np.ones(20_000)),
        ):
            try:
                write()
                reported.value += 1
                if looks:
                    file.entries()
            except LedgerError as error:
                if not re.search("free disk space|FOREIGN KEY", str(error)):
                    raise
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    charge(file, "c")


@every("looks", [False, True])
@every("limit", [0, 100, 4096, 12_288, 20_000, 36_864, 60_000, 300_000])
def test_a_full_disk_takes_nothing_back_and_lets_nothing_through(tmp_path, limit, looks):
    """A limit also truncates what a transaction had already written, so its journal is needed."""
    file, _ = begun(tmp_path)
    charge(file, "a")
    context = multiprocessing.get_context("fork")
    reported = context.Value("i")
    child = context.Process(target=_fill, args=(file, limit, looks, reported))
    child.start()
    child.join()
    assert child.exitcode == 0
    charged, stored = reported.value > 0, reported.value > 1
    assert (charged, stored) == (limit >= 20_000, limit == 300_000)
    again = FileLedger(tmp_path, 3, "digits")
    assert digests(again) == [*"ab"[: 1 + charged], "c"]
    with again.transaction():
        assert (again.stored_answer("b") is not None) == stored


def test_on_a_disk_that_is_read_only_nothing_is_charged(file, path, monkeypatch):
    charge(file, "a")
    monkeypatch.setattr(database, "open_connection", lambda path, mode: open_connection(path, "ro"))
    with pytest.raises(LedgerError, match="readonly database.*fix its permissions"):
        charge(file, "b")
    assert len(read_ledger(path)) == 1


def test_a_folder_that_cannot_be_made_is_an_error_a_user_can_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"client_000.sqlite cannot be .*fix its permissions"):
        FileLedger(tmp_path / "file" / "ledger", 0, "digits")


def test_errors_inside_a_transaction_are_raised_unchanged(file):
    with pytest.raises(OSError, match="theirs"), file.transaction():
        raise OSError("theirs")
    charge(file, "a")
