"""Readings of the paper's gradient noise that prove nothing (arXiv 2601.19090, Eq. 3).

They show what the printed accuracies would require (conf/experiment/data_sensitive_readings.yaml).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from dp_accounting import DpEvent, NonPrivateDpEvent
from numpy.typing import NDArray

from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import Relation, Unit, Values
from fed_dpsd.privacy.noise import Rng, noisy_sum

REASONS = {
    "one_draw": "all images of a batch share their noise, so differences between answers have none",
    "inside_mask": "noise inside the teacher's own mask shows which classes it kept",
}


@dataclass(frozen=True)
class GradientReading(NormalizedGradient):
    """Normalised gradients with noise that does not hide them: a reading of Eq. 3.

    Guarantee: none, for any unit and relation.

    Args:
        draws: "one_draw" adds the same draw of noise to all B images of a request. Neither paper
            prints this: Eq. 3 has noise in each summand, and Eq. 4 of DPDFD (IJCAI 2023) has one
            draw for a batch's sum. "inside_mask" adds noise only to the coordinates that the
            teacher's mask keeps.
    """

    name: ClassVar[str] = "gradient_reading"
    draws: Literal["one_draw", "inside_mask"] = "one_draw"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_multiplier == 0:
            raise ValueError("noise_multiplier=0 is not supported; use answers=gradient")
        if self.k is not None and self.mask == "public":
            raise ValueError(
                f"k={self.k} with mask='public' is not supported; "
                "use mask=private or signed, or k=null"
            )
        if self.draws not in REASONS:
            raise ValueError(f"draws={self.draws!r} must be 'one_draw' or 'inside_mask'")
        if self.noise_at == "distributed":
            raise ValueError("noise_at='distributed' is not supported; use client or server")

    @property
    def reason(self) -> str:  # type: ignore[override]
        """Return why nothing is proven."""
        return REASONS[self.draws]

    def add_noise(self, value: Values, predictions: Values, rng: Rng) -> NDArray[np.float64]:
        """Sum (n, B, K) `value` over n, and add noise according to `draws`."""
        exact = np.asarray(value.sum(0), np.float64)
        if self.draws == "inside_mask":
            noise = noisy_sum(np.zeros_like(value[:1]), self.scale, self.noise_law, rng)
            return np.asarray(exact + noise * (exact != 0))
        noise = noisy_sum(np.zeros_like(value[:1, :1]), self.scale, self.noise_law, rng)
        return np.asarray(exact + noise)

    def describe(self) -> str:
        """Describe what leaves a client."""
        return f"{self._gradients}, with a reading of the paper's noise that proves nothing"

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return the non-private event, which has an infinite epsilon."""
        return NonPrivateDpEvent()
