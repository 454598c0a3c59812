"""The memory needs of a computation, measured on torch's meta device without running it."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers."""
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def peak_bytes(module: nn.Module, work: Callable[[], object]) -> int:
    """Return the peak bytes of tensors on the meta device while `work` runs.

    The tensors of `module`, on the meta device, count from the start. A GPU needs more memory:
    kernels have workspaces, and its allocator rounds up.
    """
    storages = _Storages()
    for tensor in module.state_dict().values():
        storages.count(tensor)
    with storages:
        work()
    return storages.peak


class _Storages(TorchDispatchMode):
    """Count the live storages on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self._alive = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until it is freed; views share a storage."""
        storage = tensor.untyped_storage()
        if tensor.device.type != "meta" or storage in self._known:
            return
        self._known.add(storage)
        self._alive += storage.nbytes()
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self._alive -= size

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Perform an operation and count its results."""
        returned = operation(*args, **(kwargs or {}))
        for each in tree_leaves(returned):
            if isinstance(each, torch.Tensor):
                self.count(each)
        return returned
