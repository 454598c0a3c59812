"""Placement of a simulation's clients: GPUs, number of processes, and the share of each process.

Everything is computed from a table of devices, so a plan can be made for any machine.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fed_dpsd.client.device import TEACHER_BYTES
from fed_dpsd.client.learning import train
from fed_dpsd.config import Config, require_device
from fed_dpsd.data.intake import Records
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment
from fed_dpsd.models.classifiers import FIXED, Classifier, builder
from fed_dpsd.models.devices import Device, gib, gpus, named_device, number_of_gpus
from fed_dpsd.models.footprint import peak_bytes, weight_bytes
from fed_dpsd.models.inference import IMAGES_AT_ONCE

CONTEXT = 2**29  # bytes of a CUDA context, which every process has; an estimate
ROOM = 1.5  # factor on tensors, because the allocator rounds up and kernels need workspaces
SERVER = 2**30  # bytes of the server's generators, buffer and test images; excludes its student
UNITS = 10_000  # number of parts in which Ray counts a GPU
MOST = 100  # processes on a GPU; with more, rounding would let Ray place too many


@dataclass(frozen=True)
class Placement:
    """The GPUs that clients share; none if they compute on the CPU.

    Args:
        devices: the GPUs' names.
        processes: number of processes on all GPUs together.
        fraction: fraction of a GPU that Ray assigns to each process.
        share: bytes of a GPU for each process.
        teachers: bytes of this share that a process may use for teachers.
        pinned: whether the configuration names the GPU; otherwise Ray chooses one.
    """

    devices: tuple[str, ...] = ()
    processes: int = 0
    fraction: float = 0.0
    share: int = 0
    teachers: int = 0
    pinned: bool = False

    @property
    def backend(self) -> dict[str, dict[str, float]]:
        """Return the configuration of Flower's Ray backend for this placement.

        Flower starts as many processes as Ray's resources allow, so with GPUs, Ray gets as many
        processors as processes. A running cluster does not accept resources.
        """
        resources: dict[str, float] = {"num_cpus": 1, "num_gpus": self.fraction}
        if not self.devices or joins_cluster():
            return {"client_resources": resources}
        own: dict[str, float] = {"num_gpus": len(self.devices), "num_cpus": self.processes}
        return {"client_resources": resources, "init_args": own}

    @property
    def federation_config(self) -> str:
        """Return the options of `flwr run --federation-config` that request these shares."""
        return f"client-resources-num-cpus=1 client-resources-num-gpus={self.fraction:g}"

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment variables of Ray's processes."""
        if not self.devices:
            return {}
        # Ray numbers its GPUs from 0, so its number is not the named GPU's.
        numbered = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if self.pinned else {}
        return {TEACHER_BYTES: str(self.teachers), **numbered}

    def __str__(self) -> str:
        """Return the placement in one line."""
        if not self.devices:
            return "clients compute on the CPU"
        number = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return (
            f"{number} on {', '.join(self.devices)}, each {self.fraction:g} of a GPU, "
            f"{gib(self.share)} GiB, with {gib(self.teachers)} for teachers"
        )


def place(
    experiment: Experiment, nodes: int, devices: Sequence[Device], processors: int
) -> Placement:
    """Place the clients of a simulation on devices, before reading anything.

    Ray gives each process the same fraction of a GPU, so all shared GPUs host the same number of
    processes: as many as fit on the GPU with the least room. `client_device=cuda:N` selects another
    GPU.

    Args:
        experiment: the simulation.
        nodes: number of Flower's nodes, >= 1; a process runs one at a time.
        devices: the GPUs of this machine.
        processors: the number of its processors; each process takes one.

    Raises:
        UserError: a configured device does not exist, or a teacher does not fit.
    """
    config = experiment.config
    _require_devices(config, len(devices))
    examples = _on_gpus(config) if devices else {}
    if not examples:
        return Placement()
    pinned = ":" in config.client_device
    shared = [device for device in devices if not pinned or device.name == config.client_device]
    needs = [_process_bytes(experiment, client) for client in examples.values()]
    held, work = map(max, zip(*needs, strict=True))
    reserved = _server_bytes(config)
    room = {d.name: d.free - reserved * (d.name == _server_gpu(config)) for d in shared}
    tightest = min(shared, key=lambda device: room[device.name])
    least = room[tightest.name]
    fit = min(MOST, max(0, least) // (held + work))
    if not fit:
        needed = f"a process with the teachers of one client needs {gib(held + work)} GiB"
        if tightest.name == _server_gpu(config):
            needed += f", and the server {gib(reserved)} GiB,"
        elsewhere = ", client_device=cuda:N for another GPU," if len(devices) > 1 else ""
        raise UserError(
            f"client_device={config.client_device}: {needed} of {tightest}; use a smaller teacher "
            f"(model.teacher, model.teacher_width){elsewhere} or client_device=cpu"
        )
    processes = min(nodes, processors, fit * len(shared))
    each = math.ceil(processes / len(shared))
    share = least // each
    return Placement(
        devices=tuple(device.name for device in shared),
        processes=min(processes, each * len(shared)),
        fraction=gpu_fraction(each),
        share=share,
        teachers=share - work,
        pinned=pinned,
    )


def place_on_this_machine(experiment: Experiment, nodes: int) -> Placement:
    """Place a simulation's clients on this machine's devices; the local engine is one node.

    Raises:
        UserError: a device does not exist or is too small; nothing was read.
    """
    if not _on_gpus(experiment.config):  # listing the GPUs would take memory on each
        _require_devices(experiment.config, number_of_gpus())
        return Placement()
    return place(experiment, nodes, gpus(), os.cpu_count() or 1)


def _require_devices(config: Config, count: int) -> None:
    """Check that the devices of both sides exist on a machine with `count` GPUs."""
    sides = {"client_device": config.client_device, "server_device": config.server_device}
    if config.client_device == config.server_device:
        sides = {"device": config.client_device}  # sets both
    for key, name in sides.items():
        require_device(key, name, count)


def joins_cluster() -> bool:
    """Return whether Ray joins a running cluster, which has its own resources."""
    return os.environ.get("RAY_ADDRESS", "") not in ("", "local")


def gpu_fraction(processes: int) -> float:
    """Return the largest share of a GPU that each process can have in both Ray and Flower.

    Ray rounds a share to a ten-thousandth and `flwr run` rounds it to 32 bits, which may make it
    larger.
    """
    units = UNITS // processes
    while processes * float(np.float32(units / UNITS)) > 1:
        units -= 1
    return units / UNITS


# --- requirements ---


def _on_gpus(config: Config) -> dict[str, int]:
    """Return a client of each architecture that has teachers on a GPU."""
    clients = range(config.num_clients)
    return {config.architecture(c): c for c in clients if named_device(config, c) != "cpu"}


def _server_gpu(config: Config) -> str:
    """Return the server's GPU, if any: the first, unless the configuration names another."""
    return {"cpu": "", "auto": "cuda:0", "cuda": "cuda:0"}.get(
        config.server_device, config.server_device
    )


def _process_bytes(experiment: Experiment, client: int) -> tuple[int, int]:
    """Return the bytes of a client's teachers on a GPU, and of everything else in its process.

    Everything else is a context, and tensors while the process answers or learns. They are measured
    by passes on the meta device, which does no computation.
    """
    config = experiment.config
    teacher = on_meta(config, config.architecture(client), config.model.teacher_width)
    work = _answering_bytes(teacher, config)
    if experiment.training.reads == "images":
        work = max(work, _learning_bytes(teacher, config))
    return config.teachers_per_client * weight_bytes(teacher), CONTEXT + int(ROOM * work)


def _server_bytes(config: Config) -> int:
    """Estimate the server's bytes: its student's training, plus an allowance for the rest.

    A linear student of fixed features is small, so the allowance covers it.
    """
    model, work = config.model, 0
    if model.student not in FIXED:
        work = _learning_bytes(on_meta(config, model.student, model.student_width), config)
    return CONTEXT + SERVER + int(ROOM * work)


def on_meta(config: Config, architecture: str, width: int) -> Classifier:
    """Return a classifier on the meta device, which stores shapes but no data."""
    with torch.device("meta"):
        build = builder(architecture, config.model)
        return build(config.data.shape, config.data.num_classes, width)


def _answering_bytes(teacher: Classifier, config: Config) -> int:
    """Return the peak bytes of tensors while answering a batch of images."""

    def answer() -> None:
        with torch.inference_mode():
            teacher(torch.empty(IMAGES_AT_ONCE, *config.data.shape, device="meta")).softmax(1)

    return peak_bytes(teacher.eval(), answer)


def _learning_bytes(classifier: Classifier, config: Config) -> int:
    """Return the peak bytes of tensors during two training steps, which include Adam's state."""
    size = config.teacher.batch_size
    records = Records(np.zeros((size, *config.data.shape), np.uint8), np.zeros(size, np.int64))
    settings = dataclasses.replace(config.teacher, epochs=0, min_steps=2)
    config = dataclasses.replace(config, teacher=settings)

    def learn() -> None:
        train(classifier, records, config, torch.Generator(), torch.device("meta"))

    return peak_bytes(classifier, learn)
