"""Entries of a ledger. Each is one charge: what left the client and what it cost."""

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import attrs
from dp_accounting import DpEvent, NonPrivateDpEvent, SelfComposedDpEvent

from fed_dpsd.claims import Charge
from fed_dpsd.privacy.epsilon import NOT_REVIEWED, is_own
from fed_dpsd.privacy.events import EVENTS
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, Relation, Trust, Unit
from fed_dpsd.protocol import Kind

EntryKind = Literal[Kind, "training", "teachers"]
MARK = f" ({NOT_REVIEWED})"
_BEFORE_COSTS, _AFTER_COSTS = ', "costs": ', ', "at": '  # no text inside has bare quotes


def describe_mechanism(mechanism: object, plugins: bool = False) -> str:
    """Return the text that describes a mechanism in a ledger, marked if a plug-in took part."""
    return f"{mechanism}{MARK}" if plugins or not is_own(mechanism) else str(mechanism)


@dataclass(frozen=True)
class Entry:
    """A charge.

    Raises:
        ValueError: a count is negative, or the cost for a unit and relation is missing.
    """

    digest: str  # idempotency key, a digest of the whole request, the mechanism and the teachers
    kind: EntryKind  # the kind of content that left
    query_id: int
    queries: int  # number of answered synthetic queries; 0 for training
    releases: int  # how many times each event in `costs` counts
    mechanism: str  # human-readable description of the mechanism
    trust: Trust  # the parties that must be honest
    # the event of a single release for each of UNITS_AND_RELATIONS
    costs: Mapping[tuple[Unit, Relation], DpEvent]
    at: str  # time of the charge in UTC, in ISO 8601 format, to the second
    request: str = ""  # digest of the request that led to the charge; "" if there was none
    run: str = ""  # the coordinator's name for the run that was charged; "" outside a run
    # digest of the training run if privately trained teachers produced the release; "" otherwise,
    # as for class counts, which do not pass through teachers
    training: str = ""

    def __post_init__(self) -> None:
        if self.queries < 0 or self.releases < 0:
            raise ValueError(f"queries={self.queries}, releases={self.releases} must be >= 0")
        if missing := set(UNITS_AND_RELATIONS) - set(self.costs):
            raise ValueError(f"costs lack {sorted(missing)}")

    @classmethod
    def now(cls, **fields: Any) -> "Entry":
        """Return an entry stamped with the current time, to the second."""
        return cls(**fields, at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))

    def event(self, unit: Unit, relation: Relation) -> DpEvent:
        """Return the event of the whole charge; a charge without releases proves nothing."""
        if not self.releases:
            return NonPrivateDpEvent()
        return SelfComposedDpEvent(self.costs[unit, relation], self.releases)

    def to_json(self) -> str:
        """Return a readable line that lists each distinct event once, by unit and relation."""
        pairs: dict[str, list[str]] = {}
        for pair, event in self.costs.items():
            pairs.setdefault(json.dumps(event, default=_pack), []).append(" ".join(pair))
        costs = {", ".join(names): json.loads(event) for event, names in pairs.items()}
        values = {key: value for key, value in vars(self).items() if key != "training" or value}
        return json.dumps({**values, "costs": costs})

    @classmethod
    def from_json(cls, line: str) -> "Entry":
        """Build an entry from a line that `to_json` wrote; its events must be of known types.

        Entries with identical costs share one object, since an account has many entries but few
        distinct costs.
        """
        before, _, rest = line.partition(_BEFORE_COSTS)
        costs, _, after = rest.rpartition(_AFTER_COSTS)
        values = json.loads(f'{before}, "costs": {{}}{_AFTER_COSTS}{after}')
        return cls(**{**values, "costs": _costs(costs)})


def _pack(event: Any) -> dict[str, Any]:
    if type(event) not in EVENTS.values():
        raise TypeError(f"{event!r} is not an event that a ledger may hold")
    return {"type": type(event).__name__, **attrs.asdict(event, recurse=False)}


@functools.lru_cache(maxsize=1 << 12)  # most charges of a client cost the same as others
def _costs(content: str) -> Mapping[tuple[Unit, Relation], DpEvent]:
    return {
        tuple(pair.split()): event
        for pairs, event in json.loads(content, object_hook=_unpack).items()
        for pair in pairs.split(", ")
    }


def _unpack(values: dict[str, Any]) -> Any:
    return EVENTS[values.pop("type")](**values) if "type" in values else values


class Charges:
    """A client's charges, indexed so that lookups stay fast as charges accumulate.

    Attributes:
        queries: number of answered queries; a charge without queries, such as for training, counts
            as one.
    """

    def __init__(self) -> None:
        self.queries = 0
        self._by_digest: dict[str, Entry] = {}
        self._released: dict[str, Counter[str]] = {}
        self._by_cost: dict[tuple[int, int, bool], list[Entry]] = {}

    def add(self, content: str) -> Entry:
        """Add a charge, given as a line of `Entry.to_json`, and return it."""
        entry = Entry.from_json(content)
        self.check_new(entry.digest)
        self._by_digest[entry.digest] = entry
        self.queries += max(entry.queries, 1)
        self._released.setdefault(entry.run, Counter())[entry.mechanism] += entry.releases
        # Entries read from a file share one object for equal costs, which lives as long as they do.
        key = id(entry.costs), entry.releases, bool(entry.training)
        self._by_cost.setdefault(key, []).append(entry)
        return entry

    def check_new(self, digest: str) -> None:
        """Raise ValueError if a digest is already charged."""
        if digest in self._by_digest:
            raise ValueError(f"{digest} is already charged")

    def find(self, digest: str) -> Entry | None:
        """Return the charge with this digest."""
        return self._by_digest.get(digest)

    def entries(self) -> Sequence[Entry]:
        """Return all charges, oldest first."""
        return tuple(self._by_digest.values())

    def released(self, run: str) -> Counter[str]:
        """Count the releases of each mechanism that a run was charged for."""
        return self._released.get(run, Counter())

    def by_cost(self) -> list[tuple[Entry, int]]:
        """Return one charge per cost, in order of first appearance, and its number of charges.

        Charges have the same cost if a proof by private training, such as a budget's, counts them
        equally. Equal costs may appear more than once.
        """
        return [(group[0], len(group)) for group in self._by_cost.values()]


def charges_of_entries(entries: Iterable[Entry], unit: Unit, relation: Relation) -> list[Charge]:
    """Return the charges of a ledger's entries."""
    return [
        Charge(
            entry.event(unit, relation),
            entry.trust,
            entry.digest if entry.kind == "training" else entry.training,
            entry.releases if entry.kind == "training" else 0,
        )
        for entry in entries
    ]


def entries_of_run(entries: Sequence[Entry], run: str) -> list[Entry]:
    """Return a run's entries, and the training entries of other runs if it used their teachers."""
    own = [entry for entry in entries if entry.run == run]
    used = {entry.training for entry in own}
    return [entry for entry in entries if entry.run == run or entry.digest in used]
