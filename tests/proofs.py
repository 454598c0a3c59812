"""Epsilons by definition, to check claims: of ledgers and plans on each basis, and of Gaussians."""

import math

from dp_accounting import ComposedDpEvent
from scipy.special import log_ndtr
from scipy.stats import norm


def gaussian_delta(mu, epsilon):
    """The delta of Gaussian noise and a shift of mu deviations, from the normal law alone."""
    first, second = map(float, norm.cdf([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu]))
    return first - math.exp(epsilon) * second


def gaussian_epsilon(mu, delta=1e-5):
    """The epsilon at a delta, in logarithms, since epsilon may be millions."""

    def above(epsilon):
        first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        return first + math.log1p(-math.exp(min(second - first, -1e-300))) > math.log(delta)

    low, high = 0.0, mu**2 + 100 * mu + 100
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) else (low, middle)
    return high


def spent(entries, unit, relation, basis):
    """The cost of entries: training runs and releases that they do not cover, or all releases."""
    left_out = {
        "training": lambda entry: entry.training,
        "answers": lambda entry: entry.kind == "training",
    }[basis]
    kept = [entry for entry in entries if not left_out(entry)]
    return ComposedDpEvent([entry.event(unit, relation) for entry in kept])


def bases(plan):
    """The stages that a proof on each basis composes."""
    return {"answers": plan.stages} | ({"training": plan.budgeted} if plan.training_stages else {})


def by(row, basis):
    """The epsilon of a card's row on a basis, whether it is the claim or another proof."""
    found = next((each for each in (row, *row["beside"]) if each["basis"] == basis), None)
    return None if found is None else float(found["epsilon"])
