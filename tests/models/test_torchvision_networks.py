"""The papers' teachers: every network at every size, and models that were trained elsewhere."""

import json

import pytest
import safetensors.torch
import torch
from torch.nn import functional
from torchvision import models

from fed_dpsd.client.teacher_file import read_teacher
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.errors import UserError
from fed_dpsd.models import initialise, load_vector, to_vector, write_weights
from fed_dpsd.models.classifiers import CLASSIFIERS, NO_DP_SGD
from fed_dpsd.models.torchvision_networks import GROUP_FORMS, NETWORKS
from fed_dpsd.privacy import dp_sgd, lattice
from fed_dpsd.streams import Streams
from tests.every import every

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
LARGE = ("vgg19_bn", "vit_b", "wide_resnet50_2")
SMALL = ("mobilenet_v2", "shufflenet_v2_x1_0")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (1, 28, 28)) for name in SMALL),
        *(pytest.param(n, (1, 28, 28), marks=pytest.mark.slow) for n in NETWORKS if n not in SMALL),
        *(pytest.param(name, (3, 64, 64), marks=pytest.mark.slow) for name in LARGE),
    ],
)
def test_every_network_takes_a_step(name, shape):
    """A step changes the weights; nothing is drawn from torch's global generator, as by dropout."""
    streams = Streams(0)
    model = initialise(lambda: CLASSIFIERS[name](shape, 3, 4), streams.torch("model")).train()
    assert (name in NO_DP_SGD) == (name in GROUP_FORMS)
    images = torch.rand((2, *shape), generator=streams.torch("images"))
    before = torch.get_rng_state()
    loss = functional.cross_entropy(model(images), torch.tensor([0, 2]))
    loss.backward()
    first = next(model.parameters())
    assert torch.isfinite(loss)
    assert first.grad.abs().sum() > 0
    assert model.classifier.weight.shape == (3, model.features(images).shape[1])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("shufflenet_v2_x1_0_gn", marks=(pytest.mark.ci, pytest.mark.slow)),
        *(
            pytest.param(name, marks=pytest.mark.slow(seconds=15))
            for name in (
                *("mobilenet_v2_gn", "googlenet_gn", "vgg19_gn", "resnet34_gn"),
                *("densenet161_gn", "alexnet", "vit_b"),
            )
        ),
    ],
)
def test_dp_sgd_takes_a_step_of_every_kind(name, monkeypatch):
    """Each record's gradient depends on the record alone, and the step moves every weight.

    Rounding may turn a unit of a deep network on or off, which changes a hundredth of its gradient.
    """
    monkeypatch.setattr(dp_sgd, "RECORDS_AT_ONCE", 2)
    formed = []

    def watched(*given):
        gradients = single(*given)  # which are clipped in place
        formed.append([part.clone() for part in gradients])
        return gradients

    single = lattice.single_gradients
    monkeypatch.setattr(lattice, "single_gradients", watched)
    streams = Streams(0)
    model = initialise(lambda: CLASSIFIERS[name]((1, 28, 28), 3, 4), streams.torch("model"))
    images = torch.rand((2, 1, 28, 28), generator=streams.torch("images"))
    labels, expected = torch.tensor([0, 2]), []
    for image, label in zip(images, labels, strict=True):
        model.train().zero_grad()
        functional.cross_entropy(model(image[None]), label[None]).backward()
        expected.append(torch.cat([weights.grad.flatten() for weights in model.parameters()]))
    model.zero_grad(set_to_none=True)
    before = to_vector(model)
    training = dp_sgd.DPSGD(1.0, 1.0, steps=1, max_grad_norm=1.0, learning_rate=0.1)
    training.train(model, images[:, None], labels, streams.numpy("noise"))
    assert name not in NO_DP_SGD
    # A large network's records come one in a call.
    rows = [torch.cat([call[n] for call in formed[-2:]])[-2:] for n in range(len(formed[-1]) - 1)]
    for number, gradient in enumerate(expected):
        own = torch.cat([part[number].flatten() for part in rows])
        assert (own - gradient).norm() < 0.03 * gradient.norm()
    still = (to_vector(model) == before).float().mean()
    assert still < 1e-3  # mean and standard deviation of the pixels, and no weights but by chance


@every("network", ["mobilenet_v2", "shufflenet_v2_x1_0"])
def test_a_form_with_group_norm_treats_each_image_alone(network):
    """Also while it trains. The control is the network itself, which has batch statistics."""
    images = torch.rand((3, 1, 28, 28), generator=Streams(0).torch("images"))
    for name, alone in ((GROUP_FORMS[network], True), (network, False)):
        model = initialise(lambda n=name: CLASSIFIERS[n]((1, 28, 28), 7, 4), torch.Generator())
        together = model.train()(images)
        apart = torch.cat([model(image[None].repeat(2, 1, 1, 1))[:1] for image in images])
        assert torch.allclose(together, apart, atol=1e-3) == alone


def elsewhere(path, network, facts=None):
    """Save torchvision's own network, as somebody does who has trained it; return it."""
    torch.manual_seed(0)
    model = getattr(models, network)(num_classes=10)
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 1.0
    model(torch.randn(64, 3, 32, 32))  # without statistics an untrained network says nothing
    model.eval()
    safetensors.torch.save_file(model.state_dict(), path, facts)
    return model


def read(small, path, arch="resnet34", *overrides):
    settings = f"teacher.path={path}", f"teacher.arch={arch}", "data=cifar10", "data.path=/"
    config = small(*settings, *overrides).config
    return read_teacher(make_teacher(config, 0, 0), config, 0)


@pytest.mark.parametrize(
    "network",
    [pytest.param("resnet34", marks=pytest.mark.slow), "mobilenet_v2"],
)
def test_a_model_from_elsewhere_answers_as_it_did_there(small, tmp_path, network):
    path = tmp_path / "theirs.safetensors"
    theirs = elsewhere(path, network, {"mean": json.dumps(MEAN), "std": json.dumps(STD)})
    ours = read(small, path, network).eval()
    images = torch.rand((4, 3, 32, 32), generator=Streams(0).torch("images"))
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    with torch.inference_mode():
        expected = theirs((images - mean) / std)
        assert torch.allclose(ours(images), expected, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(theirs(images), expected, atol=1e-2)  # pixels as they are
        settings = f"model.teacher={network}", "data=cifar10", "data.path=/"
        copy = make_teacher(small(*settings).config, 0, 0).eval()
        load_vector(copy, to_vector(ours))  # as weights go to a server
        assert torch.allclose(copy(images), expected, atol=1e-4, rtol=1e-4)


def test_our_own_file_is_read_without_facts(small, tmp_path):
    path = tmp_path / "ours.safetensors"
    config = small("model.teacher=resnet34", "data=cifar10", "data.path=/").config
    write_weights(make_teacher(config, 0, 0), path)
    assert read(small, path).backbone.mean.tolist() == [0.5] * 3


def test_pixels_of_another_file_must_be_described(small, tmp_path):
    path = tmp_path / "theirs.safetensors"
    state = models.mobilenet_v2(num_classes=10).state_dict()
    for facts, expected in (
        (None, "metadata have mean=None; save it with the list of 3 numbers"),
        ({"mean": "[0, 0, 0]"}, "metadata have std=None"),
        ({"mean": "[0, 0]", "std": "[1, 1, 1]"}, r"metadata have mean=\[0, 0\]; save it with"),
        ({"mean": "[0, 0, 0]", "std": "[1, 0, 1]"}, "all must be above 0"),
        ({"mean": "[0, 0, NaN]", "std": "[1, 1, 1]"}, "metadata have mean="),
    ):
        safetensors.torch.save_file(state, path, facts)
        with pytest.raises(UserError, match=expected) as error:
            read(small, path, "mobilenet_v2")
        assert str(path) in str(error.value)


@pytest.mark.slow
@pytest.mark.ci
def test_another_architecture_channels_or_classes_are_named(small, tmp_path):
    path = tmp_path / "theirs.safetensors"
    elsewhere(path, "mobilenet_v2")
    with pytest.raises(UserError, match="does not fit teacher.arch=resnet34"):
        read(small, path)
    with pytest.raises(UserError, match=r"\[32, 3, 3, 3\], but the architecture needs \[32, 1"):
        read(small, path, "mobilenet_v2", "data.shape=[1,32,32]")
    with pytest.raises(UserError, match=r"has shape \[10.*the architecture needs \[7"):
        read(small, path, "mobilenet_v2", "data.num_classes=7")
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(UserError, match="is not a safetensors file"):
        read(small, path)
    torch.save({}, path)
    with pytest.raises(UserError, match="is not a safetensors file"):
        read(small, path)
