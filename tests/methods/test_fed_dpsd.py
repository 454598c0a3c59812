"""FedDPSD's own steps, and that it learns."""

import numpy as np
import pytest
import torch

from fed_dpsd.methods.fed_dpsd import _Players
from fed_dpsd.methods.method import Bank, World, predict
from fed_dpsd.protocol import Total
from fed_dpsd.runtime.federation import LocalFederation
from fed_dpsd.runtime.site import load_data
from fed_dpsd.streams import Streams


def test_gradient_labels_follow_eq_3(small):
    experiment = small("privacy=gradient", "method.literal=true", "method.label_step=0.5")
    world = World.of(experiment.config, experiment.mechanism)
    predictions = np.full((1, 10), 0.1, np.float32)
    total = Total(np.arange(10.0)[None], count=4)
    labels = experiment.method.noisy_labels(world, predictions, total)
    assert labels == pytest.approx(predictions - 0.5 * np.arange(10.0) / 4)


def test_response_labels_are_shares_of_the_votes(small):
    experiment = small()
    world = World.of(experiment.config, experiment.mechanism)
    votes = np.array([[3.0, 1.0, *[0] * 8]])
    labels = experiment.method.noisy_labels(world, np.zeros((1, 10), np.float32), Total(votes, 4))
    assert labels[0, :2].tolist() == [0.75, 0.25]


def test_generator_training_lowers_its_loss_and_leaves_the_student_alone(small):
    experiment = small("privacy=non_private", "method.generator_steps=1")
    world = World.of(experiment.config, experiment.mechanism)
    players = _Players(experiment.method, world, Streams(0))
    images = players.generate(1)
    predictions = predict(players.student, images, world.device)
    bank = Bank(images, predictions, predictions)
    before = {name: t.clone() for name, t in players.student.state_dict().items()}
    latents = players.latents.clone()
    losses = [experiment.method.train_generator(players, bank) for _ in range(15)]
    assert losses[-1] < losses[0]
    assert not torch.equal(players.latents, latents)
    after = players.student.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_noise_images_come_first_and_the_rest_is_the_generators(small, share):
    experiment = small("privacy=non_private", f"method.noise_share={share}")
    world = World.of(experiment.config, experiment.mechanism)
    players = _Players(experiment.method, world, Streams(0))
    images, later = players.generate(1), players.generate(2)
    count = round(64 * share)
    assert images.shape == (64, 1, 8, 8)
    assert (images[count:] == later[count:]).all()  # the same latent vectors
    if count:
        assert (images[:count] != later[:count]).mean() > 0.9
        assert images[:count].std() == pytest.approx(255 / 12**0.5, rel=0.1)
    predictions = predict(players.student, images, world.device)
    experiment.method.train_generator(players, Bank(images, predictions, predictions))


def test_noise_at_the_server_is_added_once_whatever_the_number_of_clients(small, tmp_path):
    """The answers are exact; the sum's noise has one client's scale, not sqrt(m) of it."""
    experiment = small(
        *("privacy=gradient", "privacy.noise_at=server", "privacy.noise_multiplier=1000"),
        *("num_clients=8", "queries_per_round=512", "rounds=1"),
    )
    federation = LocalFederation(experiment, tmp_path)
    seen = {}
    original = federation.total

    def total(ask):
        seen["total"] = original(ask)
        return seen["total"]

    federation.total = total
    world = World.of(experiment.config, experiment.mechanism)
    list(experiment.method.server(federation, world, Streams(0), None))
    scale = seen["total"].sum.std() / experiment.mechanism.bound
    assert scale == pytest.approx(1000, rel=0.05)  # 5,120 draws: 5 standard errors
    assert scale < 1000 * 8**0.5 * 0.95


def test_the_student_learns_from_answers_alone(small, tmp_path):
    experiment = small(
        *(
            "privacy=non_private",
            "rounds=4",
            "queries_per_round=256",
            "method.student_steps=60",
            "method.final_student_steps=200",
        ),
        *("method.batch_size=128", "teacher.min_steps=300", "model.teacher_width=16"),
        *("model.student_width=16", "model.generator_width=16"),
    )
    federation = LocalFederation(experiment, tmp_path)
    test = load_data(experiment.config.data, experiment.config.cache).test
    world = World.of(experiment.config, experiment.mechanism)
    *_, last = experiment.method.server(federation, world, Streams(0), None)
    accuracy = (predict(last.student, test.images, world.device).argmax(1) == test.labels).mean()
    assert accuracy > 0.5
