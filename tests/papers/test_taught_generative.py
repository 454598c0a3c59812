"""Generators taught by votes of teachers: what a record changes, what leaves, with which noise."""

import functools
import math

import numpy as np
import pytest
import torch

from fed_dpsd.models import initialise
from fed_dpsd.papers import taught_generative
from fed_dpsd.papers.datalens import DataLens
from fed_dpsd.papers.g_pate import GPATE
from fed_dpsd.papers.pate_gan import PATEGAN
from fed_dpsd.papers.taught_generative import Teachers
from fed_dpsd.privacy.accounting import best_bound
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.streams import Streams
from tests.papers.test_dp_merf import halves, noise_seen, p_value_of, trained
from tests.papers.test_gs_wgan import Coupled
from tests.proofs import gaussian_delta

SMALL = {
    "noise_multiplier": 1.0,
    "teachers": 8,
    "teacher_width": 2,
    "teacher_steps": 1,
    "teacher_batch_size": 4,
    "teacher_learning_rate": 0.02,
    "teacher_weight_decay": 5.0,
    "images_per_class": 3,
    "pooling": 1,
    "generator_steps": 3,
    "generator_learning_rate": 0.02,
    "generator_width": 4,
    "latent_size": 4,
    "classifier_steps": 3,
    "learning_rate": 0.01,
    "batch_size": 16,
}
STUDENT = {"student_width": 8, "student_steps": 5, "student_learning_rate": 0.01, "rounds_kept": 3}
OF_BITS = {"step_size": 1.0, "threshold": 0.0}
KINDS = {
    PATEGAN: STUDENT,
    DataLens: OF_BITS | {"k": 4},
    GPATE: OF_BITS | {"projections": 5, "bins": 10},
}
EACH = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def made(kind, **settings):
    return kind(**SMALL | KINDS[kind] | settings)


def learnt(mechanism, images, labels):
    """Teachers after some steps, and images of a generator that no record affects."""
    draws = Streams(0).torch("draws")
    generator = initialise(lambda: mechanism.make_generator((1, 8, 8), 2), draws)
    teachers = Teachers(images[:, 0], labels, 2, mechanism, Coupled(), draws)
    for _ in range(5):
        teachers.learn(generator)
    classes = torch.arange(2).repeat_interleave(mechanism.images_per_class)
    with torch.no_grad():
        return teachers, teachers.pool(generator(classes, draws)), classes


def neighbours():
    """Records with the first one removed, and with one replaced by another of the other class.

    Every other record draws the same shard.
    """
    images, labels = halves(60)
    images = images * torch.rand(images.shape, generator=Streams(0).torch("texture"))
    yield (images, labels), (images[1:], labels[1:])
    others, flipped = images.clone(), labels.clone()
    others[7], flipped[7] = 1 - others[7], 1 - flipped[7]
    yield (images, labels), (others, flipped)


def test_a_record_changes_one_teacher_to_the_last_bit():
    """The control, a class mean of all records, changes all."""
    mechanism = made(DataLens, teacher_batch_size=32)
    for one, other in neighbours():
        seen = []
        for images, labels in (one, other):
            teachers, pictures, classes = learnt(mechanism, images, labels)
            gradients = torch.cat(list(teachers.gradients(pictures, classes)))
            seen.append((teachers.logits(pictures, classes), gradients))
        for first, second in zip(*seen, strict=True):
            different = (first.nan_to_num() != second.nan_to_num()).flatten(1).any(1)
            assert different.sum() == 1
    shared = [(images - images.mean(), labels) for images, labels in (one, other)]
    first, second = (learnt(mechanism, *records)[0].networks.hidden for records in shared)
    assert (first != second).flatten(1).any(1).all()


def test_gradients_are_those_of_the_logits():
    mechanism = made(DataLens)
    teachers, pictures, classes = learnt(mechanism, *halves(60))
    each = pictures.expand(8, -1, -1).clone().requires_grad_()
    teachers.networks(each, classes).sum().backward()
    gradients = torch.cat(list(teachers.gradients(pictures, classes)))
    known = ~gradients.isnan()
    assert known.float().mean() > 0.8
    torch.testing.assert_close(gradients[known], each.grad[known])


@EACH
def test_a_replaced_teacher_moves_what_is_released_by_the_bound(kind, monkeypatch):
    """By less or as much; one teacher is random, opposite, long, diverged or absent."""
    rng = Streams(0).torch("test")
    others, own = torch.randn((7, 6, 64), generator=rng), torch.randn((6, 64), generator=rng)
    diverged = own.clone()
    diverged[0, 0], diverged[1, 1] = torch.inf, torch.nan
    seen, scales = [], []

    def spy(values, scale, *_):
        seen.append(torch.from_numpy(values.sum(0).ravel()))
        scales.append(scale)
        return np.ones(values.shape[1:])

    monkeypatch.setattr(taught_generative, "noisy_sum", spy)
    for each in (own, -own, 1e3 * others[0], diverged, own * torch.nan):
        vectors = torch.cat([others, each[None]])
        monkeypatch.setattr(Teachers, "gradients", lambda *_, v=vectors: iter(v.split(5)))
        monkeypatch.setattr(Teachers, "logits", lambda *_, v=vectors: v[:, :, 0])
        trained(made(kind, generator_steps=1, classifier_steps=1), *halves(20))
    flat = torch.stack(seen)
    assert torch.equal(flat, flat.round())
    assert 0.99 * scales[0] < torch.cdist(flat, flat).max() <= scales[0] * (1 + 1e-12)


@EACH
def test_what_is_released_has_the_bounds_noise(kind, monkeypatch):
    """Seeded or secret, by its law; the control has half of it. p-values below 1e-6 fail."""
    mechanism = made(kind, noise_multiplier=2.0, generator_steps=12, images_per_class=20)
    bound = {PATEGAN: 2 * math.sqrt(40), DataLens: 2 * math.sqrt(160), GPATE: 20}[kind]

    def p_value(factor, streams=None):
        drawn = streams and streams.numpy("training")
        train = functools.partial(trained, mechanism, *halves(50), drawn)
        seen = noise_seen(monkeypatch, taught_generative, train, 2.0 * bound, factor)
        assert len(seen) == 12  # one release in each step
        return p_value_of(seen)

    assert min(p_value(1.0), p_value(1.0, SecretStreams(bytes(32)))) > 1e-6 > p_value(0.5)


@EACH
def test_its_epsilon_is_that_of_one_gaussian_mechanism_per_step(kind):
    """Whichever the relation: adding or removing a record replaces its teacher's votes."""
    mechanism = made(kind, noise_multiplier=60.0, generator_steps=300)
    mu = math.sqrt(300) / 60
    for relation in ("add_remove", "replace_one"):
        proven = best_bound(mechanism.event("record", relation), 1e-5).epsilon
        assert gaussian_delta(mu, proven) <= 1e-5 < gaussian_delta(mu, proven - 1e-3)


def test_what_is_not_covered_by_the_event_is_refused():
    images, labels = halves(10)
    with pytest.raises(ValueError, match="noise_multiplier=1e[+]09 draws noise of .* is proven"):
        trained(made(DataLens, noise_multiplier=1e9), images, labels)
    with pytest.raises(ValueError, match="generator_steps=1,000,000 releases of 384 numbers"):
        trained(made(DataLens, generator_steps=1_000_000), images, labels)
