"""Data-sensitive answers: normalised gradients plus Gaussian noise (arXiv 2601.19090, Alg. 2)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent
from numpy.typing import NDArray

from fed_dpsd.privacy.events import FinitePrecisionDpEvent
from fed_dpsd.privacy.mechanism import (
    ONE_TEACHER,
    NoiseAt,
    Quorum,
    Relation,
    Shards,
    Trust,
    Unit,
    Values,
    check_exact,
    check_k,
    check_noise_at,
    check_size,
    top_k,
    trust_of,
    vanishes,
)
from fed_dpsd.privacy.noise import FARTHEST, GAUSSIAN_LOSS, Rng, lattice_spacing, noisy_sum

MOST_NUMBERS = 2**20  # of an ask that is normalised as a whole
ROOM = 1 - 2.0**-30  # of the bound, for the roundings of float64


@dataclass(frozen=True)
class NormalizedGradient:
    """Top-k masked gradients of norm below beta plus Gaussian noise.

    Guarantee: with a teacher an arbitrary function of its own shard of its client's data, one
    changed record replaces one teacher's bounded answer, so a sum moves by at most 2 * bound in L2
    norm, and N adaptive releases are N Gaussian mechanisms of noise multiplier
    noise_multiplier / 2. The bound cancels. A client's n teachers change together, so its sum
    moves by n * bound (the client answers zero) or 2 * n * bound. The papers' sensitivity
    2 * bound * sqrt(K) is loose. Norms are of float64 with room for its roundings, and sums are
    exact: each value is cut off towards zero to the grid of the noise, of which n values are less
    than 2^53 steps.

    A release is a query (`normalise="sample"`: every row has norm below `bound`) or a whole ask
    (`normalise="batch"`: all its rows together have). The papers print an unindexed norm; by
    batch a row has about 1 / sqrt(B) of the length, and the ask costs what one query costs.

    | input row                     | encoded row                            |
    | ----------------------------- | -------------------------------------- |
    | zero, or zero inside the mask | zero                                   |
    | any NaN or infinity           | zero                                   |
    | anything else                 | norm < bound, in float64, clipped last |

    Args:
        num_classes: K, >= 2.
        noise_multiplier: sigma, noise standard deviation divided by `bound`, > 0.
        bound: beta, > 0.
        stability: h, added to the norm before dividing, > 0.
        k: coordinates kept; None keeps all.
        mask: "public" keeps those of the student's k largest predictions, and only they get noise;
            "private" keeps a teacher's own k largest gradient entries (M_k as printed), which says
            something about the teacher, so all K coordinates get noise.
        normalise: "sample" or "batch".
        noise_at: "client" (each client its own noise) or "server" (once, on the sum; the server
            then sees un-noised answers and must be trusted).
        quorum: of the secure sum; only with noise_at="distributed", where each client adds a share.
        shards: the client's teachers.

    Raises:
        ValueError: a parameter is out of its range.
    """

    name: ClassVar[str] = "gradient"
    input: ClassVar[Literal["gradient"]] = "gradient"
    calibrated_by: ClassVar[str] = "noise_multiplier"
    reason: ClassVar[None] = None
    noise_law: ClassVar[Literal["gaussian"]] = "gaussian"
    num_classes: int
    noise_multiplier: float
    bound: float = 1e-3
    stability: float = 1e-4
    k: int | None = None
    mask: Literal["public", "private"] = "public"
    normalise: Literal["sample", "batch"] = "sample"
    noise_at: NoiseAt = "client"
    quorum: Quorum | None = None
    shards: Shards = ONE_TEACHER

    def __post_init__(self) -> None:
        for field in ("noise_multiplier", "bound", "stability"):
            check_size(field, getattr(self, field))
        if self.k is not None:
            check_k(self.k, self.num_classes)
        if self.mask not in ("public", "private"):
            raise ValueError(f"mask={self.mask!r} must be 'public' or 'private'")
        if self.normalise not in ("sample", "batch"):
            raise ValueError(f"normalise={self.normalise!r} must be 'sample' or 'batch'")
        check_noise_at(self.noise_at, self.quorum)
        check_exact(self.noise_multiplier, self.shards.teachers)

    @property
    def trust(self) -> Trust:
        """Who must be honest; see `trust_of`."""
        return trust_of(self.noise_at)

    @property
    def scale(self) -> float:
        """Standard deviation of what `noise` adds: noise_multiplier * bound, or a share of it."""
        honest = self.quorum.honest if self.quorum else 1
        return self.noise_multiplier * self.bound / math.sqrt(honest)

    @property
    def lattice(self) -> float:
        """See `lattice_spacing`."""
        return lattice_spacing(self.scale)

    def row_norm(self, queries: int) -> float:
        """About the norm of one of `queries` encoded rows of an ask."""
        return self.bound / (math.sqrt(queries) if self.normalise == "batch" else 1)

    def encode(self, sensitive_value: Values, predictions: Values) -> NDArray[np.float64]:
        """Mask, normalise and clip (B, K) gradients, by row or as a whole."""
        sensitive = np.array(sensitive_value, np.float64)
        sensitive[~np.isfinite(sensitive).all(axis=1)] = 0
        if self.k is not None:
            ranked = predictions if self.mask == "public" else np.abs(sensitive)
            sensitive *= top_k(ranked, self.k)
        axis = 1 if self.normalise == "sample" else None
        # Dividing by the largest entry first keeps the squares from overflowing.
        largest = np.abs(sensitive).max(axis=axis, keepdims=True, initial=0)
        unit = sensitive / np.where(largest > 0, largest, 1)
        norm = largest * np.sqrt(np.square(unit).sum(axis=axis, keepdims=True))
        with np.errstate(over="ignore"):
            bounded = self.bound * (sensitive / (norm + self.stability))
        length = np.sqrt(np.square(bounded).sum(axis=axis, keepdims=True))
        most = self.bound * ROOM
        clipped: NDArray[np.float64] = bounded * np.minimum(1, most / np.maximum(length, most))
        return clipped

    def noise(self, value: Values, predictions: Values, rng: Rng) -> NDArray[np.float64]:
        """Sum (n, B, K) `value` over n and add the noise of `scale`, once a query.

        Raises:
            ValueError: an ask is normalised as a whole, and larger than its event says.
        """
        if self.normalise == "batch" and value[0].size > MOST_NUMBERS:
            raise ValueError(
                f"{value[0].size:,} gradient entries in an ask; normalise='batch' takes "
                f"{MOST_NUMBERS:,}: ask fewer queries a round"
            )
        noisy = noisy_sum(value, self.scale, self.noise_law, rng)
        if self.k is not None and self.mask == "public":
            noisy *= top_k(predictions, self.k)
        return noisy

    def admissible(self, values: Values, predictions: Values, teachers: int) -> NDArray[np.bool_]:
        """Rows that are zero outside a public mask, and not too long.

        Norms of gradients are at most teachers * bound; with noise of d coordinates, longer by
        scale * (sqrt(d) + FARTHEST) but for a probability of exp(-FARTHEST^2 / 2).
        """
        axis, rows = (1, 1) if self.normalise == "sample" else (None, len(values))
        with np.errstate(over="ignore"):
            norm = np.sqrt(np.square(values).sum(axis=axis, keepdims=True))
        longest = teachers * self.bound * (1 + 1e-9)
        if self.noise_at != "server":
            longest += self.scale * (math.sqrt(rows * self.num_classes) + FARTHEST)
        inside = np.ones(len(values), bool)
        if self.k is not None and self.mask == "public":
            inside = ((values == 0) | top_k(predictions, self.k)).all(axis=1)
        return np.asarray(inside & (norm <= longest)[:, 0])

    def releases(self, asks: int, queries: int) -> int:
        """One for each query, or for each ask that is normalised as a whole."""
        return asks * (queries if self.normalise == "sample" else 1)

    def sensitivity(self, unit: Unit, relation: Relation) -> float:
        """L2 change of a sum: 2 * bound for each replaced teacher, bound for a removed one."""
        return self.shards.changed(unit) * self.bound * (1 if vanishes(unit, relation) else 2)

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """One Gaussian mechanism, its noise divided by the sensitivity (bound cancels)."""
        stddev = self.noise_multiplier * self.bound
        numbers = self.num_classes if self.normalise == "sample" else MOST_NUMBERS
        return ComposedDpEvent(
            [
                GaussianDpEvent(stddev / self.sensitivity(unit, relation)),
                FinitePrecisionDpEvent(numbers * GAUSSIAN_LOSS),
            ]
        )

    def worst_case(self) -> tuple[Values, Values]:
        """(n, 1, K) gradients of the teachers in two worlds that differ in one record the most."""
        first = np.zeros((self.shards.teachers, 1, self.num_classes))
        second = first.copy()
        first[0, 0, 0], second[0, 0, 0] = 1e6 * self.stability, -1e6 * self.stability
        return first, second
