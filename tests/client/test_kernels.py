"""Noise and charges follow what a mechanism reads: other kernels compute other features."""

import dataclasses
import hashlib
import hmac

import numpy as np
import pytest
import torch

from fed_dpsd.accounts.account import Account
from fed_dpsd.accounts.ledger import MemoryLedger
from fed_dpsd.client.site import Site
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import load_data
from fed_dpsd.models import classifiers, fixed_features
from fed_dpsd.models.fixed_features import FixedFeatures
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.noise import SecureGenerator
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.protocol import Request
from tests.client.conftest import SECRET
from tests.ledgers import entries_of

FIXED = ("training=dp_sgd", "training.steps=2", "model=scattering", "answers=probabilities")
NETWORK = (*FIXED[:2], "model=cnn", FIXED[3])


def other_features(patch):
    """A kernel that rounds one number of a batch otherwise, by its last bit."""
    features = FixedFeatures._features

    def nudged(self, images):
        found = features(self, images).clone()
        found[0, 0] = torch.nextafter(found[0, 0], torch.tensor(torch.inf))
        return found

    patch.setattr(FixedFeatures, "_features", nudged)
    fixed_features._remembered.cache_clear()


def other_convolutions(patch):
    """The same for a network that learns."""
    forward = classifiers.Classifier.forward

    def nudged(self, images):
        return forward(self, images) * (1 + 2.0**-22)

    patch.setattr(classifiers.Classifier, "forward", nudged)


def unkeyed(self, values, scale, law):
    """The exact sampler as it was: its draw depends on the key alone."""
    spacing = 2.0 ** (np.ceil(np.log2(scale)) - 26)
    units = int(np.ceil(scale / spacing))
    sensitive = np.trunc(np.asarray(values, np.float64) / spacing).sum(axis=0)
    return (sensitive + self._gaussian(units, sensitive.size).reshape(sensitive.shape)) * spacing


@pytest.fixture
def drawn(monkeypatch):
    """All noise that training draws, as arrays."""
    noise, noisy_sum = [], SecureGenerator.noisy_sum

    def watched(self, values, scale, law):
        noisy = noisy_sum(self, values, scale, law)
        noise.append(noisy - np.asarray(values, np.float64).sum(0))
        return noisy

    monkeypatch.setattr(SecureGenerator, "noisy_sum", watched)
    return noise


def site_of(experiment, cache, ledger, secret=SECRET):
    config = dataclasses.replace(experiment.config, cache=str(cache))
    records = load_data(config.data, experiment.config.cache).train.take(np.arange(40))
    plan = experiment.plan
    plan = Plan(plan.training, plan.stages * 4, plan.trainings * 4)
    account = Account(ledger, config.privacy, plan, "run")
    ids = np.arange(len(records))
    return Site(
        *(config, experiment.training, experiment.answers, 0, records, ids, None, account),
        secret=secret,
    )


def train(experiment, cache, ledger, drawn):
    """Train a client's teacher as its site does; return its noise and its weights."""
    drawn.clear()
    site = site_of(experiment, cache, ledger)
    weights = site._paid_teachers().sensitive_weights()
    return np.concatenate([each.ravel() for each in drawn] or [np.zeros(0)]), weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "kernel"), [(FIXED, other_features), (NETWORK, other_convolutions)]
)
def test_another_kernel_draws_other_noise_and_is_charged(
    small, tmp_path, drawn, monkeypatch, settings, kernel
):
    ledger, experiment = MemoryLedger(), small(*settings)
    noise, weights = train(experiment, tmp_path / "a", ledger, drawn)
    again, same = train(experiment, tmp_path / "b", ledger, drawn)
    assert (noise == again).all()  # the same kernel draws the same noise, for one charge
    assert (weights == same).all()
    assert len(entries_of(ledger)) == 1
    kernel(monkeypatch)
    other, _ = train(experiment, tmp_path / "c", ledger, drawn)
    assert len(other) == len(noise)
    assert (np.abs(other - noise) > 1e-6).mean() > 0.99
    assert [entry.kind for entry in entries_of(ledger)] == ["training"] * 2


@pytest.mark.parametrize(
    ("settings", "kernel"), [(FIXED, other_features), (NETWORK, other_convolutions)]
)
@pytest.mark.slow
def test_seeded_training_draws_the_same_noise_whatever_the_kernel(
    small, tmp_path, monkeypatch, settings, kernel
):
    """Adam's two steps move a weight by up to 0.04; secret noise moves it elsewhere."""
    experiment, apart = small(*settings), {}
    for secret in (None, SECRET):
        sites = [site_of(experiment, tmp_path / "a", MemoryLedger(), secret)]
        weights = [sites[0]._paid_teachers().sensitive_weights()]
        with monkeypatch.context() as patch:
            kernel(patch)
            other = site_of(experiment, tmp_path / "b", MemoryLedger(), secret)
            weights.append(other._paid_teachers().sensitive_weights())
        fixed_features._remembered.cache_clear()
        apart[secret] = np.abs(weights[0] - weights[1]).mean()
    assert apart[None] < 1e-5
    assert apart[SECRET] > 1e-2


def test_a_kept_teacher_is_free_whatever_the_kernel(small, tmp_path, drawn, monkeypatch):
    """It was charged when it was trained, and nothing is drawn again, unless it is retrained."""
    ledger, experiment = MemoryLedger(), small(*FIXED)
    noise, weights = train(experiment, tmp_path, ledger, drawn)
    further = Request.without_images("train", (1, 8, 8), 10, 2, weights[0, :, 0])
    before = site_of(experiment, tmp_path, ledger)._retraining(further)
    other_features(monkeypatch)
    assert site_of(experiment, tmp_path, ledger)._retraining(further) != before
    nothing, same = train(experiment, tmp_path, ledger, drawn)
    assert len(noise) > len(nothing) == 0
    assert (weights == same).all()
    assert len(entries_of(ledger)) == 1


def test_a_kept_teacher_that_goes_is_not_trained_by_another_kernel(
    small, tmp_path, drawn, monkeypatch
):
    """It would be a second training for one charge; a site that starts again is charged."""
    ledger, experiment = MemoryLedger(), small(*FIXED)
    train(experiment, tmp_path, ledger, drawn)
    other_features(monkeypatch)
    load = Teachers._load_or_train

    def gone(self, shard):
        self._cached(shard).unlink()
        return load(self, shard)

    with monkeypatch.context() as patch:
        patch.setattr(Teachers, "_load_or_train", gone)
        with pytest.raises(
            UserError, match="is missing, and this machine would not train the teacher"
        ):
            train(experiment, tmp_path, ledger, drawn)
    assert not drawn
    train(experiment, tmp_path, ledger, drawn)
    assert len(entries_of(ledger)) == 2


@pytest.mark.slow
@pytest.mark.ci
def test_a_teacher_that_another_machine_puts_in_its_place_is_not_taken_for_the_one_that_was_paid(
    small, tmp_path, drawn, monkeypatch
):
    """Two machines share a cache; the other one writes when this one has found its own teacher."""
    experiment, other = small(*FIXED), tmp_path / "other"
    ledger = MemoryLedger()
    _, weights = train(experiment, tmp_path / "a", ledger, drawn)
    with monkeypatch.context() as patch:
        other_features(patch)
        _, others = train(experiment, other, MemoryLedger(), drawn)
    fixed_features._remembered.cache_clear()
    assert (weights != others).any()
    (written,) = (other / "teachers").glob("*.safetensors")
    recorded = Teachers._recorded

    def replaced(self, shard):
        found = recorded(self, shard)
        written.replace(self._cached(shard))
        return found

    monkeypatch.setattr(Teachers, "_recorded", replaced)
    _, same = train(experiment, tmp_path / "a", ledger, drawn)
    assert not written.exists()
    assert (weights == same).all()
    assert len(entries_of(ledger)) == 1


@pytest.mark.slow
@pytest.mark.ci
def test_control_a_digest_of_the_records_alone_shows_what_noise_hides(
    small, tmp_path, drawn, monkeypatch
):
    """The old behaviour: one charge, equal noise, and a noise-free difference."""
    monkeypatch.setattr(Teachers, "_input", lambda self, shard: self.keys[shard])
    ledger, experiment = MemoryLedger(), small(*FIXED)
    sums = []

    def seen(self, values, scale, law):
        noisy = unkeyed(self, values, scale, law)
        sums.append((noisy, noisy - np.asarray(values, np.float64).sum(0)))
        return noisy

    monkeypatch.setattr(SecureGenerator, "noisy_sum", seen)
    train(experiment, tmp_path / "a", ledger, drawn)
    first = [noise for _, noise in sums]
    sums.clear()
    other_features(monkeypatch)
    train(experiment, tmp_path / "b", ledger, drawn)
    assert len(entries_of(ledger)) == 1
    assert all(
        np.abs(one - other).max() < 1e-5 for one, (_, other) in zip(first, sums, strict=True)
    )


def test_equal_keys_add_other_noise_to_other_values():
    key, values = hmac.digest(bytes(32), b"key", hashlib.sha256), np.zeros((1, 200))
    noise = SecureGenerator(key).noisy_sum(values, 1.0, "gaussian")
    assert (SecureGenerator(key).noisy_sum(values, 1.0, "gaussian") == noise).all()
    moved = values + 2.0**-20
    other = SecureGenerator(key).noisy_sum(moved, 1.0, "gaussian") - moved.sum(0)
    assert (np.abs(other - noise) > 1e-6).mean() > 0.98  # equal by chance: about 4e-7 for each
    assert abs(np.corrcoef(noise, other)[0, 1]) < 0.3  # 4 standard deviations
    one = SecureGenerator(key)
    first = one.noisy_sum(values, 1.0, "gaussian")
    assert (one.noisy_sum(values, 1.0, "gaussian") != first).any()  # draws of a stream differ


def test_an_older_ledger_answers_other_values_with_other_noise(small):
    """A restored state forgets an answer; the same noise would show how the values changed."""
    experiment = small("answers=gradient", "training=plain")
    mechanism = NormalizedGradient(10, 4.0, 1.0)
    predictions = np.full((3, 10), 0.1, np.float32)
    request = Request(1, np.zeros((3, 1, 8, 8), np.uint8), predictions)

    def answer(sensitive):
        data = load_data(experiment.config.data, experiment.config.cache).train
        account = Account(MemoryLedger(), experiment.config.privacy, experiment.plan, "run")
        site = Site(
            *(experiment.config, experiment.training, mechanism, 0, data.take(np.arange(5))),
            *(np.arange(5), None, account),
            secret=SECRET,
        )
        bounded = mechanism.constrain_sensitivity(sensitive[0], predictions)
        return site.release(mechanism, sensitive, request).values - bounded

    one = np.eye(10)[None, :3]
    assert (answer(one) == answer(one)).all()
    assert np.abs(answer(one) - answer(-one)).max() > 0.1
