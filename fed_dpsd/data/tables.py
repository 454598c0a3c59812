"""The reader of tables: CSV and parquet files, including tables from the Hugging Face hub."""

import contextlib
import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from fed_dpsd.classes import TRUTH, is_missing, seems_several, text_of
from fed_dpsd.data.intake import NO_LABEL, SEVERAL_LABELS, Item
from fed_dpsd.data.reader import Columns, id_of
from fed_dpsd.errors import UserError, reason_of
from fed_dpsd.progress import reporting

TABLES = (".parquet", ".csv")  # the first existing one is read
METADATA = "metadata.csv"  # a table in a folder of images, as on the Hugging Face hub
FILE_NAME = "file_name"  # its column of paths
SPLIT_COLUMNS = ("split", "subset", "fold", "partition")
FEW_ROWS = 20  # with so few rows, each may have a different class
AT_ONCE = 256  # rows of a parquet file


class Table:
    """A CSV or parquet file, or a table from the Hugging Face hub.

    An image is a path relative to the table's folder or, in parquet, an encoded image, or both as a
    struct of `bytes` and `path`; the path is read where there are no bytes. If the table declares
    class names, its numbers are indices into them.
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
            with _parquet(path):
                self._schema = pyarrow.parquet.read_schema(path)
        self._check()
        of_splits = (n for n in self._schema.names if n.casefold() in SPLIT_COLUMNS)
        self.ignored = next((f"column {name}" for name in of_splits), "")
        self.declared = columns.labels or _declared(self._schema, columns.label)

    def _check(self) -> None:
        """Reject missing columns, and several columns with the same name."""
        names, named = self._schema.names, self._columns.named
        if twice := next((name for name in named.values() if names.count(name) > 1), None):
            raise UserError(f"{self._path} has several columns named {twice}; rename or delete one")
        missing = {key: name for key, name in named.items() if name not in names}
        if not missing:
            return
        raise UserError(
            f"{self._path} has no column {', '.join(f'{n} ({k})' for k, n in missing.items())}; "
            f"its columns are {', '.join(names)}. If this is the data set you mean, set "
            f"{' '.join(f'{key}=COLUMN' for key in missing)}"
        )

    def _rows(self, columns: Sequence[str], work: str) -> Iterator[dict[str, Any]]:
        """Yield these columns of every row, and report the progress of this work."""
        if self._table is not None:
            batches = iter(self._table.select(columns).to_batches(AT_ONCE))
            yield from _each(batches, work, self._table.num_rows)
            return
        with _parquet(self._path):
            file = pyarrow.parquet.ParquetFile(self._path)
            batches = file.iter_batches(AT_ONCE, columns=columns)
            yield from _each(batches, work, file.metadata.num_rows)

    def count(self) -> int:
        """Return the number of rows."""
        if self._table is not None:
            return int(self._table.num_rows)
        with _parquet(self._path):
            return int(pyarrow.parquet.read_metadata(self._path).num_rows)

    def items(self) -> Iterator[Item]:
        """Yield every row."""
        columns = self._columns
        for number, row in enumerate(self._rows(list(columns.named.values()), "rows read"), 1):
            cell = row[columns.image]
            if isinstance(cell, Mapping):
                cell = cell.get("bytes") or cell.get("path")
            name = cell if isinstance(cell, str) and cell else f"row {number}"
            where = f"{self._path}: {name}"
            patient = id_of(row.get(columns.patient or ""), columns, where)
            label, skipped = self._label(row, where)
            yield Item(name, self._image(cell, where), label, patient, skipped)

    def _image(self, image: Any, where: str) -> Path | bytes:
        """Return the image in a cell without reading it; no bytes if the cell is empty."""
        if isinstance(image, str) and image:
            return _file(image, self._path.parent)
        if image and not isinstance(image, bytes):
            raise UserError(
                f"{where} is of type {type(image).__name__}; it must be an encoded image's bytes, "
                "or the path of a file"
            )
        return image or b""

    def _label(self, row: Mapping[str, Any], where: str) -> tuple[str, str]:
        """Return the text of a row's label, and the reason if the row has none."""
        columns = self._columns
        if columns.label is not None:
            value = row[columns.label]
            if self.declared and isinstance(value, int) and 0 <= value < len(self.declared):
                value = self.declared[value]
            if isinstance(value, list | dict):
                raise UserError(
                    f"{where}: {columns.label} holds {value!r:.60}; a record has one class. Name "
                    "a column with one label in each row, or list a column for each class in "
                    f"{columns.keys}label_columns"
                )
            label = text_of(value)
            return label, "" if label else NO_LABEL
        chosen = [name for name in columns.labels if _is_true(row[name], name, where)]
        if len(chosen) == 1:
            return text_of(chosen[0]), ""
        return "", SEVERAL_LABELS if chosen else NO_LABEL

    def labels(self) -> dict[str, str]:
        """Return the labels of all rows, or the names of the columns if there are several."""
        columns = self._columns
        if columns.label is None or self.declared:
            return {text_of(name): self._path.name for name in self.declared}
        found: dict[str, str] = {}
        number = 0
        for number, row in enumerate(self._rows([columns.label], "labels read"), 1):
            name = f"{self._path.name}, row {number}"
            if label := self._label(row, name)[0]:
                found.setdefault(label, name)
        single = [text for text in found if not seems_several(text)]
        if number >= FEW_ROWS and len(single) > number / 2:
            raise UserError(
                f"{self._path}: {columns.label} has {len(single):,} different texts in {number:,} "
                f"rows, like an id or a measurement; name the column of classes in "
                f"{columns.keys}label_column, or list them in data.classes=[...]"
            )
        return found

    def files(self) -> Iterable[Path]:
        """Return the table and the images that it names."""
        yield self._path
        image = self._columns.image
        if _encoded(kind := self._schema.field(image).type):
            return
        paths = [f"{image}.path"] if _has_paths(kind) else [image]
        for row in self._rows(paths, "files looked up"):
            cell = row[image]
            name = cell.get("path") if isinstance(cell, Mapping) else cell
            if isinstance(name, str) and name:
                yield _file(name, self._path.parent)


def _each(
    batches: Iterator[pyarrow.RecordBatch], work: str, total: int
) -> Iterator[dict[str, Any]]:
    """Yield each row of the batches, and report the progress."""
    with reporting(work, total) as progress:
        for batch in batches:
            yield from batch.to_pylist()
            progress.advance(batch.num_rows)


def _is_true(value: Any, column: str, where: str) -> bool:
    """Return whether a cell of a Boolean column is true."""
    text = text_of(value)
    if text not in ("0", "1", "-1", *TRUTH) and not is_missing(text):
        raise UserError(f"{where}: {column} is {text}; it must be 0 or 1, or false or true")
    return text in ("1", "true")


def read_csv(path: Path) -> pyarrow.Table:
    """Return a CSV file in UTF-8 as columns of text.

    The first line determines whether commas, semicolons or tabs separate the columns. Excel may
    write a line "sep=;" before it.

    Raises:
        UserError: the file cannot be read or is empty, a row is longer than the first line, or a
            cell has a line break, which a quote that is never closed also causes.
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
            names = [name.strip() for name in _in_one_line(next(lines, []), path, lines)]
            if not any(names):
                raise UserError(f"{path} is empty; its first line must name its columns")
            rows = []
            for row in lines:
                _in_one_line(row, path, lines)
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
def _parquet(path: Path) -> Iterator[None]:
    """Report an unreadable parquet file as a UserError."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as a parquet file ({type(error).__name__}); export it again, "
            "or check its permissions"
        ) from None


def _file(name: str, folder: Path) -> Path:
    """Return the file that a table names, possibly with a Windows path."""
    file = folder / name
    with contextlib.suppress(OSError, ValueError):
        if "\\" in name and not file.exists():
            return folder / name.replace("\\", "/")
    return file


def _has_paths(kind: pyarrow.DataType) -> bool:
    """Return whether a column of this type holds paths next to, or in place of, images."""
    return pyarrow.types.is_struct(kind) and kind.get_field_index("path") >= 0


def _encoded(kind: pyarrow.DataType) -> bool:
    """Return whether a column of this type holds nothing but encoded images."""
    struct = pyarrow.types.is_struct(kind) and not _has_paths(kind)
    return struct or pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)


def _declared(schema: pyarrow.Schema, column: str | None) -> list[str]:
    """Return the class names that a table from the Hugging Face hub declares for a column."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[column]["names"]
    except (ValueError, KeyError, TypeError):
        return []
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if texts and pyarrow.types.is_integer(schema.field(column).type) else []


def _in_one_line(row: list[str], path: Path, lines: Any) -> list[str]:
    """Return a row without line breaks in its cells; raise UserError otherwise."""
    if any("\n" in cell or "\r" in cell for cell in row):
        raise UserError(
            f"{path}: the row that ends in line {lines.line_num} has a cell with a line break; "
            "close its quotes, or remove line breaks from cells"
        )
    return row
