"""What probabilities are worth on the test split."""

import numpy as np
import torch
from numpy.typing import NDArray


def accuracy(probabilities: NDArray[np.floating], labels: NDArray[np.int64]) -> float:
    """Fraction of images whose most probable class is the true one.

    Args:
        probabilities: (N, K), of each class or in proportion to it; a row that is not finite names
            no class, so it is wrong.
        labels: (N,) true classes, 0..K-1.
    """
    finite = np.isfinite(probabilities).all(1)
    return float((finite & (probabilities.argmax(1) == labels)).mean())


def auroc(probabilities: NDArray[np.floating], labels: NDArray[np.int64]) -> float | None:
    """Area under the ROC curve; ties count half.

    Of the probability of class 1 where there are two classes, else the mean over all classes of
    each one's against the rest.

    Args:
        probabilities: (N, K), in [0, 1].
        labels: (N,) true classes, 0..K-1.

    Returns:
        The area in [0, 1]; None where it is not defined: a class is absent from `labels`, or a
        probability is not finite.
    """
    num_classes = probabilities.shape[1]
    # torchmetrics scores an absent class 0, averages that in, and ranks NaN like any number.
    if len(np.unique(labels)) < num_classes or not np.isfinite(probabilities).all():
        return None
    # Seconds to import, which a command that evaluates nothing should not take.
    from torchmetrics.functional.classification import binary_auroc, multiclass_auroc

    scores, truth = torch.from_numpy(probabilities), torch.from_numpy(labels)
    if num_classes == 2:
        return float(binary_auroc(scores[:, 1], truth))
    return float(multiclass_auroc(scores, truth, num_classes))


def confusion(probabilities: NDArray[np.floating], labels: NDArray[np.int64]) -> list[list[int]]:
    """How many images of each true class (K rows) are taken for each class (K columns).

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
