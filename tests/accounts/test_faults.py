"""Ledgers on real files after kills during a commit, power loss, and flipped bits.

That SQLite syncs its journal before the file, and the file before it ends a commit, is SQLite's
promise; the pragmas it needs for that are tested in test_ledger.py.
"""

import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent

from fed_dpsd.accounts import database
from fed_dpsd.accounts import ledger as ledgers
from fed_dpsd.accounts.database import journal_path, ledger_path
from fed_dpsd.accounts.entry import Entry
from fed_dpsd.accounts.ledger import FileLedger, LedgerError
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS

FORK = multiprocessing.get_context("fork")
COSTS = dict.fromkeys(UNITS_AND_RELATIONS, GaussianDpEvent(50.0))
HOT = bytes.fromhex("d9d505f920a163d7")  # start of a journal that must still be rolled back
PAGE = 4096
HOLDERS = ("ledger.py", "database.py", "storage.py", "contextlib.py")  # whose code holds locks
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # where a sync costs nothing


def entry(number):
    return Entry.now(
        **{"digest": f"{number:064x}", "kind": "answers", "query_id": number, "queries": 5},
        **{"releases": 5, "mechanism": "Möbius", "trust": "nobody", "costs": COSTS},
    )


def answer(number):
    """An answer of less than a page, or of several."""
    return np.random.default_rng(number).normal(size=20 if number % 2 else 1_500)


def opened(folder):
    return FileLedger(folder, 0, "digits")


def fill(folder, *numbers, report=lambda number, what: None):
    file = opened(folder)
    for number in numbers:
        with file.transaction():
            file.charge(entry(number))
            report(number, "charged")
            file.store_answer(f"{number:064x}", answer(number))
            report(number, "stored")
            file.store_note(f"{number % 3}", f"{number}".encode() * 400)


def account(folder):
    """A ledger's full content; an answer or note that it refuses to return counts as refused."""
    file, found = opened(folder), {}
    with file.transaction():
        for each in file.entries():
            found[each.digest] = each.to_json().partition('"at"')[0]
            values = file.stored_answer(each.digest)
            found[each.digest, "answer"] = None if values is None else values.tobytes()
        return found | {name: file.stored_note(name) for name in "012"}


def put(folder, content, journalled=b""):
    """Write a ledger's file, and its journal where there is one; return the folder."""
    folder.mkdir(exist_ok=True)
    path = ledger_path(folder, 0)
    path.write_bytes(content)
    journal_path(path).unlink(missing_ok=True)
    if journalled:
        journal_path(path).write_bytes(journalled)
    return folder


def refused_or(folder, *accounts):
    """Return whether a ledger is refused; otherwise it is one of these accounts."""
    try:
        found = account(folder)
    except LedgerError:
        return True
    assert found in accounts
    return False


@pytest.fixture(scope="module")
def place():
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def whole(place):
    """A ledger's file and account, before and after one more charge with its answer."""
    folder, both = place / "whole", []
    for numbers in (range(7), [8]):
        fill(folder, *numbers)
        both += [ledger_path(folder, 0).read_bytes(), account(folder)]
    return both


# --- bits ---


def test_a_flipped_bit_anywhere_is_an_error_or_changes_nothing(place, whole):
    content, expected, *_ = whole
    rng = np.random.default_rng(0)
    pages = range(0, len(content), PAGE)
    places = [page + offset for page in pages for offset in (0, 1, 3, 5, 8, PAGE - 1)]
    places += [*range(100), *rng.integers(0, len(content), 300)]
    refused = 0
    for spot in places:
        damaged = bytearray(content)
        damaged[spot] ^= 1 << rng.integers(8)
        refused += refused_or(put(place / "damaged", damaged), expected)
    assert refused > len(places) / 2  # the rest is what no ledger uses


def test_a_page_that_is_lost_or_of_another_time_is_an_error(place, whole):
    content, expected, later, after = whole
    rng, refused = np.random.default_rng(1), 0
    for page in range(0, len(content), PAGE):
        for new in (bytes(PAGE), rng.bytes(PAGE), later[page : page + PAGE]):
            damaged = content[:page] + new + content[page + PAGE :]
            refused += refused_or(put(place / "damaged", damaged), expected, after)
        assert refused_or(put(place / "damaged", content[: page + 100]), expected)
        if page:
            assert refused_or(put(place / "damaged", content[:page]), expected)
    assert refused > 2 * len(content) // PAGE


# --- kills and losses of power ---


def _fill_up_to(folder, limit):
    """Charge until the kernel kills the process: at the first byte of a file beyond the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fill(folder, 8)


@pytest.fixture(scope="module")
def torn(place, whole):
    """Files and journals left by processes killed during a commit."""
    found = []
    for limit in range(256, len(whole[2]), PAGE // 2):
        folder = put(place / "torn", whole[0])
        child = FORK.Process(target=_fill_up_to, args=(folder, limit))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGXFSZ
        path = ledger_path(folder, 0)
        journalled = journal_path(path).read_bytes() if journal_path(path).exists() else b""
        found.append((path.read_bytes(), journalled))
    return found


def _charged(whole):
    """The account after the charge whose answer was not stored yet."""
    _, before, _, after = whole
    digest = f"{8:064x}"
    return before | {digest: after[digest], (digest, "answer"): None}


def _stored(whole):
    """The account after the answer, whose note was not written yet."""
    return {name: whole[1].get(name, content) for name, content in whole[3].items()}


@pytest.mark.slow(seconds=5)
def test_a_process_killed_at_any_size_leaves_the_state_before_or_after(place, whole, torn):
    states = (whole[1], _charged(whole), _stored(whole), whole[3])
    hot = 0
    for content, journalled in torn:
        hot += journalled.startswith(HOT) and content != whole[0]
        assert not refused_or(put(place / "left", content, journalled), *states)
        assert not journal_path(ledger_path(place / "left", 0)).exists()
    assert hot > 2  # else no process was killed while it wrote the file


def _fill_for_ever(folder, pipe):
    def report(number, what):
        os.write(pipe, f"{number} {what}\n".encode())

    fill(folder, *range(10_000), report=report)


def test_what_a_killed_process_reported_as_charged_or_stored_is_there(tmp_path):
    rng = np.random.default_rng(3)
    for trial in range(12):
        folder = tmp_path / f"{trial}"
        source, pipe = os.pipe()
        child = FORK.Process(target=_fill_for_ever, args=(folder, pipe))
        child.start()
        os.close(pipe)
        said = os.read(source, 100)
        time.sleep(float(rng.random()) / 20)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        while more := os.read(source, 1 << 16):
            said += more
        os.close(source)
        found = account(folder)
        for line in said.decode().splitlines():
            number, what = line.split()
            digest = f"{int(number):064x}"
            assert digest in found
            if what == "stored":
                assert found[digest, "answer"] == answer(int(number)).tobytes()
        charged = sum(line.endswith("charged") for line in said.decode().splitlines())
        assert charged <= sum(isinstance(name, str) and len(name) == 64 for name in found)
        shutil.rmtree(folder)


def interrupted_at(moment, work, *values):
    """Send Ctrl-C to this process at a line of `work(*values)`; return the lines up to its end."""
    seen = []

    def trace(frame, event, _):
        if event == "line" and Path(frame.f_code.co_filename).name in HOLDERS:
            seen.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            if len(seen) == moment + 1:
                signal.raise_signal(signal.SIGINT)
        return trace

    former = sys.gettrace()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    sys.settrace(trace)
    try:
        work(*values)
    finally:
        sys.settrace(former)
        signal.signal(signal.SIGINT, handler)
    return seen


def locked_out(folder, monkeypatch, step):
    """Interrupt a charge at its lines; yield the lines after which nobody can continue."""
    monkeypatch.setattr(database, "_PATIENCE", 0.0)
    lines = interrupted_at(-1, fill, folder / "whole", 0)
    for moment, line in [*enumerate(lines)][::step]:
        each = folder / f"{moment}"
        try:
            interrupted_at(moment, fill, each, 0)
        except KeyboardInterrupt as error:  # its traceback holds all that the charge held
            try:
                account(each)
            except LedgerError:
                yield f"{line}: {error!r}"
        shutil.rmtree(each, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_of_a_charge_locks_nobody_out(place, monkeypatch, step):
    assert list(locked_out(place / f"interrupted {step}", monkeypatch, step)) == []
    monkeypatch.setattr(ledgers, "uninterrupted", nullcontext)
    monkeypatch.setattr(ledgers, "_CREATING", nullcontext())  # which would wait for ever
    assert any(locked_out(place / f"control {step}", monkeypatch, step))
