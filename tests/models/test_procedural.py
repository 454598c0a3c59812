"""Procedural images: shapes, variety, and dependence on their stream alone."""

import numpy as np
import pytest
import torch

from fed_dpsd.models import procedural
from fed_dpsd.streams import Streams

PROCEDURES = list(procedural.PROCEDURES.values())
SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64)]


def name(procedure):
    return procedure.__name__


@pytest.mark.parametrize("procedure", PROCEDURES, ids=name)
def test_images_are_bytes_all_different_and_a_function_of_their_stream(procedure):
    for shape in SHAPES:
        images = procedure(150, shape, Streams(0).numpy("images"))
        assert (images.shape, images.dtype) == ((150, *shape), np.uint8)
        assert images.min() < 20 < 235 < images.max()
        assert len(np.unique(images.reshape(150, -1), axis=0)) > 140
    first, again, other = (procedure(5, (1, 8, 8), Streams(s).numpy("images")) for s in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    assert procedure(0, (1, 8, 8), Streams(0).numpy("images")).shape == (0, 1, 8, 8)


def slopes(images, side=32):
    """Return the mean difference of neighbours, once images are reduced to `side`."""
    pixels = torch.from_numpy(images).double()
    reduced = torch.nn.functional.adaptive_avg_pool2d(pixels, side)
    return reduced.diff(dim=3).abs().mean().item()


@pytest.mark.parametrize("procedure", PROCEDURES[1:], ids=name)
def test_what_is_drawn_grows_with_the_image(procedure):
    small, large = (
        slopes(procedure(64, (1, size, size), Streams(0).numpy("images"))) for size in (32, 96)
    )
    assert large == pytest.approx(small, rel=0.3)


def test_control_noise_does_not_grow_with_the_image():
    small, large = (
        slopes(procedural.noise(64, (1, size, size), Streams(0).numpy("images")))
        for size in (32, 96)
    )
    assert large < 0.4 * small


def test_images_are_turned_to_the_side_whose_answers_vary_more():
    """Even where the noise of the answers is larger than what they say."""
    rng = np.random.default_rng(0)
    images = procedural.lines(200, (3, 8, 8), rng)
    answered = procedural.lines(2_000, (3, 8, 8), rng)
    dark = answered.mean((1, 2, 3)) < 127.5
    one_hot = np.eye(10)[rng.integers(0, 10, 2_000)]
    for side in (dark, ~dark):
        labels = np.where(side[:, None], one_hot, 0.1) + rng.normal(0, 1, one_hot.shape)
        polarity = procedural.varied_polarity(answered, labels)
        assert polarity == ("dark" if side is dark else "light")
        turned = procedural.apply_polarity(images, polarity)
        is_dark = turned.mean((1, 2, 3)) < 127.5
        assert is_dark.all() if side is dark else not is_dark.any()
        same = (turned == images).all((1, 2, 3))
        assert 0 < same.sum() < 200
        assert (turned == np.where(same[:, None, None, None], images, 255 - images)).all()


def test_nothing_turns_before_both_sides_were_answered():
    images = procedural.lines(20, (1, 8, 8), Streams(0).numpy("images"))
    black = np.zeros((5, 1, 8, 8), np.uint8)
    assert procedural.varied_polarity(black, np.eye(5)) == "both"
    assert (procedural.apply_polarity(images, "both") == images).all()
