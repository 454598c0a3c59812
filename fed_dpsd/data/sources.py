"""Places of data sets: `data.path` or the hub, their splits, and the classes that they name."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fed_dpsd.classes import in_order, positions
from fed_dpsd.config import DataConfig
from fed_dpsd.data.arrays import ARRAYS, Arrays, splits_of
from fed_dpsd.data.folders import Folder, class_folders, walk_classes
from fed_dpsd.data.intake import some
from fed_dpsd.data.reader import Columns, Reader, listed, readable, split_of
from fed_dpsd.data.tables import METADATA, TABLES, Table
from fed_dpsd.errors import UserError

SPLITS = ("train", "test")
LIKE_SPLITS = re.compile(r"(?<![a-z])(train|test|val)")  # in names such as test_set
LAYOUT = (
    "a folder with a folder of images for each class, a .csv, .parquet or .npz file of images and "
    "labels, or a folder with one of these for train and one for test"
)


def columns_of(config: DataConfig) -> Columns:
    """Return the columns that a configuration names."""
    return Columns(
        config.image_column, config.label_column, config.label_columns, config.patient_column
    )


def is_place(path: Path) -> bool:
    """Return whether a path may be `data.path`: a folder, a table or an npz."""
    return path.is_dir() or (path.is_file() and path.suffix.lower() in (*TABLES, ARRAYS))


def _files(path: Path) -> dict[str, list[Path]]:
    """Return the tables of each split in a folder, parquet files first."""
    found: dict[str, list[Path]] = {}
    if path.is_dir():
        with readable(path):
            files = [each for each in path.iterdir() if each.is_file()]
        for suffix in TABLES:
            for file in sorted(files):
                if file.suffix.lower() == suffix and (split := split_of(file.stem)):
                    found.setdefault(split, []).append(file)
    return found


def _arrays(path: Path, columns: Columns) -> dict[str, str]:
    """Return the array of images of each split in an npz; empty where there is one of all."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = arrays.files
    except Exception:  # the reader reports it
        return {}
    return {} if columns.image in names else splits_of(names, columns.image)


def splits_in(path: Path, columns: Columns) -> dict[str, Path]:
    """Return the place of each split at `data.path`; empty where the data is not divided.

    A folder named like a split is one of a class if folders of other classes are next to it.

    Raises:
        UserError: two places stand for one split, or the path cannot be read.
    """
    if path.suffix.lower() == ARRAYS and path.is_file():
        arrays = _arrays(path, columns)
        return dict.fromkeys(arrays, path) if arrays.keys() & set(SPLITS) else {}
    found = _files(path)
    folders = class_folders(path) if path.is_dir() and not (path / METADATA).is_file() else []
    of_splits = [name for name in folders if split_of(name)]
    alone = len(of_splits) == len(folders)
    if {"train", "test"} <= set(map(split_of, of_splits)) or found or alone:
        for name in of_splits:
            if not found.get(split_of(name)):
                found.setdefault(split_of(name), []).append(path / name)
            elif found[split_of(name)][0].is_dir():
                found[split_of(name)].append(path / name)
    places = {}
    for split, there in found.items():
        same = [each for each in there if each.suffix.lower() == there[0].suffix.lower()]
        if len(same) > 1 and split in SPLITS:
            raise UserError(
                f"data.path={path}: {same[0].name} and {same[1].name} are both for {split}; join "
                "them, or move one away"
            )
        places[split] = there[0]
    return places if places.keys() & set(SPLITS) else {}


def place_of(path: Path, columns: Columns, split: str) -> tuple[Path, str]:
    """Return the table or folder of a split, and the split; "" where the data is not divided.

    Raises:
        UserError: there is none.
    """
    splits = splits_in(path, columns)
    if split in splits:
        return splits[split], split
    if not splits and (path.is_file() or (path / METADATA).is_file() or class_folders(path)):
        return path, ""
    if path.is_file():
        raise UserError(
            f"data.path={path} has no array {split}_{columns.image}; give one for each of "
            f"{' and '.join(SPLITS)}, or {columns.image} alone, which is divided"
        )
    there = some(sorted(each.name for each in path.iterdir() if not each.name.startswith(".")))
    lacking = f"{split} split" if splits else "folder of a class"
    remedy = f"give {LAYOUT}"
    if split == "test" and "validation" in splits:
        remedy = f"rename {splits['validation'].name} to test to test on it, or {remedy}"
    raise UserError(f"data.path={path} has no {lacking}; it holds {there or 'nothing'}: {remedy}")


def is_divided(config: DataConfig) -> bool:
    """Return whether a data set has train and test splits, or one of them, of its own."""
    return config.path is None or bool(splits_in(Path(config.path), columns_of(config)))


def unused(config: DataConfig) -> str:
    """Return what at `data.path` no split takes, in words; "" if there is nothing."""
    if config.path is None:
        return ""
    columns = columns_of(config)
    place = splits_in(Path(config.path), columns).get("validation")
    if place is None:
        return ""
    name = place.name
    if place.is_dir():
        name += f" ({sum(1 for _ in walk_classes(place)):,} files)"
    elif place.suffix.lower() == ARRAYS:
        name = _arrays(place, columns)["validation"]
    return f"{name} is not read: nothing is selected on a validation split"


def reader_of(path: Path, columns: Columns, split: str = "") -> Reader:
    """Return the reader of a folder, a table or an npz.

    Raises:
        UserError: there is no such place, it cannot be read, or it lacks a column.
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
    problem = f"is no {', '.join((*TABLES, ARRAYS))} file" if path.exists() else "is not there"
    raise UserError(
        f"{columns.keys}path={path} {problem}; give a folder with a subfolder for each class, or "
        "one such file"
    )


def reader(config: DataConfig, split: str) -> Reader:
    """Return the reader of a split.

    Raises:
        UserError: there is no such split or no network, or the columns are not as `config` says.
    """
    if config.path is None:
        from fed_dpsd.data.partition import read_hub

        table = read_hub(config, split)
        return Table(Path(f"{config.hub}, split {split}"), columns_of(config), table)
    return _reader(Path(config.path), columns_of(config), split)


def _reader(path: Path, columns: Columns, split: str) -> Reader:
    place, split = place_of(path, columns, split)
    return reader_of(place, columns, split)


def where(config: DataConfig, split: str) -> str:
    """Return the name of a split, for messages."""
    name = f"data={config.name} ({config.path or config.hub})"
    return f"{name}, split {split}" if is_divided(config) else name


def class_names(path: Path, columns: Columns, number: int | None) -> tuple[str, ...]:
    """Return the classes that the files at `data.path` name, in their order.

    A table may declare them. Otherwise they are its labels, or the names of folders, in the order
    of `classes.in_order`.

    Args:
        path: `data.path`.
        columns: the columns of a table.
        number: the number of classes, if it is known: then only the training split, if there is
            one, names them.

    Raises:
        UserError: there is no place, it cannot be read, or train and test name other classes.
    """
    given = splits_in(path, columns)
    if not given and path.is_dir() and not (path / METADATA).is_file():
        folders = class_folders(path)
        like = {m[1]: name for name in folders if (m := LIKE_SPLITS.search(name.casefold()))}
        if "train" in like and len(like) > 1 and not any(map(split_of, folders)):
            raise UserError(
                f"data.path={path}: {' and '.join(like.values())} look like splits; name them "
                f"train and test or, if they are classes, say {listed(folders)}"
            )
        if named := [name for name in folders if split_of(name)]:
            raise UserError(
                f"data.path={path}: {named[0]} is named like a split, and the folders next to it "
                f"are not ({some([name for name in folders if not split_of(name)])}); move what "
                f"is no split away or, if it is a class, say {listed(folders)}"
            )
    splits = [split for split in SPLITS if split in given] or ["train"]
    found = {split: _reader(path, columns, split) for split in splits[: 2 if number is None else 1]}
    labels = {split: each.labels() for split, each in found.items()}
    first, *others = labels
    for other in others:
        for one, two in ((first, other), (other, first)):
            if only := [text for text in in_order(labels[one]) if text not in labels[two]]:
                everything = listed(in_order({**labels[one], **labels[two]}))
                raise UserError(
                    f"data.path={path}: class {only[0]} ({labels[one][only[0]]}) is in {one} and "
                    f"not in {two}; correct the labels, or name all: {everything}"
                )
    declared = [tuple(each.declared) for each in found.values() if each.declared]
    if len(set(declared)) > 1:
        raise UserError(
            f"data.path={path}: train and test declare their classes in other orders; write one "
            "again"
        )
    names = declared[0] if declared else in_order(labels[first])
    folded = [name.casefold() for name in names]
    if number is None and (alike := [n for n in names if folded.count(n.casefold()) > 1]):
        raise UserError(
            f"data.path={path}: {alike[0]} and {alike[1]} differ in capitals alone; give them one "
            f"name or, if they are two classes, say {listed(names)}"
        )
    return names


def with_classes(data: Mapping[str, Any], base: Path | None, problems: list[str]) -> dict[str, Any]:
    """Return the keys of `data` with the names of its classes, and with their number where null.

    They are `classes` or, without these, the names of folders, the labels of a table, or columns of
    labels; no image is read. Names that are mere numbers from 0 are left out.

    Args:
        data: the keys of `data`, as they were composed.
        base: the folder that a relative path starts from; None where it must be absolute.
        problems: the list that problems are added to.
    """
    number, given = data.get("num_classes"), data.get("classes") or []
    names, of_labels = given, list(data.get("label_columns") or [])
    path = data.get("path")
    if isinstance(path, str) and not given:
        place = Path(path).expanduser() if base is None else base / Path(path).expanduser()
        columns = Columns(str(data.get("image_column")), data.get("label_column"), of_labels)
        try:
            names = list(class_names(place, columns, number)) if place.is_absolute() else []
        except UserError as error:
            # Otherwise, it is reported with the other paths, or when the data is read.
            if number is None and is_place(place):
                problems.append(str(error))
            number = number or 2  # so that problems of other keys are reported too
    names = names or of_labels
    if number is None and len(names) < 2:
        found = f"has one class, {names[0]}" if names else "has no class" if path else "is needed"
        problems.append(f"data={data.get('name')}: data.path {found}; give {LAYOUT}")
        names, number = [], 2
    count = len(names) if number is None else number
    known = isinstance(count, int) and set(names) <= set(positions(count))
    if not given and (known or len(names) != count):
        names = []
    return {**data, "classes": names, "num_classes": count}


def fingerprint(config: DataConfig, split: str) -> str:
    """Return a text that changes when the files of a split do: their names, sizes and times.

    The time of a file's last change of any kind (`ctime`) cannot be set back, so a file with
    another content or other permissions counts as another file.

    Raises:
        UserError: there is no such split, or it cannot be read.
    """
    if config.path is None:
        if config.hub is None:
            raise UserError(f"data={config.name} needs data.path=PATH: {LAYOUT}")
        return f"hub {config.hub}"
    columns = columns_of(config)
    place, own = place_of(Path(config.path), columns, split)
    return f"{place.resolve()} {_digest(reader_of(place, columns, own).files())}"


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        text = str(file)
        try:
            status = file.stat()
            text += f" {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
        except (OSError, ValueError):  # it is reported with the others that cannot be read
            pass
        digest.update(f"{text}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
