"""A loader for scikit-learn's digits, parquet folders and Hugging Face data sets.

Folders have the Hugging Face parquet layout, so the same code reads both.
"""

import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet
from numpy.typing import NDArray
from PIL import Image

from fed_dpsd.config import DataConfig, UserError
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
    if config.path is not None:
        file = Path(config.path) / f"{split}.parquet"
        if not file.is_file():
            raise UserError(
                f"data.path={config.path}: there is no {split}.parquet; "
                "give a folder with train.parquet and test.parquet"
            )
        status = file.stat()
        source = f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"
    elif config.hub is not None:
        source = f"hub {config.hub}"
    else:
        raise UserError(
            f"data={config.name}: data.path is null and no hub name is known; "
            "set data.path to a folder with train.parquet and test.parquet"
        )
    key = hashlib.sha256(f"{source} {split} {config}".encode()).hexdigest()[:24]
    images, labels, patients = (
        cache / "data" / f"{key}.{name}.npy" for name in ("images", "labels", "patients")
    )
    if not labels.is_file():
        decoded = _decode(config, split, _read_table(config, split))
        _save(images, decoded.images)
        if decoded.patients is not None:
            _save(patients, decoded.patients)
        _save(labels, decoded.labels)
    patient_ids = np.load(patients) if patients.is_file() else None
    return Split(np.load(images, mmap_mode="r"), np.load(labels), patient_ids)


def _read_table(config: DataConfig, split: str) -> "pyarrow.Table":
    if config.path is not None:
        return pyarrow.parquet.read_table(Path(config.path) / f"{split}.parquet")
    from fed_dpsd.data.partition import read_hub

    return read_hub(str(config.hub), split)


def _decode(config: DataConfig, split: str, table: "pyarrow.Table") -> Split:
    """Convert Arrow columns to arrays, and images to grey or RGB as `config.shape` says."""
    where = f"data={config.name} ({config.path or config.hub}), split {split}"
    for key in ("image_column", "label_column", "patient_column"):
        column = getattr(config, key)
        if column is not None and column not in table.column_names:
            raise UserError(
                f"{where}: there is no column data.{key}={column!r}; "
                f"the columns are {', '.join(table.column_names)}"
            )
    labels = table.column(config.label_column).to_numpy().astype(np.int64)
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= config.num_classes:
        actual = f"{labels.min()} to {labels.max()}" if len(labels) else "none"
        raise UserError(
            f"{where}: labels are {actual}, but data.num_classes={config.num_classes} "
            f"needs 0 to {config.num_classes - 1}"
        )
    pictures = (row["bytes"] for row in table.column(config.image_column).to_pylist())
    images = np.empty((len(labels), *config.shape), np.uint8)
    for index, image in enumerate(_open_images(pictures, config.shape[0])):
        if image.shape != config.shape:
            raise UserError(
                f"{where}: image {index} has shape {list(image.shape)}, "
                f"but data.shape={list(config.shape)}"
            )
        images[index] = image
    return Split(images, labels, _read_patients(config, table))


def _read_patients(config: DataConfig, table: "pyarrow.Table") -> NDArray[np.int64] | None:
    """Return each record's patient as a number, the hash of the column's text."""
    if config.patient_column is None:
        return None
    names = (str(name).encode() for name in table.column(config.patient_column).to_pylist())
    hashes = [hashlib.blake2b(name, digest_size=8).digest() for name in names]
    return np.array([int.from_bytes(digest, "little", signed=True) for digest in hashes], np.int64)


def _open_images(pictures: Iterable[bytes], channels: int) -> Iterable[NDArray[np.uint8]]:
    mode = "L" if channels == 1 else "RGB"
    for picture in pictures:
        pixels = np.asarray(Image.open(io.BytesIO(picture)).convert(mode))
        yield pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _save(path: Path, array: NDArray[np.generic]) -> None:
    """Write an array atomically, so that two processes may fill the cache at the same time."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)
