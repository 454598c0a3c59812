"""Texts on proven epsilons: what each one means, whom it bounds and what it does not cover."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fed_dpsd.report.numbers import counted, rounded_up
from fed_dpsd.report.settings import NOT_REVIEWED

MEANINGFUL = 10.0  # above it, an attacker may be sure of a record: docs/privacy.md
MEANINGFUL_DELTA = 0.01  # above it, some of a hundred records may be published outright
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
NO_TEACHERS = "none here: clients have no teachers"  # in place of a training
SECRET = "add their noise and keep it to themselves"  # what clients must do in secure sums
RELATIONS = {"add_remove": "a {} added or removed", "replace_one": "a replaced {}"}
BY = {  # the basis of a proof
    "training": "the training",
    "answers": "the answers",
    "contraction": "the training and the answers together",
}
# The card's short notes as sentences; all other notes are sentences already.
NOTES = {
    "seeded noise": "The noise is seeded, as in every simulation unless noise=secure, so anyone "
    "who knows the seed can remove it. The files of this run therefore carry no guarantee.",
    "per run": "Each number covers this one run. The costs of other runs on the same data add up.",
    "a patient known at one client only": "Numbers for a patient hold only for patients who "
    "are known at a single client.",
    "replaced by one of the same image or patient, so in the same shard": "A replaced record keeps "
    "its image or its patient, so it stays with the same teacher.",
    "replaced by a record of the same patient": "A record is replaced by a record of the same "
    "patient.",
    "tuning not covered": "Choosing these settings by other runs on the same data is not covered.",
}
FALSE_ALARMS = 0.01


# --- whom a number bounds ---


def against(trust: str, colluding: int | None) -> str:
    """Return the observers that a number holds against, as in "any observer".

    Args:
        trust: "nobody", "threshold" or "server".
        colluding: `colluding` of the quorum of secure sums; None for any quorum.
    """
    if trust == "server":
        return "any observer except the coordinator, which sees answers without noise"
    if trust == "nobody":
        return "any observer"
    if colluding == 0:
        return f"the coordinator alone (not a client that sees the result), if all clients {SECRET}"
    some = "`colluding` clients" if colluding is None else counted(colluding, "client")
    return (
        f"the coordinator and any {some} together (a client that sees the result counts as one), "
        f"if all other clients {SECRET}"
    )


def trusted(trust: str, colluding: int | None) -> str:
    """Return the parties that must be trusted, as in "all clients but 1"."""
    if trust == "threshold":
        return f"all clients but {colluding:,}" if colluding else "all clients"
    return {"nobody": "nobody", "server": "the coordinator"}[trust]


def short_trust(trust: str, colluding: int | None) -> str:
    """Return a trust in the code's words, as in "trust threshold, colluding 1"."""
    return f"trust {trust}, colluding {colluding:,}" if trust == "threshold" else f"trust {trust}"


def further_trust(trust: str) -> str:
    """Return the trust of a proof next to the smallest, which has no number for each observer."""
    return f"trust {trust}" + (", may be larger against others" * (trust == "threshold"))


def observers(threshold: int, colluding: int) -> dict[str, int]:
    """Return the observers of a secure sum, each with the number of clients that protect a record.

    The observer does not know their parts of the noise, or their responses. One of them has the
    record. The first observer is the one that a card's numbers hold against.

    Args:
        threshold: smallest number of clients in a sum.
        colluding: number of clients that the sum withstands, below `threshold`.
    """
    honest, reader = threshold - colluding, "a client that sees the result"
    found = {against("threshold", colluding): honest}
    if colluding:
        found[f"the coordinator or an outsider alone, if all clients {SECRET}"] = threshold
        besides = f"{reader}, besides {counted(colluding, 'colluding client')}"
        found[f"{besides}, if all other clients {SECRET}"] = honest - 1
    if colluding != 1:
        found[f"{reader}, if all other clients {SECRET}"] = threshold - 1
    return {observer: shares for observer, shares in found.items() if shares}


def too_many(card: Mapping[str, Any]) -> str:
    """Return the coalition that a card's numbers of secure sums do not hold against; "" if none."""
    if not card["observers"]:
        return ""
    return f"the coordinator together with more than {counted(card['colluding'], 'client')}"


def other_observers(card: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is proven against each observer of secure sums other than the card's own."""
    for seen in card["observers"][1:]:
        rows = [row for row in seen["proven"] if row["unit"] == card["unit"]] or seen["proven"]
        numbers = " and ".join(
            f"{rounded_up(float(row['epsilon']), 4)} ({row['unit']}, {row['relation']})"
            for row in rows
        )
        deltas = " and ".join(dict.fromkeys(f"{row['delta']:g}" for row in rows))
        yield f"epsilon {numbers}, delta {deltas}, against {seen['observer']}"


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
    marked = any(note.startswith(NOT_REVIEWED) for note in row["notes"])
    return f", {NOT_REVIEWED}" if marked else ""


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
                number = rounded_up(float(other["epsilon"]), 5)
                proof += f"; by {BY[other['basis']]} {number}, {further_trust(other['trust'])}"
        finite.append((row, change, proof))
    return finite, infinite


def notes(card: Mapping[str, Any]) -> list[str]:
    """Return the caveats of the finite epsilons, or of all epsilons if none is finite."""
    rows = [*card["proven"], *([card["label"]] if card["label"] else [])]
    rows = [row for row in rows if math.isfinite(float(row["epsilon"]))] or rows
    return list(dict.fromkeys(note for row in rows for note in row["notes"]))
