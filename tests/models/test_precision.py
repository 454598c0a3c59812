"""Which networks compute in bfloat16, and that only their layers do."""

import functools

import pytest
import torch

from fed_dpsd.errors import UserError
from fed_dpsd.models import initialise, precision
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.models.generators import Generator
from fed_dpsd.models.precision import choose_precision, precision_of
from fed_dpsd.streams import Streams

CPU = torch.device("cpu")
DIGITS, MNIST, CIFAR10 = (1, 8, 8), (1, 28, 28), (3, 32, 32)


def build(name, shape, width=16):
    make = functools.partial(CLASSIFIERS[name], shape, 10, width)
    return initialise(make, Streams(0).torch("model"))


def build_generator(shape, width=32):
    return initialise(lambda: Generator(shape, 64, width), Streams(0).torch("generator"))


@pytest.fixture(params=[True, False], ids=["with bfloat16", "without"])
def supported(request, monkeypatch):
    """Both kinds of device."""
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: request.param)
    return request.param


@pytest.mark.parametrize(
    ("name", "shape", "faster"),
    [
        ("cnn", CIFAR10, True),
        ("cnn_bn", MNIST, True),
        ("cnn3", CIFAR10, True),
        ("resnet9", CIFAR10, True),
        ("cnn", DIGITS, False),
        ("cnn", MNIST, False),
        ("mlp", CIFAR10, False),
        ("scattering", CIFAR10, False),
        ("resnet9_gn", CIFAR10, False),
        ("mobilenet", CIFAR10, False),
    ],
)
def test_auto_is_bfloat16_for_larger_convolutions_outside_groups(supported, name, shape, faster):
    network = choose_precision(build(name, shape), shape, "auto", CPU)
    assert precision_of(network) == ("bfloat16" if supported and faster else "float32")
    assert network.training


def test_auto_is_bfloat16_for_larger_generators(supported):
    def chosen(shape):
        return precision_of(choose_precision(build_generator(shape), (64,), "auto", CPU))

    assert chosen(DIGITS) == "float32"
    assert chosen(MNIST) == ("bfloat16" if supported else "float32")


def test_a_precision_overrides_the_rule_but_for_fixed_features(monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: True)
    for name, shape, asked, expected in (
        ("resnet9", CIFAR10, "float32", "float32"),
        ("cnn", DIGITS, "bfloat16", "bfloat16"),
        ("resnet9_gn", CIFAR10, "bfloat16", "bfloat16"),
        ("scattering", DIGITS, "bfloat16", "float32"),
    ):
        assert precision_of(choose_precision(build(name, shape), shape, asked, CPU)) == expected, (
            name
        )


def test_a_device_without_the_precision_is_an_error(monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: False)
    with pytest.raises(
        UserError, match=r"^precision=bfloat16: this machine's processor .*=auto or float32"
    ):
        choose_precision(build("cnn", DIGITS), DIGITS, "bfloat16", CPU)


@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize("make", [lambda: build("cnn", DIGITS), lambda: build_generator(DIGITS)])
def test_only_convolutions_and_what_lies_between_them_are_bfloat16(make, bfloat16):
    network, seen = make(), set()
    network.bfloat16 = bfloat16
    for layer in network.modules():
        if isinstance(layer, torch.nn.Conv2d):
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
    network.bfloat16 = True
    apart = (network(images) - exact).abs().max()
    assert 0 < apart < 0.05 * exact.abs().max()
