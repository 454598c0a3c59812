"""The precision of a network's layers: float32, or bfloat16 where its device has it.

Weights, gradients, the last layer and losses are float32 in both, except losses on BatchNorm
statistics, which take up to twice as long in float32. Private training uses float32.
"""

import math
from typing import TypeVar

import torch
from torch import nn

from fed_dpsd.config import Precision
from fed_dpsd.errors import UserError
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.generators import Generator
from fed_dpsd.privacy.training import CustomTraining, Training, TrainingMechanism

Network = TypeVar("Network", Classifier, Generator)


def choose_precision(
    network: Network, shape: tuple[int, ...], asked: Precision, device: torch.device
) -> Network:
    """Choose the precision of an untrained network on `device`; return the network.

    `auto` is bfloat16 if it is faster there: `network.least_work` says how many multiply-adds its
    convolutions need. Fixed features and their linear classifiers stay in float32.

    Args:
        network: the network; it may be on another device now.
        shape: shape of an input.
        asked: the key `precision`.
        device: where it computes.

    Raises:
        UserError: bfloat16 is asked for, but the device lacks it.
    """
    require_precision(asked, device)
    learns = not (isinstance(network, Classifier) and network.fixed)
    fast = (
        learns
        and asked == "auto"
        and has_bfloat16(device)
        and _is_faster_in_bfloat16(network, shape)
    )
    network.bfloat16 = fast or (learns and asked == "bfloat16")
    return network


def require_precision(asked: Precision, device: torch.device) -> None:
    """Check that the device has the precision.

    Raises:
        UserError: the device lacks it.
    """
    if asked == "bfloat16" and not has_bfloat16(device):
        kind = "processor" if device.type == "cpu" else "GPU"
        raise UserError(
            f"precision=bfloat16: this machine's {kind} does not compute in bfloat16; use "
            "precision=auto or float32"
        )


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device computes in bfloat16 without emulation."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # no public function exists
    return device.type == "cpu" and supported is not None and supported()


def trains_in_float32(training: Training) -> bool:
    """Return whether a training has steps of its own, which use float32."""
    return isinstance(training, TrainingMechanism | CustomTraining)


def precision_of(network: nn.Module) -> str:
    """Return the precision of a network or of an ensemble of them."""
    used = any(getattr(layer, "bfloat16", False) is True for layer in network.modules())
    return "bfloat16" if used else "float32"


def _is_faster_in_bfloat16(network: Classifier | Generator, shape: tuple[int, ...]) -> bool:
    """Return whether a network is large enough, and all its layers are faster in bfloat16."""
    work, in_groups = 0, False

    def count(layer: nn.Conv2d, _: object, output: torch.Tensor) -> None:
        nonlocal work
        work += layer.weight.numel() * output.shape[2] * output.shape[3]

    hooks = []
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            hooks.append(layer.register_forward_hook(count))
        # Convolutions and normalisations in groups take up to 2.6 times as long in bfloat16.
        groups = getattr(layer, "groups", 1), getattr(layer, "num_groups", 1)
        in_groups |= max(groups) > 1
    if not in_groups and network.least_work < math.inf:
        with torch.inference_mode():
            device = next(network.parameters()).device
            network.eval()(torch.zeros((1, *shape), device=device))
        network.train()
    for hook in hooks:
        hook.remove()
    return work >= network.least_work
