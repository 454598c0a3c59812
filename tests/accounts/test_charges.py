"""The card of a run against its clients' ledgers, whatever happens to either."""

import logging
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

import client_app
from fed_dpsd.accounts.account import Account
from fed_dpsd.accounts.card import TOO_LITTLE_NOISE, privacy_card
from fed_dpsd.accounts.entry import charges_of_entries, entries_of_run
from fed_dpsd.accounts.ledger import FileLedger, MemoryLedger
from fed_dpsd.accounts.secret import ledger_folder
from fed_dpsd.accounts.simulated import entries_in
from fed_dpsd.claims import proofs
from fed_dpsd.client import hospital as hospitals
from fed_dpsd.client import site as sites
from fed_dpsd.engines.clients import shared_ledger
from fed_dpsd.engines.flower.codec import ANSWER, STEP
from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.methods.fed_dpsd import FedDPSD
from fed_dpsd.privacy.accounting import best_bound
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS
from fed_dpsd.protocol import Absent, Refusal, Response, Statement
from fed_dpsd.server import checkpoint
from fed_dpsd.server import run as runs
from fed_dpsd.server.attendance import requests_of
from fed_dpsd.server.charge_log import TIMES_PLANNED, ChargeLog
from fed_dpsd.server.federation import SentRequests
from fed_dpsd.server.run_folder import new_run_folder
from fed_dpsd.server.summary import read_summary, write_failure
from tests.every import every
from tests.hospitals import DISTRIBUTED, Hospitals, request, site_file, site_files, summing
from tests.ledgers import entries_of
from tests.proofs import spent

RICH = {"budget": 1e9, "queries": 100_000}
PRIVATE = ("training=dp_sgd", "training.steps=2", "training.noise_multiplier=5")
MECHANISMS = {
    "label": ("training=plain", "answers=label"),
    "gradient": ("training=plain", "answers=gradient"),
    "dp_sgd": (*PRIVATE, "answers=probabilities"),
    "both": (*PRIVATE, "answers=label", "answers.epsilon_per_answer=0.1"),
    "sums": DISTRIBUTED,
}
QUICK = ("federation.retry_seconds=0.1", "teacher.min_steps=2", "method.student_steps=1")
QUICK += ("method.final_student_steps=1",)
BASES = [(*pair, basis) for pair in UNITS_AND_RELATIONS for basis in ("training", "answers")]


class Killed(BaseException):
    """The coordinator's process was killed."""


def number(value):
    return float("inf") if value == "inf" else value


def printed(summary):
    """Proven epsilons by unit, relation and basis: each claim, and the other proofs."""
    found = {}
    for row in summary["privacy"]["proven"]:
        claims = [row, *row["beside"]]
        assert number(row["epsilon"]) == min(number(claim["epsilon"]) for claim in claims)
        for claim in claims:
            key = row["unit"], row["relation"], claim["basis"]
            found[key] = number(claim["epsilon"])
    return found


def in_ledgers(ledgers, run):
    return in_accounts(map(entries_of, ledgers), run)


def in_accounts(accounts, run):
    """The largest ledger's epsilons for a run, by unit, relation and basis."""
    largest = dict.fromkeys(BASES, 0.0)
    for account in accounts:
        entries = [entry for entry in account if entry.run == run]
        for key in BASES:
            largest[key] = max(largest[key], best_bound(spent(entries, *key), 1e-5).epsilon)
    return largest


def ledgers_of(files):
    return [hospitals.open_hospital(file).ledger for file in files]


def one_more(file):
    """A record arrives at a hospital."""
    path = file.parent / "scans.npz"
    with np.load(path) as kept:
        arrays = {name: np.concatenate([kept[name], kept[name][:1]]) for name in kept.files}
    arrays["image"][-1] ^= 1
    np.savez(path, **arrays)


def deploy(deployed, tmp_path, mechanism, grid=Hospitals, **changes):
    """An experiment over two or, in sums, three hospitals, its folder and its grid."""
    changes = RICH | changes
    if mechanism == "sums":
        files = summing(tmp_path, **changes)
    else:
        files = [site_file(tmp_path / f"hospital{n}", n, **changes) for n in (0, 1)]
    experiment = deployed(*MECHANISMS[mechanism], *QUICK)
    return experiment, new_run_folder(experiment), grid(files), files


def go(experiment, folder, grid, progress=lambda line: None):
    federation = GridFederation(experiment, grid, folder)
    return runs.run(experiment, federation, folder, progress)


def kill():
    raise Killed


def at_round(which, act):
    return lambda line: act() if line["round"] == which else None


def off_by_a_bit(monkeypatch):
    """A different number of threads, or a GPU: the student's predictions round differently."""
    right = FedDPSD.predictions

    def wrong(method, student, images, context):
        return np.nextafter(right(method, student, images, context), np.float32(2))

    monkeypatch.setattr(FedDPSD, "predictions", wrong)


# --- the two that were wrong ---


@pytest.mark.slow
@every("kept", [True, False])
def test_a_record_that_arrives_during_a_run_is_on_the_card(deployed, tmp_path, monkeypatch, kept):
    """Teachers are trained again, and charged again. The control's card is the plan."""
    if not kept:
        monkeypatch.setattr(ChargeLog, "charged", property(lambda charge_log: Counter()))
    context = deploy(deployed, tmp_path, "dp_sgd", when_records_change="retrain")
    experiment, folder, grid, files = context
    summary = go(experiment, folder, grid, at_round(1, lambda: one_more(files[1])))
    key = "record", "add_remove", "training"
    claim, largest = printed(summary)[key], in_ledgers(ledgers_of(files), folder.name)[key]
    (row,) = (
        r for r in summary["privacy"]["proven"] if (r["unit"], r["relation"], r["basis"]) == key
    )
    assert row["planned"] < largest
    assert (claim == largest) == kept
    assert (claim >= largest) == kept
    if kept:
        assert "more was charged than planned" in row["notes"]
        assert "clients 1 changed records during the run" in row["notes"]


@pytest.mark.slow
@every("mechanism", ["label", "dp_sgd", "both"])
def test_changed_records_are_refused_by_default(deployed, tmp_path, caplog, mechanism):
    experiment, folder, grid, files = deploy(deployed, tmp_path, mechanism)
    before = []

    def arrive():
        before.append(in_ledgers(ledgers_of(files)[1:], folder.name))
        one_more(files[1])

    lines = []
    go(experiment, folder, grid, lambda line: (lines.append(line), at_round(1, arrive)(line)))
    reason = "the client's records changed since it joined this run"
    assert [line["refused"] for line in lines] == [{}, {1: reason}, {1: reason}]
    assert in_ledgers(ledgers_of(files)[1:], folder.name) == before[0]
    assert f"the records changed since this client joined run {folder.name}" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["label", "sums"])
@every("settled", [True, False])
def test_a_request_resumed_with_other_predictions_is_not_charged_twice(
    deployed, tmp_path, monkeypatch, settled, mechanism
):
    """The coordinator was killed after the hospitals had charged it."""
    if not settled:
        monkeypatch.setattr(SentRequests, "get_or_store", lambda requests, request: request)
    experiment, folder, grid, files = deploy(deployed, tmp_path, mechanism, Faulty)
    grid.kill = 2, "after send"
    with pytest.raises(Killed):
        go(experiment, folder, grid)
    off_by_a_bit(monkeypatch)
    summary = go(experiment, folder, grid)
    row, largest = summary["privacy"]["proven"][0], in_ledgers(ledgers_of(files), folder.name)
    largest = largest["record", "add_remove", "answers"]
    assert (largest > row["planned"]) == (not settled)
    assert row["epsilon"] == largest  # acknowledged, so the control's card is right too
    for ledger in ledgers_of(files):
        requests = Counter(entry.query_id for entry in entries_of(ledger))
        assert requests == {1: 1, 2: 1 if settled else 2, 3: 1}


def test_a_renamed_folder_is_the_same_run_at_hospitals(deployed, tmp_path, caplog):
    settings = ("training=plain", "answers=gradient", "answers.noise_at=server")
    experiment = deployed(*settings, *QUICK)
    files = site_files(tmp_path, trust=["nobody", "server"], **RICH)
    folder, grid = new_run_folder(experiment), Hospitals(files)
    with pytest.raises(Killed):
        go(experiment, folder, grid, at_round(2, kill))
    renamed = folder.rename(folder.with_name("renamed"))
    row = go(experiment, renamed, grid)["privacy"]["proven"][0]
    assert row["epsilon"] == row["planned"]
    assert "older state" not in caplog.text + str(row["notes"])
    for ledger in ledgers_of(files):
        runs_charged = [entry.run for entry in entries_of(ledger)]
        assert len(runs_charged) == 3
        assert len(set(runs_charged)) == 1
        assert runs_charged[0].startswith(folder.name)


def test_the_card_of_a_run_that_failed_does_not_outlive_its_resumption(small, tmp_path):
    """A power loss would leave it there, without the charges made from now on."""
    experiment = small("training=plain", "answers=label", "rounds=1")
    folder = new_run_folder(experiment)
    write_failure(experiment, folder, "local", UserError("x"))
    seen = []

    def look(line):
        seen.append((folder / "summary.json").exists())

    runs.run(experiment, LocalFederation(experiment, folder), folder, look)
    assert seen == [False]
    assert read_summary(folder)["status"] == "completed"


@pytest.mark.slow
def test_the_buffer_holds_what_was_sent(deployed, tmp_path, monkeypatch):
    experiment, folder, grid, _ = deploy(deployed, tmp_path, "label", Faulty)
    grid.kill = 2, "after send"
    with pytest.raises(Killed):
        go(experiment, folder, grid)
    with np.load(folder / "asks" / "00002_answers.npz") as asked:
        sent = dict(asked)
    off_by_a_bit(monkeypatch)
    go(experiment, folder, grid)
    state = checkpoint.load(folder / "checkpoint")
    assert np.array_equal(state.buffer[1].predictions, sent["predictions"])
    assert np.array_equal(state.buffer[1].images, sent["images"])
    assert sorted(path.name for path in (folder / "asks").iterdir()) == [
        "00002_answers.npz",
        "00003_answers.npz",
    ]


def test_another_request_under_the_same_id_is_an_error_but_for_a_resumed_run(small, tmp_path):
    federation, other = LocalFederation(small(), tmp_path), request(count=15)
    assert len(federation.total(request()).request.images) == 16
    for send in (federation.total, federation.each):
        with pytest.raises(ProtocolError, match=r"request 1 \(answers\) differs from the one"):
            send(other)
    federation._lock.close()
    resumed = LocalFederation(small(), tmp_path)
    assert len(resumed.total(other).request.images) == 16
    (tmp_path / "asks" / "00001_answers.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match="00001_answers.npz cannot be read"):
        resumed.total(other)


@pytest.mark.slow
@every("seen", [True, False])
def test_a_training_that_a_restored_hospital_forgot_stays_on_the_card(
    deployed, tmp_path, monkeypatch, seen
):
    """It charges again what it forgot. The control has no record of earlier statements."""
    if not seen:
        monkeypatch.setattr(ChargeLog, "heard", property(lambda charge_log: {}))
    experiment, folder, grid, files = deploy(deployed, tmp_path, "dp_sgd")

    def restore():
        one_more(files[1])
        shutil.rmtree(files[1].parent / "state")

    summary = go(experiment, folder, grid, at_round(1, restore))
    row = summary["privacy"]["proven"][0]
    assert (row["epsilon"] > row["planned"]) == seen
    note = "clients 1 lost charges: an older state was restored there"
    assert (note in row["notes"]) == seen


def test_the_card_shows_what_the_client_that_states_most_has_spent(small):
    experiment = small("training=plain", "answers=label")
    plan = experiment.plan
    for stated, whole in (([{"label": 1}, plan.releases], True), ([{"label": 1}], False)):
        for row in privacy_card(experiment, plan, stated=stated)["proven"]:
            assert (row["spent"] == row["planned"]) == whole


def test_a_client_that_forgets_twice_remembers_both(small):
    experiment = small("training=plain", "answers=label")
    account = Account(MemoryLedger(), experiment.config.privacy, experiment.plan, "run")
    for count in (32, 40):
        with account.ledger.transaction():
            account.reconcile(replace(request(), heard={0: {"label": count}}), 0)
        assert account.locked_statement().forgotten == {"label": count}


def test_a_run_has_one_coordinator_at_a_time(small, tmp_path):
    """Two would each forget what the other acknowledged."""
    experiment = small("training=plain", "answers=label")
    LocalFederation(experiment, tmp_path / "run")
    program = (
        "import fcntl, sys; lock = open(sys.argv[1], 'ab');"
        "fcntl.lockf(lock, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "other" / "lock")]
    (tmp_path / "other").mkdir()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=r"another process is running .*other"):
            LocalFederation(experiment, tmp_path / "other")
        other.stdin.close()
    LocalFederation(experiment, tmp_path / "other")


# --- what is charged beyond the plan ---


@pytest.mark.slow
def test_a_charge_beyond_the_plan_is_on_the_card_before_it_is_made(deployed, tmp_path, monkeypatch):
    """The hospital is killed between its charge and its reply: the card already has it."""
    context = deploy(deployed, tmp_path, "dp_sgd", when_records_change="retrain")
    experiment, folder, grid, files = context
    pay = FileLedger.charge

    def killed(ledger, entry):
        pay(ledger, entry)
        if ledger._path.stem == "client_001":
            raise RuntimeError("killed")

    def arrive():
        one_more(files[1])
        monkeypatch.setattr(FileLedger, "charge", killed)

    go(experiment, folder, grid, at_round(2, arrive))
    card, largest = card_now(experiment, folder), in_ledgers(ledgers_of(files), folder.name)
    assert all(card[key] >= largest[key] for key in card)
    assert len(card) == len(BASES)
    log = ChargeLog(folder, experiment.plan.releases)
    assert log.acknowledged == {"dp_sgd": 2}
    # No reply has come since.
    assert log.clients[1].charged == {"dp_sgd": 1, "class_counts": 1, "probabilities": 128}


@pytest.mark.slow
def test_a_request_is_repeated_for_every_acknowledgement_that_it_needs(deployed, tmp_path):
    """A record arrives while the run is stopped: class counts need one, their training another."""
    context = deploy(deployed, tmp_path, "dp_sgd", when_records_change="retrain")
    experiment, folder, grid, files = context
    with pytest.raises(Killed):
        go(experiment, folder, grid, at_round(2, kill))
    one_more(files[0])
    lines = []
    summary = go(experiment, folder, grid, lines.append)
    (last,) = lines
    assert last["refused"] == {}
    assert requests_of(folder)[-2]["answered"] == [0, 1]  # of the class counts
    released = {"dp_sgd": 2, "class_counts": 2}
    log = ChargeLog(folder, experiment.plan.releases)
    assert log.acknowledged == released
    assert log.clients[0].charged == {**released, "probabilities": 192}
    assert log.clients[1].charged == {"dp_sgd": 1, "class_counts": 1, "probabilities": 192}
    key = "record", "add_remove", "training"
    assert printed(summary)[key] == in_ledgers(ledgers_of(files), folder.name)[key]


def test_an_absent_client_may_answer_the_repeated_request(small, tmp_path, monkeypatch):
    experiment = small("num_clients=2", "training=plain", "answers=label")
    own = Response(1, np.eye(10, dtype=np.uint8)[[0] * 16], 1, statement=Statement({"label": 16}))
    asks = Refusal(1, "unplanned", Statement(wanted={"label": 16}))
    deliveries = iter([{0: asks, 1: Absent(1, "late")}, {0: own, 1: own}])
    federation = LocalFederation(experiment, tmp_path)
    monkeypatch.setattr(federation, "_deliver", lambda _: next(deliveries))
    assert federation.each(request()).answers.keys() == {0, 1}
    assert federation.charges == {0: {"label": 16}, 1: {"label": 16}}


def test_a_hospital_goes_no_further_than_what_is_acknowledged(deployed, tmp_path):
    experiment, _, _, files = deploy(deployed, tmp_path, "label")
    hospital = hospitals.open_hospital(files[0])
    site = hospital.open(hospital.experiment(experiment.to_json(), 16), "run")
    answers = [given_by(experiment, site, request(n, 64)) for n in range(1, 5)]
    assert [type(given) for given in answers] == [Response] * 3 + [Refusal]
    assert answers[-1].reason == "unplanned: this run would cost the client 256 releases of label"
    assert answers[-1].statement == Statement({"label": 192}, wanted={"label": 256})
    granted = given_by(experiment, site, request(4, 64), {"label": 256})
    assert isinstance(granted, Response)
    assert granted.statement == Statement({"label": 256})


def given_by(experiment, site, query, acknowledged=None):
    asked = replace(query, acknowledged=acknowledged or {})
    return sites.answer(experiment.method, asked, site)


def test_a_charge_of_an_earlier_run_counts_where_another_run_uses_it(deployed, tmp_path):
    """What it paid for leaves again: the second run's plan covers this, but nothing more."""
    experiment, _, _, files = deploy(deployed, tmp_path, "label")
    hospital = hospitals.open_hospital(files[0])
    own = hospital.experiment(experiment.to_json(), 16)
    first = given_by(experiment, hospital.open(own, "one"), request(1, 64))
    again = given_by(experiment, hospital.open(own, "two"), request(1, 64))
    assert np.array_equal(first.values, again.values)
    assert first.statement == again.statement == Statement({"label": 64})
    assert [entry.run for entry in entries_of(hospital.ledger)] == ["one"]
    more = [given_by(experiment, hospital.open(own, "two"), request(n, 64)) for n in (2, 3)]
    assert all(isinstance(given, Response) for given in more)
    refused = given_by(experiment, hospital.open(own, "two"), request(4, 64))
    assert isinstance(refused, Refusal)


# --- what clients say ---


def take(charge_log, statement, client=0):
    return charge_log.take({client: Response(1, np.zeros((1, 1)), statement=statement)})


def test_the_tally_never_forgets(tmp_path, caplog):
    charge_log = ChargeLog(tmp_path, {"label": 192})
    take(charge_log, Statement({"label": 64}))
    take(charge_log, Statement({"label": 128}))
    take(charge_log, Statement({"label": 64}))
    assert charge_log.charged == charge_log.heard[0] == {"label": 128}
    take(charge_log, Statement({"label": 192}, {"label": 64}))
    assert "client 0: its ledger lacks charges of this run" in caplog.text
    again = ChargeLog(tmp_path, {"label": 192})
    assert again.charged == charge_log.charged == {"label": 192}
    assert again.notes() == ("clients 0 lost charges: an older state was restored there",)
    take(again, None)
    assert again.charged == {"label": 192}


@every(
    ("stated", "inf"),
    [
        ({"label": 192}, False),
        ({"label": 500}, False),
        ({"label": TIMES_PLANNED * 192 + 1}, True),
        ({"label": 10**300}, True),
        ({"votes": 1}, True),
        ({"other": 1}, True),
        ({"": 0}, False),
    ],
)
def test_a_clients_statement_is_on_the_card_or_makes_it_infinite(small, tmp_path, stated, inf):
    experiment = small("training=plain", "answers=label")
    plan = experiment.plan
    charge_log = ChargeLog(tmp_path, plan.releases)
    take(charge_log, Statement(stated))
    card = privacy_card(experiment, plan, (), ChargeLog(tmp_path, plan.releases).charged)
    assert all((row["epsilon"] == "inf") == inf for row in card["proven"])
    assert all(row["planned"] == pytest.approx(10 * 192) for row in card["proven"])
    assert (card["reason"] is not None) == inf
    if not inf and stated.get("label", 0) > 192:
        assert all(row["epsilon"] == pytest.approx(10 * stated["label"]) for row in card["proven"])


@every(
    "charged", [{"label": -1}, {"label": True}, {"label": 1.5}, {"label": {}}, [1], {"x" * 65: 1}]
)
def test_a_malformed_statement_is_a_protocol_error(charged):
    with pytest.raises(ProtocolError, match="must be counts >= 0 by mechanism"):
        Statement(charged)
    with pytest.raises(ProtocolError, match="must be counts >= 0 by mechanism"):
        Statement(wanted=charged)


def test_what_no_card_could_count_is_not_acknowledged(tmp_path):
    charge_log = ChargeLog(tmp_path, {"label": 192})
    for wanted in ({"votes": 1}, {"label": 10**12}):
        assert not take(charge_log, Statement(wanted=wanted))
    assert not charge_log.acknowledged
    assert take(charge_log, Statement(wanted={"label": 300})) == {0}
    assert ChargeLog(tmp_path, {"label": 192}).acknowledged == {"label": 300}


@every("content", ["", "{}", "[1]", '{"acknowledged": {"x": -1}, "clients": {}}'])
def test_a_damaged_tally_ends_the_run_and_its_card_is_infinite(small, tmp_path, content):
    experiment = small("training=plain", "answers=label")
    folder = new_run_folder(experiment)
    (folder / "charges.json").write_text(content)
    with pytest.raises(UserError, match="charges.json cannot be read"):
        LocalFederation(experiment, folder)
    write_failure(experiment, folder, "local", UserError("x"))
    assert set(printed(read_summary(folder)).values()) == {float("inf")}


def test_a_shared_ledger_is_read_run_by_run(small, tmp_path):
    """Runs over one ledger add up there; the card of each is its own."""
    shared = ("training=plain", "answers=label", f"ledger={tmp_path}/ledger", "rounds=1")
    experiment, other = (small(*shared, f"answers.k={k}") for k in (3, 4))
    for each in (experiment, other):
        folder = new_run_folder(each)
        summary = runs.run(each, LocalFederation(each, folder), folder, lambda line: None)
        for row in summary["privacy"]["proven"]:
            assert row["epsilon"] == row["planned"] == row["spent"]
    assert len({entry.run for entry in entries_of(shared_ledger(other, 0))}) == 2


# --- all at once ---


class Faulty(Hospitals):
    """A grid with faults that checks the card after every message.

    Attributes:
        kill: the coordinator, at which message of answers (or, "step", of a sum) and when.
        replay: whether every message comes twice, and an old one once more.
        watch: called after everything that reached a hospital.
    """

    def __init__(self, files):
        super().__init__(files)
        self.kill, self.replay, self.watch = (0, ""), False, lambda: None
        self.count, self.old = Counter(), []

    def push_messages(self, messages):
        kind = messages[0].metadata.message_type
        self.count[kind] += len(messages)
        which, when = self.kill
        expected = STEP if when == "step" else ANSWER
        struck = kind == expected and self.count[kind] >= which * len(self.files) > 0
        if struck and when == "before send":
            self.end()
        if self.replay and kind in (ANSWER, STEP):
            for message in (*messages, *self.old[:1]):
                self.twice(message)
            self.old.append(messages[0])
        numbers = super().push_messages(messages)
        self.watch()
        if struck and when in ("after send", "step"):
            self.end()
        return numbers

    def twice(self, message):
        message.metadata.__dict__["_message_id"] = "replayed"
        node = message.metadata.dst_node_id
        client_app.app(
            message, type("Context", (), {"node_config": {"site": str(self.files[node])}})
        )

    def end(self):
        self.kill = 0, ""
        raise Killed


@dataclass(frozen=True)
class Case:
    """What happens to a run, besides that its second part has predictions one bit off.

    Args:
        mechanism: of MECHANISMS.
        killed: when the coordinator is killed; "hospital": a hospital is, after its charge.
        records: "": unchanged; otherwise the hospital's policy when a record arrives.
        restored: whether a hospital's state is restored to what it was after round 1.
        replayed: whether messages come again.
    """

    mechanism: str
    killed: str = ""
    records: str = ""
    restored: bool = False
    replayed: bool = False

    def __str__(self):
        parts = [self.mechanism, self.killed and f"killed {self.killed}"]
        parts += [self.records and f"a record arrives: {self.records}"]
        parts += ["restored"] * self.restored + ["replayed"] * self.replayed
        return ", ".join(filter(None, parts))


CASES = [
    Case("dp_sgd", "before send"),
    Case("dp_sgd", "after send", "retrain"),
    Case("dp_sgd", "hospital", "retrain"),
    Case("dp_sgd", "checkpoint", "refuse"),
    Case("dp_sgd", "", "retrain", restored=True),
    Case("dp_sgd", "after send", "retrain", restored=True, replayed=True),
    Case("both", "hospital", "retrain"),
    Case("both", "after send", "retrain", restored=True, replayed=True),
    Case("label", "before send", "refuse"),
    Case("label", "after send", "retrain"),
    Case("label", "hospital", restored=True),
    Case("label", "checkpoint", replayed=True),
    Case("label", "", restored=True),
    Case("gradient", "before send", restored=True),
    Case("gradient", "after send", "retrain", replayed=True),
    Case("gradient", "hospital", "refuse"),
    Case("gradient", "checkpoint", "retrain", restored=True),
    Case("sums", "before send"),
    Case("sums", "after send", "retrain"),
    Case("sums", "step"),
    Case("sums", "checkpoint", replayed=True),
    Case("sums", "step", "refuse", restored=True),
]


def card_now(experiment, folder):
    """The card if nothing else happened."""
    write_failure(experiment, folder, "flower", Killed())
    return printed(read_summary(folder))


def strike(monkeypatch, grid, case, which):
    """Trigger the case's fault in a round."""
    if case.killed == "checkpoint":
        save = checkpoint.save

        def killed(folder, state):
            if state.round == which:
                monkeypatch.setattr(checkpoint, "save", save)
                raise Killed
            save(folder, state)

        monkeypatch.setattr(checkpoint, "save", killed)
    elif case.killed == "hospital":
        store, left = FileLedger.store_answer, [2 * which]

        def dies(ledger, digest, *values):
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("killed")
            store(ledger, digest, *values)

        monkeypatch.setattr(FileLedger, "store_answer", dies)
    elif case.killed:
        grid.kill = which, case.killed


# Each mechanism, fault and policy is among them; the others are slow.
EVERY_DAY = {5, 6, 8, 16, 21}


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(n, id=str(case), marks=() if n in EVERY_DAY else pytest.mark.slow)
        for n, case in enumerate(CASES)
    ],
)
def test_the_card_covers_every_ledger_at_every_moment(
    deployed, tmp_path, monkeypatch, caplog, seed
):
    caplog.set_level(logging.CRITICAL)
    case, rng = CASES[seed], np.random.Generator(np.random.PCG64(seed))
    changes = {"when_records_change": case.records or "refuse"}
    context = deploy(deployed, tmp_path, case.mechanism, Faulty, **changes)
    experiment, folder, grid, files = context
    victim, which = int(rng.integers(len(files))), int(rng.integers(2, 4))
    state, most = files[victim].parent / "state", dict.fromkeys(BASES, 0.0)
    grid.replay = case.replayed
    ever, charge = {}, FileLedger.charge  # everything paid, including what a restored state forgot

    def paying(ledger, entry):
        charge(ledger, entry)
        ever.setdefault(ledger._path, []).append(entry)

    monkeypatch.setattr(FileLedger, "charge", paying)

    def watch():
        card, largest = card_now(experiment, folder), in_ledgers(ledgers_of(files), folder.name)
        for key in card.keys() & set(BASES):
            paid = [best_bound(spent(entries, *key), 1e-5).epsilon for entries in ever.values()]
            most[key] = max([most[key], largest[key], *paid])
            assert card[key] >= most[key] * (1 - 1e-12), (key, card, most)
        for pair in UNITS_AND_RELATIONS:
            claim = min(value for key, value in card.items() if key[:2] == pair)
            for entries in ever.values():
                paid = proofs(charges_of_entries(entries_of_run(entries, folder.name), *pair), 1e-5)
                assert claim >= paid[0].epsilon * (1 - 1e-9), (pair, claim, paid)

    def happen(line):
        if line["round"] == 1:
            shutil.copytree(state, tmp_path / "backup", dirs_exist_ok=True)
        if line["round"] == which - 1 and case.records:
            one_more(files[victim])
        if line["round"] == 2 and case.restored:
            shutil.rmtree(state)
            shutil.copytree(tmp_path / "backup", state)

    grid.watch = watch
    strike(monkeypatch, grid, case, which)
    for _ in range(4):
        try:
            summary = go(experiment, folder, grid, happen)
            break
        except (Killed, UserError):
            watch()
            off_by_a_bit(monkeypatch)
            summary = read_summary(folder)
    final = printed(summary)
    assert all(final[key] >= most[key] * (1 - 1e-12) for key in final.keys() & set(BASES))
    basis = "training" if case.mechanism in ("dp_sgd", "both") else "answers"
    assert {key[2] for key in final} - {"contraction"} == {basis, "answers"}
    key = "record", "replace_one", basis
    print(f"| {case} | {summary['status']} | {final[key]:.6g} | {most[key]:.6g} |")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "when", "shared"),
    [
        ("dp_sgd", "after send", True),
        ("both", "before send", False),
        ("label", "checkpoint", True),
        ("gradient", "after send", False),
    ],
)
def test_the_card_covers_every_simulated_ledger(
    small, tmp_path, monkeypatch, mechanism, when, shared
):
    ledger = (f"ledger={tmp_path}/ledger",) if shared else ()
    experiment = small(*MECHANISMS[mechanism], *ledger)
    folder = new_run_folder(experiment)
    calls = Counter()

    class Struck(LocalFederation):
        def _deliver(self, asked):
            calls[asked.kind] += asked.kind == "answers"
            struck = calls["answers"] == 2 and asked.kind == "answers"
            if struck and when == "before send":
                raise Killed
            answers = super()._deliver(asked)
            check()
            found = entries_in(ledger_folder(experiment, folder))
            assert len(found) == 2
            assert all(found.values())
            if struck and when == "after send":
                raise Killed
            return answers

    def check():
        found = [*entries_in(ledger_folder(experiment, folder)).values()]
        card, largest = card_now(experiment, folder), in_accounts(found, folder.name)
        assert all(card[key] >= largest[key] for key in card.keys() & set(BASES))

    if when == "checkpoint":
        strike(monkeypatch, None, Case(mechanism, "checkpoint"), 2)
    with pytest.raises(Killed):
        runs.run(experiment, Struck(experiment, folder), folder, lambda line: None)
    check()
    off_by_a_bit(monkeypatch)
    summary = runs.run(experiment, LocalFederation(experiment, folder), folder, lambda line: None)
    check()
    for row in summary["privacy"]["proven"]:
        assert row["epsilon"] == row["planned"] == row["spent"] or row["unit"] != "record"


def test_a_site_file_sets_the_policy_for_changed_records(tmp_path):
    assert hospitals.open_hospital(site_file(tmp_path)).when_records_change == "refuse"
    with pytest.raises(UserError, match="when_records_change=ask must be refuse or retrain"):
        hospitals.open_hospital(site_file(tmp_path, when_records_change="ask"))


@every(("sigma", "reason"), [("0.001", TOO_LITTLE_NOISE), ("0.01", None)])
def test_an_epsilon_beyond_what_is_computed_has_a_reason(small, sigma, reason):
    """256,000 gradients at sigma 0.001 have mu above 10^6; a tenth of it has a finite epsilon."""
    asked = "training=plain", "answers=gradient", f"answers.noise_multiplier={sigma}"
    experiment = small(*asked, "rounds=1000", "queries_per_round=256", "teachers_per_client=1")
    card = privacy_card(experiment, experiment.plan, (), {})
    assert ("inf" in {row["epsilon"] for row in card["proven"]}) == (reason is not None)
    assert card["reason"] == reason


@pytest.mark.parametrize(
    ("sigma", "first"), [("1e-9", TOO_LITTLE_NOISE), ("100", "class counts have no bound")]
)
def test_the_reason_for_a_record_comes_before_those_for_larger_units(small, sigma, first):
    experiment = small("training=dp_sgd", "training.steps=1", f"training.noise_multiplier={sigma}")
    card = privacy_card(experiment, experiment.plan, (), {})
    assert card["reason"].startswith(first)
