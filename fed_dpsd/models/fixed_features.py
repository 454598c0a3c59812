"""Fixed features: an image's coefficients, whitened with procedural images; nothing is learned.

With little data or a small privacy budget, a linear classifier on such features performs best: it
has few parameters and does not need to learn what images look like (Tramer and Boneh:
"Differentially Private Learning Needs Better Features (or Much More Data)", arXiv 2011.11660).
Nothing is fitted to private data.
"""

import contextlib
import functools
import hashlib
import inspect
import itertools
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fed_dpsd.context import setting
from fed_dpsd.models import procedural, torch_threads
from fed_dpsd.storage import Unwritable, write_together

WHITENING = 0.5  # a principal component is divided by its standard deviation to this power
REMEMBERED = 4_096  # batches whose features are cached
SIDE = procedural.SIDE  # pixels; larger images are reduced to this side
AT_ONCE = 2**23  # pixels of large images that are computed at once
CACHED = 16 * 3 * 32**2  # the same of small images, whose maps fit into a processor's cache

Remembering = Literal["asked", "records", "nothing"]
_remembering: ContextVar[Remembering] = ContextVar("remembering", default="asked")
_by_batch: ContextVar[bool] = ContextVar("by_batch", default=True)


def feature_cache(images: Remembering) -> AbstractContextManager[None]:
    """Use the cache for `images` in this block; "nothing" disables caching.

    Features of records and of requested images are cached separately, because the time of a
    response must not reveal whether a requested image is a record.
    """
    return setting(_remembering, images)


def no_batch_cache() -> AbstractContextManager[None]:
    """Cache no batch's features in this block; caches of single images' features remain."""
    return setting(_by_batch, False)


def memory_for(images: torch.Tensor) -> Remembering:
    """Return the cache to use for `images`: "nothing" if gradients are needed or off the CPU."""
    forgotten = images.requires_grad or images.device.type != "cpu"
    return "nothing" if forgotten or torch.compiler.is_compiling() else _remembering.get()


class FixedFeatures(nn.Module, ABC):
    """Module from (B, C, S, S) to (B, F), with F = min(num_features, number of coefficients).

    The principal components of *procedural* images make the coefficients nearly uncorrelated. Each
    row has root mean square 1, so the gradient of one record has a known length. There are no
    parameters.

    Args:
        shape: (C, S, S) of the images, S >= 8.
        num_features: the largest number of features; the leading components are kept.

    Attributes:
        folder: where other processes find the principal components, if set.
        given: the constants to compute with, such as an exported student's; None computes them.
    """

    folder: Path | None = None
    given: Mapping[str, torch.Tensor] | None = None

    def __init__(self, shape: tuple[int, ...], num_features: int) -> None:
        super().__init__()
        self.shape = shape
        self.num_features = min(num_features, self.num_coefficients(shape))

    @classmethod
    def version(cls) -> str:
        """Return the name of these features in caches."""
        return version_of(__file__, inspect.getfile(cls), procedural.__file__)

    @staticmethod
    @abstractmethod
    def num_coefficients(shape: tuple[int, ...]) -> int:
        """Return the number of coefficients of an image of `shape`."""

    @staticmethod
    @abstractmethod
    def coefficients(
        images: torch.Tensor, given: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Map (B, C, S, S) floats to (B, P) coefficients, with rows of length 1."""

    @staticmethod
    @abstractmethod
    def examples(shape: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
        """Draw the procedural images that determine the principal components, in parts."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (B, C, S, S) floats in [-1, 1] to (B, F) float32."""
        images = images.contiguous(memory_format=torch.channels_last)  # the layout affects rounding
        memory = memory_for(images)
        if memory == "nothing" or not _by_batch.get() or self.given is not None:
            return self._features(images)
        # In a simulation all clients answer the same images, so features are cached.
        remembered = _remembered(type(self), self.shape, self.num_features, memory)
        digest = hashlib.blake2b(images.contiguous().numpy().tobytes(), digest_size=16).digest()
        # A different number of threads may change the last bits.
        key = images.shape, images.dtype, torch.get_num_threads(), digest
        if key not in remembered:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
            ):  # a classifier may train on them
                # Made before larger tensors: kept after them, rows would fragment the memory.
                rows = images.new_empty(len(images), self.num_features)
                remembered[key] = rows.copy_(self._features(images))
            if len(remembered) > REMEMBERED:
                remembered.popitem(last=False)
        return remembered[key]

    def constants(self) -> dict[str, torch.Tensor]:
        """Return all tensors that the features are computed with, in float32.

        Another process of this or another processor that is `given` them computes the same
        features, up to the rounding of its arithmetic.
        """
        mean, components = self._whitening()
        return {"mean": mean.float(), "components": components.float()}

    def _whitening(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.given is not None:
            return self.given["mean"], self.given["components"]
        return whitening(type(self), self.shape, self.num_features, self.folder)

    def _features(self, images: torch.Tensor) -> torch.Tensor:
        mean, components = self._whitening()
        coefficients = self.coefficients(images, self.given)
        features = (coefficients - mean.to(images)) @ components.to(images)
        length = features.norm(dim=1, keepdim=True).clamp_min(1e-6)
        return features * (self.num_features**0.5 / length)


@functools.cache  # a process keeps the code that it imported
def version_of(*files: str) -> str:
    """Return a digest of code, torch's version and the instruction set, for names in caches."""
    versions = torch.__version__, torch.backends.cpu.get_cpu_capability()
    digest = hashlib.blake2b(repr(versions).encode(), digest_size=8)
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


@functools.cache
@torch.inference_mode(False)  # a classifier may train on what they give
def whitening(
    kind: type[FixedFeatures],
    shape: tuple[int, ...],
    num_features: int,
    folder: Path | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean (P,) and scaled principal components (P, F) of procedural images, in float64.

    With a folder, they are computed once, which takes seconds for grey images of 28 pixels and
    half a minute for coloured ones of 32.
    """
    examples = kind.examples(shape)
    if folder is None:
        return _components(kind, examples, num_features)
    first = next(examples)
    drawn = hashlib.blake2b(first.tobytes(), digest_size=8).hexdigest()
    name = f"{kind.__name__}-{num_features}-{kind.version()}-{shape[1]}-{drawn}"
    files = [folder / f"{name}.{part}.npy" for part in ("mean", "components")]
    with contextlib.suppress(OSError, EOFError, ValueError):
        mean, components = (torch.from_numpy(np.load(file)) for file in files)
        fits = components.shape == (len(mean), min(num_features, len(mean)))
        if fits and bool(mean.isfinite().all() and components.isfinite().all()):
            return mean, components
    found = _components(kind, itertools.chain([first], examples), num_features)
    with contextlib.suppress(Unwritable):  # another process computes them again
        write_together(dict(zip(files, (each.numpy() for each in found), strict=True)))
    return found


def _components(
    kind: type[FixedFeatures], examples: Iterable[NDArray[np.uint8]], num_features: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `whitening`.

    A sign convention makes machines agree up to the rounding of float64. The variances of minor
    components are so close that the rounding of float32 would turn them by 1e-3. A single
    thread makes all processes of a machine agree to the last bit.
    """
    with torch_threads(1), torch.no_grad():
        drawn = torch.cat([_coefficients(kind, torch.from_numpy(part)) for part in examples])
        mean = drawn.mean(0)
        covariance = (drawn - mean).T @ (drawn - mean) / len(drawn)
        variances, axes = torch.linalg.eigh(covariance)  # ascending
        variances, axes = variances.flip(0)[:num_features], axes.flip(1)[:, :num_features]
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
        return mean, axes / variances.clamp_min(1e-12) ** (WHITENING / 2)


def _coefficients(kind: type[FixedFeatures], images: torch.Tensor) -> torch.Tensor:
    """Return the (N, P) coefficients of images, computed eight at a time."""
    parts = (kind.coefficients(to_pixels(few)) for few in images.split(8))
    return joined(parts, len(images))


def joined(parts: Iterable[torch.Tensor], count: int, dim: int = 0) -> torch.Tensor:
    """Join tensors, of `count` rows in all, as they are computed.

    Small tensors that are kept between large batches would fragment the memory.
    """
    joined, first = torch.empty(0), 0
    for part in parts:
        if not first:
            joined = part.new_empty((*part.shape[:dim], count, *part.shape[dim + 1 :]))
        joined.narrow(dim, first, part.shape[dim]).copy_(part)
        first += part.shape[dim]
    return joined


def halvings(size: int) -> int:
    """Return how often a side of `size` pixels must be halved to have at most SIDE."""
    return math.ceil(math.log2(procedural.enlarged(size)))


def reduced(images: torch.Tensor) -> torch.Tensor:
    """Return (B, C, S, S) images with S at most SIDE; a pixel is the mean of an area."""
    if images.shape[-1] <= SIDE:
        return images
    return functional.adaptive_avg_pool2d(images, SIDE)


def in_parts(
    function: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor
) -> torch.Tensor:
    """Apply a function to parts of (B, C, S, S) images: small ones fit into a processor's cache.

    Parts of large images bound the memory.
    """
    size, small = math.prod(images.shape[1:]), images.shape[-1] <= SIDE
    # An exported graph has no parts, and a GPU needs none of small images.
    if torch.compiler.is_compiling() or (small and images.device.type != "cpu"):
        return function(images)
    parts = images.split(max(1, CACHED // size if small else AT_ONCE // (16 * size)))
    if small or len(parts) == 1 or not (torch.is_grad_enabled() and images.requires_grad):
        return torch.cat([function(part) for part in parts])
    # To compute a part again for its gradient takes less than to keep all maps of all parts.
    return torch.cat([checkpoint(function, part, use_reentrant=False) for part in parts])


def drawn_in_parts(
    draw: Callable[..., NDArray[np.uint8]],
    count: int,
    shape: tuple[int, ...],
    rng: np.random.Generator,
) -> Iterator[NDArray[np.uint8]]:
    """Draw `count` procedural images, at most AT_ONCE pixels at a time."""
    at_once = max(1, AT_ONCE // math.prod(shape))
    for start in range(0, count, at_once):
        yield draw(min(at_once, count - start), shape, rng)


def to_pixels(images: torch.Tensor) -> torch.Tensor:
    """Convert bytes to float64 in [-1, 1]."""
    return 2 * images.double() / 255 - 1


@functools.cache
def _remembered(
    kind: type[FixedFeatures], shape: tuple[int, ...], num_features: int, memory: Remembering
) -> OrderedDict[tuple[object, ...], torch.Tensor]:
    """Return the cache of the last batches' features, by hashes of their pixels."""
    return OrderedDict()
