"""FedProx: FedAVG at weight 0, nearer to the start above 0, and as private as FedAVG."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from fed_dpsd.client.learning import added_loss
from fed_dpsd.errors import ProtocolError
from fed_dpsd.models import to_vector
from fed_dpsd.privacy.dp_sgd import DPSGD
from tests.client.conftest import records  # noqa: F401
from tests.client.test_site import make
from tests.ledgers import entries_of
from tests.methods.test_white_box import CLEAR, PRIVATE
from tests.running import finish


@pytest.mark.parametrize("training", [CLEAR, (*PRIVATE, "model.teacher=scattering")])
def test_at_weight_0_every_bit_is_fedavgs(small, tmp_path, training):
    """The control: at another weight they differ, except in the first round with given models."""
    runs = {}
    for name in ("fedavg", "fedprox method.proximal_weight=0", "fedprox method.proximal_weight=5"):
        experiment = small(*training, "rounds=3", *f"method={name}".split())
        federation, finished = finish(experiment, tmp_path / name[-1])
        digests = [[e.digest for e in entries_of(s.ledger)] for s in federation._sites.values()]
        tensors = [list(round_.state.tensors.values()) for round_ in finished]
        runs[name[-1]] = [torch.cat([t.flatten() for t in each]) for each in tensors], digests
    (fedavg, _), (same, _), (other, _) = runs.values()
    assert len(fedavg) == 3
    assert all(map(torch.equal, fedavg, same))
    assert [torch.equal(*pair) for pair in zip(fedavg, other, strict=True)] == [True, False, False]
    one, other = (small(*training, f"method={name}").plan for name in ("fedavg", "fedprox"))
    assert one == other


def test_a_step_with_the_proximal_term_is_a_step_on_the_sum_of_both_losses(small):
    """Equation 2 of arXiv 1812.06127, by autograd; another network is left alone."""
    rng = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(32, 5, generator=rng), torch.randn(32, 3, generator=rng)
    first, other = nn.Linear(5, 3), nn.Linear(5, 3)

    def steps(model, term=0.0):
        start = to_vector_of(model).detach()
        optimiser = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        for _ in range(5):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss = loss + term / 2 * (to_vector_of(model) - start).square().sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return to_vector_of(model).detach()

    by_autograd, free = steps(copy.deepcopy(first), 0.7), steps(copy.deepcopy(first))
    alone = steps(copy.deepcopy(other))
    pulled = copy.deepcopy(first)
    method = small(*CLEAR, "method=fedprox", "method.proximal_weight=0.7").method
    with added_loss(pulled, method.proximal_term):
        assert torch.allclose(steps(pulled), by_autograd, atol=1e-6)
        assert torch.equal(steps(other), alone)
    assert not torch.allclose(by_autograd, free, atol=1e-3)
    assert torch.equal(steps(copy.deepcopy(first)), free)  # and no trace of it remains


def to_vector_of(model):
    return torch.cat([parameter.ravel() for parameter in model.parameters()])


def retraining(experiment):
    """A request to train from the first weights."""
    context = experiment.public
    return context.request("train", 2, to_vector(context.make_teacher(0)).numpy())


def test_clients_stay_nearer_to_the_model_they_are_sent(small, records):  # noqa: F811
    away = []
    for weight in (0, 1, 10):
        settings = "method=fedprox", f"method.proximal_weight={weight}"
        experiment = small(*CLEAR, *settings, "teacher.momentum=0", "teacher.learning_rate=0.05")
        site, _ = make(experiment, records)
        request = retraining(experiment)
        weights = site.retrain(request, 40, experiment.method.proximal_term)
        away.append(np.linalg.norm(weights[0, :, 0] - request.weights))
    assert away[0] > 1.1 * away[1] > 1.1 * 1.1 * away[2] > 0


@pytest.mark.parametrize("teacher", ["cnn", "scattering"])
def test_another_pull_is_another_private_training_with_noise_of_its_own(small, records, teacher):  # noqa: F811
    """Otherwise two weights under the same noise would reveal records for one charge."""
    ledger, sent = None, {}
    for weight in (0, 1, 2, 1):
        settings = "method=fedprox", f"method.proximal_weight={weight}", f"model.teacher={teacher}"
        experiment = small(*PRIVATE, *settings)
        site, request = make(experiment, records, ledger)
        ledger = site.ledger
        response = request(retraining(experiment))
        assert weight not in sent or np.array_equal(sent[weight], response.values)
        sent[weight] = response.values
    trainings = {e.digest for e in entries_of(ledger) if e.kind == "training"}
    assert len(trainings) == 3
    assert {e.training for e in entries_of(ledger) if e.kind == "train"} == trainings


@pytest.mark.parametrize("teacher", ["cnn", "scattering"])
def test_with_dp_sgd_the_term_reads_no_record(small, records, monkeypatch, teacher):  # noqa: F811
    """With the same noisy sums, other records give the same weights; the term's weight counts."""

    def weights(records, weight=1):
        settings = "method=fedprox", f"method.proximal_weight={weight}", f"model.teacher={teacher}"
        experiment = small(*PRIVATE, *settings)
        site, _ = make(experiment, records)
        return site.retrain(retraining(experiment), 1, experiment.method.proximal_term)

    other = dataclasses.replace(records, labels=(records.labels + 1) % 10)
    assert not np.array_equal(weights(records), weights(other))

    monkeypatch.setattr(DPSGD, "_noisy", lambda self, total, *_: torch.ones(total.shape))
    assert np.array_equal(weights(records), weights(other))
    assert not np.array_equal(weights(records), weights(records, weight=2))


def test_a_message_that_does_not_fit_is_refused_and_costs_nothing(small, records):  # noqa: F811
    experiment = small(*PRIVATE, "method=fedprox")
    site, request = make(experiment, records)
    right = retraining(experiment)
    with pytest.raises(ProtocolError, match=f"weights instead of {len(right.weights)}"):
        request(dataclasses.replace(right, weights=right.weights[:-1]))
    assert not entries_of(site.ledger)
