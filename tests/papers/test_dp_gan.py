"""DP-GAN: what a record moves, what leaves with which noise, and that images are learnt."""

import contextlib
import functools
import math

import numpy as np
import pytest
import torch
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
)
from dp_accounting.pld import PLDAccountant

from fed_dpsd.errors import Diverged
from fed_dpsd.papers.dp_gan import DPGAN
from fed_dpsd.papers.generative import ConditionalGenerator
from fed_dpsd.privacy import dp_sgd, lattice
from fed_dpsd.privacy.accounting import best_bound
from tests.papers.test_dp_merf import halves, noise_seen, p_value_of, trained

SMALL = {
    "generator_steps": 40,
    "classifier_steps": 40,
    "batch_size": 32,
    "latent_size": 4,
    "generator_width": 4,
    "generator_learning_rate": 0.01,
    "learning_rate": 0.01,
    "critic_steps": 1,
    "sample_rate": 0.5,
    "max_grad_norm": 1.0,
    "critic_width": 2,
    "critic_learning_rate": 0.02,
    "weight_clip": 0.5,
}
SHORT = SMALL | {"generator_steps": 2, "classifier_steps": 1}


def sums(patch, images, labels):
    """The sums of one step of the critic, as one vector in units of its bound, before noise."""
    seen = []

    def spy(total, *_):
        seen.append(total.numpy().ravel())
        return np.zeros(total.shape)

    patch.setattr(dp_sgd, "add_gaussian_noise", spy)
    one = SHORT | {"generator_steps": 1, "sample_rate": 1.0, "max_grad_norm": 0.05}
    with contextlib.suppress(Diverged):
        trained(DPGAN(noise_multiplier=1.0, **one), images, labels)
    return np.concatenate(seen)


@pytest.mark.parametrize("diverged", [False, True])
def test_a_record_moves_a_step_by_its_own_part_of_at_most_the_bound(diverged, monkeypatch):
    """To the last bit, whatever it holds, if generated images are NaN too; the bound is reached."""
    if diverged:
        honest = ConditionalGenerator.forward
        monkeypatch.setattr(ConditionalGenerator, "forward", lambda *args: honest(*args) * math.nan)
    images, labels = halves(5)
    others, reached = sums(monkeypatch, images[1:], labels[1:]), 0.0
    for value in (None, 1e3, 1e38, math.inf, math.nan):
        one = images[:1].clone() if value is None else torch.full((1, 1, 1, 8, 8), value)
        own = sums(monkeypatch, one, labels[:1])
        whole = sums(monkeypatch, torch.cat([one, images[1:]]), labels)
        assert np.array_equal(whole - others, own)
        assert np.linalg.norm(own) <= 1
        reached = max(reached, np.linalg.norm(own))
    assert diverged or reached > 0.999


def test_a_step_samples_records_at_the_charged_rate(monkeypatch):
    """Of 20 * 100 records, within 5 standard deviations of 0.3: chance fails with 6e-7."""
    counts, honest = [], lattice.pad

    def spy(inputs, labels, size):
        counts.append(len(labels))
        return honest(inputs, labels, size)

    monkeypatch.setattr(lattice, "pad", spy)
    settings = SHORT | {"generator_steps": 1, "critic_steps": 20, "sample_rate": 0.3}
    trained(DPGAN(noise_multiplier=1.0, **settings), *halves(100))
    assert abs(sum(counts) - 600) < 5 * math.sqrt(2000 * 0.3 * 0.7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("relation", "library"),
    [
        ("add_remove", NeighboringRelation.ADD_OR_REMOVE_ONE),
        ("replace_one", NeighboringRelation.REPLACE_ONE),
    ],
)
def test_its_epsilon_is_that_of_all_the_critics_steps(relation, library):
    settings = SMALL | {"generator_steps": 10, "critic_steps": 4, "sample_rate": 0.02}
    mechanism = DPGAN(noise_multiplier=1.1, **settings)
    accountant = PLDAccountant(library)
    accountant.compose(PoissonSampledDpEvent(0.02, GaussianDpEvent(1.1)), 40)
    proven = best_bound(mechanism.event("record", relation), 1e-5).epsilon
    assert proven == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_every_step_has_its_noise_and_half_of_it_is_found(monkeypatch):
    """The control is a sum with half the noise; p-values below 1e-6 fail."""
    images, labels = halves(20)
    mechanism = DPGAN(noise_multiplier=2.0, **SHORT | {"critic_steps": 3})

    def p_value(factor):
        train = functools.partial(trained, mechanism, images, labels)
        seen = noise_seen(monkeypatch, dp_sgd, train, 2.0, factor)
        assert len(seen) == 6 * 6  # weights and biases of three layers
        return p_value_of(seen)

    assert p_value(1.0) > 1e-6 > p_value(0.5)
