"""Shapes, and weights that come from their generator alone."""

import pytest
import torch

from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.models.generators import Generator
from fed_dpsd.streams import Streams

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_take_any_shape(name, shape):
    model = initialise(lambda: CLASSIFIERS[name](shape, 7, 4), Streams(0).torch("model"))
    images = torch.rand((5, *shape), generator=Streams(0).torch("images"))
    logits = model(images)
    assert logits.shape == (5, 7)
    assert torch.equal(model.classifier(model.features(images)), logits)
    assert logits.std() > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_generators_draw_high_contrast_images_in_range(shape):
    streams = Streams(0)
    generator = initialise(lambda: Generator(shape, 6, 4), streams.torch("generator"))
    latents = torch.randn((16, 6), generator=streams.torch("latents"))
    grey = generator(latents)
    generator.start()
    images = generator(latents)
    assert images.shape == (16, *shape)
    assert 0 <= images.min() < images.max() <= 1
    assert images.std() > 1.3 * grey.std()


def test_weights_are_a_function_of_the_stream_and_touch_no_global_generator():
    def build():
        return Generator((1, 8, 8), 6, 4)

    before = torch.random.get_rng_state()
    first = initialise(build, Streams(0).torch("g")).state_dict()
    again = initialise(build, Streams(0).torch("g")).state_dict()
    other = initialise(build, Streams(1).torch("g")).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["project.weight"], other["project.weight"])
    assert all(torch.isfinite(tensor.float()).all() for tensor in first.values())
