"""Seconds of a run by stage, and its teachers' operations, measured from outside the run's code.

In this process, timing wrappers replace the functions in STAGES.
"""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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
# Stages, and the functions that belong to them.
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
SAMPLE = 8  # images on which the operations of a pass are counted


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
        """Return the innermost stage; "" outside all stages."""
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

    Teachers with equally many parameters share a count. Clients of one process share the fixed
    features of an image, so features are counted separately.
    """

    def __init__(self) -> None:
        self._images = Counter[Any]()
        self._examples: dict[Any, Callable[[], Any]] = {}  # each answers SAMPLE images

    def answered(self, teachers: Teachers, images: Images) -> None:
        """Count images that a client's teachers have answered."""
        models = [teacher for teacher in teachers.models if teacher]
        size = sum(tensor.numel() for model in models for tensor in model.parameters())
        self._images[size] += len(images)
        if size not in self._examples:
            few = Images(np.zeros((SAMPLE, *images.shape), np.uint8))
            self._examples[size] = lambda: teachers.sensitive_probabilities(few)

    def computed(self, features: FixedFeatures, images: torch.Tensor) -> None:
        """Count images whose fixed features were computed for an answer."""
        kind, few = type(features), torch.zeros(SAMPLE, *features.shape)
        self._images[kind] += len(images)
        self._examples.setdefault(kind, lambda: features._features(few))

    def operations(self) -> float:
        """Return the floating-point operations so far, of matrix products and convolutions."""
        from torch.utils.flop_counter import FlopCounterMode

        total = 0.0
        for key, example in self._examples.items():
            example()  # from here on the fixed features of a teacher's images are cached
            with torch.inference_mode(), FlopCounterMode(display=False) as counter:
                example()
            total += self._images[key] * counter.get_total_flops() / SAMPLE
        return total


@contextmanager
def timed(clock: Clock) -> Iterator[Passes]:
    """Time all stages in this block; yield the count of the teachers' passes."""
    passes = Passes()

    def in_stage(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            with clock.stage(stage):
                result = function(*arguments, **named)
            if stage == PASSES:
                passes.answered(*arguments)
            return result

        return call

    compute = FixedFeatures._features

    def counted(features: FixedFeatures, images: torch.Tensor) -> torch.Tensor:
        if clock.now == PASSES:
            passes.computed(features, images)
        return compute(features, images)

    with contextlib.ExitStack() as stack:
        for stage, owner, name in STAGES:
            function = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, in_stage(stage, function)))
        stack.enter_context(mock.patch.object(FixedFeatures, "_features", counted))
        yield passes


def matmul_peak(device: torch.device, size: int, times: int = 10) -> float:
    """Return the peak rate of float32 matrix products, in floating-point operations per second.

    Args:
        device: where to multiply; a CPU uses the threads that torch is set to.
        size: rows and columns of the matrices, >= 1.
        times: number of products, >= 1; the fastest counts.
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
