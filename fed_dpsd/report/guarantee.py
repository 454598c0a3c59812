"""Texts of pages on proven epsilons, in addition to accounts/words.py."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fed_dpsd.accounts.words import (
    BY,
    PATIENT_NOTE,
    RUN_NOTE,
    SAME_IMAGE_NOTE,
    SAME_PATIENT_NOTE,
    SEEDED_NOTE,
    TUNING_NOTE,
    further_trust,
    short_trust,
    trusted,
)
from fed_dpsd.privacy.epsilon import NOT_REVIEWED, review_of, rounded_up

CHANGES = {
    ("record", "add_remove"): "a record is added or removed",
    ("record", "replace_one"): "a record is replaced",
    ("patient", "add_remove"): "all records of a patient at a client are added or removed",
    ("patient", "replace_one"): "all records of a patient at a client are replaced",
    ("client", "add_remove"): "all records of a client are added or removed",
    ("client", "replace_one"): "all records of a client are replaced",
}
CLASS_COUNTS = "class counts have no bound"  # how their reason starts
UNPROVEN = {  # the same for the relations without a bound
    "record": ("a record", "an added or removed record", "a replaced record"),
    "patient": ("a patient", "an added or removed patient", "a patient whose records are replaced"),
    "client": ("a whole client", "an added or removed client", "a client that is replaced"),
}
RELATIONS = {"add_remove": "a {} added or removed", "replace_one": "a replaced {}"}
# The card's short notes as sentences; all other notes are sentences already.
NOTES = {
    SEEDED_NOTE: "The noise is seeded, as in every simulation unless noise=secure, so anyone "
    "who knows the seed can remove it. The files of this run therefore carry no guarantee.",
    RUN_NOTE: "Each number covers this one run. The costs of other runs on the same data add up.",
    PATIENT_NOTE: "Numbers for a patient hold only for patients who are known at a single client.",
    SAME_IMAGE_NOTE: "A replaced record keeps "
    "its image or its patient, so it stays with the same teacher.",
    SAME_PATIENT_NOTE: "A record is replaced by a record of the same patient.",
    TUNING_NOTE: "Choosing these settings by other runs on the same data is not covered.",
}
FALSE_ALARMS = 0.01


# --- numbers in words ---


def epsilon_clause(row: Mapping[str, Any], colluding: int | None) -> str:
    """Return an epsilon with its unit, relation, trust and delta, as a clause."""
    return (
        f"epsilon {rounded_up(float(row['epsilon']))} ({row['unit']}, {row['relation']}, "
        f"{short_trust(row['trust'], colluding)}, delta {row['delta']:g}{review(row)})"
    )


def plain_clause(row: Mapping[str, Any], colluding: int | None) -> str:
    """Return the clause of `epsilon_clause` in plain words."""
    delta = np.format_float_positional(float(row["delta"]), trim="-")
    have = "have" if row["trust"] == "threshold" else "has"
    return (
        f"epsilon {rounded_up(float(row['epsilon']))} (for "
        f"{RELATIONS[row['relation']].format(row['unit'])}; {trusted(row['trust'], colluding)} "
        f"{have} to be trusted; delta {delta}{review(row)})"
    )


def trusts_needed(
    finite: Sequence[tuple[Mapping[str, Any], str, Any]], label: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    """Return each trust and the changes that need it; "" for the changes if there is one trust."""
    rows = [(row["trust"], RELATIONS[row["relation"]].format(row["unit"])) for row, *_ in finite]
    if label and math.isfinite(float(label["epsilon"])):
        rows.append((label["trust"], "a replaced label"))
    trusts = list(dict.fromkeys(trust for trust, _ in rows))
    if len(trusts) < 2:
        return [(trust, "") for trust in trusts]
    return [(trust, ", ".join(text for own, text in rows if own == trust)) for trust in trusts]


def sentence_of(note: str) -> str:
    """Return a card's note as a sentence on what is not covered."""
    return NOTES.get(note, f"{note[:1].upper()}{note[1:]}.")


def as_noun_phrase(described: str) -> str:
    """Return a description of a release as a noun phrase, without keys and the verb "leave"."""
    text = re.sub(r",? ?\b[a-z_]+\.[a-z_]+=[^\s,;)]+", "", described).removeprefix("none: ")
    return re.sub(r" leave( the clients)?(?=;|$)", "", text)


def unproven_sentence(card: Mapping[str, Any]) -> str:
    """Return a sentence on what has no finite epsilon, with the reason; "" if all have one."""
    infinite = {
        (row["unit"], row["relation"])
        for row in card["proven"]
        if math.isinf(float(row["epsilon"]))
    }
    found = []
    for unit, (whole, *parts) in UNPROVEN.items():
        missing = [
            part
            for part, relation in zip(parts, RELATIONS, strict=True)
            if (unit, relation) in infinite
        ]
        found += [whole] if len(missing) == len(parts) else missing
    if not found:
        return ""
    # Class counts lack a bound only if their training does, whose reason is plainer.
    reasons = [r for r in (card["reason"] or "").split("; ") if not r.startswith(CLASS_COUNTS)]
    because = f", because {'; '.join(reasons)}" if any(reasons) else ""
    named = " or ".join(filter(None, (", ".join(found[:-1]), found[-1])))
    return f"Nothing is proven for {named}{because}."


def replacement_costs_more(card: Mapping[str, Any]) -> bool:
    """Return whether a changed record counts as replacing its patient (training.unit=patient)."""
    record, patient = (
        next(
            float(row["epsilon"])
            for row in card["proven"]
            if (row["unit"], row["relation"]) == (unit, "add_remove")
        )
        for unit in ("record", "patient")
    )
    return patient < record < math.inf


def review(row: Mapping[str, Any]) -> str:
    """Return ", not reviewed" for an epsilon of a run with a plug-in; "" for any other."""
    return f", {NOT_REVIEWED}" if review_of(row["notes"]) else ""


def right_at_most(row: Mapping[str, Any]) -> float:
    """Bound the probability of a correct guess about a record included with probability 1/2.

    A true positive rate a and a false positive rate b satisfy a <= e^epsilon b + delta and 1 - b <=
    e^epsilon (1 - a) + delta; the guess is correct with probability (a + 1 - b) / 2.
    """
    ratio = math.exp(-float(row["epsilon"]))
    return (1 + float(row["delta"]) * ratio) / (1 + ratio)


def found_at_most(row: Mapping[str, Any]) -> float:
    """Bound the fraction of included records that an attack with FALSE_ALARMS can find."""
    return min(math.exp(float(row["epsilon"])) * FALSE_ALARMS + float(row["delta"]), 1.0)


def split_by_proof(
    card: Mapping[str, Any],
) -> tuple[list[tuple[Mapping[str, Any], str, str]], list[str]]:
    """Return the row, change and proofs of each finite epsilon, and the changes with none."""
    finite, infinite = [], []
    for row in card["proven"]:
        change = CHANGES[row["unit"], row["relation"]]
        if math.isinf(float(row["epsilon"])):
            infinite.append(change)
            continue
        proof = f"{row['accountant']}, by {BY[row['basis']]}"
        for other in row["beside"]:
            if math.isfinite(float(other["epsilon"])):
                number = rounded_up(float(other["epsilon"]))
                proof += f"; by {BY[other['basis']]} {number}, {further_trust(other['trust'])}"
        finite.append((row, change, proof))
    return finite, infinite


def notes(card: Mapping[str, Any]) -> list[str]:
    """Return the caveats of the finite epsilons, or of all epsilons if none is finite."""
    rows = [*card["proven"], *([card["label"]] if card["label"] else [])]
    rows = [row for row in rows if math.isfinite(float(row["epsilon"]))] or rows
    return list(dict.fromkeys(note for row in rows for note in row["notes"]))
