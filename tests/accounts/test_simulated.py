"""Ledgers of simulated clients: one file, written once per request."""

import sqlite3

import numpy as np
import pytest

from fed_dpsd.accounts import simulated
from fed_dpsd.accounts.database import LedgerError
from fed_dpsd.accounts.secret import ledger_folder
from fed_dpsd.accounts.simulated import SimulatedLedgers, entries_in
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import UserError
from fed_dpsd.server.run import run
from fed_dpsd.server.run_folder import new_run_folder
from tests.accounts.test_ledger import entry
from tests.forks import finished, fork


@pytest.fixture
def opened(tmp_path):
    """Opens the ledgers as another process would."""
    return lambda data="digits", secret=True: SimulatedLedgers(tmp_path / "ledger", data, secret)


def charge(ledgers, client, *digests):
    with ledgers.request():
        for digest in digests:
            ledgers[client].charge(entry(digest))


def digests(ledgers, client):
    with ledgers.request():
        return [each.digest for each in ledgers[client].entries()]


def in_file(tmp_path):
    found = entries_in(tmp_path / "ledger")
    return {path.stem: [each.digest for each in entries] for path, entries in found.items()}


def test_a_request_s_charges_and_notes_are_there_for_the_next_process(opened, tmp_path):
    ledgers = opened()
    charge(ledgers, 1, "a", "b")
    charge(ledgers, 0, "a")
    with ledgers.request():
        ledgers[1].store_note("n", b"old")
        ledgers[1].store_note("n", b"new")
    assert in_file(tmp_path) == {"client_000": ["a"], "client_001": ["a", "b"]}
    other = opened()
    assert (digests(other, 0), digests(other, 1)) == (["a"], ["a", "b"])
    assert (other[1].stored_note("n"), other[0].stored_note("n")) == (b"new", None)
    assert other[1].charges().queries == ledgers[1].charges().queries > 0
    with pytest.raises(ValueError, match="a is already charged"):
        charge(other, 1, "a")


def test_a_request_without_a_charge_writes_nothing(opened, tmp_path):
    assert digests(opened(), 0) == []
    assert list(tmp_path.iterdir()) == []
    assert entries_in(tmp_path / "ledger") == {}


def test_a_client_may_move_to_another_process_between_requests(opened, tmp_path):
    """Also while this process has rows of its own to write, which get higher numbers."""
    one, two = opened(), opened()
    charge(one, 0, "a")
    with one.request():
        one[0].charge(entry("b"))
        charge(two, 1, "c")
        with two.request():
            two[1].store_note("n", b"of two")
    assert digests(one, 1) == ["c"]
    assert one[1].stored_note("n") == b"of two"
    assert digests(two, 0) == ["a", "b"]
    with one.request():
        one[1].store_note("n", b"of one")  # replaces the row with the highest number
    assert digests(two, 1) == ["c"]
    assert two[1].stored_note("n") == b"of one"
    assert in_file(tmp_path) == {"client_000": ["a", "b"], "client_001": ["c"]}


def test_what_was_charged_before_an_error_is_written(opened, tmp_path):
    ledgers = opened()

    def stopped():
        with ledgers.request():
            ledgers[0].charge(entry("a"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert in_file(tmp_path) == {"client_000": ["a"]}


def test_charges_that_could_not_be_written_are_written_later(opened, tmp_path):
    ledgers = opened()
    charge(ledgers, 0, "a")
    path = tmp_path / "ledger" / simulated.FILE
    away = path.rename(tmp_path / "away")
    path.mkdir()
    with pytest.raises(LedgerError, match="cannot be read or written"):
        charge(ledgers, 0, "b")
    path.rmdir()
    away.rename(path)
    charge(ledgers, 0, "c")
    assert in_file(tmp_path) == {"client_000": ["a", "c"]}

    def lose_the_file():
        with ledgers.request():
            ledgers[0].charge(entry("d"))
            path.rename(away)
            path.mkdir()

    with pytest.raises(LedgerError, match="cannot be"):
        lose_the_file()
    path.rmdir()
    away.rename(path)
    charge(ledgers, 0, "e")
    assert in_file(tmp_path) == {"client_000": ["a", "c", "d", "e"]}


def test_another_answer_with_secret_noise_is_an_error(opened):
    """It would get other noise for one charge. Seeded noise guarantees nothing."""
    answer = np.linspace(0, 1, 6).reshape(2, 3)
    for secret in (True, False):
        ledgers = opened(secret=secret)
        with ledgers.request():
            ledgers[int(secret)].store_answer("a", answer)
            assert ledgers[int(secret)].stored_answer("a") is None
        for each in (ledgers, opened(secret=secret)):
            with each.request():
                each[int(secret)].store_answer("a", answer)
            other = np.nextafter(answer, 2)
            if secret:
                with pytest.raises(UserError, match="client 1's answer differs from the one that"):
                    each[int(secret)].store_answer("a", other)
                each[int(secret)].store_answer("a", other, noisy=False)
            else:
                each[int(secret)].store_answer("a", other)


def test_a_large_note_stays_in_the_file(opened):
    large = bytes(range(256)) * 20
    ledgers = opened()
    with ledgers.request():
        ledgers[0].store_note("masked", large)
        assert ledgers[0].stored_note("masked") == large
    for each in (ledgers, opened()):
        with each.request():
            assert each[0].stored_note("masked") == large
            assert each[0].stored_note("other") is None
        assert large not in each[0]._kept.values()


def test_a_file_lost_during_a_run_is_an_error(opened, tmp_path):
    ledgers = opened()
    charge(ledgers, 0, "a")
    (tmp_path / "ledger" / simulated.FILE).unlink()
    with pytest.raises(LedgerError, match="simulated.sqlite is missing; restore it"):
        charge(ledgers, 0, "b")


def test_a_resumed_run_of_another_version_is_refused(small):
    """It would forget charges that are in other files."""
    experiment = small("training=plain", "answers=label")
    folder = new_run_folder(experiment)
    (folder / "ledger").mkdir()
    (folder / "ledger" / "client_000.sqlite").write_bytes(b"x")
    with pytest.raises(UserError, match="holds ledgers of another version of FedDPSD"):
        LocalFederation(experiment, folder)


def test_two_processes_write_at_once(opened, tmp_path):
    def work(client):
        ledgers = opened()
        for number in range(20):
            charge(ledgers, client, f"{number}")

    children = [fork(lambda n=n: work(n), tmp_path / f"log{n}") for n in (0, 1)]
    assert [finished(child) for child in children] == [0, 0]
    whole = [f"{number}" for number in range(20)]
    assert in_file(tmp_path) == {"client_000": whole, "client_001": whole}


def test_ledgers_of_other_records_and_damaged_ones_are_errors(opened, tmp_path):
    charge(opened(), 0, "a")
    with pytest.raises(LedgerError, match="is the account of digits, not of mnist: restore that"):
        digests(opened("mnist"), 0)
    assert digests(opened(), 0) == ["a"]  # the control
    path = tmp_path / "ledger" / simulated.FILE
    with sqlite3.connect(path) as database:
        database.execute("UPDATE kept SET content = x'7b'")
    for use in (lambda: digests(opened(), 0), lambda: entries_in(tmp_path / "ledger")):
        with pytest.raises(LedgerError, match="is corrupt"):
            use()
    path.write_bytes(b"x" * 4096)
    with pytest.raises(LedgerError, match="is corrupt"):
        digests(opened(), 0)


@pytest.mark.parametrize(
    ("noise", "settings"),
    [
        ("seeded", ("training=plain", "answers=label")),
        ("secure", ("training=plain", "answers=gradient")),
        ("secure", ("training=dp_sgd", "training.steps=2", "answers=probabilities")),
    ],
    ids=["labels", "gradients", "private training"],
)
def test_a_request_whose_charges_were_lost_is_charged_once_and_draws_the_same(
    small, monkeypatch, caplog, noise, settings
):
    """The process dies after clients have answered, before their charges are in the file."""
    experiment = small(*settings, f"noise={noise}", "rounds=2")
    outcomes, secrets = [], []
    for dies_at in (None, 0, 1):
        folder = new_run_folder(experiment)
        private = ledger_folder(experiment, folder)
        if secrets:
            (private / "secret").write_bytes(secrets[0])
        elif noise == "secure":
            secrets.append((private / "secret").read_bytes())

        def go(folder=folder):
            return run(experiment, LocalFederation(experiment, folder), folder, lambda line: None)

        if dies_at is not None:
            exchange, calls = SimulatedLedgers._exchange, []

            def die(ledgers, exchange=exchange, calls=calls, dies_at=dies_at):
                if ledgers.unwritten:
                    if len(calls) == dies_at:
                        raise KeyboardInterrupt
                    calls.append(ledgers)
                exchange(ledgers)

            with monkeypatch.context() as patch:
                patch.setattr(SimulatedLedgers, "_exchange", die)
                with pytest.raises(KeyboardInterrupt):
                    go()
            assert len({len(own) for own in entries_in(private).values()}) == (dies_at > 0)
        summary = go()
        assert all(
            row["epsilon"] == row["planned"] == row["spent"] for row in summary["privacy"]["proven"]
        )
        charged = [len(entries) for entries in entries_in(private).values()]
        outcomes.append((summary["student_sha256"], charged))
    assert outcomes == [outcomes[0]] * 3
    assert "older state" not in caplog.text
