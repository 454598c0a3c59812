"""Test images on a run's page and in a picture: public ones, never a training record."""

import numpy as np
import pytest
from PIL import Image

from fed_dpsd import experiment as experiments
from fed_dpsd.experiment import SHEET, contact_sheet, load_data
from fed_dpsd.server.run_folder import GAP, save_test_images

SIDE = 8


@pytest.fixture
def pictures(small, tmp_path):
    """An experiment on random images of three classes; a third of its test images are copies."""
    rng = np.random.default_rng(0)
    train, test = (rng.integers(0, 256, (n, SIDE, SIDE), np.uint8) for n in (150, 150))
    test[::3] = train[::3]
    arrays = {"train_image": train, "train_label": np.arange(150) % 3}
    arrays |= {"test_image": test, "test_label": np.arange(150) % 3}
    np.savez(tmp_path / "pictures.npz", **arrays)
    columns = ("data.image_column=image", "data.label_column=label", "data.classes=[a,b,c]")
    return small(
        *("data=imagefolder", "data.path=pictures.npz", *columns, "data.num_classes=3"),
        f"data.shape=[1,{SIDE},{SIDE}]",
    )


def loaded(experiment):
    return load_data(experiment.config.data, experiment.config.cache)


def rows(images):
    return {image.tobytes() for image in images}


def cells(path):
    """The pixels of each image in a grid."""
    with Image.open(path) as picture:
        grid = np.asarray(picture.convert("L"))
    step = SIDE + GAP
    places = range(GAP, grid.shape[0], step), range(GAP, grid.shape[1], step)
    every = (grid[top : top + SIDE, left : left + SIDE] for top in places[0] for left in places[1])
    return [cell for cell in every if cell.any()]


def on_record(folder, experiment):
    """How many pictures below a folder hold a training record."""
    records = rows(loaded(experiment).train.images)
    return sum(cell.tobytes() in records for path in folder.rglob("*.png") for cell in cells(path))


def test_a_sheet_has_test_images_of_each_class_and_no_training_record(pictures, tmp_path):
    data, test = loaded(pictures), experiments.test_split(pictures)
    assert rows(test.images) & rows(data.train.images)  # the control: some are copies
    sheet = contact_sheet(pictures, test)
    assert {label: len(images) for label, images in sheet.items()} == {1: 16, 2: 16}
    for label, images in sheet.items():
        assert rows(images) <= rows(test.images[test.labels == label])
    save_test_images(tmp_path / "public", sheet)
    assert sum(map(len, map(cells, (tmp_path / "public").rglob("*.png")))) == SHEET
    assert on_record(tmp_path / "public", pictures) == 0
    # The control: pictures of records, and of all test images, are found.
    for name, images in (("records", data.train.images), ("tested", test.images)):
        save_test_images(tmp_path / name, {0: images[:SHEET]})
        assert on_record(tmp_path / name, pictures) > 0


def test_a_coordinator_without_images_has_no_sheet(deployed):
    experiment = deployed("data=folder", "data.classes=[a,b]", "data.num_classes=2")
    assert contact_sheet(experiment, experiments.test_split(experiment)) == {}
    own = deployed()  # the control: a coordinator's own images need no training records
    assert len(contact_sheet(own, experiments.test_split(own))) == 10


def test_a_sheet_has_at_most_one_image_of_each_of_many_classes(pictures):
    test = experiments.test_split(pictures)
    labels = np.arange(len(test))
    many = type(test)(test.images, labels)
    assert [len(images) for images in contact_sheet(pictures, many).values()] == [1] * SHEET
