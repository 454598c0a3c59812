"""Inversion: pictures extracted from a classifier, and measures of their quality.

Seeds are fixed; each statistical test states how often a correct implementation would fail with
other seeds.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fed_dpsd.audits import inversion
from fed_dpsd.audits.inversion import ATTACKS, PER_CLASS, Judge, inception_score, invert
from fed_dpsd.data.datasets import _digits
from fed_dpsd.streams import Streams
from tests.every import every

SHAPE, CLASSES = (1, 8, 8), 10
DIGITS = _digits().train


def test_an_inception_score_lies_between_one_and_the_number_of_classes():
    sure = np.eye(CLASSES).repeat(3, axis=0)
    assert inception_score(sure) == pytest.approx(CLASSES)
    assert inception_score(sure[:3]) == pytest.approx(1)  # one class only
    assert inception_score(np.full((5, CLASSES), 0.1)) == pytest.approx(1)  # never sure
    half = np.array([[0.75, 0.25], [0.25, 0.75]])
    divergence = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    assert inception_score(half) == pytest.approx(np.exp(divergence))


def first_of_each_class():
    return np.array([np.flatnonzero(DIGITS.labels == label)[0] for label in range(CLASSES)])


def fitted(images, labels):
    """A linear classifier of pixels, trained until it memorises its records."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    pixels = torch.from_numpy(images).float() / 255
    optimiser = torch.optim.Adam(model.parameters(), 0.01, weight_decay=1e-3)
    for _ in range(300):
        loss = functional.cross_entropy(model(pixels), torch.from_numpy(labels))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


@pytest.fixture(scope="module")
def judge():
    """Members are a record of each class; the others are as many unused records."""
    chosen = first_of_each_class()
    others = np.array([np.flatnonzero(DIGITS.labels == label)[1] for label in range(CLASSES)])
    classifier = fitted(DIGITS.images, DIGITS.labels)
    return Judge(classifier, DIGITS.images[chosen], DIGITS.images[others], Streams(0))


@pytest.mark.slow(seconds=30)  # an attack of thousands of steps
@every("attack", ATTACKS)
def test_a_classifier_that_memorises_its_records_is_broken(attack, judge):
    """Its pictures lie nearer to its ten records than to ten others of the same classes.

    Each class's pictures are alike, so there are hardly more than ten chances: if pictures revealed
    nothing, as many classes would be nearer less than once in 100 times.
    """
    model = fitted(judge.members, np.arange(CLASSES))
    pictures, labels = invert(attack, model, SHAPE, judge.streams)
    assert pictures.shape == (CLASSES * PER_CLASS, *SHAPE)
    score = judge.score(pictures, labels)
    own = model(torch.from_numpy(pictures).float() / 255).argmax(1).numpy()
    assert (own == labels).mean() > 0.95  # the attack has reached what it descends on
    assert score.recognised > 0.3  # three times what guessing has
    assert score.nearest_member > 0.8


@pytest.mark.slow(seconds=30)  # its control
@every("attack", ATTACKS)
def test_a_classifier_that_has_learned_nothing_gives_nothing_away(attack, judge):
    """Guessing recognises a tenth: of ten classes' pictures, more than half do so once in 700."""
    rng = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1, generator=rng)
    score = judge.score(*invert(attack, model, SHAPE, judge.streams))
    assert score.recognised < 0.5


def test_random_pictures_are_as_near_to_members_as_to_others():
    """Of 400 pictures the standard error is 0.025: it fails once in 10,000 times."""
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (200, *SHAPE), np.uint8)
    pictures = rng.integers(0, 256, (400, *SHAPE), np.uint8)
    classifier = fitted(DIGITS.images[:50], DIGITS.labels[:50])
    score = Judge(classifier, records[:100], records[100:], Streams(0)).score(
        pictures, np.zeros(400, int)
    )
    assert score.nearest_member == pytest.approx(0.5, abs=0.1)


def test_the_same_seed_draws_the_same_pictures(judge, monkeypatch):
    monkeypatch.setattr(inversion, "STEPS", 3)
    monkeypatch.setattr(inversion, "GENERATOR_STEPS", 3)
    for attack in ATTACKS:
        first, again = (invert(attack, judge.classifier, SHAPE, Streams(5))[0] for _ in range(2))
        other, _ = invert(attack, judge.classifier, SHAPE, Streams(6))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)
