"""Crops of public pictures: shapes, variety, streams, and the files that they are read from."""

import io

import numpy as np
import pytest
from PIL import Image

from fed_dpsd.errors import UserError
from fed_dpsd.models import pictures
from fed_dpsd.streams import Streams
from tests.every import every

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]


def rng(seed=0):
    return Streams(seed).numpy("crops")


def encoded(colour, size=(40, 60)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


@every("shape", SHAPES)
def test_crops_are_bytes_of_the_shape_and_differ(shape):
    loaded = pictures.load("scikit-learn", shape[1])
    images = pictures.crops(loaded, 300, shape, rng())
    assert (images.shape, images.dtype) == ((300, *shape), np.uint8)
    assert images.min() < 20 < 235 < images.max()
    flat = images.reshape(300, -1)
    assert len(np.unique(flat[flat.std(1) > 5], axis=0)) > 200
    assert (images == pictures.crops(loaded, 300, shape, rng())).all()
    assert (images != pictures.crops(loaded, 300, shape, rng(1))).any()
    assert pictures.crops(loaded, 0, shape, rng()).shape == (0, *shape)


def test_crops_show_the_picture_and_nothing_else(tmp_path):
    """Crops of one colour have one colour each; with a second picture some have the other."""
    (tmp_path / "a.png").write_bytes(encoded((200, 40, 40)))
    drawn = pictures.crops(pictures.load(str(tmp_path), 16), 50, (3, 16, 16), rng())
    assert (drawn == drawn[:, :, :1, :1]).all()
    assert len(np.unique(drawn[:, :, 0, 0], axis=0)) > 30  # in other colours each
    Image.fromarray(np.eye(64, dtype=np.uint8) * 255).save(tmp_path / "b.png")
    pictures.load.cache_clear()
    drawn = pictures.crops(pictures.load(str(tmp_path), 16), 400, (3, 16, 16), rng())
    assert (drawn != drawn[:, :, :1, :1]).any()


def test_pictures_are_read_from_files(tmp_path):
    for number, shade in enumerate((10, 200)):
        (tmp_path / f"{number}.png").write_bytes(encoded((shade, 0, 0)))
    (tmp_path / "README.txt").write_text("not a picture")
    loaded = pictures.load(str(tmp_path), 8)
    assert "2 of a folder" in str(loaded)
    assert loaded.digest in str(loaded)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match="holds no picture"):
        pictures.load(str(tmp_path), 8)
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"a\.png is not a picture; remove it"):
        pictures.load(str(tmp_path), 8)
    Image.fromarray(np.full((9, 9), 3_000, np.uint16)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"a\.png has more than 8 bits per channel"):
        pictures.load(str(tmp_path), 8)
    noise = rng().integers(0, 256, (40, 40, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:1_000])
    with pytest.raises(UserError, match=r"a\.png cannot be read .* remove it"):
        pictures.load(str(tmp_path), 8)
    (tmp_path / "a.png").unlink()
    (tmp_path / "a.png").mkdir()
    (tmp_path / "notes.pdf").write_bytes(b"no picture")
    with pytest.raises(UserError, match="holds no picture"):
        pictures.load(str(tmp_path), 8)


def test_the_packaged_pictures_are_those_that_their_licence_names():
    """If scikit-learn changes its pictures, who made them must be looked up again."""
    assert pictures.load("scikit-learn", 32).digest == "5862fdc995ec578e"
