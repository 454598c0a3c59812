"""LiRA: scores that distinguish members of the training data, by shadow runs.

Carlini et al.: "Membership Inference Attacks From First Principles", arXiv 2112.03570. The logit is
a monotone function of the loss, so thresholding it is the attack of Yeom et al., arXiv 1709.01604.
"""

import numpy as np
from numpy.typing import NDArray

SHRINKAGE = 8  # shadow runs that the pooled variance of all records counts as
SMALLEST_VARIANCE = 1e-6
TINY = 1e-30  # probabilities are at least this

Scores = NDArray[np.float64]
Members = NDArray[np.bool_]


def logits(probabilities: NDArray[np.floating], labels: NDArray[np.int64]) -> Scores:
    """Return (N,) values log(p / (1 - p)) of each record's class, from (N, K) and (N,) arrays.

    The value is 0 where a model's answer is NaN, so that one such run does not spoil attacks on
    others.
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
