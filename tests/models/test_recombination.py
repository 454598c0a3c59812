"""Images made of answered ones."""

import numpy as np
import pytest

from fed_dpsd.models.recombination import recombine
from fed_dpsd.streams import Streams
from tests.every import every


@every("shape", [(1, 8, 8), (3, 32, 32)])
def test_shapes_bytes_and_streams(shape):
    rng = np.random.default_rng(0)
    answered = rng.integers(0, 256, (50, *shape), dtype=np.uint8)
    labels = rng.normal(size=(50, 10))
    draws = [recombine(answered, labels, 20, Streams(s).numpy("images")) for s in (0, 0, 1)]
    assert (draws[0].shape, draws[0].dtype) == ((20, *shape), np.uint8)
    assert (draws[0] == draws[1]).all()
    assert (draws[0] != draws[2]).any()


def test_rare_classes_are_drawn_as_often_as_frequent_ones():
    """One image in ten is white and in its own class; uniform draws would keep this fraction.

    The two weights are 20 / 21 and 180 / 181, with one added to each class. The tolerance is five
    standard errors of 2,000 draws.
    """
    answered = np.zeros((200, 1, 8, 8), np.uint8)
    answered[:20] = 255
    labels = np.eye(10)[np.where(np.arange(200) < 20, 3, 7)]
    made = recombine(answered, labels, 2_000, np.random.default_rng(0))
    white = (20 / 21) / (20 / 21 + 180 / 181)
    assert made.mean() / 255 == pytest.approx(white, abs=5 * (0.25 / 2_000) ** 0.5)
