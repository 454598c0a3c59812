"""Label-sensitive answers: top-k randomised response (arXiv 2601.19090, Eq. 5 and Alg. 2)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from dp_accounting import DpEvent, RandomizedResponseDpEvent, SelfComposedDpEvent
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
class TopKRandomizedResponse:
    """The teacher's class, randomised among the student's k most probable classes.

    Let I be the student's top k (public) and r the teacher's class. r in I is returned with
    probability e^eps0 / (e^eps0 + k - 1) and each other member with 1 / (e^eps0 + k - 1); r
    outside I returns a uniform member. Alg. 2's k = |I| is used; Eq. 5 as printed divides by the
    number of classes and could leave I.

    Guarantee: one response is eps0-locally private (r outside I is a k-ary response to a uniform
    member, so replacing r within I is the worst case). N responses compose: one changed training
    record may change its teacher and so all N of them. The published claim of eps0 overall is the
    loss of a single response. A client's n teachers change together, so for a client each query
    counts n responses.

    Args:
        num_classes: K, >= 2.
        epsilon_per_answer: eps0, >= 0.
        k: size of I, 2 <= k <= K; None is K.
        teachers: n, teachers at a client, each on a shard of its own, >= 1.

    Raises:
        ValueError: a parameter is out of its range.
    """

    name: ClassVar[str] = "label"
    input: ClassVar[Literal["probabilities"]] = "probabilities"
    noise_at: ClassVar[NoiseAt] = "client"
    trust: ClassVar[Trust] = "nobody"
    num_classes: int
    epsilon_per_answer: float
    k: int | None = None
    teachers: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon_per_answer < math.inf:
            raise ValueError(
                f"epsilon_per_answer={self.epsilon_per_answer} must be a finite number >= 0"
            )
        check_k(self.size, self.num_classes)
        check_teachers(self.teachers)

    @property
    def size(self) -> int:
        """Size of I: k, or all classes."""
        return self.num_classes if self.k is None else self.k

    @property
    def lie_probability(self) -> float:
        """Probability of each single class of I other than the true one."""
        truth = math.exp(-self.epsilon_per_answer)
        return truth / (1 + (self.size - 1) * truth)

    def encode(self, sensitive_value: Values, predictions: Values) -> NDArray[np.float64]:
        """The law of the response: (B, K) probabilities, zero outside I.

        A row of `sensitive_value` with NaN or infinity has no class: uniform over I.
        """
        sensitive_valid = np.atleast_1d(np.isfinite(sensitive_value).all(axis=1))
        sensitive_class = np.where(sensitive_valid[:, None], sensitive_value, 0).argmax(1)
        members = top_k(predictions, self.size)
        listed = np.take_along_axis(members, sensitive_class[:, None], axis=1)[:, 0]
        inside: NDArray[np.bool_] = np.logical_and(listed, sensitive_valid)
        law = np.where(inside[:, None], self.lie_probability, 1 / self.size) * members
        law[inside, sensitive_class[inside]] = 1 - (self.size - 1) * self.lie_probability
        return law

    def noise(
        self, value: Values, predictions: Values, rng: np.random.Generator
    ) -> NDArray[np.unsignedinteger]:
        """Draw a class from each row of each teacher's law; (n, B, K) to (B, K) counts of votes."""
        cumulative = np.cumsum(value, axis=-1)
        draw = rng.random((*value.shape[:-1], 1)) * cumulative[..., -1:]
        answer = (draw >= cumulative).sum(axis=-1)
        smallest = np.min_scalar_type(len(value))
        votes: NDArray[np.unsignedinteger] = (
            np.eye(self.num_classes)[answer].sum(0).astype(smallest)
        )
        return votes

    def sensitivity(self, unit: Unit, relation: Relation) -> float:
        """Log-ratio bound of a query: eps0, or n * eps0 where a client's teachers all change."""
        return self.epsilon_per_answer * (self.teachers if unit == "client" else 1)

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """k-ary randomised response; its noise parameter is the probability of a uniform redraw."""
        response = RandomizedResponseDpEvent(
            noise_parameter=self.size * self.lie_probability, num_buckets=self.size
        )
        many = unit == "client" and self.teachers > 1
        return SelfComposedDpEvent(response, self.teachers) if many else response
