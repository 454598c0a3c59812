"""Images in several arrays, in memory or mapped from files, read as one array."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Pictures:
    """(N, C, H, W) uint8 images from several arrays, joined without a copy.

    Arrays may be mapped from files, so that more images than fit in memory can be read in parts.
    """

    def __init__(self, parts: Sequence["NDArray[np.uint8] | Pictures"]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self.shape: tuple[int, ...] = (int(self._ends[-1]), *parts[0].shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, chosen: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return copies of the images in a slice or at non-negative (n,) indices."""
        indices = np.arange(len(self))[chosen]
        images = np.empty((len(indices), *self.shape[1:]), np.uint8)
        owners = np.searchsorted(self._ends, indices, side="right")
        for owner in np.unique(owners):
            own, first = owners == owner, self._ends[owner] - len(self._parts[owner])
            images[own] = self._parts[owner][indices[own] - first]
        return images


class Chosen(Pictures):
    """(n, C, H, W) images at (n,) indices of others, read when they are needed."""

    def __init__(self, images: "NDArray[np.uint8] | Pictures", indices: NDArray[np.int64]) -> None:
        self._images, self._indices = images, indices
        self.shape = (len(indices), *images.shape[1:])

    def __getitem__(self, chosen: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images in a slice or at non-negative (n,) indices."""
        return self._images[self._indices[chosen]]
