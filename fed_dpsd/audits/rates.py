"""Bounds on rates, and on the epsilon that they imply, from a test's counted hits.

Clopper and Pearson: "The Use of Confidence or Fiducial Limits Illustrated in the Case of the
Binomial", Biometrika 26, 1934.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr
from scipy.stats import beta

CANDIDATES = 100  # thresholds tried on the pilot


def low(hits: ArrayLike, runs: int, failure: float) -> NDArray[np.float64]:
    """Bound a rate from below, with failure probability at most `failure` (Clopper-Pearson)."""
    bound = beta.ppf(failure, hits, runs - np.asarray(hits) + 1)
    return np.where(np.asarray(hits) > 0, bound, 0.0)


def high(hits: ArrayLike, runs: int, failure: float) -> NDArray[np.float64]:
    """Bound a rate from above, with failure probability at most `failure`."""
    return 1 - low(runs - np.asarray(hits), runs, failure)


def log_odds(hits: NDArray[Any], runs: int, failure: float, delta: float) -> NDArray[np.float64]:
    """Bound epsilon from below by (2, ...) true and false positives; `-inf` for no bound."""
    above = np.maximum(low(hits[0], runs, failure) - delta, 0)
    with np.errstate(divide="ignore"):
        bound: NDArray[np.float64] = np.log(above) - np.log(high(hits[1], runs, failure))
    return bound


def best_threshold(pilot: NDArray[np.float64], failure: float, delta: float) -> float:
    """Choose the threshold with the largest bound on a pilot, after smoothing its rates."""
    runs = pilot.shape[1]
    width = np.maximum(pilot.std(axis=1, keepdims=True) * runs ** (-1 / 3), np.finfo(float).tiny)
    candidates = np.linspace(pilot.min(), pilot.max(), CANDIDATES)
    with np.errstate(over="ignore"):  # if all runs are alike
        hits = [ndtr((pilot - candidate) / width).sum(axis=1) for candidate in candidates]
    return float(candidates[np.argmax(log_odds(np.transpose(hits), runs, failure, delta))])
