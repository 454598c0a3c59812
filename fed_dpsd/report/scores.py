"""Scores of a student on test images, with 95 % intervals that treat images as independent.

The positive class is the second class. An image counts as positive if the student gives this class
a probability of at least the threshold.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.report.numbers import Z, wilson

ALL = "all test images"
FEWEST = 10  # images of each class, for the interval of an AUROC

Interval = tuple[float, float, float]  # a value with the ends of its interval


@dataclass(frozen=True)
class Predictions:
    """A student's predictions for the test images."""

    probabilities: NDArray[np.float32]  # (N, K) float
    labels: NDArray[np.int64]  # (N,) true classes, 0..K-1
    # (N,) bool mask of the images that may be used to choose a threshold. Copies of an image have
    # the same value, and so do images of the same patient if patients are known.
    choosing: NDArray[np.bool_]


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold, with the numbers of images that it classifies correctly."""

    threshold: float  # the least probability at which an image counts as positive
    origin: str  # the data that the threshold was chosen on, in words
    images: str  # the images that the threshold is tested on, in words
    # the number of positive images classified correctly, and of all positive images
    positives: tuple[int, int]
    # the number of negative images classified correctly, and of all negative images
    negatives: tuple[int, int]
    marked: bool = False  # whether the page starts with this threshold


def auroc(probabilities: NDArray[np.floating], labels: NDArray[np.int64]) -> float | None:
    """Return the area under the ROC curve in [0, 1].

    For two classes, it is the area of class 1; otherwise, it is the mean over classes of the area
    of each class against the rest. It is None if a class is absent from `labels`, or a probability
    is not finite.

    Args:
        probabilities: (N, K).
        labels: (N,) true classes, 0..K-1.
    """
    # The Mann-Whitney statistic: scikit-learn's is 80 times slower on a few hundred images.
    areas = [
        _below(scores[~positive], scores[positive]).mean()
        for scores, positive in _against_the_rest(probabilities, labels)
    ]
    return float(np.mean(areas)) if areas else None


def auroc_with_interval(predictions: Predictions) -> Interval | None:
    """Return the `auroc` with its interval; None if it is undefined.

    The variance is DeLong's (DeLong, DeLong and Clarke-Pearson, 1988), extended to the mean over
    classes by adding up each image's influence; the interval is computed on the logit scale. The
    interval is (0, 1) if the variance is 0, as for an area of 1, or if a class has fewer than
    `FEWEST` images, which would make it too narrow.
    """
    labels = predictions.labels
    if (value := auroc(predictions.probabilities, labels)) is None:
        return None
    parts, influence = _against_the_rest(predictions.probabilities, labels), np.zeros(len(labels))
    for scores, positive in parts:
        # For each positive image, the fraction of negative ones with smaller scores; for each
        # negative image, the fraction of positive ones with larger scores. Ties count half.
        won = np.empty(len(labels))
        won[positive] = _below(scores[~positive], scores[positive])
        won[~positive] = 1 - _below(scores[positive], scores[~positive])
        share = np.where(positive, positive.sum(), (~positive).sum())
        own = (won - won[positive].mean()) / np.sqrt(share * np.maximum(share - 1.0, 1))
        influence += own / len(parts)
    deviation = math.sqrt(float(np.square(influence).sum()))
    few = np.bincount(labels).min() < FEWEST
    if not 0 < value < 1 or not deviation or few:
        return value, 0.0, 1.0
    centre, reach = math.log(value / (1 - value)), Z * deviation / value / (1 - value)
    low, high = (1 / (1 + math.exp(-x)) for x in (centre - reach, centre + reach))
    return value, low, high


def _against_the_rest(
    probabilities: NDArray[np.floating], labels: NDArray[np.int64]
) -> list[tuple[NDArray[np.floating], NDArray[np.bool_]]]:
    """Return the scores and the positive images by class; empty if there is no area."""
    num_classes = probabilities.shape[1]
    if not np.isfinite(probabilities).all() or len(np.unique(labels)) < num_classes:
        return []
    classes = [1] if num_classes == 2 else range(num_classes)
    return [(probabilities[:, k], labels == k) for k in classes]


def _below(others: NDArray[np.floating], scores: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return, for each score, the fraction of `others` below it; ties count half."""
    others = np.sort(others)
    left, right = (np.searchsorted(others, scores, side) for side in ("left", "right"))
    return np.asarray((left + right) / 2 / len(others))


def roc(predictions: Predictions) -> list[tuple[float, float]]:
    """Return (false positive rate, sensitivity) at every threshold, from (0, 0) to (1, 1)."""
    from sklearn.metrics import roc_curve

    scores, positive = predictions.probabilities[:, 1], predictions.labels == 1
    wrong, right, _ = roc_curve(positive, scores, drop_intermediate=False)
    return list(zip(wrong.tolist(), right.tolist(), strict=True))


def operating_points(predictions: Predictions, given: float | None) -> list[OperatingPoint]:
    """Return a student's thresholds for two classes, each tested on images not used to choose it.

    Both classes must be among the test images, and all probabilities must be finite, so that
    `auroc_with_interval` is not None. A threshold with the largest sum of sensitivity and
    specificity (Youden, 1950) is chosen on one half of the test images and tested on the other
    half. 0.5 and a given threshold are tested on all images.
    """
    everything = np.ones(len(predictions.labels), bool)
    found = [_test_threshold(predictions, 0.5, "fixed: the more probable class", ALL, everything)]
    if given is not None:
        if given == found[0].threshold:
            return [dataclasses.replace(found[0], marked=True)]
        origin = "given to the report; valid if chosen without these images"
        found.insert(0, _test_threshold(predictions, given, origin, ALL, everything, marked=True))
        return found
    chosen = _youden(predictions)
    if chosen is not None:
        origin = "on one half of the test images, by sensitivity plus specificity"
        tested = ~predictions.choosing
        found.insert(
            0, _test_threshold(predictions, chosen, origin, "the other half", tested, True)
        )
    return found


def _test_threshold(
    predictions: Predictions,
    threshold: float,
    origin: str,
    images: str,
    used: NDArray[np.bool_],
    marked: bool = False,
) -> OperatingPoint:
    called = predictions.probabilities[used, 1].astype(np.float64) >= threshold
    positive = predictions.labels[used] == 1
    positives = int((called & positive).sum()), int(positive.sum())
    negatives = int((~called & ~positive).sum()), int((~positive).sum())
    return OperatingPoint(threshold, origin, images, positives, negatives, marked)


def _youden(predictions: Predictions) -> float | None:
    """Return the best threshold on the choosing half; None if a half lacks a class."""
    scores, labels = predictions.probabilities[:, 1].astype(np.float64), predictions.labels
    for part in (predictions.choosing, ~predictions.choosing):
        if len(np.unique(labels[part])) < 2:
            return None
    scores, positive = scores[predictions.choosing], labels[predictions.choosing] == 1
    # Four digits, so that the threshold on the page gives the numbers on the page.
    candidates = np.unique([float(f"{score:.4g}") for score in scores])
    below = [np.searchsorted(np.sort(scores[part]), candidates) for part in (positive, ~positive)]
    index = below[1] / (~positive).sum() - below[0] / positive.sum()
    best = candidates[np.isclose(index, index.max())]
    return float(best[0])  # of equally good thresholds, the most sensitive


def mean_rate(counts: Sequence[tuple[int, int]]) -> Interval | None:
    """Return the mean of independent fractions with its interval; None if any is 0 of 0.

    The interval combines the fractions' Wilson intervals (MOVER: Zou and Donner, 2008), so it is
    wide even if all fractions are 1.
    """
    if not counts or not all(total for _, total in counts):
        return None
    rates = [right / total for right, total in counts]
    ends = [wilson(*pair) for pair in counts]
    value = sum(rates) / len(rates)
    down = math.hypot(*(rate - low for rate, (low, _) in zip(rates, ends, strict=True)))
    up = math.hypot(*(high - rate for rate, (_, high) in zip(rates, ends, strict=True)))
    return value, max(0.0, value - down / len(rates)), min(1.0, value + up / len(rates))


def specificities(confusion: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return, for each class, the number of other images not assigned to it, and of all others."""
    counts = np.array(confusion)
    others = counts.sum() - counts.sum(1)
    right = others - counts.sum(0) + counts.diagonal()
    return list(zip(right.tolist(), others.tolist(), strict=True))
