"""The device of a client's teachers, and the memory that a process may use for them."""

import functools
import os
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from fed_dpsd.config import Config, require_device
from fed_dpsd.models.devices import choose, named_device, number_of_gpus
from fed_dpsd.privacy.label_dp import LabelPrivate
from fed_dpsd.privacy.training import CustomTraining, Training, TrainingMechanism

# Bytes of a GPU that a process may fill with teachers. Set it when several processes share a GPU;
# otherwise a process takes half of the memory that is free when it loads its first teacher.
TEACHER_BYTES = "FED_DPSD_TEACHER_BYTES"
# Bytes of main memory that a process fills, so that it does not grow with the clients.
PROCESSOR_BYTES = 2**28


def device_of(config: Config, client: int) -> torch.device:
    """Return the device on which a client's teachers answer, in this process's numbering.

    Raises:
        UserError: this process cannot use the device.
    """
    name = named_device(config, client)
    require_device("client_device", name, number_of_gpus())
    return choose(name)


def learns_there(training: Training) -> bool:
    """Return whether teachers learn on that device; all except plain teachers learn on the CPU.

    Exact sums of clipped gradients (privacy/lattice.py) are proven for CPU arithmetic.
    """
    return not isinstance(training, TrainingMechanism | CustomTraining | LabelPrivate)


class Owner(Protocol):
    """An owner of teachers on a device."""

    def drop(self) -> None:
        """Release the owner's teachers, which are read again when needed."""


class Held:
    """The last-used teachers on a device, up to a limit in bytes that one owner may exceed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: WeakKeyDictionary[Owner, int] = WeakKeyDictionary()  # the oldest use first

    def use(self, owner: Owner, size: int) -> None:
        """Mark an owner's teachers (`size` bytes) as used; drop older teachers beyond the limit."""
        self._sizes.pop(owner, None)
        held = sum(self._sizes.values()) + size
        while held > self._limit and (oldest := next(iter(self._sizes), None)) is not None:
            held -= self._sizes.pop(oldest)
            oldest.drop()
        self._sizes[owner] = size


@functools.cache
def held_on(device: torch.device) -> Held:
    """Return the teachers that this process holds on a device."""
    if device.type == "cpu":
        return Held(PROCESSOR_BYTES)
    given = os.environ.get(TEACHER_BYTES)
    return Held(int(given) if given else torch.cuda.mem_get_info(device)[0] // 2)
