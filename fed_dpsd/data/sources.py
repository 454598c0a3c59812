"""Places that images and labels come from: folders of classes, tables and the hub.

Parquet files have the layout of the Hugging Face hub, so the same code reads both.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow
from numpy.typing import NDArray

from fed_dpsd.config import DataConfig
from fed_dpsd.data import tables
from fed_dpsd.errors import UserError

SPLITS = ("train", "test")
OTHER_SPLITS = {"val", "valid", "validation", "dev"}  # folders of these names are no classes
LAYOUT = (
    "a folder with a folder of images for each class, a .csv or .parquet file of images and "
    "labels, or a folder with one of these for train and one for test"
)
NAMED_AT_MOST, LONGEST_NAME = 5, 120


class Source(NamedTuple):
    """Images and labels before the images are decoded.

    Args:
        where: the data set and its place, for errors.
        names: a name of each image, for errors.
        images: each image as a file, or as the bytes of one.
        labels: (N,) int64.
        patients: (N,) int64, or None where they are not known.
        strays: a line on each file that belongs to no class.
        classes: the names of the classes that a data set of the hub declares, if it does.
    """

    where: str
    names: Sequence[str]
    images: Iterable[Path | bytes]
    labels: NDArray[np.int64]
    patients: NDArray[np.int64] | None = None
    strays: Sequence[str] = ()
    classes: Sequence[str] = ()


def some(lines: Sequence[str]) -> str:
    """Return the first few lines, each cut where it is long, with dots for those left out."""
    more = ", ..." if len(lines) > NAMED_AT_MOST else ""
    return ", ".join(line[:LONGEST_NAME] for line in lines[:NAMED_AT_MOST]) + more


# --- places ---


def is_place(path: Path) -> bool:
    """Return whether a path may be `data.path`: a folder, or a table."""
    return path.is_dir() or (path.is_file() and path.suffix in tables.SUFFIXES)


def is_divided(path: Path) -> bool:
    """Return whether `data.path` has train and test splits, or one of them.

    A folder named like a split is one of a class if other classes lie beside it.
    """
    if any((path / f"{s}{suffix}").is_file() for s in SPLITS for suffix in tables.SUFFIXES):
        return True
    folders = set(_classes(path)) if path.is_dir() else set()
    splits = folders & set(SPLITS)
    return len(splits) == 2 or (bool(splits) and folders <= {*SPLITS, *OTHER_SPLITS})


def _place(path: Path, split: str) -> Path | None:
    """Return the table or folder of a split; that of all records where they are not divided."""
    if not is_divided(path):
        return path if path.is_file() or _classes(path) else None
    files = (path / f"{split}{suffix}" for suffix in tables.SUFFIXES)
    folder = path / split
    return next((file for file in files if file.is_file()), folder if folder.is_dir() else None)


def place_of(path: Path, split: str) -> Path:
    """Return the table or folder of a split; that of all records where they are not divided.

    Raises:
        UserError: there is none.
    """
    if (place := _place(path, split)) is not None:
        return place
    there = some(sorted(each.name for each in path.iterdir() if not each.name.startswith(".")))
    lacking = "folder of a class" if not is_divided(path) else f"{split} split"
    raise UserError(
        f"data.path={path} has no {lacking}; it holds {there or 'nothing'}: give {LAYOUT}"
    )


@contextlib.contextmanager
def _readable(path: Path | str | None) -> Iterator[None]:
    """Tell errors of the operating system as the user's own."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"data.path={path}: {error.filename} cannot be read ({error.strerror}); see that it "
            "is there, and that you may read it"
        ) from None


def class_names(path: Path, image_column: str, label_column: str | None) -> list[str]:
    """Return the names of the classes that a folder or a table has, in their order.

    Folders are in the order of their names, and labels in that of `tables.class_names`, if a table
    does not declare its classes. One without a column of labels (`label_column` is None) has none.

    Raises:
        UserError: there is no folder or table, it cannot be read, or it has no such column.
    """
    with _readable(path):
        place = _place(path, "train") or place_of(path, "test")
        if place.is_dir():
            return _classes(place)
        if label_column is None:
            return []
        if declared := tables.declared_classes(place, label_column):
            return declared
        table = tables.read(place, [label_column])
        if label_column not in table.column_names:
            named = {"data.image_column": image_column, "data.label_column": label_column}
            tables.check_columns(f"data.path={path}", named, tables.read_without_images(place))
    return tables.class_names(table.column(label_column))


def fingerprint(config: DataConfig, split: str) -> str:
    """Return a text that names the files of a split, and changes when they do.

    Raises:
        UserError: there is no such split, or it cannot be read.
    """
    if config.path is None:
        if config.hub is None:
            raise UserError(f"data={config.name} needs data.path=PATH: {LAYOUT}")
        return f"hub {config.hub}"
    with _readable(config.path):
        place = place_of(Path(config.path), split)
        if place.is_file():
            status = place.stat()
            text = f"{place.resolve()} {status.st_size} {status.st_mtime_ns}"
            images = tables.image_paths(place, config.image_column)
            return f"{text} {_digest_of(images, '')}" if images else text
        files = sorted(file for file, _ in walk_classes(place))
        return f"{place.resolve()} {_digest_of(files, str(_classes(place)))}"


def _digest_of(files: Iterable[Path], text: str) -> str:
    """Return a digest of a text, and of the names, sizes and times of files."""
    digest = hashlib.sha256(f"{text}\n".encode())
    for file in files:
        try:
            status = file.stat()
            digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
        except OSError:  # it is reported with the others that cannot be read
            digest.update(f"{file}\n".encode())
    return digest.hexdigest()


def read(config: DataConfig, split: str) -> Source:
    """Find the images and labels of a split whose `fingerprint` is known.

    Raises:
        UserError: there is no network, or the files are not as `config` says.
    """
    where = f"data={config.name} ({config.path or config.hub})"
    if config.path is None:
        from fed_dpsd.data.partition import read_hub

        return _read_table(config, f"{where}, split {split}", read_hub(config, split), Path())
    if is_divided(Path(config.path)):
        where += f", split {split}"
    place = place_of(Path(config.path), split)
    if place.is_file():
        return _read_table(config, where, tables.read(place), place.parent)
    return _read_folder(config, where, place)


# --- tables ---


def _read_table(config: DataConfig, where: str, table: pyarrow.Table, folder: Path) -> Source:
    """Read the columns of a table whose paths start from `folder`."""
    keys = "image_column", "label_column", "patient_column"
    named = {f"data.{key}": getattr(config, key) for key in keys if getattr(config, key)}
    named |= {f"data.label_columns[{i}]": name for i, name in enumerate(config.label_columns)}
    tables.check_columns(where, named, table)
    if config.label_columns:
        columns = [table.column(name).to_numpy() == 1 for name in config.label_columns]
        true = np.stack(columns, axis=1)
        rows = np.flatnonzero(true.sum(axis=1) == 1)
        labels = true[rows].argmax(axis=1)
    else:
        labels = tables.labels_of(config, where, table.column(config.label_column))
        rows = np.arange(len(labels))
    images = table.column(config.image_column)
    names = tables.image_names(images, rows)
    if repeated := tables.repeated_path(images, rows, folder):
        raise UserError(
            f"{where}: {repeated} is in several rows; a picture is one record, which is protected "
            "as one: delete the other rows"
        )
    patients = None
    if config.patient_column is not None:
        patients = tables.patients_of(config, where, table.column(config.patient_column), rows)
    return Source(
        where,
        names,
        (
            tables.image_of(images[int(row)].as_py(), folder, f"{where}: {name}")
            for row, name in zip(rows, names, strict=True)
        ),
        labels,
        patients,
        classes=tables.names_in(table.schema, config.label_column),
    )


# --- folders of classes ---


def _read_folder(config: DataConfig, where: str, place: Path) -> Source:
    """Read a folder whose subfolders are the classes."""
    if config.patient_column is not None:
        raise UserError(
            f"{where}: data.patient_column={config.patient_column}: folders of classes name no "
            "patients; use null, or a table with a column for them"
        )
    there = _classes(place)
    classes = list(config.classes) or there
    if len(there) != config.num_classes:
        raise UserError(
            f"{where}: there are {len(there)} folders of classes, but "
            f"data.num_classes={config.num_classes}; give a folder for each class, or set "
            f"data.num_classes={len(there)}"
        )
    root = Path(str(config.path))
    splits = [root / split for split in SPLITS] if place != root else []
    named = [set(classes), set(there), *(set(_classes(s)) for s in splits if s.is_dir())]
    if differ := sorted(set.union(*named) - set.intersection(*named)):
        raise UserError(
            f"{where}: train and test, and data.classes if given, must name the same classes; not "
            f"all of them have {some(differ)}: add or delete what differs"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    names, images, labels, strays = [], [], [], []
    for file, label in sorted(walk_classes(place), key=lambda found: found[0]):
        name = str(file.relative_to(str(config.path)))
        if label is None:
            strays.append(f"{name}: it lies in no class's folder")
            continue
        names.append(name)
        images.append(file)
        labels.append(numbers[label])
    if repeated := tables.repeated_file(images):
        raise UserError(
            f"{where}: {repeated} is there twice, by a link; a picture is one record, which is "
            "protected as one: delete the link"
        )
    return Source(where, names, images, np.array(labels, np.int64), None, strays)


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
