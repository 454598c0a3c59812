"""Trainings that read records through noisy sums alone: what reaches a teacher, what it learns."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fed_dpsd.models import to_vector
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.papers.dp_gan import DPGAN
from fed_dpsd.papers.dp_merf import DPMERF
from fed_dpsd.papers.gep import GEP
from fed_dpsd.papers.gs_wgan import GSWGAN
from fed_dpsd.streams import Streams
from tests.papers import test_dp_gan, test_dp_merf, test_gep, test_gs_wgan
from tests.papers.test_dp_merf import halves, trained
from tests.papers.test_taught_generative import KINDS, made

QUICK = {"generator_steps": 2, "classifier_steps": 2}
LONG = {"noise_multiplier": 0.01, "generator_steps": 80, "classifier_steps": 40, "batch_size": 32}
# The mechanism, what adds its noise, and settings of a few steps and of learning from N records.
TRAININGS = {
    "dp_gan": (
        partial(DPGAN, **test_dp_gan.SMALL),
        *("privacy.dp_sgd.noisy_sum", QUICK, {"noise_multiplier": 0.2}, 100),
    ),
    "dp_merf": (
        partial(DPMERF, **test_dp_merf.SMALL),
        *("papers.dp_merf.noisy_sum", QUICK, {}, 400),
    ),
    "gs_wgan": (
        partial(GSWGAN, **test_gs_wgan.SMALL),
        *("papers.gs_wgan.noisy_sum", QUICK | {"first_steps": 1}, {"noise_multiplier": 0.05}, 200),
    ),
    "gep": (
        partial(GEP, **test_gep.SMALL),
        *("papers.gep.add_gaussian_noise", {"steps": 2}, {"steps": 15}, 100),
    ),
    **{
        kind.name: (partial(made, kind), "papers.taught_generative.noisy_sum", {}, LONG, 400)
        for kind in KINDS
    },
}
EACH = pytest.mark.parametrize("name", TRAININGS)


def short(name):
    make, _, few, _, _ = TRAININGS[name]
    return make(**{"noise_multiplier": 1.0} | few)


@EACH
def test_records_reach_the_teacher_only_through_noisy_sums(name, monkeypatch):
    """With equal sums, other records give the same teacher; the control lets the sums differ."""

    training = short(name)
    network = "cnn" if training.bounds_gradients else "cnn_bn"  # which mixes the images of a batch

    def weights(seed):
        return to_vector(trained(training, *halves(30 + seed, seed), network=network))

    assert not torch.equal(weights(0), weights(1))
    monkeypatch.setattr(
        f"fed_dpsd.{TRAININGS[name][1]}",
        lambda values, *_: np.ones(values.shape[1:] or values.shape),
    )
    assert torch.equal(weights(0), weights(1))


def test_a_teacher_with_dropout_is_the_same_again(monkeypatch):
    def with_dropout(*sizes):
        classifier = CLASSIFIERS["cnn"](*sizes)
        classifier.backbone.append(nn.Dropout())
        return classifier

    monkeypatch.setitem(CLASSIFIERS, "dropping", with_dropout)
    first, again = (
        to_vector(trained(short("dp_merf"), *halves(30), network="dropping")) for _ in range(2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, to_vector(trained(short("dp_merf"), *halves(30))))


@EACH
def test_an_empty_shard_is_trained_on_like_any_other(name):
    images, labels = halves(1)
    assert to_vector(trained(short(name), images[:0], labels[:0])).isfinite().all()


@EACH
def test_a_teacher_learns_the_records_labels(name):
    """The control is a teacher of records with the other label."""
    make, _, _, long, count = TRAININGS[name]
    images, labels = halves(count)
    test, truth = halves(200, seed=1)
    for given, expected in ((labels, truth), (1 - labels, 1 - truth)):
        draws = Streams(2).numpy("training")
        teacher = trained(make(**{"noise_multiplier": 1.0} | long), images, given, draws).eval()
        assert (teacher(test[:, 0]).argmax(1) == expected).float().mean() > 0.95
