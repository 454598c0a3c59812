"""GEP: what a record adds to both sums, with which noise, and that the basis helps."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    pld,
)
from scipy import stats

from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.papers import gep
from fed_dpsd.papers.gep import GEP, split_by_basis
from fed_dpsd.privacy import dp_sgd
from fed_dpsd.privacy.accounting import best_bound
from fed_dpsd.streams import Streams
from tests.papers.test_dp_merf import halves

SMALL = {
    "noise_multiplier": 1.0,
    "sample_rate": 1.0,
    "steps": 1,
    "max_grad_norm": 0.5,
    "max_residual_norm": 0.1,
    "learning_rate": 0.01,
    "anchors": 16,
    "basis_size": 8,
    "power_iterations": 1,
}


def trained(images, labels, seed=0, **settings):
    teacher = initialise(lambda: CLASSIFIERS["cnn"]((1, 8, 8), 2, 4), Streams(0).torch("model"))
    mechanism = GEP(**SMALL | settings)
    mechanism.train(teacher, images, labels, Streams(seed).numpy("training"))
    return teacher


def sums(patch, images, labels, **settings):
    """The two sums of a step, as vectors in units of their bounds, before noise."""
    seen = []

    def spy(total, *_):
        seen.append(total.clone().numpy())
        return total.numpy()

    patch.setattr(gep, "add_gaussian_noise", spy)
    trained(images, labels, **settings)
    return seen


def test_a_record_adds_to_both_sums_its_own_part_of_at_most_1_whatever_it_holds(monkeypatch):
    """To the last bit; the control does not clip."""
    images, labels = halves(10)
    whole = sums(monkeypatch, images, labels)
    assert [len(total) for total in whole] == [8, 402]
    others = sums(monkeypatch, images[1:], labels[1:])
    reached = [0.0, 0.0]
    for value in (None, 1e3, 1e38, math.inf, math.nan):
        one = images[:1].clone() if value is None else torch.full((1, 1, 1, 8, 8), value)
        own = sums(monkeypatch, one, labels[:1])
        both = sums(monkeypatch, torch.cat([one, images[1:]]), labels)
        for place, (part, rest, total) in enumerate(zip(own, others, both, strict=True)):
            assert np.array_equal(total - rest, part)
            assert np.linalg.norm(part) <= 1
            reached[place] = max(reached[place], np.linalg.norm(part))
    assert min(reached) > 0.999  # the bounds are reached, so they are not vacuous

    def unclipped(gradients, bound):
        return [(part / bound / gep.lattice.UNIT).trunc() for part in gradients[:-1]]

    monkeypatch.setattr(gep.lattice, "clip", unclipped)
    broken = sums(monkeypatch, torch.full((2, 1, 1, 8, 8), 1e3), torch.tensor([0, 1]))
    assert min(map(np.linalg.norm, broken)) > 1


def test_a_patients_records_are_clipped_together(monkeypatch):
    images = torch.full((1, 3, 1, 8, 8), 1e3)
    patients = {"unit": "patient", "records_per_patient": 3}
    parts = [sums(monkeypatch, images, torch.tensor([[c] * 3]), **patients) for c in range(2)]
    norms = np.array([[np.linalg.norm(part) for part in both] for both in parts])
    assert norms.max() <= 1
    assert norms.max(0).min() > 0.999  # one of the two classes is wrong
    with pytest.raises(ValueError, match="3 copies of each record instead of 1"):
        trained(images, torch.tensor([0]))


def test_the_check_of_kernels_sees_the_layout_of_all_bases(monkeypatch):
    """Another layout may use another kernel, whose results depend on a record's place."""
    seen, honest = [], gep.split_by_basis

    def spy(gradients, basis):
        seen.append(basis.stride())
        return honest(gradients, basis)

    monkeypatch.setattr(gep, "split_by_basis", spy)
    trained(*halves(20))
    assert len(seen) > 2
    assert len(set(seen)) == 1


def test_a_step_samples_records_at_the_charged_rate(monkeypatch):
    """Of 10 * 200 records, within 5 standard deviations of 0.3: chance fails with 6e-7."""
    counts, honest = [], gep.lattice.pad

    def spy(inputs, labels, size):
        counts.append(len(labels))
        return honest(inputs, labels, size)

    monkeypatch.setattr(gep.lattice, "pad", spy)
    trained(*halves(200), steps=10, sample_rate=0.3)
    assert abs(sum(counts) - 600) < 5 * math.sqrt(2000 * 0.3 * 0.7)


def test_both_noises_make_one_gaussian_mechanism_and_half_of_one_is_found(monkeypatch):
    """1 / s_1^2 + 1 / s_2^2 = 1 / z^2; p-values below 1e-6 fail. The control halves one noise."""
    images, labels = halves(20)
    honest = dp_sgd.add_gaussian_noise

    def p_values(factor):
        seen = []

        def spy(total, noise_multiplier, size, rng):
            assert noise_multiplier == pytest.approx(math.sqrt(2) * 3.0)
            scale = noise_multiplier * (factor if size > 8 else 1)
            noisy = honest(total, scale, size, rng)
            seen.append((noisy - total.numpy()) / noise_multiplier)
            return noisy

        monkeypatch.setattr(gep, "add_gaussian_noise", spy)
        trained(images, labels, noise_multiplier=3.0, steps=3)
        return [
            stats.kstest(np.concatenate(noises), "norm").pvalue
            for noises in (seen[::2], seen[1::2])
        ]

    assert min(p_values(1.0)) > 1e-6 > p_values(0.5)[1]
    assert 2 / (math.sqrt(2) * 3.0) ** 2 == pytest.approx(1 / 3.0**2)


@pytest.mark.slow
def test_its_epsilon_is_dp_accountings():
    """Sampled steps by dp_accounting's PLD; golden for two Gaussians of sqrt(2) z each."""
    mechanism = GEP(**SMALL | {"noise_multiplier": 1.2, "sample_rate": 0.05, "steps": 40})
    parts = 1.2 * math.sqrt(2), 1.2 * math.sqrt(2)
    combined = 1 / math.sqrt(sum(1 / part**2 for part in parts))
    step = PoissonSampledDpEvent(0.05, GaussianDpEvent(combined))
    accountant = pld.PLDAccountant().compose(SelfComposedDpEvent(step, 40))
    proven = best_bound(mechanism.event("record", "add_remove"), 1e-5).epsilon
    assert proven == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
    assert proven == pytest.approx(1.6721, abs=0.01)


def test_the_basis_is_orthonormal_and_holds_most_of_the_public_gradients():
    """The control is a random basis of the same size."""
    rng = Streams(0).torch("test")
    directions = torch.randn((5, 300), generator=rng)
    gradients = [torch.randn((40, 5), generator=rng) @ directions]
    mechanism = GEP(**SMALL | {"basis_size": 5})

    def kept(basis):
        embedding, norms, residual, rest = split_by_basis(gradients, basis)
        assert torch.allclose(embedding @ basis.T + residual, gradients[0], atol=1e-3)
        assert torch.allclose(norms, embedding.norm(dim=1).double(), rtol=1e-5)
        return float((norms / torch.hypot(norms, rest)).min())

    found = mechanism.basis(_Fixed(gradients[0]), torch.zeros(40, 1), torch.zeros(40).long(), rng)
    assert torch.allclose(found.T @ found, torch.eye(5), atol=1e-5)
    random = torch.linalg.qr(torch.randn((300, 5), generator=rng)).Q
    assert kept(found) > 0.999 > 0.5 > kept(random)


class _Fixed:
    def __init__(self, gradients):
        self.gradients = gradients


@pytest.fixture(autouse=True)
def _fixed_gradients(monkeypatch):
    """Let a `_Fixed` stand for a network with these gradients."""
    honest = gep.lattice.single_gradients

    def single(model, inputs, labels):
        if isinstance(model, _Fixed):
            return [model.gradients, model.gradients.norm(dim=1)]
        return honest(model, inputs, labels)

    monkeypatch.setattr(gep.lattice, "single_gradients", single)


def test_a_basis_larger_than_the_network_is_refused():
    with pytest.raises(ValueError, match="a basis of at most 402"):
        trained(*halves(1), anchors=700, basis_size=700)
