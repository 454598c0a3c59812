"""The inputs and labels that training reads from a shard, and a digest of all their bits."""

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.data.intake import Split
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.fixed_features import feature_cache
from fed_dpsd.models.inference import IMAGES_AT_ONCE, to_unit, trainable_part
from fed_dpsd.privacy.lattice import places_agree
from fed_dpsd.privacy.training import Training, patient_places

CPU = torch.device("cpu")
PROBED = 16  # images whose gradients identify a network's kernels
# Shifts of the copies of an image, in pixels down and to the right.
MOVES = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
_safe_batches: dict[tuple[object, ...], int] = {}


def read_shard(
    teacher: Classifier, records: Split, training: Training
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the trainable part of a teacher, and the inputs and labels that it reads.

    Args:
        teacher: an untrained teacher, on the CPU.
        records: the records of its shard.
        training: how it is trained. Private training may read shifted copies of images and group
            the records by patient.
    """
    images, labels = records.images, torch.from_numpy(records.labels)
    if not training.private:
        with feature_cache("records"):
            model, take = trainable_part(teacher, images, CPU)
        return model, take(slice(None)), labels
    copies = shifted(images, training.copies)
    images = copies.reshape(-1, *images.shape[1:])
    with feature_cache("records"):
        batch = safe_batch(teacher, images)
        model, take = trainable_part(teacher, images, CPU, batch)
    inputs = take(slice(None)).unflatten(0, copies.shape[:2])
    if training.unit == "patient":
        of_patients = torch.from_numpy(places_of_patients(records, training))
        inputs = inputs[of_patients].flatten(1, 2)
        labels = labels[of_patients].repeat_interleave(training.copies, dim=1)
    return model, inputs, labels


def digest_of_shard(key: str, teacher: Classifier, records: Split, training: Training) -> str:
    """Return a digest of a key, the initial weights, the inputs and the labels, in that order.

    With fixed features, the features are the inputs. Otherwise, the network computes more, so its
    gradients on the first records are part of the digest: different kernels round them differently.
    """
    model, inputs, labels = read_shard(teacher, records, training)
    digest = hashlib.sha256(f"{key} {tuple(inputs.shape)}".encode())
    for tensor in (*model.state_dict().values(), inputs, labels):
        digest.update(np.ascontiguousarray(tensor.detach().numpy()).data)
    if not teacher.fixed and len(inputs):
        first = inputs[:PROBED].flatten(0, inputs.ndim - 4)[:PROBED]
        model.eval()(first).square().sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                digest.update(np.ascontiguousarray(parameter.grad.numpy()).data)
    return digest.hexdigest()


def places_of_patients(records: Split, training: Training) -> NDArray[np.int64]:
    """Return the (P, R) indices of the records that represent each patient of a shard."""
    assert records.patients is not None
    return patient_places(records.patients, training.records_per_patient)


def safe_batch(teacher: Classifier, images: NDArray[np.uint8]) -> int:
    """Return a batch size at which an image's features depend only on that image, to the last bit.

    It is determined with random images, once per process and kind of features.
    """

    def features(pixels: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
        batch = to_unit((255 * pixels).byte().numpy(), CPU)
        with feature_cache("nothing"):
            return [teacher.features(batch)]

    if not teacher.fixed:
        return IMAGES_AT_ONCE
    key = (*teacher.features_key, images.shape[1:])
    if key not in _safe_batches:
        agree = places_agree(features, torch.from_numpy(images), IMAGES_AT_ONCE)
        _safe_batches[key] = IMAGES_AT_ONCE if agree else 1
    return _safe_batches[key]


def shifted(images: NDArray[np.uint8], copies: int) -> NDArray[np.uint8]:
    """Return (N, A, C, H, W) copies of (N, C, H, W) images: unshifted, then shifted by one pixel.

    Border pixels are repeated.
    """
    height, width = images.shape[2:]
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
    moved = [
        padded[:, :, 1 + down :, 1 + right :][:, :, :height, :width]
        for down, right in MOVES[:copies]
    ]
    return np.stack(moved, axis=1)
