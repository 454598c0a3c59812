"""Tables of pictures: CSV and parquet files, their columns, and the classes that they name."""

import contextlib
import csv
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from fed_dpsd.config import DataConfig
from fed_dpsd.errors import UserError, reason_of

IMAGES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp")
SUFFIXES = (".parquet", ".csv")  # the first that is there is read
NOBODY = ("", "none", "nan", "nat", "null", "<na>")  # spellings of a missing value in tables


def read_csv(path: Path) -> tuple[Sequence[str], list[dict[str, str]]]:
    """Return the columns of a CSV file in UTF-8, and its rows.

    Its first line says whether commas, semicolons or tabs separate the columns.

    Raises:
        UserError: it cannot be read, or is empty.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            separator = max(",;\t", key=file.readline().count)
            file.seek(0)
            reader = csv.DictReader(file, restval="", delimiter=separator)
            if not reader.fieldnames:
                raise UserError(f"{path} is empty; its first line must name its columns")
            reader.fieldnames = [name.strip() for name in reader.fieldnames]
            return reader.fieldnames, list(reader)
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"{path} cannot be read as CSV in UTF-8 ({reason_of(error)}); export it anew"
        ) from None


def read(path: Path, columns: Collection[str] | None = None) -> pyarrow.Table:
    """Return a CSV file, whose columns are text, or a parquet file.

    Args:
        path: the file.
        columns: the columns to read, where the file has them; None reads all.

    Raises:
        UserError: it cannot be read.
    """
    if path.suffix == ".csv":
        names, rows = read_csv(path)
        return pyarrow.table({name: [row[name].strip() for row in rows] for name in names})
    with _is_parquet(path):
        known = pyarrow.parquet.read_schema(path).names
        chosen = None if columns is None else [name for name in known if name in columns]
        return pyarrow.parquet.read_table(path, columns=chosen)


def read_without_images(path: Path) -> pyarrow.Table:
    """Return a CSV or parquet file in which the columns of encoded images, if any, are empty.

    Raises:
        UserError: it cannot be read.
    """
    if path.suffix == ".csv":
        return read(path)
    with _is_parquet(path):
        schema = pyarrow.parquet.read_schema(path)
    images = [field for field in schema if _is_encoded(field.type)]
    table = read(path, {*schema.names} - {field.name for field in images})
    for field in images:
        table = table.append_column(field.name, pyarrow.nulls(len(table), field.type))
    return table.select(schema.names)


def image_paths(path: Path, column: str) -> list[Path]:
    """Return the image files that a table names in a column; none if it holds images, or no column.

    Raises:
        UserError: the table cannot be read.
    """
    if path.suffix != ".csv":  # it may hold gigabytes of images
        with _is_parquet(path):
            schema = pyarrow.parquet.read_schema(path)
        if column not in schema.names or not _is_text(schema.field(column).type):
            return []
    table = read(path, [column])
    names = table.column(column).to_pylist() if column in table.column_names else ()
    return [path.parent / name for name in names if name]


@contextlib.contextmanager
def _is_parquet(path: Path) -> Iterator[None]:
    """Tell that a file is no parquet file, or may not be read, as the user's own error."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError):
        raise UserError(
            f"{path} cannot be read as a parquet file; write it anew, or see that you may read it"
        ) from None


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
        return folder / image
    if image and not isinstance(image, bytes):
        raise UserError(
            f"{where} is of type {type(image).__name__}; it must be an encoded image's bytes, or "
            "the path of a file"
        )
    return image or b""


def image_names(column: pyarrow.ChunkedArray, rows: NDArray[np.int64]) -> list[str]:
    """Return a name of the image of each row: its path, or its number."""
    paths = _is_text(column.type)
    return [(paths and column[int(row)].as_py()) or f"image {row}" for row in rows]


def repeated_path(column: pyarrow.ChunkedArray, rows: NDArray[np.int64], folder: Path) -> str:
    """Return a file that several of the rows name, in any spelling; "" where there is none."""
    if not _is_text(column.type):
        return ""
    names = (column[int(row)].as_py() for row in rows)
    return repeated_file(folder / name for name in names if name)


def repeated_file(files: Iterable[Path]) -> str:
    """Return a file that is named twice, also by a link or in capitals; "" where there is none.

    Such a file would be several records, which one change of it changes together.
    """
    seen = set[object]()
    for file in files:
        try:
            status = file.stat()
            place: object = (status.st_dev, status.st_ino) if status.st_ino else file.resolve()
        except OSError:  # it is reported with the others that cannot be read
            place = file.resolve()
        if place in seen:
            return str(file)
        seen.add(place)
    return ""


def check_columns(where: str, named: Mapping[str, str], table: pyarrow.Table) -> None:
    """Check that a table has the columns that keys such as data.image_column name.

    Raises:
        UserError: it lacks some; the message says which it has, and which may be meant.
    """
    missing = {key: name for key, name in named.items() if name not in table.column_names}
    if missing:
        if headless := [name for name in table.column_names if Path(name).suffix in IMAGES]:
            raise UserError(
                f"{where} begins with a row of {', '.join(headless)}; its first line must name its "
                f"columns, such as {','.join(named.values())}"
            )
        likely = _likely(table)
        remedies = [f"{key}={likely.get(key, 'COLUMN')}" for key in missing]
        raise UserError(
            f"{where} has no column {', '.join(f'{name} ({k})' for k, name in missing.items())}; "
            f"its columns are {', '.join(table.column_names)}. If it is not another data set than "
            f"you named, set {' '.join(remedies)}"
        )


def _likely(table: pyarrow.Table) -> dict[str, str]:
    """Return the columns that may hold images and labels, by the key that would name them."""
    columns = dict(zip(table.column_names, table.columns, strict=True))
    images = [name for name, column in columns.items() if _is_encoded(column.type)]
    paths = [
        name
        for name, column in columns.items()
        if _is_text(column.type) and len(column) and "." in (column[0].as_py() or "")
    ]
    likely = {}
    if found := images or paths:
        likely["data.image_column"] = found[0]
    others = {n: len(columns[n].unique()) for n in columns if n not in {*images, *paths}}
    if others := {name: distinct for name, distinct in others.items() if distinct > 1}:
        # There are fewer classes than numbers or names of records.
        fewest = min(others, key=others.__getitem__)
        likely["data.label_column"] = fewest
    return likely


def declared_classes(path: Path, column: str) -> list[str]:
    """Return the classes that a parquet file of the Hugging Face hub declares for a column.

    Its labels are the numbers of these names. Names that read as numbers are left out, since they
    could be taken for labels; so are those of a table that declares none.

    Raises:
        UserError: the table cannot be read.
    """
    if path.suffix == ".csv":
        return []
    with _is_parquet(path):
        return names_in(pyarrow.parquet.read_schema(path), column)


def names_in(schema: pyarrow.Schema, column: str | None) -> list[str]:
    """Return the classes that a table's schema declares for a column, as `declared_classes`."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[column]["names"]
    except (ValueError, KeyError, TypeError):
        return []
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if texts and not any(map(str.isdecimal, names)) else []


def class_names(labels: pyarrow.ChunkedArray) -> list[str]:
    """Return the different labels of a column as text: numbers by value, then other texts."""
    names = {_text(value) for value in labels.unique().to_pylist()} - {""}
    numbers = sorted((name for name in names if name.isdecimal()), key=int)
    return numbers + sorted(names - set(numbers))


def labels_of(config: DataConfig, where: str, column: pyarrow.ChunkedArray) -> NDArray[np.int64]:
    """Return the (N,) classes of a column of labels: names of `config.classes`, or numbers.

    Names that read as numbers leave no other numbers. So a label's class follows from `config` and
    this label alone.

    Raises:
        UserError: a row has no label, or one that is neither.
    """
    values, places = np.unique([_text(v) for v in column.to_pylist()], return_inverse=True)
    texts = [str(value) for value in values]
    if "" in texts:
        raise UserError(
            f"{where}: row {int(np.argmax(places == texts.index('')))} has no "
            f"{config.label_column}; fill it in, or delete the row"
        )
    classes = {name: number for number, name in enumerate(config.classes)}
    if not any(map(str.isdecimal, classes)):
        classes |= {text: int(text) for text in texts if text not in classes and _is_whole(text)}
    if unknown := [text for text in texts if text not in classes]:
        raise UserError(
            f"{where}: {config.label_column} has {len(texts)} different texts, such as "
            f"{unknown[0]}, but data.num_classes={config.num_classes} and data.classes="
            f"[{', '.join(config.classes)}]; leave both out, or name every class"
        )
    return np.array([classes[text] for text in texts], np.int64)[places.reshape(-1)]


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def patients_of(
    config: DataConfig, where: str, column: pyarrow.ChunkedArray, rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the patient of each row as a number, the hash of the column's text.

    Raises:
        UserError: a row has no patient. All such rows would be one patient's.
    """
    names = [patient_of(column[int(row)].as_py()) for row in rows]
    if "" in names:
        raise UserError(
            f"{where}: row {int(rows[names.index('')])} has no {config.patient_column}; name its "
            "patient, or delete the row"
        )
    return np.array([hash64(name) for name in names], np.int64)


def patient_of(value: Any) -> str:
    """Return a patient's name as text; "" where a cell holds none."""
    if isinstance(value, float) and value.is_integer():  # another patient's name may need floats
        value = int(value)
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return "" if (text := text.strip()).lower() in NOBODY else text


def hash64(text: str) -> int:
    """Return a hash of 64 bits as a signed number."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _is_encoded(kind: pyarrow.DataType) -> bool:
    return pyarrow.types.is_struct(kind) or pyarrow.types.is_binary(kind)


def _is_text(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_dictionary(kind):  # a categorical column of pandas
        kind = kind.value_type
    types = pyarrow.types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _text(value: Any) -> str:
    """Return a label as text; truth values and whole numbers as whole numbers, "" for none."""
    if isinstance(value, bool | float) and float(value).is_integer():
        value = int(value)
    return "" if value is None or value != value else str(value).strip()
