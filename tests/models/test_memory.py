"""Reuse of freed memory by the allocator."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
import torch
from fed_dpsd.models import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
else:  # glibc adapts what it keeps by default, so the control gives all back
    ctypes.CDLL(None).mallopt(-1, 0)
def step():
    activations = [torch.ones(7_000_000) for _ in range(8)]
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how):
    command = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow(seconds=12)
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_a_step_that_repeats_reuses_its_memory():
    assert page_faults("kept") < 1_000 < page_faults("given back")
