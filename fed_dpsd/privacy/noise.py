"""Where noise comes from: seeded, for runs that are to be repeated, or secret, for real records.

The exact sampler: Canonne, Kamath, Steinke: "The Discrete Gaussian for Differential Privacy", arXiv
2004.00010, Algorithms 1 to 3, on arrays.
"""

import hashlib
import hmac
import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

Law = Literal["gaussian", "laplace"]
Words = NDArray[np.uint64]

KEY_BYTES = 32
STREAM_BYTES = 2**36  # of a key: ChaCha20's counter ends at 2^38, and a long training goes on
# Of one number with Gaussian noise, an event's loss: docs/privacy.md, Theorem 8.
GAUSSIAN_LOSS = 2.0**-42
LAPLACE_LOSS = 2.0**-52  # what a number's shift over its scale grows by with Laplace noise
UNIFORM_STEP = 2.0**-53
FARTHEST = 9.0  # standard deviations: honest noise goes beyond with a probability of about 1e-18
_UNITS = 26  # bits of the scale, in units of the grid: their squares' double fits in 53 bits
_FARTHEST = np.uint64(2**32 - 1)  # whose square fits in a word; over 60 scales away


class SecureGenerator:
    """Draws from a ChaCha20 stream: without the key nobody can tell them from ideal ones.

    Args:
        key: 32 bytes; equal keys give equal draws.

    Raises:
        ValueError: the key has another length.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes; it must have {KEY_BYTES}")
        self._stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
        self._left = STREAM_BYTES

    def random(self, size: int | tuple[int, ...]) -> NDArray[np.float64]:
        """Uniform in [0, 1), in steps of 2^-53."""
        words = self.words(math.prod((size,) if isinstance(size, int) else size))
        return np.asarray((words >> np.uint64(11)).reshape(size) * 2.0**-53)

    def noisy_sum(self, values: NDArray[Any], scale: float, law: Law) -> NDArray[np.float64]:
        """The sum of (n, ...) `values` plus noise, exactly: integers on a grid, floats only then.

        The grid is a power of two, at most 2^-25 of the scale. Each value is cut off towards zero
        to it, so no norm grows, and whole numbers stay as they are where the scale is below 2^26;
        the noise's scale is rounded up to it. What the grid costs: docs/privacy.md, Theorem 8.
        """
        grid = lattice_spacing(scale)
        units = math.ceil(scale / grid)
        drawn = self._gaussian if law == "gaussian" else self._laplace
        sensitive = np.trunc(np.asarray(values, np.float64) / grid).sum(axis=0)
        noisy = sensitive + drawn(units, sensitive.size).reshape(sensitive.shape)
        return np.asarray(noisy * grid)

    def words(self, count: int) -> Words:
        """(count,) integers, uniform below 2^64."""
        self._left -= 8 * count
        if self._left < 0:
            self.__init__(self._stream.update(bytes(KEY_BYTES)))  # type: ignore[misc]  # go on
            self._left -= 8 * count
        return np.frombuffer(self._stream.update(bytes(8 * count)), "<u8").astype(np.uint64)

    def _below(self, bound: int, count: int) -> Words:
        """(count,) integers, uniform below `bound`."""
        most = np.uint64(2**64 // bound * bound - 1)
        drawn = self.words(count)
        while (again := drawn > most).any():
            drawn[again] = self.words(int(again.sum()))
        return drawn % np.uint64(bound)

    def _accepts(self, numerator: Words, denominator: int) -> NDArray[np.bool_]:
        """True with probability exp(-numerator / denominator) for each: Algorithm 1."""
        whole, rest = np.divmod(numerator, np.uint64(denominator))
        accepted = self._accepts_fraction(rest, denominator)
        for tries in range(int(whole.max(initial=0))):
            left = np.flatnonzero(accepted & (whole > tries))
            one = np.full(len(left), denominator, np.uint64)
            accepted[left] = self._accepts_fraction(one, denominator)
        return accepted

    def _accepts_fraction(self, numerator: Words, denominator: int) -> NDArray[np.bool_]:
        """The same for numerators up to the denominator."""
        accepted = np.zeros(len(numerator), bool)
        going, k = np.arange(len(numerator)), 1
        while len(going):
            goes_on = self._below(denominator * k, len(going)) < numerator[going]
            accepted[going[~goes_on]] = k % 2 == 1
            going, k = going[goes_on], k + 1
        return accepted

    def _laplace(self, units: int, count: int) -> NDArray[np.int64]:
        """(count,) integers x with probability proportional to exp(-|x| / units): Algorithm 2."""
        found = np.empty(0, np.int64)
        while len(found) < count:
            low = self._below(units, 2 * (count - len(found)) + 8)
            low = low[self._accepts_fraction(low, units)]
            high, going = np.zeros(len(low), np.int64), np.arange(len(low))
            while len(going):
                going = going[self._accepts_fraction(np.ones(len(going), np.uint64), 1)]
                high[going] += 1
            size = low.astype(np.int64) + units * high
            negative = self._below(2, len(size)) == 1
            signed = np.where(negative, -size, size)
            found = np.concatenate([found, signed[~negative | (size > 0)]])
        return found[:count]

    def _gaussian(self, units: int, count: int) -> NDArray[np.int64]:
        """(count,) integers x, probability proportional to exp(-x^2 / 2 units^2): Algorithm 3."""
        found = np.empty(0, np.int64)
        while len(found) < count:
            drawn = self._laplace(units, 2 * (count - len(found)) + 8)
            away = np.abs(np.abs(drawn) - units).astype(np.uint64)
            near = away <= _FARTHEST  # what is not has less than e^-1800 to be accepted
            drawn, away = drawn[near], away[near]
            found = np.concatenate([found, drawn[self._accepts(away * away, 2 * units * units)]])
        return found[:count]


@dataclass(frozen=True)
class SecretStreams:
    """Streams as streams.Streams has them, from a secret instead of a public seed.

    Every draw follows its purpose, and what it is for, as seeded ones do: so a draw that is
    repeated after a crash is the same one, and tells nothing new.

    Args:
        secret: at least 32 bytes that only the client knows.

    Raises:
        ValueError: it is shorter.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < KEY_BYTES:
            raise ValueError(f"a secret of {len(self.secret)} bytes; it must have {KEY_BYTES}")

    @property
    def identity(self) -> str:
        """What tells two secrets apart, and nothing else of them."""
        return hmac.digest(self.secret, b"identity", hashlib.sha256).hex()

    def numpy(self, purpose: str, client: int = 0, query_id: int = 0) -> SecureGenerator:
        """A fresh generator for `purpose`; equal arguments give equal draws."""
        name = f"{purpose} {client} {query_id}".encode()
        return SecureGenerator(hmac.digest(self.secret, name, hashlib.sha256))


Rng = np.random.Generator | SecureGenerator


class Noise(Protocol):
    """Streams to draw noise from: `streams.Streams`, or `SecretStreams`."""

    def numpy(self, purpose: str, client: int = 0, query_id: int = 0) -> Rng:
        """A fresh generator; equal arguments give equal draws."""


def noisy_sum(values: NDArray[Any], scale: float, law: Law, rng: Rng) -> NDArray[np.float64]:
    """The sum of (n, ...) `values` plus N(0, scale^2), or Laplace's law of that scale, on each.

    Values are cut off to multiples of the noise's grid, so their sum is exact where it is below
    2^53 of them: no record moves it by more than it moves its own value.
    """
    if isinstance(rng, SecureGenerator):
        return rng.noisy_sum(values, scale, law)
    total = cut_off(values, lattice_spacing(scale)).sum(axis=0)
    draw = rng.normal if law == "gaussian" else rng.laplace
    return snap(total + draw(0, scale, total.shape), scale)


def lattice_spacing(scale: float) -> float:
    """The power of two that secret noise of a scale lies on; seeded noise lies on it too."""
    return 2.0 ** (math.ceil(math.log2(scale)) - _UNITS)


def cut_off(values: NDArray[Any], grid: float) -> NDArray[np.float64]:
    """Values cut off towards zero to multiples of a power of two, which sums of them are too."""
    return np.asarray(np.trunc(np.asarray(values, np.float64) / grid) * grid)


def snap(values: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """Noisy `values` on a grid of 2^-20 of the noise's scale, or a little less.

    The last bits of a floating-point sum tell which number the noise was added to (Mironov: "On
    significance of the least significant bits for differential privacy", CCS 2012). Rounding is
    post-processing of ideal noise, and hides them; it is no proof for a generator's own noise.
    """
    grid = 2.0 ** (math.floor(math.log2(scale)) - 20)
    return np.asarray(np.round(values / grid) * grid)
