"""Proofs: bounds on epsilon for events. No other module of this project computes one.

Sensitivity and relation are folded into an event's parameters, so the accounting library's
relations are never mixed with ours. (Only some of the library's accountants double a Gaussian's
shift, and its PLD accountant ignores the count of a composed RandomizedResponseDpEvent.)
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    RandomizedResponseDpEvent,
    SelfComposedDpEvent,
)

from fed_dpsd.privacy import gdp, laws
from fed_dpsd.privacy.contraction import Profile, compose_gaussian, contract, smallest_epsilon
from fed_dpsd.privacy.epsilon import Epsilon, add_review_note
from fed_dpsd.privacy.events import (
    FinitePrecisionDpEvent,
    ReservedDpEvent,
    ReservingDpEvent,
    law_of,
)
from fed_dpsd.privacy.mechanism import (
    Basis,
    Charged,
    Relation,
    Trust,
    Unit,
    combined_trust,
    trust_of,
)

LARGEST_MU = 1e6  # larger values exceed double precision and carry no meaning
# Finite precision: larger losses and smaller deltas get no bound, since the proof does not cover
# them (docs/proofs.md, Theorem 8).
LARGEST_LOSS, SMALLEST_DELTA = 100.0, 1e-100
# The part of a budget reserved for the noise's finite precision: a fraction, and a maximum.
PRECISION_FRACTION, PRECISION_MOST = 2.0**-9, 2.0**-5
# If answers cost this many times more than the training, contraction gains nothing measurable.
TIMES_LARGER = 10
LARGEST_BUDGET = 1e9  # charges that exceed it exceed every budget: nothing is proven
# The fraction of delta for data sets whose settings change; the rest is for all others.
CHANGED_SETTINGS_FRACTION = 0.05

Parts = frozenset[tuple[DpEvent, int]]  # distinct events, each with its number of releases


@dataclass(frozen=True)
class Stage:
    """A stage of a plan: `requests` requests of `queries` queries each, for `mechanism`."""

    mechanism: Charged
    requests: int
    queries: int

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return the event of the whole stage."""
        releases = self.mechanism.releases(self.requests, self.queries)
        return SelfComposedDpEvent(self.mechanism.event(unit, relation), releases)


def prove(
    stages: Sequence[Stage],
    delta: float,
    unit: Unit,
    relation: Relation,
    notes: tuple[str, ...] = (),
    covered: int | None = None,
) -> Epsilon:
    """Prove the epsilon of a plan: stages of adaptive answers with settings fixed in advance.

    Args:
        stages: the plan; its mechanisms are the objects that draw the noise.
        delta: in (0, 1), fixed in advance.
        unit: the unit that changes.
        relation: how the unit changes.
        notes: caveats stored with the epsilon.
        covered: number of queries that the epsilon covers; by default all queries of the stages.

    Guarantee: for every such pair of neighbouring data sets, the answers are (epsilon,
        delta)-indistinguishable to anyone except the parties named by the most trusting mechanism.

    Raises:
        UnsupportedEventError: no proof here covers a stage.
    """
    bound = best_bound(ComposedDpEvent([stage.event(unit, relation) for stage in stages]), delta)
    trust = combined_trust(trust_of(stage.mechanism.noise_at) for stage in stages)
    queries = sum(s.requests * s.queries for s in stages) if covered is None else covered
    return Epsilon(
        *(bound.epsilon, bound.delta, unit, relation, trust, bound.accountant, queries),
        add_review_note(notes, *(stage.mechanism for stage in stages)),
    )


@dataclass(frozen=True)
class Bound:
    """The result of a proof before it becomes an `Epsilon`; it is never printed."""

    epsilon: float  # proven epsilon, >= 0
    delta: float  # the delta of this epsilon; 0 for a pure bound
    accountant: str  # the name of the proof
    trust: Trust = "nobody"  # the parties that must be honest
    basis: Basis = "answers"  # what the proof rests on


def best_bound(event: DpEvent, delta: float) -> Bound:
    """Return the bound with the smallest epsilon that a proof gives for `event` at `delta`.

    Raises:
        UnsupportedEventError: the event contains a part that no proof covers.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must be strictly between 0 and 1")
    counts, loss = _leaves(event)
    if loss > LARGEST_LOSS or (loss and delta < SMALLEST_DELTA):
        return Bound(math.inf, delta, "none")
    ideal = _smallest_bound(_parts(counts), delta * math.exp(-loss))
    return Bound(ideal.epsilon + loss, delta if ideal.delta else 0.0, ideal.accountant)


def contraction_bound(
    training: DpEvent, answers: DpEvent, others: DpEvent, delta: float
) -> Bound | None:
    """Bound the epsilon of answers that depend on records only through trained teachers.

    Args:
        training: the event of one private training run.
        answers: the event of all releases of its teachers, with any two teachers as neighbours.
        others: the event of all releases that bypass the teachers, such as class counts.
        delta: in (0, 1).

    Returns:
        None if the bound is no smaller than the bound of the training alone or of the answers
        alone, or cannot be computed because `others` are not Gaussian.
    """
    counts = [_leaves(event) for event in (training, answers, others)]
    (trained, _), (answered, _), (rest, _) = counts
    loss = math.fsum(loss for _, loss in counts)
    ideal_delta = delta * math.exp(-loss)
    known = [_parts(trained), _parts(answered)]
    alone = [_smallest_bound(parts, ideal_delta).epsilon for parts in known]
    if loss > LARGEST_LOSS or not all(0 < epsilon < math.inf for epsilon in alone):
        return None
    if alone[1] > TIMES_LARGER * (alone[0] - math.log(ideal_delta)):
        return None
    if not all(isinstance(event, GaussianDpEvent) for event in rest):
        return None
    mu = math.sqrt(math.fsum(n / event.noise_multiplier**2 for event, n in rest.items()))
    most = min(
        best_bound(ComposedDpEvent([event, others]), delta).epsilon for event in (training, answers)
    )
    if math.isinf(most):
        return None
    found = _contracted_epsilon(*known, mu, ideal_delta, most) + loss
    return Bound(found, delta, "contraction") if found < most * (1 - 1e-6) else None


@functools.lru_cache(maxsize=4096)
def _contracted_epsilon(
    training: Parts, answers: Parts, mu: float, delta: float, most: float
) -> float:
    profile = compose_gaussian(contract(_profile(training), _profile(answers)), mu)
    return smallest_epsilon(profile, delta, most)


@functools.lru_cache(maxsize=64)
def _profile(parts: Parts) -> Profile:
    """Return delta as a function of epsilon, for mechanisms of ideal noise."""
    ordered = sorted(parts, key=repr)
    if len(ordered) == 1:
        ((event, releases),) = ordered
        if isinstance(event, GaussianDpEvent):
            return functools.partial(gdp.gaussian_delta, 1 / event.noise_multiplier)
        if (
            isinstance(event, RandomizedResponseDpEvent)
            and laws.exact_terms(event, releases) <= laws.EXACT_TERMS
        ):
            return functools.partial(laws.response_delta, event, releases)
    return laws.discretised_deltas(ordered)


def pure_bound(event: DpEvent) -> Bound:
    """Return the bound on `event` at delta 0; `inf` if one of its losses is unbounded."""
    counts, loss = _leaves(event)
    return Bound(math.fsum(n * law_of(e).pure for e, n in counts.items()) + loss, 0.0, "pure")


def unchanged_epsilon(event: DpEvent, delta: float) -> float:
    """Return the smallest budget for which `within_budget` admits `event` with fixed settings."""
    counts, loss = _leaves(_budgeted(event))
    unchanging = (1 - CHANGED_SETTINGS_FRACTION) * delta * math.exp(-PRECISION_MOST)
    ideal = _smallest_bound(_parts(counts), unchanging).epsilon
    largest = PRECISION_MOST / PRECISION_FRACTION  # above, PRECISION_MOST is reserved
    needed = ideal / (1 - PRECISION_FRACTION)
    needed = needed if needed <= largest else ideal + PRECISION_MOST
    proven = loss <= PRECISION_MOST and not (loss and delta < SMALLEST_DELTA)
    return max(needed, loss / PRECISION_FRACTION) if proven else math.inf


def leaks(event: DpEvent) -> bool:
    """Return whether a part of an event has no guarantee, however much noise others add."""
    return NonPrivateDpEvent() in _leaves(event)[0]


def within_budget(
    charges: Sequence[DpEvent], budget: float, delta: float, times: Sequence[int] | None = None
) -> bool:
    """Return whether a data set's charges stay within (budget, delta).

    Each charge may be chosen after seeing the answers to earlier ones. While all charges have one
    setting (one event, or Gaussians with any multipliers), the composition is exact: the budget
    fixes the number of releases, or the sum of 1 / z^2, in advance. Once settings differ, Renyi
    divergences of one order, fixed by the budget, add up. Only one of the two cases occurs in a
    data set's lifetime, and their deltas add up to `delta` (docs/proofs.md, Theorem 7). A part of
    the budget, also fixed in advance, is reserved for the noise's finite precision.

    Args:
        charges: all charges of the data set's lifetime, including the new one, for one unit and
            relation.
        budget: epsilon >= 0, fixed before the first charge.
        delta: in (0, 1), fixed before the first charge.
        times: how many times each charge was made; None for once each.
    """
    charges = [_budgeted(charge) for charge in charges]
    counted = map(SelfComposedDpEvent, charges, times or [1] * len(charges))
    whole_life = ComposedDpEvent(list(counted))
    counts, loss = _leaves(whole_life)
    if NonPrivateDpEvent() in counts:
        return False
    kinds = {GaussianDpEvent if isinstance(leaf, GaussianDpEvent) else leaf for leaf in counts}
    settings = {frozenset(_count_leaves(charge).items()) for charge in charges} - {frozenset()}
    if len(kinds) <= 1 or len(settings) <= 1:
        return unchanged_epsilon(whole_life, delta) <= budget
    precision = min(PRECISION_FRACTION * budget, PRECISION_MOST)
    if loss > precision or (loss and delta < SMALLEST_DELTA):
        return False
    budget -= precision
    changed_delta = CHANGED_SETTINGS_FRACTION * delta * math.exp(-PRECISION_MOST)
    order = laws.best_order(budget, changed_delta)
    divergence = sum(n * law_of(leaf).renyi(order) for leaf, n in counts.items())
    return laws.renyi_to_epsilon(divergence, order, changed_delta) <= budget


def smallest_budget(charges: Sequence[DpEvent], delta: float) -> float:
    """Return the smallest budget with which `within_budget` admits charges; `inf` if none does.

    If settings differ between charges, the result exceeds the smallest by at most a millionth.
    """
    most = unchanged_epsilon(ComposedDpEvent(list(charges)), delta)
    if not 0 < most < math.inf:
        return most
    least = most * (1 - 1e-6)
    while not within_budget(charges, most, delta):
        least, most = most, 2 * most
        if most > LARGEST_BUDGET:
            return math.inf
    while within_budget(charges, least, delta):
        least, most = least / 2, least
    while most - least > 1e-6 * most:
        middle = (least + most) / 2
        if within_budget(charges, middle, delta):
            most = middle
        else:
            least = middle
    return most


# --- the smallest bound -----------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _smallest_bound(parts: Parts, delta: float) -> Bound:
    kinds = {type(event) for event, _ in parts}
    if not kinds:
        return Bound(0.0, 0.0, "pure")
    responses = [e for e, _ in parts if isinstance(e, RandomizedResponseDpEvent)]
    if NonPrivateDpEvent in kinds or any(math.isinf(law_of(e).pure) for e in responses):
        return Bound(math.inf, delta, "none")
    ordered = sorted(parts, key=repr)
    if kinds == {GaussianDpEvent}:
        ((event, _),) = ordered
        return Bound(gdp.gaussian_epsilon(1 / event.noise_multiplier, delta), delta, "gdp_exact")
    pure = Bound(sum(n * law_of(event).pure for event, n in parts), 0.0, "pure")
    if pure.epsilon == 0:
        return pure
    bounds = [pure, Bound(laws.renyi_epsilon(ordered, delta), delta, "rdp")]
    if kinds == {RandomizedResponseDpEvent} and len(ordered) == 1:
        ((response, releases),) = ordered
        if laws.exact_terms(response, releases) <= laws.EXACT_TERMS:
            exact = laws.response_epsilon(response, releases, delta)
            bounds.append(Bound(exact, delta, "rr_exact"))
    else:
        bounds.append(Bound(laws.discretised_epsilon(ordered, delta), delta, "pld"))
    best = min(bounds, key=lambda bound: bound.epsilon)
    return pure if best.epsilon >= pure.epsilon * (1 - 1e-6) else best


def _leaves(event: DpEvent) -> tuple[Counter[DpEvent], float]:
    """Count the mechanisms with ideal noise, and add up the losses due to finite precision."""
    counts = _count_leaves(event)
    losses = {e: n for e, n in counts.items() if isinstance(e, FinitePrecisionDpEvent)}
    ideal = Counter({e: n for e, n in counts.items() if e not in losses})
    return ideal, math.fsum(n * event.loss for event, n in losses.items())


def _parts(counts: Counter[DpEvent]) -> Parts:
    return frozenset(_merge_gaussians(counts).items())


def _merge_gaussians(counts: Counter[DpEvent]) -> Counter[DpEvent]:
    """Merge Gaussian mechanisms with multipliers z_i into one with z, 1 / z^2 = sum 1 / z_i^2.

    Adaptive composition is exact (Dong, Roth, Su: arXiv 1905.02383v3, Corollary 3.3).
    """
    merged = Counter({e: n for e, n in counts.items() if not isinstance(e, GaussianDpEvent)})
    gaussians = [(e.noise_multiplier, n) for e, n in counts.items() if e not in merged]
    if gaussians:
        mu = math.sqrt(math.fsum(n / z / z for z, n in gaussians))
        merged[GaussianDpEvent(1 / mu) if mu < LARGEST_MU else NonPrivateDpEvent()] = 1
    return merged


def _budgeted(event: DpEvent) -> DpEvent:
    """Return what a budget pays for an event: reservations count, and nothing counts twice."""
    if isinstance(event, SelfComposedDpEvent):
        return SelfComposedDpEvent(_budgeted(event.event), event.count)
    if isinstance(event, ComposedDpEvent):
        return ComposedDpEvent([_budgeted(part) for part in event.events])
    if isinstance(event, ReservingDpEvent):
        return ComposedDpEvent([event.event, event.reserved])
    return ComposedDpEvent([]) if isinstance(event, ReservedDpEvent) else event


def _count_leaves(event: DpEvent) -> Counter[DpEvent]:
    """Count the mechanisms in nested compositions, in order of first appearance."""
    if isinstance(event, SelfComposedDpEvent):
        inner = _count_leaves(event.event)
        return Counter({leaf: n * event.count for leaf, n in inner.items() if event.count})
    if isinstance(event, ComposedDpEvent):
        total: Counter[DpEvent] = Counter()
        for part in event.events:
            total.update(_count_leaves(part))
        return total
    if isinstance(event, ReservingDpEvent | ReservedDpEvent):
        return _count_leaves(event.event)
    if not isinstance(event, FinitePrecisionDpEvent):
        law_of(event)  # raises an error if there is none
    return Counter({event: 1})
