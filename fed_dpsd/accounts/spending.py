"""The epsilon that charges have spent so far, from counts of releases by mechanism."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from dp_accounting import ComposedDpEvent, SelfComposedDpEvent

from fed_dpsd.accounts.tally import TIMES_PLANNED
from fed_dpsd.methods.method import Plan
from fed_dpsd.privacy.accounting import Bound, epsilon
from fed_dpsd.privacy.epsilon import Epsilon
from fed_dpsd.privacy.mechanism import Basis, Relation, Unit, trust_of, weakest
from fed_dpsd.protocol import Releases


def covers(plan: Plan, charged: Releases) -> bool:
    """Return whether the plan knows the mechanism of each charge, and can account for them all."""
    planned = plan.releases
    return all(
        name in planned and count <= TIMES_PLANNED * planned[name]
        for name, count in charged.items()
    )


def bound(
    plan: Plan, charged: Releases, delta: float, unit: Unit, relation: Relation, basis: Basis
) -> Bound:
    """Bound the epsilon of charges that the plan covers, by a proof on a basis."""
    events = {s.mechanism.name: s.mechanism.event(unit, relation) for s in plan.bases[basis]}
    counts = Counter(charged)
    parts = [SelfComposedDpEvent(event, counts[name]) for name, event in events.items()]
    return epsilon(ComposedDpEvent(parts), delta)


def spent_so_far(
    plan: Plan, charged: Releases, delta: float, unit: Unit, relation: Relation
) -> Epsilon:
    """Return the smallest epsilon that is proven of a client's charges in a run.

    A proof by the training holds once the training is charged. Charges that the plan does not
    cover make the epsilon infinite.

    Args:
        plan: what a client was to be charged.
        charged: releases by mechanism that the run has cost the client.
        delta: in (0, 1), fixed in advance.
        unit: the unit that changes.
        relation: how the unit changes.
    """
    meaning = delta, unit, relation
    proofs = []
    for basis, stages in plan.bases.items() if covers(plan, charged) else ():
        if basis == "training" and not charged.get(plan.training.name):
            continue
        found = bound(plan, charged, *meaning, basis)
        trust = weakest(trust_of(stage.mechanism.noise_at) for stage in stages)
        proofs.append(
            Epsilon(found.epsilon, found.delta, unit, relation, trust, found.accountant, 0)
        )
    unknown = Epsilon(math.inf, *meaning, "nobody", "none", 0)
    return min(proofs, key=lambda proof: proof.value, default=unknown)


# --- clients whose charges are the same, as text ---


def by_ranges(charges: Mapping[int, Releases]) -> dict[str, dict[str, int]]:
    """Return the charges of clients once for all that have the same, by the clients' numbers.

    >>> by_ranges({0: {"label": 64}, 1: {"label": 64}, 2: {"label": 64}, 4: {"label": 32}})
    {'0-2': {'label': 64}, '4': {'label': 32}}
    """
    groups: dict[frozenset[tuple[str, int]], list[int]] = {}
    for client, releases in sorted(charges.items()):
        groups.setdefault(frozenset(releases.items()), []).append(client)
    return {",".join(_runs(clients)): dict(charges[clients[0]]) for clients in groups.values()}


def _runs(numbers: list[int]) -> Iterator[str]:
    """Yield ascending numbers as ranges."""
    first = last = numbers[0]
    for number in [*numbers[1:], -1]:
        if number != last + 1:
            yield str(first) if first == last else f"{first}-{last}"
            first = number
        last = number


def clients_in(ranges: str) -> list[int]:
    """Return the clients' numbers of a key of `by_ranges`.

    >>> clients_in("0-2,4")
    [0, 1, 2, 4]
    """
    ends = [part.partition("-") for part in ranges.split(",")]
    return [n for first, _, last in ends for n in range(int(first), int(last or first) + 1)]
