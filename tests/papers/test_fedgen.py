"""FedGen: FedAVG at weight 0, a generator that learns, and a loss that reads no record."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fed_dpsd.accounts.card import plan_of
from fed_dpsd.client.learning import regularised
from fed_dpsd.errors import ProtocolError
from fed_dpsd.methods.class_counts import shares_among
from fed_dpsd.models import to_vector
from fed_dpsd.papers.fedgen import class_frequencies, class_shares
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.protocol import Response
from fed_dpsd.streams import Streams
from tests.client.conftest import records  # noqa: F401
from tests.client.test_site import make
from tests.ledgers import entries_of
from tests.methods.test_white_box import CLEAR, PRIVATE
from tests.running import context_of, finish, not_refused

FEDGEN = ("method=fedgen", "method.hidden_size=8", "method.generator_steps=5")
FEDGEN += ("method.latent_size=4",)


@pytest.mark.parametrize("training", [CLEAR, (*PRIVATE, "model.teacher=scattering")])
def test_at_weight_0_every_bit_is_fedavgs(small, tmp_path, training):
    """The control: at another weight they differ, except in the first round with given models."""
    runs = {}
    for weight in (None, 0, 5):
        method = [*FEDGEN, f"method.generator_weight={weight}"] if weight is not None else []
        experiment = small(*training, "rounds=2", *(method or ["method=fedavg"]))
        federation, finished = finish(experiment, tmp_path / str(weight))
        digests = [[e.digest for e in entries_of(s.ledger)] for s in federation._sites.values()]
        tensors = [
            torch.cat([t.flatten() for n, t in r.state.tensors.items() if n.startswith("student.")])
            for r in finished
        ]
        runs[weight] = tensors, digests
    (fedavg, _), (same, _), (other, _) = runs.values()
    assert len(fedavg) == 2
    assert all(map(torch.equal, fedavg, same))
    assert [torch.equal(*pair) for pair in zip(fedavg, other, strict=True)] == [True, False]
    one, other = (plan_of(small(*training, *m)) for m in (["method=fedavg"], FEDGEN))
    assert one == other  # nothing else leaves a client


def fedgen(small, *settings):
    return small(*CLEAR, *FEDGEN, *settings).method


def test_classifiers_count_by_their_part_of_each_class():
    counts = {0: np.array([3.0, 0, 0]), 1: np.array([1.0, 4, 0])}
    assert class_frequencies(counts, 3) == pytest.approx([0.5, 0.5, 0])
    assert class_frequencies({}, 3) == pytest.approx([1 / 3] * 3)
    expected = [[0.75, 0, 0.5], [0.125, 0.5, 0.25], [0.125, 0.5, 0.25]]
    assert class_shares({0: 1, 1: 2}, counts, 3) == pytest.approx(np.array(expected))
    assert class_shares({0: 1, 1: 1}, {}, 3) == pytest.approx(np.full((2, 3), 0.5))
    assert shares_among(counts, counts)[0] == pytest.approx([0.75, 0, 0.5])


def message(experiment, frequencies=None, cut=0, seed=0):
    """A request to train from the first weights, with an untrained generator."""
    context = context_of(experiment)
    teacher = context.make_teacher(0)
    generator = experiment.method.make_generator(
        teacher.classifier, Streams(seed).torch("generator")
    )
    classes = context.num_classes
    frequencies = np.full(classes, 1 / classes) if frequencies is None else frequencies
    numbers = np.concatenate([to_vector(teacher), to_vector(generator), frequencies])
    return context.request("train", 2, numbers.astype(np.float32)[: len(numbers) - cut])


def test_a_clients_loss_is_equation_5s_by_autograd(small):
    """Steps with the loss in the block are steps on the sum of both losses."""
    experiment = small(*CLEAR, *FEDGEN, "method.generator_weight=0.7")
    method, request = experiment.method, message(experiment)
    head = context_of(experiment).make_teacher(0).classifier
    size = len(to_vector(context_of(experiment).make_teacher(0)))
    rng = Streams(0).torch("test")
    inputs = torch.randn((32, head.in_features), generator=rng)
    labels = torch.randint(head.out_features, (32,), generator=rng)
    start = [parameter.detach().clone() for parameter in head.parameters()]

    def steps(in_block):
        layer = nn.Linear(head.in_features, head.out_features)
        with torch.no_grad():
            for parameter, first in zip(layer.parameters(), start, strict=True):
                parameter.copy_(first)
        optimiser = torch.optim.SGD(layer.parameters(), 0.1, 0.9)
        draws = Streams(0).torch("generated")
        loss = method.generated_loss(head, request.weights[size:], draws)
        with regularised(layer, loss if in_block else None):
            for _ in range(5):
                whole = functional.cross_entropy(layer(inputs), labels)
                if not in_block:
                    whole = whole + loss(layer.weight, layer.bias)
                optimiser.zero_grad()
                whole.backward()
                optimiser.step()
        return to_vector(layer)

    assert torch.allclose(steps(True), steps(False), atol=1e-6)
    assert not torch.allclose(steps(True), torch.cat([p.flatten() for p in start]), atol=1e-3)


@pytest.mark.parametrize("teacher", ["cnn", "scattering"])
def test_with_dp_sgd_the_loss_reads_no_record(small, records, monkeypatch, teacher):  # noqa: F811
    """With the same noisy sums, other records give the same weights; the generator counts."""
    experiment = small(*PRIVATE, *FEDGEN, f"model.teacher={teacher}")

    def weights(records, seed=0):
        site, _ = make(experiment, records)
        request = message(experiment, seed=seed)
        loss = experiment.method.generated_loss
        values = site._teachers.sensitive_retrained(request.weights, 2, "1", 1, 0.0, loss)
        assert values.shape == (1, site._teachers.size, 1)
        return values

    other = dataclasses.replace(records, labels=(records.labels + 1) % 10)
    assert not np.array_equal(weights(records), weights(other))

    monkeypatch.setattr(DPSGD, "_noisy", lambda self, total, *_: torch.ones(total.shape))
    assert np.array_equal(weights(records), weights(other))
    assert not np.array_equal(weights(records), weights(records, seed=1))


def test_another_weight_of_the_loss_is_another_private_training(small, records):  # noqa: F811
    """Otherwise two weights under the same noise would reveal records for one charge."""
    ledger = None
    for weight in (0.5, 1.0, 0.5):
        settings = f"method.generator_weight={weight}", "model.teacher=scattering"
        experiment = small(*PRIVATE, *FEDGEN, *settings)
        site, request = make(experiment, records, ledger)
        ledger = site.ledger
        assert isinstance(request(message(experiment)), Response)
    trainings = {e.digest for e in entries_of(ledger) if e.kind == "training"}
    assert len(trainings) == 2
    assert {e.training for e in entries_of(ledger) if e.kind == "train"} == trainings


def test_a_message_that_does_not_fit_is_refused_and_costs_nothing(small, records):  # noqa: F811
    experiment = small(*PRIVATE, *FEDGEN)
    site, request = make(experiment, records)
    few = len(message(experiment).weights) - site._teachers.size
    for wrong in (
        message(experiment, cut=1),
        message(experiment, cut=few),
        message(experiment, frequencies=np.zeros(10)),
        message(experiment, frequencies=np.array([-1.0, *[1.0] * 9])),
    ):
        with pytest.raises(ProtocolError, match="this client was sent"):
            request(wrong)
    assert not entries_of(site.ledger)


def test_impossible_settings_are_named(small):
    table = [
        (f"method.generator_weight={value}", "method.generator_weight=.* must be")
        for value in (-1.0, math.nan)
    ]
    table += [
        (f"method.{name}=0", f"method.{name}=0.* must be")
        for name in (
            *("generator_steps", "latent_size", "hidden_size", "batch_size"),
            "generator_learning_rate",
        )
    ]
    table += [("method.diversity_weight=-1", "method.diversity_weight=-1.* must be")]
    assert not not_refused(small, table, *CLEAR, "method=fedgen")
