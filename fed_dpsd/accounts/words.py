"""Every text on proven epsilons: in short, in lines with all proofs, and in sentences."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fed_dpsd.errors import UserError, counted
from fed_dpsd.privacy.epsilon import NOT_REVIEWED, Epsilon, rounded_up
from fed_dpsd.privacy.label_dp import IMAGES_NOTE
from fed_dpsd.privacy.mechanism import Relation, Unit, combined_trust

MEANINGFUL = 10.0  # above it, an attacker may be sure of a record: docs/privacy.md
MEANINGFUL_DELTA = 0.01  # above it, some of a hundred records may be published outright
NO_TEACHERS = "none here: clients have no teachers"  # in place of a training
SECRET = "add their noise and keep it to themselves"  # what clients must do in secure sums
BY = {  # the basis of a proof
    "training": "the training",
    "answers": "the answers",
    "contraction": "the training and the answers together",
}

SEEDED_VERDICT = "this simulation's noise is seeded, so its releases carry no guarantee"
CHANGES: dict[Unit, tuple[str, str, str]] = {
    "record": ("a record", "a record added or removed", "one replaced"),
    "patient": ("all records of a patient at a client", "one added or removed", "one replaced"),
    "client": ("a whole client", "one added or removed", "one replaced"),
}

# --- what a number does not cover ---

NO_SECRET_NOTE = "no secret is stored there: a simulation's seeded noise carries no guarantee"
SEEDED_NOTE, RUN_NOTE = "seeded noise", "per run"
SAME_IMAGE_NOTE = "replaced by one of the same image or patient, so in the same shard"
SAME_PATIENT_NOTE = "replaced by a record of the same patient"
PATIENT_NOTE = "a patient known at one client only"
MADE_UP_NOTE = "patients are made up, {} records of one class each, and taken as given"
TEACHER_NOTE = "teachers from a file: proven only if each saw only its own client's records"
TUNING_NOTE = "tuning not covered"
NOTHING_NOTE = "nothing is released"
TIME_NOTE = "response times are not covered: they may reveal whether a record is present"
COUNTS_NOTE = "class counts reveal roughly how many records of each class a client has"
DELTA_NOTE = "delta should be below 1 / (records of each client)"
TEST_NOTE = "test images are taken as public"
SHARED_NOTE = (
    "patients may be in both train and test (data.shared_patients=allow): scores are inflated, and "
    "the test records of a patient are not protected"
)
PARTITION_NOTE = "the partition among simulated clients is taken as given"
PUBLIC_NOTE = "the training data of public features are not covered"
MORE_NOTE = "more was charged than planned"


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
            f"{rounded_up(float(row['epsilon']))} ({row['unit']}, {row['relation']})"
            for row in rows
        )
        deltas = " and ".join(dict.fromkeys(f"{row['delta']:g}" for row in rows))
        yield f"epsilon {numbers}, delta {deltas}, against {seen['observer']}"


# --- the card ---


@dataclass(frozen=True)
class PrivacyCard:
    """The `privacy` object of summary.json, for readers and scripts.

    Args:
        content: as `privacy_card` returns it.
        word: the word for the bounds: "proven" after a run, "planned" before.
    """

    content: Mapping[str, Any]
    word: Literal["proven", "planned"] = "proven"

    @property
    def published(self) -> float:
        """Return the epsilon of the papers' formulas, which is not a guarantee."""
        return float(self.content["epsilon_published"])

    @property
    def proven(self) -> tuple[Epsilon, ...]:
        """Return every proven epsilon, for each unit and relation."""
        return tuple(map(Epsilon.from_json, self.content["proven"]))

    @property
    def label(self) -> Epsilon | None:
        """Return the proven epsilon of a label, as opposed to a record; None if there is none."""
        row = self.content["label"]
        return Epsilon.from_json(row) if row else None

    @property
    def claims(self) -> tuple[str, ...]:
        """Return a line for each proven epsilon, with its other proofs."""
        lines = [line(row) for row in self.content["proven"]]
        if self.label:
            lines.append(f"{self.label}: of labels alone, {IMAGES_NOTE}")
        return tuple(lines)

    @property
    def unit(self) -> Unit:
        """Return the unit that the settings ask to protect; it is always listed first."""
        unit: Unit = self.content["unit"]
        return unit

    @property
    def review(self) -> str:
        """Return the note on plug-ins, "not reviewed: ..."; "" if no plug-in took part."""
        return next((epsilon.review for epsilon in self.proven if epsilon.review), "")

    def epsilon(self, unit: Unit, relation: Relation) -> Epsilon:
        """Return the proven epsilon of a unit and relation, such as "record" and "add_remove".

        Raises:
            UserError: the unit or the relation is unknown.
        """
        claims = {(each.unit, each.relation): each for each in self.proven}
        if (unit, relation) not in claims:
            known = "; ".join(map(", ".join, claims))
            raise UserError(f"unit={unit!r}, relation={relation!r} must be one of: {known}")
        return claims[unit, relation]

    @property
    def covers_nothing(self) -> bool:
        """Return whether nothing is released."""
        return all(NOTHING_NOTE in epsilon.notes for epsilon in self.proven)

    def __str__(self) -> str:
        """Return a line for the published epsilon and a line for each proven one."""
        reason = self.content["reason"]
        name = mechanism_of(self.content)
        published = "nothing published" if math.isinf(self.published) else "epsilon published"
        value = "" if math.isinf(self.published) else f" (no guarantee): {self.published:.4g}"
        lines = [f"{published}{value} ({name})"]
        lines += [f"epsilon {self.word}: {text}" for text in self.claims]
        if self.content["observers"]:
            lines.append(f"trust threshold: against {self.content['observers'][0]['observer']}")
        lines += other_observers(self.content)
        return "\n".join(lines + ([f"reason: {reason}"] if reason else []))

    __repr__ = __str__


def mechanism_of(card: Mapping[str, Any]) -> str:
    """Return the names of a run's training and answers, omitting "plain"."""
    names = [card["training"], card["answers"]]
    return " ".join(name for name in names if name != "plain")


def line(row: Mapping[str, Any]) -> str:
    """Return a row's smallest epsilon, with the bases of its proofs if there are several."""
    text = str(Epsilon.from_json(row)) + (f" by {BY[row['basis']]}" if row["beside"] else "")
    for other in row["beside"]:
        number = rounded_up(float(other["epsilon"]))
        text += f"; by {BY[other['basis']]} {number} ({further_trust(other['trust'])})"
    return text


def short(card: PrivacyCard) -> str:
    """Return the published epsilon and the proven epsilons of the requested unit, in one line."""
    if card.covers_nothing:
        return NOTHING_NOTE
    unit = card.unit
    added, replaced = card.epsilon(unit, "add_remove"), card.epsilon(unit, "replace_one")
    published = f"published {card.published:.3g}"
    if math.isinf(card.published) and math.isfinite(added.value):
        published = "nothing published"  # "inf" would read as no privacy at all
    seeded = f", {SEEDED_NOTE}" if SEEDED_NOTE in added.notes else ""
    weak = "" if is_meaningful(replaced) else ": no meaningful protection"
    trust = short_trust(combined_trust((added.trust, replaced.trust)), card.content["colluding"])
    review = f", {added.review}" if added.review else ""
    parts = [
        f"{published} ({card.content['answers']})",
        f"{card.word} {added.number} ({unit}, add_remove), {replaced.number} (replace_one), "
        f"{trust}, delta {max(added.delta, replaced.delta):g}{seeded}{weak}{review}",
    ]
    if label := card.label:
        parts.append(
            f"of labels alone {label.number} (label, {label.relation}), trust {label.trust}, "
            f"delta {label.delta:g}: {IMAGES_NOTE}"
        )
    return " · ".join(parts)


def spent(row: Mapping[str, Any]) -> str:
    """Return what a client has spent so far, from a line of rounds.jsonl."""
    meaning = row["delta"], row["unit"], row["relation"], row["trust"]
    epsilon = Epsilon(float(row["epsilon"]), *meaning, "", 0, tuple(row.get("notes", ())))
    seeded = f", {SEEDED_NOTE}" if SEEDED_NOTE in epsilon.notes else ""
    review = f", {NOT_REVIEWED}" if epsilon.review else ""
    return f"epsilon {epsilon.number} spent ({epsilon.unit}, {epsilon.relation}{seeded}{review})"


# --- sentences ---


def is_meaningful(epsilon: Epsilon) -> bool:
    """Return whether both numbers of a bound are small enough to be meaningful."""
    return epsilon.value <= MEANINGFUL and epsilon.delta <= MEANINGFUL_DELTA


def sentences(card: PrivacyCard, seeded: bool) -> Iterator[str]:
    """Yield what a card proves: for the requested unit, for larger units, then caveats.

    `seeded` is whether the run's noise is seeded.
    """
    if card.covers_nothing:
        yield f"{NOTHING_NOTE}: there is nothing to prove"
        return
    if card.review:
        yield card.review
    first = dict.fromkeys((card.unit, "record"))
    for unit in first:
        yield _describe_unit(card, unit)
    yield from other_observers(card.content)
    if card.label:
        number, terms = card.label.number, _terms(card, card.label)
        yield f"epsilon {number} for a replaced label alone, {terms}: {IMAGES_NOTE}"
    for unit in (each for each in CHANGES if each not in first):
        yield _describe_unit(card, unit)
    if seeded:
        epsilons = (*card.proven, *([card.label] if card.label else []))
        finite = any(math.isfinite(epsilon.value) for epsilon in epsilons)
        more = "; the numbers apply to the same run with noise=secure"
        yield SEEDED_VERDICT + (more if finite else "")


def _describe_unit(card: PrivacyCard, unit: Unit) -> str:
    """Describe what is proven for a unit; the numbers of patients and clients are rarely small."""
    added, replaced = card.epsilon(unit, "add_remove"), card.epsilon(unit, "replace_one")
    whole, one, other = CHANGES[unit]
    if math.isinf(added.value) and math.isinf(replaced.value):
        reason = f": {card.content['reason']}" if unit == "record" else ""
        return f"nothing is proven for {whole}{reason}"
    terms = _terms(card, added, replaced)
    if not is_meaningful(added):
        of = "at" if unit == "record" else f"for {whole}:"
        return (
            f"no meaningful protection {of} epsilon {added.number} ({unit}, add_remove) and "
            f"{replaced.number} ({unit}, replace_one), {terms}"
        )
    of = "" if unit == "record" else f"for {whole}: "
    second = "nothing proven" if math.isinf(replaced.value) else replaced.number
    numbers = f"{of}epsilon {added.number} for {one}, {second} for {other}"
    if not is_meaningful(replaced):
        numbers += ", which is not meaningful"
    return f"{numbers}, {terms}"


def _terms(card: PrivacyCard, *epsilons: Epsilon) -> str:
    """Return the deltas of numbers, and whom they hold against, given the largest trust needed."""
    deltas = dict.fromkeys(f"{e.delta:g}" for e in epsilons if math.isfinite(e.value))
    trust = combined_trust(epsilon.trust for epsilon in epsilons)
    return f"delta {' and '.join(deltas)}, against {against(trust, card.content['colluding'])}"


def published_line(card: PrivacyCard) -> str:
    """Return the line on the papers' epsilon, which is not a guarantee, or on the lack of one."""
    if math.isinf(card.published):
        return "nothing published: the papers' formulas give no finite epsilon for this"
    return f"epsilon published (no guarantee): {card.published:.6g}"
