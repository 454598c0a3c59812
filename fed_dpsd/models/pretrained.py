"""Public features from EfficientNet-Lite2 or another network, and the fixed patch features.

With a small privacy budget, features matter most (Tramer and Boneh, arXiv 2011.11660), and public
features are richer. ImageNet is assumed to be public; no epsilon covers it.
"""

import contextlib
import functools
import hashlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fed_dpsd.config import ModelConfig
from fed_dpsd.models import efficientnet
from fed_dpsd.models.fixed_features import Remembering, memory_for, version_of
from fed_dpsd.models.patches import Patches
from fed_dpsd.models.public_networks import PublicNetwork
from fed_dpsd.privacy.lattice import places_agree
from fed_dpsd.storage import write_together

LENGTH = 12.0  # of a row; best of 3 to 40 on CIFAR10 at epsilon 1, with one client and with five
# Images in a batch, padded with zeros; larger batches are slower. An image's features must not
# depend on other images, to the last bit. So the size is 1 if positions in a batch disagree.
BATCH = 16
WRITTEN_AT = 1_024  # rows in a file of the cache
MOST_READ = 400 * WRITTEN_AT  # rows of the cache; older files are removed


@dataclass(frozen=True)
class Lite2:
    """EfficientNet-Lite2's features, with the interface of `PublicNetwork`."""

    num_features, num_bytes = efficientnet.NUM_FEATURES, 20 * 10**6
    note = "features are EfficientNet-Lite2's, trained on ImageNet, which is public by assumption"

    @property
    def version(self) -> str:
        """The name of these features in caches: their code states the weights' digest."""
        return version_of(__file__, efficientnet.__file__)

    def require(self) -> None:
        """Raise UserError if the weights are not installed."""
        efficientnet.require_weights()

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Map (B, C, S, S) floats in [-1, 1] to (B, 1184) features."""
        return efficientnet.features(images)


Public = Lite2 | PublicNetwork
LITE2 = Lite2()


def public_of(model: ModelConfig) -> Public:
    """Return the public features that an experiment chooses."""
    if model.backbone is None:
        return LITE2
    return PublicNetwork(model.backbone, model.pixels, model.digest, model.weights)


class Pretrained(nn.Module):
    """Module from (B, C, S, S) in [-1, 1] to (B, F): two kinds of features with equal norms.

    There are no parameters. On a CPU, each image's row is cached by the hash of its pixels and, if
    `folder` is given, also stored there for other processes, 1,024 rows at a time.

    Args:
        shape: (C, S, S) of the images, C = 1 or 3.
        num_fixed: the largest number of fixed features.
        public: the public features.

    Raises:
        UserError: the weights of the public features are missing, or are others.
    """

    folder: Path | None = None

    def __init__(self, shape: tuple[int, ...], num_fixed: int, public: Public = LITE2) -> None:
        super().__init__()
        public.require()
        self.shape, self.public = shape, public
        self.fixed = Patches(shape, num_fixed)
        self.num_features = public.num_features + self.fixed.num_features

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (B, C, S, S) floats to (B, F) float32 rows of length 12."""
        memory = memory_for(images)
        if memory == "nothing":
            public = self.public.features(images)
        else:
            threads = torch.get_num_threads()
            public = _memory(self.shape, self.folder, memory, threads, self.public)(images)
        return self.joined(public, images)

    def joined(self, public: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Join (B, F') public features of images with their fixed features, to (B, F)."""
        parts = [functional.normalize(part) for part in (public, self.fixed(images))]
        return torch.cat(parts, 1) * (LENGTH / 2**0.5)


class Memory:
    """A cache of feature rows, by the hash of an image's pixels.

    A folder holds pairs of files (hashes and rows), each written once. Other processes read them
    when they start.
    """

    def __init__(self, folder: Path | None, public: Public = LITE2) -> None:
        self._folder, self._public = folder, public
        self._batch = 0  # unknown before the first images
        self._rows: dict[bytes, NDArray[np.float32]] = {}
        self._unwritten: dict[bytes, NDArray[np.float32]] = {}
        self._numbers = itertools.count()
        for path in sorted(folder.glob("*.hashes.npy"), key=_age) if folder else ():
            if len(self._rows) < MOST_READ and (known := _read(path, public)):
                self._rows |= known
            else:  # damaged or old: its features are computed again, bit for bit
                path.unlink(missing_ok=True)
                _rows_file(path).unlink(missing_ok=True)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return the (B, F) features of (B, C, S, S) images; compute only missing rows."""
        keys = [
            hashlib.blake2b(image.tobytes(), digest_size=16).digest()
            for image in images.contiguous().numpy()
        ]
        unseen = list({k: place for place, k in enumerate(keys) if k not in self._rows}.items())
        if unseen and not self._batch:
            self._batch = BATCH if places_agree(self._features_at, images, BATCH) else 1
        for start in range(0, len(unseen), self._batch or 1):
            self._compute(images, dict(unseen[start : start + self._batch]))
        rows = np.empty((len(keys), self._public.num_features), np.float32)
        for row, key in zip(rows, keys, strict=True):
            row[:] = self._rows[key]
        return torch.from_numpy(rows)

    def _compute(self, images: torch.Tensor, places: dict[bytes, int]) -> None:
        batch = images.new_zeros((self._batch, *images.shape[1:]))
        batch[: len(places)] = images[list(places.values())]
        with torch.inference_mode():
            computed = self._public.features(batch)[: len(places)].numpy().copy()
        rows = dict(zip(places, computed, strict=True))
        self._rows |= rows
        self._unwritten |= rows
        if self._folder and len(self._unwritten) >= WRITTEN_AT:
            self._write(self._folder)

    def _features_at(self, pixels: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [self._public.features(2 * pixels - 1)]

    def _write(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}-{os.urandom(4).hex()}-{next(self._numbers)}.hashes.npy"
        rows = np.stack(list(self._unwritten.values()))
        keys = np.array([np.frombuffer(key, np.uint8) for key in self._unwritten])
        write_together({_rows_file(path): rows, path: keys})
        self._unwritten.clear()


def _rows_file(path: Path) -> Path:
    return path.with_name(path.name.replace(".hashes.", ".rows."))


def _age(path: Path) -> float:
    """Return the negative time of a file's last change, which sorts the newest files first."""
    with contextlib.suppress(OSError):  # another process may have removed it
        return -path.stat().st_mtime
    return 0


def _read(path: Path, public: Public) -> dict[bytes, NDArray[np.float32]]:
    """Return a pair's rows by their hashes; empty if the pair is damaged."""
    with contextlib.suppress(OSError, EOFError, ValueError):
        rows, keys = np.load(_rows_file(path), mmap_mode="r"), np.load(path)
        if rows.shape == (len(keys), public.num_features) and rows.dtype == np.float32:
            return {key.tobytes(): np.asarray(row) for key, row in zip(keys, rows, strict=True)}
    return {}


@functools.cache
def _memory(
    shape: tuple[int, ...],
    folder: Path | None,
    memory: Remembering,
    threads: int,
    public: Public = LITE2,
) -> Memory:
    """Return the process's cache for images of a shape; caches are separate if rounding may differ.

    Records and requested images have separate folders (see `feature_cache`).
    """
    name = "-".join([public.version, str(threads), "x".join(map(str, shape))])
    return Memory(folder and folder / memory / name, public)
