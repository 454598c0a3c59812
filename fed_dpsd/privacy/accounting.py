"""From events to proven epsilons; nothing else in this project constructs an accountant.

Our sensitivity and relation are folded into an event's parameters. Gaussian and randomised response
events have exact laws, which are used here: the accounting library doubles a Gaussian's shift or
leaves it, depending on the accountant and its own neighbouring relation, its PLD accountant ignores
the count of a composed RandomizedResponseDpEvent, and its grids outgrow memory where epsilon is
large.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    RandomizedResponseDpEvent,
    SelfComposedDpEvent,
)
from scipy.optimize import brentq
from scipy.stats import binom, norm

from fed_dpsd.privacy.mechanism import Epsilon, Mechanism, Relation, Trust, Unit

UNITS_AND_RELATIONS: tuple[tuple[Unit, Relation], ...] = (
    ("record", "add_remove"),
    ("record", "replace_one"),
    ("client", "add_remove"),
    ("client", "replace_one"),
)


class UnsupportedEventError(ValueError):
    """No proof here covers this event; the message names the part that is not covered."""


def prove(
    mechanism: Mechanism,
    queries: int,
    delta: float,
    unit: Unit,
    relation: Relation,
    notes: tuple[str, ...] = (),
) -> Epsilon:
    """The proven epsilon of `queries` adaptive answers of `mechanism`, for one unit and relation.

    Args:
        mechanism: the object whose noise was, or will be, drawn.
        queries: N >= 0, the answered queries.
        delta: in (0, 1), fixed in advance.
        unit: what changes.
        relation: how it changes.
        notes: caveats to carry.

    Guarantee: for every such pair of neighbouring data sets the answers are (epsilon, delta)
        indistinguishable to anyone but the parties named by `mechanism.trust`.
    """
    return prove_stages([(mechanism, queries)], delta, unit, relation, notes)


def prove_stages(
    stages: Sequence[tuple[Mechanism, int]],
    delta: float,
    unit: Unit,
    relation: Relation,
    notes: tuple[str, ...] = (),
) -> Epsilon:
    """As `prove`, for a sequence of mechanisms, each with its number of answers.

    The trust is that of the most trusting mechanism.
    """
    events = [SelfComposedDpEvent(m.event(unit, relation), queries) for m, queries in stages]
    value, failure, accountant = epsilon(ComposedDpEvent(events), delta)
    queries = sum(queries for _, queries in stages)
    trust: Trust = "server" if any(m.trust == "server" for m, _ in stages) else "nobody"
    return Epsilon(value, failure, unit, relation, trust, accountant, queries, notes)


def epsilon(event: DpEvent, delta: float) -> tuple[float, float, str]:
    """The smallest epsilon we can prove for `event` at `delta`.

    Returns:
        epsilon, the delta it needs (0 where a pure bound is as good), and the accountant's name.

    Raises:
        UnsupportedEventError: the event holds a part, or a mixture, that no proof here covers.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must be between 0 and 1, both excluded")
    counts = _count_leaves(event)
    kinds = {type(leaf) for leaf in counts}
    if not kinds:
        return 0.0, 0.0, "pure"
    if NonPrivateDpEvent in kinds:
        return math.inf, delta, "none"
    if kinds == {GaussianDpEvent}:
        return _gaussian_epsilon(counts, delta), delta, "gdp_exact"
    if kinds == {RandomizedResponseDpEvent} and len(counts) == 1:
        (response, queries), *_ = counts.items()
        return _randomized_response_epsilon(response, queries, delta)
    names = ", ".join(sorted(f"{count} x {leaf}" for leaf, count in counts.items()))
    raise UnsupportedEventError(f"no proof here covers the composition of {names}")


def _count_leaves(event: DpEvent) -> Counter[DpEvent]:
    """The multiset of mechanisms in nested compositions."""
    if isinstance(event, SelfComposedDpEvent):
        inner = _count_leaves(event.event)
        return Counter({leaf: n * event.count for leaf, n in inner.items() if event.count})
    if isinstance(event, ComposedDpEvent):
        total: Counter[DpEvent] = Counter()
        for part in event.events:
            total.update(_count_leaves(part))
        return total
    if isinstance(event, GaussianDpEvent | RandomizedResponseDpEvent | NonPrivateDpEvent):
        return Counter({event: 1})
    raise UnsupportedEventError(f"no proof here covers {event}")


def _gaussian_epsilon(counts: Counter[DpEvent], delta: float) -> float:
    """N adaptive Gaussian mechanisms of multipliers z_i fixed in advance, exactly.

    They compose to one with mu = sqrt(sum 1 / z_i^2), whose
    delta(eps) = Phi(mu / 2 - eps / mu) - exp(eps) Phi(-mu / 2 - eps / mu)
    (Dong, Roth, Su: Gaussian differential privacy, arXiv 1905.02383v3, Corollaries 2.13 and 3.3).
    """
    mu = math.sqrt(sum(n / z**2 for z, n in _multipliers(counts)))

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


def _multipliers(counts: Counter[DpEvent]) -> Iterable[tuple[float, int]]:
    return ((event.noise_multiplier, n) for event, n in counts.items())


def _randomized_response_epsilon(
    response: RandomizedResponseDpEvent, queries: int, delta: float
) -> tuple[float, float, str]:
    """N k-ary randomised responses, exactly; or N * eps0, pure, where that is as good.

    The loss of one response is +eps0, 0 or -eps0 with probabilities a = truth, 1 - a - b and
    b = one lie. With S the sum of N such signs,
    delta(eps) = sum over s of P(S = s) max(0, 1 - exp(eps - eps0 s)).
    """
    lie = response.noise_parameter / response.num_buckets
    truth = 1 - (response.num_buckets - 1) * lie
    per_answer = math.log(truth / lie)
    pure = queries * per_answer
    if per_answer <= 0:
        return 0.0, 0.0, "pure"
    law, missing = _sign_sum_law(queries, truth, lie)
    losses = per_answer * (np.arange(len(law)) - queries)
    if missing >= delta:
        return pure, 0.0, "pure"

    def excess(candidate: float) -> float:
        above = losses > candidate
        hit = float(law[above] @ -np.expm1(candidate - losses[above]))
        return hit + missing - delta

    if excess(0.0) <= 0:
        return 0.0, delta, "rr_exact"
    # The solver's error is added, so that rounding never flatters the result.
    exact = brentq(excess, 0.0, pure, xtol=1e-9 * pure) + 2e-9 * pure
    if exact >= pure * (1 - 1e-6):
        return pure, 0.0, "pure"
    return exact, delta, "rr_exact"


def _sign_sum_law(queries: int, truth: float, lie: float) -> tuple[np.ndarray, float]:
    """P(S = s) for s = -N..N, S = A - B with (A, B, rest) multinomial, and the mass left out.

    A and B run over windows that miss at most 1e-14 of the mass; it counts as failure.
    """
    outside = 1e-15
    lies = np.arange(*_window(queries, lie, outside))
    law = np.zeros(2 * queries + 1)
    for count, log_weight in zip(lies, binom.logpmf(lies, queries, lie), strict=True):
        rest, share = queries - count, truth / (1 - lie)
        truths = np.arange(*_window(int(rest), share, outside))
        law[truths - count + queries] += np.exp(log_weight + binom.logpmf(truths, rest, share))
    return law, 1e-14


def _window(trials: int, probability: float, outside: float) -> tuple[int, int]:
    """Half-open range of counts that misses at most 2 * `outside` of Binomial(trials, p)."""
    low, high = binom.ppf(outside, trials, probability), binom.isf(outside, trials, probability)
    return max(0, int(low) - 1), min(trials, int(high) + 1) + 1
