"""Learning without noise in the steps, on labels that may be private."""

import copy
import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from dp_accounting import LaplaceDpEvent

from fed_dpsd import storage
from fed_dpsd.client import learning
from fed_dpsd.client.learning import (
    ShardLearner,
    digest_of_shard,
    last_images,
    read_shard,
    sharing_batches,
    train,
)
from fed_dpsd.client.teachers import Teachers, make_teacher
from fed_dpsd.data.intake import Records
from fed_dpsd.models import inference
from fed_dpsd.models.inference import predict
from fed_dpsd.models.scattering import Scattering
from fed_dpsd.privacy.label_dp import LabelPrivate
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.privacy.training import Plain, Training, fixed_targets
from tests.every import every

CENTRAL = ("method=central", "answers=probabilities")


def weights(teacher):
    return torch.cat([parameter.detach().ravel() for parameter in teacher.parameters()])


def network(config, records):
    """A teacher, and its learner, whose batches are the same in every fit."""
    teacher = make_teacher(config, 0, 0)
    rng = functools.partial(torch.Generator().manual_seed, 0)
    return teacher, ShardLearner(teacher, records, config, lambda _: rng())


@every("name", ["cnn", "cnn_bn", "scattering"])
def test_each_fit_starts_again_and_only_its_records_and_targets_count(small, records, name):
    config = small(*CENTRAL, f"model.teacher={name}").config
    known, part = fixed_targets(records.labels), np.arange(20)
    once, first = network(config, records)
    first.fit(part, known)
    twice, second = network(config, records)
    second.fit(np.arange(60), fixed_targets(1 + 0 * records.labels))
    state = once.state_dict()
    assert not torch.equal(weights(twice), weights(once))
    second.fit(part, known)
    assert all(torch.equal(state[key], tensor) for key, tensor in twice.state_dict().items())


def test_a_fit_takes_its_epochs_and_each_has_every_record_once(small, records):
    settings = "teacher.epochs=3", "teacher.min_steps=1", "teacher.batch_size=20"
    seen, known = [], fixed_targets(records.labels)

    def targets(chosen, logits):
        seen.append(chosen)
        return known(chosen, logits)

    network(small(*CENTRAL, *settings).config, records)[1].fit(np.arange(60), targets)
    epochs = torch.cat(seen).reshape(3, 60)
    assert (epochs.sort(1).values == torch.arange(60)).all()
    assert not torch.equal(epochs[0], epochs[1])


def test_a_one_cycle_schedule_ends_at_a_rate_of_zero(small, records, monkeypatch):
    """Control: without it, the last step changes as much as others."""
    seen = []

    class Watched(torch.optim.SGD):
        def step(self, *args):
            seen.append(self.param_groups[0]["lr"])
            return super().step(*args)

    monkeypatch.setattr("fed_dpsd.client.learning.SGD", Watched)
    for one_cycle in ("true", "false"):
        seen.clear()
        settings = "teacher.momentum=0.9", "teacher.learning_rate=0.1", "teacher.min_steps=50"
        config = small(*CENTRAL, *settings, f"teacher.one_cycle={one_cycle}").config
        network(config, records)[1].fit(np.arange(60), fixed_targets(records.labels))
        assert len(seen) == 50
        if one_cycle == "true":
            assert max(seen) == pytest.approx(0.1)
            assert seen.index(max(seen)) == 9
            assert seen[0] < 0.01
            assert seen[-1] < 0.001
        else:
            assert set(seen) == {0.1}


def test_images_move_while_a_teacher_learns(small, records):
    learned = []
    for settings in ((), ("teacher.shift=1",), ("teacher.flip=true",)):
        teacher, learner = network(small(*CENTRAL, *settings).config, records)
        learner.fit(np.arange(60), fixed_targets(records.labels))
        learned.append(weights(teacher))
    assert not any(torch.equal(learned[0], other) for other in learned[1:])


@every(
    ("name", "momentum"),
    [
        ("mlp", "null"),
        ("cnn", "0.9"),
        ("cnn_bn", "null"),
        ("scattering", "null"),
    ],
)
def test_a_teacher_learns_on_another_device_than_its_images(small, records, name, momentum):
    """The meta device refuses, as a GPU does, to compute with what lies on the CPU."""
    overrides = (
        f"model.teacher={name}",
        f"teacher.momentum={momentum}",
        "teacher.min_steps=2",
    )
    config = small(*CENTRAL, *overrides).config
    meta, drawn = torch.device("meta"), torch.Generator().manual_seed(0)
    teacher = make_teacher(config, 0, 0)
    learner = ShardLearner(teacher, records, config, lambda _, rng=drawn: rng, meta)
    learner.fit(np.arange(60), fixed_targets(records.labels))
    assert {tensor.device.type for tensor in teacher.state_dict().values()} == {"meta"}
    learner._device = torch.device("cpu")  # the control: a batch that stays behind
    with pytest.raises(RuntimeError, match="meta"):
        learner.fit(np.arange(60), fixed_targets(records.labels))


def test_every_fit_has_batches_of_its_own(small, records):
    drawn = []
    config = small(*CENTRAL).config

    def draw(purpose):
        drawn.append(purpose)
        return torch.Generator().manual_seed(len(drawn))

    learner = ShardLearner(make_teacher(config, 0, 0), records, config, draw)
    for _ in range(3):
        learner.fit(np.arange(60), fixed_targets(records.labels))
    assert len(set(drawn)) == 3


def test_probabilities_are_those_of_the_last_fit(small, records):
    """An image's neighbours do not count, as they would in training mode."""
    config = small(*CENTRAL, "model.teacher=cnn_bn").config
    teacher, learner = network(config, records)
    learner.fit(np.arange(60), fixed_targets(records.labels))
    chosen = np.array([7, 3, 59])
    expected = predict(teacher, records.images[chosen], torch.device("cpu"))
    assert learner.probabilities(chosen) == pytest.approx(expected, abs=1e-6)


@dataclass(frozen=True)
class Blind(LabelPrivate):
    """Training that draws noise, and looks at no label."""

    name: ClassVar[str] = "blind"
    noisy: bool = False

    def event(self):
        return LaplaceDpEvent(1.0)

    def teach(self, learner, labels, rng):
        drawn = rng.random(len(labels)) if self.noisy else np.zeros(len(labels))
        learner.fit(np.arange(len(labels)), fixed_targets((4 * drawn).astype(np.int64)))


@every("noisy", [False, True])
@every("secret", [None, SecretStreams(bytes(32))])
def test_batches_follow_no_label_and_secret_noise_follows_all(small, records, noisy, secret):
    """A batch order that depends on labels would reveal them to anyone who has the seed."""
    config = small(*CENTRAL).config
    other = records.labels.copy()
    other[17] = (other[17] + 1) % 10
    trained = [
        Teachers(
            config,
            Blind(noisy),
            0,
            Records(records.images, labels),
            np.arange(60),
            secret,
        )
        for labels in (records.labels, other)
    ]
    one, two = (weights(teachers.models[0]) for teachers in trained)
    assert torch.equal(one, two) == (not noisy or secret is None)
    assert trained[0].identity != trained[1].identity


@dataclass(frozen=True)
class Halved(Training):
    """Plain training on a part of each shard."""

    name: ClassVar[str] = "halved"
    reads: ClassVar[str] = "images"
    part: int = 2

    def teach(self, learner, labels, rng):
        learner.fit(np.arange(len(labels) // self.part), fixed_targets(labels))


def test_a_training_of_ones_own_on_images_needs_only_its_class(small, records):
    """Controls: plain training on the same part, and on all records."""
    config, ids = small(*CENTRAL).config, np.arange(60)

    def trained(training, shard):
        teachers = Teachers(config, training, 0, shard, ids[: len(shard)])
        return weights(teachers.models[0]), teachers.identity

    half, own = trained(Halved(), records)
    assert torch.equal(half, trained(Plain(), records.take(ids[:30]))[0])
    whole, other = trained(Plain(), records)
    assert not torch.equal(half, whole)
    assert len({own, other, trained(Halved(3), records)[1]}) == 3  # they share no cached teacher


def test_an_empty_shard_has_no_teacher_as_with_a_plain_training(small, records):
    config = small(*CENTRAL, "teachers_per_client=8").config
    teachers = Teachers(config, Blind(), 0, records.take(np.arange(1)), np.arange(1))
    assert sum(teacher is None for teacher in teachers.models) == 7


@every(
    ("network", "records_at_once"),
    [("resnet9", 8), ("resnet9_gn", 8), ("resnet9", 1)],
)
def test_a_lone_record_or_batch_of_one_trains_like_any_other(
    small, records, network, records_at_once
):
    """An error of a normalisation layer would reveal that a shard has exactly one record."""
    config = small(
        *CENTRAL,
        *(f"model.teacher={network}", "model.teacher_width=1"),
        f"teacher.batch_size={records_at_once}",
    ).config
    some = records if records_at_once == 1 else records.take(np.arange(1))
    losses = train(make_teacher(config, 0, 0), some, config, torch.Generator())
    assert torch.stack(losses).isfinite().all()


@pytest.mark.parametrize("channels", [1, 3])
@every("training", ["training=plain", "training=dp_sgd", "training=dp_sgd training.unit=patient"])
def test_records_that_need_not_fit_in_memory_are_the_same(small, monkeypatch, training, channels):
    copies = ["training.copies=2"] if "dp_sgd" in training else []
    whole = small(*training.split(), *copies, "data.records_per_patient=3")
    images = np.random.default_rng(0).integers(0, 256, (300, channels, 8, 8), np.uint8)
    records = Records(images, np.arange(300) % 10, np.arange(300) // 7)
    layers = torch.nn.Sequential(torch.nn.Conv2d(channels, 2, 3), torch.nn.Flatten())
    teacher = inference.Classifier(layers, 72, 10)

    def read():
        chosen = records.take(np.arange(299)[::-1])
        digest = digest_of_shard("", copy.deepcopy(teacher), chosen, whole.training)
        return chosen.images, read_shard(teacher, chosen, whole.training)[1], digest

    images, inputs, digest = read()
    for module in (storage, inference):
        monkeypatch.setattr(module, "LARGE", 1)
    again = read()
    assert np.array_equal(images, again[0])
    assert torch.equal(inputs, again[1])
    assert inputs.stride() == again[1].stride()  # kernels depend on it
    assert digest == again[2]


@every("settings", ["training=plain", "training=dp_sgd training.copies=2"])
@every("safe", [True, False])
def test_shards_share_a_batch_if_an_images_features_are_its_own(
    small, records, monkeypatch, settings, safe
):
    """The inputs have the same bits, and four small shards need one batch."""
    experiment = small(*settings.split(), "model.teacher=scattering")
    training, teacher = experiment.training, make_teacher(experiment.config, 0, 0)
    key = (*teacher.features_key, records.images.shape[1:])
    monkeypatch.setattr(learning, "_safe_batches", {key: 128 if safe else 1})
    monkeypatch.setattr(inference, "_rows", OrderedDict())
    shards = [records.take(part) for part in np.split(np.arange(60), 4)]
    alone = [read_shard(teacher, shard, training)[1] for shard in shards]
    computed, features = [], teacher.backbone.forward
    monkeypatch.setattr(
        teacher.backbone, "forward", lambda images: computed.append(len(images)) or features(images)
    )
    with sharing_batches(image for shard in shards for image in last_images(shard, training)):
        shared = [read_shard(teacher, shard, training)[1] for shard in shards]
    assert all(map(torch.equal, shared, alone))
    apart = [1] * 120 if training.private else [128] * 4
    assert computed == ([128] if safe else apart)


def test_own_networks_share_no_batches(small, records):
    """Their features may depend on the rest of a batch, although they contain fixed ones."""
    experiment, images = small(), iter(records.images)
    backbone = torch.nn.Sequential(Scattering((1, 8, 8), 64), torch.nn.ReLU())
    with sharing_batches(images):
        read_shard(inference.Classifier(backbone, 64, 10), records, experiment.training)
        assert len(list(images)) == 60
        again = iter(records.images)
    with sharing_batches(again):  # the control: ours
        ours = inference.Classifier(backbone[0], 64, 10)
        read_shard(ours, records.take(np.arange(9)), experiment.training)
    assert not list(again)


@every("network", ["scattering", "mlp"])
def test_a_shard_without_patients_has_no_inputs(small, network):
    """A crash would reveal that it is empty."""
    settings = "training=dp_sgd", "training.unit=patient", "data.records_per_patient=3"
    experiment = small(*settings, f"model.teacher={network}")
    none = np.zeros(0, np.int64)
    records = Records(np.zeros((0, 1, 8, 8), np.uint8), none, none)
    teacher = make_teacher(experiment.config, 0, 0)
    _, inputs, labels = read_shard(teacher, records, experiment.training)
    assert len(inputs) == len(labels) == 0
    assert inputs.shape[1] == labels.shape[1] > 0
