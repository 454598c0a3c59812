"""The contract of trainings that read records through noisy sums alone.

What reaches a teacher, what it learns, which unit an epsilon covers, and what is refused.
"""

from functools import partial

import numpy as np
import pytest
import torch
from dp_accounting import NonPrivateDpEvent
from torch import nn

from fed_dpsd.experiment import one_run
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
from tests.running import not_refused

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
REFUSED = {  # settings, and the error that names the key, the value and what is allowed
    "dp_merf": (
        ("model=scattering", "model.teacher=scattering: training=dp_merf generates images"),
        ("model.teachers=[cnn,patches]", r"model.teachers\[1\]=patches: training=dp_merf gen"),
        ("model=resnet9 training.batch_size=1", "batch_size=1 must be >= 2"),
        ("training.features=3", "features=3 must be a multiple of 2"),
        ("training.noise_multiplier=33", "noise_multiplier=33: beyond 32, training=dp_merf rounds"),
        ("training.count_fraction=1", "count_fraction=1 must be < 1"),
    ),
    "dp_gan": (
        ("training.critic_steps=0", "critic_steps=0 must be > 0"),
        ("training.weight_clip=inf", "weight_clip=inf must be a finite number"),
        ("training.sample_rate=1.5", "sample_rate=1.5 must be above 0 and at most 1"),
        ("training.max_grad_norm=1e9", "max_grad_norm=1000000000.0 must be between"),
    ),
    "gs_wgan": (
        ("training.discriminators=1", "discriminators=1 must be >= 2"),
        ("training.discriminators_at_once=3", "discriminators_at_once=3 must divide discrim"),
        ("training.discriminators_at_once=0", "discriminators_at_once=0 must be > 0"),
        ("training.discriminator_width=0", "discriminator_width=0 must be > 0"),
        ("training.first_steps=-1", "first_steps=-1 must be >= 0"),
        ("training.discriminator_learning_rate=0", "discriminator_learning_rate=0 must be > 0"),
    ),
    "gep": (
        ("model=scattering", "model.teacher=scattering: training=gep compares gradients"),
        ("model.teacher=cnn_bn", "model.teacher=cnn_bn: training=gep bounds each record"),
        ("training.basis_size=201", "basis_size=201 must be at most anchors=200"),
        ("training.anchors=0", "anchors=0 must be > 0"),
        ("training.anchors=50000", "model.teacher=cnn training=gep: anchors=50000 and basis_size"),
        ("training.max_residual_norm=0", "max_residual_norm=0.0 must be between 1e-6"),
        ("training.noise_multiplier=-1", "noise_multiplier=-1.0 must be > 0 and at most"),
    ),
    "pate_gan": (
        ("training.images_per_class=1", "images_per_class=1 must be >= 2"),
        ("training.student_learning_rate=0", "student_learning_rate=0 must be > 0"),
        ("training.student_steps=0", "student_steps=0 must be > 0"),
    ),
    "datalens": (
        ("training.step_size=0", "step_size=0 must be > 0"),
        ("training.k=0", "k=0 must be > 0"),
        ("training.threshold=1", "threshold=1 must be < 1"),
        ("training.teachers=0", "teachers=0 must be >= 1"),
    ),
    "g_pate": (
        ("training.bins=1", "bins=1 must be >= 2"),
        ("training.teacher_learning_rate=0", "teacher_learning_rate=0 must be > 0"),
        ("training.teacher_weight_decay=100", "teacher_weight_decay=100.0 must be >= 0 and below"),
        ("training.pooling=3", "training.pooling=3 does not divide the image size, 8"),
    ),
}


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


@pytest.mark.slow
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


@EACH
def test_an_epsilon_covers_records_alone(name):
    training = short(name)
    for relation in ("add_remove", "replace_one"):
        assert not isinstance(training.event("record", relation), NonPrivateDpEvent)
        for unit in ("patient", "client"):
            assert isinstance(training.event(unit, relation), NonPrivateDpEvent)


@EACH
def test_what_it_does_not_support_is_refused(name, tmp_path):
    def given(*settings):
        return one_run(settings, tmp_path)

    table = (
        *REFUSED[name],
        ("training=plain", f"method={name} does not support it; use training={name}"),
        ("num_clients=2", f"method={name} has one client; use num_clients=1"),
    )
    assert not not_refused(given, table, f"method={name}")
    deployed = f"training={name} model=cnn federation=deployment"
    assert not not_refused(given, [(deployed, "baseline for simulations")])


def test_a_network_that_mixes_images_may_learn_from_generated_ones(tmp_path):
    """They are not records."""
    one_run(["method=dp_merf", "model=resnet9"], tmp_path)
