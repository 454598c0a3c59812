"""Inference on images stored as bytes: pixels, features and probabilities."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.context import setting
from fed_dpsd.errors import Diverged
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.fixed_features import joined, no_batch_cache
from fed_dpsd.models.pictures import Pictures
from fed_dpsd.progress import reporting
from fed_dpsd.storage import LARGE, large_array

# A batch this small lets the allocator reuse memory. With 1,024 images a processor spends more time
# on new memory pages than on arithmetic.
IMAGES_AT_ONCE = 128
ROWS = 2**14  # images in incomplete batches whose features are cached
KINDS = 4  # of fixed features of the same images
_rows: OrderedDict[tuple[object, ...], torch.Tensor] = OrderedDict()
_shared: ContextVar[dict[int, "Images"] | None] = ContextVar("shared", default=None)


def to_unit(images: NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Convert bytes to float pixels in [0, 1] on `device`, channels last."""
    pixels = torch.tensor(np.asarray(images), device=device).float().div_(255)
    return pixels.contiguous(memory_format=torch.channels_last)


def to_unit_all(images: NDArray[np.uint8] | Pictures) -> torch.Tensor:
    """Convert (N, C, H, W) images as `to_unit` does; they need not fit in memory."""
    if 4 * math.prod(images.shape) < LARGE:
        return to_unit(images[:], torch.device("cpu"))
    count, channels, *sides = images.shape
    if channels == 1:
        pixels = torch.from_numpy(large_array((count, 1, *sides), np.float32))
    else:  # channels last
        pixels = torch.from_numpy(large_array((count, *sides, channels), np.float32))
        pixels = pixels.permute(0, 3, 1, 2)
    every = batches(images, pixels.device)
    for part, batch in zip(pixels.split(IMAGES_AT_ONCE), every, strict=True):
        part.copy_(batch)
    return pixels


def to_bytes(
    images: torch.Tensor, rates: Mapping[str, float] = MappingProxyType({})
) -> NDArray[np.uint8]:
    """Round float pixels in [0, 1] to the nearest bytes.

    Args:
        images: the pixels, of any shape.
        rates: the learning rates of the training that made the images, by key.

    Raises:
        Diverged: a pixel is NaN or infinite.
    """
    if not images.isfinite().all():
        raise Diverged("trained or generated images are NaN or infinite", rates)
    return (images.detach() * 255).round().to(torch.uint8).cpu().numpy()


def batches(
    images: NDArray[np.uint8] | Pictures, device: torch.device, at_once: int = IMAGES_AT_ONCE
) -> Iterator[torch.Tensor]:
    """Yield (N, C, H, W) images as float pixels, in batches of at most `at_once`."""
    with reporting("images", len(images)) as task:
        for start in range(0, len(images), at_once):
            batch = images[start : start + at_once]
            yield to_unit(batch, device)
            task.advance(len(batch))


def trainable_part(
    model: Classifier,
    images: NDArray[np.uint8] | Pictures,
    device: torch.device,
    at_once: int = IMAGES_AT_ONCE,
    known: list[torch.Tensor] | None = None,
    others: Iterator[NDArray[np.uint8]] | None = None,
) -> tuple[nn.Module, Callable[[Any], torch.Tensor]]:
    """Return the trainable part of a classifier, and a function from indices to its inputs.

    The indices point into (N, C, H, W) `images`. Fixed features are computed once, and only the
    last layer is trained on them. Rounding depends on the shape of a batch, so every batch has
    `at_once` images, and an image's features do not depend on the number of images. Zeros fill the
    last batch.

    Args:
        model: the classifier.
        images: the images.
        device: where to compute.
        at_once: the number of images in a batch.
        known: features of the first batches, which are not computed again; other full batches are
            added.
        others: images that are read later, which fill the last batch instead of zeros; theirs are
            then known. An image's features must not depend on the rest of its batch.
    """
    if not model.fixed:
        return model, lambda chosen: to_unit(images[chosen], device)
    known = [] if known is None else known
    first, count = len(known) * at_once, len(images)

    def computed() -> Iterator[torch.Tensor]:
        with reporting("images", count - first) as task:
            for start in range(first, count, at_once):
                batch = images[start : start + at_once]
                if len(batch) == at_once:
                    yield model.features(to_unit(batch, device))
                elif others is None:
                    yield _last_features(model, batch, device, at_once)
                else:
                    yield _shared_features(model, batch, others, device, at_once)
                task.advance(len(batch))

    new = joined(computed(), count - first).split(at_once) if count > first else ()
    parts = [*known, *new]
    known += new[: (count - first) // at_once]
    features = torch.cat(parts) if parts else model.features(to_unit(images[:0], device))
    return model.classifier, features.__getitem__


def _last_features(
    model: Classifier, batch: NDArray[np.uint8], device: torch.device, at_once: int
) -> torch.Tensor:
    """Return the fixed features of at most `at_once` images, which zeros fill up."""
    zeros = np.zeros((at_once - len(batch), *batch.shape[1:]), np.uint8)
    # Each client has at most one such batch; thousands of clients would fill the cache.
    with no_batch_cache():
        return model.features(to_unit(np.concatenate([batch, zeros]), device))[: len(batch)]


def _shared_features(
    model: Classifier,
    batch: NDArray[np.uint8],
    others: Iterator[NDArray[np.uint8]],
    device: torch.device,
    at_once: int,
) -> torch.Tensor:
    """Return the fixed features of at most `at_once` images, which `others` fill up.

    Features of single images are kept, so that thousands of clients with few images need few
    batches.
    """
    kind = *model.features_key, device, batch.shape[1:]

    def key(image: NDArray[np.uint8]) -> tuple[object, ...]:
        return *kind, hashlib.blake2b(image.tobytes(), digest_size=16).digest()

    keys = [key(image) for image in batch]
    new = {each: image for each, image in zip(keys, batch, strict=True) if each not in _rows}
    if new:
        while len(new) < at_once and (image := next(others, None)) is not None:
            if (name := key(image)) not in _rows:
                new.setdefault(name, image)
        features = _last_features(model, np.stack(list(new.values())), device, at_once)
        _rows.update(zip(new, features.clone(), strict=True))
    rows = torch.stack([_rows[each] for each in keys])
    while len(_rows) > ROWS:
        _rows.popitem(last=False)
    return rows


class Images:
    """Images for many classifiers, such as a test split, with fixed features computed once.

    Args:
        images: (N, C, H, W) uint8.
    """

    def __init__(self, images: NDArray[np.uint8] | Pictures) -> None:
        self._images = images
        self._features: dict[object, Sequence[torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._images)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the (C, H, W) of an image."""
        return self._images.shape[1:]

    def predict(self, model: nn.Module) -> NDArray[np.float32]:
        """Return a classifier's (N, K) float32 probabilities."""
        return self.predict_all([model])[0]

    @torch.inference_mode()
    def predict_all(self, models: Sequence[nn.Module]) -> NDArray[np.float32]:
        """Return the (n, N, K) float32 probabilities of n >= 1 classifiers of one architecture."""
        device = next(models[0].parameters()).device
        for model in models:
            model.eval()
        heads = models
        inputs: Iterable[torch.Tensor] = batches(self._images, device)
        if isinstance(models[0], Classifier) and models[0].fixed:
            heads = [cast(Classifier, model).classifier for model in models]
            inputs = self._fixed_features(models[0], device)
        parts = (torch.stack([head(part).softmax(1) for head in heads]).cpu() for part in inputs)
        return joined(parts, len(self), dim=1).numpy()

    def _fixed_features(self, model: Classifier, device: torch.device) -> Sequence[torch.Tensor]:
        """Return the fixed features of each batch, which are computed at the first call."""
        key = (*model.features_key, device)
        if key not in self._features:
            computed = (model.features(batch) for batch in batches(self._images, device))
            self._features[key] = joined(computed, len(self)).split(IMAGES_AT_ONCE)
            if len(self._features) > KINDS:  # each of a user's own networks has its own
                self._features.pop(next(iter(self._features)))
        return self._features[key]


def sharing_images() -> AbstractContextManager[None]:
    """Let `images_of` return the same `Images` for the same array in this block."""
    return setting(_shared, {})


def images_of(images: NDArray[np.uint8]) -> Images:
    """Return the `Images` of an array, which clients of a simulation share."""
    shared = _shared.get()
    if shared is None:
        return Images(images)
    return shared.setdefault(id(images), Images(images))  # it holds the array, so the id is unique


def predict(
    model: nn.Module, images: NDArray[np.uint8], device: torch.device
) -> NDArray[np.float32]:
    """Return a classifier's (B, K) float32 probabilities on (B, C, H, W) uint8 images."""
    return Images(images).predict_all([model])[0]
