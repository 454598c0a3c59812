"""A loader for scikit-learn's digits, class folders, tables and Hugging Face data sets.

Decoded images are cached. The handling of a record depends on that record alone
(docs/mechanisms.md, "From files to records").
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray

from fed_dpsd import classes
from fed_dpsd.classes import default_class_names, label_numbers
from fed_dpsd.config import BUNDLED, DataConfig
from fed_dpsd.data import sources
from fed_dpsd.data.dicom import decoder_versions
from fed_dpsd.data.images import Conversion
from fed_dpsd.data.intake import Records, Taken, first_few, take_records
from fed_dpsd.data.reader import Reader, classes_setting
from fed_dpsd.errors import UserError, warn_once
from fed_dpsd.storage import write_together, writing

DIGITS_TEST_SIZE = 360
ENOUGH = 25  # images or patients to state an accuracy; its standard error is then <= 10 points
TEST_PART = 5  # one in so many records, or patients, is for testing if data is not divided
# Key of the hash that divides data. It is not a setting: users could choose a favourable split.
SPLIT_KEY = b"fed_dpsd: test split"
DAMAGED = OSError, ValueError, EOFError  # of files in the cache
PURPOSES = {"train": "training", "test": "testing"}


@dataclass(frozen=True)
class Dataset:
    """A training split, which is divided among the clients, and a public test split.

    `counts` gives the number of files or rows found, used and skipped in each split, with reasons.
    The numbers are exact, so they go only to the console and to a simulation's diagnostics.

    `digests` names the content: digests of the images as decoded, the labels and the patients of
    each split, in the order of records. File names, times and places do not matter.

    `copied` (len(test),) marks the test images that are training images too, pixel for pixel.
    """

    train: Records
    test: Records
    counts: tuple[str, ...]
    digests: Mapping[str, str]
    copied: NDArray[np.bool_]


class Loaded(NamedTuple):
    """A split, a sentence on its numbers of files or rows, and its `Records.digests`."""

    records: Records
    counted: str
    digests: NDArray[np.int64]


def load(config: DataConfig, cache: Path) -> Dataset:
    """Load a data set; `_read` turns its files into records unless they are cached.

    Args:
        config: the data set to load; its shape and number of classes are checked against the data.
        cache: folder for decoded images, so that other processes need not decode them again.

    Raises:
        UserError: the folder is missing, there is no network, the data does not match `config`, or
            the given splits share a patient.
    """
    if config.name == BUNDLED:
        return _digits()
    loaded = {split: _load_split(config, split, cache) for split in sources.SPLITS}
    data = _dataset(**loaded)
    _check_shared_patients(config, data)
    if len(data.test) < ENOUGH:
        warn_once(
            f"data={config.name} ({config.path or config.hub}): {len(data.test):,} test images are "
            f"too few to judge a student; {ENOUGH} would be enough"
        )
    if copies := int(data.copied.sum()):
        warn_once(
            f"data={config.name} ({config.path or config.hub}): {copies:,} of {len(data.test):,} "
            "test images are training images too, pixel for pixel, which inflates scores"
        )
    return data


def _dataset(train: Loaded, test: Loaded) -> Dataset:
    counts = tuple(dict.fromkeys((train.counted, test.counted)))
    copied = np.isin(test.digests, train.digests)
    digests = digests_of(training=train, test=test)
    return Dataset(train.records, test.records, counts, digests, copied)


def count_items(config: DataConfig, cache: Path) -> tuple[int | None, bool]:
    """Return how many files or rows the training split has, and whether the cache has its images.

    No image is read. Some may be no records, such as the test images of data that is not divided.
    The number is None for bundled data, and for a data set on the hub.

    Raises:
        UserError: the split cannot be read.
    """
    if config.name == BUNDLED or config.path is None:
        return None, False
    source = sources.Source(config, "train")
    place = _cached(config, source.fingerprint(), "train", cache)
    return source.reader().count(), place("about.json").exists()


def load_test(config: DataConfig, cache: Path) -> Records:
    """Load only the test split; see `load`."""
    return _digits().test if config.name == BUNDLED else _load_split(config, "test", cache).records


def test_count(config: DataConfig, cache: Path) -> str:
    """Return the counts of the test split's files or rows; "" if it has no images."""
    if config.name == BUNDLED:
        return _digits().counts[0]
    loaded = _load_split(config, "test", cache)
    return loaded.counted if len(loaded.records) else ""


def _check_shared_patients(config: DataConfig, data: Dataset) -> None:
    """Reject patients that are in both splits, or warn about them if `config` allows them."""
    if data.train.patients is None or data.test.patients is None:
        return
    shared = len(np.intersect1d(data.train.patients, data.test.patients))
    if not shared:
        return
    place = f"data.hub={config.hub}" if config.path is None else f"data.path={config.path}"
    said = f"{shared:,} patient{'s are' if shared > 1 else ' is'} in train and in test ({place})"
    if config.shared_patients == "refuse":
        raise UserError(
            f"{said}; keep all records of a patient in one of them, or set "
            "data.shared_patients=allow, which inflates scores"
        )
    warn_once(f"{said}: scores are inflated, and the test records of a patient are not protected")


@functools.cache
def _digits() -> Dataset:
    """Return scikit-learn's digits as uint8, with a fixed random split, read once per process."""
    # To import scikit-learn's own function takes half a second.
    (folder,) = find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]
    table = np.loadtxt(Path(folder, "datasets", "data", "digits.csv.gz"), delimiter=",")
    images = np.round(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    records = Records(images, table[:, -1].astype(np.int64))
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(records))
    train, test = records.take(order[DIGITS_TEST_SIZE:]), records.take(order[:DIGITS_TEST_SIZE])
    count = f"{len(records):,} images found, {len(records):,} used"
    loaded = [Loaded(split, count, split.digests) for split in (train, test)]
    return _dataset(*loaded)


def digests_of(**splits: Loaded) -> dict[str, str]:
    """Return `Dataset.digests`, the first 16 hexadecimal digits of the SHA-256 of each part."""
    return {
        f"{split} {part}": hashlib.sha256(values.tobytes()).hexdigest()[:16]
        for split, loaded in splits.items()
        for part, values in (
            ("images", loaded.digests),
            ("labels", loaded.records.labels),
            ("patients", loaded.records.patients),
        )
        if values is not None
    }


def _load_split(config: DataConfig, split: str, cache: Path) -> Loaded:
    """Load a split, from the cache if it was read before; divide the data if it has no splits.

    Images in the cache are mapped from their file, so they take no memory. Skipped records and
    classes without images cause warnings, once per process; an error would reveal them.
    """
    source = sources.Source(config, split)
    files = source.fingerprint()
    place = _cached(config, files, split, cache)
    known = config.patient_column is not None
    try:
        loaded, notes = _saved(place, known)
    except DAMAGED:  # or missing
        parts, about, cacheable = _read(config, source, split)
        loaded, notes = Loaded(parts[split], about["count"], parts[split].digests), about["notes"]
        if cacheable:
            _save({_cached(config, files, name, cache): parts[name] for name in parts}, about)
            with contextlib.suppress(*DAMAGED):  # a full folder keeps nothing
                loaded, notes = _saved(place, known)
    for note in notes:
        warn_once(note)
    return loaded


def _saved(place: Callable[[str], Path], patients: bool) -> tuple[Loaded, list[str]]:
    """Return a split from the cache, and notes for the user; raise one of DAMAGED if it cannot."""
    about = json.loads(place("about.json").read_text())
    images = np.load(place("images.npy"), mmap_mode="r")
    known = np.load(place("patients.npy")) if patients else None
    records = Records(images, np.load(place("labels.npy")), known)
    return Loaded(records, about["count"], np.load(place("digests.npy"))), about["notes"]


def _read(
    config: DataConfig, source: sources.Source, split: str
) -> tuple[dict[str, Records], dict[str, Any], bool]:
    """Read a split, or both splits if the data is not divided: `take_records`, then `divide`.

    Returns:
        The splits, what to report about them, and whether they may be cached.
    """
    reader, where = source.reader(), source.where
    names = config.class_names
    taken = take_records(
        reader.items(),
        reader.unit,
        where,
        label_numbers(names, declared=reader.declared),
        Conversion(
            config.shape,
            config.fit if config.resize else None,
            config.pixel_bits,
            config.window,
        ),
        patients=config.patient_column is not None,
        remedy=f"the classes are {first_few(names)}; correct the labels, set "
        "data.num_classes=null to take all labels as classes, or name each in data.classes=[...]",
    )
    records = taken.records if source.keeps_rows else taken.records.in_order()
    parts = {split: records}
    if not source.divided:
        parts = dict(zip(sources.SPLITS, divide(records), strict=True))
    count = f"{split}: {taken.count.numbers}" if source.divided else taken.count.numbers
    notes = _notes(config, source, reader, taken, parts)
    return parts, {"count": count, "notes": notes}, taken.cacheable


def _notes(
    config: DataConfig,
    source: sources.Source,
    reader: Reader,
    taken: Taken,
    parts: Mapping[str, Records],
) -> list[str]:
    """Return what to tell the user about records that were read, divided into `parts`."""
    where, names, notes = source.where, config.class_names, [*taken.notes]
    if taken.count.skipped:
        notes.insert(0, f"{where}: {taken.count}")
    if not source.divided:
        unit, own = ("image", "pixels") if taken.records.patients is None else ("patient", "id")
        notes.append(
            f"{where} has no train and test splits: one {unit} in {TEST_PART} is for testing, "
            f"chosen by a hash of its {own}, {len(parts['test']):,} of {len(taken.records):,} "
            "images; to divide it differently, name folders or tables train and test, or arrays of "
            "an npz train_... and test_..."
        )
    for name, part in parts.items():
        if lacking := _missing_classes(config, part):
            notes.append(f"{where}: no image of class {lacking} for {PURPOSES[name]}")
    if reader.declared and names == default_class_names(len(names)) != tuple(reader.declared):
        notes.append(
            f"{where} names its classes; {classes_setting(reader.declared)} uses these names"
        )
    if not source.divided and reader.ignored:
        notes.append(
            f"{where}: its {reader.ignored} is not used as a split; to test on some of its "
            f"{reader.unit}, give them as a test split, and the others as a train split"
        )
    if left := source.unused():
        notes.append(f"{where}: {left}")
    return notes


def _cached(config: DataConfig, files: str, split: str, cache: Path) -> Callable[[str], Path]:
    """Return a function that maps the names of a split's files to their paths in the cache.

    `files` is the fingerprint taken before reading, so that files changed since then are read
    again. Other code may decode the same files differently.
    """
    text = f"{files} {split} {config} {SPLIT_KEY!r} {_code_digest()}"
    key = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:24]
    return lambda name: cache / "data" / f"{key}.{name}"


@functools.cache  # a process keeps the code that it imported
def _code_digest() -> str:
    """Return a digest of the code that turns files into records, and of its decoders' versions."""
    digest = hashlib.sha256(f"{PIL.__version__} {decoder_versions()}".encode())
    for file in (*sorted(Path(__file__).parent.glob("*.py")), Path(classes.__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _missing_classes(config: DataConfig, records: Records) -> str:
    """Name the classes without records; "" if there are none."""
    counts = np.bincount(records.labels, minlength=config.num_classes)
    return first_few(
        [name for name, count in zip(config.class_names, counts, strict=True) if not count]
    )


def divide(records: Records) -> tuple[Records, Records]:
    """Divide records into a training and a test split, about one in TEST_PART for testing.

    A keyed hash of a record's id (`Records.ids`) decides: the patient if known, otherwise the
    pixels. The label, the location and other records do not matter. So if data sets differ
    in one record, patient or label, their training splits differ in no other.
    """

    def in_test(record: int) -> bool:
        name = record.to_bytes(8, "little", signed=True)
        digest = hashlib.blake2b(name, key=SPLIT_KEY, digest_size=8).digest()
        return int.from_bytes(digest, "little") % TEST_PART == 0

    tested = np.array([in_test(int(record)) for record in records.ids], bool)
    return records.take(np.flatnonzero(~tested)), records.take(np.flatnonzero(tested))


def _save(splits: Mapping[Callable[[str], Path], Records], about: dict[str, Any]) -> None:
    """Write all splits or none; a split's key is a function that returns a file's path."""
    files: dict[Path, Any] = {}
    with writing(folder := next(iter(splits))("").parent):  # private pictures
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place, split in splits.items():
        arrays = {"images": split.images, "patients": split.patients, "digests": split.digests}
        arrays["labels"] = split.labels
        files[place("about.json")] = json.dumps(about).encode()
        files |= {place(f"{name}.npy"): each for name, each in arrays.items() if each is not None}
    write_together(files)
