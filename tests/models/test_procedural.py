"""Procedural images: shapes, variety, and dependence on their stream alone."""

import numpy as np
import pytest

from fed_dpsd.models import procedural
from fed_dpsd.streams import Streams

PROCEDURES = list(procedural.PROCEDURES.values())
SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]


def name(procedure):
    return procedure.__name__


def smoothness(images):
    """Mean difference of neighbouring pixels, divided by the mean difference of any pixels."""
    pixels = images.astype(float)
    near = np.abs(np.diff(pixels, axis=3)).mean()
    rng = np.random.Generator(np.random.PCG64(0))
    anywhere = np.abs(pixels.ravel() - rng.permutation(pixels.ravel())).mean()
    return near / anywhere


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


def test_areas_and_lines_are_smooth_and_noise_is_not():
    drawn = {p: p(500, (1, 28, 28), Streams(0).numpy("images")) for p in PROCEDURES}
    assert smoothness(drawn[procedural.noise]) > 0.95
    assert smoothness(drawn[procedural.areas]) < 0.5
    assert smoothness(drawn[procedural.lines]) < 0.5


def test_an_object_differs_from_its_background_more_than_from_itself():
    """Control: of dead leaves, which have no body, the centre is like the margin; 5 deviations."""

    def apart(procedure):
        """How far the mean colour of the centre is from the mean colour of the margin."""
        images = procedure(400, (3, 32, 32), Streams(0).numpy("images")).astype(float)
        centre = images[:, :, 12:20, 12:20].mean((2, 3))
        margin = np.concatenate([images[:, :, :4], images[:, :, -4:]], 2).mean((2, 3))
        return np.abs(centre - margin).mean(1)

    objects, leaves = apart(procedural.objects), apart(procedural.leaves)
    error = ((objects.var() + leaves.var()) / 400) ** 0.5
    assert objects.mean() - leaves.mean() > 5 * error


def test_lines_are_light_on_dark_as_often_as_dark_on_light():
    """The side that covers more than half of an image is its ground; 5 standard errors of 1,000."""
    images = procedural.lines(1_000, (1, 28, 28), Streams(0).numpy("images"))
    dark_ground = (images.reshape(1_000, -1) < 128).mean(1) > 0.5
    assert dark_ground.mean() == pytest.approx(0.5, abs=5 * (0.25 / 1_000) ** 0.5)


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
