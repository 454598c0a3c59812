"""A loader for scikit-learn's digits, folders of classes, tables and Hugging Face data sets.

Decoded images are cached. `sources` finds them and their labels. What becomes of a record depends
on this record alone (docs/privacy.md, "From files to records").
"""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.config import BUNDLED, DataConfig
from fed_dpsd.data import sources
from fed_dpsd.data.images import digests, open_image, scaled, to_pixels
from fed_dpsd.data.sources import LAYOUT, Source, some
from fed_dpsd.errors import UserError, reason_of
from fed_dpsd.storage import write_atomically, write_together

DIGITS_TEST_SIZE = 360
TEST_PART = 5  # one record, or patient, of so many is for testing where the data is not divided
# Keys the hash that divides. It is public, and no setting: a seed could be chosen by its split.
SPLIT_KEY = b"fed_dpsd: test split"
PURPOSES = {"train": "training", "test": "testing"}

logger = logging.getLogger("fed_dpsd")


@dataclass(frozen=True)
class Split:
    """Images, (N, C, H, W) uint8, with labels and, where known, patients, (N,) int64 each."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    patients: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Return each record's (N,) lasting id: its patient, or a digest of its pixels without one.

        An id is the same whatever the record's label and place are, and whichever others there are.
        """
        return digests(self.images) if self.patients is None else self.patients

    def take(self, indices: NDArray[np.int64]) -> "Split":
        """Return the records at `indices`."""
        patients = None if self.patients is None else self.patients[indices]
        return Split(self.images[indices], self.labels[indices], patients)

    def in_order(self) -> "Split":
        """Return the records in the order of their pixels' digests, which no file decides.

        Equal images are in the order of their patients and labels. So equal sets of records are
        equal splits, and a record that comes or goes leaves the others in their order.
        """
        patients = self.labels if self.patients is None else self.patients
        return self.take(np.lexsort((self.labels, patients, digests(self.images))))


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

    Where the data is not divided, `divide` does it. Images that cannot be read are left out. That,
    and classes without images, are warnings, given once in a process: an error would reveal them.
    """
    place = _cached(config, split, cache)
    if not place("labels.npy").is_file():
        divided = config.path is None or sources.is_divided(Path(config.path))
        source = sources.read(config, split)
        records, left_out = _decode(config, source)
        if not _keeps_rows(config, split):
            records = records.in_order()
        notes = [_left_out(source, left_out)] if left_out else []
        parts = {split: records}
        if not divided:
            parts = dict(zip(sources.SPLITS, divide(records), strict=True))
            unit, own = ("image", "pixels") if records.patients is None else ("patient", "id")
            notes.append(
                f"{source.where} has no train and test: one {unit} in {TEST_PART} is for testing, "
                f"chosen by a hash of its own {own}, {len(parts['test']):,} of {len(records):,} "
                "images; folders train and test divide it otherwise, and a coordinator needs test "
                "alone"
            )
        for name, part in parts.items():
            if lacking := _lacking(config, part):
                notes.append(f"{source.where}: no image for {PURPOSES[name]} of class {lacking}")
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


def _keeps_rows(config: DataConfig, split: str) -> bool:
    """Return whether records stay in the order of their table, which holds this split alone.

    Labels do not decide the order of rows, as they do that of files in folders of classes. With
    patients, records are sorted: a patient's first ones stand for all (`training.places_of`).
    """
    if config.patient_column is not None:
        return False
    path = Path(config.path or "")
    return not config.path or (sources.is_divided(path) and sources.place_of(path, split).is_file())


def _cached(config: DataConfig, split: str, cache: Path) -> Callable[[str], Path]:
    """Return a function from the names of a split's files to their paths in the cache."""
    later = {key: getattr(config, key) for key in ("resize", "label_columns", "classes")}
    settings = "".join(f" {key}={value}" for key, value in later.items() if value)
    settings += "" if _keeps_rows(config, split) else f" by {SPLIT_KEY!r}"
    text = f"{sources.fingerprint(config, split)} {split} {config}{settings}"
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    return lambda name: cache / "data" / f"{key}.{name}"


@functools.cache
def _say_once(note: str) -> None:
    logger.warning(note)


def _left_out(source: Source, left_out: Sequence[str]) -> str:
    found = len(source.labels) + len(source.strays)
    return (
        f"{source.where}: {len(left_out):,} of {found:,} images cannot be read and are left out: "
        f"{some(left_out)}"
    )


def _lacking(config: DataConfig, records: Split) -> str:
    """Name the classes that have no record; "" if each has one."""
    counts = np.bincount(records.labels, minlength=config.num_classes)
    return some([name for name, count in zip(config.class_names, counts, strict=True) if not count])


def divide(records: Split) -> tuple[Split, Split]:
    """Divide records into a training and a test split, about one in TEST_PART for testing.

    A keyed hash of a record's id decides (`Split.ids`), so its patient where patients are known,
    otherwise its pixels. Neither its label or place nor any other record matters. Hence data sets
    that differ in one record, patient or label have training splits that differ in no other.
    """

    def in_test(record: int) -> bool:
        name = record.to_bytes(8, "little", signed=True)
        digest = hashlib.blake2b(name, key=SPLIT_KEY, digest_size=8).digest()
        return int.from_bytes(digest, "little") % TEST_PART == 0

    tested = np.array([in_test(int(record)) for record in records.ids], bool)
    return records.take(np.flatnonzero(~tested)), records.take(np.flatnonzero(tested))


def _decode(config: DataConfig, source: Source) -> tuple[Split, list[str]]:
    """Convert images to grey or RGB as `config.shape` says, and check shapes and labels.

    Returns:
        The records whose images can be read, and a line on each other one.

    Raises:
        UserError: images or labels are not as `config` says, or no image at all can be read.
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
            opened = open_image(image, config.shape[0])
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
    if not good.any():
        raise UserError(
            f"{where}: no image can be read, of {len(labels):,} ({some(left_out)}); give {LAYOUT}"
        )
    if not good.all():
        images, labels = images[good], labels[good]
    patients = source.patients if source.patients is None else source.patients[good]
    return Split(images, labels, patients), left_out


def _save(place: Callable[[str], Path], split: Split, notes: Sequence[str]) -> None:
    """Write a split; each file atomically, so that two processes may do so at the same time."""
    files: dict[Path, Any] = {place("notes.json"): json.dumps(notes).encode()} if notes else {}
    arrays = {"images": split.images, "patients": split.patients, "labels": split.labels}
    # Labels come last: they make the split complete.
    files |= {place(f"{name}.npy"): each for name, each in arrays.items() if each is not None}
    write_together(files)
