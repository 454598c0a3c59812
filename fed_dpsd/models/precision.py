"""The precision of a network's layers: float32 or bfloat16.

Weights, gradients, the last layer and losses are float32 in both, except losses on BatchNorm
statistics, which take up to twice as long in float32. Private training uses float32. A student on
fixed features learns in float64 on a CPU (`in_float64`).
"""

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from fed_dpsd.config import Precision
from fed_dpsd.errors import UserError
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.fixed_features import FixedFeatures
from fed_dpsd.models.generators import Generator

Network = TypeVar("Network", Classifier, Generator)


def choose_precision(network: Network, asked: Precision, device: torch.device) -> Network:
    """Choose the precision of an untrained network on `device`; return the network.

    Fixed features and their linear classifiers stay in float32; with `auto`, so do a user's own
    networks, whose layers may not accept bfloat16.

    Args:
        network: the network; it may be on another device now.
        asked: the key `precision`.
        device: where it computes.

    Raises:
        UserError: bfloat16 is asked for, but the device lacks it.
    """
    chosen = uses_bfloat16(asked, device)
    if isinstance(network, Classifier):
        chosen = chosen and not network.fixed and not (network.own and asked == "auto")
    network.in_bfloat16 = chosen
    return network


def uses_bfloat16(asked: Precision, device: torch.device) -> bool:
    """Return whether networks on `device` compute in bfloat16: `auto` does on a GPU that has it.

    Raises:
        UserError: bfloat16 is asked for, but the device lacks it.
    """
    if asked == "auto":
        return device.type == "cuda" and has_bfloat16(device)
    if asked == "bfloat16" and not has_bfloat16(device):
        kind = "processor" if device.type == "cpu" else "GPU"
        raise UserError(
            f"precision=bfloat16: this machine's {kind} does not compute in bfloat16; use "
            "precision=auto or float32"
        )
    return asked == "bfloat16"


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device computes in bfloat16 without emulation."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # no public function exists
    return device.type == "cpu" and supported is not None and supported()


@contextlib.contextmanager
def in_float64(network: nn.Module) -> Iterator[None]:
    """Compute in float64 in this block if the network is linear on fixed features and on the CPU.

    Processors round differently. In float32, the steps of a generator amplify this until they make
    other images, and so another student. In float64, the images are the same to the byte. Other
    networks stay in float32, which is several times faster for them. Afterwards, the weights are
    rounded to float32.
    """
    fixed = isinstance(network, Classifier) and isinstance(network.backbone, FixedFeatures)
    if not fixed or next(network.parameters()).device.type != "cpu":
        yield
        return
    network.double()
    try:
        yield
    finally:
        network.float()


def precision_of(network: nn.Module) -> str:
    """Return the precision of a network or of an ensemble of them."""
    used = any(getattr(layer, "in_bfloat16", False) for layer in network.modules())
    return "bfloat16" if used else "float32"
