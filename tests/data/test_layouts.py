"""Common layouts: folders of classes and splits, with their names and problems."""

import shlex

import numpy as np
import pytest
from PIL import Image

from fed_dpsd.config.compose import compose
from fed_dpsd.data import datasets
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.experiment import set_up
from tests import shapes
from tests.data.files import (
    bound,
    everything,
    hospital,
    loaded,
    number_of,
    parquet,
    picture,
    png,
    shades,
)


def test_folders_name_the_classes(tmp_path):
    folder = shapes.write_shapes(tmp_path / "pictures", 9)
    config = set_up(compose(["data=imagefolder", f"data.path={folder}"]), tmp_path).config.data
    assert config.classes == config.class_names == shapes.CLASSES
    numbers = shades(tmp_path / "numbers", **{"0": [1, 2], "1": [3, 4]})
    overrides = ["data=folder", f"data.path={numbers}", "data.num_classes=2"]
    assert set_up(compose(overrides), tmp_path).config.data.classes == ()
    assert bound(tmp_path, numbers).class_names == ("0", "1")


def test_images_lie_at_any_depth_and_are_grey_or_coloured(tmp_path):
    for split in ("train", "test"):
        shades(tmp_path / "D" / split, dog=[10, 20], cat=[30])
        picture(tmp_path / "D" / split / "dog" / "more" / "0.png", 40)
        (tmp_path / "D" / split / "cat" / ".hidden").write_text("no picture")
    for channels in (1, 3):
        train = loaded(tmp_path, tmp_path / "D", f"data.shape=[{channels},8,8]").train
        assert train.images.shape == (4, channels, 8, 8)
        assert number_of(train) == {10: 1, 20: 1, 30: 0, 40: 1}
        assert train.patients is None


def test_a_user_may_give_the_classes_in_another_order(tmp_path):
    path = shades(tmp_path / "pictures", cat=[1, 2], dog=[100, 200])
    data = loaded(tmp_path, path, "data.classes=[dog,cat]")
    assert everything(data) == {1: 1, 2: 1, 100: 0, 200: 0}
    with pytest.raises(UserError, match=r"no class: cat \(cat/1.png\); the classes are dog, cow"):
        loaded(tmp_path, path, "data.classes=[dog,cow]")


def test_data_without_classes_is_the_only_problem_that_is_reported(tmp_path):
    shades(tmp_path / "one", cat=[1])
    (tmp_path / "empty").mkdir()
    (tmp_path / "archive.zip").write_text("no table")
    cases = [
        (None, "data=imagefolder: data.path is needed; give a folder with a folder of images"),
        ("nowhere", "data.path=.*/nowhere does not exist; give a folder"),
        ("one", "data=imagefolder: data.path has one class, cat; give a folder"),
        ("empty", "data.path=.*/empty has no class folder; it holds nothing: give a folder"),
        ("archive.zip", "data.path=.*/archive.zip is neither a folder nor a table; give a folder"),
    ]
    for path, expected in cases:
        place = [f"data.path={path}"] if path else []
        with pytest.raises(ConfigError, match=expected) as raised:
            set_up(compose(["data=imagefolder", *place]), tmp_path)
        assert len(raised.value.problems) == 1, path


def test_names_and_numbers_of_classes_are_checked(tmp_path):
    """Two names of one text would be one class: the last would take the records of both."""
    shades(tmp_path / "D", ill=[1], well=[2])
    for override in ("data.path=5", "data.num_classes=3.0", "data.classes=abc"):
        with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}=.* must be a"):
            set_up(compose(["data=imagefolder", "data.path=D", override]), tmp_path)
    names = ["a,a", "a,a,b", "a,'a ',b", "a,' '", "'1','1.0'", "'True','true'", "'é','e\u0301'"]
    for given in names:
        with pytest.raises(ConfigError, match=r"classes=\[.*\] must be num_classes=2 different"):
            set_up(
                compose(["data=folder", "data.num_classes=2", f"data.classes=[{given}]"]), tmp_path
            )


def test_names_that_are_nearly_one_are_refused(tmp_path):
    shades(tmp_path / "D", Normal=[1], normal=[2])
    with pytest.raises(ConfigError, match="Normal and normal differ only in capitals; give them"):
        bound(tmp_path, tmp_path / "D")
    listed = loaded(tmp_path, tmp_path / "D", "data.classes=[Normal,normal]")
    assert everything(listed) == {1: 0, 2: 1}
    shades(tmp_path / "E", **{"1": [1], "1.0": [2], "two": [3]})
    with pytest.raises(ConfigError, match="folder '1' has the same name as another"):
        bound(tmp_path, tmp_path / "E")


def test_classes_are_named_as_they_are_typed(tmp_path):
    shades(tmp_path / "D" / "train", **{"0": [1], "1": [2], "a, b": [3]})
    shades(tmp_path / "D" / "test", **{"0": [1], "a, b": [3]})
    with pytest.raises(ConfigError) as caught:
        bound(tmp_path, tmp_path / "D")
    (setting,) = shlex.split(str(caught.value).partition("list all classes: ")[2])
    assert bound(tmp_path, tmp_path / "D", setting).class_names == ("0", "1", "a, b")


def test_names_in_latin_1_are_read_and_named(tmp_path, monkeypatch):
    """Messages are kept from the log, whose text xdist cannot send."""
    said: list[str] = []
    monkeypatch.setattr(datasets, "warn_once", said.append)
    place = shades(tmp_path / "L", well=[1], ill=[2])
    (place / "well" / "1.png").rename(place / "well" / "r\udce9s.png")
    (place / "ill" / "\udce9.png").write_bytes(b"broken")
    assert everything(loaded(tmp_path, place)) == {1: 1, 2: 0}
    assert any("3 files found, 2 used, 1 skipped: 1 unreadable (ill/" in line for line in said)
    (place / "well").rename(place / "w\udce9ll")
    assert len(bound(tmp_path, place).class_names) == 2
    assert len(everything(loaded(tmp_path, place))) == 2


# --- splits ---


def test_splits_have_names_in_any_case(tmp_path):
    """They are no classes."""
    for names in (("Training", "Testing"), ("TRAIN", "test")):
        path = tmp_path / names[0]
        shades(path / names[0], a=[10], b=[11])
        shades(path / names[1], a=[20], b=[21])
        assert bound(tmp_path, path).class_names == ("a", "b")
        data = loaded(tmp_path, path)
        assert (number_of(data.train), number_of(data.test)) == ({10: 0, 11: 1}, {20: 0, 21: 1})


def test_without_train_and_test_about_one_in_five_is_for_testing(tmp_path, said):
    path = shades(tmp_path / "pictures", cat=range(100), dog=range(100, 250))
    data = loaded(tmp_path, path)
    train, test = (s.images[:, 0, 0, 0].tolist() for s in (data.train, data.test))
    assert sorted(train + test) == list(range(250))
    assert 25 <= len(test) <= 75  # Binomial(250, 1/5) is outside with probability 1e-4
    (line,) = said()
    assert "has no train and test splits: one image in 5 is for testing, chosen by a hash" in line
    assert f"pixels, {len(test)} of 250 images; to divide it differently, name folders" in line
    alone = datasets.load_test(bound(tmp_path, path), tmp_path / "third")
    assert (alone.images == data.test.images).all()


def test_given_splits_are_taken_as_they_are(tmp_path, said):
    path = tmp_path / "pictures"
    shades(path / "train", cat=[1, 2], dog=[3])
    with pytest.raises(UserError, match="has no test split; it holds train: give a folder"):
        loaded(tmp_path, path)
    shades(path / "dev", cat=[6], dog=[7])
    with pytest.raises(UserError, match="no test split; it holds dev, train: rename dev to test"):
        loaded(tmp_path, path)
    shades(path / "test", cat=[4], dog=[5])
    data = loaded(tmp_path, path)
    assert (len(data.train), len(data.test)) == (3, 2)
    assert data.counts == ("train: 3 files found, 3 used", "test: 2 files found, 2 used")
    assert {line.partition(": ")[2] for line in said()} == {
        "dev (2 files) is not read: nothing is selected on a validation split",
        "2 test images are too few to judge a student; 25 would be enough",
    }
    shades(path / "Training", cat=[1], dog=[3])
    with pytest.raises(ConfigError, match="Training and train are both for train; merge them"):
        bound(tmp_path, path)


@pytest.mark.parametrize("count", [24, 25])
def test_few_test_images_are_a_warning(tmp_path, said, count):
    path = tmp_path / "pictures"
    shades(path / "train", cat=[1, 2], dog=[3])
    shades(path / "test", cat=range(4, 14), dog=range(14, 4 + count))
    loaded(tmp_path, path)
    assert any("too few to judge a student" in line for line in said()) == (count < 25)


def test_a_coordinators_test_folder_needs_no_other(tmp_path, said):
    path = tmp_path / "pictures"
    shades(path / "test", cat=range(4), dog=range(4, 9))
    assert len(datasets.load_test(bound(tmp_path, path), tmp_path / "cache")) == 9
    assert not said()
    with pytest.raises(UserError, match=r"has no train split; it holds test: give a folder"):
        loaded(tmp_path, path)


def test_names_that_look_like_splits_are_refused_unless_they_are_classes(tmp_path):
    """They were the two classes, as Training and Testing once were."""
    for names in (("train_set", "test_set"), ("X_train", "X_val")):
        path = shades(tmp_path / names[0], **{f"{name}/ill": [1] for name in names})
        with pytest.raises(ConfigError, match="look like splits; name them"):
            bound(tmp_path, path)
        listed = f"data.classes=[{','.join(sorted(names))}]"
        assert bound(tmp_path, path, listed).class_names == tuple(sorted(names))
    path = shades(tmp_path / "D", trainer=[1], oval=[1])  # no split's
    assert bound(tmp_path, path).class_names == ("oval", "trainer")
    path = shades(tmp_path / "E", bus=[1, 2], train=[3, 4])
    with pytest.raises(ConfigError, match=r"train is named like a split, .* \(bus\); move away"):
        bound(tmp_path, path)
    assert len(everything(loaded(tmp_path, path, "data.classes=[bus,train]"))) == 4


def test_a_folder_of_classes_may_be_named_as_a_split(tmp_path):
    """The folder next to it is not one of its splits, whatever it holds; the control reads both."""
    shades(tmp_path / "train", cat=[1, 10], dog=[200, 250])
    shades(tmp_path / "test", cow=[1, 10], dog=[200, 250])
    listed = "data.classes=[cat,dog]"
    assert len(everything(loaded(tmp_path, tmp_path / "train", listed))) == 4
    with pytest.raises(UserError, match="labels that name no class: cow"):
        loaded(tmp_path, tmp_path, listed)


def test_splits_inside_folders_of_classes_are_reported(tmp_path, said):
    shades(
        tmp_path / "D", **{f"{name}/{split}": [1] for name in "ab" for split in ("train", "test")}
    )
    loaded(tmp_path, tmp_path / "D")
    assert any("folder a/test is not used as a split" in line for line in said())


def test_images_of_both_splits_are_counted(tmp_path, said):
    """Two folders of links to the same pictures gave a score on training pictures."""
    for shade, name in enumerate(("ill/0", "ill/1", "well/2", "well/3")):
        picture(tmp_path / "D" / "train" / f"{name}.png", shade)
        picture(tmp_path / "D" / "test" / f"{name}.bmp", shade if shade < 3 else 9)
    for _ in range(2):  # read from the files, and from the cache
        datasets.warn_once.cache_clear()
        loaded(tmp_path, tmp_path / "D")
    sentence = "3 of 4 test images are training images too, pixel for pixel, which inflates scores"
    assert sum(line.endswith(sentence) for line in said()) == 2


def test_a_table_of_the_hub_that_is_not_read_is_refused(tmp_path):
    """Its labels were not read: folders named the classes, or "data.path is needed"."""
    for name in ("metadata.jsonl", "metadata.parquet"):
        alone = shades(tmp_path / name / "D", ill=[1], well=[1])
        for split in ("train", "test"):
            picture(tmp_path / name / "E" / split / "0.png")
        (alone / name).touch()
        (tmp_path / name / "E" / "train" / name).touch()
        for folder in ("D", "E"):
            with pytest.raises(ConfigError, match=f"{name} is not read; write it as metadata.csv"):
                bound(tmp_path, tmp_path / name / folder)
        with pytest.raises(UserError, match=f"{name} is not read; write it as metadata.csv"):
            hospital(alone)


# --- pictures ---


def test_broken_pictures_are_reported_once_and_the_others_used(tmp_path, said):
    folder = shapes.write_shapes(tmp_path / "pictures", 60, broken=2)
    (folder / "circle" / "notes.txt").write_text("no picture")
    (folder / "square" / "gone.png").symlink_to("nowhere")
    (folder / "README").write_text("my pictures")
    assert len(loaded(tmp_path, folder, "data.resize=true").counts) == 1
    line = said()[0]
    assert "63 files found, 58 used, 5 skipped: 1 in no class's folder (README); 4 unread" in line
    names = ("circle/000.", "square/001.", "circle/notes.txt: it is not a PNG", "gone.png: No")
    assert [name for name in names if name not in line] == []
    assert "rrno" not in line
    assert len(said()) == 3  # with the one on the split and the one on the few test images
    loaded(tmp_path, folder, "data.resize=true")
    assert len(said()) == 3
    datasets.warn_once.cache_clear()  # another process, which finds the images in the cache
    loaded(tmp_path, folder, "data.resize=true")
    assert len(said()) == 6


def test_a_class_without_pictures_is_a_warning(tmp_path, said):
    """An error would reveal whether a record is present."""
    path = shades(tmp_path / "pictures", cat=range(30), dog=[40], cow=[])
    (path / "dog" / "40.png").write_bytes(b"broken")
    assert len(everything(loaded(tmp_path, path))) == 30
    lines = said()
    assert "31 files found, 30 used, 1 skipped: 1 unreadable (dog/40.png: it is not" in lines[0]
    assert lines[2].endswith("no image of class cow, dog for training")
    assert lines[3].endswith("no image of class cow, dog for testing")


def test_a_folder_that_is_not_as_configured_is_an_error(tmp_path):
    def break_all(root):
        for path in root.rglob("*.png"):
            path.write_bytes(png(1)[:40])

    cases = [
        (break_all, r"no record can be read: 3 files found, 0 used, .* 3 unreadable \(cat/"),
        (lambda root: (root / "cat" / "a").symlink_to(root), "links to a folder that contains it"),
        (
            lambda root: (root / "cat" / "30.png").write_bytes(png(1, (9, 8))),
            r"cat/30.png has shape \[1, 8, 9\], but data.shape=\[1, 8, 8\]; .* data.resize=true",
        ),
        (
            lambda root: (root / "cat").rename(root / "cow"),
            r"labels that name no class: cow \(cow/30.png\); the classes are cat, dog; correct",
        ),
        (lambda root: [p.unlink() for p in root.rglob("*.png")], "there is no image; give images"),
    ]
    options = ("data.classes=[cat,dog]", "data.resize=false")
    for number, (change, expected) in enumerate(cases):
        for split in ("train", "test"):
            shades(tmp_path / f"{number}" / split, dog=[10, 20], cat=[30])
        change(tmp_path / f"{number}" / "train")
        with pytest.raises(UserError, match=expected):
            loaded(tmp_path, tmp_path / f"{number}", *options)
        assert not list((tmp_path / "cache").rglob("*.npy"))
    with pytest.raises(UserError, match="patient_column=p: class folders name no patients"):
        loaded(tmp_path, tmp_path / "0", *options, "data.patient_column=p")


def test_the_middle_square_is_scaled_with_antialiasing(tmp_path):
    """Thin stripes in the middle become grey; what is left and right of them is cut off.

    A scaling that looks at single pixels, or at neighbours only, would find no stripe.
    """
    pixels = np.full((32, 64), 255, np.uint8)
    pixels[:, 16:48] = (np.arange(32) % 4 == 0) * 200
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            path = shades(tmp_path / "folders" / split, **{name: []}) / name / "0.png"
            Image.fromarray(pixels).save(path)
    table = parquet(tmp_path / "table", [path.read_bytes()] * 2, label=["cat", "dog"])
    for place in (table, tmp_path / "folders"):
        with pytest.raises(UserError, match=r"shape \[1, 32, 64\], .* data.resize=true to scale"):
            loaded(tmp_path, place, "data.resize=false")
        images = loaded(tmp_path, place, "data.resize=true").test.images
        assert images.shape[1:] == (1, 8, 8)
        assert np.abs(images[..., 1:-1].astype(int) - 200 / 4).max() <= 1
        assert images.max() < 100
