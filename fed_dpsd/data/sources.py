"""Sources of data sets: `data.path` or the hub, with the splits and classes that they name."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fed_dpsd.classes import (
    default_class_names,
    holds_several,
    is_missing,
    look_alikes,
    seems_several,
    sort_class_names,
)
from fed_dpsd.config import DataConfig
from fed_dpsd.data.arrays import ARRAYS, Arrays, splits_of
from fed_dpsd.data.intake import first_few
from fed_dpsd.data.reader import (
    Columns,
    Folder,
    Reader,
    class_folders,
    classes_setting,
    reading,
    split_of,
    walk_classes,
)
from fed_dpsd.data.tables import METADATA, TABLES, Table
from fed_dpsd.errors import UserError
from fed_dpsd.storage import expanded

SPLITS = ("train", "test")
LIKE_SPLITS = re.compile(r"(?<![a-z])(train|test|val)")  # in names such as test_set
LAYOUT = (
    "a folder with a folder of images for each class, a .csv, .parquet or .npz file of images and "
    "labels, or a folder with one of these for train and one for test"
)


class Source:
    """The source of a split, at `data.path` or the Hugging Face hub; it keeps no file open.

    Attributes:
        divided: whether the data set has its own train or test split.
        where: the name of the split, for messages.

    Raises:
        UserError: the split does not exist, or the path cannot be read.
    """

    def __init__(self, config: DataConfig, split: str) -> None:
        self._config, self._split = config, split
        self._columns = Columns(
            config.image_column, config.label_column, config.label_columns, config.patient_column
        )
        self._place, self._validation, self.divided = Path(), None, True
        if config.path is not None:
            path = Path(config.path)
            splits = _splits_in(path, self._columns)
            self._place = _place_of(path, self._columns, split, splits)
            self._validation, self.divided = splits.get("validation"), bool(splits)
        elif config.hub is None:
            raise UserError(f"data={config.name} needs data.path=PATH: {LAYOUT}")
        name = f"data={config.name} ({config.path or config.hub})"
        self.where = f"{name}, split {split}" if self.divided else name

    def reader(self) -> Reader:
        """Return a new reader of the split.

        Raises:
            UserError: there is no network, or the columns do not match the configuration.
        """
        if self._config.path is None:
            from fed_dpsd.data.partition import read_hub

            table = read_hub(self._config, self._split)
            return Table(Path(f"{self._config.hub}, split {self._split}"), self._columns, table)
        return reader_of(self._place, self._columns, self._split if self.divided else "")

    def fingerprint(self) -> str:
        """Return a text that changes whenever the split's files do, from names, sizes and times.

        The time of a file's last change of any kind (`ctime`) cannot be set back, so a file with
        changed content or permissions counts as a different file.

        Raises:
            UserError: the split cannot be read.
        """
        if self._config.path is None:
            return f"hub {self._config.hub}"
        digest = hashlib.sha256()
        for file in self.reader().files():
            text = str(file)
            try:
                stat = file.stat()
                text += f" {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
            except (OSError, ValueError):  # reported with other unreadable files
                pass
            digest.update(f"{text}\n".encode(errors="surrogateescape"))
        return f"{self._place.resolve()} {digest.hexdigest()}"

    def unused(self) -> str:
        """Describe the files at `data.path` that belong to no split; "" if there are none."""
        place = self._validation
        if place is None:
            return ""
        name = place.name
        if place.is_dir():
            name += f" ({sum(1 for _ in walk_classes(place)):,} files)"
        elif place.suffix.lower() == ARRAYS:
            name = _image_arrays(place, self._columns)["validation"]
        return f"{name} is not read: nothing is selected on a validation split"

    @property
    def keeps_rows(self) -> bool:
        """Return whether records keep the order of their table, which holds only this split.

        The order of rows does not depend on labels, unlike the order of files in class folders.
        With patients, records are sorted, since a patient's first records represent all of theirs
        (`training.patient_places`).
        """
        if self._config.patient_column is not None or not self.divided:
            return False
        if self._config.path is None:
            return True
        return self._place.is_file() or (self._place / METADATA).is_file()


def is_data_path(path: Path) -> bool:
    """Return whether a path is valid as `data.path`: a folder, a table or an npz."""
    return path.is_dir() or (path.is_file() and path.suffix.lower() in (*TABLES, ARRAYS))


def _image_arrays(path: Path, columns: Columns) -> dict[str, str]:
    """Return the image array of each split in an npz; empty if one array holds all images."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = arrays.files
    except Exception:  # the reader reports it
        return {}
    return {} if columns.image in names else splits_of(names, columns.image)


def _splits_in(path: Path, columns: Columns) -> dict[str, Path]:
    """Return the path of each split at `data.path`; empty if the data is not divided.

    A folder named like a split is a class folder if other class folders are next to it.
    """
    if path.suffix.lower() == ARRAYS and path.is_file():
        arrays = _image_arrays(path, columns)
        return dict.fromkeys(arrays, path) if arrays.keys() & set(SPLITS) else {}
    if not path.is_dir():
        return {}
    found: dict[str, list[Path]] = {}
    with reading(path):
        files = sorted(each for each in path.iterdir() if each.is_file())
    for suffix in TABLES:
        for file in files:
            if file.suffix.lower() == suffix and (split := split_of(file.stem)):
                found.setdefault(split, []).append(file)
    folders = [] if (path / METADATA).is_file() else class_folders(path)
    of_splits = [name for name in folders if split_of(name)]
    alone = len(of_splits) == len(folders)
    if {"train", "test"} <= set(map(split_of, of_splits)) or found or alone:
        for name in of_splits:
            places = found.setdefault(split_of(name), [])
            if not places or places[0].is_dir():
                places.append(path / name)
    for split, places in found.items():
        same = [each for each in places if each.suffix.lower() == places[0].suffix.lower()]
        if len(same) > 1 and split in SPLITS:
            raise UserError(
                f"data.path={path}: {same[0].name} and {same[1].name} are both for {split}; merge "
                "them, or move one away"
            )
    return {split: places[0] for split, places in found.items()} if found.keys() & {*SPLITS} else {}


def _place_of(path: Path, columns: Columns, split: str, splits: Mapping[str, Path]) -> Path:
    """Return the table or folder of a split, or of all data if it is not divided."""
    if split in splits:
        return splits[split]
    if not splits and (path.is_file() or (path / METADATA).is_file() or class_folders(path)):
        return path
    if path.is_file():
        raise UserError(
            f"data.path={path} has no array {split}_{columns.image}; give one for each of "
            f"{' and '.join(SPLITS)}, or {columns.image} alone to split it"
        )
    names = sorted(each.name for each in path.iterdir() if not each.name.startswith("."))
    tables = (name for name in names if Path(name).suffix.lower() in TABLES)
    if not splits and (table := next(tables, "")):
        raise UserError(
            f"data.path={path} has no class folder; for a table, give data.path={path / table}"
        )
    there = first_few(names)
    lacking = f"{split} split" if splits else "class folder"
    remedy = f"give {LAYOUT}"
    if split == "test" and "validation" in splits:
        remedy = f"rename {splits['validation'].name} to test in order to test on it, or {remedy}"
    raise UserError(f"data.path={path} has no {lacking}; it holds {there or 'nothing'}: {remedy}")


def reader_of(path: Path, columns: Columns, split: str = "") -> Reader:
    """Return the reader of a folder, a table or an npz.

    Raises:
        UserError: the path does not exist, cannot be read, or lacks a column.
    """
    if path.is_dir():
        if (path / METADATA).is_file():
            return Table(path / METADATA, columns)
        for name in ("metadata.jsonl", "metadata.parquet"):
            if (path / name).is_file():
                raise UserError(
                    f"{path / name} is not read; write it as {METADATA}, or move it away"
                )
        return Folder(path, columns)
    suffix = path.suffix.lower()
    if path.is_file() and suffix in TABLES:
        return Table(path, columns)
    if path.is_file() and suffix == ARRAYS:
        return Arrays(path, columns, split)
    problem = f"is not a {', '.join((*TABLES, ARRAYS))} file" if path.exists() else "does not exist"
    raise UserError(
        f"{columns.keys}path={path} {problem}; give a folder with a subfolder for each class, or "
        f"a {' or '.join((*TABLES, ARRAYS))} file"
    )


def _class_names(path: Path, columns: Columns, number: int | None) -> tuple[str, ...]:
    """Return the class names in the files at `data.path`, in order.

    A table may declare its classes. Otherwise, they are its labels, or the folder names, in the
    order of `classes.sort_class_names`. If the number of classes is known, only the training split
    determines them.
    """
    splits = _splits_in(path, columns)
    if not splits and path.is_dir() and not (path / METADATA).is_file():
        _check_folders(path)
    named = [split for split in SPLITS if split in splits] or ["train"]
    readers = {}
    for split in named[: 2 if number is None else 1]:
        place = _place_of(path, columns, split, splits)
        readers[split] = reader_of(place, columns, split if splits else "")
    labels = {split: reader.labels() for split, reader in readers.items()}
    if not any(reader.declared for reader in readers.values()):
        tables = any(reader.unit != "files" for reader in readers.values())
        labels = _of_one_class(labels, path, tables)
    if twins := look_alikes(text for found in labels.values() for text in found):
        raise UserError(f"data.path={path}: {twins}; give both one spelling")
    first, *others = labels
    for other in others:
        for one, two in ((first, other), (other, first)):
            if only := [text for text in sort_class_names(labels[one]) if text not in labels[two]]:
                everything = classes_setting(sort_class_names({**labels[one], **labels[two]}))
                raise UserError(
                    f"data.path={path}: class {only[0]} ({labels[one][only[0]]}) is in {one} and "
                    f"not in {two}; correct the labels, or list all classes: {everything}"
                )
    declared = {tuple(reader.declared): None for reader in readers.values() if reader.declared}
    if len(declared) > 1:
        raise UserError(
            f"data.path={path}: train and test declare their classes in different orders; export "
            "one of them again"
        )
    names = next(iter(declared), None) or sort_class_names(labels[first])
    folded = [name.casefold() for name in names]
    if number is None and (alike := [n for n in names if folded.count(n.casefold()) > 1]):
        raise UserError(
            f"data.path={path}: {alike[0]} and {alike[1]} differ only in capitals; give them one "
            f"name or, if they are two classes, set {classes_setting(names)}"
        )
    return names


def _of_one_class(
    labels: Mapping[str, Mapping[str, str]], path: Path, tables: bool
) -> dict[str, dict[str, str]]:
    """Return each split's labels without those that are missing or list several others.

    Raises:
        UserError: a label in a table may list findings that are not labels on their own.
    """
    every = {text: where for found in labels.values() for text, where in found.items()}
    present = [text for text in every if not is_missing(text)]
    names = [text for text in present if not holds_several(text, present)]
    if tables and (unclear := next(filter(seems_several, names), "")):
        known = [text for text in names if not seems_several(text)]
        raise UserError(
            f"data.path={path}: {unclear} ({every[unclear]}) is one class or several findings; "
            f"list all classes, with this one or with each finding, as in "
            f"{classes_setting(sort_class_names(known))}, or set data.label_columns to a column "
            "for each class"
        )
    return {
        split: {text: where for text, where in found.items() if text in names}
        for split, found in labels.items()
    }


def _check_folders(path: Path) -> None:
    """Reject folders that could be either splits or classes."""
    folders = class_folders(path)
    like = {m[1]: name for name in folders if (m := LIKE_SPLITS.search(name.casefold()))}
    if "train" in like and len(like) > 1 and not any(map(split_of, folders)):
        raise UserError(
            f"data.path={path}: {' and '.join(like.values())} look like splits; name them train "
            f"and test or, if they are classes, set {classes_setting(folders)}"
        )
    if named := [name for name in folders if split_of(name)]:
        others = first_few([name for name in folders if not split_of(name)])
        raise UserError(
            f"data.path={path}: {named[0]} is named like a split, and the folders next to it are "
            f"not ({others}); move away folders that are not splits or, if they are "
            f"classes, set {classes_setting(folders)}"
        )


def with_classes(data: Mapping[str, Any], base: Path | None, problems: list[str]) -> dict[str, Any]:
    """Return the keys of `data`, adding the names of the classes and, if null, their number.

    The names are `classes` or, by default, the folder names, a table's labels, or its columns of
    labels; no image is read. Names that are just numbers from 0 are omitted.

    Args:
        data: the composed keys of `data`.
        base: the folder that a relative path starts from; None if the path must be absolute.
        problems: the list that problems are added to.
    """
    number, given = data.get("num_classes"), data.get("classes") or []
    names, of_labels = given, list(data.get("label_columns") or [])
    path = data.get("path")
    if isinstance(path, str) and path and not given:
        place = Path(path)
        label, patient = data.get("label_column"), data.get("patient_column")
        columns = Columns(str(data.get("image_column")), label, of_labels, patient)
        try:
            place = (base or Path()) / expanded(path)
            names = list(_class_names(place, columns, number)) if place.is_absolute() else []
        except UserError as error:
            # Otherwise it is reported with the other paths, or when the data is read.
            if number is None and is_data_path(place):
                problems.append(str(error))
            number = number or 2  # so that problems of other keys are reported too
    names = names or of_labels
    if number is None and len(names) < 2:
        found = f"has one class, {names[0]}" if names else "has no class" if path else "is needed"
        # A path that is empty or cannot be read has a problem of its own.
        if path != "" and not any(each.startswith("data.path=") for each in problems):
            problems.append(f"data={data.get('name')}: data.path {found}; give {LAYOUT}")
        names, number = [], 2
    count = len(names) if number is None else number
    known = isinstance(count, int) and set(names) <= set(default_class_names(count))
    if not given and (known or len(names) != count):
        names = []
    return {**data, "classes": names, "num_classes": count}


def absolute_path(key: str, value: str, base: Path | None, problems: list[str]) -> str:
    """Return an absolute path.

    Add a problem if its home folder is not known, or if it is relative and there is no `base`.
    """
    try:
        path = expanded(value)
    except UserError as error:
        problems.append(f"{key}={error}")
        return value
    if not path.is_absolute() and base is None:
        problems.append(
            f"{key}={value} must be an absolute path, since `flwr run` has another working "
            "directory"
        )
    return str(path if base is None else base / path)


def data_path(value: str, base: Path | None, problems: list[str]) -> str:
    """Return `data.path` as an absolute path; add a problem if it cannot hold a data set."""
    known = len(problems)
    path = absolute_path("data.path", value, base, problems)
    if len(problems) == known and not is_data_path(Path(path)):
        there = Path(path).exists()
        problem = "is neither a folder nor a table" if there else "does not exist"
        problems.append(f"data.path={path} {problem}; give {LAYOUT}")
    return path
