"""Patients as the unit of private training: bounds, the choice of records, counts and events.

The controls bound each record by itself and add up a patient's records; the same checks catch them.
"""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant
from scipy import stats
from torch import nn

from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.privacy import lattice
from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.dp_sgd import DPSGD, PRECISION_LOSS
from fed_dpsd.privacy.noise import lattice_spacing
from fed_dpsd.privacy.training import patient_places
from tests.every import every
from tests.privacy.ideals import ideal, rng
from tests.privacy.per_record import clip_records_alone

R = 4  # records of a patient


def by_patient(**fields):
    values = {"noise_multiplier": 1.0, "sample_rate": 1.0, "steps": 1, "max_grad_norm": 0.5}
    values |= {"learning_rate": 0.1, "unit": "patient", "records_per_patient": R}
    return DPSGD(**(values | fields))


# --- the records that represent a patient ---


def test_a_patients_records_are_taken_in_turn():
    patients = np.array([7, -3, 7, 7, 9, -3])
    assert patient_places(patients, 2).tolist() == [[1, 5], [0, 2], [4, 4]]
    assert patient_places(patients, 4).tolist() == [[1, 5, 1, 5], [0, 2, 3, 0], [4, 4, 4, 4]]
    assert patient_places(patients[:0], 3).shape == (0, 3)


def test_the_choice_of_records_does_not_depend_on_other_patients():
    """Other patients are added or removed anywhere: a patient's own records stay the same."""
    for seed in range(50):
        draw = rng(seed)
        patients = draw.integers(0, 6, 30)
        records = np.arange(100, 130)  # what distinguishes records
        for most in (1, 3, 8):
            before = {tuple(records[row]) for row in patient_places(patients, most)}
            kept = np.flatnonzero(patients != patients[0])
            after = {tuple(records[kept][row]) for row in patient_places(patients[kept], most)}
            assert after < before
            assert len(before - after) == 1


# --- the sum of a step ---


def per_record(patch):
    """The control: each record of a patient is clipped by itself, and all of them are added."""
    clip_records_alone(patch, lambda norms: 0.5 / norms.clamp_min(0.5))


def model_of(linear):
    if linear:
        model = nn.Linear(64, 10)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model
    build = functools.partial(CLASSIFIERS["cnn"], (1, 8, 8), 10, 4)
    return initialise(build, torch.Generator().manual_seed(0))


def seen_sum(mechanism, linear, inputs, labels):
    """The single sum, in whole multiples of UNIT, to which training of one step adds noise."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DPSGD, "_noisy", lambda self, total, size, rng: (seen.append(total), total.float())[1]
        )
        given = (inputs - 0.5).flatten(2) if linear else inputs
        mechanism.train(model_of(linear), given, labels, rng())
    flat = np.concatenate([part.numpy().ravel() for part in seen]) / lattice.UNIT
    assert (flat == np.round(flat)).all()
    return flat


def some_patients(count, places=R):
    """Patients whose records and labels differ, and first one of equal records."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand((count, places, 1, 8, 8), generator=generator)
    labels = torch.randint(10, (count, places), generator=generator)
    inputs[0], labels[0] = inputs[0, :1], 3
    return inputs, labels


def length(difference):
    return math.sqrt(np.square(difference).sum()) * lattice.UNIT


@every("linear", [True, False])
@every("copies", [1, 2])
def test_a_patient_moves_a_step_by_their_own_part_of_at_most_the_bound(linear, copies):
    """Added, removed, replaced, or with another record; to the last bit."""
    mechanism = by_patient(copies=copies, max_grad_norm=1e-2)
    inputs, labels = some_patients(37, R * copies)
    add = functools.partial(seen_sum, mechanism, linear)
    total = add(inputs, labels)
    for gone in (0, 5):
        rest = torch.arange(len(inputs)) != gone
        own = add(inputs[[gone]], labels[[gone]])
        assert (total - add(inputs[rest], labels[rest]) == own).all()
        assert 0.99 < length(own) <= 1  # every patient here is clipped, so the test is not vacuous
    changed, names = inputs.clone(), labels.clone()
    changed[0, 1], names[0] = 1 - changed[0, 1], 4
    assert 1 < length(total - add(changed, names)) <= 2
    one = labels.clone()
    one[0, 1] = 4
    assert 0 < length(total - add(inputs, one)) <= 2


@every("linear", [True, False])
def test_records_that_are_clipped_by_themselves_are_caught(monkeypatch, linear):
    """The control: four equal records of one patient move the sum by four bounds."""
    per_record(monkeypatch)
    inputs, labels = some_patients(3)
    add = functools.partial(seen_sum, by_patient(), linear)
    moved = length(add(inputs, labels) - add(inputs[1:], labels[1:]))
    assert moved == pytest.approx(R, rel=1e-2)


def test_no_patient_of_random_data_leaves_the_bound_however_many_places():
    """Labels that differ, copies that cancel, inputs of all sizes, 1 to 64 places."""
    largest = 0.0
    for seed in range(40):
        draw = rng(seed)
        places, classes = int(draw.choice([1, 2, 7, 25, 64])), int(draw.integers(2, 12))
        kinds = draw.normal(size=(5, places, 60)) * 10 ** draw.uniform(-2, 1.5, (5, 1, 1))
        if draw.random() < 0.5:
            kinds[:, 1::2] = -kinds[:, ::2][:, : places // 2]
        inputs = torch.from_numpy(kinds).float()
        labels = torch.from_numpy(draw.integers(classes, size=(5, places)))
        layer = nn.Linear(60, classes)

        def add(chosen, layer=layer, inputs=inputs, labels=labels):
            with torch.no_grad():
                records = lattice.Rows.of(inputs[chosen], labels[chosen])
                parts = lattice.linear_sum(layer, records, 0.1)
            return np.concatenate([part.numpy().ravel() for part in parts]) / lattice.UNIT

        total, own = add(slice(None)), add(slice(1))
        assert (total - add(slice(1, None)) == own).all()
        assert length(own) <= 1
        largest = max(largest, length(own))
    assert largest > 0.99


@every("linear", [True, False])
def test_a_patients_gradient_is_the_mean_over_their_records_with_their_own_labels(linear):
    """Compared with autograd where nothing is clipped."""
    inputs, labels = some_patients(2)
    labels[1] = torch.tensor([0, 1, 2, 9])
    model = model_of(linear)
    rows = torch.round((inputs[1] - 0.5).flatten(1) * 16) / 16 if linear else inputs[1]
    nn.functional.cross_entropy(model(rows), labels[1]).backward()
    expected = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
    mechanism = by_patient(max_grad_norm=100.0)
    own = seen_sum(mechanism, linear, inputs[1:], labels[1:]) * lattice.UNIT * 100
    assert own == pytest.approx(expected, abs=2e-3)
    same = seen_sum(mechanism, linear, inputs[1:], labels[1:] * 0) * lattice.UNIT * 100
    assert np.abs(same - expected).max() > 0.05  # the labels matter


def test_a_step_without_patients_is_noise_alone(monkeypatch):
    """No patient at all, and none sampled; rejects the right law with probability 1e-6."""
    monkeypatch.setattr("fed_dpsd.privacy.dp_sgd.Adam", torch.optim.SGD)
    for count, rate in ((0, 1.0), (3, 1e-9)):
        layer = nn.Linear(2_000, 2)
        nn.init.zeros_(layer.weight)
        mechanism = by_patient(learning_rate=1.0, sample_rate=rate)
        labels = torch.zeros((count, R), dtype=torch.long)
        mechanism.train(layer, torch.ones(count, R, 2_000), labels, rng(1))
        noise = layer.weight.detach().double().numpy().ravel()
        assert stats.kstest(noise, stats.norm(scale=0.5).cdf).pvalue > 1e-6
        assert stats.kstest(noise, stats.norm(scale=0.5 * R).cdf).pvalue < 1e-6


def test_patients_are_sampled_each_with_all_their_records(monkeypatch):
    """40 steps, a coordinate for each patient: whole parts, binomially many (level 1e-6)."""
    monkeypatch.setattr("fed_dpsd.privacy.dp_sgd.Adam", torch.optim.SGD)
    model = nn.Sequential(nn.Linear(50, 2, bias=False))
    nn.init.zeros_(model[0].weight)
    mechanism = by_patient(noise_multiplier=1e-9, sample_rate=0.3, steps=40, learning_rate=1e-9)
    inputs = torch.eye(50)[:, None].repeat(1, R, 1) * 1e3
    mechanism.train(model, inputs, torch.zeros((50, R), dtype=torch.long), rng())
    steps = model[0].weight[0].detach().double().numpy() / (1e-9 * 0.5 / 2**0.5)
    assert np.abs(steps - np.round(steps)).max() < 0.01
    assert stats.binomtest(round(steps.sum()), 50 * 40, 0.3).pvalue > 1e-6
    assert stats.binomtest(round(steps.sum()), 50 * 40, 0.36).pvalue < 1e-6


# --- class counts ---


def counting(noise, **fields):
    mechanism = by_patient(**fields, count_fraction=1.0)
    return replace(mechanism, count_fraction=(mechanism.count_noise / noise) ** 2)


def largest_moves(count):
    """How far one patient of three places moves `count`, over all patients and two others."""
    rows = [np.array(row) for row in itertools.combinations_with_replacement(range(3), 3)]
    others = np.array([[0, 1, 1], [2, 2, 2]])
    values = [count(np.vstack([others, row])) for row in rows]
    without = count(others)
    return {
        "add_remove": max(np.linalg.norm(value - without) for value in values),
        "replace_one": max(np.linalg.norm(a - b) for a in values for b in values),
    }


def test_a_patient_moves_the_counts_as_the_events_say():
    """All patients of three places in three classes, with noise of 1e-9."""
    mechanism = counting(1e-9, records_per_patient=3)
    moves = largest_moves(lambda labels: mechanism.count(labels, 3, rng()))
    assert moves == pytest.approx({"add_remove": 1, "replace_one": math.sqrt(2)})
    mechanism = counting(6.0, records_per_patient=3)
    for relation, shift in moves.items():
        counts = ideal(mechanism.count_event("patient", relation))
        assert counts.noise_multiplier == pytest.approx(6.0 / shift)
    every_record = largest_moves(lambda labels: np.bincount(labels.ravel(), minlength=3))
    assert every_record["add_remove"] == 3  # the control


@every("noise", [10.0, 2.0**24, 2.0**26, 1e9, 1e12])
@every("most", [1, 3, 16])
def test_counts_on_a_coarse_lattice_move_as_their_event_states(noise, most, monkeypatch):
    """The worst classes: counts just below a step of the lattice that cross it."""
    mechanism = counting(noise, records_per_patient=most)
    charged = ideal(mechanism.count_event("patient", "add_remove"))
    step = max(1, int(lattice_spacing(noise * most)))
    monkeypatch.setattr("fed_dpsd.privacy.noise.snap", lambda values, scale: values)
    moved = []
    for spread in {1, most}:  # all records in one class, or each in its own
        parts = np.zeros(most, np.int64)
        parts[:spread] = most // spread
        sums = []
        for added in (0, 1):
            exact = np.full(most, step - 1) + added * parts
            monkeypatch.setattr(np, "bincount", lambda labels, minlength, exact=exact: exact)
            silent = Silent(np.random.PCG64(0))
            labels = np.zeros((1, most), np.int64)
            sums.append(mechanism.count(labels, most, silent))
        moved.append(np.linalg.norm(sums[1] - sums[0]) / noise)
    assert 0 < max(moved) <= 1 / charged.noise_multiplier * (1 + 1e-9)


class Silent(np.random.Generator):
    """A generator whose noise is zero."""

    def normal(self, loc, scale, size):
        return np.zeros(size)


# --- events ---


def test_a_patients_epsilon_is_dp_accountings():
    """By its PLD accountant, from hand-made events; a record costs the same as a replaced one."""
    mechanism = by_patient(noise_multiplier=1.5, sample_rate=0.02, steps=200)
    step = PoissonSampledDpEvent(0.02, GaussianDpEvent(1.5))
    accountant = PLDAccountant().compose(SelfComposedDpEvent(step, 200))
    claims = {
        pair: prove([Stage(mechanism, 1, 256)], 1e-5, *pair).value
        for pair in itertools.product(("record", "patient"), ("add_remove", "replace_one"))
    }
    patient = claims["patient", "add_remove"]
    assert patient == pytest.approx(accountant.get_epsilon(1e-5) + PRECISION_LOSS, rel=2e-3)
    single = replace(mechanism, unit="record", records_per_patient=1)
    assert patient == prove([Stage(single, 1, 256)], 1e-5, "record", "add_remove").value
    assert claims["record", "add_remove"] == claims["record", "replace_one"]
    assert claims["record", "add_remove"] == claims["patient", "replace_one"] > 1.5 * patient


def test_reasons_name_the_unit_that_has_no_bound():
    assert by_patient().reason == "a client's number of patients is not bounded"
    single = by_patient(unit="record", records_per_patient=1)
    assert "a patient's or client's number of records is not bounded" in single.reason


# --- settings ---


def test_shapes_that_are_not_the_units_are_refused():
    layer, mechanism = nn.Linear(6, 3), by_patient(copies=2, count_fraction=1.0)
    single = by_patient(unit="record", records_per_patient=1, count_fraction=1.0)
    flat, each = torch.zeros(2, dtype=torch.long), torch.zeros((2, 8), dtype=torch.long)
    with pytest.raises(ValueError, match="4 copies of each patient instead of 8"):
        mechanism.train(layer, torch.zeros(2, 4, 6), each, rng())
    with pytest.raises(ValueError, match=r"labels of shape \(2,\) instead of \(2, 8\)"):
        mechanism.train(layer, torch.zeros(2, 8, 6), flat, rng())
    with pytest.raises(ValueError, match=r"labels of shape \(2, 8\) instead of \(2,\)"):
        single.train(layer, torch.zeros(2, 1, 6), each, rng())
    with pytest.raises(ValueError, match=r"labels of shape \(2,\) instead of \(2, 4\)"):
        mechanism.count(flat.numpy(), 3, rng())
    with pytest.raises(ValueError, match=r"labels of shape \(2, 8\) instead of \(2,\)"):
        single.count(each.numpy(), 3, rng())
