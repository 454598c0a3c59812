"""Reuse of freed memory by the allocator."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
import torch
from fed_dpsd.models import initialise, keep_freed_memory
from fed_dpsd.models.classifiers import CLASSIFIERS
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    keep_freed_memory()
network = initialise(lambda: CLASSIFIERS["cnn"]((3, 32, 32), 10, 32), torch.Generator())
images = torch.zeros(128, 3, 32, 32).contiguous(memory_format=torch.channels_last)
def step():
    network(images).sum().backward()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how):
    command = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_a_step_that_repeats_reuses_its_memory():
    assert page_faults("kept") < page_faults("given back") / 3
