"""Claims: the epsilons that charges prove together, which plans, cards and ledgers print.

Only the epsilon of labels alone comes from elsewhere (`prove_label` in privacy/label_dp.py).

Plans and ledgers are first converted to `Charge`s. `proofs` then finds the admissible proofs and
what each one proves (docs/mechanisms.md, "Two axes").
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dp_accounting import ComposedDpEvent, DpEvent, SelfComposedDpEvent

from fed_dpsd.privacy.accounting import Bound, best_bound, contraction_bound, unchanged_epsilon
from fed_dpsd.privacy.epsilon import Epsilon
from fed_dpsd.privacy.mechanism import (
    Basis,
    Relation,
    Trust,
    Unit,
    combined_trust,
    trust_of,
)
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.training import TrainingMechanism
from fed_dpsd.protocol import Releases

OTHER = "other"  # all mechanisms that are not in the run's plan, counted together
TIMES_PLANNED = 100  # releases beyond this many plans are not accounted for: the card says `inf`


@dataclass(frozen=True)
class Charge:
    """A charge for one unit and relation.

    Args:
        event: its cost by its own noise.
        trust: the parties that must be honest for this cost.
        teachers: name of the private training that was charged, or that trained the answering
            teachers; "" for anything else, such as class counts or answers of teachers trained
            without noise.
        trainings: number of training runs; 0 for a release.
    """

    event: DpEvent
    trust: Trust
    teachers: str = ""
    trainings: int = 0


def proofs(charges: Sequence[Charge], delta: float) -> list[Bound]:
    """Return the bound of every admissible proof, the smallest epsilon first.

    - "answers": all releases, each by its own noise. It holds for any teachers.
    - "training": all private training runs, and the releases that none of them covers.
    - "contraction": one training run and its teachers' answers together, and all other releases. It
      exists only if it proves more than the other two.

    If a teacher's training is not among the charges, its releases admit only the first proof.
    """
    releases = [charge for charge in charges if not charge.trainings]
    trainings = {charge.teachers: charge for charge in charges if charge.trainings}
    found = [_proof("answers", releases, delta)]
    used = {charge.teachers for charge in releases} - {""}
    if not trainings or used - trainings.keys():
        return found
    others = [charge for charge in releases if not charge.teachers]
    found.append(_proof("training", [*trainings.values(), *others], delta))
    if len(used) == 1:
        (name,) = used
        if trainings[name].trainings == 1:
            answered = [charge for charge in releases if charge.teachers]
            events = (trainings[name].event, _composed(answered), _composed(others))
            if bound := contraction_bound(*events, delta):
                trust = combined_trust(charge.trust for charge in charges)
                found.append(dataclasses.replace(bound, trust=trust, basis="contraction"))
    return sorted(found, key=lambda bound: bound.epsilon)


def bound_on(basis: Basis, found: Sequence[Bound]) -> Bound:
    """Return the bound on a basis; if there is none, the one with the smallest epsilon."""
    return next((bound for bound in found if bound.basis == basis), found[0])


def claims(
    charges: Sequence[Charge], delta: float, unit: Unit, relation: Relation, queries: int
) -> dict[Basis, Epsilon]:
    """Return the epsilons that charges prove for a unit, by basis, smallest first."""
    return {
        bound.basis: Epsilon(
            *(bound.epsilon, bound.delta, unit, relation, bound.trust, bound.accountant, queries)
        )
        for bound in proofs(charges, delta)
    }


def charges_of_plan(plan: Plan, releases: Releases, unit: Unit, relation: Relation) -> list[Charge]:
    """Return the charges for the given number of releases of each of a plan's mechanisms."""
    private = isinstance(plan.training, TrainingMechanism)
    mechanisms = {stage.mechanism.name: stage.mechanism for stage in plan.charged}
    charges = []
    for name, mechanism in mechanisms.items():
        count = releases.get(name, 0)
        event = SelfComposedDpEvent(mechanism.event(unit, relation), count)
        charge = Charge(event, trust_of(mechanism.noise_at))
        if not count:
            continue
        if isinstance(mechanism, TrainingMechanism):
            charge = dataclasses.replace(charge, teachers="trained", trainings=count)
        elif private and mechanism.from_teachers:
            charge = dataclasses.replace(charge, teachers="trained")
        charges.append(charge)
    return charges


def covers(plan: Plan, charged: Releases) -> bool:
    """Return whether the plan knows the mechanism of each charge, and can account for them all."""
    planned = plan.releases
    return all(
        name in planned and count <= TIMES_PLANNED * planned[name]
        for name, count in charged.items()
    )


def _proof(basis: Basis, charges: Sequence[Charge], delta: float) -> Bound:
    trust = combined_trust(charge.trust for charge in charges)
    return dataclasses.replace(best_bound(_composed(charges), delta), trust=trust, basis=basis)


def _composed(charges: Iterable[Charge]) -> DpEvent:
    return ComposedDpEvent([charge.event for charge in charges])


def smallest_claim(
    plan: Plan, charged: Releases, delta: float, unit: Unit, relation: Relation
) -> Epsilon:
    """Return the smallest epsilon that is proven for a client's charges in a run so far.

    It is infinite if the plan does not cover a charge.
    """
    if not covers(plan, charged):
        return Epsilon(math.inf, delta, unit, relation, "nobody", "none", 0)
    found = claims(charges_of_plan(plan, charged, unit, relation), delta, unit, relation, 0)
    return next(iter(found.values()))


def planned_epsilon(plan: Plan, delta: float, unit: Unit, combined: bool) -> float:
    """Return the epsilon of a plan for an added or removed unit, to which noise is calibrated.

    Without `combined`, this is what a budget counts while settings do not change. With `combined`,
    training and answers together may prove a smaller epsilon.
    """
    paid = ComposedDpEvent([stage.event(unit, "add_remove") for stage in plan.budgeted])
    budgeted = unchanged_epsilon(paid, delta)
    if not combined:
        return budgeted
    charges = charges_of_plan(plan, plan.releases, unit, "add_remove")
    return min(budgeted, bound_on("contraction", proofs(charges, delta)).epsilon)
