"""Forms of answers: equal values come back, in a length that they do not decide."""

import warnings

import numpy as np
import pytest

from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.gradient_reading import GradientReading
from fed_dpsd.privacy.gradient_sum import GradientSum
from fed_dpsd.privacy.mechanism import Probabilities, Shards
from fed_dpsd.privacy.noise import SecureGenerator
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.packing import pack, unpack
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.votes import NoisyVotes

QUERIES, CLASSES = 60, 10
THREE, MANY = Shards(3), Shards(300)
# Each with the bytes of an answer to an ask of QUERIES queries.
MECHANISMS = {
    "label": (TopKRandomizedResponse(CLASSES, 1.0), QUERIES),
    "label of 3": (TopKRandomizedResponse(CLASSES, 1.0, k=4), QUERIES),
    "label above": (TopKRandomizedResponse(CLASSES, 1.0, threshold=0.1), QUERIES),
    "labels": (TopKRandomizedResponse(CLASSES, 1.0, shards=THREE), 3 * QUERIES),
    "counts": (TopKRandomizedResponse(CLASSES, 1.0, shards=MANY), 2 * QUERIES * CLASSES),
    "gradient": (NormalizedGradient(CLASSES, 1.0), 4 * QUERIES * CLASSES),
    "top 5": (NormalizedGradient(CLASSES, 1.0, k=5), 4 * QUERIES * 5),
    "top 5 of 3": (NormalizedGradient(CLASSES, 9.0, 7.0, k=5, shards=THREE), 4 * QUERIES * 5),
    "batch": (NormalizedGradient(CLASSES, 1.0, k=5, normalise="batch"), 4 * QUERIES * 5),
    "little noise": (NormalizedGradient(CLASSES, 1e-3, k=5), 8 * QUERIES * 5),
    "no noise": (NormalizedGradient(CLASSES, 0.0, k=5), 8 * QUERIES * 5),
    "server": (NormalizedGradient(CLASSES, 1.0, k=5, noise_at="server"), 8 * QUERIES * CLASSES),
    "reading": (GradientReading(CLASSES, 1.0), 8 * QUERIES * CLASSES),
    "sum": (GradientSum(CLASSES, 1.0), 8 * CLASSES),
    "votes": (NoisyVotes(CLASSES, 1.0), 4 * QUERIES * CLASSES),
    "laplace": (NoisyVotes(CLASSES, 1.0, "laplace"), 8 * QUERIES * CLASSES),
    "noisy max": (NoisyMax(CLASSES, 1.0, shards=MANY), QUERIES),
    "probabilities": (Probabilities(), 4 * QUERIES * CLASSES),
}


def public(seed=0):
    """The student's predictions."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.dirichlet(np.ones(CLASSES), QUERIES).astype(np.float32)


def released(mechanism, rng, predictions):
    """An answer of teachers whose own values are random, zero or not finite."""
    values = np.random.Generator(np.random.PCG64(1)).normal(size=(3, QUERIES, CLASSES))
    values[0, 0], values[0, 1] = 0, np.nan
    if mechanism.input == "probabilities":
        with np.errstate(invalid="ignore"):
            values = np.abs(values) / np.abs(values).sum(axis=2, keepdims=True)
    teachers = mechanism.shards.teachers if hasattr(mechanism, "shards") else 1
    encoded = [mechanism.encode(values[n % 3], predictions) for n in range(teachers)]
    return mechanism.noise(np.stack(encoded), predictions, rng)


@pytest.mark.parametrize("name", MECHANISMS)
def test_equal_values_come_back_from_bytes_that_are_known_beforehand(name):
    mechanism, expected = MECHANISMS[name]
    predictions = public()
    sources = [np.random.Generator(np.random.PCG64(seed)) for seed in range(3)]
    for rng in (*sources, SecureGenerator(bytes(32)), SecureGenerator(bytes([1] * 32))):
        values = released(mechanism, rng, predictions)
        packed = pack(mechanism, values, predictions)
        again = unpack(mechanism, packed, predictions)
        assert packed.nbytes == expected
        assert (again.dtype, again.shape) == (values.dtype, values.shape)
        assert np.array_equal(again, values, equal_nan=True)
        assert np.array_equal(pack(mechanism, again, predictions), packed, equal_nan=True)


@pytest.mark.parametrize("classes", [2, 256, 257])
def test_a_label_takes_as_many_bytes_as_a_class_number(classes):
    mechanism, predictions = TopKRandomizedResponse(classes, 1.0), np.full((300, classes), 0.5)
    values = np.eye(classes, dtype=np.uint8)[np.arange(300) % classes]
    packed = pack(mechanism, values, predictions)
    assert packed.nbytes == 300 * (1 if classes <= 256 else 2)
    assert np.array_equal(unpack(mechanism, packed, predictions), values)


def test_zeros_outside_a_public_mask_have_no_sign():
    mechanism, predictions = MECHANISMS["top 5"][0], public()
    values = released(mechanism, SecureGenerator(bytes(32)), predictions)
    assert np.signbit(values[values == 0]).any()
    again = unpack(mechanism, pack(mechanism, values, predictions), predictions)
    assert not np.signbit(again[again == 0]).any()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("label", lambda values: values * np.uint8(2)),
        ("label", lambda values: values * np.float64(1)),
        ("labels", lambda values: values * 0),
        ("noisy max", lambda values: values // 2),
        ("top 5", lambda values: values * np.pi),
        ("top 5", lambda values: values * 1e12),
        ("top 5", lambda values: values + 1),
        ("top 5", lambda values: values.astype(np.float32)),
        ("top 5", lambda values: values * np.nan),
        ("no noise", lambda values: values + 1),
        ("votes", lambda values: values * np.inf),
        ("sum", lambda values: values + 1),
    ],
)
def test_what_the_form_does_not_hold_stays_as_it_is(name, change):
    mechanism, predictions = MECHANISMS[name][0], public()
    with np.errstate(invalid="ignore"):
        values = change(released(mechanism, np.random.Generator(np.random.PCG64(0)), predictions))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed = pack(mechanism, values, predictions)
    assert packed is values
    assert unpack(mechanism, packed, predictions) is values


@pytest.mark.parametrize("name", MECHANISMS)
def test_any_array_can_be_unpacked(name):
    """It comes back as it is, or as rows that `admissible` judges as it judges others."""
    mechanism, predictions = MECHANISMS[name][0], public()
    honest = pack(
        mechanism, released(mechanism, SecureGenerator(bytes(32)), predictions), predictions
    )
    rng = np.random.Generator(np.random.PCG64(0))
    shapes = {honest.shape, (), (0,), (QUERIES,), (QUERIES, CLASSES), honest.shape[::-1]}
    shapes |= {(honest.shape[0] + change, *honest.shape[1:]) for change in (-1, 1)}
    for shape in shapes:
        for dtype in (honest.dtype, "u1", "i4", ">i4", "u8", "f4", "f8", "c8", "M8[s]", "S3", "U2"):
            content = rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            packed = np.frombuffer(content, dtype).reshape(shape)
            with np.errstate(all="ignore"):
                values = unpack(mechanism, packed, predictions)
                if values is packed:
                    continue
                assert (packed.dtype, shape) == (honest.dtype, honest.shape)
                assert values.shape == (QUERIES, CLASSES)
                values = np.where(np.isfinite(values), values, 0)
                good = mechanism.admissible(values, predictions, 1)
            assert (good.dtype, good.shape) == (bool, (QUERIES,))


def test_a_class_that_does_not_exist_is_a_row_without_its_response():
    predictions = public()
    for name, teachers in (("label", 1), ("labels", 3), ("noisy max", 300)):
        mechanism = MECHANISMS[name][0]
        packed = pack(
            mechanism, released(mechanism, SecureGenerator(bytes(32)), predictions), predictions
        ).copy()
        packed[7, 0] = CLASSES
        values = unpack(mechanism, packed, predictions)
        good = mechanism.admissible(values, predictions, teachers)
        assert not good[7]
        assert good.sum() == QUERIES - 1
