"""`fed-dpsd export` and `predict`: from a run to a class for an image file."""

import csv
import sys

import numpy as np
import pytest
from PIL import Image

from tests.conftest import SMALL


@pytest.fixture
def model(fed_dpsd):
    """An exported student's path."""
    _, printed, _ = fed_dpsd("run", *SMALL, "rounds=1")
    _, printed, _ = fed_dpsd("export", printed[-1], "--out", "model")
    return printed[-1]


def test_images_of_any_size_get_a_class_and_probabilities(fed_dpsd, tmp_path, model):
    rng = np.random.default_rng(0)
    for name, shape in (("grey.png", (8, 8)), ("large.jpg", (40, 60, 3))):
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(tmp_path / name)
    code, printed, told = fed_dpsd("predict", model, "grey.png", "large.jpg")
    assert code == 0
    assert "proven" in told  # the run's result, with what it cost
    rows = list(csv.DictReader(printed))
    assert [row["image"] for row in rows] == ["grey.png", "large.jpg"]
    for row in rows:
        scores = [float(row[str(label)]) for label in range(10)]
        assert sum(scores) == pytest.approx(1, abs=1e-3)
        assert int(row["class"]) == int(np.argmax(scores))


def test_what_is_no_image_is_named(fed_dpsd, tmp_path, model):
    (tmp_path / "notes.png").write_text("no image")
    code, printed, told = fed_dpsd("predict", model, "notes.png")
    assert (code, printed) == (1, [])
    assert "notes.png is no image that can be read" in told


def test_onnx_without_its_packages_says_what_to_install(fed_dpsd, tmp_path, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    (run,) = (tmp_path / "runs").iterdir()
    code, _, told = fed_dpsd("export", str(run), "--out", "other", "--format", "onnx")
    assert code == 1
    assert "pip install 'fed-dpsd[onnx]'" in told
