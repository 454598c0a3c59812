"""Valid messages, and rejected ones."""

import dataclasses
import re

import numpy as np
import pytest

from fed_dpsd.errors import ProtocolError
from fed_dpsd.protocol import Request, Response, mismatch
from tests.every import every


def request(query_id=1, count=3, seed=0):
    rng = np.random.Generator(np.random.PCG64(seed))
    images = rng.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
    return Request(query_id, images, rng.random((count, 10), dtype=np.float32))


def test_the_digest_covers_the_whole_request():
    first = request()
    assert first.digest == request().digest
    pixel = first.images.copy()
    pixel[0, 0, 0, 0] ^= 1
    prediction = first.predictions.copy()
    prediction[0, 0] += 0.5
    others = [
        dataclasses.replace(first, query_id=2),
        dataclasses.replace(first, images=pixel),
        dataclasses.replace(first, predictions=prediction),
    ]
    for size in (1, 2):
        weights = np.full(3, size, np.float32)
        others.append(Request.without_images("train", (1, 8, 8), 10, 1, weights))
    assert len({other.digest for other in [first, *others]}) == 6


@every(
    ("change", "expected"),
    [
        ({"images": np.zeros((3, 1, 8, 8), np.float32)}, "images are float32"),
        ({"images": np.zeros((3, 8, 8), np.uint8)}, r"shape \(3, 8, 8\)"),
        ({"predictions": np.zeros((3, 10))}, "predictions are float64"),
        ({"predictions": np.zeros((2, 10), np.float32)}, "3 images but 2 predictions"),
        ({"predictions": np.full((3, 10), np.nan, np.float32)}, "NaN"),
        ({"kind": "records"}, "kind='records' is unknown"),
        ({"kind": "counts"}, "counts with 3 images"),
        ({"kind": "weights"}, "weights with 3 images"),
    ],
)
def test_malformed_requests_are_refused(change, expected):
    with pytest.raises(ProtocolError, match=expected):
        dataclasses.replace(request(), **change)


@every(
    ("response", "expected"),
    [
        (Response(2, np.zeros((3, 10))), "query_id=2 instead of 1"),
        (Response(1, np.zeros((3, 9))), r"shape \(3, 9\)"),
        (Response(1, np.zeros((3, 10), np.int64)), "type int64"),
    ],
)
def test_answers_that_do_not_fit_are_reported(response, expected):
    assert re.search(expected, mismatch(request(), response))


@every(
    ("kind", "fitting", "misfits"),
    [
        ("counts", (1, 10), [(10,), (1, 9), (2, 10), (0, 10), (1, 10, 1)]),
        ("weights", (7, 1), [(7,), (7, 2), (7, 1, 1)]),
    ],
)
def test_counts_and_weights_have_shapes_of_their_own(kind, fitting, misfits):
    query = Request.without_images(kind, (1, 8, 8), 10)
    assert (query.kind, query.nbytes, len(query.images)) == (kind, 0, 0)
    assert mismatch(query, Response(0, np.zeros(fitting, np.float32))) == ""
    for shape in misfits:
        assert f"values of shape {shape}" in mismatch(query, Response(0, np.zeros(shape)))
    assert "type int64" in mismatch(query, Response(0, np.zeros(fitting, np.int64)))
    assert "query_id=1 instead of 0" in mismatch(query, Response(1, np.zeros(fitting)))


def test_requests_of_other_kinds_are_other_requests():
    kinds = [Request.without_images(kind, (1, 8, 8), 10) for kind in ("counts", "weights")]
    assert len({query.digest for query in kinds}) == 2


def test_a_fitting_answer_passes():
    assert mismatch(request(), Response(1, np.zeros((3, 10), np.uint8))) == ""
