"""This machine's devices: its GPUs, and the device that a configured name denotes."""

from dataclasses import dataclass

import torch

from fed_dpsd.config import Config
from fed_dpsd.errors import UserError
from fed_dpsd.models.classifiers import FIXED

# Bytes of main memory that a process may fill with teachers, for any number of clients.
PROCESSOR_BYTES = 2**28


@dataclass(frozen=True)
class Device:
    """A GPU that torch can use.

    Args:
        name: "cuda:N".
        model: the manufacturer's model name.
        total: total memory in bytes.
        free: free memory in bytes.
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
    """List the GPUs. This creates a CUDA context on each, which takes some of its free memory.

    Raises:
        UserError: a GPU cannot be used, for example because it has no memory for a context.
    """
    devices = []
    for number in range(number_of_gpus()):
        name = f"cuda:{number}"
        try:
            free, total = torch.cuda.mem_get_info(number)
            devices.append(Device(name, torch.cuda.get_device_name(number), total, free))
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            raise UserError(
                f"{name} cannot be used ({cause}); stop the processes that fill it (see "
                "nvidia-smi), hide it by CUDA_VISIBLE_DEVICES, or use device=cpu"
            ) from None
    return tuple(devices)


def number_of_gpus() -> int:
    """Count the GPUs that torch can use in this process, without creating a context."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def named_device(config: Config, client: int) -> str:
    """Return the name of the device that a client's teachers answer on and plain teachers learn on.

    The proof of noisy answers requires each teacher to be a function of its own shard, to the last
    bit. On a GPU, the choice of kernels may depend on the memory that other teachers leave free. So
    with secret noise, a teacher is on a GPU only if no other teacher of the run can be there.

    With fixed features, `auto` is the CPU, which computes the features once for all clients.
    """
    shared = config.federation.simulation or config.teachers_per_client > 1
    if config.noise == "secure" and shared:
        return "cpu"
    if config.client_device == "auto" and config.architecture(client) in FIXED:
        return "cpu"
    return config.client_device


def torch_device(name: str) -> torch.device:
    """Return the device that a configured name denotes; auto is a GPU if there is one.

    Without a number, this is the process's first GPU. Ray shows each client process only its own
    GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def gpu_model(device: torch.device) -> str:
    """Return the model of a GPU, which affects rounding; "" for a CPU."""
    return "" if device.type == "cpu" else torch.cuda.get_device_name(device)
