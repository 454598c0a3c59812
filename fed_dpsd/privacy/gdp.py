"""Gaussian differential privacy: the exact relation of mu, epsilon and delta."""

import math

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, SelfComposedDpEvent
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

from fed_dpsd.privacy.events import FinitePrecisionDpEvent


def gaussian_mu(event: DpEvent) -> float | None:
    """Return the exact mu of composed Gaussian mechanisms; None if there is any other event.

    mu^2 = sum of 1 / z^2 (arXiv 1905.02383v3, Corollary 3.3). This is the mu for ideal noise,
    without the loss due to a sampler's finite precision.
    """
    if isinstance(event, FinitePrecisionDpEvent):
        return 0.0
    if isinstance(event, GaussianDpEvent):
        return 1 / float(event.noise_multiplier)
    if isinstance(event, SelfComposedDpEvent):
        inner = gaussian_mu(event.event)
        return None if inner is None else math.sqrt(event.count) * inner
    if isinstance(event, ComposedDpEvent):
        parts = [gaussian_mu(part) for part in event.events]
        known = [mu for mu in parts if mu is not None]
        return math.hypot(*known) if len(known) == len(parts) else None
    return None


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Compute the exact epsilon of a Gaussian mechanism with noise multiplier 1 / mu.

    delta(eps) = Phi(mu / 2 - eps / mu) - exp(eps) Phi(-mu / 2 - eps / mu)
    (Dong, Roth, Su: Gaussian differential privacy, arXiv 1905.02383v3, Corollary 2.13).
    """

    def log_excess(candidate: float) -> float:
        above = norm.logcdf(mu / 2 - candidate / mu)
        below = candidate + norm.logcdf(-mu / 2 - candidate / mu)
        return float(above + math.log(-math.expm1(min(below - above, -1e-300))) - math.log(delta))

    if log_excess(0.0) <= 0:
        return 0.0
    largest = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # by Renyi divergences
    tolerance = 1e-10 * (1 + largest)
    # The solver's error is added, so rounding never makes the result too small.
    return float(brentq(log_excess, 0.0, largest, xtol=tolerance)) + 2 * tolerance


def gaussian_delta(mu: float, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the exact delta of a Gaussian mechanism with noise multiplier 1 / mu.

    It uses the formula of `gaussian_epsilon`.
    """
    above = norm.logcdf(mu / 2 - epsilons / mu)
    below = epsilons + norm.logcdf(-mu / 2 - epsilons / mu)
    return np.asarray(np.exp(above) * -np.expm1(np.minimum(below - above, 0.0)))
