"""Which networks compute in bfloat16, and that only their layers do."""

import functools

import pytest
import torch
from torch import nn

from fed_dpsd.errors import UserError
from fed_dpsd.models import initialise, precision
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.models.functions import add_functions
from fed_dpsd.models.generators import Generator
from fed_dpsd.models.precision import choose_precision, in_float64, precision_of
from fed_dpsd.streams import Streams

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DIGITS, CIFAR10 = (1, 8, 8), (3, 32, 32)


def build(name, shape, width=16):
    make = functools.partial(CLASSIFIERS[name], shape, 10, width)
    return initialise(make, Streams(0).torch("model"))


def build_generator(shape, width=32):
    return initialise(lambda: Generator(shape, 64, width), Streams(0).torch("generator"))


def chosen(network, asked, device):
    assert choose_precision(network, asked, device) is network
    return precision_of(network)


@pytest.mark.parametrize("name", ["cnn", "resnet9_gn", "scattering"])
@pytest.mark.parametrize("supported", [True, False])
def test_auto_is_bfloat16_on_a_gpu_that_has_it(monkeypatch, name, supported):
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: supported)
    network = build(name, DIGITS)
    expected = "bfloat16" if supported and name != "scattering" else "float32"
    assert chosen(network, "auto", GPU) == expected
    assert chosen(network, "auto", CPU) == "float32"
    assert chosen(network, "float32", GPU) == "float32"


@pytest.mark.parametrize(
    "name",
    [
        "scattering",
        "cnn",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("patches", "pretrained")),
    ],
)
def test_students_on_our_fixed_features_compute_in_float64_for_a_while(name):
    exact = name in ("scattering", "patches")
    network, images = build(name, DIGITS), torch.rand(2, *DIGITS)
    before = network(images)
    with in_float64(network):
        after = network(images)
    assert after.dtype == (torch.float64 if exact else torch.float32)
    assert torch.allclose(before.to(after), after, atol=1e-5)
    assert torch.equal(before.to(after), after) != exact
    assert torch.equal(network(images), before)


def test_auto_leaves_own_networks_in_float32(monkeypatch):
    """Their layers may not accept bfloat16."""
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: True)

    def mine():
        return nn.Sequential(nn.Conv2d(1, 2, 8), nn.Flatten(), nn.Linear(2, 10))

    name = add_functions({"student": mine})["student"]
    network = build(name, DIGITS)
    assert chosen(network, "auto", GPU) == "float32"
    assert chosen(network, "bfloat16", GPU) == "bfloat16"
    del CLASSIFIERS[name]


def test_bfloat16_is_for_all_networks_but_fixed_features(monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: True)
    assert chosen(build("cnn", DIGITS), "bfloat16", CPU) == "bfloat16"
    assert chosen(build_generator(DIGITS), "bfloat16", CPU) == "bfloat16"
    assert chosen(build("scattering", DIGITS), "bfloat16", CPU) == "float32"


def test_a_device_without_the_precision_is_an_error(monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: False)
    with pytest.raises(
        UserError, match=r"^precision=bfloat16: this machine's processor .*=auto or float32"
    ):
        choose_precision(build("cnn", DIGITS), "bfloat16", CPU)


@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize("make", [lambda: build("cnn", DIGITS), lambda: build_generator(DIGITS)])
def test_only_convolutions_and_what_lies_between_them_are_bfloat16(make, bfloat16):
    network, seen = make(), set()
    network.in_bfloat16 = bfloat16
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda *hooked: seen.add(hooked[-1].dtype))
    size = (2, 64) if isinstance(network, Generator) else (2, *DIGITS)
    outputs = network(torch.rand(size, generator=Streams(0).torch("inputs")))
    outputs.sum().backward()
    assert seen == {torch.bfloat16 if bfloat16 else torch.float32}
    assert {t.dtype for p in network.parameters() for t in (p, p.grad)} == {torch.float32}
    assert outputs.dtype == torch.float32


def test_bfloat16_is_near_float32():
    network = build("resnet9", CIFAR10).eval()
    images = torch.rand((4, *CIFAR10), generator=Streams(0).torch("images"))
    exact = network(images)
    network.in_bfloat16 = True
    apart = (network(images) - exact).abs().max()
    assert 0 < apart < 0.05 * exact.abs().max()
