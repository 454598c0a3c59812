"""Label-sensitive answers: top-k randomised response (arXiv 2601.19090, Eq. 5 and Alg. 2)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    NonPrivateDpEvent,
    RandomizedResponseDpEvent,
    SelfComposedDpEvent,
)
from numpy.typing import NDArray

from fed_dpsd import losses
from fed_dpsd.privacy.events import FinitePrecisionDpEvent, ShuffledResponseDpEvent
from fed_dpsd.privacy.mechanism import (
    ONE_TEACHER,
    Mechanism,
    Quorum,
    Relation,
    Shards,
    StudentLoss,
    Unit,
    Values,
    check_k,
    check_noise_at,
    one_class_changed,
    top_k,
)
from fed_dpsd.privacy.noise import UNIFORM_STEP, Rng

MOST_COUNTED = 4096  # responses charged as counted together; more would only cost less
MOST_PRECISION = 2.0**-16  # precision loss of all of them in one query
LARGEST_EPSILON = 20.0  # a uniform draw has 53 bits, and a lie must keep its probability


@dataclass(frozen=True)
class TopKRandomizedResponse(Mechanism):
    """The teacher's class, randomised among a set I of classes that the student finds probable.

    I is public: the student's k most probable classes or, with `threshold` (DP-DFD's selective
    randomised response), all classes above it and at least two. Let r be the teacher's class and
    k = |I|. If r is in I, it is returned with probability e^eps0 / (e^eps0 + k - 1), and each other
    member with 1 / (e^eps0 + k - 1). If r is outside I, a uniform member is returned. This is
    Alg. 2. Eq. 5 as printed (`lies="classes"`) uses all K classes instead of I if r is in I. A
    response outside I then reveals that r is in I, so nothing is proven unless I contains all
    classes.

    Guarantee: one response is eps0-locally private (with r outside I, it is a k-ary response to a
    uniform member, so replacing r within I is the worst case). N responses compose, because one
    changed training record may change its teacher and thus all N responses. The published claim,
    eps0 overall, is the loss of a single response. With a threshold, k varies, and k = 2 is
    charged, which dominates every eps0-private response. A client's n teachers change together, so
    for a client, each query counts as n responses.

    With noise_at="distributed", only the counts over all clients are seen, in a secure sum that has
    at least M = quorum.honest * n honest responses. For one changed teacher, a query then costs a
    ShuffledResponseDpEvent, since the counts reveal less than the response. With a threshold, or if
    more than one teacher changes, the response itself is charged, since counts are post-processing.
    """

    name: ClassVar[str] = "label"
    input: ClassVar[Literal["probabilities"]] = "probabilities"
    shares: ClassVar[bool] = True
    calibrated_by: ClassVar[str] = "epsilon_per_answer"
    lattice: ClassVar[float] = 1.0
    num_classes: int  # K, >= 2
    # eps0, in [0, 20]; inf returns the teacher's own class (or a uniform member of I if it is
    # outside), and nothing is proven
    epsilon_per_answer: float
    k: int | None = None  # size of I, 2 <= k <= K; None for K
    # probability in [0, 1) above which a class belongs to I; replaces k
    threshold: float | None = None
    # "client", or "distributed" for responses that a secure sum counts
    noise_at: Literal["client", "distributed"] = "client"
    quorum: Quorum | None = None  # the quorum of the secure sum; only with noise_at="distributed"
    shards: Shards = ONE_TEACHER  # the client's teachers
    # "candidates" (a lie is a member of I) or "classes" (Eq. 5 as printed).
    lies: Literal["candidates", "classes"] = "candidates"

    def __post_init__(self) -> None:
        if not (0 <= self.epsilon_per_answer <= LARGEST_EPSILON or self.truthful):
            raise ValueError(
                f"epsilon_per_answer={self.epsilon_per_answer} must be between 0 and "
                f"{LARGEST_EPSILON:g} (rarer lies are never drawn), or inf for no lies"
            )
        if self.truthful and self.noise_at != "client":
            raise ValueError(
                f"epsilon_per_answer=inf adds no noise, so noise_at={self.noise_at} must be client"
            )
        if self.k is not None:
            check_k(self.k, self.num_classes)
        if self.threshold is not None and (self.k is not None or not 0 <= self.threshold < 1):
            raise ValueError(
                f"threshold={self.threshold} must be at least 0 and below 1, and replaces "
                f"k={self.k}; give one of them"
            )
        if self.noise_at not in ("client", "distributed"):
            raise ValueError(f"noise_at={self.noise_at!r} must be 'client' or 'distributed'")
        check_noise_at(self.noise_at, self.quorum)

    @property
    def reason(self) -> str | None:
        """Return why nothing is proven for lies among all classes."""
        if not self._reveals_membership:
            return None
        return "a response outside the candidates reveals that the teacher's class is inside"

    @property
    def _reveals_membership(self) -> bool:
        """Return whether a response may reveal that the teacher's class is in I."""
        whole = self.threshold is None and self.k in (None, self.num_classes)
        return self.lies == "classes" and not whole

    @property
    def truthful(self) -> bool:
        """Return whether teachers never lie; if so, nothing is proven for their answers."""
        return self.epsilon_per_answer == math.inf

    def members(self, predictions: Values) -> NDArray[np.bool_]:
        """Return the (B, K) mask of I, from the public predictions."""
        if self.threshold is not None:
            return np.asarray(predictions > self.threshold) | top_k(predictions, 2)
        return top_k(predictions, self.num_classes if self.k is None else self.k)

    def lie_probability(self, size: NDArray[np.int64] | int) -> NDArray[np.float64]:
        """Return the probability of each class of I other than the true one, for |I| = `size`."""
        lie = math.exp(-self.epsilon_per_answer)
        return np.asarray(lie / (1 + (np.asarray(size) - 1) * lie))

    def constrain_sensitivity(
        self, sensitive_value: Values, predictions: Values
    ) -> NDArray[np.float64]:
        """Return the law of the response: (B, K) probabilities.

        A row of `sensitive_value` with NaN or infinity has no class, and its law is uniform over I.
        """
        sensitive_valid = np.atleast_1d(np.isfinite(sensitive_value).all(axis=1))
        sensitive_class = np.where(sensitive_valid[:, None], sensitive_value, 0).argmax(1)
        members = self.members(predictions)
        size = members.sum(1)  # (B,)
        among = members | (self.lies == "classes")  # (B, K): possible lies for a class in I
        lie = self.lie_probability(among.sum(1))
        listed = np.take_along_axis(members, sensitive_class[:, None], axis=1)[:, 0]
        inside: NDArray[np.bool_] = np.logical_and(listed, sensitive_valid)
        law: NDArray[np.float64] = np.where(
            inside[:, None], lie[:, None] * among, members / size[:, None]
        )
        law[inside, sensitive_class[inside]] = (1 - (among.sum(1) - 1) * lie)[inside]
        return law

    def add_noise(
        self, value: Values, predictions: Values, rng: Rng
    ) -> NDArray[np.unsignedinteger]:
        """Draw a class from each row of the teachers' (n, B, K) laws; return (B, K) vote counts."""
        cumulative = np.cumsum(value, axis=-1)
        draw = rng.random((*value.shape[:-1], 1)) * cumulative[..., -1:]
        response = (draw >= cumulative).sum(axis=-1)
        smallest = np.min_scalar_type(len(value))
        votes: NDArray[np.unsignedinteger] = (
            np.eye(self.num_classes)[response].sum(0).astype(smallest)
        )
        return votes

    def admissible(self, values: Values, predictions: Values, teachers: int) -> NDArray[np.bool_]:
        """Mark the rows that are counts of possible classes, with one response per teacher."""
        counts = (values >= 0) & (values == np.round(values))
        possible = self.members(predictions) | (self.lies == "classes")
        inside = ((values == 0) | possible).all(axis=1)
        answered = values.sum(axis=1, dtype=np.float64) == teachers
        return np.asarray(counts.all(axis=1) & inside & answered)

    def student_loss(self, predictions: Values) -> StudentLoss:
        """Return the likelihood of the responses, whose law is public, or the cross-entropy."""
        if self.lies != "candidates":
            return super().student_loss(predictions)
        members = self.members(predictions)
        lies = self.lie_probability(members.sum(1, keepdims=True))
        public = [torch.from_numpy(array).float() for array in (members, lies)]
        return lambda logits, labels, chosen: losses.response_loss(
            logits, labels, *(array[chosen].to(logits.device) for array in public)
        )

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return a response's event, on its own or, if one teacher changes, in a secure sum.

        The response's noise parameter is the probability of a uniform redraw. Every changed teacher
        is counted. Removing a client costs at most as much as changing its answers.
        """
        if self.truthful or self._reveals_membership:
            return NonPrivateDpEvent()
        size = 2 if self.threshold is not None else (self.k or self.num_classes)
        changed = self.shards.changed(unit)
        if self.quorum and changed == 1 and self.threshold is None and self.epsilon_per_answer > 0:
            # Fewer responses hide less, so it is safe to charge fewer. If lies are very rare, the
            # other responses hide nothing, and their precision loss costs more than they save.
            precise = max(1, math.floor(MOST_PRECISION / self._precision.loss))
            honest = self.quorum.honest * self.shards.teachers
            responses = min(honest, MOST_COUNTED, precise)
            counted = ShuffledResponseDpEvent(self.epsilon_per_answer, size, responses)
            lost = FinitePrecisionDpEvent(responses * self._precision.loss)  # of all responses
            return ComposedDpEvent([counted, lost])
        redraw = float(size * self.lie_probability(size))
        drawn = RandomizedResponseDpEvent(noise_parameter=redraw, num_buckets=size)
        response: DpEvent = ComposedDpEvent([drawn, self._precision])
        return response if changed == 1 else SelfComposedDpEvent(response, changed)

    @property
    def _precision(self) -> FinitePrecisionDpEvent:
        """Return the loss due to probabilities that differ by a few steps of a uniform draw.

        The error of a sum of up to K probabilities, and of the draw, is below 2 (K + 2) steps.
        """
        size = self.k or self.num_classes
        off = 2 * (size + 2) * UNIFORM_STEP / float(self.lie_probability(size))
        return FinitePrecisionDpEvent(2 * off)

    def describe(self) -> str:
        """Describe what leaves a client."""
        every = self.k is self.threshold is None
        return (
            "a label for each image, randomly the teacher's or one of "
            f"{'all classes' if every else 'the classes that the student finds likely'} "
            f"(randomised response, answers.epsilon_per_answer={self.epsilon_per_answer:g})"
        )

    def squared_snr(self, clients: int, teachers: int) -> float:
        """Return the squared signal-to-noise ratio of a query's responses."""
        lies, odds = (self.k or self.num_classes) - 1, math.exp(self.epsilon_per_answer)
        truth = (odds - 1) / (odds + lies) if math.isfinite(odds) else 1.0
        return clients * (lies + 1) * truth**2

    def worst_case(self) -> tuple[Values, Values]:
        """Return the teachers' (n, 1, K) probabilities in two worlds, one record apart."""
        return one_class_changed(self.shards.teachers, self.num_classes)
