"""Places that images and labels come from: parquet files, folders of classes and the hub.

Parquet files have the layout of the Hugging Face hub, so the same code reads both.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet
from numpy.typing import NDArray

from fed_dpsd.config import DataConfig
from fed_dpsd.errors import UserError

LAYOUT = (
    "a folder with train.parquet and test.parquet, or with images in train/CLASS and test/CLASS"
)


class Source(NamedTuple):
    """A split before its images are decoded.

    Args:
        where: the data set and its place, for errors.
        names: a name of each image, for errors.
        images: each image as a file, or as the bytes of one.
        labels: (N,) int64.
        patients: (N,) int64, or None where they are not known.
    """

    where: str
    names: Sequence[str]
    images: Iterable[Path | bytes]
    labels: NDArray[np.int64]
    patients: NDArray[np.int64] | None = None


def fingerprint(config: DataConfig, split: str) -> str:
    """Return a text that names the files of a split, and changes when they do.

    Raises:
        UserError: there is no such split, or it cannot be read.
    """
    if config.path is None:
        if config.hub is None:
            raise UserError(
                f"data={config.name}: data.path is null and no hub name is known; "
                f"set data.path to {LAYOUT}"
            )
        return f"hub {config.hub}"
    file, folder = Path(config.path) / f"{split}.parquet", Path(config.path) / split
    if file.is_file():
        status = file.stat()
        return f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"
    if not folder.is_dir():
        raise UserError(
            f"data.path={config.path}: there is no {split}.parquet and no folder {split}; "
            f"give {LAYOUT}"
        )
    try:
        digest = hashlib.sha256(f"{_classes(folder)}\n".encode())
        for file, _ in sorted(walk_classes(folder)):
            status = file.stat()
            digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    except OSError as error:
        raise UserError(
            f"data.path={config.path}: {error.filename} cannot be read ({error.strerror}); see "
            "that it is there, and that you may read it"
        ) from None
    return f"{folder.resolve()} {digest.hexdigest()}"


def read(config: DataConfig, split: str) -> Source:
    """Find the images and labels of a split whose `fingerprint` is known.

    Raises:
        UserError: there is no network, or the files are not as `config` says.
    """
    where = f"data={config.name} ({config.path or config.hub}), split {split}"
    if config.path is None:
        from fed_dpsd.data.partition import read_hub

        return _read_table(config, where, read_hub(str(config.hub), split))
    file = Path(config.path) / f"{split}.parquet"
    if file.is_file():
        return _read_table(config, where, pyarrow.parquet.read_table(file))
    return _read_folder(config, where, Path(config.path), split)


# --- tables ---


def _read_table(config: DataConfig, where: str, table: "pyarrow.Table") -> Source:
    """Read Arrow columns; an image is a struct with its encoded `bytes`."""
    keys = "image_column", "label_column", "patient_column"
    named = {f"data.{key}": getattr(config, key) for key in keys}
    named |= {f"data.label_columns[{i}]": name for i, name in enumerate(config.label_columns)}
    for key, column in named.items():
        if column is not None and column not in table.column_names:
            raise UserError(
                f"{where}: there is no column {key}={column!r}; "
                f"the columns are {', '.join(table.column_names)}"
            )
    if config.label_columns:
        columns = [table.column(name).to_numpy() == 1 for name in config.label_columns]
        true = np.stack(columns, axis=1)
        rows = np.flatnonzero(true.sum(axis=1) == 1)
        labels = true[rows].argmax(axis=1)
    else:
        labels = table.column(config.label_column).to_numpy().astype(np.int64)
        rows = np.arange(len(labels))
    images, patients = table.column(config.image_column), _read_patients(config, table)
    return Source(
        where,
        [f"image {row}" for row in rows],
        (images[int(row)]["bytes"].as_py() or b"" for row in rows),
        labels,
        None if patients is None else patients[rows],
    )


def _read_patients(config: DataConfig, table: "pyarrow.Table") -> NDArray[np.int64] | None:
    """Return each record's patient as a number, the hash of the column's text."""
    if config.patient_column is None:
        return None
    names = (str(name).encode() for name in table.column(config.patient_column).to_pylist())
    hashes = [hashlib.blake2b(name, digest_size=8).digest() for name in names]
    return np.array([int.from_bytes(digest, "little", signed=True) for digest in hashes], np.int64)


# --- folders of classes ---


def _read_folder(config: DataConfig, where: str, path: Path, split: str) -> Source:
    """Read a split's folder, whose subfolders are the classes in the order of their names."""
    if config.patient_column is not None:
        raise UserError(
            f"{where}: data.patient_column={config.patient_column!r}: folders of classes name no "
            "patients; use null, or parquet files"
        )
    classes = _classes(path / split)
    if len(classes) != config.num_classes:
        raise UserError(
            f"{where}: there are {len(classes)} folders of classes, but "
            f"data.num_classes={config.num_classes}; give a folder for each class, or set "
            f"data.num_classes={len(classes)}"
        )
    other = path / ("test" if split == "train" else "train")
    if other.is_dir() and (differ := set(classes) ^ set(_classes(other))):
        raise UserError(
            f"data.path={path}: train and test must have the same folders of classes, and only "
            f"one of them has {', '.join(sorted(differ)[:5])}; add or delete what differs"
        )
    files = sorted(walk_classes(path / split))
    for file, label in files:
        if label is None:
            raise UserError(f"{where}: {file} lies in no folder of a class; move or delete it")
    numbers = {label: number for number, label in enumerate(classes)}
    labels = np.array([numbers[label] for _, label in files], np.int64)
    return Source(where, [str(file) for file, _ in files], [file for file, _ in files], labels)


def _classes(folder: Path) -> list[str]:
    """Return the names of the folders of classes, in order."""
    names = (place.name for place in folder.iterdir() if place.is_dir())
    return sorted(name for name in names if not name.startswith("."))


def walk_classes(path: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield every file at any depth, with its class: the name of the subfolder that it lies in.

    A file beside the subfolders has class None. Hidden files and folders are skipped.

    Raises:
        OSError: a folder cannot be read.
        UserError: a link leads to a folder that it lies in.
    """

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(path, onerror=fail, followlinks=True):
        here = Path(place).resolve()
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        for folder in folders:
            if (Path(place) / folder).resolve() in (here, *here.parents):
                raise UserError(
                    f"{place}/{folder} is a link to a folder that it lies in; delete it"
                )
        for name in names:
            file = Path(place) / name
            inside = file.relative_to(path)
            if not name.startswith("."):
                yield file, inside.parts[0] if len(inside.parts) > 1 else None
