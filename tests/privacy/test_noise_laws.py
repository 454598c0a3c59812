"""The noise of every mechanism, seeded and from a secret: its law and scale.

The right law is rejected with probability 1e-6 for each sample; wrong scales are far below. Seeds
are fixed.
"""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.noise import SecureGenerator, noisy_sum
from fed_dpsd.privacy.votes import NoisyVotes
from tests.every import every

LEVEL = 1e-6
LAWS = {"gaussian": stats.norm, "laplace": stats.laplace}
STEP = DPSGD(1.0, sample_rate=0.5, steps=1, max_grad_norm=0.5, learning_rate=1.0)
COUNTS = DPSGD(
    7.0, sample_rate=1.0, steps=1, max_grad_norm=1.0, learning_rate=1.0, count_fraction=1
)


def seeded(seed):
    return np.random.Generator(np.random.PCG64(seed))


def secret(seed):
    return SecureGenerator(seed.to_bytes(32, "little"))


def alone(law, scale):
    return lambda rng: [noisy_sum(np.zeros((1, 20_000)), scale, law, rng)]


def on_zeros(mechanism):
    """Each class's noise, by itself."""
    k = mechanism.num_classes
    return lambda rng: (
        mechanism.add_noise(np.zeros((3, 5_000, k)), np.full((5_000, k), 1 / k, np.float32), rng).T
    )


def on_votes(law):
    votes = NoisyVotes(10, 3.0, law)
    ones = np.tile(np.eye(10)[0], (3, 2_000, 1))
    return lambda rng: [(votes.add_noise(ones, ones[0], rng) - ones.sum(0)).ravel()]


def step_of_network(count):
    """An empty shard, an empty batch and records of zero gradient: a step is noise alone."""

    def draw(rng):
        model = nn.Sequential(nn.Flatten(), nn.Linear(4_000, 2, bias=False))
        nn.init.zeros_(model[1].weight)
        labels = torch.zeros(count, dtype=torch.long)
        STEP.train(model, torch.zeros(count, 1, 1, 1, 4_000), labels, rng)
        return [model[1].weight.detach().double().numpy().ravel()]

    return draw


def step_of_linear_layer(count):
    """A layer of one class has no gradient."""

    def draw(rng):
        layer = nn.Linear(4_000, 1)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        labels = torch.zeros(count, dtype=torch.long)
        STEP.train(layer, torch.ones(count, 1, 4_000), labels, rng)
        assert layer.bias.item() != 0
        return [layer.weight.detach().double().numpy().ravel()]

    return draw


def class_counts(count):
    labels = np.arange(count) % 3
    exact = np.bincount(labels, minlength=8_000)
    return lambda rng: [COUNTS.count(labels, 8_000, rng) - exact]


@pytest.mark.slow
@every("source", [seeded, secret])
@every(
    ("draw", "law", "scale"),
    [
        *((alone(law, scale), law, scale) for law in LAWS for scale in (1e-4, 0.7, 3e9)),
        (on_zeros(NormalizedGradient(10, 7.0, bound=0.01)), "gaussian", 0.07),
        (on_zeros(NormalizedGradient(4, 7.0, 1.0, k=2, mask="private")), "gaussian", 7.0),
        *((on_votes(law), law, 3.0) for law in LAWS),
        *((step_of_network(count), "gaussian", 0.5) for count in (0, 5)),
        *((step_of_linear_layer(count), "gaussian", 0.5) for count in (0, 5)),
        *((class_counts(count), "gaussian", 7.0) for count in (0, 9)),
    ],
)
def test_noise_has_its_law_and_no_other(draw, law, scale, source, monkeypatch):
    """Zeros outside a private mask would reveal the teacher's choice, so all classes get noise."""
    monkeypatch.setattr(
        "fed_dpsd.privacy.dp_sgd.Adam", torch.optim.SGD
    )  # so that a step is the noisy sum

    def fits(sample, scale):
        return stats.kstest(sample, LAWS[law](scale=scale).cdf).pvalue > LEVEL

    samples = draw(source(0))
    assert len(samples)
    for sample in samples:
        assert fits(sample, scale)
        assert not fits(sample, scale * 2 / 3)
        assert not fits(sample, scale * 3 / 2)
