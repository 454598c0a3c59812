"""Every method and every way to answer: finite, planned, resumable bit by bit, and leak-free."""

import zlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import NonPrivateDpEvent
from hydra.utils import get_class

from fed_dpsd.client.terms import choices
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import UserError
from fed_dpsd.privacy import dp_sgd
from fed_dpsd.privacy.accounting import best_bound, prove
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS, Noiseless
from fed_dpsd.protocol import Aggregate, Refusal, Replies, Response
from fed_dpsd.server import checkpoint
from fed_dpsd.streams import Streams
from tests.conftest import quick_for
from tests.ledgers import entries_of
from tests.proofs import bases, spent
from tests.running import finish, rounds

METHODS = sorted(choices("method"))
PLAIN = [
    ("answers=label",),
    ("answers=label", "answers.k=3"),
    ("answers=gradient",),
    ("answers=gradient", "answers.noise_at=server", "answers.k=3", "answers.mask=signed"),
    ("answers=probabilities",),
    ("answers=gradient", "teachers_per_client=3"),
    ("answers=label", "teachers_per_client=3"),
    ("answers=label", "answers.threshold=0.05"),
    ("answers=gradient", "answers.normalise=batch"),
    ("answers=gradient", "answers.k=3", "answers.mask=private"),
    ("answers=votes", "teachers_per_client=3"),
    ("answers=votes", "answers.noise_law=laplace", "answers.noise_at=server"),
    ("answers=noisy_max", "teachers_per_client=3"),
    ("answers=probabilities", "method.polarity=answers"),
    ("answers=probabilities", "method.pooling=odds"),
]
DP_SGD = ("training=dp_sgd", "training.steps=3", "training.sample_rate=0.1")
CLEAR, PRIVATE = ("training=plain", "answers=probabilities"), (*DP_SGD, "answers=probabilities")
ON_BOTH_AXES = [
    (*DP_SGD, "answers=label", "answers.epsilon_per_answer=0.1"),
    (*DP_SGD, "answers=label", "answers.epsilon_per_answer=inf"),
    (*DP_SGD, "answers=gradient"),
    (*DP_SGD, "answers=gradient", "answers.noise_multiplier=0"),
    (*DP_SGD, "answers=votes", "teachers_per_client=3"),
    (*DP_SGD, "answers=votes", "answers.noise_multiplier=0"),
    (*DP_SGD, "answers=gradient", "answers.noise_at=server"),
]
ANSWERS = [*(("training=plain", *answers) for answers in PLAIN), PRIVATE, *ON_BOTH_AXES]
WHITE_BOX = [CLEAR, PRIVATE]


def supported(method):
    """The settings of WHITE_BOX with a training that the method supports."""
    trainings = get_class(choices("method")[method]).trainings
    if not isinstance(trainings, tuple):  # None for any, or a property: listed below
        return WHITE_BOX
    return [each for each in WHITE_BOX if each[0].removeprefix("training=") in trainings]


# A method's answers, and its needs beyond the small experiment.
ANSWERED = {method: supported(method) for method in METHODS} | {"fed_dpsd": ANSWERS}
PAPER = [ANSWERS[0], ANSWERS[3], PRIVATE, ON_BOTH_AXES[2]]
ANSWERED |= dict.fromkeys(("paper_fed_dpsd", "paper_dpsd"), PAPER)
SUM = ("training=plain", "answers=gradient_sum")
ANSWERED |= {"dpdfd": [SUM, (*SUM, "answers.normalise=batch"), (*DP_SGD, *SUM[1:])]}
MAX = ("training=plain", "answers=noisy_max", "teachers_per_client=3")
PAID = "training@method.baseline=dp_sgd", "method.baseline.steps=3", "model.teacher=mlp"
BASELINE = [MAX, (*MAX, *PAID), ("training=plain", "answers=label", "method.epsilon_1=0.01")]
ANSWERED |= dict.fromkeys(("dgd", "dgd_plus"), BASELINE)
LABEL_PRIVATE = [
    ("training=lp_2st", "answers=probabilities"),
    ("training=lp_mst", "answers=probabilities"),
    ("training=alibi", "answers=probabilities"),
]
SUMS = ("answers=clipped_gradients", "model=scattering", "diagnostics=false")
SHARES = "answers.noise_at=distributed", "answers.quorum={threshold: 2, colluding: 1}"
ANSWERED |= {"dp_fedsgd": [SUMS, (*SUMS, *SHARES)]}
STATISTICS = ("answers=class_statistics", *SUMS[1:])
ANSWERED |= {"class_statistics": [STATISTICS, (*STATISTICS, *SHARES)]}
ANSWERED |= {"central": WHITE_BOX + LABEL_PRIVATE}
ANSWERED |= {"dpsd": [ANSWERS[0], ANSWERS[2], PRIVATE, ON_BOTH_AXES[0]], "local": []}
UNPROVEN = ("training=output_gradient", "training.steps=3", "answers=probabilities")
ANSWERED |= {"direct": [*WHITE_BOX, UNPROVEN]}
SELECTIVE = ("training=plain", "answers=label")
STUDENT_DRIVEN = "method.discriminator=student"
ANSWERED |= {"dp_dfd": [SELECTIVE, (*SELECTIVE, STUDENT_DRIVEN), ON_BOTH_AXES[0]]}
GENERATED = ("training=dp_merf", "training.features=20", "training.generator_steps=3")
GENERATED += ("training.classifier_steps=3", "answers=probabilities")
ANSWERED |= {"dp_merf": [GENERATED]}
EMBEDDED = ("training=gep", "training.steps=3", "training.sample_rate=0.1", "training.anchors=8")
EMBEDDED += ("training.basis_size=4", "answers=probabilities")
ANSWERED |= {"gep": [EMBEDDED]}
GANS = ("training.generator_steps=3", "training.classifier_steps=3", "answers=probabilities")
ANSWERED |= {"dp_gan": [("training=dp_gan", *GANS)]}
SHARDS = ("training.discriminators=20", "training.discriminators_at_once=10")
ANSWERED |= {"gs_wgan": [("training=gs_wgan", *SHARDS, *GANS)]}
TAUGHT = ("training.teachers=5", "training.generator_steps=3", "training.classifier_steps=3")
VOTED = ("datalens", "g_pate", "pate_gan")
ANSWERED |= {name: [(f"training={name}", *TAUGHT, "answers=probabilities")] for name in VOTED}
ONE_PLACE = ("central", "direct", "dp_merf", "dp_gan", "gs_wgan", "gep", *VOTED)
ALONE = ("dpsd", "paper_dpsd", "dpdfd", "dp_dfd", *ONE_PLACE)
NEEDS = dict.fromkeys(ALONE, ("num_clients=1",))
SENT_ONCE = ("class_statistics", "weights_once")
NEEDS |= dict.fromkeys(SENT_ONCE, ("rounds=1",))
ONE_ROUND = {"ensemble", *ONE_PLACE, *SENT_ONCE}
# Of refusals no answer is decoded: votes and probabilities end alike.
ASKING_MANY = [("fed_dpsd", ANSWERS[0]), ("fed_dpsd", PRIVATE), ("dpsd", ANSWERS[0])]
ASKING = [(method, ANSWERED[method][-1]) for method in METHODS if ANSWERED[method]]


# One of each branch of the code; all others are slow.
ESSENTIAL = {method: ANSWERED[method][-1:] for method in METHODS}
ESSENTIAL["fed_dpsd"] = [
    *(ANSWERS[0], ANSWERS[3], ANSWERS[7], ANSWERS[9], MAX),
    *(ANSWERS[14], ON_BOTH_AXES[0], ON_BOTH_AXES[4], ON_BOTH_AXES[6]),
]
ESSENTIAL["dgd"] = BASELINE[1:2]
ESSENTIAL["dp_gan"] = []  # five seconds of numerical composition
ESSENTIAL["dp_fedsgd"] = ANSWERED["dp_fedsgd"]


@pytest.fixture(
    params=[
        pytest.param(
            (method, answers),
            id=f"{method} {' '.join(answers)}",
            marks=() if answers in ESSENTIAL[method] else pytest.mark.slow,
        )
        for method in METHODS
        for answers in ANSWERED[method]
    ]
)
def experiment(request, small):
    method, answers = request.param
    named = f"method={method}"
    return small(named, *quick_for([named]), *NEEDS.get(method, ()), *answers)


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch):
    """Check the kernels of DP-SGD, which tests/privacy does with as many as in a run, quickly."""
    monkeypatch.setattr(dp_sgd, "RECORDS_AT_ONCE", 8)


def weights(finished):
    return {name: tensor.clone() for name, tensor in finished.student.state_dict().items()}


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


class Recorder:
    """A site that records what reaches `release` and what leaves it."""

    def __init__(self, site):
        self.site, self.released = site, []

    def __getattr__(self, name):
        return getattr(self.site, name)

    def release(self, mechanism, sensitive_value, request):
        response = self.site.release(mechanism, sensitive_value, request)
        bounded = [
            mechanism.constrain_sensitivity(value, request.predictions) for value in sensitive_value
        ]
        self.released.append((mechanism, np.sum(bounded, axis=0), response))
        return response


def recorded(federation):
    clients = federation._sites
    clients._sites |= {client: Recorder(site) for client, site in clients.items()}
    return federation


class Drawn:
    """The keys of all draws from seeds: of noise and of others, each with its purpose."""

    def __init__(self, monkeypatch):
        self.noise, self.others = [], []
        numpy = Streams.numpy

        def draw(streams, purpose, client=0, query_id=0):
            self.others.append((key(streams, purpose, client, query_id), purpose))
            return numpy(streams, purpose, client, query_id)

        def noise(streams, purpose, client, query_id, hides):
            self.noise.append((key(streams, purpose, client, query_id), purpose))
            return numpy(streams, purpose, client, query_id)

        def key(streams, purpose, *numbers):
            return streams.seed, zlib.crc32(purpose.encode()), *numbers

        monkeypatch.setattr(Streams, "numpy", draw)
        monkeypatch.setattr(Streams, "noise", noise)

    def require_own_keys(self):
        """Each draw of noise has a key of its own, and so has each other draw, but for repeats."""
        noise, others = dict(self.noise), dict(self.others)
        assert len(noise) == len(self.noise)
        assert not noise.keys() & others.keys()
        assert set(self.others) == set(others.items())  # a key has one purpose
        repeated = {purpose for (_, purpose), count in Counter(self.others).items() if count > 1}
        assert repeated <= REPEATED


# Draws that are made again where they are needed again.
REPEATED = {"teacher weights", "records of a run"}


def test_control_noise_without_the_number_of_its_round_is_found(small, tmp_path, monkeypatch):
    drawn, experiment = Drawn(monkeypatch), small("training=plain", "answers=gradient")
    finish(experiment, tmp_path / "right")
    drawn.require_own_keys()
    noise = Streams.noise
    monkeypatch.setattr(Streams, "noise", lambda self, *key: noise(self, *key[:2], 0, key[3]))
    finish(experiment, tmp_path / "wrong")
    with pytest.raises(AssertionError):
        drawn.require_own_keys()


def test_a_run_is_resumable_bit_by_bit_charged_as_planned_and_leaks_nothing(
    experiment, tmp_path, monkeypatch
):
    torch.set_num_threads(1)
    drawn = Drawn(monkeypatch)
    federation = recorded(LocalFederation(experiment, tmp_path / "straight"))
    straight, states = [], []
    context = experiment.public
    for finished in experiment.method.server(federation, context, Streams(0), None):
        straight.append(weights(finished))
        checkpoint.save(tmp_path / "checkpoint", finished.state)
        states.append(checkpoint.load(tmp_path / "checkpoint"))
        assert all(np.isfinite(value) for value in finished.metrics.values())
    drawn.require_own_keys()
    one = experiment.method_name in ONE_ROUND
    assert len(straight) == (1 if one else experiment.config.rounds)
    assert one or not equal(straight[0], straight[-1])
    for state in states[-2:-1]:
        resumed = [weights(f) for f in rounds(experiment, tmp_path / "resumed", state)]
        assert len(resumed) == len(straight) - state.round
        assert equal(resumed[-1], straight[-1])
    charged_as_planned(experiment, federation)
    nothing_else_left(experiment, federation)


@pytest.mark.parametrize(
    "experiment",
    [(method, ANSWERED[method][0]) for method in ("fed_dpsd", "dpsd", "dgd", "dp_dfd", "feddf")],
    indirect=True,
    ids=lambda param: param[0],
)
def test_a_student_learns_from_the_answers_of_all_rounds(experiment, tmp_path):
    """If the first round's answers were different, so would be the last student."""
    straight = rounds(experiment, tmp_path / "straight")
    next(straight)
    state = next(straight).state
    first, second = state.buffer
    other = replace(first, labels=np.roll(first.labels, 1, axis=1))
    (last,) = straight
    (changed,) = rounds(experiment, tmp_path / "changed", replace(state, buffer=[other, second]))
    assert not equal(weights(changed), weights(last))


def charged_as_planned(experiment, federation):
    """The ledgers hold the plan, and prove what it proves."""
    planned = experiment.plan
    for site in federation._sites.values():
        entries = entries_of(site.ledger)
        assert sum(entry.queries for entry in entries) == planned.queries
        charged = site.account.locked_statement().charged
        assert charged <= planned.releases
        assert not +planned.releases - charged
        for pair in UNITS_AND_RELATIONS:
            for basis, stages in bases(planned).items():
                charged, proven = spent(entries, *pair, basis), prove(stages, 1e-5, *pair)
                assert best_bound(charged, 1e-5).epsilon == proven.value
        trainings = {entry.digest for entry in entries if entry.kind == "training"}
        covered = {e.training for e in entries if e.kind not in ("training", "counts", "baseline")}
        assert covered == (trainings or {""})  # each training covers something
        assert bool(trainings) == (set(bases(planned)) == {"training", "answers"})


def nothing_else_left(experiment, federation):
    """Only released values leave a client, and they are exact only if allowed."""
    for recorder in federation._sites.values():
        assert recorder.released or experiment.method_name == "local"
        for mechanism, bounded, response in recorder.released:
            # Weights, counts and probabilities; and no noise, which only private teachers may have.
            clear = isinstance(mechanism, Noiseless) or (
                mechanism.event("record", "add_remove") == NonPrivateDpEvent()
            )
            exact_is_allowed = clear or mechanism.noise_at == "server"
            assert not (clear and mechanism == experiment.answers) or (
                experiment.training.name == "dp_sgd" or mechanism.name == "probabilities"
            )
            assert isinstance(response, Response | Refusal)
            same = np.allclose(bounded, response.values, rtol=0, atol=1e-8)  # the noise's grid
            assert same == exact_is_allowed


class Refusing:
    """A federation whose clients all refuse from some round on."""

    def __init__(self, inner, last):
        self.inner, self.last = inner, last

    def total(self, request):
        if request.query_id > self.last:
            refused = self.each(request).refused
            return Aggregate(request, np.zeros(request.predictions.shape), 0, refused)
        return self.inner.total(request)

    def each(self, request):
        if request.query_id > self.last:
            refusal = Refusal(request.query_id, "spent")
            return Replies(request, {0: refusal, 1: refusal})
        return self.inner.each(request)


@pytest.mark.parametrize("experiment", ASKING_MANY, indirect=True, ids=str)
def test_a_federation_that_refuses_ends_the_run_cleanly(experiment, tmp_path):
    _, (first, last) = finish(experiment, tmp_path, lambda inner: Refusing(inner, last=1))
    assert first.state.round == last.state.round == 1
    assert last.refused == {0: "spent", 1: "spent"}
    assert not equal(weights(first), weights(last))  # a last student, trained on what there is


@pytest.mark.parametrize("experiment", ASKING, indirect=True, ids=lambda p: p[0])
def test_a_federation_that_never_answers_is_an_error_with_the_reason(experiment, tmp_path):
    with pytest.raises(UserError, match="no client answers: spent$"):
        finish(experiment, tmp_path, lambda inner: Refusing(inner, last=-1))
