"""The device of a client's teachers, and the memory that a process may use for them."""

import functools
import os
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from fed_dpsd.config import Config, require_device
from fed_dpsd.models.devices import (
    PROCESSOR_BYTES,
    named_device,
    number_of_gpus,
    torch_device,
)

# Bytes of a GPU that a process may fill with teachers. Set it when several processes share a GPU;
# otherwise a process takes half of the memory that is free when it loads its first teacher.
TEACHER_BYTES = "FED_DPSD_TEACHER_BYTES"


def device_of(config: Config, client: int) -> torch.device:
    """Return the device on which a client's teachers answer, in this process's numbering.

    Raises:
        UserError: this process cannot use the device.
    """
    name = named_device(config, client)
    require_device("client_device", name, number_of_gpus())
    return torch_device(name)


class Owner(Protocol):
    """An owner of teachers in a `TeacherCache`."""

    def drop(self) -> None:
        """Release the owner's teachers, which are read again when needed."""


class TeacherCache:
    """A least-recently-used cache of teachers on a device.

    Args:
        limit: largest size in bytes; a single owner may exceed it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: WeakKeyDictionary[Owner, int] = WeakKeyDictionary()  # least recent first

    def use(self, owner: Owner, size: int) -> None:
        """Mark an owner's teachers (`size` bytes) as used; drop older teachers beyond the limit."""
        self._sizes.pop(owner, None)
        held = sum(self._sizes.values()) + size
        while held > self._limit and (oldest := next(iter(self._sizes), None)) is not None:
            held -= self._sizes.pop(oldest)
            oldest.drop()
        self._sizes[owner] = size


@functools.cache
def teacher_cache(device: torch.device) -> TeacherCache:
    """Return this process's cache of teachers on a device."""
    if device.type == "cpu":
        return TeacherCache(PROCESSOR_BYTES)
    given = os.environ.get(TEACHER_BYTES)
    return TeacherCache(int(given) if given else torch.cuda.mem_get_info(device)[0] // 2)
