"""Metrics of (N, K) probabilities on the test split, with (N,) true classes 0..K-1."""

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.report.scores import auroc

BINS = 10  # of a reliability diagram


def accuracy(probabilities: NDArray[np.floating], labels: NDArray[np.int64]) -> float:
    """Return the fraction of images with the true class as the most probable one.

    A row that is not finite predicts no class, so it is wrong.
    """
    finite = np.isfinite(probabilities).all(1)
    return float((finite & (probabilities.argmax(1) == labels)).mean())


def confusion(probabilities: NDArray[np.floating], labels: NDArray[np.int64]) -> list[list[int]]:
    """Count the images of each true class (K rows) that are predicted as each class (K columns).

    A row that is not finite predicts no class, so it is not counted.
    """
    finite, num_classes = np.isfinite(probabilities).all(1), probabilities.shape[1]
    pairs = num_classes * labels[finite] + probabilities[finite].argmax(1)
    counts = np.bincount(pairs, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes).tolist()


def calibration(
    probabilities: NDArray[np.floating], labels: NDArray[np.int64]
) -> dict[str, float | list[float] | list[int]]:
    """Compare a classifier's confidence with its accuracy (Guo et al., arXiv 1706.04599).

    A row that is not finite has confidence 0 and is wrong.

    Returns:
        `count`, mean `confidence` and `accuracy` of the images with their largest probability in
        each of BINS equal bins of (0, 1]; 0 for an empty bin. `error` is the expected calibration
        error in [0, 1]: the mean of |confidence - accuracy| over bins, weighted by images.
    """
    finite = np.isfinite(probabilities).all(1)
    sure = np.where(finite, np.where(finite[:, None], probabilities, 0).max(1), 0)
    right = finite & (probabilities.argmax(1) == labels)
    bins = np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    confidence, accurate = (
        np.bincount(bins, values, BINS) / np.maximum(count, 1) for values in (sure, right)
    )
    error = float((count * np.abs(confidence - accurate)).sum() / len(labels))
    rounded = {"confidence": confidence, "accuracy": accurate}
    parts = {name: [round(float(v), 4) for v in values] for name, values in rounded.items()}
    return {"error": round(error, 6), "count": count.tolist(), **parts}


def agreement(predictions: NDArray[np.floating], answers: NDArray[np.floating]) -> float | None:
    """Return how often (B, K) predictions and soft labels agree in class; None without any."""
    if predictions.shape != answers.shape or not answers.size:
        return None
    return float((predictions.argmax(1) == answers.argmax(1)).mean())


METRICS = {"accuracy": accuracy, "auroc": auroc}
