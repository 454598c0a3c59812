"""Scores on test images: areas, intervals, and thresholds that no tested image has chosen."""

import dataclasses
import warnings

import numpy as np
import pytest

from fed_dpsd.report import scores
from fed_dpsd.report.numbers import Z, wilson
from fed_dpsd.report.scores import Predictions
from tests.every import every


def predictions(seed, size=400, num_classes=2, signal=1.0, decimals=7):
    """Random probabilities that follow the labels by `signal`; a random half chooses."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(num_classes, size=size)
    labels[:num_classes] = range(num_classes)
    logits = rng.normal(size=(size, num_classes)) + signal * np.eye(num_classes)[labels]
    exps = np.exp(logits)
    probabilities = (exps / exps.sum(1, keepdims=True)).round(decimals).astype(np.float32)
    return Predictions(probabilities, labels, rng.random(size) < 0.5)


def won(given, k):
    """How often an image of class k has a higher score for it than another, by pairs: (P, N)."""
    score, truth = given.probabilities[:, k].astype(float), given.labels == k
    mine, others = score[truth][:, None], score[~truth][None]
    return (mine > others) + 0.5 * (mine == others)


def test_the_interval_of_an_area_is_delongs(subtests):
    for decimals in (7, 1):  # without and with ties
        with subtests.test(decimals=decimals):
            given = predictions(0, decimals=decimals)
            pairs = won(given, 1)
            variance = sum(pairs.mean(1 - a).var(ddof=1) / pairs.shape[a] for a in (0, 1))
            value, low, high = scores.auroc_with_interval(given)
            logit = np.log(value / (1 - value))
            reach = Z * np.sqrt(variance) / (value * (1 - value))
            expected = 1 / (1 + np.exp(-(logit + np.array([-reach, reach]))))
            assert (low, high) == pytest.approx(tuple(expected))


@pytest.mark.slow
def test_the_interval_of_a_mean_area_is_that_of_a_bootstrap():
    given, rng = predictions(1, 600, 4), np.random.default_rng(0)
    _, low, high = scores.auroc_with_interval(given)
    areas = []
    for _ in range(200):
        pick = rng.integers(len(given.labels), size=len(given.labels))
        areas.append(scores.auroc(given.probabilities[pick], given.labels[pick]))
    width = 2 * Z * np.std(areas)
    assert high - low == pytest.approx(width, rel=0.2)
    _, low_of_half, high_of_half = scores.auroc_with_interval(predictions(1, 300, 4))
    assert high_of_half - low_of_half > 1.2 * (high - low)  # the control: it follows the images


@every("num_classes", [2, 3])
def test_an_area_is_of_the_second_of_two_classes_or_a_mean_over_classes(num_classes):
    given = predictions(num_classes, num_classes=num_classes, decimals=1)
    area = np.mean([won(given, k).mean() for k in ([1] if num_classes == 2 else range(3))])
    assert scores.auroc(given.probabilities, given.labels) == pytest.approx(area)
    assert scores.auroc_with_interval(given)[0] == pytest.approx(area)
    shuffled = np.random.default_rng(0).permutation(given.labels)
    assert area - scores.auroc(given.probabilities, shuffled) > 0.1  # the control


@every("num_classes", [2, 3])
def test_an_area_without_a_meaning_is_none_and_a_perfect_one_has_no_interval(num_classes):
    given = predictions(2, num_classes=num_classes)
    probabilities, labels = given.probabilities, given.labels
    cases = []
    for absent in (0, num_classes - 1):
        kept = labels != absent
        cases.append((probabilities[kept], labels[kept], given.choosing[kept]))
    for value in (np.nan, np.inf, -np.inf):
        broken = probabilities.copy()
        broken[0, labels[0]] = value
        cases.append((broken, labels, given.choosing))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in cases:
            assert scores.auroc(*case[:2]) is scores.auroc_with_interval(Predictions(*case)) is None
    perfect = np.eye(num_classes, dtype=np.float32)[labels]
    assert scores.auroc_with_interval(Predictions(perfect, labels, given.choosing)) == (
        1.0,
        0.0,
        1.0,
    )


def test_few_images_of_a_class_give_no_interval():
    given = predictions(2)
    for number, known in ((9, False), (10, True)):
        kept = np.concatenate(
            [np.flatnonzero(given.labels == 0), np.flatnonzero(given.labels)[:number]]
        )
        few = (given.probabilities[kept], given.labels[kept], given.choosing[kept])
        assert (scores.auroc_with_interval(Predictions(*few))[1:] != (0.0, 1.0)) == known


def test_no_threshold_is_tested_on_images_that_chose_it():
    """Without a signal, the tested half shows none; the choosing half would show one."""
    honest, leaking = [], []
    for seed in range(60):
        given = predictions(seed, 100, signal=0)
        point = scores.operating_points(given, None)[0]
        threshold = point.threshold
        assert point.positives[1] + point.negatives[1] == (~given.choosing).sum()
        honest.append(point.positives[0] / point.positives[1] - 1)
        honest[-1] += point.negatives[0] / point.negatives[1]
        called = given.probabilities[:, 1] >= threshold
        rates = [called[given.choosing & (given.labels == k)].mean() for k in (0, 1)]
        leaking.append(rates[1] - rates[0])
    assert abs(np.mean(honest)) < 0.06
    assert np.mean(leaking) > 0.15


def test_labels_of_tested_images_do_not_move_the_threshold():
    given = predictions(4)
    first = scores.operating_points(given, None)[0]
    for half, same in ((~given.choosing, True), (given.choosing, False)):
        labels = np.where(half, 1 - given.labels, given.labels)
        again = Predictions(given.probabilities, labels, given.choosing)
        assert (scores.operating_points(again, None)[0].threshold == first.threshold) == same


def test_a_given_threshold_is_tested_on_all_images_and_named_first():
    given = predictions(5)
    point, fixed = scores.operating_points(given, 0.3)
    assert (point.threshold, point.images, point.marked) == (0.3, "all test images", True)
    called = given.probabilities[:, 1] >= 0.3
    assert point.positives == (called[given.labels == 1].sum(), (given.labels == 1).sum())
    assert point.negatives == ((~called)[given.labels == 0].sum(), (given.labels == 0).sum())
    assert (fixed.threshold, fixed.marked) == (0.5, False)
    (same,) = scores.operating_points(given, 0.5)  # instead of two identical rows
    assert same == dataclasses.replace(fixed, marked=True)
    alone = Predictions(given.probabilities, given.labels, given.labels == 1)  # a half lacks one
    assert [point.threshold for point in scores.operating_points(alone, None)] == [0.5]


def test_a_mean_of_fractions_has_an_interval_that_stays_wide():
    assert scores.mean_rate([(36, 40)])[1:] == pytest.approx(wilson(36, 40))
    value, low, high = scores.mean_rate([(20, 20), (10, 10)])
    assert (value, high) == (1.0, 1.0)
    assert 0.7 < low < 0.9
    assert scores.mean_rate([(1, 2), (0, 0)]) is None
    assert scores.specificities([[8, 2, 0], [1, 9, 0], [0, 0, 10]]) == [
        (19, 20),
        (18, 20),
        (20, 20),
    ]
