"""GS-WGAN: what a record changes, what leaves with which noise, and that images are learnt."""

import functools
import math

import numpy as np
import pytest
import torch
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    SampledWithoutReplacementDpEvent,
)
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant

from fed_dpsd.papers import gs_wgan
from fed_dpsd.papers.gs_wgan import GSWGAN, Group, Shards, clip_gradients
from fed_dpsd.privacy.accounting import best_bound
from fed_dpsd.privacy.events import ReplacedInSampleDpEvent
from fed_dpsd.privacy.laws import discretised_delta
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.streams import Streams
from tests.papers.test_dp_merf import halves, noise_seen, p_value_of, trained

SMALL = {
    "generator_steps": 60,
    "classifier_steps": 40,
    "batch_size": 16,
    "latent_size": 4,
    "generator_width": 4,
    "generator_learning_rate": 0.02,
    "learning_rate": 0.01,
    "discriminators": 12,
    "discriminator_width": 8,
    "discriminator_learning_rate": 0.01,
    "discriminator_batch_size": 8,
    "discriminators_at_once": 4,
    "discriminator_steps": 1,
    "first_steps": 5,
}
SHORT = SMALL | {"generator_steps": 3, "classifier_steps": 1, "first_steps": 1}


def test_a_gradient_is_at_most_one_and_finite():
    """The control is a gradient whose norm is not bounded."""
    gradients = torch.randn((50, 3, 8, 8), generator=Streams(0).torch("test"))
    gradients[0], gradients[1, 0, 0, 0], gradients[2] = math.nan, math.inf, 1e-3
    bounded = clip_gradients(gradients)
    norms = bounded.flatten(1).norm(dim=1)
    assert norms.isfinite().all()
    assert norms.max() <= 1 < gradients[3].norm()
    assert norms[0] == 0
    assert torch.allclose(bounded[2].float(), gradients[2], rtol=1e-4)
    assert torch.equal(clip_gradients(gradients[7:8])[0], bounded[7])


class Coupled:
    """Uniform draws that give the last records the same shards, however many come before them.

    Args:
        picks: a list of each step's draws that pick discriminators.
    """

    def __init__(self, picks=()):
        self.picks = list(picks)
        self.shards = np.random.default_rng(0).random(100)

    def random(self, count):
        if self.picks and count == len(self.picks[0]):
            return self.picks.pop(0)
        return self.shards[-count:]


@pytest.fixture
def groups(monkeypatch):
    """The groups of discriminators of the last training, whose generator sees no record."""
    made, honest = [], Group.__init__

    def spy(group, *args):
        honest(group, *args)
        made.append(group)

    monkeypatch.setattr(Group, "__init__", spy)
    monkeypatch.setattr(gs_wgan, "noisy_sum", lambda values, *_: np.ones(values.shape[1:]))
    return made


def test_a_record_changes_one_discriminator_and_picks_change_none(groups):
    """To the last bit; the control is an order of records that depends on all of them."""
    images, labels = halves(60)
    changed = images.clone()
    changed[17] = 0.5
    mechanism = GSWGAN(noise_multiplier=1.0, **SHORT)

    def weights(images, labels, pick=0.0):
        groups.clear()
        trained(mechanism, images, labels, rng=Coupled([np.full(16, pick)] * 3))
        assert len(groups) == 3
        found = [p.detach().flatten(1) for g in groups for p in g.parameters.values()]
        return torch.cat([torch.cat(found[i : i + 4], 1) for i in (0, 4, 8)])

    whole = weights(images, labels)
    for other, moved in (
        (weights(images, labels, 0.99), 0),
        (weights(changed, labels), 1),
        (weights(images[1:], labels[1:]), 1),  # all others move by a place
    ):
        assert (whole != other).any(1).sum() == moved
    assert (whole != weights(images.roll(1, 0), labels.roll(1, 0))).any(1).sum() > 1


def test_shards_are_disjoint_and_empty_ones_are_blank():
    images, labels = halves(30)
    one_hot = torch.nn.functional.one_hot(labels, 2)
    marked = images[:, 0] * 0 + torch.arange(1, 31).view(-1, 1, 1, 1)
    shards = Shards(marked, one_hot, 40, Streams(0).numpy("shards"))
    places = (torch.arange(200) / 200).expand(40, -1)
    taken, classes = shards.take(torch.arange(40), places)
    found = [set(each[:, 0, 0, 0].int().tolist()) for each in taken]
    held = [records for records in found if records != {0}]
    assert sum(map(len, held)) == 30 == len(set().union(*held))
    assert len(held) < 40
    empty = torch.tensor([records == {0} for records in found])
    assert classes[empty].sum() == 0


@pytest.mark.slow
def test_a_release_loses_no_more_than_its_event():
    """Other centres and the changed one anywhere, 2 apart at most: two dimensions, by integration.

    The control is the event of centres that are half as far apart.
    """
    noise, others = 0.9, 2
    axis = np.linspace(-6, 6, 121)
    grid = np.stack(np.meshgrid(axis, axis), -1)
    cell = (axis[1] - axis[0]) ** 2

    def normal(centre):
        squares = ((grid - np.asarray(centre)) ** 2).sum(-1)
        return np.exp(-squares / (2 * noise**2)) / (2 * math.pi * noise**2) * cell

    def charged(noise_multiplier, bound):
        return discretised_delta([(ReplacedInSampleDpEvent(1 / 3, noise_multiplier), 1)], bound)

    whole = {bound: charged(noise / 2, bound) for bound in (0.2, 1.5)}
    angle = 2 * math.pi / 3
    corner = (math.cos(angle), math.sin(angle))
    for first, second, rest in (
        ((1, 0), (-1, 0), [(-1, 0), (-1, 0)]),
        ((1, 0), (-1, 0), [(0, 0), (0, 1)]),
        ((1, 0), corner, [(corner[0], -corner[1])] * 2),
        ((1, 0), (0, 0), [(-1, 0), (-1, 0)]),
    ):
        common = sum(normal(centre) for centre in rest) / (others + 1)
        before, after = (common + normal(each) / (others + 1) for each in (first, second))
        for bound, delta in whole.items():
            lost = max(
                np.maximum(p - math.exp(bound) * q, 0).sum()
                for p, q in ((before, after), (after, before))
            )
            assert lost <= delta
    both = (2 * normal((-1, 0)) + normal((1, 0))) / 3
    assert charged(noise, 1.5) < np.maximum(both - math.exp(1.5) * normal((-1, 0)), 0).sum()


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_its_epsilon_is_that_of_a_mixture_for_each_image(relation):
    settings = SMALL | {"generator_steps": 50, "batch_size": 8, "discriminators": 100}
    mechanism = GSWGAN(noise_multiplier=2.0, **settings)
    proven = best_bound(mechanism.event("record", relation), 1e-5).epsilon
    image = pld.from_gaussian_mechanism(
        1.0, sampling_prob=0.01, neighboring_relation=NeighboringRelation.REPLACE_ONE
    )
    assert proven == pytest.approx(image.self_compose(400).get_epsilon_for_delta(1e-5), rel=1e-3)
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(SampledWithoutReplacementDpEvent(100, 1, GaussianDpEvent(1.0)), 400)
    assert proven < accountant.get_epsilon(1e-5)


def test_every_image_has_a_gradient_of_at_most_1_and_its_noise(monkeypatch):
    """Seeded or secret; the control has half of it. p-values below 1e-6 fail."""
    images, labels = halves(50)
    mechanism = GSWGAN(noise_multiplier=2.0, **SHORT)
    weights = Group.weights

    def large(group, index):
        return {name: 1e3 * tensor for name, tensor in weights(group, index).items()}

    monkeypatch.setattr(Group, "weights", large)

    def check(exact):
        assert 0.999 < np.linalg.norm(exact.reshape(16, -1), axis=1).max() <= 1

    def p_value(factor, streams=None):
        drawn = streams and streams.numpy("training")
        train = functools.partial(trained, mechanism, images, labels, drawn)
        seen = noise_seen(monkeypatch, gs_wgan, train, 2.0, factor, check)
        assert [noise.shape for noise in seen] == [(16, 1, 8, 8)] * 3
        return p_value_of(seen)

    assert min(p_value(1.0), p_value(1.0, SecretStreams(bytes(32)))) > 1e-6 > p_value(0.5)


def test_each_image_has_its_own_secret_uniform_pick(groups, monkeypatch):
    """Draws at equal distances pick each of 12 discriminators equally often."""
    picked, honest = [], Group.weights

    def spy(group, index):
        picked.append(4 * groups.index(group) + index)
        return honest(group, index)

    monkeypatch.setattr(Group, "weights", spy)
    places = (np.arange(24) + 0.5) / 24
    mechanism = GSWGAN(noise_multiplier=1.0, **SHORT | {"batch_size": 8})
    trained(mechanism, *halves(50), Coupled(places.reshape(3, 8)))
    assert picked == np.repeat(np.arange(12), 2).tolist()


def test_more_numbers_than_the_proof_covers_are_refused():
    images, labels = halves(5)
    mechanism = GSWGAN(noise_multiplier=1.0, **SMALL | {"generator_steps": 2**26})
    with pytest.raises(ValueError, match=r"generator_steps=67,108,864 of 16 images draw more"):
        trained(mechanism, images, labels)
