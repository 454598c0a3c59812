"""Batches of bytes through a network: pixels, features, probabilities."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.models.classifiers import Classifier

# Few enough that the allocator keeps their memory: at 1,024 images a processor spends more time on
# fresh pages than on arithmetic.
IMAGES_AT_ONCE = 128


def to_unit(images: NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Bytes to float pixels in [0, 1] on `device`, channels last."""
    pixels = torch.tensor(np.asarray(images), device=device).float().div_(255)
    return pixels.contiguous(memory_format=torch.channels_last)


def learner(
    model: Classifier,
    images: NDArray[np.uint8],
    device: torch.device,
    at_once: int = IMAGES_AT_ONCE,
) -> tuple[nn.Module, Callable[[Any], torch.Tensor]]:
    """What of a classifier learns, and its inputs for any indices into (N, C, H, W) `images`.

    Fixed features are computed once: then only the last layer learns, and they are its inputs.
    Batches of images all have the same shape, `at_once` of them, by which kernels choose the order
    of their operations: so an image's features do not depend on how many others there are.
    """
    if not model.fixed:
        return model, lambda chosen: to_unit(images[chosen], device)
    missing = -len(images) % at_once
    batches = np.concatenate([images, np.zeros((missing, *images.shape[1:]), np.uint8)])
    parts = [
        model.features(to_unit(batches[start : start + at_once], device))
        for start in range(0, len(batches), at_once)
    ]
    features = torch.cat(parts) if parts else model.features(to_unit(images, device))
    return model.classifier, features[: len(images)].__getitem__


@torch.inference_mode()
def predict(
    model: nn.Module, images: NDArray[np.uint8], device: torch.device
) -> NDArray[np.float32]:
    """(B, K) float32 softmax probabilities of a classifier on (B, C, H, W) uint8 images."""
    model.eval()
    parts = [
        model(to_unit(images[start : start + IMAGES_AT_ONCE], device)).softmax(1).cpu().numpy()
        for start in range(0, len(images), IMAGES_AT_ONCE)
    ]
    return np.concatenate(parts)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use this many torch threads inside the block, and the caller's number after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
