"""An attack's curve: true and false positive rates, their intervals, and the proofs' caps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from fed_dpsd.audits import rates
from fed_dpsd.audits.lira import Members, Scores

FAILURE = 0.05  # of each interval, both ends together

Claim = tuple[float, float]  # epsilon and delta that are proven together


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
        return float(rates.low(self.true_positives, self.members, FAILURE / 2))

    @property
    def tpr_high(self) -> float:
        """Return the upper end of the true positive rate's interval."""
        return float(rates.high(self.true_positives, self.members, FAILURE / 2))

    @property
    def fpr_high(self) -> float:
        """Return an upper bound on the false positive rate.

        With tied scores, fewer non-members than wanted may be above the threshold. The count then
        depends on the threshold, so the bound uses the wanted number.
        """
        allowed = math.floor(self.wanted * self.non_members)
        return float(rates.high(allowed, self.non_members, FAILURE / 2))

    def exceeds(self, claims: Sequence[Claim]) -> bool:
        """Return whether the interval is above the cap of proven claims, which refutes a proof."""
        return self.tpr_low > cap(self.fpr_high, claims)


def point(scores: Scores, included: Members, wanted: float) -> Point:
    """Return the point of an attack at a false positive rate of at most `wanted`.

    Args:
        scores: scores of guesses, of any shape; larger means a member.
        included: mask of the guesses about members, of the same shape.
        wanted: the rate, in (0, 1).
    """
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
    members, others = int(included.sum()), int((~included).sum())
    ranks = rankdata(np.concatenate([scores[included], scores[~included]]))
    return float((ranks[:members].sum() - members * (members + 1) / 2) / (members * others))


def cap(fpr: float, claims: Sequence[Claim]) -> float:
    """Return the largest true positive rate that proven claims allow at a false positive rate.

    Guarantee: let (epsilon, delta) be proven for a record that is added or removed. The probability
    of guessing "in" for a member is at most e^epsilon times the probability for a non-member, plus
    delta. The same holds for guessing "out", with the worlds exchanged. Both bounds are linear in
    the rates, so they also hold for a mean over records and over the other records' coins.
    (Kairouz, Oh, Viswanath: arXiv 1311.0776, Theorem 2.1.)

    Args:
        fpr: the false positive rate, in [0, 1].
        claims: proven pairs of epsilon, which may be infinite, and delta; if empty, nothing is
            proven.
    """
    bound = 1.0
    for epsilon, delta in claims:
        if epsilon > 700:  # its exponential overflows double precision
            continue
        ratio = math.exp(epsilon)
        bound = min(bound, ratio * fpr + delta, 1 - (1 - delta - fpr) / ratio)
    return bound
