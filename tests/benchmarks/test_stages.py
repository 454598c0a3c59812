"""The clock of stages and the count of the teachers' operations, which change nothing else."""

import numpy as np
import pytest
import torch

from fed_dpsd.benchmarks import stages
from fed_dpsd.benchmarks.stages import PASSES, STAGES, Clock, matmul_peak, timed
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.data.datasets import Split
from fed_dpsd.models.fixed_features import FixedFeatures
from fed_dpsd.models.inference import Images


def test_time_of_an_inner_stage_counts_for_it_alone(monkeypatch):
    moments = iter([0, 1, 3, 7, 12, 20])
    monkeypatch.setattr(stages.time, "perf_counter", lambda: next(moments))
    clock = Clock()
    with clock.stage("outer"):
        with clock.stage("inner"):
            assert clock.now == "inner"
        with pytest.raises(ValueError), clock.stage("inner"):
            raise ValueError
    assert clock.now == ""
    assert clock.seconds == {"outer": 1 + 4 + 8, "inner": 2 + 5}


def test_every_function_is_its_owners_again_after_the_block():
    before = [getattr(owner, name) for _, owner, name in STAGES]
    features = FixedFeatures._features
    with timed(Clock()):
        assert not [f for (_, o, n), f in zip(STAGES, before, strict=True) if getattr(o, n) is f]
    assert [getattr(owner, name) for _, owner, name in STAGES] == before
    assert FixedFeatures._features is features


@pytest.fixture
def client(small):
    """Build the teachers of a client with its own 40 records."""

    def make(number, *overrides):
        config = small("teacher.min_steps=1", *overrides).config
        rng = np.random.default_rng(number)
        images = rng.integers(0, 256, (40, 1, 8, 8), np.uint8)
        records = Split(images, rng.integers(0, 10, 40))
        training = small(*overrides).training
        return Teachers(config, training, number, records, np.arange(40))

    return make


def test_operations_of_answers_are_those_of_the_networks(client):
    """Of a pass of `cnn` of width 4, by hand: two convolutions of 3x3 and a linear layer."""
    a_pass = 2 * (9 * 4 * 8 * 8 + 4 * 9 * 8 * 4 * 4 + 8 * 2 * 2 * 10)
    clock = Clock()
    with timed(clock) as passes:
        assert passes.operations() == 0
        for number, count in ((0, 20), (1, 5)):
            images = Images(np.zeros((count, 1, 8, 8), np.uint8))
            client(number).sensitive_probabilities(images)
    assert passes.operations() == 25 * a_pass
    assert set(clock.seconds) == {PASSES, "teachers"}


def test_fixed_features_of_an_image_count_once_for_all_clients(client):
    def operations(clients):
        drawn = np.random.default_rng(clients).integers(0, 256, (16, 1, 8, 8), np.uint8)
        with timed(Clock()) as passes:
            for number in range(clients):
                client(number, "model=scattering").sensitive_probabilities(Images(drawn))
        return passes.operations()

    one, three = operations(1), operations(3)
    linear = 16 * 2 * 10 * client(0, "model=scattering").models[0].classifier.in_features
    assert three - one == 2 * linear
    assert one > 2 * linear  # the features are most of it


def test_the_peak_of_matrix_products_is_a_rate():
    assert 1e6 < matmul_peak(torch.device("cpu"), 64, times=2) < 1e15
