"""Conversion of files and rows to records: decode images, number labels, count skipped items.

The handling of a record depends on that record alone (docs/mechanisms.md, "From files to records").
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.classes import holds_several, is_missing, look_alikes, seems_several
from fed_dpsd.data.images import Conversion, open_image, scale, to_pixels
from fed_dpsd.errors import BYTES, UserError, printable, reason_of
from fed_dpsd.storage import large_array

NAMED_AT_MOST, LONGEST_NAME = 5, 120
NO_LABEL, SEVERAL_LABELS = "without a label", "with several labels"
UNREADABLE, NO_CLASS = "unreadable", "in no class's folder"
SEVERAL_REMEDY = (
    "a record has one class: for several findings, list a column for each class in label_columns; "
    "if one is a class, list it with the classes"
)
LOST_AT_MOST = 1_000  # images that cannot be opened, if these are most of the images so far
DARK = 14  # bits: 16-bit images that use no more are nearly black
TAKEN_AT_ONCE = 256  # images
FLAT = 64  # grey levels of 256: DICOM images that use no more have little contrast


class Item(NamedTuple):
    """A record before its image is decoded.

    `image` is a file, its bytes, or (H, W) or (H, W, 3) pixels. `name` is its file or row, and
    `skipped` the reason why it cannot be a record; both are used in messages. `patient` may be a
    function, because a patient in the image's own file is read only if the image is.
    """

    name: str
    image: Path | bytes | NDArray[np.uint8]
    label: str = ""
    patient: str | Callable[[], str] = ""
    skipped: str = ""


def first_few(lines: Sequence[str]) -> str:
    """Return the first few lines, shortened if they are long, with dots for the rest."""
    more = ", ..." if len(lines) > NAMED_AT_MOST else ""
    return ", ".join(printable(line[:LONGEST_NAME], BYTES) for line in lines[:NAMED_AT_MOST]) + more


@dataclass
class Count:
    """The number of files or rows found, and why some did not become records.

    Args:
        unit: "files", "rows" or "images"; `found` is how many were found.
        skipped: a line for each skipped item, by reason.
    """

    unit: str
    found: int = 0
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, why: str, line: str) -> None:
        """Count an item that does not become a record."""
        self.skipped.setdefault(why, []).append(line)

    @property
    def used(self) -> int:
        """Return the number of items that became records."""
        return self.found - sum(map(len, self.skipped.values()))

    def __str__(self) -> str:
        """Return the count with the first few names for each reason."""
        return self._text(lambda lines: f" ({first_few(lines)})")

    @property
    def numbers(self) -> str:
        """Return the count without names of files or rows."""
        return self._text(lambda _: "")

    def _text(self, named: Callable[[Sequence[str]], str]) -> str:
        text = f"{self.found:,} {self.unit} found, {self.used:,} used"
        each = (
            f"{len(lines):,} {why}{named(lines)}" for why, lines in sorted(self.skipped.items())
        )
        skipped = f", {self.found - self.used:,} skipped: {'; '.join(each)}"
        return text + (skipped if self.skipped else "")


@dataclass(frozen=True)
class Records:
    """Images, (N, C, H, W) uint8, with labels and, where known, patients, (N,) int64 each."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    patients: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Return the (N,) ids of records: their patients or, if unknown, digests of their pixels.

        An id does not depend on the record's label or location, nor on other records.
        """
        return self.digests if self.patients is None else self.patients

    @functools.cached_property
    def digests(self) -> NDArray[np.int64]:
        """Return (N,) hashes of pixels; copies of an image in other files or formats are equal."""
        hashes = (_hash64(np.ascontiguousarray(image)) for image in self.images)
        return np.fromiter(hashes, np.int64, len(self))

    @property
    def num_patients(self) -> int | None:
        """Return the number of patients; None if unknown."""
        return None if self.patients is None else len(np.unique(self.patients))

    def take(self, indices: NDArray[np.int64]) -> "Records":
        """Return the records at `indices`; these records, not a copy, if all are chosen."""
        if np.array_equal(indices, np.arange(len(self))):
            return self
        patients = None if self.patients is None else self.patients[indices]
        images = large_array((len(indices), *self.images.shape[1:]), np.uint8)
        for start in range(0, len(indices), TAKEN_AT_ONCE):
            part = slice(start, start + TAKEN_AT_ONCE)
            images[part] = self.images[indices[part]]
        return Records(images, self.labels[indices], patients)

    def in_order(self) -> "Records":
        """Return the records in the order of their digests, then patients, then labels.

        Equal sets of records give equal splits; adding or removing a record keeps the order of the
        other records.
        """
        patients = self.labels if self.patients is None else self.patients
        return self.take(np.lexsort((self.labels, patients, self.digests)))


@dataclass(frozen=True)
class Taken:
    """The records, in item order, the count of items, and notes for the user.

    `cacheable` is False if an image could not be read for a reason that may be temporary.
    """

    records: Records
    count: Count
    notes: tuple[str, ...]
    cacheable: bool


def hash64(text: str) -> int:
    """Return a 64-bit hash as a signed number."""
    return _hash64(text.encode(errors="surrogateescape"))


def _hash64(content: Any) -> int:
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def take_records(
    items: Iterable[Item],
    unit: str,
    where: str,
    numbers: Mapping[str, int],
    conversion: Conversion,
    patients: bool = False,
    remedy: str = "",
) -> Taken:
    """Turn items into records: images of one shape with the numbers of their classes.

    Args:
        items: the items, in any order.
        unit: "files", "rows" or "images".
        where: the data set and its location, for errors.
        numbers: the class number of each label.
        conversion: how images become arrays; without a fit, other sizes are errors.
        patients: whether items have patients.
        remedy: the error's remedy for labels that are not in `numbers`.

    Raises:
        UserError: a label is unknown, a file is named twice, a size is wrong, LOST_AT_MOST images
            and most of those so far cannot be opened, or no item becomes a record.
    """
    shape, fit, bits, window = conversion
    seen = _Seen(where, Count(unit))
    joined, labels, ids = bytearray(), [], []  # a list of images would need memory twice
    for item in _reject_repeats(items, where):
        seen.count.found += 1
        if item.skipped or item.label not in numbers:  # a class may have any name
            seen.skip_without_class(item, numbers)
            continue
        try:
            opened = open_image(item.image, shape[0], bits, window)
            patient = item.patient if isinstance(item.patient, str) else item.patient()
        except (OSError, ValueError) as error:
            seen.skip_unreadable(item, error)
            continue
        seen.widest = max(seen.widest, opened.info.get("bits", 0))
        seen.windowless += opened.info.get("lacks_window", False)
        seen.levels = max(seen.levels, opened.info.get("levels", 0))
        pixels = to_pixels(opened) if fit is None else scale(opened, shape, fit)
        if pixels.shape != shape:
            raise UserError(
                f"{where}: {item.name} has shape {list(pixels.shape)}, but "
                f"data.shape={list(shape)}; set its shape, or data.resize=true to scale it"
            )
        joined += pixels.tobytes()
        labels.append(numbers[item.label])
        ids.append(hash64(patient) if patients else 0)
    seen.check(len(labels), numbers, remedy)
    known = np.array(ids, np.int64) if patients else None
    images = np.frombuffer(joined, np.uint8).reshape(-1, *shape)
    records = Records(images, np.array(labels, np.int64), known)
    return Taken(records, seen.count, seen.notes(bits), seen.cacheable)


@dataclass
class _Seen:
    """What did not become a record so far, and why.

    `widest` is the most bits of an image. Of DICOM images, `windowless` have no window of their
    own although it was asked for, and each uses at most `levels` grey levels.
    """

    where: str
    count: Count
    widest: int = 0
    windowless: int = 0
    levels: int = 0
    cacheable: bool = True
    unknown: dict[str, str] = field(default_factory=dict)
    lost: int = 0
    first_lost: str = ""

    def skip_without_class(self, item: Item, numbers: Mapping[str, int]) -> None:
        """Count an item without a class, or remember its unknown label."""
        if item.skipped:
            self.count.skip(item.skipped, item.name)
        elif is_missing(item.label):
            named = f"{item.name}: {item.label}" if item.label else item.name
            self.count.skip(NO_LABEL, named)
        elif holds_several(item.label, numbers):
            self.count.skip(SEVERAL_LABELS, f"{item.name}: {item.label}")
        else:
            self.unknown.setdefault(item.label, item.name)

    def skip_unreadable(self, item: Item, error: OSError | ValueError) -> None:
        """Count an unreadable image; raise UserError if most files cannot be opened."""
        self.count.skip(UNREADABLE, f"{item.name}: {reason_of(error)}")
        # A missing file changes the fingerprint if it appears later.
        self.cacheable &= not isinstance(error, OSError) or isinstance(error, FileNotFoundError)
        if not (isinstance(error, OSError) and isinstance(item.image, Path)):
            return
        self.first_lost = self.first_lost or _not_opened(item.name, item.image, error)
        self.lost += 1
        if self.lost >= LOST_AT_MOST and self.lost > self.count.found / 2:
            raise UserError(
                f"{self.where}: {self.lost:,} of the first {self.count.found:,} images cannot be "
                f"opened; {self.first_lost}"
            ) from None

    def check(self, records: int, numbers: Mapping[str, int], remedy: str) -> None:
        """Raise UserError if a label is unknown or there is no record."""
        if self.unknown:
            raise UserError(_unknown_labels(self.unknown, self.where, numbers, remedy))
        if not records:
            count = self.count
            found = f"no record can be read: {count}" if count.found else "there is no image"
            remedy = self.first_lost or "give images with labels"
            raise UserError(f"{self.where}: {found}; {remedy}")

    def notes(self, bits: int) -> tuple[str, ...]:
        """Return notes on `pixel_bits` and `window`."""
        notes = []
        if 0 < self.widest <= DARK and bits == 16:
            notes.append(
                f"its 16-bit images use at most {self.widest} bits, so they are nearly black; "
                f"pixel_bits={max(self.widest, 8)} uses the upper 8 of these"
            )
        elif not self.widest and bits < 16:
            notes.append(
                f"pixel_bits={bits} has no effect: none of its images has 16 bits (DICOM images "
                "name their own)"
            )
        if self.windowless:
            notes.append(
                f"{self.windowless:,} DICOM images have no window of their own, so all their "
                "stored bits are used; window=[CENTRE,WIDTH] treats all images alike"
            )
        if 0 < self.levels <= FLAT:
            notes.append(
                f"its DICOM images use at most {self.levels} of 256 grey levels; window=header or "
                "[CENTRE,WIDTH] uses more"
            )
        return tuple(f"{self.where}: {note}" for note in notes)


def _not_opened(name: str, image: Path, error: OSError) -> str:
    """Describe the first image that cannot be opened, with the remedy."""
    return (
        f"the first is {name[:LONGEST_NAME]} ({reason_of(error)}), looked for in {image.parent}; "
        "check the paths or links and your permissions; paths in a table start from its folder"
    )


def _unknown_labels(
    unknown: Mapping[str, str], where: str, numbers: Mapping[str, int], remedy: str
) -> str:
    """Describe labels without a class, with the names of items that have them, and the remedy."""
    if several := sorted(label for label in unknown if seems_several(label)):
        unknown, remedy = {label: unknown[label] for label in several}, SEVERAL_REMEDY
    lines = [f"{label} ({name})" for label, name in sorted(unknown.items())]
    twins = (look_alikes([*numbers, label]) for label in unknown)
    looks = next((f"; {each}" for each in twins if each), "")
    return f"{where}: labels that name no class: {first_few(lines)}{looks}; {remedy}"


def _reject_repeats(items: Iterable[Item], where: str) -> Iterator[Item]:
    """Yield the items; reject a file that occurs twice."""
    seen = set[tuple[int, int] | Path]()
    for item in items:
        if isinstance(item.image, Path):
            try:
                status = item.image.stat()
            except (OSError, ValueError):  # reported with other unreadable files
                yield item
                continue
            # Some file systems have no file numbers.
            file = (status.st_dev, status.st_ino) if status.st_ino else item.image.resolve()
            if file in seen:
                raise UserError(
                    f"{where}: {item.name} is named twice, by rows or links; an image must be one "
                    "record: remove one of the two"
                )
            seen.add(file)
        yield item
