"""Lower bounds from guesses about canaries, which are records added to a data set by fair coins.

Every bound is valid for any treatment of the canaries by the audited algorithm, even if they affect
each other (docs/audits.md, Theorems 12 and 13).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from fed_dpsd.audits.black_box import Audit
from fed_dpsd.privacy.mechanism import Unit

# An event of probability y in one of two neighbouring worlds has at least this probability in the
# other.
Claim = Callable[[float], float]

GUESSED = (1.0, 0.3, 0.1, 0.03, 0.01)  # fractions of the canaries, the surest guesses first
LARGEST = 50.0  # the search for an epsilon or mu ends here
STAKES = np.linspace(0.05, 0.95, 19)  # fractions of the capital at stake


@dataclass(frozen=True)
class Guesses:
    """Guesses about canaries, with the truth."""

    # (R, m) mask of the canaries that fair coins put into the data set, in R independent runs
    included: NDArray[np.bool_]
    # (R, m) log-likelihood ratios, or any numbers with the guess as their sign (positive: included)
    # and the confidence as their size
    scores: NDArray[np.float64]

    @property
    def right(self) -> NDArray[np.bool_]:
        """Return the (R, m) mask of correct guesses."""
        return np.asarray((self.scores > 0) == self.included)


def approximate_dp(epsilon: float, delta: float) -> Claim:
    """Return the claim of (epsilon, delta) differential privacy, in both directions."""
    ratio = math.exp(epsilon)
    return lambda likely: max(0.0, (likely - delta) / ratio, 1 - delta - ratio * (1 - likely))


def joint_claim(claims: Sequence[tuple[float, float]]) -> Claim | None:
    """Return the joint claim of proven pairs of epsilon and delta; None if none is finite."""
    # Above 700 the exponential overflows double precision.
    parts = [approximate_dp(epsilon, delta) for epsilon, delta in claims if epsilon <= 700]
    return (lambda likely: max(part(likely) for part in parts)) if parts else None


def refutes(claim: Claim, canaries: int, made: int, right: int, failure: float) -> bool:
    """Return whether this number of correct guesses refutes a claim.

    If this returns true and the claim is valid for a canary that is added or removed, then at least
    `right` of `made` guesses are correct with a probability below `failure` (Theorem 12; the
    recursion is by Mahloujifar, Melis, Chaudhuri: "Auditing f-Differential Privacy in One
    Run", arXiv 2410.22235v1).

    Args:
        claim: symmetric, increasing and convex.
        canaries: m, the number of canaries, each included by its own fair coin.
        made: number of guesses, 1..m; the adversary may choose which canaries to guess.
        right: number of correct guesses, 0..made.
        failure: the failure probability, in (0, 1).
    """
    # Probabilities, over a uniformly drawn canary, that it is guessed, rightly or wrongly, and that
    # at least `least_right` guesses are right in total.
    hit, missed = failure * right / canaries, failure * (made - right) / canaries
    for least_right in range(right, 0, -1):
        needed = claim(hit)
        if needed <= missed:
            break
        hit += (least_right - 1) / (made - least_right + 1) * (needed - missed)
        missed = needed
        if hit + missed > made / canaries:
            break
    return hit + missed > made / canaries


def largest_refuted(
    family: Callable[[float], Claim], guesses: Guesses, failure: float, tolerance: float = 1e-4
) -> float:
    """Find the largest parameter with a refuted claim, in a family of weakening claims.

    The most confident guesses are tested, at several fractions of the canaries. The tests share the
    failure probability equally.
    """
    best = 0.0
    for counts in _counts(guesses, failure):
        if refutes(family(best + tolerance), *counts):
            low, high = best + tolerance, LARGEST
            while high - low > tolerance:
                middle = (low + high) / 2
                low, high = (middle, high) if refutes(family(middle), *counts) else (low, middle)
            best = low
    return best


def refutes_any(claim: Claim, guesses: Guesses, failure: float) -> bool:
    """Return whether guesses refute a claim, at one of the fractions of `largest_refuted`."""
    return any(refutes(claim, *counts) for counts in _counts(guesses, failure))


def _counts(guesses: Guesses, failure: float) -> Iterator[tuple[int, int, int, float]]:
    """Yield the other arguments of `refutes` for each fraction of the canaries."""
    order = np.argsort(-np.abs(guesses.scores), axis=None, kind="stable")
    right = np.cumsum(guesses.right.ravel()[order])
    for fraction in GUESSED:
        made = math.ceil(fraction * len(order))
        yield len(order), made, int(right[made - 1]), failure / len(GUESSED)


def advantage_at_least(guesses: Guesses, failure: float) -> float:
    """Return a lower bound on the total variation distance of two worlds one canary apart.

    A guess about a fair coin is correct with probability at most (1 + distance) / 2. This also
    bounds the expected fraction of correct guesses in a run (Theorem 13). All canaries are guessed.
    """
    return max(0.0, 2 * _mean_at_least(guesses.right.mean(axis=1), failure) - 1)


def epsilon_at_least(guesses: Guesses, delta: float, failure: float) -> float:
    """Bound epsilon at `delta` from below, using the most confident guess of each run.

    The frequency of correct guesses is at most (e^epsilon + m delta) / (1 + e^epsilon) (Theorem
    13).
    """
    runs, canaries = guesses.scores.shape
    surest = np.abs(guesses.scores).argmax(axis=1)
    right = guesses.right[np.arange(runs), surest].astype(np.float64)
    mean = _mean_at_least(right, failure)
    return max(0.0, math.log(max(mean - canaries * delta, 1e-300) / (1 - mean)))


def _mean_at_least(values: NDArray[np.float64], failure: float) -> float:
    """Bound the mean of R independent variables in [0, 1] from below, if it is at least 1/2.

    The bound is by betting (Waudby-Smith, Ramdas, arXiv 2010.09686, Section 4).
    """
    low, high = 0.5, 1.0
    for _ in range(40):
        mean = (low + high) / 2
        capital = np.log1p(STAKES[:, None] * (values / mean - 1)).sum(axis=1)
        wins = float(np.logaddexp.reduce(capital)) - math.log(len(STAKES)) > -math.log(failure)
        low, high = (mean, high) if wins else (low, mean)
    return low


def conclude(
    guesses: Guesses,
    delta: float,
    failure: float,
    queries: int,
    assumption: str,
    audited: str,
    unit: Unit = "record",
    groups: Sequence[NDArray[np.bool_]] = (),
) -> Audit:
    """Bound from below what adding or removing a canary reveals.

    Epsilon gets half of the failure probability. The advantage, with the mu that implies it, gets
    the other half (Theorem 13). The advantage is the largest over all canaries together and over
    each group, which share its half.

    Args:
        guesses: the guesses of R runs, where R is large, because only runs are independent.
        delta: the delta at which epsilon is bounded, in [0, 1).
        failure: the failure probability of all bounds together, in (0, 1).
        queries: number of answers that the adversary saw in a run; 0 if it saw the training itself.
        assumption: the adversary's view and powers, in words.
        audited: the audited randomness, in words.
        unit: the unit of a canary.
        groups: (m,) masks of canaries of one kind, such as one class.
    """
    runs, canaries = guesses.scores.shape
    members = [np.ones(canaries, bool), *groups]
    each = failure / 2 / len(members)
    parts = [Guesses(guesses.included[:, own], guesses.scores[:, own]) for own in members]
    advantage = max(advantage_at_least(part, each) for part in parts)
    return Audit(
        epsilon_at_least(guesses, delta, failure / 2),
        float(2 * ndtri((1 + advantage) / 2)),
        failure,
        delta,
        "canaries",
        assumption,
        runs,
        queries,
        audited,
        "add_remove",
        advantage,
        canaries,
        unit,
    )
