"""The privacy card: every epsilon of a run, a plan or a ledger, with its meaning.

It reads the published formulas only to print them: none steers a run.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fed_dpsd.config import UserError
from fed_dpsd.methods.method import Plan, World
from fed_dpsd.privacy.accounting import epsilon, prove
from fed_dpsd.privacy.mechanism import (
    UNITS_AND_RELATIONS,
    Epsilon,
    Relation,
    Shared,
    Unit,
    weakest,
)
from fed_dpsd.privacy.published import published_epsilon
from fed_dpsd.runtime.charge import Entry, spent
from fed_dpsd.runtime.experiment import Experiment

SEEDED_NOTE, RUN_NOTE = "seeded noise", "per run"
SAME_ID_NOTE = "replaced under the same id, so in the same shard"
SAME_IMAGE_NOTE = "replaced by one of the same image or patient, so in the same shard"
PATIENT_NOTE = "a patient known at one client only"
QUORUM_NOTE = "against the coordinator and {} of the other clients together"
TEACHER_NOTE = "teachers from a file: proven only if each saw its own client's records alone"


def plan_of(experiment: Experiment) -> Plan:
    """What a client will be charged in this experiment."""
    return experiment.method.plan(World.of(experiment.config, experiment.mechanism))


def privacy_card(
    experiment: Experiment, plan: Plan, ledgers: Sequence[Sequence[Entry]]
) -> dict[str, Any]:
    """The `privacy` object of summary.json and of `fed-dpsd privacy plan`.

    Args:
        experiment: whose mechanism and delta.
        plan: what a client will be charged; its epsilon is the guarantee, whatever was used of it.
        ledgers: the clients' charges; `spent` is that of the client that spent most. Empty before a
            run.
    """
    settings, mechanism = experiment.config.privacy, experiment.mechanism
    rows = []
    for unit, relation in UNITS_AND_RELATIONS:
        claim = proven(experiment, plan, unit, relation)
        if not ledgers:
            rows.append(claim.to_json())
            continue
        charged = (epsilon(spent(ledger, unit, relation), settings.delta) for ledger in ledgers)
        used = max(bound.epsilon for bound in charged)
        if used > claim.value and not experiment.config.ledger:
            notes = (*claim.notes, "more was charged than planned")
            claim = dataclasses.replace(claim, value=used, delta=settings.delta, notes=notes)
        rows.append(claim.to_json() | {"spent": _number(used)})
    counted = sum(s.asks * s.queries for s in plan.stages if s.mechanism == mechanism)
    return {
        "mechanism": mechanism.name,
        "epsilon_stated": settings.epsilon_stated,
        "epsilon_published": _number(published_epsilon(mechanism, counted, settings.delta)),
        "proven": rows,
        "reason": next((s.mechanism.reason for s in plan.stages if s.mechanism.reason), None),
    }


def proven(experiment: Experiment, plan: Plan, unit: Unit, relation: Relation) -> Epsilon:
    """The proven epsilon of a plan's answers in this experiment, with its caveats."""
    config = experiment.config
    notes = [SEEDED_NOTE, RUN_NOTE] if experiment.seeded else [RUN_NOTE]
    if unit == "patient":
        notes.append(PATIENT_NOTE)
    if unit != "client" and relation == "replace_one" and config.teachers_per_client > 1:
        notes.append(SAME_ID_NOTE if config.federation.simulation else SAME_IMAGE_NOTE)
    if config.teacher.path is not None:
        notes.append(TEACHER_NOTE)
    if isinstance(experiment.mechanism, Shared) and experiment.mechanism.quorum is not None:
        notes.append(QUORUM_NOTE.format(experiment.mechanism.quorum.colluding))
    return prove(plan.stages, config.privacy.delta, unit, relation, tuple(notes))


def _number(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


# --- ledgers ----------------------------------------------------------------------------------


def ledger_files(path: Path) -> list[Path]:
    """The ledgers at `path`: a file itself, or those of a folder or of a run folder.

    Raises:
        UserError: there is none.
    """
    if path.is_file():
        return [path]
    for folder in (path, path / "ledger"):
        if files := sorted(folder.glob("client_*.jsonl")):
            return files
    raise UserError(f"{path} holds no ledger; give a client_*.jsonl, its folder, or a run folder")


def account(entries: Sequence[Entry], delta: float, unit: Unit, relation: Relation) -> Epsilon:
    """What a ledger's charges prove together, their settings taken as chosen in advance."""
    bound = epsilon(spent(entries, unit, relation), delta)
    trust = weakest(entry.trust for entry in entries)
    queries = sum(entry.queries for entry in entries)
    notes = ("over the ledger's life", "settings chosen in advance")
    return Epsilon(
        bound.epsilon, bound.delta, unit, relation, trust, bound.accountant, queries, notes
    )
