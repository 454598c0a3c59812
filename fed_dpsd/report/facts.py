"""The facts about a run that its page shows, read from the run folder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fed_dpsd.errors import counted
from fed_dpsd.report.scores import Predictions

GENERIC = ("folder", "imagefolder")  # data sets that are named after their format
MOST_NAMED = 4  # classes in a title
NEVER = "never connected"


@dataclass(frozen=True)
class Unfinished:
    """A run that has not completed."""

    name: str
    done: int  # the number of completed rounds
    rounds: int  # the number of planned rounds
    error: str  # why it ended, in one line; "" if unknown, for example after kill -9
    under_way: bool  # whether a process is running it
    command: str  # the command that resumes it

    @property
    def status(self) -> str:
        """Return the completed rounds and why the run ended, as sentences that follow a colon."""
        done = f"has done {self.done:,} of {counted(self.rounds, 'round')}"
        if self.under_way:
            return f"it is under way, and {done}."
        why = self.error.rstrip(".") or "its process was killed, or its machine stopped"
        return f"it {done}. It ended: {why}."


@dataclass(frozen=True)
class Facts:
    """The facts that the page of a run shows."""

    name: str
    summary: Mapping[str, Any]  # the content of summary.json
    rounds: Sequence[Mapping[str, Any]]  # the lines of rounds.jsonl
    versions: Mapping[str, Any]  # the content of versions.json
    settings: Mapping[str, Any]  # all settings that are not paths, with their values
    classes: Sequence[str]  # the names of the classes, in order
    simulated: bool  # whether clients are simulated rather than hospitals
    meaningful: bool  # whether the epsilon (add_remove) of the requested unit protects in practice
    verdict: Sequence[str]  # sentences on what is proven, starting with the requested unit
    trained: str  # how the teachers were trained, in words
    answered: str  # how the teachers answered, in words
    published: str  # a sentence on the epsilon by the papers' formulas
    command: str  # the command with the settings as typed; "" if unknown
    # for each round, the epsilon (add_remove) of the requested unit that each client has spent so
    # far, by the client's number
    spent: Sequence[Mapping[int, float]] = ()
    costs: Mapping[int, float] = field(default_factory=dict)  # the same for the whole run
    # pictures of synthetic images, by round
    samples: Mapping[int, Path] = field(default_factory=dict)
    # pictures of public test images, by the number of their class
    test_images: Mapping[int, Path] = field(default_factory=dict)
    hospitals: Sequence[str] = ()  # how texts call each hospital
    requests: Sequence[Mapping[str, Any]] = ()  # the lines of asks.jsonl, written by Flower servers
    # by hospital, how many of its requests it answered, in words; empty for all requests
    absent: Mapping[int, str] = field(default_factory=dict)
    charges: Mapping[str, Any] = field(default_factory=dict)  # the content of charges.json
    # by client, a description of the charges in a ledger that may also have charges of other runs
    # (of a rehearsal's hospital, or of a simulated client with a shared ledger)
    ledgers: Mapping[int, str] = field(default_factory=dict)
    # the state of a run that has not completed; None for a completed one
    unfinished: Unfinished | None = None
    rehearsed: bool = False  # whether all hospitals were on one machine
    # the student's predictions for the test images; None if unknown
    predictions: Predictions | None = None
    # a threshold for two classes given by the reader; None to choose one
    threshold: float | None = None
    own_title: str = ""  # the reader's title for the page; "" for a description

    @property
    def kind(self) -> str:
        """Return the subject of the page as one word."""
        if self.simulated:
            return "simulation"
        return "rehearsal" if self.rehearsed else "deployment"

    @property
    def title(self) -> str:
        """Return the title of the page, on one line."""
        everyone = counted(self.summary["num_clients"], self.clients)
        some = "" if self.took_part == self.summary["num_clients"] else f"{self.took_part:,} of "
        place = " on one machine" if self.kind == "rehearsal" else ""
        ending = f"a {self.kind}{place} with {some}{everyone}"
        ending += ", not finished" if self.unfinished else ""
        subject = self.own_title or f"{self.summary['method']} on {self.subject}"
        return f"{subject}: {ending}"

    @property
    def subject(self) -> str:
        """Return the name of the data, or its classes if its name is only a file format."""
        if self.summary["data"] not in GENERIC:
            return str(self.summary["data"])
        if len(self.classes) > MOST_NAMED:
            return f"images of {len(self.classes)} classes"
        return f"images of {', '.join(self.classes)}"

    @property
    def absentees(self) -> list[int]:
        """Return the hospitals that never connected."""
        return [client for client, missed in self.absent.items() if missed == NEVER]

    @property
    def unit(self) -> str:
        """Return the unit that the run was asked to protect."""
        return str(self.card["unit"])

    @property
    def clients(self) -> str:
        """Return the page's word for a client."""
        return "client" if self.simulated else "hospital"

    @property
    def took_part(self) -> int:
        """Return the number of clients that answered a request or were charged, if known."""
        answered = {client for request in self.requests for client in request["answered"]}
        if self.requests and not self.simulated:
            return len(answered)
        charged = {client for client, cost in self.costs.items() if cost}
        return len(charged) or int(self.summary["num_clients"])

    @property
    def card(self) -> Mapping[str, Any]:
        """Return the privacy card."""
        card: Mapping[str, Any] = self.summary["privacy"]
        return card

    def row(self, unit: str, relation: str) -> Mapping[str, Any]:
        """Return the card's row for a unit and a relation."""
        return next(
            row for row in self.card["proven"] if (row["unit"], row["relation"]) == (unit, relation)
        )

    @property
    def seeded(self) -> bool:
        """Return whether a finite epsilon requires secret noise, but the noise was seeded."""
        rows = [*self.card["proven"], *([self.card["label"]] if self.card["label"] else [])]
        return any(
            "seeded noise" in row["notes"] and math.isfinite(float(row["epsilon"])) for row in rows
        )

    @property
    def answers_images(self) -> bool:
        """Return whether clients send answers to images, rather than weights, sums or nothing."""
        return self.card["answers"] not in (
            *("weights", "clipped_gradients", "class_statistics", "nothing"),
        )

    @property
    def releases_nothing(self) -> bool:
        """Return whether nothing leaves a client."""
        return all("nothing is released" in row["notes"] for row in self.card["proven"])

    @property
    def most_common(self) -> tuple[str, float] | None:
        """Return the most common class of the test images, and its fraction; None if unknown."""
        counts = list(map(sum, self.summary["confusion"] or []))
        if not any(counts):
            return None
        return self.classes[counts.index(max(counts))], max(counts) / sum(counts)

    @property
    def correct_and_total(self) -> tuple[int, int] | None:
        """Return the numbers of correctly classified test images and of all; None if unknown."""
        counts, accuracy = self.summary["confusion"], self.summary["accuracy"]["student"]
        if not counts or accuracy is None:
            return None
        right = sum(counts[k][k] for k in range(len(counts)))
        # The matrix omits images without finite probabilities.
        return right, round(right / accuracy) if accuracy else sum(map(sum, counts))
