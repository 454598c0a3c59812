"""The type of a proven epsilon, which always carries its meaning."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fed_dpsd.privacy.mechanism import Relation, Trust, Unit

NOT_REVIEWED = "not reviewed"
NOT_REVIEWED_NOTE = NOT_REVIEWED + ": nothing is proven of what {} does"


def rounded_up(value: float, digits: int = 3) -> str:
    """Return a bound, rounded up to `digits` significant digits; "inf" for infinity."""
    if math.isinf(value):
        return "inf"
    places = max(0, digits - 1 - math.floor(math.log10(max(value, 1e-4))))
    text = f"{math.ceil(value * 10**places - 1e-9) / 10**places:,.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text


@dataclass(frozen=True)
class Epsilon:
    """A proven privacy loss, which cannot be printed without its meaning.

    Args:
        value: epsilon, >= 0; `inf` if nothing is proven.
        delta: failure probability fixed in advance, in [0, 1); 0 for a pure guarantee.
        unit: the part of the private data that one change may affect.
        relation: how the unit may change.
        trust: the parties that must be honest.
        accountant: the name of the proof.
        queries: number of covered answers.
        notes: caveats that accompany the number.
    """

    value: float
    delta: float
    unit: Unit | Literal["label"]
    relation: Relation
    trust: Trust
    accountant: str
    queries: int
    notes: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        """Return the value as it is printed everywhere, rounded up since it is an upper bound."""
        return rounded_up(self.value)

    @property
    def review(self) -> str:
        """Return the note on plug-ins, "not reviewed: ..."; "" if no plug-in took part."""
        return review_of(self.notes)

    def __str__(self) -> str:
        return (
            f"{self.number} ({self.unit}, {self.relation}, trust {self.trust}, "
            f"delta {self.delta:g}, {self.accountant}"
            f"{f', {NOT_REVIEWED}' if self.review else ''})"
        )

    __repr__ = __str__

    def __format__(self, specification: str) -> str:
        return str(self)

    def to_json(self) -> dict[str, Any]:
        """Return the object for summary.json; infinity is the string "inf"."""
        return {
            "unit": self.unit,
            "relation": self.relation,
            "trust": self.trust,
            "delta": self.delta,
            "epsilon": "inf" if math.isinf(self.value) else self.value,
            "queries": self.queries,
            "accountant": self.accountant,
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Epsilon":
        """Read the object that `to_json` wrote; other keys are ignored."""
        fields = {key: row[key] for key in cls.__dataclass_fields__ if key in row}
        return cls(value=float(row["epsilon"]), **fields | {"notes": tuple(row["notes"])})


def add_review_note(notes: tuple[str, ...], *mechanisms: object) -> tuple[str, ...]:
    """Return notes, adding one if a mechanism is from a plug-in and no note states this."""
    if all(map(is_own, mechanisms)) or review_of(notes):
        return notes
    return (*notes, NOT_REVIEWED_NOTE.format("a plug-in"))


def review_of(notes: Iterable[str]) -> str:
    """Return the note on plug-ins among notes, "not reviewed: ..."; "" if there is none."""
    return next((note for note in notes if note.startswith(NOT_REVIEWED)), "")


def is_own(mechanism: object) -> bool:
    """Return whether a mechanism's class belongs to FedDPSD and not to a plug-in."""
    return type(mechanism).__module__.partition(".")[0] == "fed_dpsd"
