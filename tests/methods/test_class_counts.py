"""Class counts: pooled odds equal the odds over all records, whatever a client has most of."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.experiment import test_split as split_of
from fed_dpsd.methods.class_counts import average_by_class, fetch_class_weights, pool_odds
from fed_dpsd.protocol import Absent, Replies
from fed_dpsd.server.diagnostics import diagnose
from fed_dpsd.streams import Streams
from tests.ledgers import entries_of
from tests.running import finish


def shifted_clients(seed=0):
    """Return posteriors under equal frequencies, and three clients' under their own ones."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (200, 4))
    posterior = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    parts = {0: [0.9, 0.1, 0.0, 0.3], 1: [0.1, 0.6, 0.2, 0.0], 2: [0.0, 0.3, 0.8, 0.7]}
    weights = {client: np.array(part) for client, part in parts.items()}
    own = {client: posterior * part for client, part in weights.items()}
    return posterior, {c: p / p.sum(1, keepdims=True) for c, p in own.items()}, weights


def test_pooled_odds_are_those_of_all_records_where_averages_are_not():
    posterior, answers, weights = shifted_clients()
    assert np.abs(pool_odds(answers, weights) - posterior).max() < 0.03
    assert np.abs(average_by_class(answers, weights) - posterior).mean() > 0.05
    assert np.abs(pool_odds(answers, weights) - posterior).mean() < 0.01


def test_a_client_that_is_sure_of_its_only_class_has_no_influence():
    posterior, answers, weights = shifted_clients()
    alone = pool_odds(answers, weights)
    answers[3] = np.eye(4)[[3] * len(posterior)]
    weights[3] = np.array([0, 0, 0, 1.0])
    assert np.abs(pool_odds(answers, weights) - alone).max() < 0.02
    assert (
        np.abs(average_by_class(answers, weights) - average_by_class(*shifted_clients()[1:])).max()
        > 0.2
    )


def test_a_noisy_teacher_of_few_records_has_less_influence_by_shares():
    """The control weights the same answers by the square roots of the shares."""
    posterior, answers, weights = shifted_clients()
    noise = np.random.default_rng(1).normal(0, 3, posterior.shape)
    noisy = posterior * np.exp(noise)
    answers[3], weights[3] = noisy / noisy.sum(1, keepdims=True), np.full(4, 0.01)

    def error(by_shares):
        return np.abs(pool_odds(answers, weights, by_shares) - posterior).mean()

    assert error(by_shares=True) < error(by_shares=False) / 3


def test_classes_that_nobody_has_get_no_mass():
    _, answers, weights = shifted_clients()
    unknown = {client: part * [1, 1, 1, 0] for client, part in weights.items()}
    pooled = pool_odds(answers, unknown)
    assert (pooled[:, 3] == 0).all()
    assert pooled.sum(1) == pytest.approx(np.ones(len(pooled)))
    nothing = {client: part * 0 for client, part in weights.items()}
    assert (pool_odds(answers, nothing) == 1 / 4).all()
    some = pool_odds({**answers, 3: answers[0]}, {**weights, 3: np.zeros(4)})
    assert np.isfinite(some).all()
    assert np.abs(some - pool_odds(answers, weights)).max() < 0.02


def test_labels_and_the_weighted_ensemble_follow_pooled_odds(small, tmp_path):
    """The control averages, from the same teachers and for the same images."""

    def labels_and_score(pooling):
        experiment = small(
            *("training=plain", "answers=probabilities", "partition.alpha=0.1"),
            *("rounds=1", f"method.pooling={pooling}"),
        )
        federation, (last,) = finish(experiment, tmp_path / pooling)
        weights = fetch_class_weights(federation, experiment.public)
        scores = diagnose(experiment, federation, weights, split_of(experiment).labels)
        return last.state.buffer[0].labels, scores["auroc"]["weighted_ensemble"]

    (odds, pooled), (mean, averaged) = labels_and_score("odds"), labels_and_score("mean")
    assert odds.sum(1) == pytest.approx(np.ones(len(odds)), abs=1e-5)
    assert np.abs(odds - mean).mean() > 0.01
    assert pooled != averaged


class Losing:
    """A federation that loses the second client's reply to the first request."""

    def __init__(self, federation):
        self.federation, self.asked = federation, []

    def each(self, request):
        self.asked.append(request.kind)
        replies = self.federation.each(request)
        lost = {1: Absent(0, "no answer")} if len(self.asked) == 1 else {}
        return Replies(replies.request, replies | lost)


@pytest.mark.parametrize(
    "method",
    [
        ("training=plain", "answers=probabilities"),
        ("method=dp_fedavg", "training=dp_sgd", "training.steps=1", "teacher.same_start=true"),
        ("method=fedavg", "training=plain", "teacher.same_start=true"),
    ],
    ids=["fed_dpsd", "dp_fedavg", "fedavg"],
)
def test_who_misses_the_request_for_counts_takes_part_from_its_first_round(small, tmp_path, method):
    """Bit for bit like a client that was there, for the same charges; a resumed run, too."""
    experiment = small("partition.alpha=0.1", "model=scattering", *method, "rounds=2")
    context, students, charged = experiment.public, [], []

    def seen(federation, finished):
        students.append([r.state.tensors for r in finished])
        ledgers = [site.ledger for site in federation._sites.values()]
        charged.append([[entry.digest for entry in entries_of(ledger)] for ledger in ledgers])

    federation, finished = finish(experiment, tmp_path / "there")
    seen(federation, finished)
    late, finished = finish(experiment, tmp_path / "late", Losing)
    seen(late.federation, finished)
    late.federation._lock.close()
    resumed = Losing(LocalFederation(experiment, tmp_path / "late"))
    state = replace(finished[0].state, buffer=finished[0].state.buffer[:1])
    server = experiment.method.server(resumed, context, Streams(0), state)
    seen(resumed.federation, [finished[0], *server])
    assert late.asked.count("counts") == resumed.asked.count("counts") == 2
    assert all(round_.refused == {} for round_ in finished)
    assert charged[0] == charged[1] == charged[2]
    for tensors in students[1:]:
        for mine, theirs in zip(tensors, students[0], strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
