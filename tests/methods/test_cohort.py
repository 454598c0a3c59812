"""Cohorts: the clients of each round, their cost, and the agreement of engines."""

from collections import Counter

import numpy as np
import pytest

from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.methods.class_counts import shares_among
from fed_dpsd.methods.cohort import cohort, most_rounds
from fed_dpsd.privacy.accounting import prove
from fed_dpsd.protocol import Request, Response
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder
from tests.engines.flower.test_server import FakeGrid, _flower_process  # noqa: F401
from tests.ledgers import entries_of
from tests.running import not_refused

SOME = "num_clients=5", "clients_per_round=2"
DELTA = 1e-5


def asked(config):
    return Counter(c for number in range(1, config.rounds + 1) for c in cohort(config, number))


def test_without_cohorts_all_clients_are_asked_in_all_rounds(small):
    config = small("num_clients=5").config
    assert list(cohort(config, 3)) == [0, 1, 2, 3, 4]
    assert most_rounds(config) == config.rounds


def test_a_cohort_follows_the_seed_and_the_round(small):
    config = small(*SOME, "rounds=40").config
    drawn = [tuple(cohort(config, number)) for number in range(1, 41)]
    assert drawn == [tuple(cohort(config, number)) for number in range(1, 41)]
    assert all(len(set(clients)) == 2 and sorted(clients) == list(clients) for clients in drawn)
    assert set(asked(config)) == set(range(5))
    assert len(set(drawn)) == 10  # of 40 draws among 10 pairs: missing one has odds of 0.15
    other = small(*SOME, "rounds=40", "seed=1").config
    assert drawn != [tuple(cohort(other, number)) for number in range(1, 41)]


def test_a_client_pays_for_its_rounds_and_the_plan_for_those_of_the_most_asked(small):
    experiment = small(*SOME, "rounds=6", "training=plain", "answers=gradient")
    counts, folder = asked(experiment.config), new_run_folder(experiment)
    most = max(counts.values())
    assert most < 6
    plan = experiment.plan
    assert plan.queries == most * experiment.config.queries_per_round
    federation = LocalFederation(experiment, folder)
    summary = runs.run(experiment, federation, folder, lambda line: None)
    charged = {}
    for client, site in federation._sites.items():
        charged[client] = len(entries_of(site.ledger))
    assert charged == {client: counts[client] for client in range(5)}
    (row,) = (
        row
        for row in summary["privacy"]["proven"]
        if (row["unit"], row["relation"]) == ("record", "replace_one")
    )
    every = prove(plan.stages, DELTA, "record", "replace_one").value
    assert row["epsilon"] == pytest.approx(every)
    whole = small("num_clients=5", "rounds=6", "answers=gradient").plan
    assert every < prove(whole.stages, DELTA, "record", "replace_one").value


def test_a_client_that_is_asked_more_often_than_the_schedule_says_refuses(small):
    """The plan of a client is what its schedule says, whatever a coordinator sends."""
    experiment = small(*SOME, "rounds=6", "training=plain", "answers=gradient")
    federation = LocalFederation(experiment, new_run_folder(experiment))
    federation._recipients = lambda request: [0]
    images = np.zeros((64, 1, 8, 8), np.uint8)
    predictions = np.full((64, 10), 0.1, np.float32)
    replies = [federation._deliver(Request(n, images, predictions))[0] for n in range(1, 7)]
    answered = [isinstance(reply, Response) for reply in replies]
    most = most_rounds(experiment.config)
    assert answered == [True] * most + [False] * (6 - most)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("training=plain", "answers=label"),
        ("method=fedavg", "answers=probabilities"),
    ],
    ids=" ".join,
)
def test_engines_query_the_same_cohorts(small, settings):
    experiment = small(*SOME, *settings)
    folder = new_run_folder(experiment)
    local = runs.run(experiment, LocalFederation(experiment, folder), folder, lambda line: None)
    for nodes in (2, 5):
        again = new_run_folder(experiment)
        federation = GridFederation(experiment, FakeGrid(nodes), again)
        summary = runs.run(experiment, federation, again, lambda line: None)
        assert summary["student_sha256"] == local["student_sha256"]
        assert summary["queries"] == local["queries"]


def test_weights_of_some_clients_sum_to_1_for_each_class():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 100, (4, 3)).astype(float)
    counts[[1, 2], 0] = 0
    weights = dict(enumerate(counts / counts.sum(0)))
    some = shares_among(weights, [1, 2])
    assert np.allclose(some[1] + some[2], 1)
    assert some[1][0] == 0.5  # neither has any record of class 0
    assert some[1][1] == pytest.approx(counts[1, 1] / (counts[1, 1] + counts[2, 1]))


def test_cohorts_that_cannot_be_are_one_error(small):
    secure = "answers=gradient answers.noise_at=distributed"
    secure += " answers.quorum={threshold:2,colluding:0}"
    table = (
        (
            "clients_per_round=3",
            r"clients_per_round=3 must be between 1 and num_clients=2, or",
        ),
        ("clients_per_round=0", r"clients_per_round=0 must be between 1"),
        (
            "clients_per_round=1 federation=deployment federation.min_clients=2",
            r"between federation.min_clients=2 and num_clients=2, or null for all$",
        ),
        ("clients_per_round=1 method=dense", r"method=dense sends each request to all clients; us"),
        (f"clients_per_round=1 {secure}", r"clients_per_round=1: a secure sum needs all clients"),
    )
    assert not not_refused(small, table)
