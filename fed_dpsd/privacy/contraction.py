"""Records -> teachers -> answers: both kinds of noise together prove more than each alone.

A changed record moves the law of its teacher by the training's privacy profile, and the answers
shrink that distance further (docs/privacy.md, Theorem 22). A profile is delta as a function of
epsilon >= 0, an upper bound for both orders of the two worlds.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

Profile = Callable[[NDArray[np.float64]], NDArray[np.float64]]

LARGEST_EPSILON = 600.0  # exp of it is a float
NODES = 200  # of a quadrature; twice as many give its error
FARTHEST = 12.0  # standard deviations of a Gaussian loss; beyond lies a mass below 1e-32


def contracted(training: Profile, answers: Profile) -> Profile:
    """Return the profile of answers that depend on records through a trained teacher alone.

    With a = training(epsilon) it is a * answers(log(1 + (exp(epsilon) - 1) / a)). An upper bound of
    a gives an upper bound of it (docs/privacy.md, Theorem 22; the split is that of Balle, Barthe,
    Gaboardi, arXiv 1807.01647, Theorem 2).

    Args:
        training: profile of the law of a teacher.
        answers: profile of all answers, between any two teachers.
    """

    def profile(epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        distance = np.clip(training(epsilons), 0.0, 1.0)
        with np.errstate(divide="ignore"):  # log(0) at epsilon 0
            log_odds = np.log(np.expm1(np.minimum(epsilons, LARGEST_EPSILON)))
        log_odds -= np.log(np.maximum(distance, 1e-300))
        return np.asarray(distance * np.clip(answers(np.logaddexp(0.0, log_odds)), 0.0, 1.0))

    return profile


def with_gaussian(profile: Profile, mu: float) -> Profile:
    """Return the profile of a mechanism composed with a Gaussian one of noise multiplier 1 / mu.

    The other release may follow the first. delta(epsilon) is the mean of H(epsilon - L), L the loss
    of the Gaussian, N(mu^2 / 2, mu^2), and H(x) the profile for x >= 0, continued by H(-x) = 1 -
    exp(-x) + exp(-x) H(x). The error of the quadrature is added.
    """
    if mu == 0:
        return profile

    def continued(losses: NDArray[np.float64]) -> NDArray[np.float64]:
        size = np.abs(losses)
        values = np.clip(profile(size), 0.0, 1.0)
        negative = -np.expm1(-size) + np.exp(-size) * values
        return np.asarray(np.where(losses >= 0, values, negative))

    def mean(epsilon: float, nodes: int) -> float:
        points, weights = np.polynomial.legendre.leggauss(nodes)
        low, high = mu**2 / 2 - FARTHEST * mu, mu**2 / 2 + FARTHEST * mu
        ends = [low, float(np.clip(epsilon, low, high)), high]  # H has a kink at 0
        total = 0.0
        for start, end in itertools.pairwise(ends):
            losses = start + (end - start) * (points + 1) / 2
            density = norm.pdf(losses, mu**2 / 2, mu)
            total += float((end - start) / 2 * weights @ (density * continued(epsilon - losses)))
        return total

    def composed(epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        coarse = np.array([mean(float(epsilon), NODES) for epsilon in epsilons])
        fine = np.array([mean(float(epsilon), 2 * NODES) for epsilon in epsilons])
        return np.asarray(fine + np.abs(fine - coarse) + 1e-30)

    return composed


def smallest_epsilon(profile: Profile, delta: float, most: float) -> float:
    """Return the smallest epsilon at which a decreasing profile is at most delta; at most `most`.

    The solver's error is added, so that rounding never flatters the result.
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
