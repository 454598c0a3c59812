"""ResNet-9: sizes, and the two forms."""

import itertools

import pytest

from fed_dpsd.models import initialise
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
