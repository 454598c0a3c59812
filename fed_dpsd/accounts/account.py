"""A client's account of one run: every charge must fit the budget and the coordinator's record."""

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dp_accounting import ComposedDpEvent, DpEvent

from fed_dpsd.accounts.database import LedgerError
from fed_dpsd.accounts.entry import Entry, EntryKind, describe_mechanism
from fed_dpsd.accounts.ledger import Ledger
from fed_dpsd.claims import OTHER
from fed_dpsd.config import PrivacyConfig
from fed_dpsd.errors import UserError
from fed_dpsd.privacy.accounting import Stage, smallest_budget, within_budget
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, Charged, Relation, trust_of
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.training import ClassCounts, TrainingMechanism
from fed_dpsd.protocol import Releases, Request, Statement

WhenRecordsChange = Literal["refuse", "retrain"]
logger = logging.getLogger("fed_dpsd")


class BudgetSpent(Exception):
    """A charge would exceed the client's budget; nothing was charged, trained or drawn."""


class Unplanned(BudgetSpent):
    """A charge would exceed the coordinator's record; nothing was charged or drawn.

    Args:
        wanted: releases by mechanism that the coordinator must acknowledge first.
    """

    def __init__(self, wanted: Releases) -> None:
        self.wanted = wanted
        cost = ", ".join(f"{count:,} releases of {name}" for name, count in wanted.items())
        super().__init__(f"unplanned: this run would cost the client {cost}")


class RecordsChanged(Exception):
    """The records have changed since the client joined the run; nothing was charged."""


@dataclass(frozen=True)
class RunNote:
    """A client's note on a run, kept with its ledger."""

    records: str = ""  # keyed digest of the client's records; "" before it joins
    changed: int = 0  # how often the records have changed since then
    reused: tuple[str, ...] = ()  # digests of other runs' entries that this run reuses
    # releases by mechanism that the coordinator has recorded and the ledger has lost
    forgotten: Releases = field(default_factory=dict)


@dataclass(eq=False)
class Account:
    """A client's account of one run.

    Call all methods except `locked_statement` inside a transaction of the ledger.
    """

    ledger: Ledger  # of the data set, over all runs
    settings: PrivacyConfig  # budget and delta
    plan: Plan  # the expected charges of the run
    run: str  # the coordinator's name for the run
    # The lifetime limit of answered images in the ledger. A charge without images, such as for
    # training, counts as one.
    most_queries: float = math.inf
    when_records_change: WhenRecordsChange = "refuse"
    plugins: bool = False  # whether the run has plug-ins; its charges are then marked
    charged: list[Entry] = field(default_factory=list, init=False)  # by this object

    def __post_init__(self) -> None:
        self._acknowledged: Releases = {}
        name = self.run.encode(errors="surrogatepass")  # names stay distinct, even if not UTF-8
        self._note_name = f"{hashlib.sha256(name).hexdigest()}-run"
        self._names = {
            describe_mechanism(stage.mechanism, marked): stage.mechanism.name
            for stage in self.plan.charged
            for marked in (False, True)  # a reused charge may be of a run with or without plug-ins
        }

    def reconcile(self, request: Request, client: int) -> None:
        """Compare the ledger with the coordinator's record of the run's charges in a request.

        If the ledger lacks some of them, an older state of the ledger was restored. The forgotten
        releases count as charged from now on, so charging them again is unplanned.
        """
        self._acknowledged = request.acknowledged
        if lost := Counter(request.heard.get(client, {})) - self._charged():
            logger.warning(
                "the ledger lacks charges of run %s: was an older state restored?", self.run
            )
            note = self._run_note()
            self._store_run_note(replace(note, forgotten=dict(Counter(note.forgotten) + lost)))

    def join(self, records: str) -> None:
        """Take part in the run with the records that have this digest.

        Raises:
            RecordsChanged: the records have changed, and the client's policy is to refuse.
        """
        note = self._run_note()
        if note.records == records:
            return
        if note.records:
            logger.warning("the records changed since this client joined run %s", self.run)
            if self.when_records_change == "refuse":
                raise RecordsChanged("the client's records changed since it joined this run")
            note = replace(note, changed=note.changed + 1)
        self._store_run_note(replace(note, records=records))

    def locked_statement(self, wanted: Releases | None = None) -> Statement:
        """Return `statement` from a transaction of its own."""
        with self.ledger.transaction():
            return self.statement(wanted)

    def statement(self, wanted: Releases | None = None) -> Statement:
        """Return the statement that accompanies every reply to the coordinator."""
        note = self._run_note()
        return Statement(self._charged(), note.forgotten, note.changed, wanted or {})

    def pay(
        self,
        mechanism: Charged,
        digest: str,
        kind: EntryKind,
        request: Request | None = None,
        training: str = "",
    ) -> None:
        """Charge the run for a digest unless already charged; a charge of another run is reused.

        Raises:
            BudgetSpent: the charge would exceed the budget or the plan; nothing was charged.
            ValueError: the private training run that covers the charge has not been charged.
        """
        if training and not self.is_paid(training):
            raise ValueError(f"the training {training} has not been paid for")
        due = self.due(mechanism, digest, kind, request, training)
        if due is None:
            return
        if due.run == self.run:
            self.ledger.charge(due)
            self.charged.append(due)
        else:
            note = self._run_note()
            self._store_run_note(replace(note, reused=(*note.reused, digest)))

    def due(
        self,
        mechanism: Charged,
        digest: str,
        kind: EntryKind,
        request: Request | None = None,
        training: str = "",
        reserved: int = 0,
    ) -> Entry | None:
        """Return the entry that the run must still pay for; None if it has paid.

        `reserved` more queries must fit after this entry.

        Raises:
            BudgetSpent: the charge would exceed the budget, the client's number of queries, or
                the plan.
        """
        earlier = self.ledger.charges().find(digest)
        if earlier and (earlier.run == self.run or digest in self._run_note().reused):
            return None
        due = earlier or self._affordable(mechanism, digest, kind, request, training, reserved)
        name = mechanism.name
        most = max(self.plan.releases[name], self._acknowledged.get(name, 0))
        total = self._charged()[name] + due.releases
        if due.releases and total > most:
            raise Unplanned({name: total})
        return due

    def is_paid(self, digest: str) -> bool:
        """Return whether the ledger holds a charge with a digest, for any run."""
        return self.ledger.charges().find(digest) is not None

    @property
    def keeps_teachers(self) -> bool:
        """Return whether the result of the planned run is the teachers themselves."""
        return self.plan.ends_with_teachers

    def expected_limit(self) -> Literal["", "budget", "queries"]:
        """Return the limit that the planned run will exceed, without reading the records.

        A first training or class counts that any run has paid for count as paid: if the records or
        settings such as teacher.seed have changed since, the first request is refused instead. No
        answer counts as paid, as if the run reused none. A run that has begun is not judged.
        """
        entries = self.ledger.entries()
        if any(entry.run == self.run for entry in entries):
            return ""
        paid = {self._names.get(entry.mechanism) for entry in entries}
        once = (s.mechanism for s in self.plan.charged)
        first = {m.name for m in once if isinstance(m, TrainingMechanism | ClassCounts)}
        return self.exceeded_limit(first & paid)

    def exceeded_limit(self, paid: Collection[str]) -> Literal["", "budget", "queries"]:
        """Return the name of the limit that the planned run would exceed; "" if none.

        Args:
            paid: names of the mechanisms with one release already paid: the teachers' first
                training and class counts.
        """
        unpaid = [
            replace(stage, requests=stage.requests - (stage.mechanism.name in paid))
            for stage in self.plan.charged
        ]
        queries = self.ledger.charges().queries
        queries += sum(stage.requests * max(stage.queries, 1) for stage in unpaid)
        if queries > self.most_queries:
            return "queries"
        names = {stage.mechanism.name for stage in self.plan.budgeted}
        admitted = self._budget_admits(*(s for s in unpaid if s.mechanism.name in names))
        return "" if admitted else "budget"

    def _budget_admits(self, *more: Entry | Stage) -> bool:
        """Return whether the budget admits `more`, for each relation that it bounds.

        A budget charges private training, but not the releases of privately trained teachers.
        """
        settings = self.settings
        charges = [*self.ledger.charges().by_cost(), *((charge, 1) for charge in more)]
        return settings.budget is None or all(
            within_budget(
                [_cost(charge, relation) for charge, _ in charges],
                settings.budget,
                settings.delta,
                [times for _, times in charges],
            )
            for relation in _budget_relations(settings)
        )

    def _affordable(
        self,
        mechanism: Charged,
        digest: str,
        kind: EntryKind,
        request: Request | None,
        training: str,
        reserved: int,
    ) -> Entry:
        """Create a new charge that fits the budget and the client's number of queries."""
        queries = request.queries if request and kind != "training" else 0
        entry = Entry.now(
            digest=digest,
            kind=kind,
            query_id=request.query_id if request else 0,
            queries=queries,
            releases=mechanism.releases(1, queries),
            mechanism=describe_mechanism(mechanism, self.plugins),
            trust=trust_of(mechanism.noise_at),
            costs={pair: mechanism.event(*pair) for pair in UNITS_AND_RELATIONS},
            request=request.digest if request else "",
            run=self.run,
            training=training,
        )
        if self.ledger.charges().queries + max(queries, 1) + reserved > self.most_queries:
            raise BudgetSpent("the client has reached its lifetime query limit")
        if not self._budget_admits(entry):
            raise BudgetSpent("the client's privacy budget is spent")
        return entry

    def _charged(self) -> Counter[str]:
        """Count the releases of each mechanism that the run was charged for."""
        note, charges = self._run_note(), self.ledger.charges()
        reused = [entry for entry in map(charges.find, note.reused) if entry]
        others = [(entry.mechanism, entry.releases) for entry in reused if entry.run != self.run]
        total = Counter(note.forgotten)
        for mechanism, releases in (*charges.released(self.run).items(), *others):
            total[self._names.get(mechanism, OTHER)] += releases
        return +total

    def _run_note(self) -> RunNote:
        note = self.ledger.stored_note(self._note_name)
        if note is None:
            return RunNote()
        try:
            fields = json.loads(note)
            fields["reused"] = tuple(fields["reused"])
            return RunNote(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(f"the note on run {self.run} is damaged ({error})") from None

    def _store_run_note(self, note: RunNote) -> None:
        self.ledger.store_note(self._note_name, json.dumps(vars(note)).encode())


def needed_budget(settings: PrivacyConfig, plan: Plan) -> float:
    """Return the smallest `privacy.budget` that lets a new ledger pay for a plan; `inf` if none.

    It slightly exceeds the plan's epsilon, because a budget also holds if settings change later.
    """
    return max(
        smallest_budget(_costs(plan.budgeted, relation), settings.delta)
        for relation in _budget_relations(settings)
    )


def budget_warning(settings: PrivacyConfig, plan: Plan) -> str:
    """Return a warning if a budget ends a run early; "" if it admits the whole plan.

    Nothing has been charged yet.

    Raises:
        UserError: the budget does not admit the first charge; the message says what the plan needs.
    """
    if settings.budget is None or settings.budget >= (needed := needed_budget(settings, plan)):
        return ""
    problem = (
        f"privacy.budget={settings.budget:g} is less than this run needs, {rounded_budget(needed)} "
        f"({_budget_scope(settings)})"
    )
    first = [replace(stage, requests=1) for stage in plan.budgeted[:1]]
    if all(
        within_budget(_costs(first, relation), settings.budget, settings.delta)
        for relation in _budget_relations(settings)
    ):
        return f"{problem}: the run ends when the budget is spent"
    remedy = "raise it, or set privacy.target_epsilon for more noise"
    if math.isinf(needed):
        remedy = "use training=dp_sgd, or privacy.budget=null for no cap"
    raise UserError(f"{problem}; {remedy}")


def budget_text(settings: PrivacyConfig, needed: float) -> str:
    """Describe the `privacy.budget` that pays for a whole plan, given `needed_budget`."""
    if math.isinf(needed):
        return "no privacy.budget admits this run"
    short = settings.budget is not None and settings.budget < needed
    return (
        f"privacy.budget={rounded_budget(needed)} or more pays for the whole run "
        f"({_budget_scope(settings)})"
        + (f", and privacy.budget={settings.budget:g} does not" if short else "")
    )


def _budget_scope(settings: PrivacyConfig) -> str:
    return f"record, {' and '.join(_budget_relations(settings))}"


def rounded_budget(value: float, digits: int = 4) -> str:
    """Format a number >= 0 for a command line, rounded up to `digits` digits."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale) / scale:.12g}"


def _budget_relations(settings: PrivacyConfig) -> tuple[Relation, ...]:
    """Return the relations for which a budget bounds epsilon."""
    both: tuple[Relation, ...] = ("add_remove", "replace_one")
    return both if settings.budget_relation == "replace_one" else both[:1]


def _costs(stages: Sequence[Stage], relation: Relation) -> list[DpEvent]:
    return [_cost(stage, relation) for stage in stages]


def _cost(charge: Entry | Stage, relation: Relation) -> DpEvent:
    """Return the cost of a charge to a record's budget."""
    if isinstance(charge, Entry) and charge.training:
        return ComposedDpEvent([])
    return charge.event("record", relation)
