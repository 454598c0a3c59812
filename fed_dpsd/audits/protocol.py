"""Protocol tests: what a real site with a ledger answers, refuses and charges.

They use only a site's public behaviour: releases, payments, answers to requests, and the charges in
its ledger. Each test starts with a new site. Correct code fails a test only if two draws of
hundreds of noisy numbers are equal by chance.
"""

import copy
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, NonPrivateDpEvent, SelfComposedDpEvent

from fed_dpsd.accounts.account import Account, BudgetSpent
from fed_dpsd.accounts.card import plan_of
from fed_dpsd.accounts.ledger import FileLedger, MemoryLedger
from fed_dpsd.audits.black_box import public_rows
from fed_dpsd.audits.checks import Check
from fed_dpsd.audits.claims import Say, audit_secrets
from fed_dpsd.client.site import Site, answer
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.data.datasets import Split
from fed_dpsd.errors import ProtocolError
from fed_dpsd.experiment import Experiment
from fed_dpsd.models import to_vector
from fed_dpsd.privacy.accounting import Stage, best_bound
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.mechanism import Mechanism, Unit, Values, Weights
from fed_dpsd.privacy.noise import Rng, SecretStreams
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.training import Plain, Training
from fed_dpsd.progress import listening
from fed_dpsd.protocol import NOTHING, Refusal, Request

QUERIES, RECORDS, REQUESTS = 64, 4, 10**6
TINY_BUDGET = 1e-4
SAME = 1 - 1e-9  # tolerated ratio of an epsilon that is computed twice


@dataclasses.dataclass(frozen=True)
class _RecordingSecret(SecretStreams):
    """A secret that records the purposes of its draws."""

    purposes: list[str] = dataclasses.field(default_factory=list, repr=False, compare=False)

    def numpy(self, purpose: str, client: int = 0, query_id: int = 0) -> Rng:
        self.purposes.append(purpose)
        return super().numpy(purpose, client, query_id)


@dataclasses.dataclass
class _Case:
    """A site under test, with everything that its releases need."""

    experiment: Experiment
    mechanism: Any  # the mechanism of answers, noisy enough for two draws of QUERIES rows to differ
    training: Training  # the run's training, shortened to a few steps; Plain if it is not private
    memory: MemoryLedger | None  # the ledger, which starts empty; None for one in a file
    secret: _RecordingSecret  # the source of the site's noise
    folder: str  # the folder of its teachers and its ledger

    def site(self, training: Training | None = None, budget: float | None = None) -> Site:
        """Open a site on the ledger, as after a restart."""
        config = self.experiment.config
        privacy = dataclasses.replace(config.privacy, budget=budget)
        teacher = dataclasses.replace(
            config.teacher, path=None, arch=None, epochs=1, min_steps=1, batch_size=2
        )
        config = dataclasses.replace(
            config, cache=self.folder, privacy=privacy, teacher=teacher, teachers_per_client=1
        )
        training = training or self.training
        plan = plan_of(self.experiment)
        stages = (*plan.stages, Stage(self.mechanism, REQUESTS, QUERIES))
        plan = dataclasses.replace(plan, training=training, stages=stages)
        images = np.zeros((RECORDS, *config.data.shape), np.uint8)
        images += np.arange(RECORDS, dtype=np.uint8)[:, None, None, None]
        numbers = np.arange(RECORDS)
        ledger = self.memory or FileLedger(Path(self.folder) / "ledger", 0, "audit")
        return Site(
            config=config,
            training=training,
            answers=self.mechanism,
            client=0,
            records=Split(images, numbers % config.data.num_classes, numbers),
            shard_ids=numbers,
            test=None,
            account=Account(ledger, privacy, plan, run="audit"),
            secret=self.secret,
        )

    def request(self, number: int = 1, pixel: int = 0, row: int = 0) -> Request:
        """Return a request of QUERIES images with this query id, pixel and prediction.

        A sum of gradients is requested at weights with these numbers instead.
        """
        config, num_classes = self.experiment.config, self.num_classes
        shape = config.data.shape
        if not self.mechanism.from_teachers:
            weights = np.zeros(len(to_vector(make_teacher(config, 0, 0))), np.float32)
            weights[:2] = pixel, row
            return Request.without_images("gradients", shape, num_classes, number, weights)
        images = np.zeros((QUERIES, *shape), np.uint8)
        images[0, 0, 0, 0] = pixel
        return Request(number, images, np.tile(public_rows(num_classes)[[row]], (QUERIES, 1)))

    def own_request(self) -> Request:
        """Return a request that the method answers: for its teachers' weights, or `request`."""
        if any(isinstance(s.mechanism, Weights) for s in plan_of(self.experiment).stages):
            shape = self.experiment.config.data.shape
            return Request.without_images("weights", shape, self.num_classes)
        return self.request()

    def values(self, world: int = 0) -> Values:
        """Return the teachers' values in one of two worlds, for each query."""
        if hasattr(self.mechanism, "worst_case"):
            return np.tile(self.mechanism.worst_case()[world][:1], (1, QUERIES, 1))
        return np.tile(np.eye(self.num_classes)[[world]], (1, QUERIES, 1))

    @property
    def num_classes(self) -> int:
        return self.experiment.config.data.num_classes

    @property
    def cost(self) -> DpEvent:
        """Return what an answer to `request` costs a record."""
        event = self.mechanism.event("record", "add_remove")
        return SelfComposedDpEvent(event, self.mechanism.releases(1, self.request().queries))

    def answers(self, request: Request, site: Site) -> bool:
        """Return whether a site answers a request, rather than refusing it in any way."""
        try:
            return not isinstance(answer(self.experiment.method, request, site), Refusal)
        except ProtocolError:
            return False


def protocol_tests(experiment: Experiment, say: Say) -> Iterator[Check]:
    """Test an experiment's site with a ledger in memory, and with one in a file."""
    tests = [_charges_releases, _repeats, _changes, _refuses_beyond_budget, _refuses_unknown]
    if isinstance(experiment.training, DPSGD):
        tests += [_charges_training, _refuses_training_beyond_budget]
    say("the protocol: requests to sites with ledgers")
    training = experiment.training
    few = dataclasses.replace(training, steps=2) if isinstance(training, DPSGD) else Plain()
    for place, test in itertools.product(("in memory", "in a file"), tests):
        with tempfile.TemporaryDirectory() as folder:
            secret = _RecordingSecret(next(audit_secrets(experiment.config, "protocol")).secret)
            memory = MemoryLedger() if place == "in memory" else None
            case = _Case(experiment, _with_noise(experiment.answers), few, memory, secret, folder)
            title, *wrong = test.__doc__.splitlines()[0], *_failures(test, case)
            title = f"{title.rstrip('.')} (ledger {place})"
            yield Check("protocol", title, "; ".join(wrong), "requests to a site")


def _failures(test: Callable[[_Case], Iterator[str]], case: _Case) -> list[str]:
    """Return the failures that a test finds, including errors raised by the site."""
    found = []
    try:
        with listening(None):  # the audit reports
            found += test(case)
    except Exception as error:  # correct code raises none here
        found.append(f"{type(error).__name__}: {error}")
    return found


# --- tests: the first line is the property; they yield what violates it ---


def _charges_releases(case: _Case) -> Iterator[str]:
    """Every release is charged its mechanism's cost."""
    site = case.site(Plain())
    for number in (1, 2, 3):
        before = _entries(site)
        site.release(case.mechanism, case.values(), case.request(number))
        yield from _undercharged(f"answer {number}", case, before, _entries(site), case.cost)


def _charges_training(case: _Case) -> Iterator[str]:
    """Private training is charged once, before it starts, and its teacher's answers are charged."""
    training, site = case.training, case.site()
    assert isinstance(training, DPSGD)
    site.pay_for_training()
    steps = dataclasses.replace(training, count_fraction=None)
    cost = steps.event(training.unit, "add_remove")
    yield from _undercharged("the training", case, [], _entries(site), cost, training.unit)
    if plan_of(case.experiment).releases_counts:
        request = Request.without_images(
            "counts", site.config.data.shape, site.config.data.num_classes
        )
        if not case.answers(request, site):
            yield "class counts were refused"
        cost = training.event(training.unit, "add_remove")
        what = "the training with its class counts"
        yield from _undercharged(what, case, [], _entries(site), cost, training.unit)
    before = _entries(site)
    for again in (site, case.site()):
        again.pay_for_training()
    if len(_entries(site)) != len(before):
        yield "the same training was charged twice"
    site.release(case.mechanism, case.values(), case.request())
    if len(_entries(site)) <= len(before):
        yield "an answer of a private teacher left no entry"


def _repeats(case: _Case) -> Iterator[str]:
    """A repeated request gets the stored answer at no second charge, even if records change."""
    site = case.site(Plain())
    first = site.release(case.mechanism, case.values(), case.request()).values
    before = len(_entries(site))
    for what, again, world in (
        ("the same site", site, 0),
        ("a site that was started again", case.site(Plain()), 0),
        ("a site whose records changed", case.site(Plain()), 1),
    ):
        values = again.release(case.mechanism, case.values(world), case.request()).values
        if not np.array_equal(values, first):
            yield f"{what} gives a different answer to the same request"
        if len(_entries(again)) != before:
            yield f"{what} was charged again for the same request"


def _changes(case: _Case) -> Iterator[str]:
    """A changed request with the same id gets different noise and a separate charge."""
    site = case.site(Plain())
    mechanism, values = case.mechanism, case.values()
    seen = [site.release(mechanism, values, case.request()).values]
    noisy = not isinstance(mechanism.event("record", "add_remove"), NonPrivateDpEvent)
    for what, request in (
        ("another pixel", case.request(pixel=1)),
        ("another prediction", case.request(row=5)),
        ("another number", case.request(number=2)),
    ):
        before = _entries(site)
        seen.append(site.release(mechanism, values, request).values)
        if noisy and any(np.array_equal(seen[-1], other) for other in seen[:-1]):
            yield f"{what}: the same noise"
        yield from _undercharged(what, case, before, _entries(site), case.cost)


def _refuses_beyond_budget(case: _Case) -> Iterator[str]:
    """An answer beyond the budget is refused, and nothing is drawn, stored or charged."""
    generous = case.site(Plain())
    generous.release(case.mechanism, case.values(), case.request(2))
    used, before = set(case.secret.purposes), len(_entries(generous))
    site = case.site(Plain(), budget=TINY_BUDGET)
    case.secret.purposes.clear()
    try:
        site.release(case.mechanism, case.values(), case.request())
        yield "an answer left"
    except BudgetSpent:
        pass
    yield from _unchanged(site, before)
    yield from _noise_drawn(case, used)
    if case.answers(case.own_request(), site):
        yield "the request was answered"
    yield from _unchanged(site, before)


def _refuses_training_beyond_budget(case: _Case) -> Iterator[str]:
    """Private training beyond the budget is refused, and nothing is drawn or charged."""
    site = case.site(budget=TINY_BUDGET)
    try:
        site.pay_for_training()
        yield "the training was admitted"
    except BudgetSpent:
        pass
    if case.answers(case.own_request(), site):
        yield "the teacher answered"
    yield from _unchanged(site, 0)
    yield from _noise_drawn(case, {"private training", "answer"})


def _refuses_unknown(case: _Case) -> Iterator[str]:
    """Requests of unknown kinds or wrong shapes are refused, and nothing is charged."""
    site = case.site()
    good, (channels, *size) = case.own_request(), case.experiment.config.data.shape
    larger = np.zeros((QUERIES, channels, *(side + 1 for side in size)), np.uint8)
    classes = np.full((QUERIES, case.num_classes + 1), 0.1, np.float32)
    requests: dict[str, Callable[[], Request]] = {
        "an unknown kind": lambda: dataclasses.replace(good, kind="records"),  # type: ignore[arg-type]
        "an unknown kind that no constructor has seen": lambda: _forged(good, kind="records"),
        "other weights": lambda: dataclasses.replace(good, weights=np.ones(3, np.float32)),
        "larger images": lambda: dataclasses.replace(good, images=larger),
        "another number of classes": lambda: dataclasses.replace(good, predictions=classes),
        "images of floats": lambda: dataclasses.replace(good, images=good.images / 1.0),  # type: ignore[arg-type]
        "fewer predictions than images": lambda: dataclasses.replace(
            good, predictions=good.predictions[1:]
        ),
        "predictions that are not finite": lambda: dataclasses.replace(
            good, predictions=good.predictions * np.float32(np.nan)
        ),
        "nothing": lambda: dataclasses.replace(
            good, images=good.images[:0], predictions=good.predictions[:0], weights=NOTHING
        ),
    }
    for what, make in requests.items():
        try:
            request = make()
            if request.digest != good.digest and case.answers(request, site):
                yield f"{what}: answered"
        except ProtocolError:  # raised by the request's constructor
            pass
    yield from _unchanged(site, 0)


# --- helpers ---


def _with_noise(mechanism: Mechanism) -> Any:
    """Return the mechanism with enough noise to make QUERIES rows differ from draw to draw."""
    if isinstance(mechanism, TopKRandomizedResponse):
        return dataclasses.replace(
            mechanism, epsilon_per_answer=1.0, quorum=None, noise_at="client"
        )
    changed = {"quorum": None} if getattr(mechanism, "quorum", None) else {}
    if getattr(mechanism, "noise_at", "client") != "client":
        changed["noise_at"] = "client"
    if getattr(mechanism, "noise_multiplier", 1.0) < 1:
        changed["noise_multiplier"] = 1.0
    return dataclasses.replace(mechanism, **changed) if changed else mechanism


def _entries(site: Site) -> list[Any]:
    with site.ledger.transaction():
        return list(site.ledger.entries())


def _undercharged(
    what: str,
    case: _Case,
    before: list[Any],
    after: list[Any],
    cost: DpEvent,
    unit: Unit = "record",
) -> Iterator[str]:
    """Yield a failure unless the ledger has grown by the cost of a release for an added unit."""
    new = after[len(before) :]
    grown = ComposedDpEvent(
        [SelfComposedDpEvent(e.costs[unit, "add_remove"], e.releases) for e in new]
    )
    delta = case.experiment.config.privacy.delta
    due = best_bound(cost, delta).epsilon
    charged = best_bound(grown, delta).epsilon if new else 0.0
    if charged < due * SAME:
        yield f"{what} is charged epsilon {charged:.4g} instead of {due:.4g}"


def _unchanged(site: Site, before: int) -> Iterator[str]:
    if len(_entries(site)) != before:
        yield "the ledger was charged"


def _noise_drawn(case: _Case, purposes: set[str]) -> Iterator[str]:
    if drawn := purposes & set(case.secret.purposes):
        yield f"noise was drawn for {', '.join(sorted(drawn))}"


def _forged(request: Request, **fields: object) -> Request:
    """Return a copy of a request with fields that the constructor would reject."""
    forged = copy.copy(request)
    for name, value in fields.items():
        object.__setattr__(forged, name, value)
    return forged
