"""Data-sensitive answers: normalised gradients plus Gaussian noise (arXiv 2601.19090, Alg. 2)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, NonPrivateDpEvent
from numpy.typing import NDArray

from fed_dpsd.privacy.events import FinitePrecisionDpEvent
from fed_dpsd.privacy.mechanism import (
    ONE_TEACHER,
    Mechanism,
    NoiseAt,
    Quorum,
    Relation,
    Shards,
    Unit,
    Values,
    additive_squared_snr,
    check_k,
    check_noise,
    check_noise_at,
    check_size,
    noise_share,
    top_k,
)
from fed_dpsd.privacy.noise import FARTHEST, GAUSSIAN_LOSS, Rng, lattice_spacing, noisy_sum

MOST_NUMBERS = 2**20  # entries of a request that is normalised as a whole
ROOM = 1 - 2.0**-30  # part of the bound that norms may use; the rest is for float64 rounding


@dataclass(frozen=True)
class NormalizedGradient(Mechanism):
    """Top-k masked gradients of norm below beta plus Gaussian noise.

    Guarantee: a teacher may be any function of its own shard of its client's data. One changed
    record replaces one teacher's bounded answer, so a sum moves by at most 2 * bound in L2 norm. N
    adaptive releases are N Gaussian mechanisms with noise multiplier noise_multiplier / 2; the
    bound cancels. A client's n teachers change together, so its sum moves by n * bound (the client
    answers zero) or 2 * n * bound (it answers anything). The papers' sensitivity of 2 * bound *
    sqrt(K) is loose. Norms are computed in float64 with room for rounding. Sums are exact: each
    value is truncated towards zero to the noise's lattice, and n values add up to less than 2^53
    lattice steps.

    A release is a query (`normalise="sample"`: every row has norm below `bound`) or a whole request
    (`normalise="batch"`: all its rows together have norm below `bound`). The papers do not state
    which norm they mean. With normalisation by batch, a row has about 1 / sqrt(B) of the length,
    and a request costs the same as one query.

    | input row                     | encoded row                            |
    | ----------------------------- | -------------------------------------- |
    | zero, or zero inside the mask | zero                                   |
    | any NaN or infinity           | zero                                   |
    | anything else                 | norm < bound, in float64, clipped last |
    """

    name: ClassVar[str] = "gradient"
    input: ClassVar[Literal["gradient"]] = "gradient"
    calibrated_by: ClassVar[str] = "noise_multiplier"
    uncovered_noise: ClassVar[float] = 100.0
    additive: ClassVar[Literal[True]] = True
    reason: ClassVar[None] = None
    noise_law: ClassVar[Literal["gaussian"]] = "gaussian"
    num_classes: int  # K, >= 2
    # sigma, noise standard deviation divided by `bound`, > 0; 0 adds no noise, and nothing is
    # proven
    noise_multiplier: float
    bound: float = 1e-3  # beta, > 0
    stability: float = 1e-4  # h, added to the norm before dividing, > 0
    k: int | None = None  # number of coordinates to keep; None keeps all
    # "public" keeps the coordinates of the student's k largest predictions and adds noise only to
    # these; "private" keeps a teacher's own k entries of largest magnitude, and "signed" its k
    # largest with their signs (M_k in the paper's text). Both reveal something about the teacher,
    # so noise is added to all K coordinates.
    mask: Literal["public", "private", "signed"] = "public"
    normalise: Literal["sample", "batch"] = "sample"
    # "client" (each client adds its own noise) or "server" (noise is added once, to the sum; the
    # server sees answers without noise and must be trusted)
    noise_at: NoiseAt = "client"
    # the quorum of the secure sum; only with noise_at="distributed", where each client adds a noise
    # share
    quorum: Quorum | None = None
    shards: Shards = ONE_TEACHER  # the client's teachers
    # "normalise" (each gradient is scaled to norm `bound`, except for `stability`) or "clip" (only
    # longer gradients are shortened to `bound`, as in DP-SGD)
    scaling: Literal["normalise", "clip"] = "normalise"

    def __post_init__(self) -> None:
        check_noise_at(self.noise_at, self.quorum)
        check_noise(self.noise_multiplier, self.noise_at, self.shards.teachers)
        check_size("bound", self.bound)
        check_size("stability", self.stability)
        if self.k is not None:
            check_k(self.k, self.num_classes)
        if self.mask not in ("public", "private", "signed"):
            raise ValueError(f"mask={self.mask!r} must be 'public', 'private' or 'signed'")
        if self.normalise not in ("sample", "batch"):
            raise ValueError(f"normalise={self.normalise!r} must be 'sample' or 'batch'")
        if self.scaling not in ("normalise", "clip"):
            raise ValueError(f"scaling={self.scaling!r} must be 'normalise' or 'clip'")

    @property
    def scale(self) -> float:
        """Return the noise's standard deviation, noise_multiplier * bound, or a noise share's."""
        return noise_share(self.noise_multiplier * self.bound, self.quorum)

    @property
    def lattice(self) -> float:
        """Return the spacing of the noise's lattice; see `lattice_spacing`."""
        return lattice_spacing(self.scale)

    @property
    def most_numbers(self) -> int:
        """Return the largest number of noisy values in a release."""
        return self.num_classes if self.normalise == "sample" else MOST_NUMBERS

    def row_norm(self, predictions: Values) -> float:
        """Estimate the norm of one of the encoded rows of a request."""
        return self.bound / (math.sqrt(len(predictions)) if self.normalise == "batch" else 1)

    def constrain_sensitivity(
        self, sensitive_value: Values, predictions: Values
    ) -> NDArray[np.float64]:
        """Mask (B, K) gradients, normalise or clip them, and finally bound their norms."""
        sensitive = np.array(sensitive_value, np.float64)
        sensitive[~np.isfinite(sensitive).all(axis=1)] = 0
        if self.k is not None:
            sizes = np.abs(sensitive)
            ranked = {"public": predictions, "private": sizes, "signed": sensitive}[self.mask]
            sensitive *= top_k(ranked, self.k)
        axis = 1 if self.normalise == "sample" else None
        # Dividing by the largest entry first keeps the squares from overflowing.
        largest = np.abs(sensitive).max(axis=axis, keepdims=True, initial=0)
        unit = sensitive / np.where(largest > 0, largest, 1)
        norm = largest * np.sqrt(np.square(unit).sum(axis=axis, keepdims=True))
        divisor = norm + self.stability
        if self.scaling == "clip":
            divisor = np.maximum(norm, self.bound)
        with np.errstate(over="ignore"):
            bounded = self.bound * (sensitive / divisor)
        length = np.sqrt(np.square(bounded).sum(axis=axis, keepdims=True))
        most = self.bound * ROOM
        clipped: NDArray[np.float64] = bounded * np.minimum(1, most / np.maximum(length, most))
        return clipped

    def add_noise(self, value: Values, predictions: Values, rng: Rng) -> NDArray[np.float64]:
        """Sum (n, B, K) `value` over n and add noise of `scale`, once per query.

        Raises:
            ValueError: a request that is normalised as a whole is larger than its event covers.
        """
        if self.normalise == "batch" and value[0].size > MOST_NUMBERS:
            raise ValueError(
                f"{value[0].size:,} gradient entries in a request; normalise='batch' takes "
                f"{MOST_NUMBERS:,} at most: send fewer queries per round"
            )
        if self.noise_multiplier == 0:
            noisy = value.sum(0)
        else:
            noisy = noisy_sum(value, self.scale, self.noise_law, rng)
        # Multiplying by the mask would keep the signs of hidden entries, as -0.0.
        return np.where(self._kept(predictions), noisy, 0.0)

    def _kept(self, predictions: Values) -> NDArray[np.bool_]:
        """Mark the (B, K) entries inside a public mask, or all entries if there is none."""
        if self.k is None or self.mask != "public":
            return np.ones(predictions.shape, bool)
        return top_k(predictions, self.k)

    def admissible(self, values: Values, predictions: Values, teachers: int) -> NDArray[np.bool_]:
        """Mark the rows that are zero outside a public mask and not too long.

        Norms of gradients are at most teachers * bound. Noise on d coordinates adds at most scale *
        (sqrt(d) + FARTHEST), except with probability exp(-FARTHEST^2 / 2).
        """
        axis, rows = (1, 1) if self.normalise == "sample" else (None, len(values))
        with np.errstate(over="ignore"):
            norm = np.sqrt(np.square(values).sum(axis=axis, keepdims=True))
        longest = teachers * self.bound * (1 + 1e-9)
        if self.noise_at != "server":
            longest += self.scale * (math.sqrt(rows * self.num_classes) + FARTHEST)
        inside = ((values == 0) | self._kept(predictions)).all(axis=1)
        return np.asarray(inside & (norm <= longest)[:, 0])

    def releases(self, requests: int, queries: int) -> int:
        """Return one release per query, or per request if it is normalised as a whole."""
        return requests * (queries if self.normalise == "sample" else 1)

    def sensitivity(self, unit: Unit, relation: Relation) -> float:
        """Return the L2 change of a sum: 2 * bound per replaced, or bound per removed, teacher."""
        bounds = 1 if self.shards.vanish(unit, relation) else 2
        return self.shards.changed(unit) * self.bound * bounds

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return one Gaussian mechanism: the noise divided by the sensitivity (bound cancels)."""
        if self.noise_multiplier == 0:
            return NonPrivateDpEvent()
        stddev = self.noise_multiplier * self.bound
        return ComposedDpEvent(
            [
                GaussianDpEvent(stddev / self.sensitivity(unit, relation)),
                FinitePrecisionDpEvent(self.most_numbers * GAUSSIAN_LOSS),
            ]
        )

    def describe(self) -> str:
        """Describe what leaves a client."""
        of = "each image" if self.normalise == "sample" else "a round's images together"
        return f"{self._gradients} for {of}, with {self._noise}"

    @property
    def _gradients(self) -> str:
        return f"gradients of norm at most {self.bound:g}"

    @property
    def _noise(self) -> str:
        if self.noise_multiplier == 0:
            return "no noise of their own"
        return f"Gaussian noise of {self.noise_multiplier:g} times that norm"

    def squared_snr(self, clients: int, teachers: int) -> float:
        """Return the squared signal-to-noise ratio of a query's answers."""
        return additive_squared_snr(self.noise_multiplier, self.noise_at, clients, teachers)

    def worst_case(self) -> tuple[Values, Values]:
        """Return the (n, 1, K) gradients of two worlds, one record apart, that differ most."""
        first = np.zeros((self.shards.teachers, 1, self.num_classes))
        second = first.copy()
        unit = self.stability if self.scaling == "normalise" else self.bound
        first[0, 0, 0], second[0, 0, 0] = 1e6 * unit, -1e6 * unit
        return first, second
