"""The reader of class folders, and what all readers share: columns, names of splits and errors.

A reader reads one layout: class folders, a table (tables.py) or arrays (arrays.py). Data sets and
hospitals use the same readers. Readers do not decode images.
"""

import contextlib
import functools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fed_dpsd.classes import is_missing, look_of, text_of
from fed_dpsd.data.dicom import PATIENT_ID, patient_of
from fed_dpsd.data.intake import NO_CLASS, Item
from fed_dpsd.errors import UserError, reason_of
from fed_dpsd.progress import track

SPLIT_NAMES = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("val", "valid", "validation", "dev"),
}


class Columns(NamedTuple):
    """The columns of a table or arrays of an npz, and the prefix of the keys that name them.

    `labels` are columns of booleans, one for each class, in place of `label`.
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
    """A source of images and labels.

    Attributes:
        unit: the kind of its items: files, rows or images.
        declared: the class names that it declares, in its own order.
    """

    unit: str
    declared: Sequence[str]

    @property
    def ignored(self) -> str:
        """Return what looks like a split but is not used as one; "" for nothing."""

    def count(self) -> int:
        """Return the number of items, without reading an image."""

    def items(self) -> Iterator[Item]:
        """Yield every file or row."""

    def labels(self) -> dict[str, str]:
        """Return the text of each label, with the name of an item that has it."""

    def files(self) -> Iterable[Path]:
        """Return the files that determine what `items` yields."""


def split_of(name: str) -> str:
    """Return the split that a folder or file name denotes, ignoring case; "" for none."""
    found = (split for split, names in SPLIT_NAMES.items() if name.casefold() in names)
    return next(found, "")


def classes_setting(names: Iterable[str]) -> str:
    """Return the setting `data.classes` with these names, as typed in a shell."""
    from fed_dpsd.config.errors import quoted

    plain = re.compile("(?!(true|false|null|nan|inf)$)[a-z_][a-z0-9_-]*", re.IGNORECASE)
    texts = (name if plain.fullmatch(name) else quoted(name) for name in names)
    setting = f"data.classes=[{','.join(texts)}]"
    return shlex.quote(setting) if '"' in setting else setting


def id_of(value: Any, columns: Columns, where: str) -> str:
    """Return the text of a patient's id; "" if no column has ids.

    Leading zeros of numbers are dropped: 019 in a CSV file is 19, as in a column of integers. Ids
    that look the same are equal.

    Raises:
        UserError: the cell is empty; otherwise, all such records would belong to one patient.
    """
    if columns.patient is None:
        return ""
    if is_missing(text := look_of(text_of(value))):
        raise UserError(
            f"{where} has no {columns.patient}; name its patient, delete it, or set "
            f"{columns.keys}patient_column to null"
        )
    return str(int(text)) if re.fullmatch("[0-9]{1,4000}", text) else text


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Report an operating system error in the block as a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be read ({reason_of(error)}); check that it exists "
            "and that you, or the service's user, may read it"
        ) from None


class Folder:
    """A folder with a subfolder for each class, which contains images at any depth.

    If `columns` names PatientID as the patients, they come from the headers of DICOM images.
    """

    unit = "files"
    declared: Sequence[str] = ()

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path, self._columns = path, columns
        if columns.patient not in (None, PATIENT_ID):
            raise self._no_patients(f"{path}")
        self._labels = {folder: text_of(folder) for folder in class_folders(path)}
        texts = list(self._labels.values())
        if twice := next((f for f, text in self._labels.items() if texts.count(text) > 1), None):
            raise UserError(
                f"{path}: folder {twice!a} has the same name as another, ignoring spaces, the "
                "encoding of accents and number formats; merge the two"
            )

    def _no_patients(self, where: str) -> UserError:
        columns = self._columns
        return UserError(
            f"{where}: {columns.keys}patient_column={columns.patient}: class folders name no "
            f"patients; use null, {PATIENT_ID} if all images are DICOM, or a table with a column "
            "of patients"
        )

    def _patient(self, file: Path) -> str:
        """Return the text of the patient in a file's header."""
        if (patient := patient_of(file)) is None:
            raise self._no_patients(f"{file}")
        return id_of(patient, self._columns, f"{file}")

    @property
    def ignored(self) -> str:
        """Return a folder inside a class folder that is named like a split; its images are used."""
        inside = (
            (each, part) for each in self._labels for part in class_folders(self._path / each)
        )
        return next((f"folder {each}/{part}" for each, part in inside if split_of(part)), "")

    def count(self) -> int:
        """Return the number of files."""
        with reading(self._path):
            return sum(1 for _ in walk_classes(self._path))

    def items(self) -> Iterator[Item]:
        """Yield every file, ordered by path."""
        with reading(self._path):
            files = sorted(walk_classes(self._path), key=lambda found: found[0])
            for file, folder in track("files read", files):
                label, skipped = ("", NO_CLASS) if folder is None else (self._labels[folder], "")
                patient = functools.partial(self._patient, file) if self._columns.patient else ""
                yield Item(str(file.relative_to(self._path)), file, label, patient, skipped)

    def labels(self) -> dict[str, str]:
        """Return the names of the subfolders, which may be empty."""
        return {text: f"{self._path.name}/{folder}" for folder, text in self._labels.items()}

    def files(self) -> Iterable[Path]:
        """Return every file."""
        with reading(self._path):
            return sorted(file for file, _ in walk_classes(self._path))


def class_folders(folder: Path) -> list[str]:
    """Return the names of the subfolders, in order, except hidden ones.

    Raises:
        UserError: the folder cannot be read.
    """
    with reading(folder):
        return sorted(
            place.name for place in folder.iterdir() if place.is_dir() and _is_visible(place)
        )


def _is_visible(path: Path) -> bool:
    """Return whether a file or folder is neither hidden nor added to archives by macOS."""
    return not path.name.startswith(".") and path.name != "__MACOSX"


def walk_classes(path: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield every file at any depth, with its class: the subfolder of `path` that contains it.

    Files next to the subfolders have class None. Hidden files and folders are skipped.

    Raises:
        OSError: a folder cannot be read.
        UserError: a link leads to a folder that contains it.
    """

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(path, onerror=fail, followlinks=True):
        here = Path(place).resolve()
        folders[:] = [folder for folder in folders if _is_visible(Path(folder))]
        for folder in folders:
            if (Path(place) / folder).resolve() in (here, *here.parents):
                raise UserError(f"{place}/{folder} links to a folder that contains it; delete it")
        for file in filter(_is_visible, map(Path(place).joinpath, names)):
            inside = file.relative_to(path)
            yield file, inside.parts[0] if len(inside.parts) > 1 else None
