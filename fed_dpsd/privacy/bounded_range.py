"""Privacy losses of bounded-range mechanisms, such as exponential mechanisms.

A mechanism has range r if, for any two neighbours, the log-likelihood ratios of all outcomes lie in
an interval of length r (Durfee, Rogers, arXiv 1905.04273). The position of the interval may depend
on the neighbours and on earlier answers. The optimal composition of Dong, Durfee and Rogers (arXiv
1909.13830) fixes the intervals in advance. Here they are chosen adaptively, and the composition is
still optimal, up to the grid: docs/proofs.md, Theorem 5b.
"""

import functools
import math

import numpy as np
from numpy.typing import NDArray

PIECES = 16  # steps of the grid in one range
MOST_RELEASES = 256  # in a profile, which takes half a second
LARGEST_RANGE = 20.0  # of a profile; a larger range is accounted as a pure loss
DEVIATIONS = 9.0  # standard deviations that the grid covers; a profile is below 1e-17 at its end
ROUNDING = 1e-12  # upper bound on all rounding errors of a profile


def most_releases(loss_range: float) -> int:
    """Return the largest number of releases with likelihood ratios below e^300 in a profile."""
    return max(1, min(MOST_RELEASES, math.floor(4 * MOST_RELEASES / loss_range**2)))


def losses(
    loss_range: float, releases: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return losses that dominate adaptive mechanisms of range `loss_range`, in both directions.

    delta(eps) <= infinite + sum of probability * (1 - exp(eps - loss))+ at every eps, so they
    compose with the losses of any other mechanism.

    Args:
        loss_range: r > 0.
        releases: between 1 and `most_releases(loss_range)`.

    Returns:
        (2 G + 1,) losses, their probabilities, and the probability `infinite` of an infinite loss.
    """
    if loss_range > LARGEST_RANGE:  # binary randomised response dominates every r-DP mechanism
        truth = 1 / (1 + math.exp(-loss_range))
        return np.array([-loss_range, loss_range]), np.array([1 - truth, truth]), 0.0
    grid, profiles = _profiles(loss_range, 2 ** math.ceil(math.log2(releases)))
    delta, ratio = profiles[releases - 1], np.exp(grid)
    # The profile is linear in e^eps between adjacent grid points: each kink is an outcome, and its
    # probability is the size of the kink times e^eps.
    slope = np.concatenate([[-1.0], np.diff(delta) / np.diff(ratio), [0.0]])
    return grid, np.maximum(ratio * np.diff(slope), 0.0), float(delta[-1]) + ROUNDING


@functools.lru_cache(maxsize=16)
def _profiles(loss_range: float, releases: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a grid of eps, (2 G + 1,), and bounds on delta after 1, 2, ... releases, one per row.

    This is the recursion of Theorem 5b. Between adjacent grid points, the bound is the line in
    e^eps through both, which lies above a convex function; beyond the grid, it is constant or the
    mirror image. For two such lines, the largest value over all intervals has a closed form.
    """
    step = loss_range / PIECES
    spread = releases * loss_range**2 / 8 + DEVIATIONS * math.sqrt(releases) * loss_range / 2
    size = min(math.ceil(spread / step), PIECES * releases)
    beyond = PIECES + 1
    half = size + beyond
    grid: NDArray[np.float64] = step * np.arange(-half, half + 1.0)
    ratio = np.exp(grid)
    least, scale = math.exp(-loss_range), -math.expm1(-loss_range)
    bound = np.maximum(0.0, -np.expm1(grid))  # before any release
    here = slice(half, half + size + 1)  # eps >= 0
    profiles = np.empty((releases, 2 * size + 1))
    for release in range(releases):
        slope = np.diff(bound) / np.diff(ratio)
        start = bound[:-1] - slope * ratio[:-1]  # the line's value at ratio 0
        best = np.zeros(size + 1)
        for piece in range(PIECES):
            # Losses t with probability p and t - r, u = e^t in this piece of 1..e^r.
            up = slice(here.start - piece - 1, here.stop - piece - 1)
            down = slice(up.start + PIECES, up.stop + PIECES)
            bend = np.maximum(ratio[here] * (slope[down] - slope[up]), 0.0)
            fall = np.maximum(least * (start[up] - start[down]), 1e-300)
            ends = math.exp(piece * step), math.exp((piece + 1) * step)
            u = np.clip(np.sqrt(bend / fall), *ends)
            above = start[up] + slope[up] * ratio[here] / u
            below = start[down] + slope[down] * ratio[here] / (u * least)
            value = ((1 - u * least) * above + (u - 1) * least * below) / scale
            np.maximum(best, value, out=best)
        bound[here] = best
        bound[here.stop :] = best[-1]
        bound[:half] = (1 - (1 - bound[half + 1 :]) / ratio[half + 1 :])[::-1]
        profiles[release] = bound[beyond:-beyond]
    return grid[beyond:-beyond], profiles
