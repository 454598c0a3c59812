"""A loader for scikit-learn's digits, folders of classes, tables and Hugging Face data sets.

Decoded images are cached. `sources` finds them and their labels.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.config import BUNDLED, DataConfig
from fed_dpsd.data import sources
from fed_dpsd.data.images import open_image, scaled, to_pixels
from fed_dpsd.data.sources import LAYOUT, Source, some
from fed_dpsd.errors import UserError, reason_of
from fed_dpsd.storage import replacing, write_atomically

DIGITS_TEST_SIZE = 360
TEST_PART = 5  # one picture of so many is for testing where the data is not divided

logger = logging.getLogger("fed_dpsd")


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
    if config.name == BUNDLED:
        return _digits()
    return Dataset(_load_split(config, "train", cache), _load_split(config, "test", cache))


def load_test(config: DataConfig, cache: Path) -> Split:
    """Load the test split alone; see `load`."""
    return _digits().test if config.name == BUNDLED else _load_split(config, "test", cache)


def class_names(config: DataConfig, cache: Path) -> tuple[str, ...]:
    """Return the names of the classes, in order, and nothing is downloaded for them.

    They are those of `config`; otherwise those that a data set of the hub declared when it was
    loaded here; their numbers where neither knows any.
    """
    if config.path is None and config.hub is not None and not config.classes:
        for split in sources.SPLITS:
            if (place := _cached(config, split, cache)("classes.json")).is_file():
                return tuple(json.loads(place.read_text()))
    return config.class_names


def _digits() -> Dataset:
    """Return scikit-learn's digits as uint8, with a fixed random split."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None]  # (1797, 1, 8, 8)
    records = Split(images, bunch.target.astype(np.int64))
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(records))
    return Dataset(records.take(order[DIGITS_TEST_SIZE:]), records.take(order[:DIGITS_TEST_SIZE]))


def _load_split(config: DataConfig, split: str, cache: Path) -> Split:
    """Load a split from `config.path` or, without a path, from the Hugging Face hub.

    Where the data is not divided, a fixed part of each class is the test split. Images that cannot
    be read are left out, and that is said once in a process.
    """
    place = _cached(config, split, cache)
    if not place("labels.npy").is_file():
        divided = config.path is None or sources.is_divided(Path(config.path))
        source = sources.read(config, split)
        all_classes = bool(config.classes) and (split == "train" or not divided)
        records, left_out = _decode(config, source, 1 if divided else 2, all_classes)
        notes = [_note(source, left_out)] if left_out else []
        parts = {split: records}
        if not divided:
            parts = dict(zip(sources.SPLITS, divide(records), strict=True))
            notes.append(
                f"{source.where} has no train and test: one image in {TEST_PART} of each class is "
                f"for testing, always the same, {len(parts['test']):,} of {len(records):,}; "
                "folders train and test divide it otherwise, and a coordinator needs test alone"
            )
        for name, part in parts.items():
            place_of_part = _cached(config, name, cache)
            if len(source.classes) == config.num_classes:
                write_atomically(
                    place_of_part("classes.json"), json.dumps(list(source.classes)).encode()
                )
            _save(place_of_part, part, notes)
    for note in json.loads(place("notes.json").read_text()) if place("notes.json").exists() else ():
        _say_once(note)
    patients = np.load(place("patients.npy")) if place("patients.npy").is_file() else None
    images = np.load(place("images.npy"), mmap_mode="r")
    return Split(images, np.load(place("labels.npy")), patients)


def _cached(config: DataConfig, split: str, cache: Path) -> Callable[[str], Path]:
    """Return a function from the names of a split's files to their paths in the cache."""
    later = {key: getattr(config, key) for key in ("resize", "label_columns", "classes")}
    settings = "".join(f" {key}={value}" for key, value in later.items() if value)
    text = f"{sources.fingerprint(config, split)} {split} {config}{settings}"
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    return lambda name: cache / "data" / f"{key}.{name}"


@functools.cache
def _say_once(note: str) -> None:
    logger.warning(note)


def _note(source: Source, left_out: Sequence[str]) -> str:
    found = len(source.labels) + len(source.strays)
    return (
        f"{source.where}: {len(left_out):,} of {found:,} images cannot be read and are left out: "
        f"{some(left_out)}"
    )


def divide(records: Split) -> tuple[Split, Split]:
    """Divide records into a training and a test split: one of TEST_PART of each class, fixed.

    A patient's records stay together, in a part of the class of the first of them.
    """
    units = np.arange(len(records)) if records.patients is None else records.patients
    _, first, unit = np.unique(units, return_index=True, return_inverse=True)
    rng = np.random.Generator(np.random.PCG64(0))
    tested = np.zeros(len(first), bool)
    for label in np.unique(records.labels[first]):
        of_class = rng.permutation(np.flatnonzero(records.labels[first] == label))
        number = len(of_class) // TEST_PART or min(1, len(of_class) - 1)
        tested[of_class[:number]] = True
    in_test = tested[unit.reshape(-1)]
    return records.take(np.flatnonzero(~in_test)), records.take(np.flatnonzero(in_test))


def _decode(
    config: DataConfig, source: Source, least: int, all_classes: bool
) -> tuple[Split, list[str]]:
    """Convert images to grey or RGB as `config.shape` says, and check shapes and labels.

    Args:
        config: the data set.
        source: its images and labels.
        least: number of images that each class must have, if it has any.
        all_classes: whether every class must have so many.

    Returns:
        The records whose images can be read, and a line on each other one.

    Raises:
        UserError: images or labels are not as `config` says, or too few of a class can be read.
    """
    where, labels = source.where, source.labels
    if len(labels) == 0:
        raise UserError(f"{where}: there is no image with a label; give {LAYOUT}")
    if labels.min() < 0 or labels.max() >= config.num_classes:
        raise UserError(
            f"{where}: labels are {labels.min()} to {labels.max()}, but "
            f"data.num_classes={config.num_classes} needs 0 to {config.num_classes - 1}"
        )
    images = np.empty((len(labels), *config.shape), np.uint8)
    left_out = list(source.strays)
    good = np.ones(len(labels), bool)
    for index, (name, image) in enumerate(zip(source.names, source.images, strict=True)):
        try:
            opened = open_image(image, config.shape[0])[1]
        except (OSError, ValueError) as error:
            left_out.append(f"{name}: {reason_of(error)}")
            good[index] = False
            continue
        pixels = scaled(opened, config.shape) if config.resize else to_pixels(opened)
        if pixels.shape != config.shape:
            raise UserError(
                f"{where}: {name} has shape {list(pixels.shape)}, but "
                f"data.shape={list(config.shape)}; set its shape, or data.resize=true to scale it"
            )
        images[index] = pixels
    counts = np.bincount(labels[good], minlength=config.num_classes)
    needed = range(config.num_classes) if all_classes else np.unique(labels)
    if lacking := [config.class_names[label] for label in needed if counts[label] < least]:
        found = "no image" if least == 1 else f"fewer than {least} images"
        others = f" ({len(left_out):,} cannot: {some(left_out)})" if left_out else ""
        raise UserError(
            f"{where}: {found} can be read of class {some(lacking)}{others}; add images, or take "
            "the class away"
        )
    if not good.all():
        images, labels = images[good], labels[good]
    patients = source.patients if source.patients is None else source.patients[good]
    return Split(images, labels, patients), left_out


def _save(place: Callable[[str], Path], split: Split, notes: Sequence[str]) -> None:
    """Write a split; each file atomically, so that two processes may do so at the same time."""
    if notes:
        write_atomically(place("notes.json"), json.dumps(notes).encode())
    arrays = {"images": split.images, "patients": split.patients, "labels": split.labels}
    for name, array in arrays.items():  # labels come last: they make the split complete
        if array is not None:
            with replacing(place(f"{name}.npy")) as temporary, temporary.open("wb") as file:
                np.save(file, array)
