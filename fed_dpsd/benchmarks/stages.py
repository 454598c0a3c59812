"""Seconds of a run by stage, and operations of teachers: the run's own code knows nothing of them.

The functions below are replaced, in this process, by ones that also keep the time.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fed_dpsd.accounts.account import Account
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.data import datasets, partition
from fed_dpsd.methods.dense import DENSE
from fed_dpsd.methods.fed_dpsd import FedDPSD
from fed_dpsd.methods.white_box import Distilling
from fed_dpsd.models.fixed_features import FixedFeatures
from fed_dpsd.models.inference import Images
from fed_dpsd.server import checkpoint, run
from fed_dpsd.server.federation import HostedFederation
from fed_dpsd.server.sent_requests import SentRequests

PASSES = "teachers' answers"
# A stage, and where its functions are looked up.
STAGES: tuple[tuple[str, Any, str], ...] = (
    ("data", datasets, "load"),
    ("data", datasets, "load_test"),
    ("partition", partition, "load_or_split"),
    ("teachers", Teachers, "_load_or_train"),
    ("diagnostics", run, "diagnose"),
    ("asks", SentRequests, "get_or_store"),
    ("asks", HostedFederation, "each"),
    ("charges", Account, "pay"),
    (PASSES, Teachers, "sensitive_probabilities"),
    ("generator", FedDPSD, "draw"),
    ("generator", DENSE, "synthesise"),
    ("student", FedDPSD, "train_student"),
    ("student", Distilling, "distil"),
    ("evaluation", run, "_student_scores"),
    ("checkpoint", checkpoint, "save"),
    ("samples", run, "save_samples"),
    ("card", run, "add_privacy"),
)
SAMPLE = 8  # images by which the operations of a pass are counted


class Clock:
    """A clock of nested stages; time in an inner stage counts for that stage alone.

    Attributes:
        seconds: seconds of each stage so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @property
    def now(self) -> str:
        """Return the innermost stage; "" outside of all."""
        return self._open[-1] if self._open else ""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of this block for a stage."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self.now] = self.seconds.get(self.now, 0.0) + now - self._since
        self._since = now


class Passes:
    """The images that teachers have answered in the stage PASSES.

    Teachers with as many parameters share an entry. In a process of many clients, fixed features of
    an image are computed once, so these are counted apart.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._images = Counter[int]()
        self._teachers: dict[int, tuple[Teachers, tuple[int, ...]]] = {}
        self._computed = Counter[type[FixedFeatures]]()
        self._features: dict[type[FixedFeatures], FixedFeatures] = {}

    def answered(self, teachers: Teachers, images: Images) -> None:
        """Count images that a client's teachers have answered."""
        models = [teacher for teacher in teachers.models if teacher]
        size = sum(tensor.numel() for model in models for tensor in model.parameters())
        self._images[size] += len(images)
        self._teachers.setdefault(size, (teachers, images.shape))

    def computed(self, features: FixedFeatures, images: torch.Tensor) -> None:
        """Count images whose fixed features were computed for an answer."""
        if self._clock.now == PASSES:
            self._computed[type(features)] += len(images)
            self._features.setdefault(type(features), features)

    def operations(self) -> float:
        """Return the floating-point operations so far, of matrix products and convolutions."""
        total = 0.0
        for size, (teachers, shape) in self._teachers.items():
            images = Images(np.zeros((SAMPLE, *shape), np.uint8))
            teachers.sensitive_probabilities(images)  # from here on their features are remembered
            response = functools.partial(teachers.sensitive_probabilities, images)
            total += self._images[size] * _operations(response) / SAMPLE
        for kind, features in self._features.items():
            sample = torch.zeros(SAMPLE, *features.shape)
            compute = functools.partial(features._features, sample)
            total += self._computed[kind] * _operations(compute) / SAMPLE
        return total


@contextmanager
def timed(clock: Clock) -> Iterator[Passes]:
    """Keep the time of all stages in this block; yield the count of the teachers' passes."""
    passes = Passes(clock)

    def counting(method: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(instance: Any, images: Any) -> Any:
            result = method(instance, images)
            count(instance, images)
            return result

        return counted

    before = [(owner, name, getattr(owner, name)) for _, owner, name in STAGES]
    before.append((FixedFeatures, "_features", FixedFeatures._features))
    FixedFeatures._features = counting(FixedFeatures._features, passes.computed)  # type: ignore[method-assign]
    for stage, owner, name in STAGES:
        function = getattr(owner, name)
        if stage == PASSES:
            function = counting(function, passes.answered)
        setattr(owner, name, _in_stage(clock, stage, function))
    try:
        yield passes
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _in_stage(clock: Clock, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def in_stage(*arguments: Any, **named: Any) -> Any:
        with clock.stage(stage):
            return function(*arguments, **named)

    return in_stage


def _operations(work: Callable[[], Any]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def matmul_peak(device: torch.device, size: int, times: int = 10) -> float:
    """Return the most floating-point operations a second that float32 matrix products reached.

    Args:
        device: where; on a processor, with the threads that torch has now.
        size: rows and columns of the matrices, >= 1.
        times: products, >= 1; the fastest counts.
    """
    matrix = torch.ones(size, size, device=device)
    fastest = float("inf")
    for _ in range(times + 1):  # the first one is slower
        _wait(device)
        started = time.perf_counter()
        matrix @ matrix
        _wait(device)
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * size**3 / fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
