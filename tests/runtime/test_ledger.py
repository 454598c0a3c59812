"""Ledgers: what is charged stays charged, whatever cuts a line short."""

import json

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent, RandomizedResponseDpEvent

from fed_dpsd.config import UserError
from fed_dpsd.privacy.accounting import epsilon
from fed_dpsd.runtime.ledger import Entry, FileLedger, MemoryLedger, spent

EVENTS = [GaussianDpEvent(50.0), RandomizedResponseDpEvent(0.3, 3), NonPrivateDpEvent()]


@pytest.fixture(params=["memory", "file"])
def ledger(request, tmp_path):
    return MemoryLedger() if request.param == "memory" else FileLedger(tmp_path / "ledger", 3)


def test_charges_are_kept_in_order(ledger):
    entries = [Entry(f"digest{i}", i, 10 * i, event) for i, event in enumerate(EVENTS)]
    for entry in entries:
        ledger.charge(entry)
    assert list(ledger.entries()) == entries


def test_spent_is_the_composition_of_all_charges(ledger):
    for number in range(4):
        ledger.charge(Entry(str(number), number, 128, GaussianDpEvent(50.0)))
    whole = Entry("all", 0, 512, GaussianDpEvent(50.0))
    alone = MemoryLedger()
    alone.charge(whole)
    assert epsilon(spent(ledger), 1e-5) == epsilon(spent(alone), 1e-5)


def test_answers_are_stored_by_digest(ledger):
    values = np.eye(3, dtype=np.uint8)
    assert ledger.stored("a") is None
    ledger.store("a", values)
    assert (ledger.stored("a") == values).all()
    assert ledger.stored("b") is None


def test_any_process_sees_the_same_account(tmp_path):
    FileLedger(tmp_path, 0).charge(Entry("a", 1, 5, EVENTS[0]))
    FileLedger(tmp_path, 0).store("a", np.ones((1, 2)))
    other = FileLedger(tmp_path, 0)
    assert [entry.digest for entry in other.entries()] == ["a"]
    assert other.stored("a").tolist() == [[1.0, 1.0]]
    assert FileLedger(tmp_path, 1).entries() == ()


def test_a_line_cut_short_by_a_crash_is_dropped_and_written_over(tmp_path):
    ledger = FileLedger(tmp_path, 0)
    ledger.charge(Entry("a", 1, 5, EVENTS[0]))
    path = tmp_path / "client_000.jsonl"
    path.write_text(path.read_text() + '{"digest": "b", "quer')
    assert [entry.digest for entry in ledger.entries()] == ["a"]
    ledger.charge(Entry("c", 2, 5, EVENTS[1]))
    assert [entry.digest for entry in ledger.entries()] == ["a", "c"]


@pytest.mark.parametrize(
    "line", ["rubbish", "{}", json.dumps({"digest": "a", "event": {"type": "system"}})]
)
def test_a_corrupt_ledger_is_an_error_that_says_what_is_lost(tmp_path, line):
    ledger = FileLedger(tmp_path, 0)
    (tmp_path / "client_000.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"client_000.jsonl is corrupt.*restore it from a backup"):
        ledger.entries()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not writable"):
        FileLedger(tmp_path / "file" / "ledger", 0)
