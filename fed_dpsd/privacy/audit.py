"""Lower bounds on what a mechanism leaks, measured on the object whose noise is drawn.

A proof bounds epsilon from above, an audit from below: a proven number below an audited one means a
bug. The adversary knows every answer but a teacher's and guesses which of two worlds, one record
apart, an answer came from; how well it guesses bounds epsilon (privacy.md, rule 8).
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import beta

from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import (
    Additive,
    Epsilon,
    Mechanism,
    NonPrivate,
    Relation,
    Shared,
    Unit,
    vanishes,
)
from fed_dpsd.privacy.noise import Rng
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse

PREMISE = "one changed record may change its teacher, and so all its answers, arbitrarily"
VALUES_AT_ONCE = 2**18  # drawn by one call of `noise`: 2 MiB, so that it stays in the cache
PILOT = (200, 25_000)  # fewest and most runs that choose a threshold; a quarter between
CANDIDATES = 100  # thresholds tried on the pilot
ROUNDING = 1e-9  # of an enumerated ratio


@dataclass(frozen=True)
class Audit:
    """What one audit shows of one record's replacement; it prints with its meaning.

    Args:
        lower_bound: no epsilon below it holds at `delta`.
        mu_lower_bound: no Gaussian differential privacy of a mu below it holds. It stays a mu: to
            read an epsilon off it would assume a Gaussian trade-off. None: not looked for.
        failure_probability: that either bound is wrong, over the audit's own randomness.
        delta: at which `lower_bound` holds.
        method: "sampling" or "enumeration".
        assumption: what the two worlds take for granted.
        runs: simulated in each world; 0 by enumeration.
        queries: answers in a run.
        audited: the randomness, in words.
    """

    unit: ClassVar[Unit] = "record"
    relation: ClassVar[Relation] = "replace_one"
    lower_bound: float
    mu_lower_bound: float | None
    failure_probability: float
    delta: float
    method: Literal["sampling", "enumeration"]
    assumption: str
    runs: int
    queries: int
    audited: str

    def __str__(self) -> str:
        mu = "" if self.mu_lower_bound is None else f" and mu at least {_down(self.mu_lower_bound)}"
        return (
            f"epsilon at least {_down(self.lower_bound)}{mu} ({self.unit}, {self.relation}, lower "
            f"bound at delta {self.delta:g}, failure probability {self.failure_probability:g}, "
            f"{self.method} of {self.audited}, {self.runs:,} runs, queries {self.queries:,}, "
            f"assuming that {self.assumption})"
        )

    def refutes(self, epsilon: float, delta: float, queries: int) -> bool:
        """Whether (epsilon, delta) is no bound for `queries` answers where a record is replaced.

        Only a claim of no larger delta, and of all the queries in a run, covers what was audited.
        """
        covered = delta <= self.delta and self.queries <= queries
        return covered and self.lower_bound > epsilon + ROUNDING

    def to_json(self) -> dict[str, Any]:
        """All of it; infinity is the string "inf"."""
        bound = "inf" if math.isinf(self.lower_bound) else self.lower_bound
        return vars(self) | {"lower_bound": bound, "unit": self.unit, "relation": self.relation}


def audit(
    mechanism: Mechanism,
    queries: int,
    runs: int,
    delta: float,
    failure_probability: float,
    seed: int,
    report_mu: bool = True,
) -> Audit:
    """Audit a mechanism: by sampling where it adds noise, by enumeration where it responds.

    Both worlds of `worst_case` are simulated `runs` times each. A run counts as the first world
    where its log-likelihood ratio, summed over the queries, reaches a threshold that was fixed on a
    pilot with a random stream of its own. True and false positives then get Clopper-Pearson bounds,
    and epsilon >= log((true_low - delta) / false_high). Compare with the proof of
    `Charge(mechanism, queries, 1)`: with `normalise="batch"` each query is an ask of one row.

    Runs share calls of `noise`, whose rows must be independent draws. `encode` runs once a world.
    What the last bits of a floating-point sum tell is not looked at.

    Args:
        mechanism: the object whose own `encode` and `noise` run.
        queries: in a run, >= 1.
        runs: in each world, >= 1.
        delta: in [0, 1); an enumeration is at 0.
        failure_probability: in (0, 1), for all that is reported together: shared evenly by two
            rates, or by four where `report_mu`.
        seed: of the pilot and the runs.
        report_mu: whether to bound mu as well, at a second threshold, the pilot's median.

    Raises:
        ValueError: an argument is out of its range, or the mechanism randomises no answer.
    """
    for field, count in (("queries", queries), ("runs", runs)):
        if count < 1:
            raise ValueError(f"{field}={count} must be >= 1")
    if not 0 <= delta < 1:
        raise ValueError(f"delta={delta} must be at least 0 and below 1")
    if not 0 < failure_probability < 1:
        raise ValueError(f"failure_probability={failure_probability} must be between 0 and 1")
    if isinstance(mechanism, TopKRandomizedResponse):
        ratio = queries * enumerate_response(mechanism)  # of as many telling responses in a row
        what = "randomised responses"
        return Audit(ratio, None, 0.0, 0.0, "enumeration", PREMISE, 0, queries, what)
    if not isinstance(mechanism, Additive):
        why = (
            "all its noise is in the training of its teacher, and audits of trainings are not here"
        )
        if isinstance(mechanism, NonPrivate):
            why = "its answers leave without noise, and no epsilon holds"
        raise ValueError(
            f"mechanism={mechanism.name!r} leaves nothing to audit by sampling: {why}; audit "
            "'gradient', 'votes' or 'label' instead"
        )
    share = failure_probability / (4 if report_mu else 2)
    pilot_rng, rng = np.random.default_rng(seed).spawn(2)
    pilot = _ratios(mechanism, queries, int(np.clip(runs // 4, *PILOT)), pilot_rng)
    ratios = _ratios(mechanism, queries, runs, rng)
    hits = (ratios >= _best_threshold(pilot, share, delta)).sum(axis=1)
    mu = None
    if report_mu:
        above = (ratios >= np.median(pilot)).sum(axis=1)
        low, high = _low(above[0], runs, share), _high(above[1], runs, share)
        mu = max(0.0, float(ndtri(low) - ndtri(high)))
    return Audit(
        max(0.0, float(_log_odds(hits, runs, share, delta))),
        mu,
        failure_probability,
        delta,
        "sampling",
        PREMISE,
        runs,
        queries,
        _noise(mechanism),
    )


def enumerate_response(mechanism: TopKRandomizedResponse) -> float:
    """The largest log-ratio of any answer's probabilities under any two teachers.

    Each law is `encode`'s own: of a class inside the student's set, of one outside, and of none
    (NaN), for students that find 1 to K classes probable, so that a threshold gives every size.
    """
    num_classes = mechanism.num_classes
    teachers = np.vstack([np.eye(num_classes), np.full(num_classes, math.nan)])
    worst = 0.0
    for predictions in np.tri(num_classes, dtype=np.float32):
        laws = mechanism.encode(teachers, np.broadcast_to(predictions, teachers.shape))
        possible = laws[:, laws.max(axis=0) > 0]
        with np.errstate(divide="ignore"):
            ratios = np.log(possible.max(axis=0) / possible.min(axis=0))
        worst = max(worst, float(ratios.max()))
    return worst


def verdict(audit: Audit, proven: Epsilon, published: float, published_delta: float) -> list[str]:
    """Sentences on what the audit refutes, and what it does not.

    Args:
        audit: of the mechanism that both numbers are about.
        proven: what `prove` says of `Charge(mechanism, audit.queries, 1)`.
        published: the paper's number for `proven`'s queries; `inf` if it claims nothing.
        published_delta: the delta that it claims.
    """
    odds = f"(failure probability {audit.failure_probability:g})"
    weaker = vanishes(proven.unit, proven.relation)  # a promise to a client that leaves altogether
    if audit.refutes(proven.value, proven.delta, proven.queries) and not weaker:
        sentences = [
            f"contradicts the proven epsilon {proven}: the implementation or the proof is wrong "
            f"{odds}: {audit}"
        ]
    elif audit.lower_bound > proven.value + ROUNDING:
        sentences = [f"says nothing of the proven epsilon {proven}, which promises less: {audit}"]
    else:
        sentences = [f"consistent with the proven epsilon {proven}: {audit}"]
    if audit.mu_lower_bound:
        mu = _down(audit.mu_lower_bound)
        sentences.append(f"refuted: Gaussian differential privacy of any mu below {mu} {odds}")
    if audit.refutes(published, published_delta, proven.queries):
        sentences += [
            f"refuted: the published epsilon {published:.3g} as a bound for {audit.audited}, under "
            f"the paper's own premise that {PREMISE} {odds}",
            "not shown: that a particular trained teacher leaks this much",
        ]
    elif math.isfinite(published):
        sentences.append(
            f"not refuted: the published epsilon {published:.3g}, at queries {audit.queries:,} and "
            f"delta {audit.delta:g}; that does not prove it"
        )
    return sentences


# --- simulation -------------------------------------------------------------------------------


def _ratios(mechanism: Additive, queries: int, runs: int, rng: Rng) -> NDArray[np.float64]:
    """(2, runs) log-likelihood ratios, up to constants, of runs in the first and second world."""
    num_classes = mechanism.num_classes
    predictions = np.linspace(1, 0, num_classes, dtype=np.float32)[None]  # the mask keeps class 0
    worlds = [
        np.stack([mechanism.encode(teacher, predictions) for teacher in world])
        for world in mechanism.worst_case()
    ]
    first, second = (world.sum(axis=0) for world in worlds)
    laplace = mechanism.noise_law == "laplace"
    quorum = mechanism.quorum if isinstance(mechanism, Shared) else None
    shares = quorum.honest if quorum else 1
    middle, reach = (first + second) / 2, np.abs(first - second) / 2
    weights = np.sign(first - second)[0] if laplace else (first - second)[0]
    most = max(1, VALUES_AT_ONCE // num_classes)  # rows of a call: parts of a run, or whole runs
    piece = min(queries, most)
    ratios = np.zeros((2, runs))
    for ratio, world in zip(ratios, worlds, strict=True):
        for part in np.split(ratio, range(most // piece, runs, most // piece)):
            for done in range(0, queries, piece):
                rows = len(part) * min(piece, queries - done)
                asked = np.broadcast_to(predictions, (rows, num_classes))
                shape = (len(world), rows, num_classes)
                answers = mechanism.noise(np.broadcast_to(world, shape), asked, rng)
                for _ in range(shares - 1):  # the other clients' shares of the noise
                    answers += mechanism.noise(np.zeros((1, *shape[1:])), asked, rng)
                if laplace:  # half of |answer - second| - |answer - first|, exact where constant
                    answers = np.clip(answers - middle, -reach, reach)
                part += (answers @ weights).reshape(len(part), -1).sum(axis=1)
    return ratios


def _noise(mechanism: Additive) -> str:
    if isinstance(mechanism, NormalizedGradient):
        return "noise N(0, sigma^2 beta^2)"
    return "noise N(0, sigma^2)" if mechanism.noise_law == "gaussian" else "noise Laplace(0, sigma)"


# --- bounds -----------------------------------------------------------------------------------


def _low(hits: ArrayLike, runs: int, share: float) -> NDArray[np.float64]:
    """Clopper-Pearson: a rate is below this with probability at most `share`."""
    bound = beta.ppf(share, hits, runs - np.asarray(hits) + 1)
    return np.where(np.asarray(hits) > 0, bound, 0.0)


def _high(hits: ArrayLike, runs: int, share: float) -> NDArray[np.float64]:
    """Clopper-Pearson: a rate is above this with probability at most `share`."""
    return 1 - _low(runs - np.asarray(hits), runs, share)


def _log_odds(hits: NDArray[Any], runs: int, share: float, delta: float) -> NDArray[np.float64]:
    """The lower bound on epsilon, `-inf` for none, from (2, ...) true and false positives."""
    above = np.maximum(_low(hits[0], runs, share) - delta, 0)
    with np.errstate(divide="ignore"):
        bound: NDArray[np.float64] = np.log(above) - np.log(_high(hits[1], runs, share))
    return bound


def _best_threshold(pilot: NDArray[np.float64], share: float, delta: float) -> float:
    """The threshold of the pilot's largest bound, its rates smoothed: few runs lie in a tail."""
    runs = pilot.shape[1]
    width = np.maximum(pilot.std(axis=1, keepdims=True) * runs ** (-1 / 3), np.finfo(float).tiny)
    candidates = np.linspace(pilot.min(), pilot.max(), CANDIDATES)
    hits = [ndtr((pilot - candidate) / width).sum(axis=1) for candidate in candidates]
    return float(candidates[np.argmax(_log_odds(np.transpose(hits), runs, share, delta))])


def _down(bound: float) -> str:
    """A lower bound, rounded down."""
    return f"{math.floor(bound * 1e3) / 1e3:.3f}" if math.isfinite(bound) else "inf"
