"""The privacy card: every epsilon of a run, a plan or a ledger, with its meaning.

The card prints the epsilons of the published formulas; no such formula steers a run.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dp_accounting import ComposedDpEvent, SelfComposedDpEvent

from fed_dpsd.accounts.entry import Entry, spent
from fed_dpsd.accounts.ledger import ledgers_in
from fed_dpsd.accounts.tally import TIMES_PLANNED
from fed_dpsd.config import UserError
from fed_dpsd.experiment import Experiment
from fed_dpsd.methods.method import Plan, World
from fed_dpsd.privacy.accounting import Bound, epsilon, prove
from fed_dpsd.privacy.mechanism import (
    UNITS_AND_RELATIONS,
    Epsilon,
    Relation,
    Unit,
    quorum_of,
    weakest,
)
from fed_dpsd.privacy.published import published_epsilon
from fed_dpsd.privacy.training import TrainingMechanism
from fed_dpsd.protocol import Releases

SEEDED_NOTE, RUN_NOTE = "seeded noise", "per run"
SAME_ID_NOTE = "replaced under the same id, so in the same shard"
SAME_IMAGE_NOTE = "replaced by one of the same image or patient, so in the same shard"
SAME_PATIENT_NOTE = "replaced by a record of the same patient"
PATIENT_NOTE = "a patient known at one client only"
MADE_UP_NOTE = "patients are made up: {} records of one class each"
QUORUM_NOTE = "against the coordinator and {} of the other clients together"
TEACHER_NOTE = "teachers from a file: proven only if each saw its own client's records alone"
TUNING_NOTE = "tuning not covered"
NOTHING_NOTE = "nothing is released"
TIME_NOTE = "the time that a client takes tells about how many records it has"
UNKNOWN_RECORDS_NOTE = "delta should be below one over the records of each client"
RECORDS_NOTE = "delta is {}below one over the {:,} records of the largest client"
MORE_NOTE = "more was charged than planned"
UNCOVERED = "a client was charged for what this run's plan does not know, or cannot account for"


@dataclass(frozen=True)
class PrivacyCard:
    """The `privacy` object of summary.json, for people and scripts.

    Args:
        content: as `privacy_card` returns it.
    """

    content: Mapping[str, Any]

    @property
    def published(self) -> float:
        """Return the epsilon of the papers' formulas; it guarantees nothing."""
        return float(self.content["epsilon_published"])

    @property
    def proven(self) -> tuple[Epsilon, ...]:
        """Return every proven epsilon, for each unit and relation."""
        return tuple(map(Epsilon.from_json, self.content["proven"]))

    def epsilon(self, unit: Unit, relation: Relation) -> Epsilon:
        """Return the proven epsilon of a unit and relation, such as "record" and "add_remove"."""
        (claim,) = (e for e in self.proven if (e.unit, e.relation) == (unit, relation))
        return claim

    @property
    def covers_nothing(self) -> bool:
        """Return whether nothing is released."""
        return all(NOTHING_NOTE in epsilon.notes for epsilon in self.proven)

    def __str__(self) -> str:
        """Return a line on the published epsilon, and one on each proven one."""
        name, reason = self.content["mechanism"], self.content["reason"]
        lines = [f"epsilon published (no guarantee): {self.published:.4g} ({name})"]
        lines += [f"epsilon proven: {epsilon}" for epsilon in self.proven]
        return "\n".join(lines + ([f"reason: {reason}"] if reason else []))


def plan_of(experiment: Experiment) -> Plan:
    """Return what a client will be charged in this experiment."""
    return experiment.method.plan(World.of(experiment.config, experiment.mechanism))


def privacy_card(
    experiment: Experiment,
    plan: Plan,
    ledgers: Sequence[Sequence[Entry]] = (),
    charged: Releases = MappingProxyType({}),
    notes: tuple[str, ...] = (),
    records: int | None = None,
) -> dict[str, Any]:
    """Return the `privacy` object of summary.json and of `fed-dpsd privacy plan`.

    The proven epsilons cover the whole plan, even if only a part of it was used, and all that was
    charged besides.

    Args:
        experiment: the experiment with the mechanism and delta.
        plan: what a client will be charged.
        ledgers: the clients' charges for this run. `spent` is that of the client that spent most.
            Empty before a run, and where hospitals keep their ledgers.
        charged: releases by mechanism that a client was or may be charged for.
        notes: further facts about the run.
        records: number of records of the largest client, where that is public; None otherwise.
    """
    settings, mechanism = experiment.config.privacy, experiment.mechanism
    uncovered = not _covers(plan, charged)
    rows = []
    for unit, relation in UNITS_AND_RELATIONS:
        planned = proven(experiment, plan, unit, relation, notes, records)
        used = [epsilon(spent(ledger, unit, relation), settings.delta) for ledger in ledgers]
        most = max([_charged(plan, charged, settings.delta, unit, relation), *used], key=_value)
        claim = planned
        if most.epsilon > planned.value:
            claim = dataclasses.replace(
                planned,
                value=most.epsilon,
                delta=settings.delta,
                accountant=most.accountant,
                notes=(*planned.notes, MORE_NOTE),
            )
        row = claim.to_json() | {"planned": _number(planned.value)}
        rows.append(row | ({"spent": _number(max(map(_value, used)))} if used else {}))
    reasons = (stage.mechanism.reason for stage in plan.stages if stage.mechanism.reason)
    counted = sum(s.asks * s.queries for s in plan.stages if s.mechanism == mechanism)
    return {
        "mechanism": mechanism.name,
        "epsilon_stated": settings.epsilon_stated,
        "epsilon_published": _number(published_epsilon(mechanism, counted, settings.delta)),
        "proven": rows,
        "reason": UNCOVERED if uncovered else next(reasons, None),
    }


def _value(bound: Bound) -> float:
    return bound.epsilon


def _covers(plan: Plan, charged: Releases) -> bool:
    """Return whether the plan knows the mechanism of each charge, and can account for them all."""
    planned = plan.releases
    return all(
        name in planned and count <= TIMES_PLANNED * planned[name]
        for name, count in charged.items()
    )


def _charged(plan: Plan, charged: Releases, delta: float, unit: Unit, relation: Relation) -> Bound:
    """Bound the epsilon of the plan together with all that was charged besides.

    The bound is 0 where nothing was charged besides, since the plan has a bound of its own.
    """
    if not _covers(plan, charged):
        return Bound(math.inf, delta, "none")
    if not +(Counter(charged) - plan.releases):
        return Bound(0.0, delta, "none")
    events = {s.mechanism.name: s.mechanism.event(unit, relation) for s in plan.stages}
    counts = plan.releases | Counter(charged)
    parts = [SelfComposedDpEvent(events[name], count) for name, count in counts.items()]
    return epsilon(ComposedDpEvent(parts), delta)


def proven(
    experiment: Experiment,
    plan: Plan,
    unit: Unit,
    relation: Relation,
    further_notes: tuple[str, ...] = (),
    records: int | None = None,
) -> Epsilon:
    """Return the proven epsilon of a plan's answers in this experiment, with its caveats."""
    config, delta = experiment.config, experiment.config.privacy.delta
    if not plan.stages:
        return prove((), delta, unit, relation, (NOTHING_NOTE, *further_notes))
    notes = [SEEDED_NOTE, RUN_NOTE] if experiment.seeded else [RUN_NOTE]
    notes.append(TUNING_NOTE)
    if records is None:
        notes.append(UNKNOWN_RECORDS_NOTE)
    else:
        notes.append(RECORDS_NOTE.format("" if delta * records < 1 else "NOT ", records))
    if not config.federation.simulation:
        notes.append(TIME_NOTE)
    if unit == "patient":
        notes.append(PATIENT_NOTE)
        if config.data.records_per_patient is not None:
            notes.append(MADE_UP_NOTE.format(config.data.records_per_patient))
    if (unit, relation) == ("record", "replace_one") and _by_patient(experiment):
        notes.append(SAME_PATIENT_NOTE)
    if unit != "client" and relation == "replace_one" and config.teachers_per_client > 1:
        notes.append(SAME_ID_NOTE if config.federation.simulation else SAME_IMAGE_NOTE)
    if config.teacher.path is not None:
        notes.append(TEACHER_NOTE)
    if quorum := quorum_of(experiment.mechanism):
        notes.append(QUORUM_NOTE.format(quorum.colluding))
    return prove(plan.stages, delta, unit, relation, (*notes, *further_notes))


def _by_patient(experiment: Experiment) -> bool:
    """Return whether patients are the unit of a private training."""
    mechanism = experiment.mechanism
    return isinstance(mechanism, TrainingMechanism) and mechanism.unit == "patient"


def _number(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


# --- ledgers ----------------------------------------------------------------------------------


def ledger_files(path: Path) -> list[Path]:
    """List the ledgers at `path`: a file itself, or those of a folder or of a run folder.

    Raises:
        UserError: `path` holds no ledger.
    """
    if path.is_file():
        return [path]
    for folder in (path, path / "ledger"):
        if found := ledgers_in(folder):
            return [file for _, file in sorted(found.items())]
    raise UserError(f"{path} holds no ledger; give a client_*.sqlite, its folder, or a run folder")


def account(entries: Sequence[Entry], delta: float, unit: Unit, relation: Relation) -> Epsilon:
    """Return the epsilon that a ledger's charges prove together.

    Their settings are taken as chosen in advance.
    """
    bound = epsilon(spent(entries, unit, relation), delta)
    trust = weakest(entry.trust for entry in entries)
    queries = sum(entry.queries for entry in entries)
    notes = ("over the ledger's life", "settings chosen in advance")
    return Epsilon(
        bound.epsilon, bound.delta, unit, relation, trust, bound.accountant, queries, notes
    )
