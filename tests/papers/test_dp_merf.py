"""DP-MERF: what a record's part is, what leaves with which noise, and that images are learnt."""

import functools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from fed_dpsd.audits.conformance import audited_parts
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import one_run
from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.papers import dp_merf
from fed_dpsd.papers.dp_merf import DPMERF, SPACING, TURN
from fed_dpsd.privacy.accounting import best_bound
from fed_dpsd.streams import Streams
from tests.proofs import gaussian_delta

SMALL = {
    "generator_steps": 60,
    "classifier_steps": 60,
    "batch_size": 64,
    "latent_size": 4,
    "generator_width": 4,
    "generator_learning_rate": 0.02,
    "learning_rate": 0.01,
    "features": 200,
    "length_scale": 2.0,
    "count_fraction": 0.05,
}


def halves(count, seed=0):
    """(N, 1, 1, 8, 8) images that are bright on the left or on the right, with their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=count)
    images = np.zeros((count, 1, 1, 8, 8), np.float32)
    for image, label in zip(images, labels, strict=True):
        image[..., 4 * label : 4 * label + 4] = 0.8
    return torch.from_numpy(images), torch.from_numpy(labels)


def trained(mechanism, images, labels, rng=None, network="cnn"):
    teacher = initialise(lambda: CLASSIFIERS[network]((1, 8, 8), 2, 4), Streams(2).torch("model"))
    mechanism.train(teacher, images, labels, rng or Streams(0).numpy("training"))
    return teacher


def noise_seen(monkeypatch, module, train, scale, factor, check=lambda exact: None):
    """The noise of each of a module's sums while `train` runs, if it is `factor` times as much.

    The noise is in units of `scale`; `check` sees each exact sum.
    """
    seen, honest = [], module.noisy_sum

    def spy(values, own, law, rng):
        noisy, exact = honest(values, factor * own, law, rng), values.sum(0)
        check(exact)
        seen.append((noisy - exact) / scale)
        return noisy

    with monkeypatch.context() as patch:
        patch.setattr(module, "noisy_sum", spy)
        train()
    return seen


def p_value_of(seen):
    """That all noise follows the standard normal law."""
    return stats.kstest(np.concatenate([noise.ravel() for noise in seen]), "norm").pvalue


def test_a_records_part_is_at_most_one_its_own_and_sums_are_exact():
    """Whatever the batch, to the last bit; the control is a part computed in float32."""
    mechanism = DPMERF(noise_multiplier=1.0, **SMALL)
    rng = Streams(0).torch("test")
    images = (torch.rand((300, 3, 8, 8), generator=rng) * 255).round() / 255
    drawn = torch.randn((192, 100), generator=rng, dtype=torch.float64)
    frequencies = (drawn * TURN / (2 * math.pi * 255)).round()
    parts = mechanism.exact_features(images, frequencies)
    norms = parts.norm(dim=1)
    assert norms.max() <= 1
    assert norms.min() > 0.999
    assert torch.equal(parts / SPACING, (parts / SPACING).round())
    shuffled = parts[torch.randperm(300, generator=rng)]
    assert torch.equal(parts.sum(0), shuffled.sum(0))
    for size in (1, 2, 3, 7):
        alone = [mechanism.exact_features(each, frequencies) for each in images[1:].split(size)]
        assert torch.equal(torch.cat(alone), parts[1:])
    alone = torch.cat([dp_merf.fourier_features(image[None], frequencies) for image in images])
    assert not torch.equal(alone, dp_merf.fourier_features(images, frequencies))
    # The inner products are those of the kernel, within 6 standard errors of 100 cosines.
    sub = images[:40].flatten(1)
    kernel = torch.exp(-torch.cdist(sub, sub).square() / 2)
    scale = SMALL["count_fraction"] + (1 - SMALL["count_fraction"]) * kernel
    assert (parts[:40] @ parts[:40].T - scale).abs().max() < 6 / math.sqrt(100)


@pytest.mark.parametrize(("relation", "moved"), [("add_remove", 1), ("replace_one", 2)])
def test_its_epsilon_is_that_of_one_gaussian_mechanism(relation, moved):
    mechanism = DPMERF(noise_multiplier=3.74, **SMALL)
    proven = best_bound(mechanism.event("record", relation), 1e-5).epsilon
    assert (
        gaussian_delta(moved / 3.74, proven) <= 1e-5 < gaussian_delta(moved / 3.74, proven - 1e-4)
    )


def test_the_noise_has_its_law_and_half_of_it_is_found(monkeypatch):
    """The control is a sum with half the noise; p-values below 1e-6 fail."""
    images, labels = halves(50)
    mechanism = DPMERF(
        noise_multiplier=2.0, **SMALL | {"generator_steps": 1, "classifier_steps": 1}
    )

    def p_value(factor):
        train = functools.partial(trained, mechanism, images, labels)
        seen = noise_seen(monkeypatch, dp_merf, train, 2.0, factor)
        assert [noise.shape for noise in seen] == [(2, 201)]
        return p_value_of(seen)

    assert p_value(1.0) > 1e-6 > p_value(0.5)


def test_a_record_moves_the_released_sum_by_its_own_part_of_at_most_1(monkeypatch):
    """To the last bit, so a replaced record moves it by at most 2."""
    images, labels = halves(20)
    mechanism = DPMERF(
        noise_multiplier=1.0, **SMALL | {"generator_steps": 1, "classifier_steps": 1}
    )
    seen = []

    def spy(values, *_):
        seen.append(values.sum(0))
        return np.ones(values.shape[1:])

    monkeypatch.setattr(dp_merf, "noisy_sum", spy)
    for some in (slice(None), slice(1, None), slice(1)):
        trained(mechanism, images[some], labels[some])
    whole, others, own = seen
    assert np.array_equal(whole - others, own)
    assert 0.999 < np.linalg.norm(own) <= 1


def test_an_audit_says_that_it_does_not_know_the_noise(tmp_path):
    with pytest.raises(UserError, match="no attack knows the training's noise"):
        audited_parts(one_run(["method=dp_merf"], tmp_path))
