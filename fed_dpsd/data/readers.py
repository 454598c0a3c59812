"""Readers: one for each layout, a folder of classes, a table, and arrays, wherever it lies.

The console and hospitals read by the same code. Readers look at no image's content.
"""

import contextlib
import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow
import pyarrow.parquet

from fed_dpsd.data.classes import TRUTH, in_order, text_of
from fed_dpsd.data.intake import NO_CLASS, NO_LABEL, SEVERAL_LABELS, Item
from fed_dpsd.errors import UserError, reason_of

IMAGES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp")
TABLES = (".parquet", ".csv")  # the first that is there is read
ARRAYS = ".npz"
METADATA = "metadata.csv"  # a table in a folder of images, as on the Hugging Face hub
FILE_NAME = "file_name"  # its column of paths
NOBODY = ("", "none", "nan", "nat", "null", "<na>")  # spellings of a patient who is not known
AT_ONCE = 256  # rows of a parquet file


class Columns(NamedTuple):
    """The columns of a table, or arrays of an npz, and the keys that name them.

    Args:
        image, label, patient: the columns; None where there is none.
        labels: columns of truth values, one for each class, in place of `label`.
        keys: what the keys begin with: "data." on the console, "files." at a hospital.
    """

    image: str
    label: str | None
    labels: Sequence[str] = ()
    patient: str | None = None
    keys: str = "data."

    @property
    def named(self) -> dict[str, str]:
        """Return the columns by the keys that name them."""
        one = {"image": self.image, "label": self.label, "patient": self.patient}
        named = {f"{self.keys}{key}_column": name for key, name in one.items() if name}
        several = enumerate(self.labels)
        return named | {f"{self.keys}label_columns[{i}]": name for i, name in several}


class Reader(Protocol):
    """A place with images and labels."""

    unit: str
    declared: Sequence[str]

    def items(self) -> Iterator[Item]:
        """Yield every file or row."""

    def labels(self) -> dict[str, str]:
        """Return each text that is a label, with the name of an item that has it."""

    def files(self) -> Iterable[Path]:
        """Return the files whose content decides what `items` yields."""


def reader_of(path: Path, columns: Columns, split: str = "") -> Reader:
    """Return the reader of a folder, a table or an npz.

    Raises:
        UserError: there is no such place, it cannot be read, or it lacks a column.
    """
    if path.is_dir():
        if (path / METADATA).is_file():
            return Table(path / METADATA, columns)
        return Folder(path, columns)
    suffix = path.suffix.lower()
    if path.is_file() and suffix in TABLES:
        return Table(path, columns)
    if path.is_file() and suffix == ARRAYS:
        return Arrays(path, columns, split)
    problem = f"is no {', '.join((*TABLES, ARRAYS))} file" if path.exists() else "is not there"
    raise UserError(
        f"{columns.keys}path={path} {problem}; give a folder with a subfolder for each class, or "
        "one such file"
    )


def id_of(value: Any, columns: Columns, where: str) -> str:
    """Return the text of a patient's id; "" where no column has them.

    Raises:
        UserError: the cell is empty. All such records would be one patient's.
    """
    if columns.patient is None:
        return ""
    if (text := text_of(value)).lower() in NOBODY:
        raise UserError(
            f"{where} has no {columns.patient}; name its patient, delete it, or set "
            f"{columns.keys}patient_column to null"
        )
    return text


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Report an error of the operating system as the user's own."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be read ({reason_of(error)}); see that it is there, "
            "and that you, or the user of the service, may read it"
        ) from None


# --- folders of classes ---


class Folder:
    """A folder whose subfolders are the classes; images lie in them at any depth."""

    unit = "files"
    declared: Sequence[str] = ()

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path = path
        if columns.patient is not None:
            raise UserError(
                f"{path}: {columns.keys}patient_column={columns.patient}: folders of classes name "
                "no patients; use null, or a table with a column for them"
            )
        self._labels = {folder: text_of(folder) for folder in class_folders(path)}
        texts = list(self._labels.values())
        if twice := next((f for f, text in self._labels.items() if texts.count(text) > 1), None):
            raise UserError(
                f"{path}: folder {twice!r} has a name that another has too, apart from spaces, "
                "accents' spellings, or as a number; join the two"
            )

    def items(self) -> Iterator[Item]:
        """Yield every file in the order of its path."""
        with readable(self._path):
            for file, folder in sorted(walk_classes(self._path), key=lambda found: found[0]):
                name = str(file.relative_to(self._path))
                if folder is None:
                    yield Item(name, file, skipped=NO_CLASS)
                else:
                    yield Item(name, file, self._labels[folder])

    def labels(self) -> dict[str, str]:
        """Return the names of the subfolders; one may be empty."""
        return {text: f"{self._path.name}/{folder}" for folder, text in self._labels.items()}

    def files(self) -> Iterable[Path]:
        """Return every file."""
        with readable(self._path):
            return sorted(file for file, _ in walk_classes(self._path))


def class_folders(folder: Path) -> list[str]:
    """Return the names of the subfolders, in order, except hidden ones.

    Raises:
        UserError: the folder cannot be read.
    """
    with readable(folder):
        return sorted(place.name for place in folder.iterdir() if place.is_dir() and seen(place))


def seen(path: Path) -> bool:
    """Return whether a file or folder is not hidden, and no part of how a Mac packs folders."""
    return not path.name.startswith(".") and path.name != "__MACOSX"


def walk_classes(path: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield every file at any depth, with its class: the name of the subfolder that it lies in.

    A file next to the subfolders has class None. Hidden files and folders are skipped.

    Raises:
        OSError: a folder cannot be read.
        UserError: a link leads to a folder that it lies in.
    """

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(path, onerror=fail, followlinks=True):
        here = Path(place).resolve()
        folders[:] = [folder for folder in folders if seen(Path(folder))]
        for folder in folders:
            if (Path(place) / folder).resolve() in (here, *here.parents):
                raise UserError(
                    f"{place}/{folder} is a link to a folder that it lies in; delete it"
                )
        for name in names:
            file = Path(place) / name
            inside = file.relative_to(path)
            if seen(file):
                yield file, inside.parts[0] if len(inside.parts) > 1 else None


# --- tables ---


class Table:
    """A CSV or parquet file, or a table of the Hugging Face hub.

    An image is a path from the table's folder or, in parquet, an encoded image. Where the table
    declares names of classes, its numbers are their places.
    """

    unit = "rows"

    def __init__(self, path: Path, columns: Columns, table: pyarrow.Table | None = None) -> None:
        self._path, self._table, self._columns = path, table, columns
        if table is None and path.suffix.lower() == ".csv":
            self._table = read_csv(path)
            if path.name == METADATA and columns.image not in self._table.column_names:
                self._columns = columns._replace(image=FILE_NAME)
        if self._table is not None:
            self._schema = self._table.schema
        else:
            with is_parquet(path):
                self._schema = pyarrow.parquet.read_schema(path)
        self.check()
        self.declared = columns.labels or declared_in(self._schema, columns.label)

    def check(self) -> None:
        """Check the columns.

        Raises:
            UserError: one is missing, or two have one name.
        """
        names, named = self._schema.names, self._columns.named
        if twice := next((name for name in named.values() if names.count(name) > 1), None):
            raise UserError(f"{self._path} has several columns {twice}; rename or delete one")
        missing = {key: name for key, name in named.items() if name not in names}
        if not missing:
            return
        if headless := [name for name in names if Path(name).suffix.lower() in IMAGES]:
            raise UserError(
                f"{self._path} begins with a row of {', '.join(headless)}; its first line must "
                f"name its columns, such as {','.join(named.values())}"
            )
        likely = self._likely()
        remedies = (f"{key}={likely.get(key, 'COLUMN')}" for key in missing)
        raise UserError(
            f"{self._path} has no column {', '.join(f'{n} ({k})' for k, n in missing.items())}; "
            f"its columns are {', '.join(names)}. If it is not another data set than you named, "
            f"set {' '.join(remedies)}"
        )

    def _likely(self) -> dict[str, str]:
        """Return the columns that may hold images and labels, by the keys that would name them."""
        names = self._schema.names
        fields = [field for field in self._schema if names.count(field.name) == 1]
        images = [field.name for field in fields if is_encoded(field.type)]
        first = next(self._rows([f.name for f in fields if f.name not in images]), {})
        paths = [name for name, value in first.items() if "." in str(value)]
        likely = {}
        if found := images or paths:
            likely[f"{self._columns.keys}image_column"] = found[0]
        others = [field.name for field in fields if field.name not in {*images, *paths}]
        distinct: dict[str, set[str]] = {name: set() for name in others}
        for row in self._rows(others):
            for name in others:
                distinct[name].add(text_of(row[name]))
        if several := {name: len(texts) for name, texts in distinct.items() if len(texts) > 1}:
            # There are fewer classes than numbers or names of records.
            fewest = min(several, key=several.__getitem__)
            likely[f"{self._columns.keys}label_column"] = fewest
        return likely

    def _rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        if self._table is not None:
            for batch in self._table.select(columns).to_batches(AT_ONCE):
                yield from batch.to_pylist()
            return
        with is_parquet(self._path):
            file = pyarrow.parquet.ParquetFile(self._path)
            for batch in file.iter_batches(AT_ONCE, columns=columns):
                yield from batch.to_pylist()

    def items(self) -> Iterator[Item]:
        """Yield every row."""
        columns = self._columns
        for number, row in enumerate(self._rows(list(columns.named.values())), 1):
            image, name = row[columns.image], f"row {number}"
            if isinstance(image, str) and image:
                name = image
            where = f"{self._path}: {name}"
            patient = id_of(row.get(columns.patient or ""), columns, where)
            label, skipped = self._label(row, where)
            yield Item(name, image_of(image, self._path.parent, where), label, patient, skipped)

    def _label(self, row: Mapping[str, Any], where: str) -> tuple[str, str]:
        """Return the text of a row's label, and why it has none."""
        columns = self._columns
        if columns.label is not None:
            value = row[columns.label]
            if self.declared and isinstance(value, int) and 0 <= value < len(self.declared):
                value = self.declared[value]
            label = text_of(value)
            return label, "" if label else NO_LABEL
        chosen = [name for name in columns.labels if _is_true(row[name], name, where)]
        if len(chosen) == 1:
            return text_of(chosen[0]), ""
        return "", SEVERAL_LABELS if chosen else NO_LABEL

    def labels(self) -> dict[str, str]:
        """Return the labels of all rows; the columns' names where there are several columns."""
        columns = self._columns
        if columns.label is None or self.declared:
            return {text_of(name): self._path.name for name in self.declared}
        found: dict[str, str] = {}
        for number, row in enumerate(self._rows([columns.label]), 1):
            if label := self._label(row, "")[0]:
                found.setdefault(label, f"{self._path.name}, row {number}")
        return found

    def files(self) -> Iterable[Path]:
        """Return the table, and the images that it names."""
        yield self._path
        if not is_encoded(self._schema.field(self._columns.image).type):
            for row in self._rows([self._columns.image]):
                if isinstance(name := row[self._columns.image], str) and name:
                    yield file_of(name, self._path.parent)


def _is_true(value: Any, column: str, where: str) -> bool:
    """Return whether a cell of a column of truth values holds one that is true."""
    text = text_of(value)
    if text not in ("", "0", "1", "-1", *TRUTH):
        raise UserError(f"{where}: {column} is {text}; it must be 0 or 1, or false or true")
    return text in ("1", "true")


def read_csv(path: Path) -> pyarrow.Table:
    """Return a CSV file in UTF-8, whose columns are text.

    Its first line says whether commas, semicolons or tabs separate the columns. A line "sep=;"
    before it, as Excel writes it, says so too.

    Raises:
        UserError: it cannot be read, it is empty, or a row is longer than the first line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            if re.fullmatch(r"sep=.\r?\n?", first.lower()):
                separator = first[4]
            else:
                separator = max(",;\t", key=first.count)
                file.seek(0)
            lines = csv.reader(file, delimiter=separator, strict=True)
            names = [name.strip() for name in next(lines, [])]
            if not any(names):
                raise UserError(f"{path} is empty; its first line must name its columns")
            rows = []
            for row in lines:
                if any(map(str.strip, row[len(names) :])):
                    raise UserError(
                        f"{path}: line {lines.line_num} has {len(row)} cells, but there are "
                        f"{len(names)} columns; put a cell with a {separator!r} in quotes"
                    )
                if row:
                    rows.append([cell.strip() for cell in row] + [""] * (len(names) - len(row)))
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"{path} cannot be read as CSV in UTF-8 ({reason_of(error)}); export it again"
        ) from None
    columns = [[row[place] for row in rows] for place in range(len(names))]
    return pyarrow.Table.from_arrays([pyarrow.array(c, pyarrow.string()) for c in columns], names)


@contextlib.contextmanager
def is_parquet(path: Path) -> Iterator[None]:
    """Report that a file is no parquet file, or may not be read, as the user's own error."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as a parquet file ({type(error).__name__}); write it again, or "
            "see that you may read it"
        ) from None


def file_of(name: str, folder: Path) -> Path:
    """Return the file that a table names; a path of Windows where there is no other."""
    file = folder / name
    with contextlib.suppress(OSError, ValueError):
        if "\\" in name and not file.exists():
            return folder / name.replace("\\", "/")
    return file


def image_of(value: Any, folder: Path, where: str) -> Path | bytes:
    """Return the image that a cell holds, without a look at its content.

    Args:
        value: a file's path from `folder`, an encoded image's bytes, or a mapping with `bytes`.
        folder: the folder of the table.
        where: the cell, for errors.

    Returns:
        A path or bytes; no bytes where the cell is empty.

    Raises:
        UserError: the cell holds anything else.
    """
    image = value.get("bytes") if isinstance(value, Mapping) else value
    if isinstance(image, str) and image:
        return file_of(image, folder)
    if image and not isinstance(image, bytes):
        raise UserError(
            f"{where} is of type {type(image).__name__}; it must be an encoded image's bytes, or "
            "the path of a file"
        )
    return image or b""


def is_encoded(kind: pyarrow.DataType) -> bool:
    """Return whether a column holds encoded images."""
    return pyarrow.types.is_struct(kind) or pyarrow.types.is_binary(kind)


def declared_in(schema: pyarrow.Schema, column: str | None) -> list[str]:
    """Return the names of classes that a table of the Hugging Face hub declares for a column."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[column]["names"]
    except (ValueError, KeyError, TypeError):
        return []
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if texts and pyarrow.types.is_integer(schema.field(column).type) else []


# --- arrays ---


class Arrays:
    """An npz of images, labels and patients, as MedMNIST has it.

    The arrays of a split, if there are splits, have names such as train_images.
    """

    unit = "images"
    declared: Sequence[str] = ()

    def __init__(self, path: Path, columns: Columns, split: str = "") -> None:
        self._path, self._columns = path, columns
        before = f"{split}_" if split else ""
        with self._open() as arrays:
            names = {key: before + name for key, name in columns.named.items()}
            if missing := {key: name for key, name in names.items() if name not in arrays.files}:
                lacking = ", ".join(f"{name} ({key})" for key, name in missing.items())
                raise UserError(
                    f"{path} has no array {lacking}; its arrays are {', '.join(arrays.files)}"
                )
            if columns.labels:
                raise UserError(
                    f"{path}: {columns.keys}label_columns is for tables; name an npz's array of "
                    f"labels by {columns.keys}label_column"
                )
        self._names = [
            before + name for name in (columns.image, columns.label, columns.patient) if name
        ]

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            with np.load(self._path, allow_pickle=False) as arrays:
                yield arrays
        except (UserError, MemoryError):
            raise
        except Exception as error:  # zipfile and zlib raise any type of error on broken bytes
            raise UserError(
                f"{self._path} cannot be read ({type(error).__name__}); give an npz of arrays, "
                "with no objects among them"
            ) from None

    def items(self) -> Iterator[Item]:
        """Yield every image."""
        with self._open() as arrays:
            images, *others = (arrays[name] for name in self._names)
        name = self._names[0]
        pixels = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
        if images.dtype != np.uint8 or not pixels or 0 in images.shape:
            raise UserError(
                f"{self._path}: {name} is {images.dtype} of shape {images.shape}; it must be "
                "uint8 of shape (N, H, W) or (N, H, W, 3)"
            )
        others = [array.reshape(-1) for array in others]
        for name, array in zip(self._names[1:], others, strict=True):
            if len(array) != len(images):
                raise UserError(
                    f"{self._path}: {len(images)} images but {len(array)} in {name}; give one for "
                    "each image"
                )
        labels, patients = others[0], others[1] if len(others) > 1 else [None] * len(images)
        for index, image in enumerate(images):
            name = f"image {index}"
            patient = id_of(patients[index], self._columns, f"{self._path}: {name}")
            yield Item(name, image, text_of(labels[index]), patient)

    def labels(self) -> dict[str, str]:
        """Return the labels of all images."""
        with self._open() as arrays:
            labels = arrays[self._names[1]].reshape(-1)
        texts = {text_of(label): f"{self._path.name}, image {i}" for i, label in enumerate(labels)}
        return {text: texts[text] for text in in_order(texts) if text}

    def files(self) -> Iterable[Path]:
        """Return the npz."""
        return [self._path]
