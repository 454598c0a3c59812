"""Noise on the outputs' gradients: the printed steps, and why nothing is proven for them."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from fed_dpsd.accounts.card import privacy_card
from fed_dpsd.errors import ConfigError
from fed_dpsd.papers.output_gradient import OutputGradient
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.noise import noisy_sum
from fed_dpsd.privacy.published import theorem_1
from tests.every import every
from tests.privacy.ideals import rng

SIGMA, BOUND, RATE = 100.0, 0.001, 0.1
DIRECT = ("method=direct", "training=output_gradient")


def training(**fields):
    values = {"noise_multiplier": SIGMA, "bound": BOUND, "stability": 1e-4, "label_step": 0.1}
    values |= {"learning_rate": RATE, "batch_size": 10**6, "steps": 1, "mean_over": "batch"}
    return OutputGradient(**(values | fields))


def network(scale=1.0):
    """Two hidden units, each with one input pixel, and three classes."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(scale * torch.eye(2))
        model[2].weight.copy_(torch.tensor([[0.1, 0.2], [0.3, -0.1], [0.0, 0.1]]))
    return model


# Worlds that are one record apart: only in the first, a record has the second pixel.
USED = torch.tensor([[1.0, 0.0], [0.5, 0.0], [0.0, 1.0]])
UNUSED = torch.tensor([[1.0, 0.0], [0.5, 0.0], [0.7, 0.0]])
LABELS = torch.tensor([0, 1, 2])


def moved(mechanism, inputs, seed=0, scale=1.0):
    """How far training moves the last layer's weights."""
    model = network(scale)
    before = model[2].weight.detach().clone()
    mechanism.train(model, inputs, LABELS, rng(seed))
    return model[2].weight.detach() - before


@every("mean_over", ["batch", "record"])
def test_a_step_is_that_of_algorithm_3(mean_over):
    model, draws = network(), rng()
    draws.random(3)  # who takes part: all
    logits = model(USED)
    outputs = logits.detach().softmax(1).requires_grad_()
    loss = functional.nll_loss(outputs.log(), LABELS, reduction="sum")
    (gradients,) = torch.autograd.grad(loss, outputs)
    bounded = BOUND * gradients / (gradients.norm(dim=1, keepdim=True) + 1e-4)
    assert bounded.norm(dim=1).max() < BOUND
    parts = bounded.numpy() if mean_over == "batch" else bounded.numpy()[None]
    noisy = torch.from_numpy(noisy_sum(parts, SIGMA * BOUND, "gaussian", draws)).float()
    targets = outputs.detach() - 0.1 * noisy / (3 if mean_over == "batch" else 1)
    (-(targets * logits.log_softmax(1)).sum(1).mean()).backward()
    expected = -RATE * model[2].weight.grad
    assert torch.allclose(moved(training(mean_over=mean_over), USED), expected, atol=1e-7)


def test_what_a_record_changes_has_no_bound():
    """Outputs' gradients stay below the bound; their effect on weights depends on the network."""
    differences = [
        (moved(training(), USED, scale=scale) - moved(training(), UNUSED, scale=scale)).norm()
        for scale in (1.0, 10.0, 100.0, 1000.0)
    ]
    assert all(far > 5 * near for near, far in itertools.pairwise(differences))
    assert differences[-1] > 100 * differences[0] > 0


@every("sigma", [SIGMA, 1e6])
def test_noise_misses_weights_that_one_record_alone_moves(sigma):
    """So the worlds are always distinguished. The control: DP-SGD's noise reaches every weight."""
    private = DPSGD(sigma, sample_rate=1.0, steps=1, max_grad_norm=1.0, learning_rate=RATE)
    for seed in range(20):
        for inputs, seen in ((USED, True), (UNUSED, False)):
            of_second_unit = moved(training(noise_multiplier=sigma), inputs, seed)[:, 1]
            assert bool((of_second_unit != 0).all()) == bool((of_second_unit != 0).any()) == seen
            assert (moved(private, inputs[:, None], seed) != 0).all()


def test_records_take_part_by_chance_and_an_empty_step_changes_nothing():
    assert not moved(training(batch_size=1), USED, seed=1).equal(moved(training(), USED, seed=1))
    few = training(batch_size=1, steps=40)
    far = nn.Sequential(nn.Linear(2, 3))
    few.train(far, USED[:1].repeat(1000, 1), LABELS[:1].repeat(1000), rng())
    assert all(torch.isfinite(weight).all() for weight in far.parameters())


def test_a_prediction_of_zero_is_no_hindrance():
    model = network()
    with torch.no_grad():
        model[2].weight.mul_(1e4)
    training(steps=3).train(model, USED, LABELS, rng())
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


def test_its_card_claims_nothing_and_gives_the_reason(small):
    experiment = small(*DIRECT)
    card = privacy_card(experiment, experiment.plan)
    assert {row["epsilon"] for row in card["proven"]} == {"inf"}
    assert card["reason"].startswith("noise on the outputs' gradients passes through the network")
    assert card["reason"].endswith("; the teachers' own weights leave the clients")
    published = theorem_1(0.001, 100.0, 10, 256 * 200, 1e-5)
    assert card["epsilon_published"] == pytest.approx(published)
    often = small("method=fedavg", "training=output_gradient", "answers=probabilities")
    assert often.plan.trainings == 3
    expected = theorem_1(0.001, 100.0, 10, 256 * 600, 1e-5)
    assert privacy_card(often, often.plan)["epsilon_published"] == pytest.approx(expected)
    silent = small("method=local", "training=output_gradient")
    assert privacy_card(silent, silent.plan)["epsilon_published"] == "inf"
    plain = small("method=direct")
    assert privacy_card(plain, plain.plan)["epsilon_published"] == "inf"


def test_answers_with_noise_of_their_own_prove_what_they_do_of_plain_teachers(small):
    noisy, plain = small("training=output_gradient"), small()
    cards = [privacy_card(each, each.plan) for each in (noisy, plain)]
    assert cards[0] == cards[1] | {"training": "output_gradient"}
    assert cards[0]["proven"][0]["epsilon"] != "inf"


def test_a_deployment_refuses_it(small):
    deployed = ("federation=deployment", *DIRECT)
    with pytest.raises(ConfigError, match="output_gradient: nothing is proven for it") as error:
        small(*deployed)
    assert len(error.value.problems) == 1
    small("federation=deployment", "method=direct")  # the control


def test_a_teacher_from_a_file_is_not_trained(small, tmp_path):
    with pytest.raises(ConfigError, match="training=output_gradient trains its teachers itself"):
        small(*DIRECT, f"teacher.path={tmp_path}/x.safetensors", "teacher.arch=cnn")
