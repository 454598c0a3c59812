"""Linear teachers of many shards, trained at once."""

import dataclasses
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from fed_dpsd.client import shards, teachers
from fed_dpsd.client.learning import batches_of, make_optimiser, number_of_steps
from fed_dpsd.client.shards import SLOTS, Shard, Slots, slots_agree, train_together
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.data.intake import Records
from fed_dpsd.errors import Diverged
from fed_dpsd.experiment import load_data
from fed_dpsd.models import to_vector
from tests.every import every

PATE = ("model.teacher=scattering", "teachers_per_client=40", "teacher.batch_size=4")
PATE += ("teacher.min_steps=3",)


def shard(settings, count, seed):
    rng = torch.Generator().manual_seed(seed)
    layer = torch.nn.Linear(20, 10)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(10, 20, generator=rng))
        layer.bias.zero_()
    inputs = torch.randn(count, 20, generator=rng)
    labels = torch.randint(10, (count,), generator=rng)
    return Shard(layer, inputs, labels, rng)


def alone(one, settings):
    """Train a shard step by step; return the losses."""
    optimiser, losses = make_optimiser(one.layer, settings), []
    steps = range(number_of_steps(len(one.labels), settings))
    batches = batches_of(torch.arange(len(one.labels)), 4, one.rng)
    for _, chosen in zip(steps, batches, strict=False):
        loss = torch.nn.functional.cross_entropy(one.layer(one.inputs[chosen]), one.labels[chosen])
        losses.append(loss.detach())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return losses


@every("optimiser", ["teacher.momentum=null", "teacher.momentum=0.9 teacher.weight_decay=0.001"])
def test_a_shard_learns_what_it_learns_alone(small, optimiser):
    """Shards of 1 to 30 records, with different numbers of steps."""
    settings = small(*optimiser.split(), "teacher.batch_size=4", "teacher.epochs=4").config.teacher
    sizes = [1, 3, 4, 9, 30]
    assert len({number_of_steps(size, settings) for size in sizes}) > 1
    together, apart = ([shard(settings, n, n) for n in sizes] for _ in range(2))
    losses = train_together(together, settings)
    for one, other, own in zip(together, apart, losses, strict=True):
        before = other.layer.weight.detach().clone()
        expected = alone(other, settings)
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)
        for name, parameter in one.layer.named_parameters():
            torch.testing.assert_close(
                parameter, other.layer.get_parameter(name), rtol=0, atol=1e-4
            )
        assert (other.layer.weight - before).abs().max() > 0.01


def test_a_shard_ends_with_the_same_bits_in_every_slot_and_among_any_others(small):
    settings = small("teacher.batch_size=4").config.teacher
    assert slots_agree(shard(settings, 4, 0).layer, settings)
    every_one = [shard(settings, 2 + n % 9, n) for n in range(SLOTS)]
    train_together(every_one, settings)
    for own, order in ((30, (30, 3)), (7, (3, 7)), (19, (3, 19, 4))):
        few = {n: shard(settings, 2 + n % 9, n) for n in order}
        few[3].inputs.mul_(torch.inf)  # even if another one's records are not finite
        train_together(list(few.values()), settings)
        assert torch.equal(few[own].layer.weight, every_one[own].layer.weight)
        assert torch.equal(few[own].layer.bias, every_one[own].layer.bias)


@every("rate", [1e-10, 0.002])
@every("optimiser", ["null", "0.9"])
def test_slots_that_depend_on_one_another_are_found(small, monkeypatch, rate, optimiser):
    """A millionth of another slot's inputs is added; at a small rate, no weight shows it."""
    momentum = f"teacher.momentum={optimiser}"
    settings = small("teacher.batch_size=4", momentum, f"teacher.learning_rate={rate}").config
    layer, losses = shard(settings.teacher, 4, 0).layer, Slots.losses
    monkeypatch.setattr(shards, "_agree", {})
    assert slots_agree(layer, settings.teacher)

    def mixed(self, inputs, *others):
        return losses(self, inputs + 1e-6 * inputs.roll(1, 0), *others)

    monkeypatch.setattr(shards, "_agree", {})
    monkeypatch.setattr(Slots, "losses", mixed)
    assert not slots_agree(layer, settings.teacher)


@pytest.fixture
def make(small):
    """Makes the teachers of 300 digits; one image may be inverted."""

    def teachers_of(*settings, changed=None):
        experiment = small(*PATE, *settings)
        config = experiment.config
        records = load_data(config.data, config.cache).train.take(np.arange(300))
        images = records.images.copy()
        if changed is not None:
            images[changed] = 255 - images[changed]
        ids = np.arange(300)
        every_one = Teachers(config, experiment.training, 0, Records(images, records.labels), ids)
        return every_one, Path(config.cache) / "teachers"

    return teachers_of


def differing(one, other):
    pairs = zip(one.models, other.models, strict=True)
    return sum(not torch.equal(to_vector(a), to_vector(b)) for a, b in pairs if a and b)


def test_a_changed_record_changes_one_of_many_teachers(make):
    """The basis of the record-level guarantee, also if all are trained again."""
    before, cache = make()
    shutil.rmtree(cache, ignore_errors=True)
    assert before._together
    assert differing(before, make()[0]) == 0  # read from the cache
    shutil.rmtree(cache)
    assert differing(before, make(changed=17)[0]) == 1


def test_many_teachers_are_those_that_are_trained_one_by_one(make, monkeypatch):
    """With full batches to the last bit. Some of 100 shards are empty."""
    together, cache = make("teachers_per_client=100")
    shutil.rmtree(cache, ignore_errors=True)
    trained = together.models
    shutil.rmtree(cache, ignore_errors=True)
    monkeypatch.setattr(teachers, "slots_agree", lambda *_: False)
    monkeypatch.setattr(teachers, "train_together", None)
    apart, _ = make("teachers_per_client=100")
    same = []
    for one, other, records in zip(trained, apart.models, apart._shards, strict=True):
        if not len(records):
            assert one is None
            assert other is None
            continue
        weights = to_vector(one), to_vector(other)
        torch.testing.assert_close(*weights, rtol=0, atol=1e-4)
        if len(records) >= 4:
            same.append(torch.equal(*weights))
    assert all(same)
    assert 10 < len(same) < 90


def test_a_diverging_teacher_among_many_is_named_and_not_kept(make):
    diverging, cache = make("teacher.learning_rate=1e30", "teacher.weight_decay=1e30")
    shutil.rmtree(cache, ignore_errors=True)
    with pytest.raises(Diverged, match="client 0's teacher 0 "):
        diverging.models  # noqa: B018
    assert not list(cache.glob("*"))


def test_a_run_that_stopped_or_lost_teachers_ends_with_the_same(make):
    whole, _ = make()
    names = [whole._cached(number) for number, teacher in enumerate(whole.models) if teacher]
    for lost in names[3:8]:
        lost.unlink()
    names[0].write_bytes(b"damaged")
    again, _ = make()
    assert differing(whole, again) == 0
    assert all(again.models)


@every(
    "settings",
    ["teacher.one_cycle=true", "teachers_per_client=15", "training=dp_sgd training.steps=1"],
)
def test_other_teachers_are_trained_one_by_one(make, monkeypatch, settings):
    computed = Counter()
    train = teachers.train_together
    monkeypatch.setattr(
        teachers, "train_together", lambda *args: computed.update(group=1) or train(*args)
    )
    first, cache = make()
    shutil.rmtree(cache, ignore_errors=True)
    assert first.models
    assert computed.pop("group") == 2  # of 32 and 8
    assert make(*settings.split())[0].models
    assert not computed


def test_a_hospitals_teachers_are_trained_one_by_one(make):
    """So that its proof needs no check of kernels; a simulation is the control."""
    hospital, simulated = make()[0], make()[0]
    config = simulated._config
    federation = dataclasses.replace(config.federation, simulation=False)
    hospital._config = dataclasses.replace(config, federation=federation)
    assert (hospital._together, simulated._together) == (False, True)
