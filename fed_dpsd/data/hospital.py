"""A hospital's own files, read where they lie: a folder of classes, CSV, npz or parquet.

Whatever is raised or listed here names local files and labels: it is for the hospital's own screen
and log, and never part of a message.
"""

import csv
import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fed_dpsd.config import UserError
from fed_dpsd.data.datasets import Split

NAMED_AT_MOST = 5
FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "WEBP")


@dataclass(frozen=True)
class HospitalFiles:
    """Where a hospital's records are, and what its labels are called.

    Args:
        path: a folder with a subfolder for each class, or a .csv, .npz or .parquet file.
        classes: the federation's class of each local label: a subfolder's name, or what the label
            column says.
        image_column: of a CSV, paths from the CSV's folder; of an npz, the name of the array
            (N, H, W) or (N, H, W, 3); of parquet, encoded images.
        label_column: the column, or the npz's array, of labels.
        patient_column: that of patients; with it a client's teachers share records out by patient.
        skip_unreadable: leave images out that cannot be read; else they are an error.
    """

    path: str
    classes: Mapping[str, int]
    image_column: str
    label_column: str
    patient_column: str | None
    skip_unreadable: bool

    def __post_init__(self) -> None:
        if not self.classes:
            raise ValueError("classes={} names no label; map each local label to a class")
        for label, number in self.classes.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise ValueError(f"classes.{label}={number!r} must be a class, 0 or more")


@dataclass(frozen=True)
class HospitalRecords:
    """What was read.

    Args:
        records: of the federation's shape and classes.
        ids: (N,) int64, a hash of each image's own content: it stays when others come or go.
        unreadable: what was left out, a line each.
    """

    records: Split
    ids: NDArray[np.int64]
    unreadable: tuple[str, ...]


class _Item(NamedTuple):
    """A record before it is decoded: an image as a file, as bytes or as pixels."""

    name: str
    image: Path | bytes | NDArray[np.uint8]
    label: str
    patient: str | None


def read(files: HospitalFiles, shape: tuple[int, ...], num_classes: int) -> HospitalRecords:
    """Read every record; images become grey or RGB, and are scaled to the federation's size.

    Args:
        files: where they are.
        shape: (C, size, size) that the federation asks for.
        num_classes: its number of classes.

    Raises:
        UserError: files, columns or labels are not as `files` says, or images cannot be read and
            must not be skipped; it names them and the remedy.
    """
    for label, number in files.classes.items():
        if number >= num_classes:
            raise UserError(
                f"classes.{label}={number}: the federation has classes 0 to {num_classes - 1}"
            )
    path = Path(files.path)
    reader = _reader(path)
    images, labels, ids, patients, unreadable, strangers = [], [], [], [], [], set()
    for item in reader(path, files):
        if item.label not in files.classes:
            strangers.add(item.label)
            continue
        try:
            content, pixels = open_image(item.image, shape)
        except (OSError, ValueError) as error:
            unreadable.append(f"{item.name}: {' '.join(str(error).split())}")
            continue
        images.append(pixels)
        labels.append(files.classes[item.label])
        ids.append(_number(content))
        patients.append(0 if item.patient is None else _number(item.patient.encode()))
    if strangers:
        raise UserError(
            f"{path}: {_some('labels', sorted(strangers))} not in classes; add each, with the "
            "federation's class that it is"
        )
    if unreadable and not files.skip_unreadable:
        raise UserError(
            f"{path}: {_some('images', unreadable)} unreadable; mend them, or set "
            "skip_unreadable=true to leave them out"
        )
    if not images:
        raise UserError(f"{path} holds no image that can be read; give the folder or file of some")
    known = np.array(patients, np.int64) if files.patient_column is not None else None
    split = Split(np.stack(images), np.array(labels, np.int64), known)
    return HospitalRecords(split, np.array(ids, np.int64), tuple(unreadable))


def _some(what: str, lines: Sequence[str]) -> str:
    """So many of something, the first few by name, for a sentence that ends with a predicate."""
    more = ", ..." if len(lines) > NAMED_AT_MOST else ""
    return f"{len(lines)} {what} ({', '.join(lines[:NAMED_AT_MOST])}{more}) are"


def _number(content: bytes) -> int:
    """64 bits of a hash, signed."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


# --- formats ---


def _reader(path: Path) -> Callable[[Path, HospitalFiles], Iterator[_Item]]:
    if path.is_dir():
        return _read_folder
    known = {".csv": _read_csv, ".npz": _read_npz, ".parquet": _read_parquet}
    if path.is_file() and path.suffix in known:
        return known[path.suffix]
    what = f"is no {', '.join(known)} file" if path.exists() else "is not there"
    raise UserError(
        f"path={path} {what}; give a folder with a subfolder for each class, or one such file"
    )


def _read_folder(path: Path, files: HospitalFiles) -> Iterator[_Item]:
    """A subfolder for each class, with images at any depth; hidden files are passed over."""
    if files.patient_column is not None:
        raise UserError(
            f"patient_column={files.patient_column!r}: a folder of classes names no patients; use "
            "a CSV with a column for them, or null"
        )
    for folder in sorted(each for each in path.iterdir() if each.is_dir()):
        for file in sorted(folder.rglob("*")):
            if file.is_file() and not file.name.startswith("."):
                yield _Item(str(file.relative_to(path)), file, folder.name, None)


def _read_csv(path: Path, files: HospitalFiles) -> Iterator[_Item]:
    """A row for each image."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        _check_columns(path, files, reader.fieldnames or ())
        for row in reader:
            name = row[files.image_column] or ""
            patient = files.patient_column and row[files.patient_column]
            yield _Item(name, path.parent / name, row[files.label_column] or "", patient)


def _read_npz(path: Path, files: HospitalFiles) -> Iterator[_Item]:
    """Arrays of pixels, labels and patients, as MedMNIST has them."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            _check_columns(path, files, arrays.files)
            images = arrays[files.image_column]
            labels = arrays[files.label_column].reshape(-1)
            patients = files.patient_column and arrays[files.patient_column].reshape(-1)
    except (ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read ({error}); give arrays without objects") from None
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise UserError(
            f"{path}: {files.image_column} is {images.dtype} of shape {images.shape}; it must be "
            "uint8 of shape (N, H, W) or (N, H, W, 3)"
        )
    if len(labels) != len(images):
        raise UserError(f"{path}: {len(images)} images but {len(labels)} labels")
    for index, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        patient = None if patients is None else str(patients[index])
        yield _Item(f"image {index}", pixels, str(label), patient)


def _read_parquet(path: Path, files: HospitalFiles) -> Iterator[_Item]:
    """Encoded images as Hugging Face keeps them: bytes, or a struct with `bytes`."""
    _check_columns(path, files, pyarrow.parquet.read_schema(path).names)
    columns = [files.image_column, files.label_column]
    columns += [files.patient_column] if files.patient_column else []
    index = 0
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(256, columns=columns):
        for row in batch.to_pylist():
            image = row[files.image_column]
            picture = image["bytes"] if isinstance(image, Mapping) else image
            patient = str(row[files.patient_column]) if files.patient_column else None
            yield _Item(f"row {index}", picture or b"", str(row[files.label_column]), patient)
            index += 1


def _check_columns(path: Path, files: HospitalFiles, names: Sequence[str]) -> None:
    for key in ("image_column", "label_column", "patient_column"):
        column = getattr(files, key)
        if column is not None and column not in names:
            raise UserError(
                f"{path}: there is no {key}={column!r}; it has {', '.join(names) or 'none'}"
            )


# --- images ---


def open_image(
    image: Path | bytes | NDArray[np.uint8], shape: tuple[int, ...]
) -> tuple[bytes, NDArray[np.uint8]]:
    """An image's own content, and its (C, size, size) pixels of `shape`.

    Args:
        image: a file, its bytes, or (H, W) or (H, W, 3) pixels.
        shape: what it becomes: grey or RGB, the middle square, scaled.

    Raises:
        OSError or ValueError: it is no image.
    """
    if isinstance(image, np.ndarray):
        return image.tobytes(), _fit(Image.fromarray(image), shape)
    content = image.read_bytes() if isinstance(image, Path) else image
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            return content, _fit(ImageOps.exif_transpose(opened), shape)
    except UnidentifiedImageError:
        raise ValueError(f"it is none of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from None


def _fit(image: Any, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """(C, size, size) pixels: the middle square, scaled; 16 bits become 8."""
    if image.mode.startswith("I"):  # radiographs often have 16 bits, which "L" would cut off at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65_535) >> 8).astype(np.uint8))
    image = image.convert("L" if shape[0] == 1 else "RGB")
    size = shape[1:]
    if image.size != size:
        image = ImageOps.fit(image, size, Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if shape[0] == 1 else pixels.transpose(2, 0, 1)
