"""ResNet-9: sizes, and the two forms."""

import itertools

import pytest
import torch

from fed_dpsd.models import initialise, resnet9
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.streams import Streams


def build(name, shape=(3, 32, 32), width=16):
    return initialise(lambda: CLASSIFIERS[name](shape, 10, width), Streams(0).torch("model"))


@pytest.mark.parametrize("name", ["resnet9", "resnet9_gn"])
def test_width_64_has_the_size_of_the_published_network(name):
    """6.57 million weights: of eight convolutions, their norms and the classifier."""
    channels = (3, 64, 128, 128, 128, 256, 512, 512, 512)
    convolutions = sum(9 * a * b for a, b in itertools.pairwise(channels))
    norms = 2 * sum(channels[1:])
    weights = sum(p.numel() for p in build(name, width=64).parameters())
    assert weights == convolutions + norms + 5130


def test_bfloat16_is_used_where_the_processor_has_it_and_is_near_float32(monkeypatch):
    network = build("resnet9").eval()
    images = torch.rand((4, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    logits = {}
    for fast in (False, True):
        monkeypatch.setattr(resnet9, "has_bfloat16", lambda _, fast=fast: fast)
        logits[fast] = network(images)
        assert logits[fast].dtype == torch.float32
    apart = (logits[False] - logits[True]).abs().max()
    assert 0 < apart < 0.05 * logits[False].abs().max()


def test_the_form_for_private_training_stays_in_float32(monkeypatch):
    """Its sums of gradients are part of a proof."""
    monkeypatch.setattr(resnet9, "has_bfloat16", lambda _: True)
    seen = []
    network = build("resnet9_gn", width=4)
    for layer in network.modules():
        layer.register_forward_hook(lambda *hooked: seen.append(hooked[-1].dtype))
    network(torch.rand(2, 3, 32, 32))
    assert set(seen) == {torch.float32}
