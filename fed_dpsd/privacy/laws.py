"""Privacy losses of several releases: exact laws, Renyi divergences, discretised losses.

The law of one release is in events.py. Every function is exact, or an upper bound in exact
arithmetic. Solver errors and the mass of truncated tails are added. delta is in (0, 1), and N >= 1
is the number of adaptive releases.
"""

import math
from collections.abc import Callable

import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent, RandomizedResponseDpEvent
from dp_accounting.pld import privacy_loss_distribution as pld
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, xlog1py, xlogy

from fed_dpsd.privacy.events import FINEST_RESOLUTION, law_of, truth_and_lie
from fed_dpsd.privacy.shuffled import OUTSIDE, window

PROFILE_POINTS, SMALLEST_PROFILE = 20_000, 1e-13  # points of a discretised profile; its last delta
LARGEST_PROFILE = 700.0  # largest epsilon of a profile, and largest step; its exp is a float
SMALL_LOSS = 1e-6  # of all releases of an event together; smaller losses count as pure
MOST_LOSSES = 2**19  # discretised losses; limits memory to 1 GiB and time to seconds
# Mass per release; in tests, the transforms lost at most a quarter of it in any tail.
CONVOLUTION_ERROR = 2.0**-50
EXACT_TERMS = 3e7  # most terms of an exact law; they take about two seconds
ORDERS = tuple(1 + 10 ** (exponent / 20) for exponent in range(-60, 81))  # 1.001 to 10,001


# --- randomised response ----------------------------------------------------------------------


def exact_terms(response: RandomizedResponseDpEvent, releases: int) -> int:
    """Estimate the number of terms that `response_epsilon` sums."""
    truth, lie = truth_and_lie(response)
    lies, truths = window(releases, lie), window(releases, truth / (1 - lie))
    return (lies[1] - lies[0]) * (truths[1] - truths[0])


def response_epsilon(response: RandomizedResponseDpEvent, releases: int, delta: float) -> float:
    """Compute the exact epsilon of N k-ary randomised responses.

    It is `inf` if only the pure bound N * eps0 holds. The loss of one response is +eps0, 0 or -eps0
    with probabilities a (the truth), 1 - a - b and b (one lie). If S is the sum of N such signs,
    then delta(eps) = sum over s of P(S = s) max(0, 1 - exp(eps - eps0 s)).
    """
    truth, lie = truth_and_lie(response)
    per_answer = math.log(truth / lie)
    law, missing = _sign_sum_law(releases, truth, lie)
    losses = per_answer * (np.arange(len(law)) - releases)
    if missing >= delta:
        return math.inf

    def excess(candidate: float) -> float:
        above = losses > candidate
        hit = float(law[above] @ -np.expm1(candidate - losses[above]))
        return hit + missing - delta

    if excess(0.0) <= 0:
        return 0.0
    largest = releases * per_answer
    if excess(largest) > 0:
        return math.inf
    # The solver's error is added, so rounding never makes the result too small.
    return float(brentq(excess, 0.0, largest, xtol=1e-9 * largest)) + 2e-9 * largest


def response_delta(
    response: RandomizedResponseDpEvent, releases: int, epsilons: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Compute the exact delta of N k-ary randomised responses (see `response_epsilon`)."""
    truth, lie = truth_and_lie(response)
    law, missing = _sign_sum_law(releases, truth, lie)
    per_answer = math.log(truth / lie)
    # From the largest loss down: at the next smaller loss, all masses above count more.
    above, known = np.cumsum(law[:releases:-1]), np.zeros(releases + 1)
    for index, mass in enumerate(above):  # delta at losses[-2 - index]
        known[index + 1] = mass * -math.expm1(-per_answer) + known[index] * math.exp(-per_answer)
    at = per_answer * np.arange(releases + 1)
    at = at[at <= LARGEST_PROFILE]
    # Between two losses delta is linear in exp(epsilon); beyond the last one it falls.
    odds = np.expm1(np.minimum(epsilons, at[-1]))
    return np.asarray(np.interp(odds, np.expm1(at), known[::-1][: len(at)])) + missing


def _sign_sum_law(releases: int, truth: float, lie: float) -> tuple[NDArray[np.float64], float]:
    """Return P(S = s) for s = -N..N and the omitted mass.

    S = A - B, where (A, B, rest) is multinomial. A and B run over windows; the mass outside them
    counts as failure.
    """
    log_factorial = gammaln(np.arange(releases + 1) + 1.0)

    def log_pmf(count: NDArray[np.int64], trials: int, p: float) -> NDArray[np.float64]:
        ways = log_factorial[trials] - log_factorial[count] - log_factorial[trials - count]
        chances = xlogy(count, p) + xlog1py(trials - count, -p)
        return np.asarray(ways + chances)

    true_rate = truth / (1 - lie)  # among the responses that are not this lie
    law = np.zeros(2 * releases + 1)
    lies = np.arange(*window(releases, lie))
    for count, log_weight in zip(lies.tolist(), log_pmf(lies, releases, lie), strict=True):
        truths = np.arange(*window(releases - count, true_rate))
        law[truths - count + releases] += np.exp(
            log_weight + log_pmf(truths, releases - count, true_rate)
        )
    return law, 2 * OUTSIDE


# --- Renyi divergences -------------------------------------------------------------------------


def renyi_to_epsilon(divergence: float, order: float, delta: float) -> float:
    """Convert a Renyi divergence to an epsilon.

    Canonne, Kamath, Steinke, arXiv 2004.00010v4, Proposition 12.
    """
    left = (math.log(delta) + math.log(order)) / (order - 1)
    return max(divergence + math.log1p(-1 / order) - left, 0.0)  # NaN stays NaN, over any budget


def best_order(epsilon: float, delta: float) -> float:
    """Return the best order for converting a Gaussian mechanism that spends (epsilon, delta)."""
    width = math.sqrt(2 * math.log(1 / delta))
    mu = math.sqrt(width**2 + 2 * epsilon) - width
    return 1 + width / max(mu, 1e-9)


def renyi_epsilon(parts: list[tuple[DpEvent, int]], delta: float) -> float:
    """Add up Renyi divergences and convert them at the best of ORDERS; `inf` for sampled events."""
    if any(isinstance(event, PoissonSampledDpEvent) for event, _ in parts):
        return math.inf  # discretised losses are tighter and faster
    return min(
        renyi_to_epsilon(sum(n * law_of(e).renyi(order) for e, n in parts), order, delta)
        for order in ORDERS
    )


# --- discretised privacy losses ---------------------------------------------------------------


def discretised_epsilon(parts: list[tuple[DpEvent, int]], delta: float) -> float:
    """Bound the epsilon of composed events by the library's pessimistic discretisation.

    Gaussian and Laplace events are always accounted as add-or-remove (our sensitivity is folded
    in), and responses always as replace-one. Counts are composed by `self_compose`, because an
    accountant would drop the counts of responses. The result is `inf` if the library's steps
    overflow.
    """
    parts, rest = _separate_small(parts)
    if _resolution(parts) > LARGEST_PROFILE:
        return math.inf
    return float(_composed(parts).get_epsilon_for_delta(delta)) + rest


def discretised_delta(parts: list[tuple[DpEvent, int]], epsilon: float) -> float:
    """Bound the delta of composed events at an epsilon >= 0, in both directions, by discretisation.

    At epsilon 0, this bounds the total variation distance.
    """
    return float(_composed(parts).get_delta_for_epsilon(epsilon))


def discretised_deltas(
    parts: list[tuple[DpEvent, int]],
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Return the delta of composed events as a function of epsilons >= 0, by discretisation.

    It is a bound in both directions.
    """
    parts, rest = _separate_small(parts)
    composed = _composed(parts)
    smallest = SMALLEST_PROFILE + _lost_mass(parts)
    most = min(float(composed.get_epsilon_for_delta(smallest)), LARGEST_PROFILE)
    grid = np.linspace(0.0, most, PROFILE_POINTS)
    known = np.asarray(composed.get_delta_for_epsilon(list(grid)))
    # delta is convex in exp(epsilon), so a chord lies above it; beyond the last point delta falls.
    odds = np.expm1(grid)

    def deltas(epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        at = np.expm1(np.clip(epsilons - rest, 0.0, most))
        nearer = -np.expm1(np.minimum(epsilons - rest, 0.0))  # where epsilon is below `rest`
        return np.asarray(np.interp(at, odds, known) + nearer)

    return deltas


def _separate_small(parts: list[tuple[DpEvent, int]]) -> tuple[list[tuple[DpEvent, int]], float]:
    """Return the events that can be discretised, and the pure loss (near zero) of the others."""
    small = [(event, n) for event, n in parts if n * law_of(event).pure < SMALL_LOSS]
    rest = sum(n * law_of(event).pure for event, n in small)
    return [part for part in parts if part not in small], rest


def _composed(parts: list[tuple[DpEvent, int]]) -> pld.PrivacyLossDistribution:
    step, error = _resolution(parts), _lost_mass(parts)
    total = pld.PrivacyLossDistribution.create_from_rounded_probability({0: 1 - error}, error, step)
    for event, n in parts:
        total = total.compose(law_of(event).composed(n, step))
    return total


def _lost_mass(parts: list[tuple[DpEvent, int]]) -> float:
    """Bound the mass that the library's Fourier transforms lose; it counts as an infinite loss."""
    return min(1.0, CONVOLUTION_ERROR * sum(n for _, n in parts))


def _resolution(parts: list[tuple[DpEvent, int]]) -> float:
    """Choose a fine resolution within MOST_LOSSES that divides the grids of the events' laws."""
    spread = sum(n * law_of(event).concentration for event, n in parts)
    reach = spread + 2 * math.sqrt(spread * math.log(1e15))  # except for about 1e-15 of the mass
    step = max(FINEST_RESOLUTION, 2 * reach / MOST_LOSSES)
    for event, _ in parts:
        law = law_of(event)
        if law.finest < FINEST_RESOLUTION:
            step = max(law.finest, 2 * reach / MOST_LOSSES)
        if law.grid > step:
            step = law.grid / math.ceil(law.grid / step)
    return step
