"""The facts of one run that its page tells, as its folder holds them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fed_dpsd.report.numbers import counted


@dataclass(frozen=True)
class Unfinished:
    """A run that has not completed.

    Args:
        name: the name of its run folder.
        done: how many rounds are done.
        rounds: how many rounds there are to be.
        error: what ended it, in a line; "" where nothing says so, as after kill -9.
        under_way: whether a process goes on with it now.
        command: the command that goes on with it.
    """

    name: str
    done: int
    rounds: int
    error: str
    under_way: bool
    command: str

    @property
    def told(self) -> str:
        """Return how far it came and why it is no further, in sentences after a colon."""
        came = f"has done {self.done:,} of {counted(self.rounds, 'round')}"
        if self.under_way:
            return f"it is under way, and {came}."
        why = self.error.rstrip(".") or "its process was killed, or its machine stopped"
        return f"it {came}. It ended: {why}."


@dataclass(frozen=True)
class Facts:
    """A run, for its page.

    Args:
        name: the name of the run folder.
        summary: the content of summary.json.
        rounds: the lines of rounds.jsonl.
        versions: the content of versions.json.
        settings: every setting that names no place, with its value.
        classes: the names of the classes, in order.
        simulated: whether clients are simulated ones; otherwise they are hospitals.
        meaningful: whether the proof of an added or removed record says anything of it.
        verdict: sentences on what is proven, of a record first.
        trained: how the teachers were trained, in words.
        answered: how they answered, in words.
        published: a sentence on the epsilon of the papers' formulas.
        command: the command that repeats the run, "" where none is known.
        spent: for each round, the epsilon of (record, add_remove) that it and those before have
            cost each client, by its number.
        costs: the same of each client at the end, by its number.
        samples: pictures of synthetic images, by round.
        asks: the lines of asks.jsonl, which Flower servers write.
        charges: the content of charges.json.
        ledgers: for each hospital whose own ledger could be read, as in a rehearsal, its charges
            in words; the same for simulated clients whose ledger is shared with other runs.
        unfinished: how far a run came that has not completed; None for a completed one.
    """

    name: str
    summary: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    versions: Mapping[str, Any]
    settings: Mapping[str, Any]
    classes: Sequence[str]
    simulated: bool
    meaningful: bool
    verdict: Sequence[str]
    trained: str
    answered: str
    published: str
    command: str
    spent: Sequence[Mapping[int, float]] = ()
    costs: Mapping[int, float] = field(default_factory=dict)
    samples: Mapping[int, Path] = field(default_factory=dict)
    requests: Sequence[Mapping[str, Any]] = ()
    charges: Mapping[str, Any] = field(default_factory=dict)
    ledgers: Mapping[int, str] = field(default_factory=dict)
    unfinished: Unfinished | None = None

    @property
    def clients(self) -> str:
        """Return what a client is called here."""
        return "client" if self.simulated else "hospital"

    @property
    def card(self) -> Mapping[str, Any]:
        """Return the privacy card."""
        card: Mapping[str, Any] = self.summary["privacy"]
        return card

    def row(self, unit: str, relation: str) -> Mapping[str, Any]:
        """Return the card's row of a unit and a relation."""
        return next(
            row for row in self.card["proven"] if (row["unit"], row["relation"]) == (unit, relation)
        )

    @property
    def seeded(self) -> bool:
        """Return whether something is proven that holds with secret noise alone: it was seeded."""
        rows = [*self.card["proven"], *([self.card["label"]] if self.card["label"] else [])]
        return any(
            "seeded noise" in row["notes"] and math.isfinite(float(row["epsilon"])) for row in rows
        )

    @property
    def answers_images(self) -> bool:
        """Return whether clients are asked images, rather than for weights, or for nothing."""
        return self.card["answers"] not in ("weights", "nothing")

    @property
    def releases_nothing(self) -> bool:
        """Return whether nothing leaves a client."""
        return all("nothing is released" in row["notes"] for row in self.card["proven"])
