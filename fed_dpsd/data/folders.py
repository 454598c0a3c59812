"""The reader of a folder with a subfolder for each class."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fed_dpsd.classes import text_of
from fed_dpsd.data.intake import NO_CLASS, Item
from fed_dpsd.data.reader import Columns, reading, split_of
from fed_dpsd.errors import UserError
from fed_dpsd.progress import track


class Folder:
    """A folder with a subfolder for each class, which contains images at any depth."""

    unit = "files"
    declared: Sequence[str] = ()

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path = path
        if columns.patient is not None:
            raise UserError(
                f"{path}: {columns.keys}patient_column={columns.patient}: class folders name "
                "no patients; use null, or a table with a column of patients"
            )
        self._labels = {folder: text_of(folder) for folder in class_folders(path)}
        texts = list(self._labels.values())
        if twice := next((f for f, text in self._labels.items() if texts.count(text) > 1), None):
            raise UserError(
                f"{path}: folder {twice!a} has the same name as another, ignoring spaces, the "
                "encoding of accents and number formats; merge the two"
            )

    @property
    def ignored(self) -> str:
        """Return a folder inside a class folder that is named like a split; its images are used."""
        inside = (
            (each, part) for each in self._labels for part in class_folders(self._path / each)
        )
        return next((f"folder {each}/{part}" for each, part in inside if split_of(part)), "")

    def items(self) -> Iterator[Item]:
        """Yield every file, ordered by path."""
        with reading(self._path):
            files = sorted(walk_classes(self._path), key=lambda found: found[0])
            for file, folder in track("files read", files):
                label, skipped = ("", NO_CLASS) if folder is None else (self._labels[folder], "")
                yield Item(str(file.relative_to(self._path)), file, label, skipped=skipped)

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
