"""Scores against scikit-learn and torchmetrics, and where they are not defined."""

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from fed_dpsd.server.metrics import BINS, accuracy, agreement, calibration, confusion
from tests.every import every


def cases(num_classes, size=400):
    """Random probabilities, and labels that follow them."""
    rng = np.random.default_rng(num_classes)
    labels = rng.integers(num_classes, size=size)
    logits = rng.normal(size=(size, num_classes)) + np.eye(num_classes)[labels]
    exps = np.exp(logits)
    return (exps / exps.sum(1, keepdims=True)).astype(np.float32), labels


@every("num_classes", [2, 3])
@every("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_wrong(num_classes, value):
    """Whatever its place holds: argmax alone would take NaN or infinity for the class."""
    probabilities, labels = cases(num_classes)
    right = probabilities.argmax(1) == labels
    row = int(np.flatnonzero(right)[0])
    broken = probabilities.copy()
    broken[row, labels[row]] = value
    assert accuracy(broken, labels) == pytest.approx((right.sum() - 1) / len(labels))
    assert accuracy(np.full_like(probabilities, value), labels) == 0


@every("num_classes", [2, 3, 10])
def test_the_confusion_is_scikit_learns_and_its_diagonal_is_the_accuracy(num_classes):
    probabilities, labels = cases(num_classes)
    found = confusion(probabilities, labels)
    assert found == confusion_matrix(labels, probabilities.argmax(1)).tolist()
    assert np.trace(found) / len(labels) == pytest.approx(accuracy(probabilities, labels))
    assert all(type(count) is int for row in found for count in row)


def test_a_class_that_the_labels_lack_keeps_its_row():
    probabilities, labels = cases(3)
    found = confusion(probabilities[labels != 1], labels[labels != 1])
    assert found[1] == [0, 0, 0]
    assert sum(map(sum, found)) == (labels != 1).sum()


@every("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_counts_for_no_class(value):
    probabilities, labels = cases(3)
    broken = probabilities.copy()
    broken[:5, 0] = value
    assert confusion(broken, labels) == confusion(probabilities[5:], labels[5:])
    assert not np.any(confusion(np.full_like(probabilities, value), labels))


@every("num_classes", [2, 3, 10])
def test_the_calibration_error_is_that_of_torchmetrics(num_classes):
    from torch import from_numpy
    from torchmetrics.functional.classification import multiclass_calibration_error

    probabilities, labels = cases(num_classes)
    known = (from_numpy(probabilities), from_numpy(labels), num_classes, BINS)
    found = calibration(probabilities, labels)
    assert found["error"] == pytest.approx(float(multiclass_calibration_error(*known)), abs=1e-5)
    assert sum(found["count"]) == len(labels)
    right = np.dot(found["count"], found["accuracy"]) / len(labels)
    assert right == pytest.approx(accuracy(probabilities, labels), abs=1e-4)


def test_what_is_not_finite_is_sure_of_nothing_and_wrong():
    probabilities = np.array([[np.nan, 1.0], [0.2, 0.8]])
    found = calibration(probabilities, np.array([1, 1]))
    assert (found["count"][0], found["accuracy"][0], found["confidence"][0]) == (1, 0, 0)
    assert found["error"] == pytest.approx(0.1)


def test_agreement_counts_equal_classes_and_needs_predictions():
    student = np.array([[0.6, 0.4], [0.6, 0.4], [0.1, 0.9], [0.1, 0.9]])
    answers = np.array([[1.0, 0.0], [0.0, 1.0], [0.4, 0.6], [0.0, 1.0]])
    assert agreement(student, answers) == 0.75
    assert agreement(np.zeros((4, 0)), answers) is None
    assert agreement(student[:0], answers[:0]) is None
