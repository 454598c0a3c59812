"""Public features from any network of torchvision or timm, with weights from a safetensors file.

The file's SHA-256 identifies the weights, so that all sites compute the same features. It is
compared before the file's tensors are read.
"""

import difflib
import functools
import hashlib
import importlib
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fed_dpsd.errors import UserError, one_line
from fed_dpsd.models.fixed_features import version_of

# ImageNet's, which all networks of torchvision normalise pixels in [0, 1] by
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LIBRARIES = ("torchvision", "timm")
# What initialises weights; torch.nn.init's functions are seen as a whole.
DRAWS = ("normal_", "uniform_", "erfinv_", "trunc_normal_", "kaiming_uniform_")


@dataclass(frozen=True)
class PublicNetwork:
    """The features of a network: the inputs of its last linear layer.

    Args:
        backbone: torchvision/NAME or timm/NAME.
        pixels: side that images are scaled to.
        digest: "sha256:" and the hexadecimal SHA-256 of the file; None if it is not given.
        file: path of the safetensors file; None if it is not given. Sites may have it in different
            places, so it identifies nothing.
    """

    backbone: str
    pixels: int
    digest: str | None
    file: str | None

    @property
    def num_features(self) -> int:
        """F, the number of features.

        Raises:
            UserError: the network is unknown, its library is missing, or it does not fit.
        """
        return _shapes(self.backbone, self.pixels)[0]

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights; errors as for `num_features`."""
        return 4 * sum(map(math.prod, _shapes(self.backbone, self.pixels)[1].values()))

    @property
    def version(self) -> str:
        """The name of these features in caches."""
        library = _library(self.backbone).__version__
        files = __file__, str(Path(__file__).with_name("pretrained.py"))
        facts = version_of(*files), library, self.backbone, self.pixels, self.digest
        return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()

    @property
    def note(self) -> str:
        """What a privacy card says about these features."""
        return (
            f"features are {self.backbone}'s with the weights {self.digest}, whose training data "
            "is public by assumption"
        )

    def require(self) -> None:
        """Check the digest, then the network and the file's tensors; read no weights.

        Raises:
            UserError: with the key, its value and a remedy.
        """
        if self.file is None:
            raise UserError(
                f"model.backbone={self.backbone} has no weights; give model.weights=FILE, a "
                "safetensors file"
            )
        actual = digest_of("model.weights", self.file)
        if self.digest is None:
            raise UserError(
                f"model.digest is missing: model.weights={self.file} has {actual}; if all sites "
                f"are to use this file, add model.digest={actual}"
            )
        if self.digest != actual:
            raise UserError(
                f"model.digest={self.digest}: model.weights={self.file} has {actual}; give the "
                f"file with this digest, or model.digest={actual} at all sites"
            )
        given = shapes_in("model.weights", self.file)
        for name, shape in _shapes(self.backbone, self.pixels)[1].items():
            if given.get(name) != shape:
                raise UserError(
                    f"model.weights={self.file} does not fit model.backbone={self.backbone}: "
                    f"{name} has shape {given.get(name, 'none')} instead of {shape}; give weights "
                    "of this network, with its library's names"
                )

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Map (B, C, S, S) floats in [-1, 1], C = 1 or 3, to (B, F).

        Raises:
            UserError: the file is missing or has another digest.
        """
        network, mean, std = _loaded(self, images.device)
        images = images.expand(-1, 3, -1, -1)
        size, large = (self.pixels, self.pixels), images.shape[-1] > self.pixels
        scaled = functional.interpolate(
            images, size, mode="bilinear", align_corners=False, antialias=large
        )
        normalised = ((scaled + 1) / 2 - mean) / std
        return network(normalised.contiguous(memory_format=torch.channels_last))


def digest_of(key: str, file: str) -> str:
    """Return "sha256:" and the SHA-256 of a file of weights, which a key names.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        facts = Path(file).stat()
        return _digest_of(file, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)
    except OSError as error:
        raise UserError(f"{key}={file}: {error.strerror}; give a safetensors file") from None


def shapes_in(key: str, file: str) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a file of weights, which a key names.

    Raises:
        UserError: the file is not a safetensors file.
    """
    try:
        with safetensors.safe_open(file, "pt") as content:
            names = content.keys()
            return {name: content.get_slice(name).get_shape() for name in names}
    except SafetensorError:
        raise UserError(
            f"{key}={file} is not a safetensors file; write it with "
            "safetensors.torch.save_file(network.state_dict(), FILE)"
        ) from None


@functools.lru_cache(maxsize=16)
def _digest_of(file: str, *_: int) -> str:
    """Return a file's digest, which is computed again if the other arguments change."""
    with open(file, "rb") as content:
        return f"sha256:{hashlib.file_digest(content, 'sha256').hexdigest()}"


@functools.lru_cache(maxsize=4)
def _loaded(source: PublicNetwork, device: torch.device) -> tuple[nn.Module, Any, Any]:
    """Return the network with its weights on a device, and the (3, 1, 1) mean and std of pixels."""
    # A first call in inference mode would make tensors that cannot carry gradients later.
    with torch.inference_mode(False), torch.no_grad():
        network, *pixels = _headless(source.backbone)
        if device.type != "meta":  # there, only shapes are wanted
            network.load_state_dict(_weights(source, network))
        network.to(device).to(memory_format=torch.channels_last)
        mean, std = (torch.tensor(own, device=device)[:, None, None] for own in pixels)
        return network, mean, std


def _weights(source: PublicNetwork, network: nn.Module) -> dict[str, torch.Tensor]:
    source.require()
    content = Path(str(source.file)).read_bytes()
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != source.digest:  # it has changed since
        raise UserError(f"model.weights={source.file} has changed; give {source.digest} again")
    weights = safetensors.torch.load(content)
    return {name: weights[name] for name in network.state_dict()}


@functools.lru_cache(maxsize=16)
def _shapes(backbone: str, pixels: int) -> tuple[int, dict[str, list[int]]]:
    """Return the number of features, and the shape of each tensor that a file must hold."""
    with torch.no_grad():
        network = _headless(backbone)[0].to("meta")
        try:
            rows = network(torch.empty(2, 3, pixels, pixels, device="meta"))
        except Exception as error:  # whatever the network raises
            raise UserError(
                f"model.pixels={pixels}: {backbone} does not take images of this size "
                f"({one_line(error)}); use the size that it was trained on"
            ) from None
    if rows.ndim != 2:
        raise UserError(
            f"model.backbone={backbone} gives features of shape {list(rows.shape[1:])} instead of "
            "one row for each image; use a network that pools them"
        )
    return rows.shape[1], {name: list(own.shape) for name, own in network.state_dict().items()}


class _NoDraws(TorchFunctionMode):
    """A block that leaves new weights undefined, because drawing them may take a minute."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        if function.__name__ in DRAWS:
            return values[0]
        return function(*args, **(kwargs or {}))


def _library(backbone: str) -> ModuleType:
    """Import a network's library. A message may name a network, but no other module to import."""
    library = backbone.partition("/")[0]
    if library not in LIBRARIES:
        raise UserError(
            f"model.backbone={backbone} is unknown; write torchvision/NAME or timm/NAME, such as "
            "torchvision/resnet50"
        )
    try:
        return importlib.import_module(library)
    except ImportError:
        raise UserError(
            f"model.backbone={backbone}: {library} is not installed; run pip install {library}"
        ) from None


def _headless(backbone: str) -> tuple[nn.Module, Any, Any]:
    """Return a new network on the CPU without its last layer, and the mean and std of its pixels.

    Its weights are undefined.
    """
    library, name = _library(backbone), backbone.partition("/")[2]
    quiet = warnings.catch_warnings(action="ignore")  # on how two networks would be initialised
    with quiet, torch.device("cpu"), torch.random.fork_rng(devices=[]), _NoDraws():
        timm = library.__name__ == "timm"
        made = _timm(library, name) if timm else (_torchvision(name), MEAN, STD)
        made[0].eval().requires_grad_(False)
        return made


def _torchvision(name: str) -> nn.Module:
    from torchvision import models  # takes seconds, and few runs need it

    _require_known("torchvision", name, known := models.list_models(models), name in known)
    network: nn.Module = models.get_model(name, weights=None)
    linear = [path for path, own in network.named_modules() if isinstance(own, nn.Linear)]
    if not linear:
        raise UserError(
            f"model.backbone=torchvision/{name} does not end with a linear layer; use another"
        )
    network.set_submodule(linear[-1], nn.Identity())
    if hasattr(network, "transform_input"):  # its published weights take pixels in [-1, 1]
        network.transform_input = True  # type: ignore[assignment]
    return network


def _timm(timm: ModuleType, name: str) -> tuple[nn.Module, Any, Any]:
    # Other names, such as hf-hub:NAME, would read files or download them.
    _require_known("timm", name, timm.list_models(), timm.is_model(name))
    network = timm.create_model(name, pretrained=False, num_classes=0)
    return network, network.pretrained_cfg["mean"], network.pretrained_cfg["std"]


def _require_known(library: str, name: str, names: list[str], known: bool) -> None:
    if not known:
        near = difflib.get_close_matches(name, names, 3)
        close = " or ".join(f"{library}/{each}" for each in near) or "one of its list_models()"
        raise UserError(f"model.backbone={library}/{name} is unknown to {library}; use {close}")
