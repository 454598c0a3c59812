"""Columns and errors that all readers share.

A reader reads one layout: class folders, a table or arrays. Data sets and hospitals use the same
readers. Readers do not decode images.
"""

import contextlib
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fed_dpsd.classes import is_missing, look_of, text_of
from fed_dpsd.data.intake import Item
from fed_dpsd.errors import UserError, reason_of

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
