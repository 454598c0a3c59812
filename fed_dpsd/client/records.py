"""A hospital's own files: a folder of classes, CSV, npz or parquet.

Errors and counts in this module name local files and labels. They go to the hospital's own screen
and log, never into a message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.classes import label_numbers, text_of
from fed_dpsd.config import Fit, Window
from fed_dpsd.data.images import Conversion
from fed_dpsd.data.intake import (
    NO_CLASS,
    UNREADABLE,
    Count,
    Records,
    first_few,
    take_records,
)
from fed_dpsd.data.reader import Columns, Folder, Reader
from fed_dpsd.data.sources import reader_of
from fed_dpsd.errors import UserError


@dataclass(frozen=True)
class HospitalFiles:
    """The location of a hospital's records, and the names of its labels.

    Args:
        path: a folder with a subfolder for each class, or a .csv, .npz or .parquet file.
        image_column: a CSV's column of paths from its folder, an npz's array (N, H, W) or
            (N, H, W, 3), or a parquet file's column of encoded images or of paths.
        label_column: the column, or the npz's array, of labels; None with `label_columns`.
        patient_column: the column, or the npz's array, of patients; PatientID for class folders of
            DICOM images. All records of a patient go to the same teacher of the client.
        skip_unreadable: whether unreadable images are skipped; otherwise they are an error. Records
            without a label are always skipped.
        labels: the federation's class for each local label; {} if the labels are the class names.
        label_columns: columns of booleans, one for each class, in place of `label_column`.
        pixel_bits: how many bits 16-bit images use.
        window: the window of grey DICOM images: None, "header", or centre and width.
    """

    path: str
    image_column: str
    label_column: str | None
    patient_column: str | None
    skip_unreadable: bool
    labels: Mapping[Any, Any] = field(default_factory=dict)  # of texts, checked below
    label_columns: tuple[str, ...] = ()
    pixel_bits: int = 16
    window: Window = None

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError("path= is empty; give a folder or a table")
        for label, name in self.labels.items():
            if not isinstance(label, str):
                typed = ("no", "yes")[label] if isinstance(label, bool) else label
                raise ValueError(f"labels: {label!r} is not text; quote it: '{typed}': {name}")
            if not isinstance(name, str):
                raise ValueError(f"labels.{label}={name!r} must be the name of one of the classes")
        texts = list(map(text_of, self.labels))
        if twice := [label for label in self.labels if texts.count(text_of(label)) > 1]:
            raise ValueError(
                f"labels: {' and '.join(map(repr, twice))} are the same label, ignoring spaces, "
                "capitals and number formats; keep one"
            )
        if (self.label_column is None) == (not self.label_columns):
            raise ValueError(
                "give one of label_column and label_columns, and null or [] for the other"
            )
        if not 8 <= self.pixel_bits <= 16:
            raise ValueError(f"pixel_bits={self.pixel_bits} must be between 8 and 16")

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
    """The records read from a hospital's files.

    Args:
        records: the records, in the federation's shape and classes.
        ids: (N,) int64, ascending: a digest of each image's pixels. It does not depend on the order
            of the files or on other records.
        count: the numbers of files or rows found, used and skipped, with reasons.
        notes: suggestions for the hospital.
    """

    records: Records
    ids: NDArray[np.int64]
    count: Count
    notes: tuple[str, ...]


def count_items(files: HospitalFiles) -> int:
    """Return the number of files or rows, without reading an image.

    Raises:
        UserError: files or columns do not match `files`.
    """
    return _reader(files).count()


def _reader(files: HospitalFiles) -> Reader:
    columns = Columns(
        files.image_column, files.label_column, files.label_columns, files.patient_column, "files."
    )
    return reader_of(Path(files.path), columns)


def read(
    files: HospitalFiles, shape: tuple[int, ...], classes: Sequence[str], fit: Fit = "crop"
) -> HospitalRecords:
    """Read every record; images are converted to grey or RGB and scaled to the federation's size.

    Args:
        files: the location and format of the records.
        shape: (C, size, size) of the federation's images.
        classes: the names of the federation's classes, in their order.
        fit: how the federation's images become square (`images.Conversion`).

    Raises:
        UserError: files, columns or labels do not match `files`, or unreadable images must not be
            skipped.
    """
    path, reader = Path(files.path), _reader(files)
    if isinstance(reader, Folder):
        folders = reader.labels()
        for label in files.labels:
            if text_of(label) not in folders:
                raise UserError(
                    f"files.labels names {label!r}, but {path} has no such class folder; it has "
                    f"{first_few([*folders])}"
                )
    taken = take_records(
        reader.items(),
        reader.unit,
        str(path),
        label_numbers(classes, files.labels or {name: name for name in classes}),
        Conversion(shape, fit, files.pixel_bits, files.window),
        patients=files.patient_column is not None,
        remedy=f"add each to files.labels, with one of the classes {first_few(classes)}",
    )
    count = taken.count
    lost = [line for why in (UNREADABLE, NO_CLASS) for line in count.skipped.get(why, ())]
    if lost and not files.skip_unreadable:
        raise UserError(
            f"{path}: {count}; repair or move unreadable images, or set skip_unreadable=true to "
            "skip them"
        )
    records = taken.records.in_order()
    return HospitalRecords(records, records.digests, count, taken.notes)
