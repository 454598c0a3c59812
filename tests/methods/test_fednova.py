"""FedNova, as a plug-in writes it: a subclass of FedAVG with another average."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fed_dpsd.methods.fedavg import FedAVG, average, models_of, sizes_of
from fed_dpsd.methods.method import tensors_of
from fed_dpsd.models import load_vector, to_vector
from tests.methods.test_white_box import CLEAR
from tests.running import finish


@dataclass(frozen=True)
class FedNova(FedAVG):
    """Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020, arXiv 2007.07481, for SGD without momentum.

    Args:
        batch_size: that of the clients' local training, as in `${teacher.batch_size}`.
    """

    batch_size: int

    def aggregate(self, student, replies, counts, context):
        """Add the clients' mean change per step, times their mean number of steps."""
        if replies.request.kind == "weights":
            return super().aggregate(student, replies, counts, context)
        start, sizes = to_vector(student), np.array(sizes_of(replies, counts.by_client))
        steps = self.local_epochs * np.maximum(sizes // self.batch_size, 1)
        shares = sizes / sizes.sum()
        mean = average(models_of(replies), shares / steps)
        load_vector(student, start + (shares @ steps) * (shares / steps).sum() * (mean - start))


@pytest.mark.parametrize("batch_size", [32, 10_000])
def test_a_subclass_of_fedavg_decides_how_weights_are_combined(small, tmp_path, batch_size):
    """The control: clients that all take one step are averaged as by FedAVG."""
    settings = "method=fedavg", "rounds=2", f"teacher.batch_size={batch_size}", "teacher.epochs=1"
    experiment = small(*CLEAR, *settings)
    method = FedNova(**vars(experiment.method), batch_size=batch_size)
    finished = {}
    for name, each in (("fedavg", experiment.method), ("fednova", method)):
        federation, rounds = finish(replace(experiment, method=each), tmp_path / name)
        states = [tensors_of("student", round_.state.tensors) for round_ in rounds]
        finished[name] = [torch.cat([t.ravel() for t in state.values()]) for state in states]
    (start, by_fedavg), (same, by_fednova) = finished.values()
    assert torch.equal(start, same)
    sites = federation._sites.values()
    sizes = [site.sensitive_class_counts().sum() for site in sites]
    shares = [size / sum(sizes) for size in sizes]
    steps = [max(size // batch_size, 1) for size in sizes]
    request = experiment.public.request("train", 2, start.numpy())
    weights = [torch.from_numpy(site.retrain(request, 1)[0, :, 0]) for site in sites]
    moved = [p * (own - start) / tau for p, tau, own in zip(shares, steps, weights, strict=True)]
    mean_steps = sum(p * tau for p, tau in zip(shares, steps, strict=True))
    assert torch.allclose(by_fednova, start + mean_steps * sum(moved), atol=1e-5)
    assert torch.allclose(by_fednova, by_fedavg, atol=1e-5) == (batch_size == 10_000)
