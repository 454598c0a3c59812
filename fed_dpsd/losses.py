"""Losses of FedDPSD, one pure function per equation (arXiv 2601.19090).

B is the batch size, K the number of classes. Probabilities are rows that sum to 1.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

# Probabilities are kept this far from 0 and 1, so that logarithms and quotients stay finite.
SMALLEST_PROBABILITY = 1e-8


def _split_target(
    teacher: torch.Tensor, student: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clamp both (B, K) probabilities and split them at the teacher's class r."""
    low, high = SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY
    teacher, student = teacher.clamp(low, high), student.clamp(low, high)
    target = functional.one_hot(teacher.argmax(1), teacher.shape[1]).bool()  # (B, K)
    teacher_target = teacher[target].unsqueeze(1)  # (B, 1)
    student_target = student[target].unsqueeze(1)  # (B, 1)
    return teacher, student, target, teacher_target, student_target


def decoupled_kd(
    teacher: torch.Tensor, student: torch.Tensor, balance: float = 8.0
) -> torch.Tensor:
    """Eq. 2: decoupled distillation, target-class plus `balance` times non-target-class divergence.

    The paper's print divides the j-th non-target probability by 1 - p_j; decoupled distillation
    (its reference [88]) divides by 1 - p_r, r the teacher's class, which is what makes it a
    divergence between distributions. That is used here.

    Args:
        teacher: (B, K) float, teacher probabilities.
        student: (B, K) float, student probabilities.
        balance: lambda in Eq. 2, >= 0.

    Returns:
        (B,) float, the loss of each sample.
    """
    teacher, student, target, teacher_target, student_target = _split_target(teacher, student)
    target_class = (
        teacher_target * (teacher_target / student_target).log()
        + (1 - teacher_target) * ((1 - teacher_target) / (1 - student_target)).log()
    )
    teacher_rest = (teacher / (1 - teacher_target)).masked_fill(target, 0)
    student_rest = student / (1 - student_target)
    ratio = (teacher_rest / student_rest).masked_fill(target, 1)
    non_target_class = (teacher_rest * ratio.log()).sum(1)
    return target_class.squeeze(1) + balance * non_target_class


def decoupled_kd_gradient(
    teacher: NDArray[np.floating], student: NDArray[np.floating], balance: float = 8.0
) -> NDArray[np.float64]:
    """Gradient of Eq. 2 with respect to the student's *probabilities*, in closed form.

    The K probabilities are independent coordinates here (no softmax Jacobian): it is the quantity
    that Alg. 2 normalises and releases.

    Args:
        teacher: (B, K) float, teacher probabilities.
        student: (B, K) float, student probabilities.
        balance: lambda in Eq. 2, >= 0.

    Returns:
        (B, K) float64.
    """
    p_teacher, p_student, target, teacher_target, student_target = _split_target(
        torch.from_numpy(np.ascontiguousarray(teacher, np.float64)),
        torch.from_numpy(np.ascontiguousarray(student, np.float64)),
    )
    teacher_rest = (p_teacher / (1 - teacher_target)).masked_fill(target, 0)
    mass = teacher_rest.sum(1, keepdim=True)  # 1, up to the clamping
    at_target = (
        -teacher_target / student_target
        + (1 - teacher_target) / (1 - student_target)
        - balance * mass / (1 - student_target)
    )
    elsewhere = -balance * teacher_rest / p_student
    return torch.where(target, at_target, elsewhere).numpy()


def noisy_label(
    predictions: NDArray[np.floating],
    gradient: NDArray[np.float64],
    bound: float,
    step: float,
    as_printed: bool,
) -> NDArray[np.float64]:
    """Eq. 3 (Alg. 2 line 14): the label, one step from the student's prediction down the gradient.

    A label may leave the simplex: what projects it would bias it, and the noise could no longer be
    averaged out over the bank.

    Args:
        predictions: (B, K), the student's probabilities.
        gradient: (B, K), mean released gradient, of norm about `bound`.
        bound: beta, the normalisation bound of the answers, > 0.
        step: gamma, > 0.
        as_printed: the paper's step, which moves a label by step * bound; otherwise by `step`.

    Returns:
        (B, K) float64.
    """
    return predictions - step * gradient / (1 if as_printed else bound)


def student_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Eq. 7: mean cross-entropy of (B, K) student `logits` against (B, K) soft `labels`."""
    return functional.cross_entropy(logits, labels)


def squared_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Eq. 7 for labels with Gaussian noise: mean squared distance of probabilities and labels.

    It is the noise's own likelihood: zero-mean noise does not move its minimum, however large. A
    cross-entropy has no minimum at all where a label is negative.

    Args:
        logits: (B, K) float.
        labels: (B, K) float, any real numbers.
    """
    return (logits.softmax(1) - labels).square().sum(1).mean()


def response_loss(
    logits: torch.Tensor, votes: torch.Tensor, members: torch.Tensor, lie_probability: torch.Tensor
) -> torch.Tensor:
    """Eq. 7 for randomised responses: mean negative log-likelihood of the votes under their law.

    The response law is public, so the student can be asked which votes it predicts: with p its
    probabilities, P_I their sum over the k members of I, a and b the probabilities of truth and of
    one lie, a vote for v in I has probability a p_v + b (P_I - p_v) + (1 - P_I) / k. This is free
    post-processing, and unlike a cross-entropy against the votes it learns from a teacher whose
    class is outside I that the student is wrong about I.

    Args:
        logits: (B, K) float.
        votes: (B, K) float, shares of the votes, zero outside I.
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
    """Eq. 8, first term: mean cross-entropy of (B, K) `logits` against their own argmax."""
    return functional.cross_entropy(logits, logits.argmax(1))


def entropy_loss(logits: torch.Tensor) -> torch.Tensor:
    """Eq. 8, second term: negative entropy of the batch's mean prediction, for class balance.

    The paper prints a sum over samples, which would undo the first term; its text (class balance)
    and its reference [11] mean the entropy of the mean over the batch.
    """
    mean = logits.softmax(1).mean(0)
    return (mean * mean.clamp_min(SMALLEST_PROBABILITY).log()).sum()


def activation_loss(features: torch.Tensor) -> torch.Tensor:
    """Eq. 8, third term: minus the mean norm of the student's features, (B, F).

    The paper prints a plus; its text (real images activate more) and its reference [11] mean a
    minus. The norm is divided by sqrt(F), so that its weight does not depend on the network.
    """
    return -features.norm(dim=1).mean() / features.shape[1] ** 0.5
