"""Classifiers and generators, and functions that draw, read and write their weights.

Both sides use them, on arrays of images: knows no client, file of records, message or method.
Caches of features (fixed_features.py, pretrained.py, inference.py) may hold private values, and
stay on their machine.
"""

import contextlib
import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from fed_dpsd.storage import write_atomically

POSITIONS = "class_token", "pos_embedding"  # of vision transformers
# Parameters of glibc's allocator, from its malloc.h, and the bytes that it keeps.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
KEPT_BYTES, KEPT_BLOCK = 2**29, 2**25

Module = TypeVar("Module", bound=nn.Module)


def initialise(build: Callable[[], Module], generator: torch.Generator) -> Module:
    """Build a module and draw its weights (Xavier, zero bias) only from `generator`.

    The module is built on the meta device, so no layer draws from torch's global generator.
    Convolutions use the channels-last layout, which is about twice as fast on CPUs.

    Raises:
        TypeError: there is no rule for the weights of a layer.
    """
    with torch.device("meta"):
        module = build()
    # `to_empty` does the same, but imports SymPy for it.
    module._apply(lambda meta: torch.empty(meta.shape, dtype=meta.dtype))
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                _draw(nn.init.xavier_uniform_, layer.weight, generator=generator)
                if layer.bias is not None:
                    layer.bias.zero_()
            elif isinstance(layer, nn.MultiheadAttention):
                _draw(nn.init.xavier_uniform_, layer.in_proj_weight, generator=generator)
                layer.in_proj_bias.zero_()
            elif isinstance(layer, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
                if isinstance(layer, nn.BatchNorm2d):
                    layer.reset_running_stats()
                for weights, value in ((layer.weight, 1), (layer.bias, 0)):
                    if weights is not None:  # as with affine=False, or without a bias
                        weights.fill_(value)
            elif reset := getattr(layer, "reset_buffers", None):
                reset()
            else:
                for name, weights in layer.named_parameters(recurse=False):
                    if name not in POSITIONS:
                        raise TypeError(
                            f"there is no rule for the weights of {type(layer).__name__}"
                        )
                    _draw(nn.init.normal_, weights, std=0.02, generator=generator)
    return module.to(memory_format=torch.channels_last)


def _draw(rule: Callable[..., object], weights: torch.Tensor, **settings: Any) -> None:
    """Draw weights in float64, so that processors that round differently draw the same float32."""
    drawn = torch.empty(weights.shape, dtype=torch.float64)
    rule(drawn, **settings)
    weights.copy_(drawn)


def _state(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and BatchNorm statistics, without the batch counter."""
    return [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]


def to_vector(module: nn.Module) -> torch.Tensor:
    """Return a module's parameters and statistics, in its order, as (P,) float32 on the CPU."""
    return torch.cat([tensor.detach().cpu().reshape(-1) for tensor in _state(module)])


def number_of_weights(module: nn.Module) -> int:
    """Return the length of `to_vector`."""
    return sum(tensor.numel() for tensor in _state(module))


def load_vector(module: nn.Module, vector: torch.Tensor) -> None:
    """Load the result of `to_vector` into a module of the same architecture.

    Raises:
        ValueError: the vector has the wrong length.
    """
    tensors = _state(module)
    expected = sum(tensor.numel() for tensor in tensors)
    if vector.shape != (expected,):
        raise ValueError(f"{vector.numel()} weights instead of {expected}")
    for tensor, part in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the names, shapes, types and bytes of tensors, ordered by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name].detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def write_weights(module: nn.Module, path: Path, facts: dict[str, str] | None = None) -> None:
    """Write a module's tensors to a safetensors file, for `read_weights` and `read_facts`.

    Raises:
        UserError: the file cannot be written.
    """
    weights = {name: t.detach().cpu().contiguous() for name, t in module.state_dict().items()}
    write_atomically(path, safetensors.torch.save(weights, facts))


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, by name.

    Raises:
        ValueError: the file is missing or is not a safetensors file.
    """
    return read_file(path)[0]


def read_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and metadata of a safetensors file, which match even if it changes.

    Raises:
        ValueError: the file is missing or is not a safetensors file.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except SafetensorError:
        raise ValueError(f"{path} is not a safetensors file") from None


def read_facts(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file that `read_weights` has read."""
    with safetensors.safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def weights_mismatch(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> str:
    """Return in one line why `weights` do not fit `module`; "" if they fit."""
    expected = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    if missing := sorted(set(expected) - set(shapes)):
        return f"{missing[0]} is missing ({len(missing)} tensors in all)"
    if unknown := sorted(set(shapes) - set(expected)):
        return f"{unknown[0]} is unknown ({len(unknown)} tensors in all)"
    for name, shape in expected.items():
        if shapes[name] != shape:
            return f"{name} has shape {shapes[name]}, but the architecture needs {shape}"
    return ""


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use `count` torch threads inside the block, and restore the previous number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def layers_draw_from(draws: torch.Generator, device: torch.device) -> Iterator[None]:
    """Seed torch's own generators, which layers such as dropout draw from, and restore them."""
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        torch.set_rng_state(draws.get_state())
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(draws.initial_seed())
        yield


def keep_freed_memory() -> None:
    """Let this process reuse freed memory, for the rest of its life, on systems with glibc.

    By default, glibc may return the activations of a step to the system. The next step then spends
    up to a third of its time on getting and clearing new pages.
    """
    if set_parameter := getattr(ctypes.CDLL(None), "mallopt", None):
        set_parameter(MMAP_THRESHOLD, KEPT_BLOCK)
        set_parameter(TRIM_THRESHOLD, KEPT_BYTES)
