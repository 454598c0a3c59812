"""Sources of noise: seeded for repeatable runs, secret for real records.

The exact sampler implements Canonne, Kamath, Steinke: "The Discrete Gaussian for Differential
Privacy", arXiv 2004.00010, Algorithms 1 to 3, on arrays.
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
STREAM_BYTES = 2**36  # drawn from one key before the next; ChaCha20's counter ends at 2^38
# The precision loss of one number with Gaussian noise: docs/proofs.md, Theorem 8.
GAUSSIAN_LOSS = 2.0**-42
LAPLACE_LOSS = 2.0**-52  # with Laplace noise, growth of one number's shift over the scale
UNIFORM_STEP = 2.0**-53
FARTHEST = 9.0  # standard deviations; honest noise exceeds it with a probability of about 1e-18
_UNITS = 26  # bits of the scale in lattice steps; twice its square fits in 53 bits
_FARTHEST = np.uint64(2**32 - 1)  # its square fits in a word; over 60 scales away


class SecureGenerator:
    """A generator on a ChaCha20 stream; without the key, its draws look random.

    Args:
        key: 32 bytes; equal keys give equal draws.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes; it must have {KEY_BYTES}")
        self._stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
        self._left = STREAM_BYTES

    def random(self, size: int | tuple[int, ...]) -> NDArray[np.float64]:
        """Draw uniform numbers in [0, 1), in steps of 2^-53."""
        words = self.words(math.prod((size,) if isinstance(size, int) else size))
        return np.asarray((words >> np.uint64(11)).reshape(size) * 2.0**-53)

    def noisy_sum(self, values: NDArray[Any], scale: float, law: Law) -> NDArray[np.float64]:
        """Sum (n, ...) `values` and add noise exactly: as integers on a lattice, then as floats.

        The lattice spacing is a power of two, at most 2^-25 of the scale. Each value is truncated
        towards zero to the lattice, so no norm grows. Integers are unchanged if the scale is below
        2^26. The noise's scale is rounded up to a multiple of the spacing. docs/proofs.md, Theorem
        8, proves the cost of the lattice. The draw depends on both the sum and the key, so equal
        keys never add equal noise to different sums.
        """
        spacing = lattice_spacing(scale)
        units = math.ceil(scale / spacing)
        sensitive = np.trunc(np.asarray(values, np.float64) / spacing).sum(axis=0)
        key = self._stream.update(bytes(KEY_BYTES))
        own = SecureGenerator(hmac.digest(key, sensitive.tobytes(), hashlib.sha256))
        drawn = own._gaussian if law == "gaussian" else own._laplace
        noisy = sensitive + drawn(units, sensitive.size).reshape(sensitive.shape)
        return np.asarray(noisy * spacing)

    def noisy_argmax(self, votes: NDArray[Any], scale: float) -> NDArray[np.int64]:
        """Draw a class for each row of (B, K) integer `votes`, exactly as Gumbel noise would.

        Uniform classes are drawn until one is accepted, with probability exp((its votes - the
        largest count) / scale). The scale is rounded up to a lattice.
        """
        spacing = lattice_spacing(scale)
        units = math.ceil(scale / spacing)
        if spacing > 1:  # a vote is less than a lattice step, so no vote counts
            votes = np.zeros_like(votes)
        behind = ((votes.max(axis=1, keepdims=True) - votes) / spacing).astype(np.uint64)
        chosen, pending = np.empty(len(votes), np.int64), np.arange(len(votes))
        while len(pending):
            drawn = self._below(votes.shape[1], len(pending)).astype(np.int64)
            accepted = self._accepts(behind[pending, drawn], units)
            chosen[pending[accepted]] = drawn[accepted]
            pending = pending[~accepted]
        return chosen

    def words(self, count: int) -> Words:
        """Draw (count,) uniform integers below 2^64."""
        self._left -= 8 * count
        if self._left < 0:
            self.__init__(self._stream.update(bytes(KEY_BYTES)))  # type: ignore[misc]  # next key
            self._left -= 8 * count
        return np.frombuffer(self._stream.update(bytes(8 * count)), "<u8").astype(np.uint64)

    def _below(self, bound: int, count: int) -> Words:
        """Draw (count,) uniform integers below `bound`."""
        most = np.uint64(2**64 // bound * bound - 1)
        drawn = self.words(count)
        while (again := drawn > most).any():
            drawn[again] = self.words(int(again.sum()))
        return drawn % np.uint64(bound)

    def _accepts(self, numerator: Words, denominator: int) -> NDArray[np.bool_]:
        """Accept each numerator with probability exp(-numerator / denominator) (Algorithm 1)."""
        whole, rest = np.divmod(numerator, np.uint64(denominator))
        accepted = self._accepts_fraction(rest, denominator)
        for tries in range(int(whole.max(initial=0))):
            left = np.flatnonzero(accepted & (whole > tries))
            one = np.full(len(left), denominator, np.uint64)
            accepted[left] = self._accepts_fraction(one, denominator)
        return accepted

    def _accepts_fraction(self, numerator: Words, denominator: int) -> NDArray[np.bool_]:
        """Accept like `_accepts`, for numerators up to the denominator."""
        accepted = np.zeros(len(numerator), bool)
        pending, k = np.arange(len(numerator)), 1
        while len(pending):
            continues = self._below(denominator * k, len(pending)) < numerator[pending]
            accepted[pending[~continues]] = k % 2 == 1
            pending, k = pending[continues], k + 1
        return accepted

    def _laplace(self, units: int, count: int) -> NDArray[np.int64]:
        """Draw (count,) integers x in proportion to exp(-|x| / units) (Algorithm 2)."""
        accepted = np.empty(0, np.int64)
        while len(accepted) < count:
            low = self._below(units, 2 * (count - len(accepted)) + 8)
            low = low[self._accepts_fraction(low, units)]
            high, pending = np.zeros(len(low), np.int64), np.arange(len(low))
            while len(pending):
                pending = pending[self._accepts_fraction(np.ones(len(pending), np.uint64), 1)]
                high[pending] += 1
            size = low.astype(np.int64) + units * high
            negative = self._below(2, len(size)) == 1
            signed = np.where(negative, -size, size)
            accepted = np.concatenate([accepted, signed[~negative | (size > 0)]])
        return accepted[:count]

    def _gaussian(self, units: int, count: int) -> NDArray[np.int64]:
        """Draw (count,) integers x in proportion to exp(-x^2 / 2 units^2) (Algorithm 3)."""
        accepted = np.empty(0, np.int64)
        while len(accepted) < count:
            drawn = self._laplace(units, 2 * (count - len(accepted)) + 8)
            away = np.abs(np.abs(drawn) - units).astype(np.uint64)
            near = away <= _FARTHEST  # others are accepted with probability below e^-1800
            drawn, away = drawn[near], away[near]
            chosen = drawn[self._accepts(away * away, 2 * units * units)]
            accepted = np.concatenate([accepted, chosen])
        return accepted[:count]


@dataclass(frozen=True)
class SecretStreams:
    """Streams like `streams.Streams`, but derived from a secret instead of a public seed.

    A draw repeated after a crash is the same and reveals nothing new.

    Args:
        secret: at least 32 bytes that only the client knows.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < KEY_BYTES:
            raise ValueError(f"a secret of {len(self.secret)} bytes; it must have {KEY_BYTES}")

    @property
    def identity(self) -> str:
        """Return a digest that distinguishes two secrets and reveals nothing else about them."""
        return hmac.digest(self.secret, b"identity", hashlib.sha256).hex()

    def numpy(self, purpose: str, client: int = 0, query_id: int = 0) -> SecureGenerator:
        """Return a fresh generator for `purpose`; equal arguments give equal draws."""
        name = f"{purpose} {client} {query_id}".encode()
        return SecureGenerator(hmac.digest(self.secret, name, hashlib.sha256))

    def noise(self, purpose: str, client: int, query_id: int, hides: str) -> SecureGenerator:
        """Return the generator of the noise for one input, whose digest is `hides`.

        Inputs that differ in a bit get unrelated noise. If they shared it, the difference of two
        releases would be exact.
        """
        return self.numpy(f"{purpose} {hides}", client, query_id)


Rng = np.random.Generator | SecureGenerator


class Noise(Protocol):
    """Streams to draw noise from: `streams.Streams`, or `SecretStreams`."""

    def numpy(self, purpose: str, client: int = 0, query_id: int = 0) -> Rng:
        """Return a fresh generator; equal arguments give equal draws."""

    def noise(self, purpose: str, client: int, query_id: int, hides: str) -> Rng:
        """Return a fresh generator of noise; only secret noise depends on what it hides.

        Args:
            purpose: what the noise is for; each kind of draw has its own.
            client: the client's number.
            query_id: the number of the request, or of the teacher.
            hides: a digest of the values that the noise is added to, with everything that they and
                the noise depend on.
        """


def noisy_sum(values: NDArray[Any], scale: float, law: Law, rng: Rng) -> NDArray[np.float64]:
    """Sum (n, ...) `values` and add N(0, scale^2) or Laplace(0, scale) noise to each number.

    Values are truncated to the noise's lattice, so their sum is exact below 2^53 steps: a record
    changes the sum by no more than its own value changes.
    """
    if isinstance(rng, SecureGenerator):
        return rng.noisy_sum(values, scale, law)
    total = truncate(values, lattice_spacing(scale)).sum(axis=0)
    draw = rng.normal if law == "gaussian" else rng.laplace
    return snap(total + draw(0, scale, total.shape), scale)


def noisy_argmax(votes: NDArray[Any], scale: float, rng: Rng) -> NDArray[np.int64]:
    """Draw a class for each row of (B, K) integer `votes`, in proportion to exp(votes / scale).

    This is the class with the most votes after Gumbel noise of that scale is added to each count.
    """
    if isinstance(rng, SecureGenerator):
        return rng.noisy_argmax(votes, scale)
    return np.asarray((votes + rng.gumbel(0, scale, votes.shape)).argmax(axis=1))


def lattice_spacing(scale: float) -> float:
    """Return the lattice spacing of secret or seeded noise: a power of two, or 0 for scale 0."""
    if scale == 0:
        return 0.0
    return 2.0 ** (math.ceil(math.log2(scale)) - _UNITS)


def truncate(values: NDArray[Any], spacing: float) -> NDArray[np.float64]:
    """Truncate values towards zero to a lattice; their sums are on the lattice too."""
    return np.asarray(np.trunc(np.asarray(values, np.float64) / spacing) * spacing)


def snap(values: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """Round noisy `values` to a lattice spaced 2^-20 of the noise's scale, or a little less.

    The last bits of a floating-point sum reveal the number that noise was added to (Mironov:
    "On significance of the least significant bits for differential privacy", CCS 2012). Rounding is
    post-processing of ideal noise and hides them; it proves nothing for a real generator's noise.
    """
    spacing = 2.0 ** (math.floor(math.log2(scale)) - 20)
    return np.asarray(np.round(values / spacing) * spacing + 0.0)  # -0.0 + 0.0 is 0.0
