"""Private training: its bounds, sampling and noise law, the class counts, and their events."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dp_accounting import (
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from torch import nn

from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.dp_sgd import DPSGD, MOST_DRAWS, PRECISION_LOSS, add_gaussian_noise
from fed_dpsd.privacy.events import ReplacedInSampleDpEvent
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS
from fed_dpsd.privacy.noise import lattice_spacing
from fed_dpsd.privacy.training import ClassCounts
from tests.every import every
from tests.privacy.ideals import ideal, rng
from tests.proofs import gaussian_epsilon


def dp_sgd(**fields):
    values = {"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 1, "max_grad_norm": 0.5}
    values |= {"learning_rate": 1.0, "copies": 1}
    return DPSGD(**(values | fields))


def counting(noise, **fields):
    """DP-SGD whose class counts have this noise."""
    mechanism = dp_sgd(**fields, count_fraction=1.0)
    return replace(mechanism, count_fraction=(mechanism.count_noise / noise) ** 2)


@pytest.fixture
def _plain_steps(monkeypatch):
    """Steps equal to the noisy sum, to make it visible."""
    monkeypatch.setattr("fed_dpsd.privacy.dp_sgd.Adam", torch.optim.SGD)


def trained(mechanism, images, seed, features=4_000):
    """How far training with plain steps moves a linear layer from zero, negated."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, 2, bias=False))
    nn.init.zeros_(model[1].weight)
    labels = torch.zeros(len(images), dtype=torch.long)
    copies = images[:, None].repeat(1, mechanism.copies, 1, 1, 1)
    mechanism.train(model, copies, labels, rng(seed))
    return -model[1].weight.detach().double().numpy()


@pytest.mark.usefixtures("_plain_steps")
def test_training_noise_has_tails():
    """Torch's float32 normals end at 5.77 deviations, which delta = 1e-5 would notice."""
    seen = []

    class Recorder(np.random.Generator):
        def normal(self, *arguments):
            seen.append(super().normal(*arguments))
            return seen[-1]

    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
    recorder = Recorder(np.random.PCG64(0))
    dp_sgd().train(model, torch.zeros(0, 1, 1, 1, 4), torch.zeros(0, dtype=torch.long), recorder)
    (drawn,) = seen
    assert drawn.dtype == np.float64
    assert (drawn != drawn.astype(np.float32)).all()


def test_noise_makes_up_for_how_far_its_lattice_moves_a_sum():
    """Truncating each number may move two sums further apart than a record does."""
    drawn, noise, size = [], 1e4, 2**20
    watched = SimpleNamespace(normal=lambda *law: drawn.append(law[1]) or np.zeros(law[2]))
    add_gaussian_noise(torch.zeros(2), noise, size, watched)
    moved = 1 + lattice_spacing(drawn[0]) * size**0.5
    assert noise * 1.1 < noise * moved <= drawn[0]


@pytest.mark.usefixtures("_plain_steps")
@every("copies", [1, 3])
def test_a_record_moves_a_step_by_its_bound_at_most_whatever_it_holds(copies):
    """Noise of 1e-6 of the bound makes the sum visible; non-finite gradients count as zero."""
    mechanism = dp_sgd(noise_multiplier=1e-6, sample_rate=1.0, copies=copies)
    for value in (1e-3, 1.0, 1e18, 1e38, math.inf, math.nan):
        moved = np.linalg.norm(trained(mechanism, torch.full((1, 1, 1, 4_000), value), 0))
        assert moved <= 0.5 * (1 + 1e-4)
        assert value != 1.0 or moved > 0.49  # the bound is reached, so it is not vacuous


def test_a_layer_that_mixes_records_is_refused():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))
    images, labels = torch.zeros(2, 1, 1, 1), torch.zeros(2, dtype=torch.long)
    with pytest.raises(NotImplementedError, match="BatchNorm"):
        dp_sgd().train(model, images[:, None], labels, rng())


def test_a_layer_with_draws_that_depend_on_other_records_is_refused():
    """One record less would change all dropout masks and move a sum by many bounds."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(2, 2))
    images, labels = torch.zeros(2, 1, 1, 1, 2), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="a layer draws random numbers in training"):
        dp_sgd().train(model, images, labels, rng())


def test_trainings_that_no_bound_here_covers_are_refused():
    """So many draws that precision matters, and sums that the noise's grid truncates."""
    layer, inputs, labels = nn.Linear(6, 3), torch.zeros(1, 1, 6), torch.zeros(1, dtype=torch.long)
    steps = MOST_DRAWS // 1_600
    with pytest.raises(ValueError, match="42,949,672 steps of 21 parameters draw more than"):
        dp_sgd(steps=steps).train(layer, inputs, labels, rng())
    with pytest.raises(ValueError, match=r"noise_multiplier=1e\+07 is too large for 21 parameters"):
        dp_sgd(noise_multiplier=1e7).train(layer, inputs, labels, rng())


# --- a linear layer: the same steps without forming the gradients ---


def stepped(mechanism, inputs, labels, seed, opacus=False):
    """A linear layer with fixed weights after training; Opacus gets it inside another module."""
    layer = nn.Linear(inputs.shape[2], 3)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(rng(1).normal(size=layer.weight.shape)))
        layer.bias.copy_(torch.tensor([0.3, 0.0, -0.2]))
    mechanism.train(nn.Sequential(layer) if opacus else layer, inputs, labels, rng(seed))
    return np.append(layer.weight.detach().numpy(), layer.bias.detach().numpy())


def some_records(count=40, features=6, copies=1):
    inputs = torch.from_numpy(rng(2).normal(size=(count, copies, features))).float()
    inputs = torch.round(inputs * 16) / 16  # which a linear layer takes as they are
    return inputs, torch.from_numpy(rng(3).integers(0, 3, count))


@every("copies", [1, 3])
@every("rate", [0.4, 1.0])
def test_a_linear_layer_takes_the_same_steps_as_by_opacus(rate, copies):
    """Sampling, clipping (of some records), noise and Adam, for 20 steps."""
    inputs, labels = some_records(copies=copies)
    inputs[:5] /= 16
    inputs = torch.round(inputs * 16) / 16
    fields = {"sample_rate": rate, "steps": 20, "learning_rate": 0.1, "copies": copies}
    mechanism = dp_sgd(**fields)
    fast, formed = (stepped(mechanism, inputs, labels, 5, opacus) for opacus in (False, True))
    assert fast == pytest.approx(formed, abs=5e-3)
    assert np.abs(fast - stepped(mechanism, inputs, labels, 6)).max() > 0.1  # other draws
    loose = dp_sgd(**fields, max_grad_norm=0.6)
    assert np.abs(fast - stepped(loose, inputs, labels, 5)).max() > 0.01  # another bound


# --- class counts ---


def test_a_record_moves_the_counts_as_the_events_say():
    """All small data sets and all changes of one record, with noise of 1e-9."""
    mechanism = counting(1e-9)
    largest = {"add_remove": 0.0, "replace_one": 0.0}
    for labels in ([0], [0, 1], [2, 2, 1]):
        before = mechanism.count(np.array(labels), 3, rng())
        removed = mechanism.count(np.array(labels[1:], np.int64), 3, rng())
        largest["add_remove"] = max(largest["add_remove"], np.linalg.norm(before - removed))
        for other in range(3):
            after = mechanism.count(np.array([other, *labels[1:]]), 3, rng())
            largest["replace_one"] = max(largest["replace_one"], np.linalg.norm(before - after))
    mechanism = counting(6.0)
    for relation, shift in largest.items():
        counts = ideal(mechanism.count_event("record", relation))
        assert counts.noise_multiplier == pytest.approx(6.0 / shift)


def test_another_number_of_copies_is_refused():
    """Clipped to a third each, one copy too many would exceed the bound."""
    with pytest.raises(ValueError, match="4 copies of each record instead of 3"):
        stepped(dp_sgd(copies=3), *some_records(copies=4), 0)


def test_no_counts_are_released_unasked():
    assert not dp_sgd().counts_classes
    with pytest.raises(ValueError, match="count_fraction=None releases no class counts"):
        dp_sgd().count(np.array([1]), 3, rng())
    event = ideal(dp_sgd(steps=7).event("record", "add_remove"))
    assert event == SelfComposedDpEvent(PoissonSampledDpEvent(0.5, GaussianDpEvent(1.0)), 7)


# --- events ---


@every("unit", ["record", "patient"])
def test_events_follow_unit_rate_relation_and_counts(unit):
    """If patients are the unit, a record replaces its patient."""
    for share, rate in itertools.product((None, 0.25), (0.5, 1.0)):
        values = {"noise_multiplier": 3.0, "sample_rate": rate, "steps": 7, "count_fraction": share}
        mechanism = dp_sgd(**values, unit=unit, records_per_patient=1 if unit == "record" else 4)
        added, replaced = GaussianDpEvent(3.0), GaussianDpEvent(1.5)
        if rate < 1:
            added, replaced = PoissonSampledDpEvent(rate, added), ReplacedInSampleDpEvent(rate, 3.0)
        noise = 3.0 / rate / (7 * 0.25) ** 0.5
        expected = {(unit, "add_remove"): (added, noise)}
        pairs = [(unit, "replace_one")]
        pairs += [("record", "add_remove"), ("record", "replace_one")] * (unit == "patient")
        expected |= dict.fromkeys(pairs, (replaced, noise / 2**0.5))
        for pair in UNITS_AND_RELATIONS:
            if pair not in expected:
                assert mechanism.event(*pair) == NonPrivateDpEvent()
                if share:
                    assert mechanism.count_event(*pair) == NonPrivateDpEvent()
                continue
            step, counted = expected[pair]
            assert ideal(mechanism.event(*pair)) == SelfComposedDpEvent(step, 7)
            if share:  # charged by themselves
                counts = GaussianDpEvent(pytest.approx(counted))
                assert ideal(mechanism.count_event(*pair)) == counts


@every(
    ("sigma", "steps", "counts", "add_remove", "replace_one"),
    [
        (5.0, 100, 30.0, 9.99897, 24.3839),
        (40.0, 100, math.inf, 0.926342, 1.99309),
        (1e6, 1, 30.0, 0.102740, 0.150076),
    ],
)
def test_a_training_on_all_records_is_one_gaussian(sigma, steps, counts, add_remove, replace_one):
    """Exact: mu^2 = steps / sigma^2 + 1 / count_noise^2, or four times and twice as much."""
    mechanism = dp_sgd(noise_multiplier=sigma, sample_rate=1.0, steps=steps)
    if counts < math.inf:
        mechanism = counting(counts, noise_multiplier=sigma, sample_rate=1.0, steps=steps)
    assert mechanism.count_noise == pytest.approx(counts)
    histogram = mechanism.count_noise**-2
    for relation, factors, golden in (
        ("add_remove", (1, 1), add_remove),
        ("replace_one", (4, 2), replace_one),
    ):
        mu = (factors[0] * steps / sigma**2 + factors[1] * histogram) ** 0.5
        stages = [Stage(mechanism, 1, 0)]
        stages += [Stage(ClassCounts(mechanism), 1, 0)] if mechanism.counts_classes else []
        claim = prove(stages, 1e-5, "record", relation)
        # In addition, the loss due to the finite precision of all draws.
        assert claim.value == pytest.approx(gaussian_epsilon(mu) + PRECISION_LOSS, rel=1e-6)
        assert claim.value == pytest.approx(golden, rel=1e-4)
        assert claim.accountant == "gdp_exact"
