"""Sums of answers and counts: searches for a value that moves a sum by more than its bound.

Norms and differences are of exact rationals. The control does the same in float32 and is caught.
"""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from fed_dpsd import losses
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.data.intake import Records
from fed_dpsd.models.inference import Images
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import Shards
from fed_dpsd.privacy.noise import SecureGenerator, lattice_spacing, noisy_sum
from fed_dpsd.privacy.votes import NoisyVotes
from tests.every import every

ASKED = np.full((1, 7), 1 / 7, np.float32)


class Silent(np.random.Generator):
    """Seeded noise of zero, to make sums visible."""

    def __init__(self):
        super().__init__(np.random.PCG64(0))

    def normal(self, loc, scale, size):
        return np.zeros(size)


@pytest.fixture(params=["seeded", "secure"])
def silent(request, monkeypatch):
    monkeypatch.setattr(SecureGenerator, "_gaussian", lambda self, units, count: np.zeros(count))
    return Silent() if request.param == "seeded" else SecureGenerator(bytes(32))


def square(values):
    return sum(Fraction(float(value)) ** 2 for value in np.ravel(values))


def float32(encode):
    """The control: a mechanism's own bound in float32, without room for its roundings."""

    def control(mechanism, value):
        value = np.asarray(value, np.float32)
        length = np.sqrt(np.add.accumulate(np.square(value.ravel()))[-1])
        return (value * np.float32(mechanism.bound) / length).astype(np.float32)

    return control


@pytest.mark.slow
@every("normalise", ["sample", "batch"])
def test_no_gradient_is_longer_than_its_bound(normalise):
    """Long vectors with equal, huge and tiny entries: 400 vectors; norms are exact rationals.

    The largest squares would overflow.
    """
    longest, beyond = Fraction(0), 0
    rng = np.random.Generator(np.random.PCG64(0))
    for _ in range(200):
        classes = int(rng.integers(2, 300))
        bound = float(10 ** rng.uniform(-6, 3))
        mechanism = NormalizedGradient(classes, 1.0, bound, 1e-100, normalise=normalise)
        for spread in (0.0, 3.0):
            value = rng.choice([-1, 1], (1, classes)) * 10 ** rng.normal(0, spread, (1, classes))
            value *= 10 ** rng.uniform(-290, 280)
            asked = np.full((1, classes), 1 / classes, np.float32)
            own = square(mechanism.constrain_sensitivity(value, asked)) / Fraction(bound) ** 2
            longest = max(longest, own)
            assert own <= 1
            with np.errstate(all="ignore"):
                control = float32(None)(mechanism, value / np.abs(value).max())
            beyond += square(control) / Fraction(bound) ** 2 > 1
    assert longest > 1 - 1e-8  # so the bound is not vacuous
    assert beyond > 20


def test_a_teacher_moves_a_sum_of_gradients_by_its_own_value(silent):
    """Any other teachers, any bound; off the noise's grid, the control, float64 rounds too."""
    rng = np.random.Generator(np.random.PCG64(1))
    drifted = 0
    for _ in range(60):
        teachers, bound = int(rng.integers(2, 300)), float(10 ** rng.uniform(-4, 1))
        mechanism = NormalizedGradient(
            7, float(10 ** rng.uniform(0, 3)), bound, shards=Shards(teachers)
        )
        value = rng.normal(size=(teachers, 1, 7)) * 10 ** rng.uniform(-6, 6, (teachers, 1, 1))
        encoded = np.stack([mechanism.constrain_sensitivity(each, ASKED) for each in value])
        grid = Fraction(lattice_spacing(mechanism.scale))
        own = [Fraction(int(np.trunc(v / float(grid)))) * grid for v in encoded[0].ravel()]
        more, less = (_exact(part, mechanism.scale, silent) for part in (encoded, encoded[1:]))
        assert [a - b for a, b in zip(more, less, strict=True)] == own
        assert square(encoded[0]) <= Fraction(bound) ** 2
        control = np.add.accumulate(encoded)[-1] - np.add.accumulate(encoded[1:])[-1]
        drifted += (control != encoded[0]).any()
    assert drifted > 30


def _exact(values, scale, rng):
    """A sum without noise, before seeded sums are rounded."""
    if isinstance(rng, SecureGenerator):
        total = noisy_sum(values, scale, "gaussian", rng)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fed_dpsd.privacy.noise.snap", lambda values, scale: values)
            total = noisy_sum(values, scale, "gaussian", rng)
    return [Fraction(float(value)) for value in total.ravel()]


@every("training", ["plain", "dp_sgd"])
@every("answers", ["gradient", "votes"])
def test_a_client_with_or_without_records_moves_a_sum_no_further_than_its_event(
    small, training, answers
):
    """Private teachers of no records answer at full length; plain ones answer zero."""
    few = ("training.steps=10",) if training == "dp_sgd" else ()
    experiment = small(f"training={training}", f"answers={answers}", *few)
    config, mechanism = experiment.config, experiment.answers
    images = np.zeros((1, 1, 8, 8), np.uint8)
    asked = np.full((1, 10), 0.1, np.float32)

    def encoded(label, count):
        own = Records(np.repeat(images, count, 0), np.full(count, label))
        teachers = Teachers(config, experiment.training, 0, own, np.arange(count))
        sensitive = teachers.sensitive_probabilities(Images(images)).astype(np.float64)[0]
        if answers == "gradient":
            sensitive = losses.decoupled_kd_gradient(sensitive, asked, 0.0)
        return mechanism.constrain_sensitivity(sensitive, asked)

    nothing = encoded(0, 0)
    assert (nothing == 0).all() == (training == "plain")
    moved = max(np.linalg.norm(encoded(label, 50) - nothing) for label in (3, 8))
    noise = mechanism.noise_multiplier * getattr(mechanism, "bound", 1.0)
    event = mechanism.event("client", "add_remove").events[0]
    allowed = noise / event.noise_multiplier
    assert moved <= allowed
    silent = replace(mechanism, shards=Shards(silent=True)).event("client", "add_remove").events[0]
    too_little = noise / silent.noise_multiplier  # the control: as if it answered zero
    assert (moved > too_little) == (training == "dp_sgd")


@every("noise", [1.0, 1e3, 2.0**26, 1e12, 1e30])
def test_votes_are_exact_or_zero_under_large_noise(silent, noise):
    """A vote below a step of its noise's grid is no vote: it moves a count by at most one."""
    votes = NoisyVotes(7, noise, shards=Shards(200))
    encoded = np.stack(
        [votes.constrain_sensitivity(np.eye(7)[[number % 7]], ASKED) for number in range(200)]
    )
    more, less = (_exact(part, votes.scale, silent) for part in (encoded, encoded[1:]))
    moved = [abs(a - b) for a, b in zip(more, less, strict=True)]
    assert moved in ([1, 0, 0, 0, 0, 0, 0], [0] * 7)
    assert (noise > 2.0**26) == (not any(moved))


def test_noise_that_is_too_small_for_an_exact_sum_is_refused():
    for mechanism in (NormalizedGradient, NoisyVotes):
        with pytest.raises(ValueError, match="noise_multiplier=1e-07 must be at least 1.53e-05"):
            mechanism(10, 1e-7)
        with pytest.raises(ValueError, match="must be at least 0.00153 for 100 teachers"):
            mechanism(10, 1e-5, shards=Shards(100))
