"""Two GPUs that are not there, in every Python process with this folder in PYTHONPATH.

Each has room for one client process of the test. Tensors stay on the CPU. Every process that
chooses a device adds a line to the file FAKE_GPUS: its number, the GPUs that it sees, and its bytes
for teachers.
"""

import importlib.abc
import importlib.util
import json
import os
import sys

DEVICES = "fed_dpsd.models.devices"
FREE = 5 * 2**29  # bytes


def visible():
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    return [number for number in given.split(",") if number]


def replace(devices):
    import torch

    def gpus():
        count = len(visible())
        return tuple(devices.Device(f"cuda:{n}", "fake", 2 * FREE, FREE) for n in range(count))

    def torch_device(name):
        wants = name.startswith("cuda") or (name == "auto" and visible())
        line = [os.getpid(), visible() if wants else None, os.environ.get("FED_DPSD_TEACHER_BYTES")]
        with open(os.environ["FAKE_GPUS"], "a") as file:
            file.write(json.dumps(line) + "\n")
        return torch.device("cpu")

    devices.gpus, devices.torch_device = gpus, torch_device
    devices.number_of_gpus = lambda: len(visible())


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != DEVICES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            replace(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("FAKE_GPUS"):
    sys.meta_path.insert(0, Finder())
    if os.path.basename(sys.argv[0] if hasattr(sys, "argv") else "") == "flwr-simulation":
        os.cpu_count = lambda: 8
