"""Noise from a secret: exactly the promised laws, and nothing that reveals the values below."""

import math

import numpy as np
import pytest
from scipy import stats

from fed_dpsd.privacy import noise
from fed_dpsd.privacy.noise import (
    SecretStreams,
    SecureGenerator,
    noisy_argmax,
    noisy_sum,
    snap,
)
from tests.every import every
from tests.privacy import ideals

LEVEL = 1e-6  # each test below fails by chance with at most about this probability; seeds are fixed


def generator(seed=0):
    return SecureGenerator(seed.to_bytes(32, "little"))


LAWS = {"gaussian": stats.norm, "laplace": stats.laplace}


@every("law", LAWS)
@every("units", [1, 2, 5])
def test_integers_have_exactly_the_discrete_law(law, units):
    """At a scale of a few units, so a wrong step of the sampler would show."""
    draw = generator(units)._gaussian if law == "gaussian" else generator(units)._laplace
    drawn = draw(units, 200_000)
    x = np.arange(-120, 121)

    def fits(units):
        mass = np.exp(-(x**2) / (2 * units**2) if law == "gaussian" else -np.abs(x) / units)
        expected = mass / mass.sum() * len(drawn)
        seen = np.array([(drawn == each).sum() for each in x])
        often = expected > 5
        expected, seen = expected[often], seen[often]
        return stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > LEVEL

    assert np.abs(drawn).max() <= 120
    assert fits(units)
    assert not fits(units * 1.05)  # the control


def test_uniform_draws_are_uniform():
    drawn = generator().random((500, 100))
    assert drawn.shape == (500, 100)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > LEVEL
    # The remainder of a word by 3 * 2^62 would be a small number twice as often.
    below = generator()._below(3 * 2**62, 90_000) >> np.uint64(62)
    assert stats.chisquare(np.bincount(below.astype(int))).pvalue > LEVEL


def test_a_long_stream_continues_with_another_key(monkeypatch):
    """ChaCha20's counter ends; training that draws more must continue without repeating draws."""
    before = generator().words(64)
    monkeypatch.setattr(noise, "STREAM_BYTES", 8 * 8)
    drawn = generator()
    found = np.concatenate([drawn.words(8) for _ in range(64)])
    assert np.array_equal(found[:8], before[:8])
    assert len(np.unique(found)) == len(found)
    assert not set(found[8:]) & set(before[8:])


@every("source", [generator, ideals.rng])
def test_a_noisy_value_lies_on_a_grid_whatever_was_added(source):
    """The control: the last bits of a plain sum of floats reveal what the noise was added to."""
    for law in LAWS:
        for value in (0.0, 1.0, 0.1, -0.3):
            noisy = noisy_sum(np.full((1, 2_000), value), 3.0, law, source())
            assert (noisy * 2**24 == np.round(noisy * 2**24)).all()
    plain = np.random.Generator(np.random.PCG64(0)).laplace(0, 3, 2_000) + 0.1
    assert not (plain * 2**24 == np.round(plain * 2**24)).all()
    assert snap(np.array([1.0 + 1e-9]), 1.0).tolist() == [1.0]
    assert not np.signbit(snap(np.array([-1e-9]), 1.0)).any()  # zero is one point of the grid


def test_values_are_cut_off_towards_zero_and_whole_numbers_stay(monkeypatch):
    """Each summand is truncated, so no norm grows; here the noise is zero."""
    monkeypatch.setattr(SecureGenerator, "_gaussian", lambda self, units, count: np.zeros(count))

    def shift(values, scale):
        return noisy_sum(values, scale, "gaussian", generator()).tolist()

    votes = np.array([[0.0, 1.0, 7.0, 250.0, -3.0]])
    assert shift(votes, 2.0**20) == votes[0].tolist()
    fractions = np.array([[0.99, -0.99, 1e-9, 1.5, -2.5]])
    assert shift(fractions, 2.0**26) == [0, 0, 0, 1, -2]
    assert shift(np.repeat(fractions, 3, 0), 2.0**26) == [0, 0, 0, 3, -6]


def test_a_scale_between_two_steps_of_the_lattice_is_rounded_up(monkeypatch):
    units = []
    silent = lambda self, size, count: units.append(size) or np.zeros(count)  # noqa: E731
    certain = lambda self, behind, size: units.append(size) or behind == behind  # noqa: E731
    for law in LAWS:
        monkeypatch.setattr(SecureGenerator, f"_{law}", silent)
        noisy_sum(np.zeros((1, 1)), 0.7, law, generator())
    monkeypatch.setattr(SecureGenerator, "_accepts", certain)
    noisy_argmax(np.zeros((1, 3)), 0.7, generator())
    assert units == [math.ceil(0.7 * 2**26)] * 3
    assert units[0] > 0.7 * 2**26


def test_equal_secrets_purposes_and_numbers_give_equal_draws_and_others_do_not():
    streams = SecretStreams(bytes(32))
    first = streams.numpy("answer", 1, 2).random(4).tolist()
    assert streams.numpy("answer", 1, 2).random(4).tolist() == first
    others = [
        streams.numpy("training", 1, 2),
        streams.numpy("answer", 2, 2),
        streams.numpy("answer", 1, 3),
        SecretStreams(bytes(31) + b"1").numpy("answer", 1, 2),
    ]
    assert first not in [other.random(4).tolist() for other in others]
    assert streams.identity != SecretStreams(bytes(31) + b"1").identity
    assert "00" not in repr(streams)


@every("length", [0, 31])
def test_short_secrets_are_errors(length):
    with pytest.raises(ValueError, match=f"{length} bytes; it must have 32"):
        SecretStreams(bytes(length))
    with pytest.raises(ValueError, match=f"{length} bytes; it must have 32"):
        SecureGenerator(bytes(length))
