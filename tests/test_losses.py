"""Every equation against hand-computed values, a naive loop, or automatic differentiation."""

import math

import numpy as np
import pytest
import torch

from fed_dpsd import losses


def probabilities(count, classes, seed):
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.dirichlet(np.ones(classes), count)


def decoupled_kd(teacher, student, balance):
    """Eq. 2 with loops, renormalised over the non-target classes."""
    total = []
    for t, s in zip(teacher, student, strict=True):
        r = int(t.argmax())
        target = t[r] * (t[r] / s[r]).log() + (1 - t[r]) * ((1 - t[r]) / (1 - s[r])).log()
        rest = 0.0
        for j in range(len(t)):
            if j != r:
                a, b = t[j] / (1 - t[r]), s[j] / (1 - s[r])
                rest += a * (a / b).log()
        total.append(target + balance * rest)
    return torch.stack(total)


def as_printed(teacher, student, balance):
    """Eq. 2 as printed, with 1 - p_j where decoupled distillation has 1 - p_r."""
    rows, target = torch.arange(len(teacher)), teacher.argmax(1)
    t, s = teacher[rows, target], student[rows, target]
    odds = (teacher / (1 - teacher)) * (teacher * (1 - student) / (student * (1 - teacher))).log()
    others = odds.sum(1) - odds[rows, target]
    return t * (t / s).log() + (1 - t) * ((1 - t) / (1 - s)).log() + balance * others


def test_the_gradient_is_that_of_automatic_differentiation():
    teacher, student = probabilities(50, 10, 2), probabilities(50, 10, 3)
    for balance in (0.0, 1.0, 8.0):
        for divisor, loss, error in (
            ("target", decoupled_kd, 1e-9),
            ("own", as_printed, 1e-6),
        ):
            variable = torch.tensor(student, requires_grad=True)
            loss(torch.tensor(teacher), variable, balance).sum().backward()
            ours = losses.decoupled_kd_gradient(teacher, student, balance, divisor)
            assert ours == pytest.approx(variable.grad.numpy(), rel=error), (balance, divisor)


def test_the_gradient_is_finite_where_probabilities_vanish():
    sure = np.eye(10)[[0, 1]]
    assert np.isfinite(losses.decoupled_kd_gradient(sure, sure[::-1])).all()


def test_the_gradient_of_classic_distillation_is_that_of_automatic_differentiation():
    teachers = np.stack([probabilities(50, 10, seed) for seed in (2, 4)])
    student = probabilities(50, 10, 3)
    ours = losses.kd_gradients(teachers, student)
    for own, teacher in zip(ours, torch.tensor(teachers), strict=True):
        variable = torch.tensor(student, requires_grad=True)
        (teacher * (teacher / variable).log()).sum().backward()
        assert own == pytest.approx(variable.grad.numpy(), rel=1e-9)
    sure = np.eye(10)[[0, 1]]
    assert np.isfinite(losses.kd_gradients(sure[None], sure[::-1])).all()


def test_gradients_in_logits_are_those_of_automatic_differentiation():
    teacher, student = probabilities(50, 10, 2), probabilities(50, 10, 3)
    for loss, ours in (
        (decoupled_kd, losses.decoupled_kd_gradients(teacher[None], student, 8.0)),
        (as_printed, losses.decoupled_kd_gradients(teacher[None], student, 8.0, "own")),
        (lambda t, s, _: (t * (t / s).log()).sum(1), losses.kd_gradients(teacher[None], student)),
    ):
        logits = torch.tensor(np.log(student) + 3, requires_grad=True)
        loss(torch.tensor(teacher), logits.softmax(1), 8.0).sum().backward()
        found = losses.in_logits(ours, student)[0]
        assert found == pytest.approx(logits.grad.numpy(), rel=1e-6, abs=1e-9)
    classic = losses.in_logits(losses.kd_gradients(teacher[None], student), student)[0]
    assert classic == pytest.approx(student - teacher)  # as is well known


def test_gradients_in_logits_of_sure_students_are_finite():
    sure = np.eye(10)[[0, 1]]
    for divisor in ("target", "own"):
        own = losses.decoupled_kd_gradients(sure[None], sure[::-1], 8.0, divisor)
        assert np.isfinite(losses.in_logits(own, sure[::-1])).all()


def test_squared_loss_averages_noise_out_where_cross_entropy_cannot():
    """Labels with zero-mean noise of ten times their size: the minimum stays at the true label.

    5 standard errors of the mean of 200,000 draws are 0.11.
    """
    rng = np.random.Generator(np.random.PCG64(0))
    truth = torch.tensor([[0.7, 0.2, 0.1]])
    noise = torch.from_numpy(rng.normal(0, 10, (200_000, 3))).float()
    labels = truth + noise
    assert (labels.mean(0) - truth).abs().max() < 0.11
    at = {
        name: losses.squared_loss(probabilities.log().expand(len(labels), 3), labels).item()
        for name, probabilities in {
            "truth": torch.tensor([[0.7, 0.2, 0.1]]),
            "uniform": torch.full((1, 3), 1 / 3),
            "other": torch.tensor([[0.1, 0.2, 0.7]]),
        }.items()
    }
    assert at["truth"] < at["uniform"] < at["other"]
    negative = torch.tensor([[-0.5, 1.5, 0.0]])
    far, near = torch.tensor([[-20.0, 0.0, 0.0]]), torch.tensor([[-2.0, 0.0, 0.0]])
    assert losses.student_loss(far, negative) < losses.student_loss(near, negative) < 0.2
    assert losses.squared_loss(far, negative) >= 0


def test_a_temperature_softens_both_sides_of_the_students_loss():
    labels = torch.from_numpy(probabilities(40, 10, 0)).float()
    logits = torch.from_numpy(np.log(probabilities(40, 10, 1))).float()
    for temperature in (1.0, 4.0):
        target, own = labels ** (1 / temperature), logits / temperature
        target = target / target.sum(1, keepdim=True)
        expected = -(temperature**2) * (target * own.log_softmax(1)).sum(1).mean()
        assert losses.student_loss(logits, labels, temperature) == pytest.approx(expected.item())
    certain = torch.eye(10)  # the logarithm of 0 is finite
    assert losses.student_loss(10 * certain, certain, 4.0).isfinite()


def test_response_loss_is_the_likelihood_of_the_votes():
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.3]]))
    members = torch.tensor([[1.0, 1.0, 0.0]])
    votes = torch.tensor([[0.6, 0.4, 0.0]])
    lie, truth = 0.1, 0.9
    first = truth * 0.5 + lie * 0.2 + 0.3 / 2
    second = truth * 0.2 + lie * 0.5 + 0.3 / 2
    assert first + second == pytest.approx(1)
    expected = -(0.6 * math.log(first) + 0.4 * math.log(second))
    assert losses.response_loss(logits, votes, members, lie).item() == pytest.approx(expected)


def test_response_loss_without_noise_and_mask_is_cross_entropy():
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    votes = torch.tensor(probabilities(6, 4, 1), dtype=torch.float32)
    ours = losses.response_loss(logits, votes, torch.ones(6, 4), 0.0)
    assert ours.item() == pytest.approx(losses.student_loss(logits, votes).item(), rel=1e-5)


def test_generator_losses_prefer_what_they_should():
    sure, unsure = torch.tensor([[9.0, 0, 0]]), torch.tensor([[0.1, 0, 0]])
    assert losses.one_hot_loss(sure) < losses.one_hot_loss(unsure)
    balanced, collapsed = 9 * torch.eye(3), 9 * torch.eye(3)[[0, 0, 0]]
    assert losses.entropy_loss(balanced) < losses.entropy_loss(collapsed)
    assert losses.entropy_loss(torch.zeros(2, 4)).item() == pytest.approx(-math.log(4))
    assert losses.activation_loss(torch.full((2, 4), 2.0)).item() == pytest.approx(-2.0)


def test_dafl_loss_averages_the_activations_of_teachers_of_any_size():
    features, logits = [torch.full((2, 4), -2.0), torch.full((2, 8), 4.0)], torch.zeros(2, 3)
    expected = 2.0 * math.log(3) - 5.0 * math.log(3) - 0.5 * 3.0
    assert losses.dafl_loss(features, logits, 2.0, 5.0, 0.5).item() == pytest.approx(expected)
