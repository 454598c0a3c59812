"""Classifiers for teachers and students. Input: (B, C, S, S) float in [0, 1].

Each has a backbone and a linear classifier; the generator's losses use the backbone's `features`. S
must be a multiple of 4, >= 8. Only cnn_bn, resnet9 and torchvision's own networks keep statistics
of the data. The others use GroupNorm if they need normalisation, so they can train on a single
record or class. `width` is the number of channels of the first layer; torchvision's architectures
ignore it.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fed_dpsd.config import ModelConfig, plugins
from fed_dpsd.errors import ConfigError
from fed_dpsd.models.fixed_features import FixedFeatures
from fed_dpsd.models.patches import Patches
from fed_dpsd.models.pretrained import LITE2, Pretrained, Public, public_of
from fed_dpsd.models.resnet9 import ResNet9
from fed_dpsd.models.scattering import Scattering
from fed_dpsd.models.torchvision_networks import GROUP_FORMS, NETWORKS, backbone


class Classifier(nn.Module):
    """A backbone from (B, C, S, S) to (B, F), with a linear classifier on top.

    Attributes:
        own: whether a user's function made the network.
        in_bfloat16: whether the backbone computes in bfloat16 (fed_dpsd/models/precision.py).
    """

    own = False
    in_bfloat16 = False

    def __init__(self, backbone: nn.Module, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Linear(num_features, num_classes)

    def keep_features(self, folder: Path) -> "Classifier":
        """Cache public features, and what fixed ones are made with, in a folder; return self."""
        for module in self.modules():
            if isinstance(module, Pretrained | FixedFeatures):
                module.folder = folder / "features"
        return self

    @property
    def fixed_features(self) -> FixedFeatures | None:
        """Return the features that procedural images determine, if there are any."""
        return next((m for m in self.modules() if isinstance(m, FixedFeatures)), None)

    @property
    def fixed(self) -> bool:
        """Return whether only the linear classifier is trained."""
        return next(self.backbone.parameters(), None) is None

    @property
    def ours(self) -> bool:
        """Return whether the backbone computes our fixed features, from no constants of others."""
        given = self.fixed_features is not None and self.fixed_features.given is not None
        return type(self.backbone) in (Scattering, Patches, Pretrained) and not given

    @property
    def features_key(self) -> tuple[object, ...]:
        """Return the settings that fixed features depend on (apart from images and device).

        A different number of threads may change the last bits. The settings of other backbones
        than ours are unknown, so each has its own key.
        """
        backbone = type(self.backbone) if self.ours else self.backbone
        public = getattr(self.backbone, "public", None)
        return backbone, public, self.classifier.in_features, torch.get_num_threads()

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Return the (B, F) output of the backbone, before the classifier."""
        inputs = 2 * images.to(self.classifier.weight.dtype) - 1
        if not self.in_bfloat16:
            return self.backbone(inputs)
        with torch.autocast(images.device.type, torch.bfloat16):
            return self.backbone(inputs).float()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (B, K) logits."""
        return self.classifier(self.features(images))


Build = Callable[[tuple[int, ...], int, int], Classifier]


def _two_convolutions(
    shape: tuple[int, ...], width: int, kernel: int, batch_norm: bool = False
) -> list[nn.Module]:
    """Build two convolutions that each halve the image, with 2 * width * (S / 4)^2 features."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((shape[0], width), (width, 2 * width)):
        layers.append(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2))
        if batch_norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers += [nn.MaxPool2d(2), nn.ReLU()]  # in this order, ReLU costs less
    return [*layers, nn.Flatten()]


def cnn(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build two 3x3 convolutions with pooling."""
    backbone = nn.Sequential(*_two_convolutions(shape, width, 3))
    return Classifier(backbone, 2 * width * (shape[1] // 4) ** 2, num_classes)


def cnn_tempered(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build a network with bounded activations, which suits DP-SGD's clipping.

    Papernot et al.: "Tempered Sigmoid Activations for Deep Learning with Differential Privacy",
    arXiv 2007.14191, use it on MNIST, with width 16; the padding is ours. Their sigmoid with scale
    2, temperature 2 and offset 1 is tanh. Smaller images are enlarged to 16 pixels, the smallest
    size that it accepts.
    """
    size = max(shape[1], 16)
    layers: list[nn.Module] = [nn.Upsample(size)] if shape[1] < size else []
    layers += [nn.Conv2d(shape[0], width, 8, 2, 3), nn.Tanh(), nn.MaxPool2d(2, 1)]
    layers += [nn.Conv2d(width, 2 * width, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1)]
    side = (size // 2 - 5) // 2
    layers += [nn.Flatten(), nn.Linear(2 * width * side**2, 2 * width), nn.Tanh()]
    return Classifier(nn.Sequential(*layers), 2 * width, num_classes)


def cnn3(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build three pairs of 3x3 convolutions with GroupNorm and pooling, for colour images."""
    channels, size, _ = shape
    layers: list[nn.Module] = []
    for outputs in (width, 2 * width, 4 * width):
        for _ in range(2):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(1, outputs)]
            layers.append(nn.ReLU())
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    return Classifier(
        nn.Sequential(*layers, nn.Flatten()), 4 * width * (size // 8) ** 2, num_classes
    )


def cnn_bn(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build two 5x5 convolutions with BatchNorm and pooling; width 16 is DENSE's MNIST network."""
    backbone = nn.Sequential(*_two_convolutions(shape, width, 5, batch_norm=True))
    return Classifier(backbone, 2 * width * (shape[1] // 4) ** 2, num_classes)


def lenet(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build two 5x5 convolutions and a hidden layer of 8 * width units, as in LeNet-5."""
    hidden = nn.Linear(2 * width * (shape[1] // 4) ** 2, 8 * width)
    backbone = nn.Sequential(*_two_convolutions(shape, width, 5), hidden, nn.ReLU())
    return Classifier(backbone, 8 * width, num_classes)


def cnn_datalens(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build the classifier of DataLens' evaluation without dropout; DataLens uses width 32.

    Wang et al.: "DataLens: Scalable Privacy Preserving Training via Gradient Compression and
    Aggregation", CCS 2021; evaluation/train-classifier-mnist.py of github.com/AI-secure/DataLens.
    """
    layers: list[nn.Module] = [nn.Conv2d(shape[0], width, 3), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(width, 2 * width, 3), nn.ReLU(), nn.Flatten()]
    size = (shape[1] - 2) // 2 - 2
    layers += [nn.Linear(2 * width * size**2, 2 * width), nn.ReLU()]
    return Classifier(nn.Sequential(*layers), 2 * width, num_classes)


def mlp(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build a network with a single hidden layer of 8 * width units."""
    channels, size, _ = shape
    hidden = 8 * width
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, hidden), nn.ReLU())
    return Classifier(backbone, hidden, num_classes)


def scattering(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build a linear classifier on at most 16 * width fixed features, which suits DP-SGD best."""
    backbone = Scattering(shape, 16 * width)
    return Classifier(backbone, backbone.num_features, num_classes)


def patches(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build a linear classifier on at most 16 * width fixed features that suit photographs."""
    backbone = Patches(shape, 16 * width)
    return Classifier(backbone, backbone.num_features, num_classes)


def pretrained(
    shape: tuple[int, ...], num_classes: int, width: int, public: Public = LITE2
) -> Classifier:
    """Build a linear classifier on public features and at most 16 * width fixed features."""
    backbone = Pretrained(shape, 16 * width, public)
    return Classifier(backbone, backbone.num_features, num_classes)


def resnet9(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build a ResNet-9 with BatchNorm, which learns CIFAR10 in minutes; DAWNBench uses width 64."""
    return Classifier(ResNet9(shape, width), 8 * width, num_classes)


def resnet9_gn(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build a ResNet-9 with GroupNorm, which DP-SGD can train."""
    return Classifier(ResNet9(shape, width, group_norm=True), 8 * width, num_classes)


def _torchvision_network(
    name: str, shape: tuple[int, ...], num_classes: int, width: int
) -> Classifier:
    """Build one of torchvision's networks unchanged; `width` is ignored."""
    return Classifier(*backbone(name, shape), num_classes)


def _torchvision() -> Any:
    """Import torchvision's models late: the import takes seconds, and few runs need it."""
    from torchvision import models

    return models


def resnet18(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build torchvision's ResNet-18; small images get a 3x3 stem of stride 1 without pooling."""
    backbone = _torchvision().resnet18(norm_layer=_group_norm)
    if shape[1] < LARGE:
        backbone.conv1 = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        backbone.maxpool = nn.Identity()
    else:
        backbone.conv1 = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
    backbone.fc = nn.Identity()
    return Classifier(backbone, 512, num_classes)


def mobilenet(shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build torchvision's MobileNetV3-small; its first stride is 1 for small images."""
    whole = _torchvision().mobilenet_v3_small(norm_layer=_group_norm)
    stride = 1 if shape[1] < LARGE else 2
    whole.features[0][0] = nn.Conv2d(shape[0], 16, 3, stride, padding=1, bias=False)
    backbone = nn.Sequential(whole.features, whole.avgpool, nn.Flatten())
    return Classifier(backbone, 576, num_classes)


# Architectures that DP-SGD cannot train: BatchNorm mixes the records of a batch, so no bound holds
# for a single record, and Opacus cannot separate the gradients of layers that work in place.
NO_DP_SGD = ("cnn_bn", "resnet9", "resnet18", "mobilenet", *GROUP_FORMS)

LARGE = 64  # pixels a side, from which networks reduce an image early

# Architectures in which only the linear classifier learns.
FIXED = ("scattering", "patches", "pretrained")

_group_norm = functools.partial(nn.GroupNorm, 1)

CLASSIFIERS: dict[str, Build] = {
    build.__name__: build
    for build in (
        *(cnn, cnn_bn, cnn_tempered, cnn3, cnn_datalens, lenet, mlp),
        *(scattering, patches, pretrained, resnet9, resnet9_gn, resnet18, mobilenet),
    )
}
CLASSIFIERS |= {
    name: functools.partial(_torchvision_network, name)
    for name in (*NETWORKS, *GROUP_FORMS.values())
}
OURS = frozenset(CLASSIFIERS)  # plug-ins and Python functions add others


def on_meta(name: str, shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Build an architecture on the meta device, without weights."""
    with torch.device("meta"):
        return CLASSIFIERS[name](shape, num_classes, width)


def builder(name: str, model: ModelConfig) -> Build:
    """Return the function that builds an architecture, with the experiment's public features."""
    build = CLASSIFIERS[name]
    return _pretrained_on(public_of(model)) if build is pretrained else build


def features_version(name: str, model: ModelConfig) -> list[str]:
    """Return the code and weights of an architecture's features, which name its teachers."""
    if name not in FIXED:
        return []
    public = [public_of(model).version] if name == "pretrained" else []
    return [*public, Scattering.version() if name == "scattering" else Patches.version()]


@functools.lru_cache(maxsize=16)
def _pretrained_on(public: Public) -> Build:
    return functools.partial(pretrained, public=public)


def add_networks(packages: Sequence[str]) -> None:
    """Import plug-ins and add the networks in their packages' CLASSIFIERS to ours.

    Raises:
        ConfigError: a plug-in cannot be imported, or a network's name is already taken.
    """
    for package in packages:
        for name, build in getattr(plugins.load(package), "CLASSIFIERS", {}).items():
            if CLASSIFIERS.setdefault(name, build) is not build:
                raise ConfigError(
                    [f"plugins={package}: its network name {name} is taken; rename it"]
                )
