"""Every method and every way to answer: finite, planned, resumable bit by bit, and leak-free."""

import dataclasses

import numpy as np
import pytest
import torch

from fed_dpsd.accounts.entry import spent
from fed_dpsd.methods.method import World
from fed_dpsd.privacy.accounting import epsilon, prove
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS
from fed_dpsd.protocol import Answer, ProtocolError, Refusal, Total
from fed_dpsd.simulation.local import LocalFederation
from fed_dpsd.storage import conf_folder
from fed_dpsd.streams import Streams
from tests.conftest import composed
from tests.ledgers import entries_of

# Small numbers, where a method has such a setting.
QUICK = ("generator_steps", "pixel_steps", "steps_per_round", "latent_size")
METHODS = sorted(path.stem for path in (conf_folder() / "method").glob("*.yaml"))
ANSWERS = [
    (
        "training=plain",
        "answers=label",
    ),
    ("training=plain", "answers=label", "answers.k=3"),
    (
        "training=plain",
        "answers=gradient",
    ),
    (
        "training=plain",
        "answers=gradient",
        "answers.noise_at=server",
        "answers.k=3",
        "method.as_printed=true",
    ),
    ("training=plain", "answers=label", "method.as_printed=true"),
    (
        "training=plain",
        "answers=probabilities",
    ),
    ("training=plain", "answers=gradient", "teachers_per_client=3"),
    ("training=plain", "answers=label", "teachers_per_client=3"),
    ("training=plain", "answers=label", "answers.threshold=0.05"),
    ("training=plain", "answers=gradient", "answers.normalise=batch"),
    ("training=plain", "answers=gradient", "answers.k=3", "answers.mask=private"),
    ("training=plain", "answers=votes", "teachers_per_client=3"),
    ("training=plain", "answers=votes", "answers.noise_law=laplace", "answers.noise_at=server"),
    ("training=plain", "answers=probabilities", "method.match_polarity=true"),
    ("training=dp_sgd", "answers=probabilities", "training.steps=3", "training.sample_rate=0.1"),
]
WHITE_BOX = [
    (
        "training=plain",
        "answers=probabilities",
    ),
    ANSWERS[-1],
]
# What a method answers with, where not everything, and needs beyond the small experiment.
ANSWERED = dict.fromkeys(METHODS, WHITE_BOX) | {"fed_dpsd": ANSWERS, "dp_fedavg": ANSWERS[-1:]}
ANSWERED |= {"dpsd": [ANSWERS[0], ANSWERS[2], ANSWERS[-1]], "local": []}
NEEDS = dict.fromkeys(("dpsd", "central"), ("num_clients=1",))
NEEDS |= dict.fromkeys(("fedavg", "dp_fedavg"), ("teacher.same_start=true",))
ONE_ROUND = {"central", "ensemble"}
ASKING_MANY = [(method, answers) for method in ("fed_dpsd", "dpsd") for answers in ANSWERED[method]]


@pytest.fixture(
    params=[(m, a) for m in METHODS for a in ANSWERED[m]], ids=lambda p: f"{p[0]} {' '.join(p[1])}"
)
def experiment(request, small):
    method, answers = request.param
    keys = composed(f"method={method}")["method"]
    quick = [f"method.{key}=2" for key in QUICK if key in keys]
    return small(f"method={method}", *quick, *NEEDS.get(method, ()), *answers)


def rounds(experiment, folder, resume=None):
    federation = LocalFederation(experiment, folder)
    world = World.of(experiment.config, experiment.training, experiment.answers)
    return experiment.method.server(federation, world, Streams(0), resume)


def weights(finished):
    return {name: tensor.clone() for name, tensor in finished.student.state_dict().items()}


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_resuming_after_any_round_is_the_straight_run_bit_by_bit(experiment, tmp_path):
    torch.set_num_threads(1)
    straight, states = [], []
    for finished in rounds(experiment, tmp_path / "straight"):
        straight.append(weights(finished))
        states.append(dataclasses.replace(finished.state, bank=list(finished.state.bank)))
        assert all(np.isfinite(value) for value in finished.metrics.values())
    one = experiment.method_name in ONE_ROUND
    assert len(straight) == (1 if one else experiment.config.rounds)
    assert one or not equal(straight[0], straight[-1])
    for state in states[:-1]:
        resumed = [weights(f) for f in rounds(experiment, tmp_path / "resumed", state)]
        assert len(resumed) == len(straight) - state.round
        assert equal(resumed[-1], straight[-1])


def test_the_plan_is_what_the_ledgers_hold(experiment, tmp_path):
    federation = LocalFederation(experiment, tmp_path)
    world = World.of(experiment.config, experiment.training, experiment.answers)
    list(experiment.method.server(federation, world, Streams(0), None))
    planned = experiment.method.plan(world)
    for site in federation._sites.values():
        entries = entries_of(site.ledger)
        assert sum(entry.queries for entry in entries) == planned.queries
        for pair in UNITS_AND_RELATIONS:
            charged, proven = spent(entries, *pair), prove(planned.stages, 1e-5, *pair)
            assert epsilon(charged, 1e-5).epsilon == proven.value


class Refusing:
    """A federation whose clients all refuse from some round on."""

    def __init__(self, inner, last):
        self.inner, self.last, self.settle = inner, last, inner.settle

    def total(self, ask):
        if ask.query_id > self.last:
            return Total(np.zeros(ask.predictions.shape), 0, {0: "spent", 1: "spent"})
        return self.inner.total(ask)

    def each(self, ask):
        if ask.query_id > self.last:
            return {0: Refusal(ask.query_id, "spent"), 1: Refusal(ask.query_id, "spent")}
        return self.inner.each(ask)


@pytest.mark.parametrize("experiment", ASKING_MANY, indirect=True)
def test_a_federation_that_refuses_ends_the_run_cleanly(experiment, tmp_path):
    federation = Refusing(LocalFederation(experiment, tmp_path), last=1)
    world = World.of(experiment.config, experiment.training, experiment.answers)
    finished = list(experiment.method.server(federation, world, Streams(0), None))
    first, last = finished
    assert first.state.round == last.state.round == 1
    assert last.refused == {0: "spent", 1: "spent"}
    assert not equal(weights(first), weights(last))  # a last student, trained on what there is


def test_a_federation_that_never_answers_is_an_error_that_says_why(experiment, tmp_path):
    federation = Refusing(LocalFederation(experiment, tmp_path), last=-1)
    world = World.of(experiment.config, experiment.training, experiment.answers)
    with pytest.raises(ProtocolError, match=r"no client answers: \['spent'\]"):
        list(experiment.method.server(federation, world, Streams(0), None))


class Recorder:
    """A site that records what reaches `release`, and what leaves."""

    def __init__(self, site):
        self.site, self.released = site, []

    def __getattr__(self, name):
        return getattr(self.site, name)

    def release(self, mechanism, sensitive_value, ask):
        answer = self.site.release(mechanism, sensitive_value, ask)
        bounded = [mechanism.encode(value, ask.predictions) for value in sensitive_value]
        self.released.append((np.sum(bounded, axis=0), answer))
        return answer


def test_nothing_leaves_a_client_but_what_was_released(experiment, tmp_path):
    federation = LocalFederation(experiment, tmp_path)
    recorders = {c: Recorder(site) for c, site in federation._sites.items()}
    federation._sites = recorders
    world = World.of(experiment.config, experiment.training, experiment.answers)
    next(iter(experiment.method.server(federation, world, Streams(0), None)))
    exact_is_allowed = experiment.answers.name in ("non_private", "dp_teacher") or (
        experiment.answers.noise_at == "server"
    )
    for recorder in recorders.values():
        assert recorder.released
        for bounded, answer in recorder.released:
            assert isinstance(answer, Answer | Refusal)
            same = np.allclose(bounded, answer.values, rtol=0, atol=1e-8)  # the noise's grid
            assert same == exact_is_allowed
