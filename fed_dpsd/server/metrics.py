"""Metrics of probabilities on the test split."""

import numpy as np
import torch
from numpy.typing import NDArray


def accuracy(probabilities: NDArray[np.floating], labels: NDArray[np.int64]) -> float:
    """Return the fraction of images whose most probable class is the true one.

    Args:
        probabilities: (N, K), of each class or in proportion to it; a row that is not finite names
            no class, so it is wrong.
        labels: (N,) true classes, 0..K-1.
    """
    finite = np.isfinite(probabilities).all(1)
    return float((finite & (probabilities.argmax(1) == labels)).mean())


def auroc(probabilities: NDArray[np.floating], labels: NDArray[np.int64]) -> float | None:
    """Return the area under the ROC curve; ties count half.

    With two classes it is that of class 1; otherwise it is the mean over all classes of the area of
    each class against the rest.

    Args:
        probabilities: (N, K), in [0, 1].
        labels: (N,) true classes, 0..K-1.

    Returns:
        The area in [0, 1]; None if it is undefined, since a class is absent from `labels` or a
        probability is not finite.
    """
    num_classes = probabilities.shape[1]
    # torchmetrics scores an absent class 0, averages that in, and ranks NaN like any number.
    if len(np.unique(labels)) < num_classes or not np.isfinite(probabilities).all():
        return None
    # This import takes seconds, so a command that evaluates nothing should not pay for it.
    from torchmetrics.functional.classification import binary_auroc, multiclass_auroc

    scores, truth = torch.from_numpy(probabilities), torch.from_numpy(labels)
    if num_classes == 2:
        return float(binary_auroc(scores[:, 1], truth))
    return float(multiclass_auroc(scores, truth, num_classes))


def confusion(probabilities: NDArray[np.floating], labels: NDArray[np.int64]) -> list[list[int]]:
    """Count the images of each true class (K rows) that are taken for each class (K columns).

    Args:
        probabilities: (N, K); a row that is not finite names no class, so it is not counted.
        labels: (N,) true classes, 0..K-1.
    """
    from torchmetrics.functional.classification import multiclass_confusion_matrix

    finite = np.isfinite(probabilities).all(1)
    predicted = torch.from_numpy(probabilities[finite].argmax(1))
    truth = torch.from_numpy(labels[finite])
    return multiclass_confusion_matrix(predicted, truth, probabilities.shape[1]).tolist()


METRICS = {"accuracy": accuracy, "auroc": auroc}
