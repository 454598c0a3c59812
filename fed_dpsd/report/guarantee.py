"""The words for proven epsilons: what each one means, whom it bounds, and what it leaves out."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fed_dpsd.report.facts import Facts
from fed_dpsd.report.numbers import rounded_up
from fed_dpsd.report.settings import NOT_REVIEWED
from fed_dpsd.report.tables import Table

MEANINGFUL = 10.0  # a larger epsilon of a record says nothing: docs/privacy.md
MEANINGFUL_DELTA = 0.01  # nor does any epsilon with a larger delta
CHANGES = {
    ("record", "add_remove"): "a record is added or removed",
    ("record", "replace_one"): "a record is replaced",
    ("patient", "add_remove"): "all records of a patient at a client are added or removed",
    ("patient", "replace_one"): "all records of a patient at a client are replaced",
    ("client", "add_remove"): "all records of a client are added or removed",
    ("client", "replace_one"): "all records of a client are replaced",
}
TRUST = {
    "nobody": "nobody",
    "threshold": "enough of the clients",
    "server": "the coordinator",
}
# The attacker whom an epsilon bounds, by the parties that it trusts.
ATTACKERS = {
    "nobody": "An attacker who sees everything that left the clients",
    "threshold": "An attacker who sees everything that the coordinator sees, while enough of the "
    "clients are honest,",
    "server": "An attacker who sees everything that the coordinator publishes",
}
BY = {  # what a proof rests on
    "training": "the training",
    "answers": "the answers",
    "contraction": "the training and the answers together",
}
# Short notes of the card, as sentences; others are sentences already.
NOTES = {
    "seeded noise": "The noise is seeded, as in every simulation unless noise=secure: anyone who "
    "knows the seed can remove it. So the files of this run carry no guarantee.",
    "per run": "Each number covers this one run. The costs of other runs on the same data add up.",
    "a patient known at one client only": "Numbers for a patient hold for one who is known at one "
    "client only.",
    "replaced by one of the same image or patient, so in the same shard": "A replaced record keeps "
    "its image or its patient, so it stays with the same teacher.",
    "tuning not covered": "Choosing these settings by other runs on the same data is not covered.",
}
FALSE_ALARMS = 0.01


def short(row: Mapping[str, Any], digits: int = 3) -> str:
    """Return an epsilon with its whole meaning, in a clause."""
    return (
        f"epsilon {rounded_up(float(row['epsilon']), digits)} ({row['unit']}, {row['relation']}, "
        f"trust {row['trust']}, delta {row['delta']:g}{review(row)})"
    )


def review(row: Mapping[str, Any]) -> str:
    """Return ", not reviewed" for an epsilon of a run in which a plug-in took part."""
    marked = any(note.startswith(NOT_REVIEWED) for note in row["notes"])
    return f", {NOT_REVIEWED}" if marked else ""


def right_at_most(row: Mapping[str, Any]) -> float:
    """Return how often a guess at a record, included with probability 1/2, is right at most.

    With a of true and b of false positives a <= e^epsilon b + delta and 1 - b <= e^epsilon (1 - a)
    + delta, and the guess is right in (a + 1 - b) / 2 of cases.
    """
    ratio = math.exp(-float(row["epsilon"]))
    return (1 + float(row["delta"]) * ratio) / (1 + ratio)


def found_at_most(row: Mapping[str, Any]) -> float:
    """Return the fraction of included records that an attack with FALSE_ALARMS finds at most."""
    return min(math.exp(float(row["epsilon"])) * FALSE_ALARMS + float(row["delta"]), 1.0)


def spent(facts: Facts) -> str:
    """Return what an unfinished run has cost so far, in a sentence with its whole meaning."""
    row = facts.row("record", "add_remove")
    if facts.simulated:
        said, value = "So far it has cost a client at most", float(row.get("spent", "inf"))
        nothing, late = "So far no client has been charged", ""
    else:
        said = "So far the hospitals have stated charges of at most"
        value = max(facts.costs.values(), default=0.0)
        nothing = "So far no hospital has stated a charge"
        late = "; a ledger may hold one more request, whose response was lost"
    if not value:
        return f"{nothing}{late}."
    if math.isinf(value):
        said = "So far nothing is proven about what it has released: epsilon inf"
        return f"{said} (record, add_remove{review(row)})."
    seeded = ", if its noise were secret" * facts.seeded
    return f"{said} {short({**row, 'epsilon': value})}{seeded}{late}."


def claims(card: Mapping[str, Any]) -> tuple[Table | None, list[str]]:
    """Return the table of the finite epsilons, if any, and the changes without a finite one."""
    finite = [row for row in card["proven"] if math.isfinite(float(row["epsilon"]))]
    spent = all("spent" in row for row in finite)
    rows = []
    for row in finite:
        proof = f"{row['accountant']}, by {BY[row['basis']]}"
        for other in row["beside"]:
            if math.isfinite(float(other["epsilon"])):
                number = rounded_up(float(other["epsilon"]), 5)
                proof += f"; by {BY[other['basis']]} {number}, trust {other['trust']}"
        number = rounded_up(float(row["epsilon"]), 5) + review(row)
        used = [rounded_up(float(row["spent"]), 5)] if spent else []
        trust, change = TRUST[row["trust"]], CHANGES[row["unit"], row["relation"]]
        rows.append([change, number, *used, trust, f"{row['delta']:g}", proof])
    infinite = [
        CHANGES[row["unit"], row["relation"]] for row in card["proven"] if row not in finite
    ]
    if not rows:
        return None, infinite
    caption = "Bounds of this run. They cover what the plan may charge the client with the most "
    caption += "requests." + " Spent: the most that the run has charged a client." * spent
    header = ["what changes at a client", "epsilon of the whole plan", *(["spent"] * spent)]
    header += ["who must be trusted", "delta", "proof"]
    return Table(f"{caption} A record is an image with its label.", header, rows), infinite


def notes(card: Mapping[str, Any]) -> list[str]:
    """Return the caveats of the finite epsilons, or of all if none is finite."""
    rows = [*card["proven"], *([card["label"]] if card["label"] else [])]
    rows = [row for row in rows if math.isfinite(float(row["epsilon"]))] or rows
    return list(dict.fromkeys(note for row in rows for note in row["notes"]))


def not_covered(facts: Facts) -> Sequence[str]:
    """Return what the epsilons leave out, a sentence each."""
    left_out = []
    if facts.card["reason"]:
        left_out.append(f"Why an epsilon is inf: {facts.card['reason']}.")
    for note in notes(facts.card):
        if not note.startswith(NOT_REVIEWED):
            left_out.append(NOTES.get(note, f"{note[:1].upper()}{note[1:]}."))
    if math.isinf(float(facts.row("client", "add_remove")["epsilon"])):
        left_out.append(
            "Nothing is proven about a whole client: that it takes part, and facts about all of "
            "its data."
        )
    return left_out
