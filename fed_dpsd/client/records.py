"""A hospital's own files, read where they lie: a folder of classes, CSV, npz or parquet.

Errors and lists of this module name local files and labels. They are for the hospital's own screen
and log, and never part of a message.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet
from numpy.typing import NDArray

from fed_dpsd.data.datasets import Split
from fed_dpsd.data.images import digests, open_image, scaled
from fed_dpsd.data.sources import some, walk_classes
from fed_dpsd.data.tables import hash64, image_of, patient_of, read_csv, repeated_file
from fed_dpsd.errors import UserError, reason_of


@dataclass(frozen=True)
class HospitalFiles:
    """The place of a hospital's records, and the names of its labels.

    Args:
        path: a folder with a subfolder for each class, or a .csv, .npz or .parquet file.
        image_column: in a CSV, the column of paths from the CSV's folder; in an npz, the name of
            the array (N, H, W) or (N, H, W, 3); in parquet, the column of encoded images, or of
            paths from the file's folder.
        label_column: the column, or the npz's array, of labels.
        patient_column: the column, or the npz's array, of patients. With it, all records of a
            patient go to the same teacher of the client.
        skip_unreadable: whether images that cannot be read are left out; otherwise they are an
            error.
        labels: the federation's class of each local label, which is the name of a subfolder or a
            value of the label column; {} where labels are the classes' own names.
    """

    path: str
    image_column: str
    label_column: str
    patient_column: str | None
    skip_unreadable: bool
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for label, name in self.labels.items():
            if not isinstance(label, str):
                raise ValueError(f"labels: {label!r} is no text; quote it: '{label}': {name}")
            if not isinstance(name, str):
                raise ValueError(f"labels.{label}={name!r} must be the name of one of the classes")

    def check(self, classes: Sequence[str]) -> None:
        """Check that labels name classes of the federation.

        Raises:
            ValueError: one does not.
        """
        for label, name in self.labels.items():
            if name not in classes:
                raise ValueError(
                    f"files.labels.{label}={name}: the classes are {', '.join(classes)}; name one"
                )


@dataclass(frozen=True)
class HospitalRecords:
    """The content of a hospital's files.

    Args:
        records: the records, in the federation's shape and classes.
        ids: (N,) int64, ascending: a digest of each image's pixels. So the order of the files does
            not matter, and an id stays when others come or go.
        unreadable: a line on each image that was left out.
    """

    records: Split
    ids: NDArray[np.int64]
    unreadable: tuple[str, ...]


class _Item(NamedTuple):
    """A record before it is decoded: an image as a file, as bytes or as pixels."""

    name: str
    image: Path | bytes | NDArray[np.uint8]
    label: str | None
    patient: str | None


def read(files: HospitalFiles, shape: tuple[int, ...], classes: Sequence[str]) -> HospitalRecords:
    """Read every record; images become grey or RGB, and are scaled to the federation's size.

    Args:
        files: the place and format of the records.
        shape: (C, size, size) of the federation's images.
        classes: the names of the federation's classes, in their order.

    Raises:
        UserError: files, columns or labels are not as `files` says, or images cannot be read and
            must not be skipped. The message names them and the remedy.
    """
    named = files.labels or {name: name for name in classes}
    numbers = {label: classes.index(name) for label, name in named.items()}
    path = Path(files.path)
    reader = _reader(path)
    images, labels, patients, unreadable, unknown_labels = [], [], [], [], set()
    places: list[Path] = []
    for item in reader(path, files):
        if isinstance(item.image, Path):
            places.append(item.image)
        if item.label is None:
            unreadable.append(f"{item.name}: it lies in no class's folder")
            continue
        if item.label not in numbers:
            unknown_labels.add(item.label)
            continue
        try:
            pixels = scaled(open_image(item.image, shape[0]), shape)
        except (OSError, ValueError) as error:
            unreadable.append(f"{item.name}: {reason_of(error)}")
            continue
        images.append(pixels)
        labels.append(numbers[item.label])
        patients.append(0 if item.patient is None else hash64(item.patient))
    if unknown_labels:
        raise UserError(
            f"{path}: {_some('labels', sorted(unknown_labels))} not in classes; add each to "
            f"files.labels, with one of the classes {some(classes)}"
        )
    if repeated := repeated_file(places):
        raise UserError(
            f"{path}: {repeated} is named twice, by a row or a link; a picture is one record, and "
            "protected as one: leave it out once"
        )
    if unreadable and not files.skip_unreadable:
        raise UserError(
            f"{path}: {_some('images', unreadable)} unreadable; mend them, or set "
            "skip_unreadable=true to leave them out"
        )
    if not images:
        raise UserError(f"{path} holds no image that can be read; give the folder or file of some")
    known = np.array(patients, np.int64) if files.patient_column is not None else None
    records = Split(np.stack(images), np.array(labels, np.int64), known).in_order()
    return HospitalRecords(records, digests(records.images), tuple(unreadable))


def _some(noun: str, lines: Sequence[str]) -> str:
    """Begin a sentence with a count of things and the names of the first few, as far as "are"."""
    return f"{len(lines)} {noun} ({some(lines)}) are"


def _patient(path: Path, files: HospitalFiles, name: str, value: Any) -> str | None:
    """Return a patient's name; None where there is no column of patients.

    An image without a patient's name is an error: it might go to another teacher than the
    patient's other images.
    """
    if files.patient_column is None:
        return None
    if not (text := patient_of(value)):
        raise UserError(
            f"{path}: {name} has no {files.patient_column}; name its patient, or set "
            "patient_column: null"
        )
    return text


# --- formats ---

_ACCESS_REMEDY = "see that it is there, and that the user of the service may read it"


def _reader(path: Path) -> Callable[[Path, HospitalFiles], Iterator[_Item]]:
    if path.is_dir():
        return _read_folder
    known = {".csv": _read_csv, ".npz": _read_npz, ".parquet": _read_parquet}
    if path.is_file() and path.suffix in known:
        return known[path.suffix]
    problem = f"is no {', '.join(known)} file" if path.exists() else "is not there"
    raise UserError(
        f"path={path} {problem}; give a folder with a subfolder for each class, or one such file"
    )


def _read_folder(path: Path, files: HospitalFiles) -> Iterator[_Item]:
    """Read a subfolder for each class, with images at any depth; hidden files are skipped."""
    if files.patient_column is not None:
        raise UserError(
            f"patient_column={files.patient_column!r}: a folder of classes names no patients; use "
            "a CSV with a column for them, or null"
        )
    for label in files.labels:
        if not (path / label).is_dir():
            raise UserError(f"{path}: there is no folder {label!r} of classes; {_ACCESS_REMEDY}")

    try:
        for file, label in walk_classes(path):
            yield _Item(str(file.relative_to(path)), file, label, None)
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be read ({error.strerror}); {_ACCESS_REMEDY}"
        ) from None


def _read_csv(path: Path, files: HospitalFiles) -> Iterator[_Item]:
    """Read a CSV with a row for each image."""
    names, rows = read_csv(path)
    _check_columns(path, files, names)
    for row in rows:
        name = row[files.image_column]
        patient = _patient(path, files, name, row.get(files.patient_column or ""))
        yield _Item(name, path.parent / name, row[files.label_column], patient)


def _read_npz(path: Path, files: HospitalFiles) -> Iterator[_Item]:
    """Read arrays of pixels, labels and patients, in the layout of MedMNIST."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            _check_columns(path, files, arrays.files)
            images = arrays[files.image_column]
            labels = arrays[files.label_column].reshape(-1)
            patients = None
            if files.patient_column is not None:
                patients = arrays[files.patient_column].reshape(-1)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # zipfile and zlib raise any type of error on broken bytes
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}); give an npz of arrays, with no "
            "objects among them"
        ) from None
    pixels = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
    if images.dtype != np.uint8 or not pixels or 0 in images.shape:
        raise UserError(
            f"{path}: {files.image_column} is {images.dtype} of shape {images.shape}; it must be "
            "uint8 of shape (N, H, W) or (N, H, W, 3)"
        )
    for noun, array in (("labels", labels), ("patients", patients)):
        if array is not None and len(array) != len(images):
            raise UserError(
                f"{path}: {len(images)} images but {len(array)} {noun}; give one for each image"
            )
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        name, patient = f"image {index}", None if patients is None else patients[index]
        yield _Item(name, image, str(label), _patient(path, files, name, patient))


def _read_parquet(path: Path, files: HospitalFiles) -> Iterator[_Item]:
    """Read images in the layout of Hugging Face, bytes or structs with `bytes`, or their paths."""
    columns = [files.image_column, files.label_column]
    columns += [files.patient_column] if files.patient_column is not None else []
    index = 0
    try:
        _check_columns(path, files, pyarrow.parquet.read_schema(path).names)
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(256, columns=columns):
            for row in batch.to_pylist():
                name = f"row {index}"
                patient = _patient(path, files, name, row.get(files.patient_column))
                image = image_of(
                    row[files.image_column], path.parent, f"{path}: the image of {name}"
                )
                yield _Item(name, image, str(row[files.label_column]), patient)
                index += 1
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as parquet ({error}); export it anew") from None


def _check_columns(path: Path, files: HospitalFiles, names: Sequence[str]) -> None:
    for key in ("image_column", "label_column", "patient_column"):
        column = getattr(files, key)
        if column is not None and column not in names:
            raise UserError(
                f"{path}: there is no {key}={column!r}; it has {', '.join(names) or 'none'}"
            )
