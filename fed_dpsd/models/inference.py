"""Inference on images stored as bytes: pixels, features and probabilities."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.models.classifiers import Classifier

# A batch this small lets the allocator reuse memory. At 1,024 images a processor spends more time
# on new memory pages than on arithmetic.
IMAGES_AT_ONCE = 128


def to_unit(images: NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Convert bytes to float pixels in [0, 1] on `device`, channels last."""
    pixels = torch.tensor(np.asarray(images), device=device).float().div_(255)
    return pixels.contiguous(memory_format=torch.channels_last)


def to_bytes(images: torch.Tensor) -> NDArray[np.uint8]:
    """Round float pixels in [0, 1] to the nearest bytes."""
    return (images.detach() * 255).round().to(torch.uint8).cpu().numpy()


def batches(
    images: NDArray[np.uint8], device: torch.device, at_once: int = IMAGES_AT_ONCE
) -> Iterator[torch.Tensor]:
    """Yield (N, C, H, W) images as float pixels, in batches of at most `at_once`."""
    for start in range(0, len(images), at_once):
        yield to_unit(images[start : start + at_once], device)


def learner(
    model: Classifier,
    images: NDArray[np.uint8],
    device: torch.device,
    at_once: int = IMAGES_AT_ONCE,
) -> tuple[nn.Module, Callable[[Any], torch.Tensor]]:
    """Return the learning part of a classifier, and a function from indices to its inputs.

    The indices point into (N, C, H, W) `images`. If the features are fixed, they are computed once,
    and only the last layer learns from them. Kernels choose the order of their operations by the
    batch's shape, so every batch has `at_once` images. An image's features then do not depend on
    the number of images.
    """
    if not model.fixed:
        return model, lambda chosen: to_unit(images[chosen], device)
    missing = -len(images) % at_once
    padded = np.concatenate([images, np.zeros((missing, *images.shape[1:]), np.uint8)])
    parts = [model.features(batch) for batch in batches(padded, device, at_once)]
    features = torch.cat(parts) if parts else model.features(to_unit(images, device))
    return model.classifier, features[: len(images)].__getitem__


class Images:
    """Images that are predicted often, such as a test split: fixed features are computed once.

    Args:
        images: (N, C, H, W) uint8.
    """

    def __init__(self, images: NDArray[np.uint8]) -> None:
        self._images = images
        self._features: list[torch.Tensor] = []

    @torch.inference_mode()
    def predict(self, model: nn.Module) -> NDArray[np.float32]:
        """Return a classifier's (N, K) float32 probabilities, as `predict` does.

        All classifiers with fixed features must have the same ones.
        """
        device = next(model.parameters()).device
        if not (isinstance(model, Classifier) and model.fixed):
            return predict(model, self._images, device)
        model.eval()
        if not self._features:
            self._features = [model.features(batch) for batch in batches(self._images, device)]
        parts = [model.classifier(part).softmax(1).cpu().numpy() for part in self._features]
        return np.concatenate(parts)


@torch.inference_mode()
def predict(
    model: nn.Module, images: NDArray[np.uint8], device: torch.device
) -> NDArray[np.float32]:
    """Return a classifier's (B, K) float32 probabilities on (B, C, H, W) uint8 images."""
    model.eval()
    parts = [model(batch).softmax(1).cpu().numpy() for batch in batches(images, device)]
    return np.concatenate(parts)
