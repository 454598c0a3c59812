"""The papers' teachers: torchvision's networks, for images of any size and one or three channels.

Each is torchvision's network with BatchNorm, so models trained elsewhere can be loaded (see
`rename_weights` and `Adapted.normalise`). Images that are too small for a network are enlarged.
Dropout is off, because DP-SGD cannot bound a record's contribution with it. For DP-SGD, each
network has a form with GroupNorm and a name that ends with _gn.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

# For each network, the name of its last layer and the smallest image side that it accepts.
NETWORKS = {
    "alexnet": ("classifier.6", 63),
    "vgg19_bn": ("classifier.6", 32),
    "resnet34": ("fc", 28),
    "resnet50": ("fc", 28),
    "wide_resnet50_2": ("fc", 28),
    "densenet161": ("classifier", 32),
    "mobilenet_v2": ("classifier.1", 28),
    "shufflenet_v2_x1_0": ("fc", 28),
    "googlenet": ("fc", 28),
    "vit_b": ("heads.head", 28),
}
# For each network with BatchNorm, the name of its form with GroupNorm.
GROUP_FORMS = {
    name: f"{name.removesuffix('_bn')}_gn" for name in NETWORKS if name not in ("alexnet", "vit_b")
}
PATCHES = 16, 8, 4, 2  # sides of ViT's patches, at least 7 along an image's side


class Adapted(nn.Module):
    """A network that normalises its images and enlarges them to `least` pixels per side.

    The `mean` and `std` of pixels in [0, 1] are part of its state, so they are saved with it.

    Args:
        network: the network, from (B, C, S, S) to (B, F).
        least: the smallest side that the network accepts.
        channels: C.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, network: nn.Module, least: int, channels: int) -> None:
        super().__init__()
        self.network, self.least = network, least
        for name in ("mean", "std"):
            self.register_buffer(name, torch.empty(channels))
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Set the normalisation to map pixels from [0, 1] to [-1, 1]."""
        self.mean.fill_(0.5)
        self.std.fill_(0.5)

    def normalise(self, facts: Mapping[str, str]) -> None:
        """Set the normalisation of pixels in [0, 1] from a file's JSON lists "mean" and "std".

        Raises:
            ValueError: a list is missing, or is not a list with a number for each channel.
        """
        channels = len(self.mean)
        for name in ("mean", "std"):
            try:
                numbers = [float(number) for number in json.loads(facts[name])]
            except (KeyError, ValueError, TypeError):
                numbers = []
            if len(numbers) != channels or not all(map(math.isfinite, numbers)):
                raise ValueError(
                    f"its metadata have {name}={facts.get(name)}; save it with the list of "
                    f"{channels} numbers that normalised pixels in [0, 1]"
                )
            self.get_buffer(name).copy_(torch.tensor(numbers))
        if self.std.min() <= 0:
            raise ValueError(f"its metadata have std={facts['std']}; all must be above 0")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (B, C, S, S) images in [-1, 1] to (B, F) features."""
        mean, std = self.mean[:, None, None], self.std[:, None, None]
        images = ((images + 1) / 2 - mean) / std
        if images.shape[-1] < self.least:
            images = functional.interpolate(
                images, (self.least, self.least), mode="bilinear", align_corners=False
            )
        return self.network(images)


def backbone(name: str, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Build a network without its last layer; return it and the number of its features.

    Args:
        name: a network in `NETWORKS` or a form in `GROUP_FORMS`.
        shape: (C, S, S) of the images.
    """
    kind = {form: network for network, form in GROUP_FORMS.items()}.get(name, name)
    head, least = NETWORKS[kind]
    network = _vit(shape[1]) if kind == "vit_b" else _plain(kind)
    layer: Any  # torch types an attribute that only some layers have as a tensor or module
    for layer in network.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        elif hasattr(layer, "inplace"):
            layer.inplace = False  # Opacus cannot handle in-place layers
    if kind != name:
        _use_group_norm(network)
    if shape[0] != 3:
        first = next(n for n, layer in network.named_modules() if isinstance(layer, nn.Conv2d))
        conv = network.get_submodule(first)
        assert isinstance(conv, nn.Conv2d)
        network.set_submodule(first, _with_channels(conv, shape[0]))
    last = network.get_submodule(head)
    assert isinstance(last, nn.Linear)
    network.set_submodule(head, nn.Identity())
    return Adapted(network, least, shape[0]), last.in_features


def rename_weights(
    architecture: str, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return weights with torchvision's names renamed to ours; others are unchanged.

    A torchvision state dict does not record how pixels were normalised (see `Adapted.normalise`).

    Args:
        architecture: a name in `NETWORKS`; for any other name, weights are returned unchanged.
        weights: tensors by name, such as the `state_dict` of torchvision's own network.
    """
    if architecture not in NETWORKS or any(name.startswith("backbone.") for name in weights):
        return dict(weights)
    head = NETWORKS[architecture][0]
    return {
        name.replace(head, "classifier", 1)
        if name.rpartition(".")[0] == head
        else f"backbone.network.{name}": tensor
        for name, tensor in weights.items()
    }


def _plain(name: str) -> nn.Module:
    from torchvision import models  # takes seconds, and few runs need it

    options: dict[str, Any] = {"weights": None}
    if name == "googlenet":
        options |= {"aux_logits": False, "init_weights": False}
    network: nn.Module = getattr(models, name)(**options)
    return network


def _vit(size: int) -> nn.Module:
    from torchvision.models import VisionTransformer

    patch = next((p for p in PATCHES if size % p == 0 and size // p >= 7), 1)
    network: nn.Module = VisionTransformer(size, patch, 12, 12, 768, 3072)
    return network


class Copy(nn.Module):
    """A layer that copies its input, so that torchvision may modify it in place.

    For its gradients, Opacus keeps the outputs of layers that have weights.
    """

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy."""
        return values.clone()


def _use_group_norm(network: nn.Module) -> None:
    """Replace each BatchNorm with a single-group GroupNorm, followed by a copy of its output."""
    for path, layer in list(network.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            normed = nn.Sequential(nn.GroupNorm(1, layer.num_features), Copy())
            network.set_submodule(path, normed)


def _with_channels(conv: nn.Conv2d, channels: int) -> nn.Conv2d:
    """Return a new convolution like `conv`, but with the given number of input channels."""
    return nn.Conv2d(
        channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        conv.stride,  # type: ignore[arg-type]
        conv.padding,  # type: ignore[arg-type]
        bias=conv.bias is not None,
    )
