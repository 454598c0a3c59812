"""Privacy losses of single events: exact laws, Renyi divergences, discretised losses.

Every function is exact, or an upper bound in exact arithmetic. The error of a solver and the mass
of a cut tail are added. delta is in (0, 1), N >= 1 the number of adaptive releases.
"""

import math

import numpy as np
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    RandomizedResponseDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, xlog1py, xlogy
from scipy.stats import binom, norm

from fed_dpsd.privacy.events import (
    FinitePrecisionDpEvent,
    ReplacedInSampleDpEvent,
    ShuffledResponseDpEvent,
)

FINEST_RESOLUTION = 1e-4
SMALL_LOSS = 1e-6  # of all releases of an event together; less counts as pure
MOST_LOSSES = 2**19  # discretised ones; bounds memory to 1 GiB and time to seconds
EXACT_TERMS = 3e7  # most terms of an exact law; they take about two seconds
OUTSIDE = 1e-15  # mass that a window of counts may miss
COARSE = 2**-8  # the most by which a number of uniform responses is rounded down, relatively
ORDERS = tuple(1 + 10 ** (exponent / 20) for exponent in range(-60, 81))  # 1.001 to 10,001


# --- Gaussian ---------------------------------------------------------------------------------


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Compute the epsilon of a Gaussian mechanism of noise multiplier 1 / mu, exactly.

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
    # The solver's error is added, so that rounding never flatters the result.
    return float(brentq(log_excess, 0.0, largest, xtol=tolerance)) + 2 * tolerance


def gaussian_mu(event: DpEvent) -> float | None:
    """Return the mu of composed Gaussian mechanisms, exactly; None where there is another event.

    mu^2 = sum of 1 / z^2 (arXiv 1905.02383v3, Corollary 3.3). It is the mu of ideal noise: the loss
    by a sampler's finite precision is left out.
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


# --- randomised response ----------------------------------------------------------------------


def truth_and_lie(response: RandomizedResponseDpEvent) -> tuple[float, float]:
    """Return probabilities of the true class and of one other, by the library's uniform redraw."""
    lie = response.noise_parameter / response.num_buckets
    return 1 - (response.num_buckets - 1) * lie, lie


def exact_terms(response: RandomizedResponseDpEvent, releases: int) -> int:
    """Estimate the number of terms that `response_epsilon` sums."""
    truth, lie = truth_and_lie(response)
    lies, truths = _window(releases, lie), _window(releases, truth / (1 - lie))
    return (lies[1] - lies[0]) * (truths[1] - truths[0])


def response_epsilon(response: RandomizedResponseDpEvent, releases: int, delta: float) -> float:
    """Compute the epsilon of N k-ary randomised responses, exactly.

    It is `inf` where only the pure bound N * eps0 holds. The loss of one response is +eps0, 0 or
    -eps0 with probabilities a = truth, 1 - a - b and b = one lie. With S the sum of N such signs,
    delta(eps) = sum over s of P(S = s) max(0, 1 - exp(eps - eps0 s)).
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
    # The solver's error is added, so that rounding never flatters the result.
    return float(brentq(excess, 0.0, largest, xtol=1e-9 * largest)) + 2e-9 * largest


def _sign_sum_law(releases: int, truth: float, lie: float) -> tuple[NDArray[np.float64], float]:
    """Return P(S = s) for s = -N..N and the mass left out, S = A - B, (A, B, rest) multinomial.

    A and B run over windows; the mass outside them counts as failure.
    """
    log_factorial = gammaln(np.arange(releases + 1) + 1.0)

    def log_pmf(count: NDArray[np.int64], trials: int, p: float) -> NDArray[np.float64]:
        ways = log_factorial[trials] - log_factorial[count] - log_factorial[trials - count]
        chances = xlogy(count, p) + xlog1py(trials - count, -p)
        return np.asarray(ways + chances)

    true_rate = truth / (1 - lie)  # among the responses that are not this lie
    law = np.zeros(2 * releases + 1)
    lies = np.arange(*_window(releases, lie))
    for count, log_weight in zip(lies.tolist(), log_pmf(lies, releases, lie), strict=True):
        truths = np.arange(*_window(releases - count, true_rate))
        law[truths - count + releases] += np.exp(
            log_weight + log_pmf(truths, releases - count, true_rate)
        )
    return law, 2 * OUTSIDE


def _window(trials: int, probability: float) -> tuple[int, int]:
    """Return a half-open range of counts that misses at most OUTSIDE of Binomial(trials, p).

    Bernstein's inequality: P(|X - np| >= t) <= 2 exp(-t^2 / (2 (np (1 - p) + t / 3))).
    """
    limit = math.log(2 / OUTSIDE)
    variance = trials * probability * (1 - probability)
    width = limit / 3 + math.sqrt(limit**2 / 9 + 2 * limit * variance)
    mean = trials * probability
    return max(0, math.floor(mean - width)), min(trials, math.ceil(mean + width)) + 1


# --- pure bounds and Renyi divergences --------------------------------------------------------


def pure_epsilon(event: DpEvent) -> float:
    """Return the largest privacy loss of one release; `inf` where it has no bound."""
    if isinstance(event, RandomizedResponseDpEvent):
        truth, lie = truth_and_lie(event)
        return max(0.0, math.log(truth / lie)) if lie > 0 else math.inf
    if isinstance(event, LaplaceDpEvent):
        return 1 / float(event.noise_multiplier)
    if isinstance(event, ShuffledResponseDpEvent):
        return event.epsilon_per_answer
    return math.inf


def renyi_divergence(event: DpEvent, order: float) -> float:
    """Return D_order between one release's two worlds, the worse way round.

    It is `inf` where no form is known. Gaussian: order / (2 z^2). Laplace: Mironov, arXiv
    1702.07476v3, Proposition 6. Randomised response: by its three likelihood ratios.
    Poisson-sampled Gaussian: the library's.
    """
    if isinstance(event, GaussianDpEvent):
        return order / (2 * float(event.noise_multiplier) ** 2)
    if isinstance(event, LaplaceDpEvent):
        shift = 1 / event.noise_multiplier
        up = math.log(order / (2 * order - 1)) + (order - 1) * shift
        down = math.log((order - 1) / (2 * order - 1)) - order * shift
        return float(np.logaddexp(up, down)) / (order - 1)
    if isinstance(event, RandomizedResponseDpEvent):
        truth, lie = truth_and_lie(event)
        if lie <= 0:
            return math.inf
        rest = max(0.0, 1 - truth - lie)
        terms = [
            order * math.log(truth) + (1 - order) * math.log(lie),
            order * math.log(lie) + (1 - order) * math.log(truth),
            math.log(rest) if rest > 0 else -math.inf,
        ]
        return float(np.logaddexp.reduce(terms)) / (order - 1)
    if isinstance(event, PoissonSampledDpEvent):
        accountant = RdpAccountant([order], NeighboringRelation.ADD_OR_REMOVE_ONE)
        return float(accountant.compose(event).rdp[0])
    return math.inf


def renyi_to_epsilon(divergence: float, order: float, delta: float) -> float:
    """Convert a Renyi divergence to an epsilon.

    Canonne, Kamath, Steinke, arXiv 2004.00010v4, Proposition 12.
    """
    return max(
        0.0,
        divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1),
    )


def best_order(epsilon: float, delta: float) -> float:
    """Return the best order to convert a Gaussian mechanism that spends (epsilon, delta)."""
    width = math.sqrt(2 * math.log(1 / delta))
    mu = math.sqrt(width**2 + 2 * epsilon) - width
    return 1 + width / max(mu, 1e-9)


def renyi_epsilon(parts: list[tuple[DpEvent, int]], delta: float) -> float:
    """Add up Renyi divergences and convert at the best of ORDERS; `inf` for sampled events."""
    if any(isinstance(event, PoissonSampledDpEvent) for event, _ in parts):
        return math.inf  # discretised losses are tighter, and quicker
    return min(
        renyi_to_epsilon(sum(n * renyi_divergence(e, order) for e, n in parts), order, delta)
        for order in ORDERS
    )


# --- discretised privacy losses ---------------------------------------------------------------


def discretised_epsilon(parts: list[tuple[DpEvent, int]], delta: float) -> float:
    """Bound the epsilon of composed events by the library's pessimistic discretisation.

    Gaussian and Laplace events are always accounted as add-or-remove (our sensitivity is folded
    in), and responses always as replace-one. Counts are composed by `self_compose`, since an
    accountant would drop those of responses.
    """
    # A loss near zero counts as pure: it is too small to be discretised.
    small = [(event, n) for event, n in parts if n * pure_epsilon(event) < SMALL_LOSS]
    parts = [part for part in parts if part not in small]
    rest = sum(n * pure_epsilon(event) for event, n in small)
    return float(_composed(parts).get_epsilon_for_delta(delta)) + rest


def discretised_delta(parts: list[tuple[DpEvent, int]], epsilon: float) -> float:
    """Bound the delta of composed events at an epsilon >= 0, both ways round, by discretisation.

    At epsilon 0 it bounds the total variation distance.
    """
    return float(_composed(parts).get_delta_for_epsilon(epsilon))


def _composed(parts: list[tuple[DpEvent, int]]) -> pld.PrivacyLossDistribution:
    step = _resolution(parts)
    total = pld.identity(step)
    for event, n in parts:
        total = total.compose(_loss_distribution(event, step).self_compose(n))
    return total


def _resolution(parts: list[tuple[DpEvent, int]]) -> float:
    """Choose a fine resolution within MOST_LOSSES; with responses it divides their loss.

    Losses that are multiples of it are not rounded up, which would cost up to a step for each.
    """
    spread = sum(n * _concentration(event) for event, n in parts)
    reach = spread + 2 * math.sqrt(spread * math.log(1e15))  # except for about 1e-15 of the mass
    step = max(FINEST_RESOLUTION, 2 * reach / MOST_LOSSES)
    for event, _ in parts:
        if isinstance(event, ShuffledResponseDpEvent):
            step = max(FINEST_RESOLUTION / 10, 2 * reach / MOST_LOSSES)
        if isinstance(event, RandomizedResponseDpEvent) and pure_epsilon(event) > step:
            step = pure_epsilon(event) / math.ceil(pure_epsilon(event) / step)
    return step


def _concentration(event: DpEvent) -> float:
    """Estimate the loss's mean, half its variance; it sets the resolution and nothing else."""
    if isinstance(event, GaussianDpEvent):
        return 1 / (2 * float(event.noise_multiplier) ** 2)
    if isinstance(event, PoissonSampledDpEvent):
        return _sampled_concentration(event.sampling_probability, event.event.noise_multiplier)
    if isinstance(event, ReplacedInSampleDpEvent):
        return 4 * _sampled_concentration(event.sampling_probability, event.noise_multiplier)
    pure = pure_epsilon(event)
    spread = min(pure, pure**2 / 2)
    if isinstance(event, ShuffledResponseDpEvent):
        lie = 1 / (math.exp(pure) + event.k - 1)
        apart, uniform = math.expm1(pure) * lie, 1 + (event.responses - 1) * event.k * lie
        spread = min(spread, event.k * apart**2 / uniform)
    return spread


def _sampled_concentration(probability: float, noise_multiplier: float) -> float:
    whole = 1 / noise_multiplier**2
    return min(probability**2 * math.expm1(min(whole, 500)), whole) / 2


def _loss_distribution(event: DpEvent, step: float) -> pld.PrivacyLossDistribution:
    if isinstance(event, GaussianDpEvent):
        return pld.from_gaussian_mechanism(
            event.noise_multiplier, value_discretization_interval=step
        )
    if isinstance(event, LaplaceDpEvent):
        return pld.from_laplace_mechanism(
            event.noise_multiplier, value_discretization_interval=step
        )
    if isinstance(event, RandomizedResponseDpEvent):
        truth, lie = truth_and_lie(event)
        jumps = pure_epsilon(event) / step
        up, down = math.ceil(jumps), math.floor(jumps)
        if abs(jumps - round(jumps)) < 1e-9:  # the resolution divides the loss, up to rounding
            up = down = round(jumps)
        masses: dict[int, float] = {}
        for jump, mass in ((up, truth), (0, max(0.0, 1 - truth - lie)), (-down, lie)):
            masses[jump] = masses.get(jump, 0.0) + mass
        return pld.PrivacyLossDistribution.create_from_rounded_probability(masses, 0.0, step)
    if isinstance(event, ShuffledResponseDpEvent):
        return _shuffled_losses(event, step)
    sampled = isinstance(event, PoissonSampledDpEvent)
    return pld.from_gaussian_mechanism(
        event.event.noise_multiplier if sampled else event.noise_multiplier,
        value_discretization_interval=step,
        sampling_prob=event.sampling_probability,
        neighboring_relation=(
            NeighboringRelation.ADD_OR_REMOVE_ONE if sampled else NeighboringRelation.REPLACE_ONE
        ),
    )


def _shuffled_losses(event: ShuffledResponseDpEvent, step: float) -> pld.PrivacyLossDistribution:
    """Return the losses of M shuffled responses, of which one means class 0 or class 1.

    The adversary is told which of the other M - 1 answered their true class, and which class. Each
    of the M - 1 is among the rest with probability k b. The rest and the changing one are n
    responses whose counts h are multinomial, weighted by (k / n) (b n + (a - b) h_c), c the class
    that the changing one means. More uniform responses hide more, so numbers n are rounded down a
    little. The worlds are mirror images of each other, so both ways round have the same losses.
    """
    k, others = event.k, event.responses - 1
    lie = 1 / (math.exp(event.epsilon_per_answer) + k - 1)
    truth = 1 - (k - 1) * lie
    farthest = math.ceil(event.epsilon_per_answer / step) + 1
    masses = np.zeros(2 * farthest + 1)
    uniform = np.arange(*_window(others, k * lie))
    width = max(1, math.floor(COARSE * uniform[0]))
    weights = binom.pmf(uniform, others, k * lie)
    for start in range(0, len(uniform), width):
        n = int(uniform[start]) + 1
        both = np.arange(*(_window(n, 2 / k) if k > 2 else (n, n + 1)))[:, None]  # h0 + h1
        h0 = np.arange(_window(int(both[0, 0]), 1 / 2)[0], _window(int(both[-1, 0]), 1 / 2)[1])
        chance = binom.pmf(both, n, 2 / k) * binom.pmf(h0, both, 1 / 2)  # 0 where impossible
        first = lie + (truth - lie) * h0 / n
        second = lie + (truth - lie) * np.maximum(both - h0, 0) / n
        losses = (np.log(first) - np.log(second)).ravel()
        chance = (k * weights[start : start + width].sum() * chance * first).ravel()
        # Each mass is split between its neighbours on the grid, so that its part in both worlds is
        # kept: who sees the neighbour sees more.
        below = np.floor(losses / step)
        above = np.expm1(below * step - losses) / math.expm1(-step)
        index = below.astype(np.int64) + farthest
        for shift, part in ((0, 1 - above), (1, above)):
            masses += np.bincount(index + shift, chance * part, len(masses))
    grid = range(-farthest, farthest + 1)
    # The windows miss less mass than 1e-12, and rounding changes less.
    return pld.PrivacyLossDistribution.create_from_rounded_probability(
        dict(zip(grid, masses.tolist(), strict=True)), 1e-12, step
    )
