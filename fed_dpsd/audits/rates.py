"""Statistics of attacks: LiRA's scores, rates with their intervals, and the proofs' caps.

LiRA is by Carlini et al.: "Membership Inference Attacks From First Principles", arXiv 2112.03570.
The logit is a monotone function of the loss, so thresholding it is the attack of Yeom et al., arXiv
1709.01604. Bounds on rates are by Clopper and Pearson: "The Use of Confidence or Fiducial Limits
Illustrated in the Case of the Binomial", Biometrika 26, 1934.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr
from scipy.stats import beta
from sklearn.metrics import roc_auc_score

SHRINKAGE = 8  # shadow runs that the pooled variance of all records counts as
SMALLEST_VARIANCE = 1e-6
TINY = 1e-30  # probabilities are at least this

Scores = NDArray[np.float64]
Members = NDArray[np.bool_]
CANDIDATES = 100  # thresholds tried on the pilot
FAILURE = 0.05  # of each interval, both ends together

Claim = tuple[float, float]  # epsilon and delta that are proven together


def logits(probabilities: NDArray[np.floating], labels: NDArray[np.int64]) -> Scores:
    """Return (N,) values log(p / (1 - p)) of each record's class, from (N, K) and (N,) arrays.

    The value is 0 where a model's answer is NaN, so that attacks on other runs remain possible.
    """
    sensitive = np.nan_to_num(probabilities.astype(np.float64))
    own = sensitive[np.arange(len(labels)), labels]
    sensitive[np.arange(len(labels)), labels] = 0
    return np.asarray(np.log(np.maximum(own, TINY)) - np.log(np.maximum(sensitive.sum(1), TINY)))


def lira(shadows: Scores, included: Members, targets: Scores) -> Scores:
    """Return log-likelihood ratios of membership, by LiRA's online attack.

    A record's scores in shadow runs with and without it are modelled as two normal distributions. A
    record in all shadow runs, or in none, has ratio 0.

    Args:
        shadows: (S, N) `logits` of N records in S shadow runs.
        included: (S, N) mask of the records in each shadow run's data.
        targets: (T, N) `logits` in the runs under attack, which are not shadow runs.
    """
    parts = []
    for chosen in (included, ~included):
        counts = chosen.sum(0)
        means = np.where(chosen, shadows, 0).sum(0) / np.maximum(counts, 1)
        squares = (np.where(chosen, shadows - means, 0) ** 2).sum(0)
        pooled = squares.sum() / max(1, (counts - 1).clip(0).sum())
        freedom = (counts - 1).clip(0) + SHRINKAGE
        variances = np.maximum((squares + SHRINKAGE * pooled) / freedom, SMALLEST_VARIANCE)
        likelihood = -((targets - means) ** 2) / (2 * variances) - np.log(variances) / 2
        parts.append(np.where(counts > 0, likelihood, np.nan))
    return np.nan_to_num(parts[0] - parts[1])


def rate_at_least(hits: ArrayLike, runs: int, failure: float) -> NDArray[np.float64]:
    """Bound a rate from below, with failure probability at most `failure` (Clopper-Pearson)."""
    bound = beta.ppf(failure, hits, runs - np.asarray(hits) + 1)
    return np.where(np.asarray(hits) > 0, bound, 0.0)


def rate_at_most(hits: ArrayLike, runs: int, failure: float) -> NDArray[np.float64]:
    """Bound a rate from above, with failure probability at most `failure`."""
    return 1 - rate_at_least(runs - np.asarray(hits), runs, failure)


def epsilon_lower_bound(
    hits: NDArray[Any], runs: int, failure: float, delta: float
) -> NDArray[np.float64]:
    """Bound epsilon from below, given (2, ...) true and false positives; `-inf` for no bound."""
    above = np.maximum(rate_at_least(hits[0], runs, failure) - delta, 0)
    with np.errstate(divide="ignore"):
        bound: NDArray[np.float64] = np.log(above) - np.log(rate_at_most(hits[1], runs, failure))
    return bound


def best_threshold(pilot: NDArray[np.float64], failure: float, delta: float) -> float:
    """Choose the threshold with the largest bound on a pilot, after smoothing its rates."""
    runs = pilot.shape[1]
    width = np.maximum(pilot.std(axis=1, keepdims=True) * runs ** (-1 / 3), np.finfo(float).tiny)
    candidates = np.linspace(pilot.min(), pilot.max(), CANDIDATES)
    with np.errstate(over="ignore"):  # if all runs are alike
        hits = [ndtr((pilot - candidate) / width).sum(axis=1) for candidate in candidates]
    return float(
        candidates[np.argmax(epsilon_lower_bound(np.transpose(hits), runs, failure, delta))]
    )


@dataclass(frozen=True)
class Point:
    """A point of an attack's curve: the rates at a threshold, with intervals.

    The threshold is the lowest score of a non-member with at most a fraction `wanted` of the
    non-members above it. So `fpr_high` bounds the rate above an order statistic, which is Clopper
    and Pearson's bound for the wanted number. Intervals treat guesses as independent, which is not
    quite true within one run.
    """

    wanted: float  # the requested false positive rate
    false_positives: int  # the number of non-members above the threshold
    non_members: int  # the number of non-members
    true_positives: int  # the number of members above the threshold
    members: int  # the number of members

    @property
    def resolved(self) -> bool:
        """Return whether there are enough non-members for at least one false positive."""
        return self.wanted * self.non_members >= 1

    @property
    def tpr(self) -> float:
        """Return the true positive rate."""
        return self.true_positives / self.members

    @property
    def tpr_low(self) -> float:
        """Return the lower end of the true positive rate's interval."""
        return float(rate_at_least(self.true_positives, self.members, FAILURE / 2))

    @property
    def tpr_high(self) -> float:
        """Return the upper end of the true positive rate's interval."""
        return float(rate_at_most(self.true_positives, self.members, FAILURE / 2))

    @property
    def fpr_high(self) -> float:
        """Return an upper bound on the false positive rate.

        With tied scores, fewer non-members than wanted may be above the threshold. The count then
        depends on the threshold, so the bound uses the wanted number.
        """
        allowed = math.floor(self.wanted * self.non_members)
        return float(rate_at_most(allowed, self.non_members, FAILURE / 2))

    def exceeds(self, claims: Sequence[Claim]) -> bool:
        """Return whether the interval is above the cap of proven claims, which refutes a proof."""
        return self.tpr_low > tpr_cap(self.fpr_high, claims)


def point_at(scores: Scores, included: Members, wanted: float) -> Point:
    """Return the point of an attack at a false positive rate of at most `wanted`."""
    members, others = scores[included], np.sort(scores[~included])[::-1]
    threshold = others[math.floor(wanted * len(others))]
    return Point(
        wanted,
        int((others > threshold).sum()),
        len(others),
        int((members > threshold).sum()),
        len(members),
    )


def auc(scores: Scores, included: Members) -> float:
    """Return the probability that a member's score exceeds a non-member's; ties count half."""
    return float(roc_auc_score(included.ravel(), scores.ravel()))


def tpr_cap(fpr: float, claims: Sequence[Claim]) -> float:
    """Return the largest true positive rate that proven claims allow at a false positive rate.

    Guarantee: let (epsilon, delta) be proven for a record that is added or removed. The probability
    of guessing "in" for a member is at most e^epsilon times the probability for a non-member, plus
    delta. The same holds for guessing "out", with the worlds exchanged. Both bounds are linear in
    the rates, so they also hold for a mean over records and over the other records' coins.
    (Kairouz, Oh, Viswanath: arXiv 1311.0776, Theorem 2.1.)
    """
    bound = 1.0
    for epsilon, delta in claims:
        if epsilon > 700:  # its exponential overflows double precision
            continue
        ratio = math.exp(epsilon)
        bound = min(bound, ratio * fpr + delta, 1 - (1 - delta - fpr) / ratio)
    return bound
