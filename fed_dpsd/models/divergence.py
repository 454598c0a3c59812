"""Detection of divergence: losses, weights and predictions that are NaN or infinite."""

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from fed_dpsd.errors import Diverged
from fed_dpsd.models import procedural
from fed_dpsd.models.inference import to_unit
from fed_dpsd.streams import Streams

PROBED = 2  # number of images of random pixels


def rates_of(method: object, *names: str) -> dict[str, float]:
    """Return a method's learning rates by key, for `Diverged`."""
    return {f"method.{name}": getattr(method, name) for name in names}


def check_losses(
    losses: Sequence[torch.Tensor], network: str, rates: Mapping[str, float], done: int = 0
) -> None:
    """Check all losses of a training run at once, so that no step waits for the device.

    Args:
        losses: the detached loss of each step, in order; may be empty.
        network: the network that learned, in words.
        rates: as for `Diverged`.
        done: number of steps before the first of these losses, >= 0.

    Raises:
        Diverged: a loss is NaN or infinite.
    """
    values = torch.stack(list(losses)).cpu() if losses else torch.zeros(0)
    for step in (~values.isfinite()).nonzero()[:1, 0].tolist():
        value = "NaN" if values[step].isnan() else "infinite"
        raise Diverged(f"the loss of {network} is {value} after step {done + step}", rates)


def descend(
    optimiser: torch.optim.Optimizer,
    losses: Iterable[torch.Tensor],
    network: str,
    rates: Mapping[str, float],
    done: int = 0,
) -> torch.Tensor:
    """Take a step for each loss, which is computed after the previous step; return the last loss.

    Args:
        optimiser: the optimiser of the network.
        losses: an iterator that computes each loss on demand.
        network: as for `check_losses`.
        rates: as for `check_losses`.
        done: as for `check_losses`.

    Returns:
        The last loss, detached; NaN if there is none.

    Raises:
        Diverged: a loss is NaN or infinite.
    """
    seen = []
    for loss in losses:
        seen.append(loss.detach())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    check_losses(seen, network, rates, done)
    return seen[-1] if seen else torch.tensor(torch.nan)


@functools.lru_cache(maxsize=4)
def _probe(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return to_unit(procedural.noise(PROBED, shape, Streams(0).numpy("check")), device)


@torch.inference_mode()
def is_finite(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether a network's weights, and its predictions for random pixels, are finite.

    It depends only on the weights, so it is post-processing if the weights are released.

    Args:
        model: network from (B, C, H, W) images in [0, 1] to (B, K) logits.
        shape: (C, H, W).
    """
    if not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()):
        return False
    logits = model.eval()(_probe(shape, next(model.parameters()).device))
    return bool(logits.softmax(1).isfinite().all())
