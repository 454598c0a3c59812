"""One noisy sum of all gradients of a request: Eq. 4 of DPDFD (Liu et al., IJCAI 2023)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import Values, check_noise
from fed_dpsd.privacy.noise import Rng

MOST_IMAGES = 1_024  # in a request; the sum of more might not be exact


@dataclass(frozen=True)
class GradientSum(NormalizedGradient):
    """The sum of a request's normalised gradients plus one Gaussian draw, in its first row.

    Guarantee: a changed teacher changes all B gradients of a request together, so their sum moves
    by 2 * bound * B, or by 2 * bound * sqrt(B) if the whole batch has norm below `bound`. This is
    one Gaussian mechanism with noise multiplier noise_multiplier / (2 B), or noise_multiplier / (2
    sqrt(B)). It costs as much as B^2, or B, mechanisms with noise multiplier noise_multiplier / 2
    (docs/proofs.md, Theorem 17). A request is charged as that many releases. DPDFD's Theorem 3
    counts B.

    The mean over the B rows is the noisy mean gradient of Eq. 4; the other rows are zero.
    """

    name: ClassVar[str] = "gradient_sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_noise(self.noise_multiplier, self.noise_at, self.shards.teachers * MOST_IMAGES)
        if self.k is not None and self.mask == "public":
            raise ValueError(
                f"k={self.k} with mask='public': each image of a sum has a different mask; "
                "use mask=private or signed, or k=null"
            )

    @property
    def most_numbers(self) -> int:
        """Return the number of classes, since a request has one noisy row."""
        return self.num_classes

    def constrain_sensitivity(
        self, sensitive_value: Values, predictions: Values
    ) -> NDArray[np.float64]:
        """Mask, normalise and clip (B, K) gradients, and put their sum in the first of B rows."""
        rows = super().constrain_sensitivity(sensitive_value, predictions)
        summed = np.zeros_like(rows)
        summed[:1] = rows.sum(axis=0)
        return summed

    def add_noise(self, value: Values, predictions: Values, rng: Rng) -> NDArray[np.float64]:
        """Sum (n, B, K) `value` over n and add the noise of `scale` to the first row.

        Raises:
            ValueError: the request has too many images for an exact sum.
        """
        images = value.shape[1]
        if images > MOST_IMAGES:
            raise ValueError(
                f"{images:,} images in a request; answers=gradient_sum takes at most "
                f"{MOST_IMAGES:,}; send fewer queries per round"
            )
        noisy = np.zeros(value.shape[1:])
        noisy[:1] = super().add_noise(value[:, :1], predictions[:1], rng)
        return noisy

    def admissible(self, values: Values, predictions: Values, teachers: int) -> NDArray[np.bool_]:
        """Mark the rows that are zero, and the first row if it is not too long."""
        images = len(values)
        longest = images if self.normalise == "sample" else np.sqrt(images)
        first = super().admissible(values[:1], predictions[:1], int(np.ceil(teachers * longest)))
        return np.concatenate([first, ~values[1:].any(axis=1)])

    def check(self, config: Any, method: Any, training: Any) -> list[str]:
        """Return the problems with these answers in an experiment."""
        problems = super().check(config, method, training)
        if getattr(method, "mean_over", None) != "batch":
            problems.append(
                "answers=gradient_sum releases one gradient for all images of a round; use "
                "method=dpdfd, or another method with method.mean_over=batch"
            )
        return problems

    def describe(self) -> str:
        """Describe what leaves a client."""
        return f"the sum of a round's {self._gradients}, with {self._noise}"

    def releases(self, requests: int, queries: int) -> int:
        """Return B^2 for each request of B queries, or B if the whole request is normalised."""
        return requests * (queries**2 if self.normalise == "sample" else queries)
