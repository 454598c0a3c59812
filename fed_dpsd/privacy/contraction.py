"""Records -> teachers -> answers: the noise in both steps proves more than either alone.

A changed record moves the law of its teacher by the training's privacy profile, and the answers
shrink this distance further (docs/proofs.md, Theorem 22). A profile is delta as a function of
epsilon >= 0, and an upper bound in both directions.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

Profile = Callable[[NDArray[np.float64]], NDArray[np.float64]]

LARGEST_EPSILON = 600.0  # its exp is a float
POINTS = 20_001  # of the grid of a Gaussian loss
FARTHEST = 12.0  # standard deviations of a Gaussian loss; the mass beyond is below 1e-32


def contract(training: Profile, answers: Profile) -> Profile:
    """Return the profile of answers that depend on records only through a trained teacher.

    With a = training(epsilon), it is a * answers(log(1 + (exp(epsilon) - 1) / a)), where `answers`
    is the profile of all answers between any two teachers. An upper bound on a gives an upper bound
    on the result (docs/proofs.md, Theorem 22; the split follows Balle, Barthe, Gaboardi, arXiv
    1807.01647, Theorem 2).
    """

    def profile(epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        distance = np.clip(training(epsilons), 0.0, 1.0)
        with np.errstate(divide="ignore"):  # log(0) at epsilon 0
            log_odds = np.log(np.expm1(np.minimum(epsilons, LARGEST_EPSILON)))
        log_odds -= np.log(np.maximum(distance, 1e-300))
        return np.asarray(distance * np.clip(answers(np.logaddexp(0.0, log_odds)), 0.0, 1.0))

    return profile


def compose_gaussian(profile: Profile, mu: float) -> Profile:
    """Return the profile of a mechanism composed with a Gaussian with noise multiplier 1 / mu.

    The Gaussian release may occur at any time. delta(epsilon) is the mean of H(epsilon - L), where
    L is the Gaussian's loss, N(mu^2 / 2, mu^2), and H(x) is the profile for x >= 0, extended by
    H(-x) = 1 - exp(-x) + exp(-x) H(x). H is convex in exp(x), so the chord between two grid points
    lies above it. The mean of a chord has a closed form, and the result is an upper bound.
    """
    if mu == 0:
        return profile
    points = np.linspace(-FARTHEST, FARTHEST, POINTS)  # standardised loss in the first world
    losses, step = mu**2 / 2 + mu * points, mu * (points[1] - points[0])
    # Masses between adjacent points: in the first world, and in the second one times exp(loss).
    mass = _masses(points)
    with np.errstate(divide="ignore"):  # log(0) far out
        moved = np.exp(losses[:-1] + np.log(_masses(points + mu)))
    moved = np.clip(moved, np.exp(-step) * mass, mass)

    def mean(epsilon: float) -> float:
        size = np.abs(epsilon - losses)
        values = np.clip(profile(size), 0.0, 1.0)
        heights = np.where(epsilon >= losses, values, -np.expm1(-size) + np.exp(-size) * values)
        # The chord at a loss L after losses[i] is heights[i] + slope * (exp(losses[i] - L) - 1).
        slope = np.diff(heights) / np.expm1(-step)
        total = (heights[:-1] - slope) @ mass + slope @ moved
        return float(total * (1 + 1e-9) + 2 * norm.cdf(-FARTHEST))

    def composed(epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([mean(float(epsilon)) for epsilon in epsilons])

    return composed


def _masses(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard normal masses between ascending points, to full precision."""
    below = np.diff(norm.cdf(np.minimum(points, 0.0)))
    return np.asarray(below - np.diff(norm.sf(np.maximum(points, 0.0))))


def smallest_epsilon(profile: Profile, delta: float, most: float) -> float:
    """Return the smallest epsilon, up to `most`, at which a decreasing profile is at most delta.

    The solver's error is added, so rounding never makes the result too small.
    """

    def excess(epsilon: float) -> float:
        value = float(profile(np.array([epsilon]))[0])
        return math.log(max(value, 1e-300)) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    if excess(most) > 0:
        return most
    tolerance = 1e-10 * (1 + most)
    return min(most, float(brentq(excess, 0.0, most, xtol=tolerance)) + 2 * tolerance)
