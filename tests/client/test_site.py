"""A client: its teacher, its cache, and its one door."""

import contextlib
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent

from fed_dpsd.accounts.account import Account, BudgetSpent
from fed_dpsd.accounts.ledger import FileLedger, LedgerError, MemoryLedger
from fed_dpsd.client import site as sites
from fed_dpsd.client.site import Site
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.data.intake import Records
from fed_dpsd.errors import ProtocolError
from fed_dpsd.models.inference import Images
from fed_dpsd.privacy.accounting import best_bound
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, Probabilities
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.training import ClassCounts
from fed_dpsd.protocol import Refusal, Request, Response, Statement
from fed_dpsd.streams import Streams
from tests.client.conftest import SECRET
from tests.every import every
from tests.proofs import spent

BASES = ("training", "answers")


def request(query_id=1, seed=0, shape=(1, 8, 8)):
    rng = np.random.Generator(np.random.PCG64(seed))
    images = rng.integers(0, 256, (32, *shape), dtype=np.uint8)
    return Request(query_id, images, rng.dirichlet(np.ones(10), 32).astype(np.float32))


def make(experiment, records, ledger=None, secret=None):
    plan = experiment.plan  # for what is charged more than once
    plan = Plan(plan.training, plan.stages * 4, plan.trainings * 4)
    account = Account(
        *(ledger or MemoryLedger(), experiment.config.privacy, plan, "run"),
        when_records_change="retrain",
    )
    site = Site(
        *(experiment.config, experiment.training, experiment.answers, 0, records),
        *(np.arange(len(records)), Images(records.images), account, secret),
    )
    return site, lambda query: sites.answer(experiment.method, query, site)


def test_a_charge_comes_before_the_noise(small, records):
    class Watching(TopKRandomizedResponse):
        def add_noise(self, value, predictions, rng):
            assert len(ledger.entries()) == 1
            return super().add_noise(value, predictions, rng)

    ledger = MemoryLedger()
    site, _ = make(small(), records, ledger)
    assert isinstance(
        site.release(Watching(10, 1.0, 3), np.full((1, 32, 10), 0.1), request()), Response
    )
    (entry,) = ledger.entries()
    assert (entry.kind, entry.query_id, entry.queries, entry.releases) == ("answers", 1, 32, 32)
    for pair in UNITS_AND_RELATIONS:
        assert entry.costs[pair] == Watching(10, 1.0, 3).event(*pair)


@every("mechanism, commits", [(Probabilities(), 1), (TopKRandomizedResponse(10, 1.0, 3), 2)])
def test_only_a_release_without_noise_is_one_commit(
    small, records, tmp_path, monkeypatch, mechanism, commits
):
    """Noise must not be drawn before its charge is durable, so it takes a second commit."""
    written, execute = [], FileLedger._execute

    def watched(ledger, statement, *values):
        written.append(statement)
        return execute(ledger, statement, *values)

    monkeypatch.setattr(FileLedger, "_execute", watched)
    ledger = FileLedger(tmp_path / mechanism.name, 0, "digits")
    site, _ = make(small("training=plain", f"answers={mechanism.name}"), records, ledger)
    for _ in range(2):  # a repeated request is not written again
        site.release(mechanism, np.full((1, 32, 10), 0.1), request())
    assert sum(statement.startswith("INSERT INTO charges") for statement in written) == 1
    assert sum(statement.startswith("UPDATE") for statement in written) == commits


def test_what_a_trusted_server_sums_is_cut_off_teacher_by_teacher(small, records):
    """To the noise's grid: of a sum that is cut off as a whole, one teacher could move more."""
    settings = "answers.noise_at=server", "answers.noise_multiplier=1e7", "teachers_per_client=3"
    site, _ = make(small("training=plain", "answers=gradient", *settings), records)
    mechanism = site.answers
    rng = np.random.Generator(np.random.PCG64(0))
    gradients, query = rng.normal(size=(3, 32, 10)), request()
    sent = site.release(mechanism, gradients, query).values / mechanism.lattice
    bounded = [
        mechanism.constrain_sensitivity(each, query.predictions) / mechanism.lattice
        for each in gradients
    ]
    assert np.array_equal(sent, np.trunc(bounded).sum(axis=0))
    assert not np.array_equal(sent, np.trunc(np.sum(bounded, axis=0)))


def test_the_same_request_returns_the_stored_answer_and_charges_once(small, records):
    """It is not drawn again: a processor that rounds differently would draw another one."""
    site, answer = make(small("training=plain", "answers=gradient"), records)
    first, again = answer(request()), answer(request())
    assert (first.values == again.values).all()
    (entry,) = site.ledger.entries()
    site.ledger.store_answer(entry.digest, first.values + 1)
    assert (answer(request()).values == first.values + 1).all()
    assert len(site.ledger.entries()) == 1


@every(
    ("settings", "seed"),
    [
        (("answers.noise_multiplier=99.0",), 0),
        (("teacher.seed=7",), 0),
        (("method.balance=1.0",), 0),
        ((), 1),
    ],
)
def test_whatever_changes_an_answer_is_a_new_charge_with_other_noise(
    small, records, settings, seed
):
    """Otherwise the difference of two answers would reveal what one noise hides."""
    gradients = "training=plain", "answers=gradient"
    for secret in (SECRET, None):
        ledger = MemoryLedger()
        first = make(small(*gradients), records, ledger, secret)[1](request())
        changed = make(small(*gradients, *settings), records, ledger, secret)
        again = changed[1](request(seed=seed))
        assert len(ledger.entries()) == 2
        # The noise is 100 times its signal, so answers are as similar as their noise.
        correlation = np.corrcoef(first.values.ravel(), again.values.ravel())[0, 1]
        # Seeded noise guarantees nothing, so that it is the same on every processor.
        assert np.abs(correlation) < 0.3 if secret else correlation > 0.99


def test_seeded_noise_follows_the_seed_the_client_and_the_request(small, records):
    experiment, answers = small("training=plain", "answers=gradient"), []
    for seed, client, number in itertools.product((0, 1), (0, 1), (1, 2)):
        site, _ = make(experiment, records)
        site.client, site._noise = client, Streams(seed)
        answers.append(site.release(site.answers, np.zeros((1, 32, 10)), request(number)).values)
    correlations = np.corrcoef([each.ravel() for each in answers])
    assert np.abs(np.triu(correlations, 1)).max() < 0.3  # 320 numbers: 5 deviations


@pytest.mark.slow
@every("training", ["plain", "dp_sgd"])
def test_another_device_rounds_otherwise_so_it_has_other_noise(
    small, records, monkeypatch, training
):
    """Private training is not charged again: it stays on the CPU."""
    noisy = "answers=gradient", "answers.noise_multiplier=100"
    experiment = small(f"training={training}", *noisy)
    ledger = MemoryLedger()
    first = make(experiment, records, ledger, SECRET)[1](request())
    entries = len(ledger.entries())
    monkeypatch.setattr(Teachers, "answers_on", "a GPU")
    again = make(experiment, records, ledger, SECRET)[1](request())
    assert len(ledger.entries()) == entries + 1
    correlation = np.corrcoef(first.values.ravel(), again.values.ravel())[0, 1]
    assert np.abs(correlation) < 0.3


def test_the_same_request_does_not_reveal_whether_the_records_changed(small, records):
    ledger = MemoryLedger()
    first = make(small("training=plain", "answers=gradient"), records, ledger)[1](request())
    fewer = records.take(np.arange(59))
    again = make(small("training=plain", "answers=gradient"), fewer, ledger)[1](request())
    assert (first.values == again.values).all()
    assert len(ledger.entries()) == 1


@every("classes", [1, 3, 9, 11])
def test_a_request_for_other_classes_is_refused_before_a_teacher_answers(
    small, records, monkeypatch, classes
):
    """Otherwise a failure that depends on the answers would reveal something for free."""
    site, answer = make(small("training=plain", "answers=label"), records)
    monkeypatch.setattr(Site, "sensitive_probabilities", lambda *_: pytest.fail("it was asked"))
    predictions = np.full((32, classes), 1 / classes, np.float32)
    wrong = Request(1, request().images, predictions)
    with pytest.raises(ProtocolError, match=f"predictions have {classes} classes"):
        answer(wrong)
    with pytest.raises(ProtocolError, match=f"predictions have {classes} classes"):
        site.release(site.answers, np.full((1, 32, 10), 0.1), wrong)
    assert not site.ledger.entries()


def test_a_crash_between_charge_and_answer_costs_nothing_more(small, records):
    """The noise is a function of the request, so the answer after a crash is the same."""
    ledger = MemoryLedger()
    _, answer = make(small("training=plain", "answers=gradient"), records, ledger)
    first = answer(request())
    ledger._kept = {at: note for at, note in ledger._kept.items() if at[0] == "notes"}
    again = make(small("training=plain", "answers=gradient"), records, ledger)[1](request())
    assert (first.values == again.values).all()
    assert len(ledger.entries()) == 1


def test_over_budget_nothing_is_drawn_and_nothing_charged(small, records):
    settings = ("answers.epsilon_per_answer=1.0", "answers.k=3", "privacy.budget=65")
    site, answer = make(small(*settings), records)
    answers = [answer(request(query_id=i, seed=i)) for i in range(4)]
    assert [type(a) for a in answers] == [Response, Response, Refusal, Refusal]
    assert "budget" in answers[-1].reason
    assert len(site.ledger.entries()) == 2
    assert isinstance(answer(request(query_id=0, seed=0)), Response)  # an old answer is free


def test_a_ledger_that_cannot_be_kept_refuses_and_keeps_its_secrets(small, records, tmp_path):
    class Full(MemoryLedger):
        def charge(self, entry):
            raise LedgerError(f"the ledger of a patient called {tmp_path} cannot be written")

    _, answer = make(small("training=plain", "answers=gradient"), records, Full())
    refusal = answer(request())
    assert refusal == Refusal(1, "the client's ledger cannot be read or written")


# --- teachers trained with DP ---

PRIVATE = (
    "training=dp_sgd",
    "answers=probabilities",
    "training.steps=3",
    "training.sample_rate=0.5",
)


def test_a_private_training_is_charged_before_its_first_step(small, records, monkeypatch):
    ledger = MemoryLedger()
    steps = DPSGD.train

    def watched(*arguments):
        assert [entry.kind for entry in ledger.entries()] == ["training"]
        steps(*arguments)

    monkeypatch.setattr(DPSGD, "train", watched)
    experiment = small(*PRIVATE, "teachers_per_client=2")
    site, answer = make(experiment, records, ledger)
    for number in range(3):
        assert isinstance(answer(request(number, number)), Response)
    training, *answers = ledger.entries()
    assert (training.kind, training.releases, training.queries) == ("training", 1, 0)
    assert training.training == ""
    assert [entry.kind for entry in answers] == ["answers"] * 3
    assert [(entry.releases, entry.training) for entry in answers] == [(32, training.digest)] * 3
    delta = experiment.config.privacy.delta
    for pair in UNITS_AND_RELATIONS:
        assert training.costs[pair] == experiment.training.event(*pair)
        by = {basis: best_bound(spent(ledger.entries(), *pair, basis), delta) for basis in BASES}
        assert by["training"] == best_bound(experiment.training.event(*pair), delta)
        assert by["answers"].epsilon == math.inf  # they are probabilities
    assert site.pay_for_training() is None
    assert ledger.entries() == (training, *answers)


def test_a_training_that_is_not_paid_for_covers_nothing(small, records):
    """Otherwise its teachers' answers would count as charged."""
    ledger = MemoryLedger()
    site, _ = make(small(*PRIVATE), records, ledger)
    with pytest.raises(ValueError, match="the training .* has not been paid for"):
        site.release(site.answers, np.full((1, 32, 10), 0.1), request())
    assert not ledger.entries()


def test_a_private_teacher_is_paid_for_once_and_a_retrained_one_again(small, records):
    ledger = MemoryLedger()
    for settings, trainings in (
        ((), 1),
        ((), 1),
        (("teacher.seed=5",), 2),
        (("training.steps=4",), 3),
    ):
        make(small(*PRIVATE, *settings), records, ledger)[1](request())
        assert sum(entry.kind == "training" for entry in ledger.entries()) == trainings
    make(small(*PRIVATE), records.take(np.arange(59)), ledger)[1](request())
    assert sum(entry.kind == "training" for entry in ledger.entries()) == 4


def test_over_budget_no_private_teacher_is_trained(small, records, monkeypatch):
    monkeypatch.setattr(DPSGD, "train", lambda *_: pytest.fail("it was trained"))
    site, answer = make(small(*PRIVATE, "privacy.budget=0.1", "teacher.seed=99"), records)
    assert isinstance(answer(request()), Refusal)
    for ask in (lambda: site.sensitive_probabilities(request().images), site.sensitive_weights):
        with pytest.raises(BudgetSpent):  # whatever a method asks for first
            ask()
    assert not site.ledger.entries()
    assert np.isnan(site.diagnose()).all()


def test_private_teachers_may_be_diagnosed_outside_a_simulation(small, records):
    site, _ = make(small(*PRIVATE, "federation.simulation=false"), records)
    assert np.isfinite(site.diagnose()).all()


def test_a_private_teacher_of_no_record_answers_as_any_other(small, records):
    """Otherwise an empty shard would reveal with certainty whether a record is present."""
    for model in ("cnn", "scattering"):
        experiment = small(*PRIVATE, "teachers_per_client=3", f"model={model}")
        site, _ = make(experiment, records.take(np.arange(1)))
        assert np.isfinite(site.sensitive_probabilities(request().images)).all(), model


COUNTS = Request.without_images("counts", (1, 8, 8), 10)


def test_class_counts_are_charged_and_drawn_once(small, records, monkeypatch):
    """A second request, even with another number, gets the stored counts and costs nothing."""
    ledger = MemoryLedger()
    site, answer = make(small(*PRIVATE, "training.count_fraction=60.0"), records, ledger)
    first = answer(COUNTS)
    assert 1 < site.training.count_noise < 3
    exact = np.bincount(records.labels, minlength=10)
    assert (first.query_id, first.values.shape) == (0, (1, 10))
    assert 0 < np.abs(first.values[0] - exact).max() < 3 * 6  # 6 deviations: 2e-8
    training, given = ledger.entries()
    assert (training.kind, training.releases, training.queries) == ("training", 1, 0)
    assert (given.kind, given.releases, given.queries) == ("counts", 1, 0)
    assert given.training == ""  # they do not pass through teachers
    for pair in UNITS_AND_RELATIONS:
        own, counted = site.training.event(*pair), site.training.count_event(*pair)
        assert (training.costs[pair], given.costs[pair]) == (own, counted)
        by = {basis: best_bound(spent(ledger.entries(), *pair, basis), 1e-5) for basis in BASES}
        assert by["training"] == best_bound(ComposedDpEvent([own, counted]), 1e-5)
        assert by["answers"] == best_bound(counted, 1e-5)
    drawn = site.class_counts(COUNTS)
    assert (drawn == site.class_counts(COUNTS)).all()
    monkeypatch.setattr(DPSGD, "count", lambda *_: np.full(10, 7.0))  # noise of its own, each time
    assert (answer(COUNTS).values == first.values).all()
    assert (answer(replace(COUNTS, query_id=3)).values == first.values).all()
    assert len(ledger.entries()) == 2


@every("settings", [("training.count_fraction=10.0",), ("teacher.seed=5",), "fewer"])
def test_counts_of_another_training_have_noise_of_their_own_and_are_paid_for(
    small, records, settings
):
    """Noise of 1,000 records hides what they differ by, so that counts are as alike as noise."""
    ledger, noise = MemoryLedger(), ("training.count_fraction=2.5e-4",)
    site, answer = make(small(*PRIVATE, *noise), records, ledger, SECRET)
    first = answer(COUNTS).values[0]
    assert site.training.count_noise > 1000
    data, changed = (
        (records.take(np.arange(59)), ()) if settings == "fewer" else (records, settings)
    )
    other, answer = make(small(*PRIVATE, *noise, *changed), data, ledger, SECRET)
    again = answer(COUNTS).values[0]
    exact = np.bincount(records.labels, minlength=10)
    scales = site.training.count_noise, other.training.count_noise
    gap = np.abs((first - exact) / scales[0] - (again - exact) / scales[1])
    assert (gap > 1e-3).all()  # of equal noise at most one count would differ, by a thousandth
    assert [entry.kind for entry in ledger.entries()] == ["training", "counts"] * 2


@every(
    "settings",
    [
        ("training=plain", "answers=label"),
        (*PRIVATE, "training.count_fraction=null"),
    ],
)
def test_class_counts_that_no_training_released_are_no_answer(small, records, settings):
    site, answer = make(small(*settings), records)
    with contextlib.suppress(ProtocolError):
        assert answer(COUNTS).reason.startswith("unplanned")
    with pytest.raises(ProtocolError, match="this client's mechanism releases no class counts"):
        answer(replace(COUNTS, acknowledged={"class_counts": 1}))
    assert all(entry.kind == "training" for entry in site.ledger.entries())


def test_class_counts_are_no_answer_of_teachers_whatever_they_are_asked_with(small, records):
    """Otherwise their training would appear to cover them."""
    ledger = MemoryLedger()
    site, _ = make(small(*PRIVATE), records, ledger)
    site.pay_for_training()
    one = replace(request(), images=request().images[:1], predictions=request().predictions[:1])
    site.release(ClassCounts(site.training), site.class_counts(one), one)
    assert [entry.training for entry in ledger.entries()] == ["", ""]


def test_over_budget_no_class_is_counted(small, records, monkeypatch):
    monkeypatch.setattr(DPSGD, "count", lambda *_: pytest.fail("they were counted"))
    site, answer = make(small(*PRIVATE, "privacy.budget=0.001", "teacher.seed=99"), records)
    assert answer(COUNTS) == Refusal(0, "the client's privacy budget is spent", Statement())
    with pytest.raises(ValueError, match="not been paid for"):  # whatever a method requests first
        site.class_counts(COUNTS)
    assert not site.ledger.entries()


@every("labels", [np.zeros(60, np.int64), np.array([3]), np.arange(5)])
def test_a_client_with_one_class_or_few_records_works(small, records, labels):
    few = Records(records.images[: len(labels)], labels)
    site, answer = make(small("teacher.batch_size=64"), few)
    assert np.isfinite(site.sensitive_probabilities(request().images)).all()
    assert isinstance(answer(request()), Response)


def test_diagnostics_are_refused_outside_a_simulation(small, records):
    assert make(small(), records)[0].diagnose().shape == (1, 60, 10)
    with pytest.raises(ProtocolError, match="refused outside a simulation"):
        make(small("federation.simulation=false"), records)[0].diagnose()


def test_images_of_a_wrong_shape_are_refused(small, records):
    with pytest.raises(ProtocolError, match=r"images have shape \[1, 12, 12\]"):
        make(small(), records)[1](request(shape=(1, 12, 12)))
