"""Synthetic images: drawn as the run's own were, labelled by its student, read by `datasets`."""

import json

import datasets
import numpy as np
import pytest

from fed_dpsd.config.compose import compose
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import set_up
from fed_dpsd.models import procedural
from fed_dpsd.server.completed import student_of
from fed_dpsd.server.run_folder import open_completed
from fed_dpsd.server.synthesis import draw_images, synthesize
from fed_dpsd.streams import Streams
from tests.every import every
from tests.shapes import CLASSES, write_shapes

GENERATED = ("method=paper_fed_dpsd", "answers=probabilities")
DENSE = ("method=dense", "model.teacher=cnn_bn", "method.generator_steps=2")


def load(path, tmp_path):
    return datasets.load_dataset(
        *("parquet",), data_files=str(path), split="train", cache_dir=str(tmp_path / "hub")
    )


def pixels_of(table):
    return np.stack([np.asarray(image)[None] for image in table["image"]])


def test_datasets_loads_images_and_names_of_classes(finished, tmp_path):
    folder, _, _ = finished()
    path = synthesize(folder, 70, tmp_path / "synthetic" / "train.parquet", labels=True).path
    table = load(path, tmp_path)
    assert len(table) == 70
    assert isinstance(table.features["image"], datasets.Image)
    assert table.features["label"].names == [str(number) for number in range(10)]
    student = student_of(open_completed(folder))
    scores = student.predict(pixels_of(table))  # the labels belong to the stored pixels
    assert table["label"][:] == scores.argmax(1).tolist()
    np.testing.assert_allclose(table["probabilities"][:], scores, atol=1e-6)
    whole = datasets.load_dataset(str(path.parent), cache_dir=str(tmp_path / "hub"))
    assert len(whole["train"]) == 70  # README.md says which file is what
    assert whole["train"].features == table.features


def test_without_labels_there_are_images_alone(finished, tmp_path):
    path = synthesize(finished()[0], 5, tmp_path / "it" / "train.parquet").path
    assert load(path, tmp_path).column_names == ["image"]


@pytest.mark.slow
@every(
    ("overrides", "source"),
    [((), "generator"), ((), "queries"), (GENERATED, "generator"), (DENSE, "queries")],
)
def test_the_same_seed_gives_the_same_file(finished, tmp_path, overrides, source):
    folder, _, _ = finished(*overrides)
    contents = [
        synthesize(folder, 9, tmp_path / name / "a.parquet", True, source, seed).path.read_bytes()
        for name, seed in (("one", 0), ("two", 0), ("three", 1))
    ]
    assert contents[0] == contents[1] != contents[2]


def images_of(folder, number, source=None, seed=0):
    run = open_completed(folder)
    return (*draw_images(run, student_of(run), number, source, seed), run)


def test_generators_are_trained_on_the_student_as_those_of_the_run(finished):
    settings = "method.images_per_generator=8", "method.generator_steps=3"
    folder, _, _ = finished("method.generators=new", *settings)
    images, origin, _ = images_of(folder, 20)
    assert images.shape == (20, 1, 8, 8)
    assert origin == "New generators drew them, 8 each, after 3 steps against the student."
    assert len(np.unique(images, axis=0)) == 20


@every("settings", [(), GENERATED])
def test_a_generator_that_the_run_keeps_draws_from_new_latent_vectors(finished, settings):
    folder, _, _ = finished(*settings)
    images, origin, run = images_of(folder, 100)
    assert origin.startswith("The run's generator, as of the last round, drew them from new ")
    assert len(np.unique(images, axis=0)) == 100
    asked = {image.tobytes() for part in run.state.buffer for image in part.images}
    assert not asked & {image.tobytes() for image in images}
    for name, tensor in run.state.tensors.items():  # it normalises over a batch, as in the run
        if name.startswith("generator.") and "running" in name:
            tensor.fill_(9)
    again, _ = draw_images(run, student_of(run), 100, None, 0)
    assert np.array_equal(images, again)


@every("source", ["generator", "queries"])
def test_images_have_the_polarity_of_the_runs_own(finished, source):
    """The control has both."""
    small = "method.images_per_generator=8", "method.generator_steps=3"
    for settings, dark in (((*small, "method.polarity=dark"), {True}), (small, {True, False})):
        images, _, _ = images_of(finished(*settings)[0], 32, source)
        assert {*(images.mean((1, 2, 3)) < 127.5)} == dark


def test_queries_are_those_of_rounds_to_come(finished):
    folder, _, _ = finished("method.noise_fraction=0", "method.lines_fraction=0.75")
    images, origin, run = images_of(folder, 64, "queries", seed=0)
    assert origin == "They are the queries that the run's next rounds would have sent."
    asked = {image.tobytes() for part in run.state.buffer for image in part.images}
    assert len({image.tobytes() for image in images} - asked) == 64
    # The run's own procedure drew them: without generators it needs no student.
    folder, _, _ = finished(
        *("method.noise_fraction=1", "method.areas_fraction=0", "method.lines_fraction=0")
    )
    images, origin, run = images_of(folder, 64, seed=5)
    assert "next rounds" in origin  # there is no generator
    (expected,) = procedural.draw(
        {"noise": 64, "areas": 0, "lines": 0, "leaves": 0}, (1, 8, 8), Streams(5), 2
    )[:1]
    expected = procedural.apply_polarity(expected, "both")
    assert sorted(map(bytes, images)) == sorted(map(bytes, expected))


def test_methods_that_throw_generators_away_have_the_images_that_they_asked(finished):
    folder, _, _ = finished(*DENSE)
    images, origin, run = images_of(folder, 64)
    assert origin == "They are among the images that the run sent."
    (part,) = run.state.buffer
    assert sorted(map(bytes, images)) == sorted(map(bytes, part.images))
    with pytest.raises(UserError, match="65 images are too many: the run sent 64, and its"):
        images_of(folder, 65)
    with pytest.raises(UserError, match="run of method dense keeps no generator; choose queries"):
        images_of(folder, 5, "generator")


def test_a_method_without_images_says_so(finished):
    folder, _, _ = finished("method=fedavg", "answers=probabilities", "teacher.same_start=true")
    with pytest.raises(UserError, match="method fedavg neither keeps a generator nor sends images"):
        images_of(folder, 5)


def test_the_teachers_place_is_taken_by_the_student(finished):
    settings = "method=dpsd", "method.discriminator=teacher", "method.generators=new"
    folder, _, _ = finished(*settings, "num_clients=1")
    _, origin, _ = images_of(folder, 5)
    assert "against the student instead of the teacher, which the run does not keep" in origin


def test_arguments_of_the_wrong_kind_are_named(tmp_path):
    for arguments, problem in (
        ({"source": "query"}, "^source='query' must be generator or queries"),
        *(
            ({"number": wrong}, f"^number={wrong!r} must be an integer >= 1")
            for wrong in (0, -1, 10.5, "10", True)
        ),
        ({"seed": -1}, "^seed=-1 must be an integer >= 0"),
    ):
        with pytest.raises(UserError, match=problem):
            synthesize(tmp_path, path=tmp_path / "x.parquet", **{"number": 1} | arguments)
    with pytest.raises(UserError, match=f"^{tmp_path}/x: give a name that ends in .parquet"):
        synthesize(tmp_path, 1, tmp_path / "x")


@every("name", ["train.parquet", "README.md", "PRIVACY.md", "privacy_card.json"])
def test_nothing_is_overwritten(finished, tmp_path, name):
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / name).write_text("mine")
    with pytest.raises(UserError, match=f"{name} already exists; choose another folder"):
        synthesize(tmp_path, 5, tmp_path / "it" / "train.parquet")


def test_names_of_classes_travel_from_pictures_to_a_run_on_synthetic_ones(finished, tmp_path):
    write_shapes(tmp_path / "pictures", 30)
    folder, _, _ = finished("data=imagefolder", f"data.path={tmp_path}/pictures", "partition=iid")
    path = synthesize(folder, 40, tmp_path / "it" / "train.parquet", labels=True).path
    assert load(path, tmp_path).features["label"].names == list(CLASSES)
    config = set_up(compose(["data=imagefolder", f"data.path={path}"]), tmp_path).config.data
    assert config.classes == CLASSES


def test_a_card_says_how_the_images_were_drawn(finished, tmp_path):
    path, origin = synthesize(finished()[0], 5, tmp_path / "it" / "train.parquet", seed=4)
    card = json.loads((path.parent / "privacy_card.json").read_text())
    assert (card["origin"], card["seed"]) == (origin, 4)
    assert origin in (path.parent / "README.md").read_text()
