"""1,000 interleavings of crashes, retries, two processes and full disks: nothing leaves uncharged.

The real Site and FileLedger run on real files, over an `os` and `fcntl` that know what a loss of
power leaves of those files.
"""

import dataclasses
import errno
import fcntl
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import hypothesis
import numpy as np
import pytest
from dp_accounting import SelfComposedDpEvent
from hypothesis import strategies as st

from fed_dpsd.accounts import ledger
from fed_dpsd.accounts.account import Account
from fed_dpsd.accounts.ledger import FileLedger, LedgerError
from fed_dpsd.client.site import Site, answer
from fed_dpsd.config import compose
from fed_dpsd.data.datasets import Split
from fed_dpsd.experiment import set_up
from fed_dpsd.methods.method import Plan
from fed_dpsd.privacy.accounting import Stage, unchanged_epsilon, within_budget
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.protocol import Answer, Ask

CLASSES = 4
RECORDS = Split(np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 1]))
SENSITIVE = np.ones((1, 1, CLASSES))
DELTA = 1e-5


def ask(query_id, queries, content):
    images = np.full((queries, 1, 8, 8), content, np.uint8)
    return Ask(query_id, images, np.full((queries, CLASSES), 1 / CLASSES, np.float32))


# The first two have one id and other content. All together cost 13 releases; the cap is that of 8.
ASKS = [ask(1, 2, 0), ask(1, 3, 1), ask(2, 2, 0), ask(3, 6, 2)]
CAP = 8


class Crash(BaseException):
    """A process is gone, wherever it was."""


class Blocked(BaseException):
    """A process waits for a lock that another holds."""


@dataclass(frozen=True)
class Step:
    """An ask is delivered to a process, and something happens at the `at`-th call it makes.

    "kill": the process is gone; "power": so is all that was not durable; "full": no byte more fits
    on the disk; "sick": nothing can be written or synced any more nor, if `part` is even, cut;
    "short": a write takes a part only; "meet": the other process answers `other`; "outage": power
    is lost before the ask.
    """

    fault: str
    process: int
    ask: int
    other: int
    at: int
    part: int  # fifteenths of what is being written; as bits, the names that survive

    FAULTS: ClassVar = ("none", "kill", "power", "full", "sick", "short", "meet", "outage")


CALLS = 40  # of the first release; a later one makes fewer
STEPS = st.lists(
    st.builds(
        Step,
        fault=st.sampled_from(Step.FAULTS),
        process=st.integers(0, 1),
        ask=st.integers(0, len(ASKS) - 1),
        other=st.integers(0, len(ASKS) - 1),
        at=st.integers(1, CALLS),
        part=st.integers(0, 15),
    ),
    min_size=1,
    max_size=8,
)


@dataclass(eq=False)
class Node:
    """A file: what processes see of it, and what a loss of power leaves at least."""

    content: bytes = b""
    durable: bytes = b""

    def after_power_loss(self, part):
        """What was durable, or what is seen now cut short after the two part."""
        if part == 0:
            return self.durable
        pairs = zip(self.content, self.durable, strict=False)
        common = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        return self.content[: common + (len(self.content) - common) * part // 15]


class Machine:
    """The `os` and the `fcntl` that ledger.py sees; what is outside `root` needs no sync."""

    LOCK_EX = fcntl.LOCK_EX

    def __init__(self, root):
        self.root = root
        self.names: dict[Path, Node] = {}  # as processes see them
        self.durable_names: dict[Path, Node] = {}
        self.opened: dict[int, Path] = {}
        self.holder: int | None = None
        self.struck = False
        self.begin(None)

    def __getattr__(self, name):
        return getattr(os, name)

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
        if step.fault in ("kill", "power") and name != "write":
            self.die()
        if step.fault == "sick" and name != "noise" and not (name == "cut" and step.part % 2):
            raise OSError(errno.EIO, "input/output error")
        return step.fault

    def die(self):
        self.dead = True
        raise Crash

    def open(self, path, flags, mode=0o777):
        if not path.is_relative_to(self.root):
            return os.open(path, flags, mode)
        new = flags & os.O_CREAT and not path.exists()
        if self.call("open") == "full" and new:
            raise OSError(errno.ENOSPC, "disk full")
        file = os.open(path, flags, mode)
        if new:
            self.names[path] = Node()
        if flags & os.O_TRUNC:
            self.names[path].content = b""
        self.opened[file] = path
        return file

    def close(self, file):
        self.opened.pop(file, None)
        if self.holder == file:
            self.holder = None
        os.close(file)

    def flock(self, file, operation):
        if self.holder is not None:
            raise Blocked
        self.holder = file

    def write(self, file, content):
        path = self.opened[file]
        fault = self.call("write")
        if fault in ("kill", "power", "full", "short"):
            content = content[: max(fault == "short", len(content) * self.step.part // 15)]
        self.names[path].content += bytes(content)
        os.write(file, content)
        if fault in ("kill", "power"):
            self.die()
        if fault == "full":
            raise OSError(errno.ENOSPC, "disk full")
        return len(content)

    def ftruncate(self, file, size):
        path = self.opened[file]
        self.call("cut")
        self.names[path].content = self.names[path].content[:size]
        os.ftruncate(file, size)

    def fsync(self, file):
        path = self.opened.get(file)
        if path is None:
            return
        self.call("fsync")
        if path.suffix:
            self.names[path].durable = self.names[path].content
        else:
            for name in {*self.names, *self.durable_names}:
                if name.parent == path:
                    self.keep(name)

    def keep(self, name):
        self.durable_names.pop(name, None)
        if name in self.names:
            self.durable_names[name] = self.names[name]

    def replace(self, old, new):
        self.call("replace")
        os.replace(old, new)
        self.names[new] = self.names.pop(old)

    def lose_power(self, part):
        """Keep what is durable, and some of what is not."""
        changed = {*self.names.items()} ^ {*self.durable_names.items()}
        for bit, name in enumerate(sorted({name for name, _ in changed})):
            if part >> bit % 4 & 1:
                self.keep(name)
        for name in self.names:
            name.unlink()
        nodes = {name: node.after_power_loss(part) for name, node in self.durable_names.items()}
        self.names = {name: Node(content, content) for name, content in nodes.items()}
        self.durable_names = dict(self.names)
        for name, content in nodes.items():
            name.write_bytes(content)


class Watched(FileLedger):
    """Remembers for which charge an answer was last looked up."""

    looked_up = ""

    def stored(self, digest):
        self.looked_up = digest
        return super().stored(digest)


class Process:
    """A process that hosts the client. `draw(digest)` gives the generator of an answer's noise.

    No two give the same, so only the ledger can make an answer come twice.
    """

    def __init__(self, config, folder, draw, ledger_class=Watched, account_class=Account):
        self.ledger = ledger_class(folder, 0, "digits")

        class Fresh(NormalizedGradient):
            def noise(_, value, predictions, rng):
                return super().noise(value, predictions, draw(self.ledger.looked_up))

        self.mechanism = Fresh(CLASSES, 50.0)
        plan = Plan((Stage(self.mechanism, 1, 2 * CAP),))
        account = account_class(self.ledger, config.privacy, plan, "run")
        self.site = Site(config, self.mechanism, 0, RECORDS, np.arange(2), RECORDS, account)

    def client(self, question, site):
        return site.release(self.mechanism, SENSITIVE, question)

    def answer(self, number):
        return answer(self, ASKS[number], self.site)


class Hospital:
    """Two processes on one ledger, and what has left them."""

    def __init__(self, config, folder, machine_class=Machine, **parts):
        self.budget = config.privacy.budget
        self.path = folder / "client_000.jsonl"
        self.machine = machine_class(folder)
        self.draws = 0
        self.left: dict[int, tuple[str, np.ndarray]] = {}  # by ask: its charge and answer
        self.start = lambda: Process(config, folder, self.draw, **parts)
        self.processes = [self.start(), self.start()]

    def draw(self, digest):
        """Noise is drawn: its charge must outlast a loss of power that strikes now."""
        self.draws += 1
        durable = self.machine.durable_names.get(self.path, Node()).durable
        complete = durable[: durable.rfind(b"\n") + 1]
        assert digest.encode() in complete, "noise was drawn before its charge was durable"
        self.machine.call("noise")
        return np.random.default_rng(self.draws)

    def deliver(self, process, number):
        """The same answer leaves every time that an ask is answered, and no other ask's."""
        reply = self.processes[process].answer(number)
        if isinstance(reply, Answer):
            digest = self.processes[process].ledger.looked_up
            _, first = self.left.setdefault(number, (digest, reply.values))
            assert np.array_equal(first, reply.values), "an ask had two answers"
            others = [values for other, (_, values) in self.left.items() if other != number]
            assert not any(np.array_equal(reply.values, values) for values in others)
        return reply

    def take(self, step):
        """One step, and whatever it leaves, the ledger covers what has left."""
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
            self.deliver(step.process, step.ask)
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
        try:
            entries = ledger.read(self.path) if self.path.exists() else ()
        except LedgerError as error:
            raise AssertionError from error
        digests = [entry.digest for entry in entries]
        assert len(set(digests)) == len(digests), "an ask was charged twice"
        assert {digest for digest, _ in self.left.values()} <= set(digests)
        answered = sum(len(ASKS[number].images) for number in self.left)
        assert answered <= sum(entry.releases for entry in entries), "more left than was charged"
        charges = [entry.event("record", "add_remove") for entry in entries]
        assert within_budget(charges, self.budget, DELTA), "the cap was passed"

    def recover(self):
        """Nothing that happened keeps the ledger from working once all is well again."""
        for number in range(len(ASKS)):
            reply = self.deliver(0, number)
            assert isinstance(reply, Answer) or "budget" in reply.reason, reply
        self.check()


@pytest.fixture(scope="module")
def config():
    config = set_up(
        compose(["data=digits", f"data.num_classes={CLASSES}", "privacy=gradient"]), Path("/")
    ).config
    event = NormalizedGradient(CLASSES, 50.0).event("record", "add_remove")
    budget = unchanged_epsilon(SelfComposedDpEvent(event, CAP), DELTA)
    privacy = dataclasses.replace(config.privacy, budget=budget * (1 + 1e-9), delta=DELTA)
    return dataclasses.replace(config, privacy=privacy)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(logging.getLogger("fed_dpsd"), "disabled", True)


def play(config, steps, **parts):
    """Take the steps in a hospital of these parts; whether a fault struck."""
    folder = Path(tempfile.mkdtemp())
    try:
        hospital = Hospital(config, folder, **parts)
        with patch.multiple(ledger, os=hospital.machine, fcntl=hospital.machine):
            for step in steps:
                hospital.take(step)
            hospital.recover()
        return hospital.machine.struck
    finally:
        shutil.rmtree(folder)


ANY = hypothesis.settings(max_examples=1000, derandomize=True, deadline=None, database=None)


@ANY
@hypothesis.given(STEPS)
def test_1000_interleavings_let_out_no_more_than_the_ledger_holds(config, steps):
    play(config, steps)


@pytest.mark.parametrize("fault", Step.FAULTS[1:-1])
def test_a_fault_at_every_call_and_then_a_loss_of_power(config, fault):
    for at in range(1, CALLS + 1):
        struck = [
            play(config, [Step(fault, 0, 0, 1, at, part), Step("outage", 1, 0, 0, 0, part)])
            for part in (0, 6, 15)
        ]
        assert all(struck)
    assert not play(config, [Step(fault, 0, 0, 1, CALLS + 1, 0)])


class ChargesBeforeFsync(Watched):
    def charge(self, entry):
        with patch.object(ledger, "_write", lambda file, line: ledger.os.write(file, line)):
            super().charge(entry)


class ForgetsTheFolder(Watched):
    def _sync_folders(self):
        pass


class StoresBeforeFsync(Watched):
    def store(self, digest, values):
        with patch.object(ledger, "_write", lambda file, line: ledger.os.write(file, line)):
            super().store(digest, values)


class TrustsWhatItSees(Watched):
    """What a killed process has written, durable or not."""

    @contextmanager
    def transaction(self):
        with ExitStack() as stack:
            with patch.object(ledger, "_sync", lambda path: None):
                stack.enter_context(super().transaction())
            yield


class TakesNothingBack(Machine):
    """What was cut short stays."""

    def ftruncate(self, file, size):
        pass


class Unlocked(Machine):
    def flock(self, file, operation):
        pass


class DrawsBeforeCharging(Account):
    def _affordable(self, mechanism, digest, *arguments):
        self.ledger.looked_up = digest
        mechanism.noise(SENSITIVE, None, None)
        return super()._affordable(mechanism, digest, *arguments)


class KeyedByQueryId(Account):
    def due(self, mechanism, digest, kind, ask, reserved=0):
        if any(entry.query_id == ask.query_id for entry in self.ledger.entries()):
            return None
        return super().due(mechanism, digest, kind, ask, reserved)


class NeverStores(Watched):
    def store(self, digest, values):
        pass


class Uncapped(Account):
    def __init__(self, own, settings, *arguments):
        super().__init__(own, dataclasses.replace(settings, budget=None), *arguments)


@pytest.mark.parametrize(
    "broken",
    [
        {"ledger_class": ChargesBeforeFsync},
        {"ledger_class": ForgetsTheFolder},
        {"ledger_class": StoresBeforeFsync},
        {"ledger_class": NeverStores},
        {"ledger_class": TrustsWhatItSees},
        {"machine_class": TakesNothingBack},
        {"machine_class": Unlocked},
        {"account_class": DrawsBeforeCharging},
        {"account_class": KeyedByQueryId},
        {"account_class": Uncapped},
    ],
    ids=lambda broken: next(iter(broken.values())).__name__,
)
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
        replies.put((number, reply.values.tobytes() if isinstance(reply, Answer) else None))


def _die(config, folder, start):
    """Die in a transaction, charged and about to draw, while the others run into its lock."""

    def draw(digest):
        start.wait()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    Process(config, folder, draw).answer(0)


def test_processes_at_once_share_one_cap_and_one_answer_an_ask(config, tmp_path):
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
    entries = ledger.read(tmp_path / "client_000.jsonl")
    assert sum(entry.releases for entry in entries) <= CAP
    assert sum(entry.releases for entry in entries) == sum(len(ASKS[n].images) for n in answers)
