"""The privacy card: every epsilon of a run, a plan or a ledger, with its meaning.

The card also shows the epsilons of published formulas, which never affect a run.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fed_dpsd.accounts import words
from fed_dpsd.accounts.account import budget_text, needed_budget
from fed_dpsd.accounts.database import is_database, read_ledger
from fed_dpsd.accounts.entry import MARK, Entry, charges_of_entries
from fed_dpsd.accounts.secret import own_ledger_folder
from fed_dpsd.accounts.simulated import FILE, entries_in, entries_of_file
from fed_dpsd.claims import bound_on, charges_of_plan, claims, covers, proofs
from fed_dpsd.config.bind import read_yaml
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment, calibrated_axis
from fed_dpsd.models.pretrained import public_of
from fed_dpsd.privacy.accounting import Bound, Stage, leaks, prove
from fed_dpsd.privacy.epsilon import NOT_REVIEWED_NOTE, Epsilon, add_review_note
from fed_dpsd.privacy.label_dp import LabelPrivate, prove_label
from fed_dpsd.privacy.mechanism import (
    UNITS_AND_RELATIONS,
    Basis,
    Relation,
    Unit,
    quorum_of,
    with_shares,
)
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.published import published_epsilon
from fed_dpsd.protocol import Releases

UNCOVERED = (
    "a client was charged for something that this run's plan does not include or cannot account for"
)
_LEDGERS = f"a client_*.sqlite or {FILE}, its folder, or a run folder"
TOO_LITTLE_NOISE = "the noise or delta is too small to compute a finite epsilon"


def row_of(proven: Mapping[Basis, Epsilon]) -> dict[str, Any]:
    """Return a card's row for the epsilons of several proofs, the smallest first."""
    rows = [claim.to_json() | {"basis": basis} for basis, claim in proven.items()]
    return _with_others(rows)


def _with_others(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    smallest, *others = rows
    kept = ("basis", "trust", "epsilon")
    return {**smallest, "beside": [{key: row[key] for key in kept} for row in others]}


def how_trained(experiment: Experiment) -> str:
    """Describe how the teachers are trained and what their training alone protects."""
    if experiment.config.teacher.path is not None:
        return "none here: teachers are read from files"
    if not experiment.answers.from_teachers:
        return words.NO_TEACHERS
    return experiment.training.describe(experiment.plan.trainings)


def how_answered(experiment: Experiment) -> str:
    """Describe everything that leaves a client in a run, and where noise is added."""
    return experiment.method.describe(experiment.public)


def privacy_card(
    experiment: Experiment,
    plan: Plan,
    ledgers: Sequence[Sequence[Entry]] = (),
    charged: Releases = MappingProxyType({}),
    notes: tuple[str, ...] = (),
    stated: Sequence[Releases] = (),
) -> dict[str, Any]:
    """Return the `privacy` object of summary.json and of `fed-dpsd privacy plan`.

    The proven epsilons cover the whole plan, even if only part of it was used, and everything
    charged in addition. If the teachers were trained privately, each epsilon has several valid
    proofs: by the training, by the released answers, and sometimes by both together. The smallest
    number is the claim; the others are listed with it (docs/mechanisms.md, "Two axes"). No number
    depends on records, because cards are public.

    Args:
        experiment: the experiment with the mechanisms and delta.
        plan: what a client will be charged.
        ledgers: the clients' charges for this run. `spent` is the largest amount spent by any
            client. Empty before a run, and if hospitals keep their ledgers.
        charged: releases by mechanism that a client was, or may have been, charged for.
        notes: further facts about the run.
        stated: releases by mechanism that each client states to be charged for in this run,
            including reused charges of other runs; empty if hospitals keep their ledgers.
    """
    settings, answers = experiment.config.privacy, experiment.answers
    first = requested_unit(experiment)
    rows = []
    for pair in sorted(UNITS_AND_RELATIONS, key=lambda pair: pair[0] != first):
        planned = proven_epsilons(experiment, plan, *pair, notes)
        paid = [charges_of_entries(ledger, *pair) for ledger in ledgers]
        paid += [charges_of_plan(plan, each, *pair) for each in stated if covers(plan, each)]
        used = [proofs(charges, settings.delta) for charges in paid]
        more = _charged(plan, charged, settings.delta, *pair)
        found = [
            _row(basis, epsilon, used, more, settings.delta) for basis, epsilon in planned.items()
        ]
        rows.append(_with_others(sorted(found, key=lambda row: float(row["epsilon"]))))
    asked = [stage for stage in plan.stages if stage.mechanism == answers]
    left = [stage.mechanism.name for stage in asked or plan.stages[-1:]]
    return {
        "training": experiment.training.name,
        "answers": left[0] if left else "nothing",
        "unit": first,
        "epsilon_stated": settings.epsilon_stated,
        "epsilon_published": _number(_published(experiment, plan, asked)),
        "proven": rows,
        "colluding": quorum.colluding if (quorum := quorum_of(answers)) else None,
        "observers": _observers(experiment, plan, charged, rows),
        "label": _label(experiment, plan),
        "reason": _reason(experiment, plan, rows) if covers(plan, charged) else UNCOVERED,
    }


def _row(
    basis: Basis,
    planned: Epsilon,
    used: Sequence[Sequence[Bound]],
    more: Sequence[Sequence[Bound]],
    delta: float,
) -> dict[str, Any]:
    """Return a card's row for a planned epsilon, or for a larger one if more was charged.

    Args:
        basis: what the epsilon's proof rests on.
        planned: the epsilon of the plan.
        used: the bounds on what each client was charged for.
        more: the bounds on the plan together with everything charged in addition.
        delta: the delta of the bounds.
    """
    spent = [bound_on(basis, each) for each in used]
    every = [*(bound_on(basis, each) for each in more), *spent]
    most = max(every, key=lambda bound: bound.epsilon, default=None)
    claim = planned
    if most is not None and most.epsilon > planned.value:
        claim = dataclasses.replace(
            planned,
            value=most.epsilon,
            delta=delta,
            accountant=most.accountant,
            notes=(*planned.notes, words.MORE_NOTE),
        )
    row = claim.to_json() | {"basis": basis, "planned": _number(planned.value)}
    if spent:
        row["spent"] = _number(max(bound.epsilon for bound in spent))
    return row


def _published(experiment: Experiment, plan: Plan, asked: Sequence[Stage]) -> float:
    """Return the epsilon of the papers' formulas; `asked` are the stages of the answers."""
    delta = experiment.config.privacy.delta
    if asked:
        counted = sum(stage.requests * stage.queries for stage in asked)
        return published_epsilon(experiment.answers, counted, delta)
    if plan.stages:
        num_classes = experiment.config.data.num_classes
        return experiment.training.published(plan.trainings, num_classes, delta)
    return math.inf


def _reason(experiment: Experiment, plan: Plan, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why an epsilon is infinite; None if none is."""
    if all(row["epsilon"] != "inf" for row in rows):
        return None
    uncharged = () if plan.training_stages else (experiment.training,)
    mechanisms = [stage.mechanism for stage in plan.charged]
    reasons = dict.fromkeys(p.reason for p in (*uncharged, *mechanisms) if p.reason)
    first = rows[0]
    pair = first["unit"], first["relation"]
    if first["epsilon"] == "inf" and not any(leaks(each.event(*pair)) for each in mechanisms):
        reasons = {TOO_LITTLE_NOISE: None} | reasons
    return "; ".join(reasons) or TOO_LITTLE_NOISE


def _observers(
    experiment: Experiment, plan: Plan, charged: Releases, rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return what is proven against each observer of secure sums; the first row is the card's own.

    Only the numbers that depend on the observer are listed.
    """
    answers, quorum = experiment.answers, quorum_of(experiment.answers)
    summed = [
        (row["unit"], row["relation"])
        for row in rows
        if row["trust"] == "threshold" and row["epsilon"] != "inf"
    ]
    if quorum is None or not summed:
        return []
    releases, found = plan.releases | Counter(charged), []
    for observer, shares in words.observers(quorum.threshold, quorum.colluding).items():
        seen = with_shares(answers, shares)
        stages = (
            dataclasses.replace(stage, mechanism=seen) if stage.mechanism == answers else stage
            for stage in plan.stages
        )
        known = dataclasses.replace(plan, stages=tuple(stages))
        smallest = [
            proofs(charges_of_plan(known, releases, *pair), experiment.config.privacy.delta)[0]
            for pair in summed
        ]
        proven = [
            {
                **{"unit": unit, "relation": relation, "delta": bound.delta},
                **{"epsilon": _number(bound.epsilon), "accountant": bound.accountant},
            }
            for (unit, relation), bound in zip(summed, smallest, strict=True)
        ]
        found.append({"observer": observer, "shares": shares, "proven": proven})
    return found


def _label(experiment: Experiment, plan: Plan) -> dict[str, Any] | None:
    if not isinstance(experiment.training, LabelPrivate):
        return None
    notes = (*seeded_note(experiment), words.RUN_NOTE, words.TUNING_NOTE, *plugins_note(experiment))
    return prove_label(experiment.training, notes, plan.queries).to_json()


def seeded_note(experiment: Experiment) -> tuple[str, ...]:
    """Return the note on seeded noise, which anyone with the seeds can draw; () without it."""
    return (words.SEEDED_NOTE,) if experiment.seeded else ()


def plugins_note(experiment: Experiment) -> tuple[str, ...]:
    """Return the note on plug-ins and functions that take part in the run, if any."""
    names = " and ".join(experiment.config.not_reviewed)
    return (NOT_REVIEWED_NOTE.format(names),) if names else ()


def _charged(
    plan: Plan, charged: Releases, delta: float, unit: Unit, relation: Relation
) -> list[list[Bound]]:
    """Return the proofs of the plan together with everything charged in addition.

    The result is empty if nothing else was charged, since the plan has its own proofs.
    """
    if not covers(plan, charged):
        return [[Bound(math.inf, delta, "none")]]
    if not +(Counter(charged) - plan.releases):
        return []
    whole = charges_of_plan(plan, plan.releases | Counter(charged), unit, relation)
    return [proofs(whole, delta)]


def proven_epsilons(
    experiment: Experiment,
    plan: Plan,
    unit: Unit,
    relation: Relation,
    further_notes: tuple[str, ...] = (),
) -> dict[Basis, Epsilon]:
    """Return the proven epsilons of a plan, with their caveats, by the proof's basis."""
    delta = experiment.config.privacy.delta
    further_notes = (*further_notes, *plugins_note(experiment))
    if not plan.stages:
        nothing = prove((), delta, unit, relation, (words.NOTHING_NOTE, *further_notes))
        return {"answers": nothing}
    mechanisms = (stage.mechanism for stage in plan.charged)
    notes = (*_caveats(experiment, plan, unit, relation), *further_notes)
    notes = add_review_note(notes, *mechanisms)
    charges = charges_of_plan(plan, plan.releases, unit, relation)
    found = claims(charges, delta, unit, relation, plan.queries)
    return {basis: dataclasses.replace(claim, notes=notes) for basis, claim in found.items()}


def _caveats(experiment: Experiment, plan: Plan, unit: Unit, relation: Relation) -> list[str]:
    """Return the notes on what the epsilons of a plan do not cover or take as given."""
    config = experiment.config
    notes = [*seeded_note(experiment), words.RUN_NOTE, words.TUNING_NOTE, words.DELTA_NOTE]
    if config.federation.simulation:
        notes.append(words.TEST_NOTE)
        if config.data.patient_column and config.data.shared_patients == "allow":
            notes.append(words.SHARED_NOTE)
        if config.num_clients > 1 or experiment.partition.leaves_out_by:
            notes.append(words.PARTITION_NOTE)
    else:
        notes.append(words.TIME_NOTE)
        if plan.releases_class_counts:
            notes.append(words.COUNTS_NOTE)
    if unit == "patient" and not (config.data.names_patients and config.federation.simulation):
        notes.append(words.PATIENT_NOTE)
    if config.data.records_per_patient is not None:  # what a record's shard and part depend on
        notes.append(words.MADE_UP_NOTE.format(config.data.records_per_patient))
    if (unit, relation) == ("record", "replace_one") and requested_unit(experiment) == "patient":
        notes.append(words.SAME_PATIENT_NOTE)
    if unit != "client" and relation == "replace_one" and config.teachers_per_client > 1:
        notes.append(words.SAME_IMAGE_NOTE)
    if config.teacher.path is not None:
        notes.append(words.TEACHER_NOTE)
    if "pretrained" in {*map(config.architecture, range(config.num_clients)), config.model.student}:
        notes.append(public_of(config.model).note)
    return notes


def requested_unit(experiment: Experiment) -> Unit:
    """Return the unit that the settings ask to protect: a record, unless they bound another."""
    return experiment.unit or "record"


def _number(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


# --- plans ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedRun:
    """The cost of a run to a client, before anything is read or spent.

    Args:
        experiment: the experiment that would run.
        queries_per_client: number of synthetic images, or requests for sums, that each client would
            answer.
        privacy: the published epsilon and every proven one.
        smallest_budget: the smallest privacy.budget that pays for the whole run; `inf` if none
            does.
        sends_once: a method that sends weights once, for at most the same epsilon; or None.
    """

    experiment: Experiment
    queries_per_client: int
    privacy: words.PrivacyCard
    smallest_budget: float
    sends_once: str | None = None

    def __str__(self) -> str:
        """Return the text that `fed-dpsd privacy plan` prints."""
        settings, axis = self.experiment.config.privacy, calibrated_axis(self.experiment)
        lines = [*words.sentences(self.privacy, self.experiment.seeded), ""]
        lines.append(f"training: {how_trained(self.experiment)}")
        lines.append(f"answers: {how_answered(self.experiment)}")
        if settings.target_epsilon is not None:
            mechanism = getattr(self.experiment, axis)
            unit = getattr(mechanism, "unit", "record")
            target = f"privacy.target_epsilon={settings.target_epsilon:g} ({unit}, add_remove)"
            value = getattr(mechanism, mechanism.calibrated_by)
            lines.append(f"calibrated to {target}: {axis}.{mechanism.calibrated_by}={value:.6g}")
        asked = "queries" if self.experiment.answers.from_teachers else "sums"
        lines.append(f"{asked} per client: {self.queries_per_client:,}")
        if self.privacy.covers_nothing:
            return "\n".join(lines)
        stated = self.privacy.content["epsilon_stated"]
        lines.append(f"epsilon stated by the paper: {'none' if stated is None else stated}")
        lines.append(words.published_line(self.privacy))
        lines += [f"epsilon planned: {text}" for text in self.privacy.claims]
        lines.append(f"budget: {budget_text(settings, self.smallest_budget)}")
        notes = dict.fromkeys(note for epsilon in self.privacy.proven for note in epsilon.notes)
        lines.append(f"notes: {', '.join(notes)}")
        if self.privacy.content["reason"]:
            lines.append(f"reason: {self.privacy.content['reason']}")
        if self.sends_once:
            lines.append(
                f"the same epsilon covers method={self.sends_once}, which sends weights once"
            )
        return "\n".join(lines)

    __repr__ = __str__


def planned_run(experiment: Experiment) -> PlannedRun:
    """Return the cost of an experiment, without reading data or spending anything."""
    planned = experiment.plan
    card = words.PrivacyCard(privacy_card(experiment, planned), "planned")
    budget = needed_budget(experiment.config.privacy, planned)
    return PlannedRun(experiment, planned.queries, card, budget)


# --- ledgers ----------------------------------------------------------------------------------


def ledgers_at(path: Path) -> dict[Path, Sequence[Entry]]:
    """Return the charges of each ledger at `path`: a file, a folder of ledgers or a run folder.

    A run folder in which nothing was charged has none.
    """
    if path.parent.name == FILE:  # one of its clients, as `entries_in` names it
        found = entries_of_file(path.parent)
        if path not in found:
            raise UserError(f"{path} does not exist; give {_LEDGERS}")
        return {path: found[path]}
    if path.is_file():
        if path.name == FILE:
            return entries_of_file(path)
        if not is_database(path):
            raise UserError(f"{path} is not a ledger; give {_LEDGERS}")
        return {path: read_ledger(path)}
    for folder in (path, own_ledger_folder(path)):
        if found := entries_in(folder):
            return found
    if not path.exists():
        raise UserError(f"{path} does not exist; give {_LEDGERS}")
    try:
        run = read_yaml(path / "config.yaml")
    except ValueError:
        raise UserError(f"{path} contains no ledger; give {_LEDGERS}") from None
    if not run.get("federation", {}).get("simulation", True):
        raise UserError(f"{path}: the clients of this run are hospitals, which keep their ledgers")
    if run.get("ledger"):
        raise UserError(
            f"{path}: this run's charges are in ledger={run['ledger']}; give that folder"
        )
    return {}


def ledger_epsilons(
    entries: Sequence[Entry],
    delta: float,
    unit: Unit,
    relation: Relation,
    further_notes: tuple[str, ...] = (),
) -> dict[Basis, Epsilon]:
    """Return the epsilons that a ledger's charges prove, by the proof's basis, smallest first.

    Settings are assumed to be chosen in advance. A budget bounds the epsilon by the training, or by
    the answers if there is no private training.
    """
    queries = sum(entry.queries for entry in entries)
    notes = [
        "over the ledger's life",
        "settings chosen in advance",
        words.PUBLIC_NOTE,
        *further_notes,
    ]
    if unit == "patient":
        notes.append(words.PATIENT_NOTE)
    trained = " ".join(entry.mechanism for entry in entries if entry.kind == "training")
    if (unit, relation) == ("record", "replace_one") and "unit='patient'" in trained:
        notes.append(words.SAME_PATIENT_NOTE)
    if any(entry.mechanism.endswith(MARK) for entry in entries):
        notes.append(NOT_REVIEWED_NOTE.format("a plug-in"))
    found = claims(charges_of_entries(entries, unit, relation), delta, unit, relation, queries)
    return {basis: dataclasses.replace(claim, notes=tuple(notes)) for basis, claim in found.items()}
