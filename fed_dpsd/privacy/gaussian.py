"""Data-sensitive answers: normalised gradients plus Gaussian noise (arXiv 2601.19090, Alg. 2)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent
from numpy.typing import NDArray

from fed_dpsd.privacy.mechanism import (
    NoiseAt,
    Relation,
    Trust,
    Unit,
    Values,
    check_k,
    check_teachers,
    top_k,
)


@dataclass(frozen=True)
class NormalizedGradient:
    """Top-k masked gradients of norm below beta, one per query and teacher, plus Gaussian noise.

    Guarantee: with a teacher an arbitrary function of its own shard of its client's data, one
    changed record replaces one teacher's bounded answer, so a query's sum moves by at most
    2 * bound in L2 norm, and N adaptive queries are N Gaussian mechanisms of noise multiplier
    noise_multiplier / 2. The bound cancels. A client's n teachers change together, so its sum
    moves by n * bound (the client answers zero) or 2 * n * bound. The papers' sensitivity
    2 * bound * sqrt(K) is loose.

    | input row                    | encoded row                       |
    | ---------------------------- | --------------------------------- |
    | zero, or zero inside the mask | zero                              |
    | any NaN or infinity          | zero                              |
    | anything else                | norm < bound, in float64, clipped last |

    Args:
        num_classes: K, >= 2.
        noise_multiplier: sigma, noise standard deviation divided by `bound`, > 0.
        bound: beta, > 0.
        stability: h, added to the norm before dividing, > 0.
        k: coordinates kept, those of the student's k largest predictions; None keeps all.
        noise_at: "client" (each client its own noise) or "server" (once, on the sum; the server
            then sees un-noised answers and must be trusted).
        teachers: n, teachers at a client, each on a shard of its own, >= 1.

    Raises:
        ValueError: a parameter is out of its range.
    """

    name: ClassVar[str] = "gradient"
    input: ClassVar[Literal["gradient"]] = "gradient"
    num_classes: int
    noise_multiplier: float
    bound: float = 1e-3
    stability: float = 1e-4
    k: int | None = None
    noise_at: NoiseAt = "client"
    teachers: int = 1

    def __post_init__(self) -> None:
        for field in ("noise_multiplier", "bound", "stability"):
            value = getattr(self, field)
            if not 0 < value < math.inf:
                raise ValueError(f"{field}={value} must be a finite number > 0")
        if self.k is not None:
            check_k(self.k, self.num_classes)
        if self.noise_at not in ("client", "server"):
            raise ValueError(f"noise_at={self.noise_at!r} must be 'client' or 'server'")
        check_teachers(self.teachers)

    @property
    def trust(self) -> Trust:
        """The server, where it adds the noise; otherwise nobody."""
        return "server" if self.noise_at == "server" else "nobody"

    def encode(self, sensitive_value: Values, predictions: Values) -> NDArray[np.float64]:
        """Mask, normalise and clip (B, K) gradients to L2 norm at most `bound` per row."""
        sensitive = np.array(sensitive_value, np.float64)
        sensitive[~np.isfinite(sensitive).all(axis=1)] = 0
        sensitive *= self._mask(predictions)
        # Dividing by the largest entry first keeps the squares from overflowing.
        largest = np.abs(sensitive).max(axis=1, keepdims=True, initial=0)
        unit = sensitive / np.where(largest > 0, largest, 1)
        norm = largest * np.linalg.norm(unit, axis=1, keepdims=True)
        with np.errstate(over="ignore"):
            bounded = self.bound * (sensitive / (norm + self.stability))
        length = np.linalg.norm(bounded, axis=1, keepdims=True)
        clipped: NDArray[np.float64] = bounded * np.minimum(
            1, self.bound / np.maximum(length, self.bound)
        )
        return clipped

    def noise(
        self, value: Values, predictions: Values, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """Sum (n, B, K) `value` over n and add N(0, noise_multiplier^2 bound^2), once a query.

        The noise falls on the kept coordinates only.
        """
        total = np.asarray(value, np.float64).sum(0)
        draw = rng.normal(0, self.noise_multiplier * self.bound, total.shape)
        noisy: NDArray[np.float64] = total + draw * self._mask(predictions)
        return noisy

    def sensitivity(self, unit: Unit, relation: Relation) -> float:
        """L2 change of a query's sum: 2 * bound for each replaced teacher, bound for a removed one.

        A record replaces one teacher under either relation (the teacher stays); a client has n.
        """
        changed = self.teachers if unit == "client" else 1
        removed = unit == "client" and relation == "add_remove"
        return changed * (self.bound if removed else 2 * self.bound)

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """One Gaussian mechanism, its noise divided by the sensitivity (bound cancels)."""
        stddev = self.noise_multiplier * self.bound
        return GaussianDpEvent(stddev / self.sensitivity(unit, relation))

    def _mask(self, predictions: Values) -> NDArray[np.bool_]:
        return top_k(predictions, self.num_classes if self.k is None else self.k)
