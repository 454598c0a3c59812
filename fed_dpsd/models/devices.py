"""The devices of this machine: its GPUs, and the device that a configured name denotes."""

from dataclasses import dataclass

import torch

from fed_dpsd.errors import UserError


@dataclass(frozen=True)
class Device:
    """A GPU that torch can use.

    Args:
        name: "cuda:N".
        model: the maker's name for it.
        total: bytes of its memory.
        free: bytes that no process holds.
    """

    name: str
    model: str
    total: int
    free: int

    def __str__(self) -> str:
        """Return the device in one line, with its memory in GiB."""
        return f"{self.name} {self.model}, {gib(self.free)} of {gib(self.total)} GiB free"


def gib(count: int) -> str:
    """Return a number of bytes in GiB, with two digits."""
    return f"{count / 2**30:.2f}"


def gpus() -> tuple[Device, ...]:
    """List the GPUs. This creates a CUDA context on each, whose memory is then no longer free."""
    devices = []
    for number in range(number_of_gpus()):
        free, total = torch.cuda.mem_get_info(number)
        devices.append(Device(f"cuda:{number}", torch.cuda.get_device_name(number), total, free))
    return tuple(devices)


def number_of_gpus() -> int:
    """Count the GPUs that torch can use in this process, without creating a context."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose(name: str) -> torch.device:
    """Return the device that a configured name denotes: auto is a GPU if there is one.

    Without a number, it is the process's first GPU. Ray shows each client process only its own GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def model_of(device: torch.device) -> str:
    """Return the model of a GPU, which affects rounding; "" for a CPU."""
    return "" if device.type == "cpu" else torch.cuda.get_device_name(device)


def require_device(key: str, name: str, count: int) -> None:
    """Check that a key's device is not a GPU, or is one of the `count` GPUs.

    Raises:
        UserError: the device does not exist; the message names one that does.
    """
    if not name.startswith("cuda"):
        return
    kind, _, number = name.partition(":")
    remedy = "auto or cpu"
    if not count:
        raise UserError(f"{key}={name}: this machine has no usable GPU; use {key}={remedy}")
    if number and int(number) >= count:
        known = " and ".join(f"{kind}:{each}" for each in range(count))
        raise UserError(f"{key}={name}: this machine has only {known}; use {key}=cuda:0, {remedy}")
