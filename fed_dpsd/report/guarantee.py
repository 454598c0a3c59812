"""The privacy statement of a run's page: what is proven, in plain words, and what is left out."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fed_dpsd.report.facts import Facts
from fed_dpsd.report.markup import Content, Html, element, html, listed, paragraphs, table, terms
from fed_dpsd.report.numbers import percent, percent_at_most, rounded_up
from fed_dpsd.report.settings import NOT_REVIEWED

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
# Who is bounded by an epsilon, by the parties that it trusts.
ONLOOKERS = {
    "nobody": "somebody who sees all that left the clients",
    "threshold": "somebody who sees all that the coordinator does, while enough of the clients are "
    "honest,",
    "server": "somebody who sees all that the coordinator publishes",
}
BY = {  # what a proof rests on
    "training": "the training",
    "answers": "the answers",
    "contraction": "the training and the answers together",
}
# Short notes of the card, as sentences; others are sentences already.
NOTES = {
    "seeded noise": "The noise is seeded, as in every simulation unless noise=secure: whoever "
    "knows the seed can take it off. So this run's own files carry no guarantee.",
    "per run": "Each number is for this one run. What other runs ask of the same data adds up.",
    "a patient known at one client only": "Numbers for a patient are for one who is known at one "
    "client only.",
    "replaced by one of the same image or patient, so in the same shard": "A record that is "
    "replaced keeps its image or its patient, so that it stays with the same teacher.",
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
    """Return how often a guess at a record, there by a fair coin, can be right; a fraction.

    With a of true and b of false positives a <= e^epsilon b + delta and 1 - b <= e^epsilon (1 - a)
    + delta, and the guess is right in (a + 1 - b) / 2 of cases.
    """
    ratio = math.exp(-float(row["epsilon"]))
    return (1 + float(row["delta"]) * ratio) / (1 + ratio)


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
        late = "; a ledger may hold one request more, whose answer was lost"
    if not value:
        return f"{nothing}{late}."
    if math.isinf(value):
        said = "So far nothing is proven of what it has released: epsilon inf (record, add_remove"
        return f"{said}{review(row)})."
    seeded = ", if its noise were secret" * facts.seeded
    return f"{said} {short(row | {'epsilon': value})}{seeded}{late}."


def statement(facts: Facts) -> Iterator[Html]:
    """Yield the section: the verdict, what it means, the numbers, and what is left out."""
    card = facts.card
    yield listed(f"{said[:1].upper()}{said[1:]}." for said in facts.verdict)
    if facts.releases_nothing:
        return
    for note in _notes(card):
        if note.startswith(NOT_REVIEWED):
            yield element("div", paragraphs(f"{note[:1].upper()}{note[1:]}."), class_="note")
    yield paragraphs(*meaning(facts))
    yield terms(
        [("How teachers are trained", facts.trained), ("How they answer", facts.answered)],
        class_="facts",
    )
    yield element("h3", "Every proven epsilon")
    yield from _claims(card)
    if label := card["label"]:
        yield paragraphs(
            f"Of labels alone: {short(label)}. It protects no image, and it is no record's epsilon."
        )
    yield element("h3", "The published number stands apart")
    yield element("div", paragraphs(_published(facts)), class_="apart")
    yield element("h3", "What is not covered")
    yield listed(not_covered(facts))


def meaning(facts: Facts) -> Iterator[str]:
    """Yield what the epsilon of an added or removed record allows an attacker, in numbers."""
    row = facts.row("record", "add_remove")
    epsilon, delta = float(row["epsilon"]), float(row["delta"])
    if not facts.meaningful:
        large = "epsilon" if epsilon > MEANINGFUL else "delta"
        why = "no finite epsilon is proven" if math.isinf(epsilon) else f"{large} is that large"
        yield (
            f"In plain words: {why}, so from what left the clients somebody may become sure that "
            "a given record was among the data. Nothing here protects a single record."
        )
        return
    found = min(math.exp(epsilon) * FALSE_ALARMS + delta, 1.0)
    yield (
        f"In plain words: let a fair coin decide whether a record is among the data. "
        f"{onlooker(row)} guesses the coin right in at most {percent_at_most(right_at_most(row))} "
        f"of cases. An attack that accuses {percent(FALSE_ALARMS, 0)} of the records that were not "
        f"there finds at most {percent_at_most(found)} of those that were. Both are for one record "
        f"added or removed, with delta counted in, and {TRUST[row['trust']]} must be trusted. "
        "Attacks that are known mostly do worse."
    )


def onlooker(row: Mapping[str, Any]) -> str:
    """Return whom an epsilon bounds, as the start of a sentence."""
    said = ONLOOKERS[row["trust"]]
    return f"{said[:1].upper()}{said[1:]}"


def _claims(card: Mapping[str, Any]) -> Iterator[Html]:
    """Yield the table of the finite epsilons, and a sentence on what nothing is proven of."""
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
        trust = TRUST[row["trust"]]
        change = CHANGES[row["unit"], row["relation"]]
        rows.append([change, number, *used, trust, f"{row['delta']:g}", proof])
    if rows:
        said = "Bounds of this run. They cover what the plan may charge the client that is asked "
        said += "most." + " Spent: the most that the run has charged a client." * spent
        header = ["what changes at a client", "epsilon of the whole plan", *(["spent"] * spent)]
        header += ["who must be trusted", "delta", "proof"]
        yield table(f"{said} A record is a picture with its label.", header, rows)
    if others := [row for row in card["proven"] if row not in finite]:
        named = "; ".join(CHANGES[row["unit"], row["relation"]] for row in others)
        yield paragraphs(f"Nothing is proven, so epsilon is inf, where {named}.")


def _published(facts: Facts) -> str:
    said = f"{facts.published[:1].upper()}{facts.published[1:]}."
    if math.isinf(float(facts.card["epsilon_published"])):
        return said
    return (
        f"{said} That is the number by which papers name such a run. Where it differs from the "
        "proven ones, only the proven ones say what can be learned of a record."
    )


def not_covered(facts: Facts) -> Iterator[Content]:
    """Yield what the epsilons leave out, a sentence each."""
    if facts.card["reason"]:
        yield f"Why an epsilon is inf: {facts.card['reason']}."
    for note in _notes(facts.card):
        if not note.startswith(NOT_REVIEWED):
            yield NOTES.get(note, f"{note[:1].upper()}{note[1:]}.")
    if math.isinf(float(facts.row("client", "add_remove")["epsilon"])):
        yield "Nothing is proven for a whole client: its taking part, and facts on all of its data."


def _notes(card: Mapping[str, Any]) -> list[str]:
    """Return the caveats of the finite epsilons, or of all where none is finite."""
    rows = [*card["proven"], *([card["label"]] if card["label"] else [])]
    rows = [row for row in rows if math.isfinite(float(row["epsilon"]))] or rows
    return list(dict.fromkeys(note for row in rows for note in row["notes"]))


def tile(facts: Facts) -> tuple[Content, Content]:
    """Return the few words on privacy beside the first numbers."""
    if facts.releases_nothing:
        return "privacy", html([element("strong", "nothing leaves"), "no client releases anything"])
    row = facts.row("record", "add_remove")
    said = f"trust {row['trust']}, delta {row['delta']:g}{review(row)}"
    if math.isinf(float(row["epsilon"])):
        said = f"nothing is proven{review(row)}: no meaningful protection"
    elif not facts.meaningful:
        said += ": no meaningful protection"
    elif facts.seeded:
        said += ", seeded noise"
    number = element("strong", rounded_up(float(row["epsilon"])))
    of = "epsilon proven" + " of the whole plan," * bool(facts.unfinished)
    return f"{of} for a record, added or removed", html([number, said])
