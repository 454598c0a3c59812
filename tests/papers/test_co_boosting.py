"""Co-Boosting: hard samples, the ensemble's weights, diversified images, and what is resumed."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.methods.method import ReplayBuffer
from fed_dpsd.methods.white_box import fetch_teachers
from fed_dpsd.papers.co_boosting import (
    WeightedEnsemble,
    hard_sample_weights,
    moved_weights,
)
from fed_dpsd.streams import Streams
from tests.conftest import quick_for
from tests.running import finish, not_refused

METHOD = ("method=co_boosting", "training=plain", "answers=probabilities")
QUICK = (*METHOD, *quick_for(METHOD))
CLASSES, GREY = 10, 1 / 255


class Reader(nn.Module):
    """A teacher that reads the class from the first pixels, and may have learnt other labels."""

    def __init__(self, labels):
        super().__init__()
        self.register_buffer("labels", 4 * torch.eye(CLASSES)[labels])

    def features(self, images):
        return images.flatten(1)[:, :CLASSES]

    def classifier(self, features):
        return features @ self.labels


def readers(count):
    """An ensemble of good teachers, except the last, which was trained on shuffled labels."""
    good = [torch.arange(CLASSES)] * (count - 1)
    shuffled = torch.arange(CLASSES).roll(3)
    return WeightedEnsemble([*map(Reader, [*good, shuffled])], torch.device("cpu"))


def readable(count):
    """A buffer of images whose first pixels are their classes, among faint others."""
    rng = np.random.default_rng(0)
    targets = np.eye(CLASSES, dtype=np.float32)[rng.integers(CLASSES, size=count)]
    images = rng.integers(0, 60, (count, 64))
    images[:, :CLASSES] += (150 * targets).astype(int)
    pixels = images.astype(np.uint8).reshape(count, 1, 8, 8)
    return ReplayBuffer(pixels, np.empty((0, CLASSES), np.float32), targets)


def generator():
    return torch.Generator().manual_seed(0)


def server_of(experiment, folder):
    """An ensemble of an experiment's own teachers, a student, and the context."""
    context = experiment.public
    teachers = fetch_teachers(LocalFederation(experiment, folder), context)
    ensemble = WeightedEnsemble([own for (own,) in teachers.values()], context.device)
    return ensemble, context.make_student(Streams(0).torch("student")), context


# --- hard samples ---


def test_samples_weigh_more_the_less_sure_the_ensemble_is_of_them():
    logits = torch.tensor([[8.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 8.0]])
    targets = torch.zeros(5, dtype=torch.long)
    weights = hard_sample_weights(logits.requires_grad_(), targets, 1.0)
    assert (weights.diff() > 0).all()
    assert weights[2].item() == 0.5
    assert weights.min() > 0
    assert weights.max() < 1
    assert not weights.requires_grad
    assert torch.allclose(hard_sample_weights(logits, targets, 2.0), weights**2)
    assert (hard_sample_weights(logits, targets, 0.0) == 1).all()


def test_the_generator_wants_hard_samples_that_the_student_gets_wrong(small):
    """Unlike DENSE, it gains from a student of the same class that is less sure."""
    logits = torch.tensor([[3.0, 0.0], [0.5, 0.0]])
    targets = torch.zeros(2, dtype=torch.long)

    def loss(student, *settings):
        method = small(*QUICK, *settings).method
        return method.generator_loss(logits, student, targets).item()

    plain = "method.adversarial_weight=0.0", "method.hardness=0"
    entropy = functional.cross_entropy(logits, targets).item()
    assert loss(logits, *plain) == pytest.approx(entropy)
    assert 0 < loss(logits, plain[0]) < entropy
    assert loss(logits) == pytest.approx(loss(logits, plain[0]), abs=1e-5)
    assert loss(logits / 2) < loss(logits) - 1e-3
    assert loss(-logits) < loss(logits / 2)


# --- the ensemble's weights ---


@pytest.mark.parametrize("count", [2, 5])
def test_weights_move_to_good_clients_and_from_one_with_shuffled_labels(small, count):
    """The control: with step 0 they stay equal, and no teacher is asked."""
    method, buffer = small(*QUICK, "method.batch_size=16").method, readable(64)
    ensemble = readers(count)
    equal = ensemble.weights.clone()
    method.update_weights(ensemble, buffer, 0.0, generator())
    assert torch.equal(ensemble.weights, equal)
    assert ensemble.forward_answers == 0
    method.update_weights(ensemble, buffer, 0.01, generator())
    *good, bad = ensemble.weights.tolist()
    assert bad < 1 / count - 0.01
    assert min(good) > 1 / count
    assert sum(good) + bad == pytest.approx(1)
    # The weights need the answers, but no gradient through a teacher.
    assert (ensemble.forward_answers, ensemble.backward_answers) == (64 * count, 0)
    for _ in range(20):
        method.update_weights(ensemble, buffer, 0.05, generator())
    assert ensemble.weights[-1] == 0
    assert ensemble.weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("mean", ["logits", "probabilities"])
def test_any_step_leaves_weights_that_are_shares(mean):
    rng = generator()
    weights = torch.full((4,), 0.25)
    for step in (0.01, 0.3, 1.0, 50.0) * 10:
        logits = 5 * torch.randn((4, 6, CLASSES), generator=rng)
        targets = torch.randint(CLASSES, (6,), generator=rng)
        weights = moved_weights(weights, logits, targets, step, mean)
        assert (weights >= 0).all()
        assert weights.sum().item() == pytest.approx(1)
    # Equal teachers: none is better, whatever the labels.
    alike = torch.randn((1, 6, CLASSES), generator=rng).expand(2, -1, -1)
    half = torch.full((2,), 0.5)
    moved = moved_weights(half, alike, targets, 0.01, mean)
    assert moved.tolist() == pytest.approx([0.5, 0.5], abs=0.02)


# --- diversification ---


@pytest.mark.parametrize("size", [0, 1, 8, 300])
def test_diversified_images_are_bounded_and_size_0_keeps_them(small, tmp_path, size):
    experiment = small(*QUICK, f"method.perturbation={size}")
    ensemble, _, _ = server_of(experiment, tmp_path)
    images = torch.rand((20, 1, 8, 8), generator=generator())
    moved = experiment.method.diversify(ensemble, images, generator())
    assert not moved.requires_grad
    assert ((moved >= 0) & (moved <= 1)).all()
    distance = (moved - images).abs()
    assert distance.max() <= size * GREY + 1e-6
    if size == 0:
        assert torch.equal(moved, images)
        assert ensemble.forward_answers == 0
        return
    assert distance.max() > 0.99 * min(size * GREY, 0.5)
    other = experiment.method.diversify(ensemble, images, generator().manual_seed(1))
    assert not torch.equal(moved, other)  # directions are random


def test_the_student_learns_from_answers_to_the_images_that_it_sees(small, tmp_path):
    experiment = small(*QUICK)
    ensemble, student, _ = server_of(experiment, tmp_path)
    asked, seen = [], []
    ensemble.register_forward_pre_hook(lambda _, given: asked.append(given[0].detach()))
    student.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    method = experiment.method
    method.distil(student, method.diversified_batches(ensemble, readable(100), generator()))
    assert len(asked) == 2 * len(seen) > 0
    for before, after, own in zip(asked[::2], asked[1::2], seen, strict=True):
        assert torch.equal(after, own)
        assert 0 < (after - before).abs().max() <= 8 * GREY + 1e-6


# --- a run ---


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        ((), 2 + 1 + 2, 2 + 1),
        (("method.perturbation=0",), 2 + 1 + 1, 2),
        (("method.weight_step=0",), 2 + 2, 2 + 1),
        (("method.student_epochs=3",), 2 + 1 + 6, 2 + 3),
    ],
)
def test_every_answer_is_counted(small, tmp_path, settings, forward, backward):
    """Of a round: two steps of the generator, one epoch for the weights, then the student's."""
    _, (first, second) = finish(small(*QUICK, "rounds=2", *settings), tmp_path)
    asked = 2 * 64  # teachers times images
    assert first.forward_answers == forward * asked
    assert first.backward_answers == backward * asked
    # The buffer has grown, the generator's batch has not.
    assert second.forward_answers == (2 + 2 * (forward - 2)) * asked
    assert second.backward_answers == (2 + 2 * (backward - 2)) * asked


def test_settings_out_of_range_name_the_key(small):
    table = (
        ("method.latent_size=0", "latent_size=0 must be > 0"),
        ("method.shift=-1", "shift=-1 must be >= 0"),
        ("method.hardness=-1", "hardness=-1 must be >= 0"),
        ("method.perturbation=-8", "perturbation=-8 must be >= 0"),
        ("method.weight_step_decay=0", "weight_step_decay=0 must be > 0"),
        ("method.generator_learning_rate=0", "generator_learning_rate=0 must be > 0"),
    )
    assert not not_refused(small, table, *METHOD)
    small(*METHOD, "method.weight_step=0", "method.perturbation=0", "method.hardness=0")
