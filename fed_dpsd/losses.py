"""Losses of FedDPSD: one pure function per equation (arXiv 2601.19090).

B is the batch size, K the number of classes. Probabilities are rows that sum to 1.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

# Probabilities stay this far from 0 and 1, so that logarithms and quotients are finite.
SMALLEST_PROBABILITY = 1e-8


def decoupled_kd_gradient(
    teacher: NDArray[np.floating],
    student: NDArray[np.floating],
    balance: float = 8.0,
    divisor: Literal["target", "own"] = "target",
) -> NDArray[np.float64]:
    """Return the gradient of Eq. 2 in the student's *probabilities*, in closed form.

    The K probabilities are treated as independent coordinates (no softmax Jacobian). Alg. 2
    normalises and releases this gradient.

    Args:
        teacher: (B, K) float, teacher probabilities.
        student: (B, K) float, student probabilities.
        balance: lambda in Eq. 2, >= 0.
        divisor: the divisor of the j-th non-target probability: "target" for 1 - p_r, where r is
            the teacher's class, as in decoupled distillation (the paper's reference [88]); "own"
            for 1 - p_j, as the paper prints it, which gives no divergence between distributions.

    Returns:
        (B, K) float64.
    """
    low, high = SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY
    p_teacher, p_student = (
        torch.from_numpy(np.ascontiguousarray(each, np.float64)).clamp(low, high)
        for each in (teacher, student)
    )
    target = functional.one_hot(p_teacher.argmax(1), p_teacher.shape[1]).bool()  # (B, K)
    teacher_target = p_teacher[target].unsqueeze(1)  # (B, 1)
    student_target = p_student[target].unsqueeze(1)  # (B, 1)
    at_target = -teacher_target / student_target + (1 - teacher_target) / (1 - student_target)
    if divisor == "own":
        elsewhere = -balance * p_teacher / (1 - p_teacher) / (p_student * (1 - p_student))
    else:
        teacher_rest = (p_teacher / (1 - teacher_target)).masked_fill(target, 0)
        mass = teacher_rest.sum(1, keepdim=True)  # 1, up to the clamping
        at_target = at_target - balance * mass / (1 - student_target)
        elsewhere = -balance * teacher_rest / p_student
    return torch.where(target, at_target, elsewhere).numpy()


def decoupled_kd_gradients(
    teachers: NDArray[np.floating],
    student: NDArray[np.floating],
    balance: float,
    divisor: Literal["target", "own"] = "target",
) -> NDArray[np.float64]:
    """Return the (n, B, K) `decoupled_kd_gradient`s of n teachers for the same student."""
    return np.stack([decoupled_kd_gradient(own, student, balance, divisor) for own in teachers])


def kd_gradients(
    teachers: NDArray[np.floating], student: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Return the gradient of classic distillation in the student's *probabilities*.

    Hinton, Vinyals, Dean (arXiv 1503.02531), at temperature 1: the divergence of the teacher's
    probabilities from the student's, sum of p_t log(p_t / p_s). Fig. 6 of the paper compares it
    with Eq. 2, and states no temperature.

    Args:
        teachers: (n, B, K) float, probabilities of each of n teachers.
        student: (B, K) float, student probabilities.

    Returns:
        (n, B, K) float64.
    """
    low, high = SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY
    return -np.asarray(teachers, np.float64) / np.asarray(student, np.float64).clip(low, high)


def in_logits(gradients: NDArray[np.float64], student: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return gradients in the student's logits, from gradients in its probabilities.

    By the chain rule through the softmax, they are p_j (g_j - sum of p_i g_i).

    Args:
        gradients: (..., B, K) gradients in the probabilities.
        student: (B, K) float, student probabilities.

    Returns:
        (..., B, K) float64; rows sum to 0.
    """
    p = np.asarray(student, np.float64)
    p = p / p.sum(axis=1, keepdims=True)
    return np.asarray(p * (gradients - (p * gradients).sum(axis=-1, keepdims=True)))


def student_loss(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Return Eq. 7: mean cross-entropy of (B, K) student `logits` and (B, K) soft `labels`.

    At a temperature T > 1, both sides are softened and the loss is multiplied by T^2 (Hinton,
    Vinyals, Dean, arXiv 1503.02531). This gives more weight to small probabilities, which show the
    classes that the teachers confuse.

    Args:
        logits: (B, K) float.
        labels: (B, K) float, rows that sum to 1.
        temperature: T >= 1.
    """
    if temperature == 1:
        return functional.cross_entropy(logits, labels)
    softened = (labels.clamp_min(SMALLEST_PROBABILITY).log() / temperature).softmax(1)
    return temperature**2 * functional.cross_entropy(logits / temperature, softened)


def squared_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return Eq. 7 for labels with additive noise: mean squared error of the probabilities.

    For Gaussian noise on all classes, this is the negative log-likelihood. Zero-mean noise of any
    size and distribution does not move the minimum of its expectation. A cross-entropy has no
    minimum if a label is negative.

    Args:
        logits: (B, K) float.
        labels: (B, K) float, any real numbers.
    """
    return (logits.softmax(1) - labels).square().sum(1).mean()


def response_loss(
    logits: torch.Tensor, votes: torch.Tensor, members: torch.Tensor, lie_probability: torch.Tensor
) -> torch.Tensor:
    """Return Eq. 7 for randomised responses: mean negative log-likelihood of the votes.

    The distribution of the responses is public, so the student's probabilities imply the
    probability of each vote. Let p be the student's probabilities and P_I their sum over the k
    members of I. Let a and b be the probabilities of the truth and of one lie. A vote for v in I
    then has probability a p_v + b (P_I - p_v) + (1 - P_I) / k. This is free post-processing. If a
    teacher's class is outside I, the student learns that I is wrong; a cross-entropy against votes
    cannot teach this.

    Args:
        logits: (B, K) float.
        votes: (B, K) float, fractions of the votes, zero outside I.
        members: (B, K) float, 1 inside I and 0 outside.
        lie_probability: (B, 1) float, b, in (0, 1 / k].
    """
    k = members.sum(1, keepdim=True)  # (B, 1)
    inside = logits.softmax(1) * members
    mass = inside.sum(1, keepdim=True)
    truth_probability = 1 - (k - 1) * lie_probability
    law = truth_probability * inside + lie_probability * (mass - inside) + (1 - mass) / k
    return -(votes * law.clamp_min(SMALLEST_PROBABILITY).log()).sum(1).mean()


def one_hot_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the first term of Eq. 8: mean cross-entropy of (B, K) `logits` and their argmax."""
    return functional.cross_entropy(logits, logits.argmax(1))


def entropy_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the second term of Eq. 8: negative entropy of the mean prediction, for balance.

    The paper prints a sum over samples, which would undo the first term. Its text (class balance)
    and its reference [11] imply the entropy of the mean over the batch.
    """
    mean = logits.softmax(1).mean(0)
    return (mean * mean.clamp_min(SMALLEST_PROBABILITY).log()).sum()


def sample_entropy_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the second term of Eq. 8 as printed: negative entropies, summed over the samples."""
    probabilities = logits.softmax(1)
    return (probabilities * probabilities.clamp_min(SMALLEST_PROBABILITY).log()).sum()


def activation_loss(features: torch.Tensor) -> torch.Tensor:
    """Return the third term of Eq. 8: the negative mean norm of the student's (B, F) features.

    The paper prints a plus, but its reference [11] has a minus, and its text says only that real
    images activate more. The norm is divided by sqrt(F), so its weight does not depend on the
    network.
    """
    return -features.norm(dim=1).mean() / features.shape[1] ** 0.5


def generator_loss(
    features: torch.Tensor,
    logits: torch.Tensor,
    one_hot_weight: float,
    entropy_weight: float,
    activation_weight: float,
) -> torch.Tensor:
    """Return Eq. 8, and Eq. 2 of DP-DFD: one-hot, entropy and activation loss, weighted.

    Args:
        features: (B, F) features of the discriminator on the generator's images.
        logits: (B, K) logits of the discriminator.
        one_hot_weight: weight of `one_hot_loss`.
        entropy_weight: weight of `entropy_loss`.
        activation_weight: weight of `activation_loss`.
    """
    return (
        one_hot_weight * one_hot_loss(logits)
        + entropy_weight * entropy_loss(logits)
        + activation_weight * activation_loss(features)
    )


def dafl_loss(
    features: Sequence[torch.Tensor],
    logits: torch.Tensor,
    one_hot_weight: float,
    entropy_weight: float,
    activation_weight: float,
) -> torch.Tensor:
    """Return DAFL's loss of a generator (arXiv 1904.01186), with the activation's mean, not norm.

    Args:
        features: each teacher's (B, F) features on the generator's images.
        logits: (B, K) logits of the teachers together.
        one_hot_weight: weight of `one_hot_loss`.
        entropy_weight: weight of `entropy_loss`.
        activation_weight: weight of the mean absolute feature, averaged over the teachers.
    """
    activation = torch.stack([own.abs().mean() for own in features]).mean()
    return (
        one_hot_weight * one_hot_loss(logits)
        + entropy_weight * entropy_loss(logits)
        - activation_weight * activation
    )
