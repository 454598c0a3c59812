"""What may travel, and what is refused."""

import dataclasses
import re

import numpy as np
import pytest

from fed_dpsd.protocol import Answer, Ask, ProtocolError, misfit


def ask(query_id=1, count=3, seed=0):
    rng = np.random.Generator(np.random.PCG64(seed))
    images = rng.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
    return Ask(query_id, images, rng.random((count, 10), dtype=np.float32))


def test_the_digest_covers_all_of_an_ask():
    first = ask()
    assert first.digest() == ask().digest()
    pixel = first.images.copy()
    pixel[0, 0, 0, 0] ^= 1
    prediction = first.predictions.copy()
    prediction[0, 0] += 0.5
    others = [
        dataclasses.replace(first, query_id=2),
        dataclasses.replace(first, images=pixel),
        dataclasses.replace(first, predictions=prediction),
    ]
    assert len({other.digest() for other in [first, *others]}) == 4


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"images": np.zeros((3, 1, 8, 8), np.float32)}, "images are float32"),
        ({"images": np.zeros((3, 8, 8), np.uint8)}, r"shape \(3, 8, 8\)"),
        ({"predictions": np.zeros((3, 10))}, "predictions are float64"),
        ({"predictions": np.zeros((2, 10), np.float32)}, "3 images but 2 predictions"),
        ({"predictions": np.full((3, 10), np.nan, np.float32)}, "NaN"),
    ],
)
def test_malformed_asks_are_refused(change, expected):
    with pytest.raises(ProtocolError, match=expected):
        dataclasses.replace(ask(), **change)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(2, np.zeros((3, 10))), "query_id=2, asked 1"),
        (Answer(1, np.zeros((3, 9))), r"shape \(3, 9\)"),
        (Answer(1, np.zeros((3, 10), np.int64)), "type int64"),
    ],
)
def test_answers_that_do_not_fit_are_told(answer, expected):
    assert re.search(expected, misfit(ask(), answer))


def test_a_fitting_answer_passes():
    assert misfit(ask(), Answer(1, np.zeros((3, 10), np.uint8))) == ""
