"""A loader for scikit-learn's digits, parquet files, folders of classes and Hugging Face data sets.

Decoded images are cached. `sources` finds them and their labels.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.config import DataConfig
from fed_dpsd.data import sources
from fed_dpsd.data.images import open_image, scaled, to_pixels
from fed_dpsd.data.sources import LAYOUT, Source
from fed_dpsd.errors import UserError
from fed_dpsd.storage import replacing

DIGITS_TEST_SIZE = 360


@dataclass(frozen=True)
class Split:
    """Images, (N, C, H, W) uint8, with labels and, where known, patients, (N,) int64 each."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    patients: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: NDArray[np.int64]) -> "Split":
        """Return the records at `indices`."""
        patients = None if self.patients is None else self.patients[indices]
        return Split(self.images[indices], self.labels[indices], patients)


@dataclass(frozen=True)
class Dataset:
    """A training split, which is divided among the clients, and a public test split."""

    train: Split
    test: Split


def load(config: DataConfig, cache: Path) -> Dataset:
    """Load a data set.

    Args:
        config: the data set to load; shape and number of classes are checked against the data.
        cache: folder for decoded images, so that a second process need not decode them again.

    Raises:
        UserError: the folder or the network is missing, or the data contradicts `config`.
    """
    if config.name == "digits":
        if config.patient_column is not None:
            raise UserError(
                f"data.patient_column={config.patient_column!r}: data=digits has no patients; "
                "use null"
            )
        return _digits()
    return Dataset(_load_split(config, "train", cache), _load_split(config, "test", cache))


def load_test(config: DataConfig, cache: Path) -> Split:
    """Load the test split alone; see `load`."""
    return _digits().test if config.name == "digits" else _load_split(config, "test", cache)


def _digits() -> Dataset:
    """Return scikit-learn's digits as uint8, with a fixed random split."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None]  # (1797, 1, 8, 8)
    records = Split(images, bunch.target.astype(np.int64))
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(records))
    return Dataset(records.take(order[DIGITS_TEST_SIZE:]), records.take(order[:DIGITS_TEST_SIZE]))


def _load_split(config: DataConfig, split: str, cache: Path) -> Split:
    """Load a split from `config.path` or, without a path, from the Hugging Face hub."""
    later = {key: getattr(config, key) for key in ("resize", "label_columns")}
    settings = "".join(f" {key}={value}" for key, value in later.items() if value)
    text = f"{sources.fingerprint(config, split)} {split} {config}{settings}"
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    images, labels, patients = (
        cache / "data" / f"{key}.{name}.npy" for name in ("images", "labels", "patients")
    )
    if not labels.is_file():
        decoded = _decode(config, sources.read(config, split))
        _save(images, decoded.images)
        if decoded.patients is not None:
            _save(patients, decoded.patients)
        _save(labels, decoded.labels)
    patient_ids = np.load(patients) if patients.is_file() else None
    return Split(np.load(images, mmap_mode="r"), np.load(labels), patient_ids)


def _decode(config: DataConfig, source: Source) -> Split:
    """Convert images to grey or RGB as `config.shape` says, and check shapes and labels."""
    where, labels = source.where, source.labels
    if len(labels) == 0:
        raise UserError(f"{where}: there is no image with a label; give {LAYOUT}")
    if labels.min() < 0 or labels.max() >= config.num_classes:
        raise UserError(
            f"{where}: labels are {labels.min()} to {labels.max()}, but "
            f"data.num_classes={config.num_classes} needs 0 to {config.num_classes - 1}"
        )
    images = np.empty((len(labels), *config.shape), np.uint8)
    for index, (name, image) in enumerate(zip(source.names, source.images, strict=True)):
        try:
            opened = open_image(image, config.shape[0])[1]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"{where}: {name} cannot be read ({reason}); mend or delete it"
            ) from None
        pixels = scaled(opened, config.shape) if config.resize else to_pixels(opened)
        if pixels.shape != config.shape:
            raise UserError(
                f"{where}: {name} has shape {list(pixels.shape)}, but "
                f"data.shape={list(config.shape)}; set its shape, or data.resize=true to scale it"
            )
        images[index] = pixels
    return Split(images, labels, source.patients)


def _save(path: Path, array: NDArray[np.generic]) -> None:
    """Write an array atomically, so that two processes may fill the cache at the same time."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)
