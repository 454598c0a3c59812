"""A linear classifier that reproduces given probabilities, without steps of training."""

import torch
from torch import nn

from fed_dpsd.losses import SMALLEST_PROBABILITY

RIDGE = 1e-6  # times the mean square of a feature; makes the solution unique


@torch.no_grad()
def fit_log_probabilities(
    layer: nn.Linear, features: torch.Tensor, probabilities: torch.Tensor
) -> None:
    """Set a linear layer to the ridge regression of centred log-probabilities on features.

    The pooled odds of linear classifiers on the same features are linear in them, so F + 1 images
    in general position determine the pooled classifier exactly; steps of a cross-entropy approach
    it slowly along features that vary little.

    Args:
        layer: maps (N, F) to (N, K); its weights are replaced.
        features: (N, F) float, N >= 1.
        probabilities: (N, K) float; values below SMALLEST_PROBABILITY count as that.
    """
    inputs = nn.functional.pad(features.double().cpu(), (0, 1), value=1.0)
    logs = probabilities.double().cpu().clamp_min(SMALLEST_PROBABILITY).log()
    logs -= logs.mean(1, keepdim=True)
    products = inputs.T @ inputs
    products.diagonal().add_(RIDGE * products.diagonal().mean())
    solution = torch.cholesky_solve(inputs.T @ logs, torch.linalg.cholesky(products))
    layer.weight.copy_(solution[:-1].T)
    layer.bias.copy_(solution[-1])
