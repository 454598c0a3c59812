"""The reader of npz files with images, labels and patients."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.classes import sort_class_names, text_of
from fed_dpsd.data.intake import Item
from fed_dpsd.data.reader import Columns, id_of, split_of
from fed_dpsd.errors import UserError

ARRAYS = ".npz"


class Arrays:
    """An npz file with images, labels and patients, as in MedMNIST.

    If there are splits, their arrays have names such as train_images.
    """

    unit = "images"
    declared: Sequence[str] = ()

    def __init__(self, path: Path, columns: Columns, split: str = "") -> None:
        self._path, self._columns = path, columns
        before = f"{split}_" if split else ""
        with self._open() as arrays:
            there = arrays.files
        of_splits = () if split else splits_of(there, columns.image).values()
        self.ignored = next((f"array {name}" for name in of_splits), "")
        names = {key: before + name for key, name in columns.named.items()}
        if missing := [f"{name} ({key})" for key, name in names.items() if name not in there]:
            keys = " ".join(f"{key}=ARRAY" for key, name in names.items() if name not in there)
            raise UserError(
                f"{path} has no array {', '.join(missing)}; its arrays are {', '.join(there)}. Set "
                f"{keys}{f', without {before} in the names' if before else ''}"
            )
        if columns.labels:
            raise UserError(
                f"{path}: {columns.keys}label_columns is for tables; name the npz array of labels "
                f"in {columns.keys}label_column"
            )
        self._names = list(names.values())

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            with np.load(self._path, allow_pickle=False) as arrays:
                yield arrays
        except MemoryError:
            raise
        except Exception as error:  # zipfile and zlib raise any type of error on broken bytes
            raise UserError(
                f"{self._path} cannot be read ({type(error).__name__}); give an npz file without "
                "object arrays"
            ) from None

    def count(self) -> int:
        """Return the number of images, by their labels."""
        with self._open() as arrays:
            return int(arrays[self._names[1]].size)

    def items(self) -> Iterator[Item]:
        """Yield every image."""
        with self._open() as arrays:
            images, *others = (arrays[name] for name in self._names)
        if images.ndim == 4 and images.shape[3] == 1:
            images = images[..., 0]
        pixels = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
        if images.dtype != np.uint8 or not pixels or 0 in images.shape:
            raise UserError(
                f"{self._path}: {self._names[0]} is {images.dtype} of shape {images.shape}; it "
                "must be uint8 of shape (N, H, W) or (N, H, W, 1 or 3)" + _conversion(images)
            )
        others = [array.reshape(-1) for array in others]
        for name, array in zip(self._names[1:], others, strict=True):
            if len(array) != len(images):
                raise UserError(
                    f"{self._path}: {len(images)} images but {len(array)} values in {name}; give "
                    "one value per image"
                )
        labels, patients = others if len(others) > 1 else (others[0], [None] * len(images))
        for index, image in enumerate(images):
            name = f"image {index}"
            patient = id_of(patients[index], self._columns, f"{self._path}: {name}")
            yield Item(name, image, text_of(labels[index]), patient)

    def labels(self) -> dict[str, str]:
        """Return the labels of all images."""
        with self._open() as arrays:
            labels = arrays[self._names[1]].reshape(-1)
        texts = {text_of(label): f"{self._path.name}, image {i}" for i, label in enumerate(labels)}
        return {text: texts[text] for text in sort_class_names(texts) if text}

    def files(self) -> Iterable[Path]:
        """Return the npz file."""
        return [self._path]


def _conversion(images: NDArray[Any]) -> str:
    """Return how to convert images to the layout that is read; "" if that is unknown."""
    first = images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3)
    steps = ["x.transpose(0, 2, 3, 1)"] * first
    if images.dtype.kind == "f":
        steps.append("(255 * x).round().astype('uint8') for x in [0, 1]")
    return f"; convert them by x = {', then '.join(steps)}" if steps else ""


def splits_of(names: Iterable[str], image: str) -> dict[str, str]:
    """Return the name of each split's image array, such as test_images."""
    ending = f"_{image}"
    found = {split_of(name.removesuffix(ending)): name for name in names if name.endswith(ending)}
    return {split: name for split, name in found.items() if split}
