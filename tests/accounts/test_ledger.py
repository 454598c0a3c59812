"""Ledgers: what is charged stays charged, and what is damaged is not believed."""

import errno
import io
import json
import multiprocessing
import os
import re
import signal
import threading

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

from fed_dpsd.accounts import ledger as ledgers
from fed_dpsd.accounts.entry import Entry, spent
from fed_dpsd.accounts.ledger import FileLedger, LedgerError, MemoryLedger, header, read
from fed_dpsd.config import UserError
from fed_dpsd.privacy.accounting import epsilon
from fed_dpsd.privacy.events import ReplacedInSampleDpEvent, ShuffledResponseDpEvent
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS

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


@pytest.fixture
def file(tmp_path):
    return FileLedger(tmp_path, 3, "digits")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "client_003.jsonl"


@pytest.fixture(params=["memory", "file"])
def ledger(request, file):
    return MemoryLedger() if request.param == "memory" else file


# --- entries --------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_entry_comes_back_from_its_line(event):
    made = entry(event=event, other=NonPrivateDpEvent())
    line = made.to_json()
    assert Entry.from_json(line) == made
    assert "\n" not in line


def test_an_entry_says_when_it_was_made_in_utc():
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry().at)


def test_a_line_holds_each_distinct_event_once_and_what_it_is_the_cost_of():
    costs = json.loads(entry(event=EVENTS[1], other=EVENTS[0]).to_json())["costs"]
    assert costs == {
        "record add_remove, record replace_one, patient add_remove, patient replace_one": {
            "type": "LaplaceDpEvent",
            "noise_multiplier": 1e-300,
        },
        "client add_remove, client replace_one": {
            "type": "GaussianDpEvent",
            "noise_multiplier": 0.1 + 0.2,
        },
    }


@pytest.mark.parametrize("event", [NoOpDpEvent(), ComposedDpEvent([NoOpDpEvent()])])
def test_an_event_of_an_unknown_type_is_never_written(file, path, event):
    with pytest.raises(TypeError, match="not an event that a ledger may hold"), file.transaction():
        file.charge(entry(event=event))
    assert not path.exists()


def test_an_event_of_an_unknown_type_is_never_built():
    line = entry().to_json().replace("GaussianDpEvent", "NoOpDpEvent")
    with pytest.raises(KeyError, match="NoOpDpEvent"):
        Entry.from_json(line)


def test_an_entry_must_have_all_costs_and_no_negative_count():
    with pytest.raises(ValueError, match="releases=-1 must be >= 0"):
        entry(releases=-1)
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
        assert epsilon(spent(entries, unit, "add_remove"), 1e-5) == epsilon(whole, 1e-5)


# --- both ledgers ---------------------------------------------------------------------------------


def test_charges_are_kept_in_order(ledger):
    entries = [entry(f"digest{i}", event, i) for i, event in enumerate(EVENTS)]
    for made in entries:
        with ledger.transaction():
            ledger.charge(made)
    with ledger.transaction():
        assert list(ledger.entries()) == entries


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_answers_are_stored_by_digest_as_they_were(ledger, dtype):
    values = np.eye(3, dtype=dtype)
    charge(ledger, "a")
    with ledger.transaction():
        assert ledger.stored("a") is None
        ledger.store("a", values)
        values[:] = 7
        ledger.stored("a")[:] = 7
        assert (ledger.stored("a") == np.eye(3)).all()
        assert ledger.stored("a").dtype == dtype
        assert ledger.stored("b") is None


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


def test_any_process_sees_the_same_account(tmp_path, file):
    charge(file, "a")
    with file.transaction():
        file.store("a", np.ones((1, 2)))
    other = FileLedger(tmp_path, 3, "digits")
    assert digests(other) == ["a"]
    with other.transaction():
        assert other.stored("a").tolist() == [[1.0, 1.0]]
    assert digests(FileLedger(tmp_path, 1, "digits")) == []


def test_a_process_waits_for_the_lock_and_gets_it_when_the_holder_dies(file):
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), threading.Event()

    def hold():
        with file.transaction():
            held.set()
            signal.pause()

    holder = context.Process(target=hold)
    holder.start()
    held.wait()
    waiter = threading.Thread(target=lambda: (charge(file, "a"), release.set()))
    waiter.start()
    assert not release.wait(0.1)
    os.kill(holder.pid, signal.SIGKILL)
    assert release.wait(10)
    holder.join()
    waiter.join()


def test_reading_needs_and_leaves_nothing_but_the_file(tmp_path, file, path):
    charge(file, "a", "b")
    alone = tmp_path / "copy" / "account.jsonl"
    alone.parent.mkdir()
    alone.write_bytes(path.read_bytes())
    assert [e.digest for e in read(alone)] == ["a", "b"]
    assert header(alone) == {"format": 1, "data": "digits", "client": 3}
    assert list(alone.parent.iterdir()) == [alone]
    with pytest.raises(LedgerError, match=r"other.jsonl cannot be read"):
        read(tmp_path / "other.jsonl")


def test_a_ledger_of_other_data_or_another_client_is_an_error(tmp_path, file, path):
    charge(file, "a")
    with pytest.raises(LedgerError, match="account of .*'digits', 'client': 3}, not of .*'mnist'"):
        digests(FileLedger(tmp_path, 3, "mnist"))
    path.rename(tmp_path / "client_004.jsonl")
    with pytest.raises(LedgerError, match="'client': 3}, not of .*'client': 4}"):
        digests(FileLedger(tmp_path, 4, "digits"))


def test_a_ledger_of_another_format_is_an_error_that_names_it(tmp_path, file, monkeypatch):
    monkeypatch.setattr(ledgers, "_FORMAT", 2)
    charge(FileLedger(tmp_path, 3, "digits"), "a")
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="has format 2.*use the version that wrote it"):
        digests(file)


@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_a_line_cut_short_by_a_crash_is_dropped_and_written_over(file, path, kept):
    charge(file, "a")
    before = path.read_bytes()
    charge(file, "b")
    cut = path.read_bytes()[len(before) : kept if kept < 0 else len(before) + kept]
    path.write_bytes(before + cut)
    assert digests(file) == ["a"]
    charge(file, "c")
    assert digests(file) == ["a", "c"]


@pytest.mark.parametrize("kept", [0, 1, -1])
def test_a_header_cut_short_by_a_crash_is_written_again(file, path, kept):
    charge(file, "a")
    path.write_bytes(path.read_bytes().split(b"\n")[0][:kept])
    assert header(path) == {}
    charge(file, "b")
    assert digests(file) == ["b"]
    assert header(path)["data"] == "digits"


def edited(lines):
    return [*lines[:2], lines[2].replace('"releases": 5', '"releases": 4'), *lines[3:]]


DAMAGE = {
    "an edited line": edited,
    "an edited last line": lambda lines: [*lines[:-1], lines[-1].replace("nobody", "server")],
    "an edited header": lambda lines: [lines[0].replace("digits", "mnist"), *lines[1:]],
    "another space": lambda lines: [*lines[:2], lines[2].replace(", ", ",  ", 1), *lines[3:]],
    "no header": lambda lines: lines[1:],
    "a removed line": lambda lines: [*lines[:2], *lines[3:]],
    "a duplicate": lambda lines: [*lines[:2], lines[1], *lines[2:]],
    "another order": lambda lines: [lines[0], lines[2], lines[1], lines[3]],
    "an empty line": lambda lines: [*lines, ""],
    "rubbish": lambda lines: [*lines, "rubbish"],
    "not ASCII": lambda lines: [*lines[:2], "é", *lines[2:]],
    "no object": lambda lines: [ledgers._seal("", "[]")],
    "an entry that is none": lambda lines: [lines[0], ledgers._seal(lines[0], '{"digest": "a"}')],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_ledger_answers_nothing_and_says_what_to_do(file, path, damage):
    charge(file, "a", "b", "c")
    lines = path.read_text().split("\n")[:-1]
    assert len(lines) == 4
    path.write_text("".join(f"{line}\n" for line in damage(lines)))
    message = r"client_003.jsonl is corrupt.*restore it from a backup"
    with pytest.raises(LedgerError, match=message):
        read(path)
    with pytest.raises(LedgerError, match=message), file.transaction():
        pytest.fail("a damaged ledger let somebody in")


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_a_ledger_that_lost_its_end_is_found_by_its_answers(file, path, lines):
    charge(file, "a", "b")
    with file.transaction():
        file.store("b", np.ones(2))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
    with pytest.raises(LedgerError, match="lacks the charges of 1 answers.*newer backup"):
        digests(file)
    path.unlink()
    with pytest.raises(LedgerError, match="lacks the charges of 1 answers"):
        digests(file)


def test_a_damaged_answer_is_an_error_and_never_drawn_again(tmp_path, file):
    charge(file, "a", "b")
    with file.transaction():
        file.store("a", np.zeros(2))
        file.store("b", np.ones(2))
    answer, other = (tmp_path / "client_003" / f"{digest}.npy" for digest in "ab")
    whole = answer.read_bytes()
    flipped = bytearray(whole)
    flipped[-40] ^= 1
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], object), allow_pickle=True)
    for content in (flipped, whole[:-1], b"", whole + b"\0", other.read_bytes()):
        answer.write_bytes(content)
        with file.transaction(), pytest.raises(LedgerError, match=r"a.npy is damaged.*backup"):
            file.stored("a")
    answer.write_bytes(ledgers._seal_answer("a", pickled.getvalue()))
    with file.transaction(), pytest.raises(ValueError, match="allow_pickle"):
        file.stored("a")


def test_an_answer_can_be_opened_as_any_npy_file(tmp_path, file):
    charge(file, "a")
    with file.transaction():
        file.store("a", np.arange(4))
    assert np.load(tmp_path / "client_003" / "a.npy").tolist() == [0, 1, 2, 3]


# --- disks ----------------------------------------------------------------------------------------


class Disk:
    """The `os` that the ledger sees: it writes down what becomes durable, and may fail."""

    def __init__(self, fails=""):
        self.fails, self.synced, self.paths = fails, [], {}

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, *arguments):
        if path == self.fails:
            raise PermissionError(errno.EACCES, "Permission denied")
        file = os.open(path, *arguments)
        self.paths[file] = path
        return file

    def write(self, file, content):
        if self.fails == "write":
            os.write(file, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(file, content[: max(1, len(content) // 2)])

    def fsync(self, file):
        if self.fails in ("fsync", self.paths[file].suffix or "folder"):
            raise OSError(errno.EIO, "Input/output error")
        self.synced.append((self.paths[file], os.fstat(file).st_size))

    def replace(self, old, new):
        if self.fails == "replace":
            raise OSError(errno.EROFS, "Read-only file system")
        self.synced.append(("replaced", old))
        os.replace(old, new)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(ledgers, "os", disk)
    return disk


def test_a_charge_is_durable_when_it_returns_and_so_are_the_folders_above_it(tmp_path, disk):
    folder = tmp_path / "new" / "folder"
    file = FileLedger(folder, 3, "digits")
    path = folder / "client_003.jsonl"
    with file.transaction():
        disk.synced.clear()
        file.charge(entry("a"))
        names = [name for name, _ in disk.synced]
        assert names[:4] == [path, folder, folder.parent, tmp_path]  # a header, before any charge
        assert disk.synced[-1] == (path, path.stat().st_size)
        disk.synced.clear()
        file.charge(entry("b"))
        assert disk.synced == [(path, path.stat().st_size)]


def test_an_answer_is_durable_before_it_has_its_name_and_then_so_is_the_name(tmp_path, disk):
    file = FileLedger(tmp_path, 3, "digits")
    charge(file, "a")
    answers = tmp_path / "client_003"
    with file.transaction():
        disk.synced.clear()
        file.store("a", np.ones(2))
    temporary, size = disk.synced[0]
    assert temporary.parent == answers
    assert size == (answers / "a.npy").stat().st_size
    assert [name for name, _ in disk.synced[1:]] == ["replaced", answers]
    assert [name.name for name in answers.iterdir()] == ["a.npy"]


def test_what_a_killed_process_left_is_durable_before_anything_rests_on_it(path, disk, file):
    charge(file, "a")
    disk.synced.clear()
    with file.transaction():
        assert [name for name, _ in disk.synced] == [path, path.with_suffix("")]


@pytest.mark.parametrize("fails", ["write", "fsync"])
@pytest.mark.parametrize("charged", [0, 1])
def test_a_charge_that_cannot_be_written_is_taken_back(file, path, disk, fails, charged):
    charge(file, *"a"[:charged])
    size = path.stat().st_size if charged else 0
    with file.transaction():
        disk.fails = fails
        with pytest.raises(LedgerError, match=r"003.jsonl cannot be .*written.*free disk space"):
            file.charge(entry("b"))
    assert path.stat().st_size == size
    disk.fails = ""
    charge(file, "c")
    assert digests(file) == [*"a"[:charged], "c"]


def test_a_first_charge_is_no_charge_before_its_folder_is_durable(file, disk):
    with file.transaction():
        disk.fails = "folder"
        with pytest.raises(LedgerError, match="Input/output error"):
            file.charge(entry("a"))
        disk.fails = ""
        assert file.entries() == ()


def test_a_folder_above_that_nobody_may_read_is_not_in_the_way(tmp_path, file, disk):
    disk.fails = tmp_path.parent
    charge(file, "a")
    assert digests(file) == ["a"]


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_an_answer_that_cannot_be_written_is_not_stored(file, disk, fails):
    charge(file, "a")
    with file.transaction():
        disk.fails = fails
        with pytest.raises(LedgerError, match=r"003.jsonl cannot be .*written"):
            file.store("a", np.zeros(2))
        disk.fails = ""
        assert file.stored("a") is None
        file.store("a", np.ones(2))
        assert file.stored("a").tolist() == [1, 1]


def test_an_answer_whose_name_may_not_last_is_an_error_and_later_the_answer(file, disk):
    charge(file, "a")
    with file.transaction():
        disk.fails = "folder"
        with pytest.raises(LedgerError, match="Input/output error"):
            file.store("a", np.zeros(2))
    with pytest.raises(LedgerError, match="Input/output error"), file.transaction():
        pytest.fail("somebody came in")
    disk.fails = ""
    with file.transaction():
        assert file.stored("a").tolist() == [0, 0]


def test_a_disk_that_fails_to_sync_lets_nobody_in(file, disk):
    charge(file, "a")
    disk.fails = "fsync"
    with pytest.raises(LedgerError, match="Input/output error"), file.transaction():
        pytest.fail("somebody came in")


def test_a_folder_that_cannot_be_made_is_an_error_a_user_can_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"client_000.jsonl cannot be .*mend its permissions"):
        FileLedger(tmp_path / "file" / "ledger", 0, "digits")


def test_an_error_of_whoever_holds_the_ledger_is_their_own(file):
    with pytest.raises(OSError, match="theirs"), file.transaction():
        raise OSError("theirs")
    charge(file, "a")


# --- earlier versions ---

# A ledger as version 0.1.0 wrote it, before entries named their run.
WITHOUT_RUNS = (
    '{"format": 1, "data": "digits, client 0 of 5 by Dirichlet(seed=0, alpha=0.5, self_bala'
    'ncing=False, min_partition_size=10)", "client": 0, "check": "bc5e23894c44385cc5dbaf8a3'
    'd2d3a2d47acc831280a6818f4d310e3d6583455"}\n{"digest": "2af9738c3ca421b80de372ae0030de8d'
    '25ba9f9a670fe2d6f599a84bc078b703", "kind": "answers", "query_id": 1, "queries": 256, "'
    'releases": 256, "mechanism": "TopKRandomizedResponse(num_classes=10, epsilon_per_answe'
    "r=10.0, k=None, threshold=None, noise_at='client', quorum=None, shards=Shards(teachers"
    '=1, by=\'record\'))", "trust": "nobody", "costs": {"record add_remove, record replace_on'
    'e, patient add_remove, patient replace_one, client add_remove, client replace_one": {"'
    'type": "RandomizedResponseDpEvent", "noise_parameter": 0.0004538138695646172, "num_buc'
    'kets": 10}}, "at": "2026-11-23T05:40:23Z", "ask": "d365fbb49aed72961b5d4cb2cb250ad48f0'
    '4332d6aa74ac3c4c6cb31a2d5f945", "check": "02ff9d78b364482e8dc2ecf41ee5cd528112233c0a20'
    '46c1ca379e78a03e0475"}\n'
)


def test_a_ledger_whose_entries_name_no_run_is_read_and_continued(tmp_path):
    path = tmp_path / "client_000.jsonl"
    path.write_text(WITHOUT_RUNS)
    ledger = FileLedger(tmp_path, 0, header(path)["data"])
    charge(ledger, "ab" * 32)
    first, second = read(path)
    assert (first.run, first.releases, second.digest) == ("", 256, "ab" * 32)
    assert path.read_text().startswith(WITHOUT_RUNS)
