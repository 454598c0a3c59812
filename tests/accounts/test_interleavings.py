"""Interleavings of crashes, retries, two processes and full disks: nothing leaves uncharged.

The real Site and FileLedger run on real files, over connections that fail at a statement, and over
a machine that knows what a loss of power leaves of the files. That SQLite keeps what a commit has
synced is SQLite's own promise; these tests hold what this project builds on it.
"""

import dataclasses
import logging
import multiprocessing
import os
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import hypothesis
import numpy as np
import pytest
from dp_accounting import SelfComposedDpEvent
from hypothesis import strategies as st

from fed_dpsd.accounts import database, ledger
from fed_dpsd.accounts.account import Account
from fed_dpsd.accounts.database import journal_path, open_connection
from fed_dpsd.accounts.ledger import FileLedger, LedgerError
from fed_dpsd.client.site import Site, answer
from fed_dpsd.config.compose import compose
from fed_dpsd.data.intake import Records
from fed_dpsd.experiment import set_up
from fed_dpsd.privacy.accounting import Stage, unchanged_epsilon, within_budget
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.training import Plain
from fed_dpsd.protocol import Request, Response
from tests.every import every

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # where a sync costs nothing
CLASSES = 4
RECORDS = Records(np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 1]))
SENSITIVE = np.ones((1, 1, CLASSES))
DELTA = 1e-5


def request(query_id, queries, content):
    images = np.full((queries, 1, 8, 8), content, np.uint8)
    return Request(query_id, images, np.full((queries, CLASSES), 1 / CLASSES, np.float32))


# The first two share an id but differ in content. All cost 13 releases; the cap is 8 releases.
ASKS = [request(1, 2, 0), request(1, 3, 1), request(2, 2, 0), request(3, 6, 2)]
CAP = 8


class Crash(BaseException):
    """A process is killed at any point."""


class Blocked(BaseException):
    """A process waits for a lock that another holds."""


@dataclass(frozen=True)
class Step:
    """A request is delivered to a process, and something happens at the `at`-th call it makes.

    "kill": the process is gone; "power": so is all that was not durable or, if `part` is odd, only
    what was not written; "full": no byte more fits on the disk; "sick": no statement works any more
    or, if `part` is even, only a rollback; "meet": the other process answers `other`; "outage":
    power is lost before the request.
    """

    fault: str
    process: int
    request: int
    other: int
    at: int
    part: int

    FAULTS: ClassVar = ("none", "kill", "power", "full", "sick", "meet", "outage")


CALLS = 41  # of the first release; a later one makes fewer
STEPS = st.lists(
    st.builds(
        Step,
        fault=st.sampled_from(Step.FAULTS),
        process=st.integers(0, 1),
        request=st.integers(0, len(ASKS) - 1),
        other=st.integers(0, len(ASKS) - 1),
        at=st.integers(1, CALLS),
        part=st.integers(0, 15),
    ),
    min_size=1,
    max_size=8,
)


WRITES = ("CREATE", "INSERT", "UPDATE", "COMMIT")


class Connection:
    """A connection of SQLite's on a machine whose process may die at any statement."""

    def __init__(self, machine, real, path):
        self.machine, self.real, self.path = machine, real, path

    def execute(self, statement, *values):
        word = statement.split()[0]
        fault = self.machine.call(word)
        if (fault == "full" and word in WRITES) or (
            fault == "sick" and not (word == "ROLLBACK" and self.machine.step.part % 2 == 0)
        ):
            error = sqlite3.OperationalError("the disk is full or sick")
            error.sqlite_errorcode = (
                sqlite3.SQLITE_FULL if fault == "full" else sqlite3.SQLITE_IOERR
            )
            raise error
        try:
            cursor = self.real.execute(statement, *values)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise Blocked from None
            raise
        if word == "COMMIT" and self.real.execute("PRAGMA synchronous").fetchone()[0] >= 2:
            self.machine.durable = self.path.read_bytes()
        return cursor

    def close(self):
        """End the connection; a process that died leaves the files as they are."""
        both = (self.path, journal_path(self.path))
        files = {path: path.read_bytes() for path in both if path.exists()}
        self.real.close()
        if self.machine.dead:
            for path, content in files.items():
                path.write_bytes(content)


class Machine:
    """What outlasts the processes on it: a file's content, and its name in a synced folder."""

    def __init__(self, root):
        self.path = root / "client_000.sqlite"
        self.durable = b""
        self.named = False
        self.struck = False
        self.begin(None)

    def begin(self, step: Step | None, meet: Callable[[], None] = lambda: None):
        self.step, self.meet, self.calls, self.dead = step, meet, 0, False

    def call(self, name) -> str:
        """Count a call and return the fault that strikes it, if it has not struck here."""
        if self.dead:
            raise Crash
        self.calls += 1
        step = self.step
        if step is None or self.calls < step.at:
            return ""
        if self.calls == step.at:
            self.struck = True
            if step.fault == "meet":
                self.step = None
                self.meet()
                self.step = step
        elif step.fault not in ("full", "sick"):
            return ""
        if step.fault in ("kill", "power"):
            self.dead = True
            raise Crash
        return step.fault

    def opened(self, path, mode):
        return Connection(self, open_connection(path, mode), path)

    def sync(self, path):
        if self.call("sync") == "sick":
            raise OSError("input/output error")
        self.named |= path == self.path.parent

    def lose_power(self, part):
        """Keep what is durable or, if `part` is odd, all that was written."""
        if part % 2:
            self.named |= self.path.exists()
            return
        journal_path(self.path).unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        if self.named:
            self.path.write_bytes(self.durable)


class Watched(FileLedger):
    """Remembers the charge whose answer was last looked up."""

    looked_up = ""

    def stored_answer(self, digest):
        self.looked_up = digest
        return super().stored_answer(digest)


class Process:
    """A process that hosts the client. `draw(digest)` gives the generator of an answer's noise.

    No two give the same, so only the ledger can make an answer come twice.
    """

    def __init__(self, config, folder, draw, ledger_class=Watched, account_class=Account):
        self.ledger = ledger_class(folder, 0, "digits")

        class Fresh(NormalizedGradient):
            def add_noise(_, value, predictions, rng):
                return super().add_noise(value, predictions, draw(self.ledger.looked_up))

        self.mechanism = Fresh(CLASSES, 50.0)
        plan = Plan(Plain(), (Stage(self.mechanism, 1, 2 * CAP),))
        account = account_class(self.ledger, config.privacy, plan, "run")
        self.site = Site(config, Plain(), self.mechanism, 0, RECORDS, np.arange(2), None, account)

    def client(self, query, site):
        return site.release(self.mechanism, SENSITIVE, query)

    def answer(self, number):
        return answer(self, ASKS[number], self.site)


class Hospital:
    """Two processes on one ledger, and what has left them."""

    def __init__(self, config, folder, machine_class=Machine, **parts):
        self.budget = config.privacy.budget
        self.path = folder / "client_000.sqlite"
        self.machine = machine_class(folder)
        self.draws = 0
        self.left: dict[int, tuple[str, np.ndarray]] = {}  # by ask: its charge and answer
        self.start = lambda: Process(config, folder, self.draw, **parts)
        self.processes = [self.start(), self.start()]

    def draw(self, digest):
        """Noise is drawn: its charge must outlast a loss of power that strikes now."""
        self.draws += 1
        durable = self.machine.durable if self.machine.named else b""
        assert digest.encode() in durable, "noise was drawn before its charge was durable"
        self.machine.call("noise")
        return np.random.default_rng(self.draws)

    def deliver(self, process, number):
        """The same answer leaves every time that a request is answered, and no other request's."""
        reply = self.processes[process].answer(number)
        if isinstance(reply, Response):
            digest = self.processes[process].ledger.looked_up
            _, first = self.left.setdefault(number, (digest, reply.values))
            assert np.array_equal(first, reply.values), "a request had two answers"
            others = [values for other, (_, values) in self.left.items() if other != number]
            assert not any(np.array_equal(reply.values, values) for values in others)
        return reply

    def take(self, step):
        """Take a step; afterwards the ledger covers everything that left."""
        if step.fault == "outage":
            self.machine.lose_power(step.part)
        waiting = []

        def meet():
            try:
                self.deliver(1 - step.process, step.other)
            except Blocked:
                waiting.append(step.other)

        self.machine.begin(step, meet)
        try:
            self.deliver(step.process, step.request)
        except Crash:
            self.processes[step.process] = self.start()
            if step.fault == "power":
                self.machine.lose_power(step.part)
                self.processes = [self.start(), self.start()]
        self.machine.begin(None)
        for number in waiting:
            self.deliver(1 - step.process, number)
        self.check()

    def check(self):
        with tempfile.TemporaryDirectory(dir=MEMORY) as copy:  # so no crash is repaired here
            for path in (self.path, journal_path(self.path)):
                if path.exists():
                    shutil.copy(path, copy)
            own = FileLedger(Path(copy), 0, "digits")
            with patch.object(database, "open_connection", open_connection):
                try:
                    with own.transaction():
                        entries = own.entries()
                except LedgerError as error:
                    raise AssertionError from error
        digests = [entry.digest for entry in entries]
        assert len(set(digests)) == len(digests), "a request was charged twice"
        assert {digest for digest, _ in self.left.values()} <= set(digests)
        answered = sum(len(ASKS[number].images) for number in self.left)
        assert answered <= sum(entry.releases for entry in entries), "more left than was charged"
        charges = [entry.event("record", "add_remove") for entry in entries]
        assert within_budget(charges, self.budget, DELTA), "the cap was passed"

    def recover(self):
        """The ledger works again once all faults are over."""
        for number in range(len(ASKS)):
            reply = self.deliver(0, number)
            assert isinstance(reply, Response) or "budget" in reply.reason, reply
        self.check()


@pytest.fixture(scope="module")
def config():
    raw = compose(["data=mnist", "data.path=/", "training=plain", "answers=gradient"])
    config = set_up(raw, Path("/")).config
    data = dataclasses.replace(config.data, num_classes=CLASSES, shape=(1, 8, 8))
    config = dataclasses.replace(config, data=data)
    event = NormalizedGradient(CLASSES, 50.0).event("record", "add_remove")
    budget = unchanged_epsilon(SelfComposedDpEvent(event, CAP), DELTA)
    privacy = dataclasses.replace(config.privacy, budget=budget * (1 + 1e-9), delta=DELTA)
    return dataclasses.replace(config, privacy=privacy)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(logging.getLogger("fed_dpsd"), "disabled", True)


def play(config, steps, **parts):
    """Take the steps in a hospital of these parts; whether a fault struck."""
    folder = Path(tempfile.mkdtemp(dir=MEMORY))
    try:
        hospital = Hospital(config, folder, **parts)
        with (
            patch.object(database, "open_connection", hospital.machine.opened),
            patch.object(database, "_PATIENCE", 0),
            patch.object(ledger, "sync", hospital.machine.sync),
        ):
            for step in steps:
                hospital.take(step)
            hospital.recover()
        return hospital.machine.struck
    finally:
        shutil.rmtree(folder)


ANY = hypothesis.settings(max_examples=1000, derandomize=True, deadline=None, database=None)


@pytest.mark.slow(seconds=40)
@ANY
@hypothesis.given(STEPS)
def test_1000_interleavings_let_out_no_more_than_the_ledger_holds(config, steps):
    play(config, steps)


@pytest.mark.slow
@hypothesis.settings(ANY, max_examples=50)
@hypothesis.given(STEPS)
def test_50_interleavings_let_out_no_more_than_the_ledger_holds(config, steps):
    """As above, a fast sample."""
    play(config, steps)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", Step.FAULTS[1:-1])
def test_a_fault_at_every_call_and_then_a_loss_of_power(config, fault, whole):
    """At every call, each part of what was written is lost.

    For every day, one of the parts, at every third call and at the last.
    """
    parts = (0, 6, 15)
    for at in range(1, CALLS + 1) if whole else (*range(1, CALLS, 3), CALLS):
        for part in parts if whole else parts[at // 3 % 3 :][:1]:
            steps = [Step(fault, 0, 0, 1, at, part), Step("outage", 1, 0, 0, 0, part)]
            assert play(config, steps)
    assert not play(config, [Step(fault, 0, 0, 1, CALLS + 1, 0)])


class ForgetsTheFolder(Watched):
    def _sync_folders(self):
        pass


class Altered(Machine):
    """A machine that replaces some words of a statement."""

    words: ClassVar[dict[str, str]] = {}

    def opened(self, path, mode):
        connection = super().opened(path, mode)
        run = connection.execute

        def execute(statement, *values):
            for word, other in self.words.items():
                statement = statement.replace(word, other)
            return run(statement, *values)

        connection.execute = execute
        return connection


class NeverSyncs(Altered):
    words: ClassVar = {"synchronous = FULL": "synchronous = OFF"}


class TakesNothingBack(Altered):
    words: ClassVar = {"ROLLBACK": "COMMIT"}


class Unlocked(Altered):
    words: ClassVar = {
        "BEGIN EXCLUSIVE": "BEGIN",
        "locking_mode = EXCLUSIVE": "locking_mode = NORMAL",
    }


class DrawsBeforeCharging(Account):
    def _affordable(self, mechanism, digest, *arguments):
        self.ledger.looked_up = digest
        mechanism.add_noise(SENSITIVE, None, None)
        return super()._affordable(mechanism, digest, *arguments)


class KeyedByQueryId(Account):
    def due(self, mechanism, digest, kind, request, *further, **named):
        if any(entry.query_id == request.query_id for entry in self.ledger.entries()):
            return None
        return super().due(mechanism, digest, kind, request, *further, **named)


class NeverStores(Watched):
    def store_answer(self, digest, values, noisy=True):
        pass


class Uncapped(Account):
    def __init__(self, own, settings, *arguments):
        super().__init__(own, dataclasses.replace(settings, budget=None), *arguments)


@every(
    "broken",
    [
        {"ledger_class": ForgetsTheFolder},
        {"ledger_class": NeverStores},
        {"machine_class": NeverSyncs},
        {"machine_class": TakesNothingBack},
        {"machine_class": Unlocked},
        {"account_class": DrawsBeforeCharging},
        {"account_class": KeyedByQueryId},
        {"account_class": Uncapped},
    ],
)
@pytest.mark.slow
@pytest.mark.ci
def test_a_broken_ledger_or_site_is_caught(config, broken):
    @hypothesis.settings(ANY, phases=[hypothesis.Phase.generate], report_multiple_bugs=False)
    @hypothesis.given(STEPS)
    def run(steps):
        play(config, steps, **broken)

    with pytest.raises(AssertionError):
        run()


def _compete(config, folder, seed, start, replies):
    process = Process(config, folder, lambda _: np.random.default_rng())
    start.wait()
    for number in np.random.default_rng(seed).permutation([*range(len(ASKS))] * 2):
        reply = process.answer(number)
        replies.put((number, reply.values.tobytes() if isinstance(reply, Response) else None))


def _die(config, folder, start):
    """Die in a transaction, charged and about to draw, while the others run into its lock."""

    def draw(digest):
        start.wait()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    Process(config, folder, draw).answer(0)


def test_concurrent_processes_share_one_cap_and_one_answer_per_request(config, tmp_path):
    context = multiprocessing.get_context("fork")
    start, replies = context.Barrier(5, timeout=60), context.Queue()
    processes = [context.Process(target=_die, args=(config, tmp_path, start), daemon=True)]
    for seed in range(4):
        arguments = (config, tmp_path, seed, start, replies)
        processes.append(context.Process(target=_compete, args=arguments, daemon=True))
    for process in processes:
        process.start()
    got = [replies.get(timeout=60) for _ in range(4 * 2 * len(ASKS))]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0, 0, 0, 0]
    answers = {number: values for number, values in got if values is not None}
    assert all(values in (None, answers[number]) for number, values in got if number in answers)
    assert 0 in answers  # charged by the dead, answered by another
    assert (None in dict(got).values()) == (len(answers) < len(ASKS))
    entries = database.read_ledger(tmp_path / "client_000.sqlite")
    assert sum(entry.releases for entry in entries) <= CAP
    assert sum(entry.releases for entry in entries) == sum(len(ASKS[n].images) for n in answers)
