"""Pictures that people have: folders of classes, tables of paths, and what is wrong with them."""

import csv
import io
import json
import logging

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fed_dpsd.client import records
from fed_dpsd.config import DataConfig
from fed_dpsd.config.compose import compose
from fed_dpsd.data import datasets
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.experiment import load_data, set_up
from tests.shapes import CLASSES, write_shapes


def bound(base, path, *overrides):
    """The configuration of pictures at a path."""
    chosen = ["data=imagefolder", f"data.path={path}", *overrides]
    return set_up(compose(chosen), base).config.data


def shades(folder, **classes):
    """A folder for each class, with a picture of one shade for each number."""
    for name, values in classes.items():
        (folder / name).mkdir(parents=True)
        for shade in values:
            Image.new("L", (8, 8), shade).save(folder / name / f"{shade}.png")
    return folder


def table(folder, rows, name="pictures.csv"):
    """A CSV with these rows, and a picture for each path in it that is not there."""
    folder.mkdir(exist_ok=True)
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for number, row in enumerate(rows):
        if not (folder / row["image"]).exists():
            Image.new("L", (8, 8), number).save(folder / row["image"])
    return folder / name


@pytest.fixture
def said(caplog):
    """What was said to the user so far."""
    datasets._say_once.cache_clear()
    caplog.set_level(logging.WARNING, "fed_dpsd")
    return lambda: [record.getMessage() for record in caplog.records]


GREY = "data.shape=[1,8,8]"


# --- classes ---


def test_folders_name_the_classes_and_the_user_names_none(tmp_path):
    config = bound(tmp_path, write_shapes(tmp_path / "pictures", 9))
    assert config.classes == config.class_names == CLASSES
    assert config.num_classes == 3


def test_a_user_may_give_the_classes_in_another_order(tmp_path):
    shades(tmp_path / "pictures", cat=[1, 2], dog=[100, 200])
    config = bound(tmp_path, "pictures", "data.classes=[dog,cat]", GREY)
    train = datasets.load(config, tmp_path / "cache").train
    assert ((train.images[:, 0, 0, 0] < 50) == (train.labels == 1)).all()
    other = bound(tmp_path, "pictures", "data.classes=[dog,cow]", GREY)
    with pytest.raises(UserError, match=r"no class: cat \(cat/1.png\); the classes are dog, cow"):
        datasets.load(other, tmp_path / "cache")


def test_folders_that_are_numbers_in_order_stay_numbers(tmp_path):
    shades(tmp_path / "pictures", **{"0": [1, 2], "1": [3, 4]})
    overrides = ["data=folder", f"data.path={tmp_path}/pictures", "data.num_classes=2"]
    assert set_up(compose(overrides), tmp_path).config.data.classes == ()
    assert bound(tmp_path, "pictures").class_names == ("0", "1")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (None, "data=imagefolder: data.path is needed; give a folder with a folder of images"),
        ("nowhere", "data.path=.*/nowhere is not there; give a folder"),
        ("one", "data=imagefolder: data.path has one class, cat; give a folder"),
        ("empty", "data.path=.*/empty has no folder of a class; it holds nothing: give a folder"),
        ("archive.zip", "data.path=.*/archive.zip is no folder and no table; give a folder"),
    ],
)
def test_data_without_classes_is_told_with_all_other_problems(tmp_path, path, expected):
    shades(tmp_path / "one", cat=[1])
    (tmp_path / "empty").mkdir()
    (tmp_path / "archive.zip").write_text("no table")
    overrides = ["data=imagefolder", "partition.alpha=0", *([f"data.path={path}"] if path else ())]
    with pytest.raises(ConfigError, match=expected) as raised:
        set_up(compose(overrides), tmp_path)
    assert len(raised.value.problems) == 2
    assert any("partition.alpha=0" in problem for problem in raised.value.problems)


@pytest.mark.parametrize("override", ["data.path=5", "data.num_classes=3.0", "data.classes=abc"])
def test_a_value_of_another_type_is_a_problem_like_others(tmp_path, override):
    write_shapes(tmp_path / "pictures", 9)
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}=.* must be a"):
        set_up(compose(["data=imagefolder", "data.path=pictures", override]), tmp_path)


@pytest.mark.parametrize("names", ["a,a", "a,a,b", "a,'a ',b", "a,' '"])
def test_names_of_classes_must_be_as_many_as_classes(tmp_path, names):
    with pytest.raises(ConfigError, match=r"classes=\[a, .*\] must be num_classes=2 different"):
        set_up(compose(["data=folder", "data.num_classes=2", f"data.classes=[{names}]"]), tmp_path)


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (["normal", "pneumonia"], ("normal", "pneumonia")),
        (["3", "5"], ("3", "5")),
        (None, ("0", "1")),
        (["normal", 5], ("0", "1")),
        ("normal", ("0", "1")),
    ],
)
def test_a_parquet_file_of_the_hub_declares_its_classes(tmp_path, declared, expected):
    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "PNG")
    table = pyarrow.table({"image": [buffer.getvalue()] * 8, "label": [1, 0] * 4})  # one image
    info = {"features": {"label": {"names": declared, "_type": "ClassLabel"}}}
    metadata = {"huggingface": json.dumps({"info": info} if declared else {})}
    path = tmp_path / "pictures.parquet"
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)
    config = bound(tmp_path, path, GREY)
    assert config.class_names == expected
    train = datasets.load(config, tmp_path / "cache").train
    assert train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


# --- the split ---


def test_without_train_and_test_about_one_in_five_is_for_testing(tmp_path, said):
    shades(tmp_path / "pictures", cat=range(100), dog=range(100, 250))
    data = datasets.load(bound(tmp_path, "pictures", GREY), tmp_path / "cache")
    train, test = (s.images[:, 0, 0, 0].tolist() for s in (data.train, data.test))
    assert sorted(train + test) == list(range(250))
    assert 25 <= len(test) <= 75  # Binomial(250, 1/5) is outside with probability 1e-4
    (line,) = said()
    assert "has no train and test: one image in 5 is for testing, chosen by a hash of its" in line
    assert f"pixels, {len(test)} of 250 images; folders train and test divide it otherwise" in line
    again = datasets.load(bound(tmp_path, "pictures", GREY), tmp_path / "other")
    assert (again.test.images == data.test.images).all()
    alone = datasets.load_test(bound(tmp_path, "pictures", GREY), tmp_path / "third")
    assert (alone.images == data.test.images).all()


def test_train_and_test_folders_are_taken_as_they_are(tmp_path, said):
    shades(tmp_path / "pictures" / "train", cat=[1, 2], dog=[3])
    shades(tmp_path / "pictures" / "test", cat=[4], dog=[5])
    shades(tmp_path / "pictures" / "val", cat=[6], dog=[7])
    config = bound(tmp_path, "pictures", GREY)
    data = datasets.load(config, tmp_path / "cache")
    assert (len(data.train), len(data.test)) == (3, 2)
    assert config.classes == ("cat", "dog")
    assert [line.partition(": ")[2] for line in said()] == [
        "val (2 files) is not read: nothing is selected on a validation split"
    ] * len(said())


def test_a_class_may_be_called_train(tmp_path):
    shades(tmp_path / "pictures", bus=[1, 2], train=[3, 4])
    with pytest.raises(ConfigError, match=r"train is named like a split, .* \(bus\); move what"):
        bound(tmp_path, "pictures", GREY)
    config = bound(tmp_path, "pictures", GREY, "data.classes=[bus,train]")
    data = datasets.load(config, tmp_path / "cache")
    assert len(data.train) + len(data.test) == 4


def test_a_training_split_alone_is_an_error_that_says_what_is_there(tmp_path):
    shades(tmp_path / "pictures" / "train", cat=[1, 2], dog=[3])
    shades(tmp_path / "pictures" / "val", cat=[6], dog=[7])
    with pytest.raises(UserError, match="has no test split; it holds train, val: rename val to"):
        datasets.load(bound(tmp_path, "pictures", GREY), tmp_path / "cache")


# --- pictures ---


def test_pictures_are_read_as_those_of_a_hospital(tmp_path):
    """Of various sizes, modes and formats."""
    folder = write_shapes(tmp_path / "pictures", 12)
    config = bound(tmp_path, folder)
    data = datasets.load(config, tmp_path / "cache")
    files = records.HospitalFiles(str(folder), "image", "label", None, False)
    theirs = records.read(files, config.shape, CLASSES).records
    ours = [
        (*split.labels[[i]], split.images[i].tobytes())
        for split in (data.train, data.test)
        for i in range(len(split))
    ]
    hospital = [
        (label, image.tobytes()) for label, image in zip(theirs.labels, theirs.images, strict=True)
    ]
    assert sorted(ours) == sorted(hospital)


def test_broken_pictures_are_told_once_and_the_others_used(tmp_path, said):
    folder = write_shapes(tmp_path / "pictures", 60, broken=2)
    (folder / "circle" / "notes.txt").write_text("no picture")
    (folder / "square" / "gone.png").symlink_to("nowhere")
    (folder / "README").write_text("my pictures")
    config = bound(tmp_path, folder)
    data = datasets.load(config, tmp_path / "cache")
    assert len(data.train) + len(data.test) == 58
    line = said()[0]
    assert "63 files found, 58 used, 5 skipped: 1 in no class's folder (README); 4 unread" in line
    for name in (
        "circle/000.",
        "square/001.",
        "circle/notes.txt: it is none of PNG",
        "gone.png: No",
    ):
        assert name in line
    assert "rrno" not in line
    assert len(said()) == 2  # with the one on the split
    datasets.load(config, tmp_path / "cache")
    assert len(said()) == 2
    datasets._say_once.cache_clear()  # another process, which finds the images in the cache
    datasets.load(config, tmp_path / "cache")
    assert len(said()) == 4


def test_a_class_without_pictures_is_a_warning(tmp_path, said):
    """An error would reveal whether a record is there."""
    shades(tmp_path / "pictures", cat=range(30), dog=[40])
    (tmp_path / "pictures" / "dog" / "40.png").write_bytes(b"broken")
    (tmp_path / "pictures" / "cow").mkdir()
    data = datasets.load(bound(tmp_path, "pictures", GREY), tmp_path / "cache")
    assert len(data.train) + len(data.test) == 30
    lines = said()
    assert "31 files found, 30 used, 1 skipped: 1 unreadable (dog/40.png: it is none" in lines[0]
    assert lines[2].endswith("no image for training of class cow, dog")
    assert lines[3].endswith("no image for testing of class cow, dog")


def test_pictures_of_which_none_can_be_read_are_an_error(tmp_path):
    shades(tmp_path / "pictures", cat=[1], dog=[4])
    for name in ("cat/1.png", "dog/4.png"):
        (tmp_path / "pictures" / name).write_bytes(b"broken")
    with pytest.raises(UserError, match=r"no record can be read: 2 files .*: 2 unreadable \(cat/1"):
        datasets.load(bound(tmp_path, "pictures", GREY), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.npy"))


# --- tables ---

ROWS = [{"image": f"{i}.png", "label": ("dog", "cat")[i % 2], "patient": i // 4} for i in range(40)]


def test_a_csv_of_paths_and_names(tmp_path):
    path = table(tmp_path / "data", ROWS)
    config = bound(tmp_path, path, GREY)
    assert config.classes == ("cat", "dog")
    data = datasets.load(config, tmp_path / "cache")
    assert min(len(data.train), len(data.test)) > 0
    for split in (data.train, data.test):
        assert ((split.images[:, 0, 0, 0] % 2 == 0) == (split.labels == 1)).all()


def test_patients_are_in_one_split(tmp_path):
    config = bound(tmp_path, table(tmp_path / "data", ROWS), GREY, "data.patient_column=patient")
    data = datasets.load(config, tmp_path / "cache")
    assert len(data.train) + len(data.test) == 40
    assert len(set(data.train.patients) | set(data.test.patients)) == 10
    assert not set(data.train.patients) & set(data.test.patients)
    assert len(data.test)


def test_given_splits_that_share_patients_are_refused_unless_that_is_allowed(tmp_path, said):
    path, cache = tmp_path / "data", tmp_path / "cache"
    table(path, ROWS[:24], "train.csv")
    table(path, ROWS[16:36], "test.csv")  # patients 4 and 5 are in both

    def load(*allowed):
        overrides = "data.patient_column=patient", *allowed
        return datasets.load(bound(tmp_path, path, GREY, *overrides), cache)

    shared = f"2 patients are in train and in test (data.path={path})"
    for _ in range(2):  # read from the files, and from the cache
        with pytest.raises(UserError) as caught:
            load()
        assert str(caught.value).startswith(f"{shared}; keep all records of a patient in one")
        assert "or set data.shared_patients=allow" in str(caught.value)
    assert said() == []
    data = load("data.shared_patients=allow")
    assert (len(data.train), len(data.test)) == (24, 20)
    line = said()[0]
    assert line.startswith(f"{shared}: scores are too good")
    table(path, ROWS[24:36], "test.csv")
    for allowed in ((), ("data.shared_patients=allow",)):
        assert len(load(*allowed).test) == 12
    assert [each for each in said() if "patient" in each] == [line]


def test_a_coordinators_test_set_alone_shares_no_patient(tmp_path):
    """Nothing is refused where the other split is not read: hospitals hold it."""
    path = tmp_path / "data"
    for name in ("train", "test"):
        table(path, ROWS, f"{name}.csv")
    config = bound(tmp_path, path, GREY, "data.patient_column=patient")
    assert len(datasets.load_test(config, tmp_path / "cache")) == 40


def test_a_row_without_its_patient_is_an_error(tmp_path):
    """All such rows would be one patient's."""
    rows = [*ROWS[:7], ROWS[7] | {"patient": " NaN "}]
    config = bound(tmp_path, table(tmp_path / "data", rows), GREY, "data.patient_column=patient")
    with pytest.raises(
        UserError, match="7.png has no patient; name its patient, delete it, or set"
    ):
        datasets.load(config, tmp_path / "cache")


def test_csv_files_of_train_and_test_with_columns_of_other_names(tmp_path):
    rows = [{"image": f"{i}.png", "label": str(5 + i % 3)} for i in range(6)]
    for name in ("train.csv", "test.csv"):
        path = table(tmp_path / "data", rows, name)
        path.write_text(path.read_text().replace("image,label", "file,kind"))
    columns = "data.image_column=file", "data.label_column=kind"
    config = bound(tmp_path, "data", GREY, *columns)
    assert config.classes == ("5", "6", "7")
    assert datasets.load(config, tmp_path / "cache").train.labels.tolist() == [0, 1, 2] * 2
    with pytest.raises(ConfigError) as raised:
        bound(tmp_path, "data", GREY)
    (problem,) = raised.value.problems
    assert "has no column image (data.image_column), label (data.label_column); its" in problem
    assert problem.endswith("set data.image_column=file data.label_column=kind")


def test_parquet_files_may_hold_paths(tmp_path):
    table(tmp_path / "data", ROWS)
    columns = {key: [row[key] for row in ROWS] for key in ("image", "label")}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "data" / "own.parquet")
    data = datasets.load(bound(tmp_path, "data/own.parquet", GREY), tmp_path / "cache")
    assert ((data.test.images[:, 0, 0, 0] % 2 == 0) == (data.test.labels == 1)).all()
    changed = tmp_path / "data" / "0.png"
    before = datasets.sources.fingerprint(bound(tmp_path, "data/own.parquet"), "train")
    Image.new("L", (9, 9)).save(changed)
    assert datasets.sources.fingerprint(bound(tmp_path, "data/own.parquet"), "train") != before


def test_what_is_wrong_with_a_table(tmp_path, said):
    rows = [*ROWS, {"image": "lost.png", "label": "cat", "patient": 1}]
    path = table(tmp_path / "data", rows)
    (tmp_path / "data" / "lost.png").unlink()
    datasets.load(bound(tmp_path, path, GREY), tmp_path / "cache")
    line = said()[0]
    assert "41 rows found, 40 used, 1 skipped: 1 unreadable (lost.png: No such file" in line
    path.write_text(path.read_text().replace("\n3.png,cat", "\n3.png, "))
    datasets.load(bound(tmp_path, path, GREY), tmp_path / "cache")
    assert "41 rows found, 39 used, 2 skipped: 1 unreadable (lost.png: " in said()[2]
    assert "1 without a label (3.png)" in said()[2]
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as CSV in UTF-8"):
        bound(tmp_path, path, GREY)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(
        ConfigError, match="broken.parquet cannot be read as a parquet file .*; write"
    ):
        bound(tmp_path, "broken.parquet")


def test_a_missing_column_is_told_without_a_look_at_images(tmp_path, monkeypatch):
    rows = {"label": [*"abab"], "scan": [{"bytes": b"of a gigabyte", "path": None}] * 4}
    rows |= {"number": [1, 2, 3, 4]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "own.parquet")
    asked, read = set(), pyarrow.parquet.ParquetFile.iter_batches

    def remembering(file, size, columns):
        asked.update(columns)
        return read(file, size, columns=columns)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", remembering)
    with pytest.raises(ConfigError) as raised:
        bound(tmp_path, "own.parquet", "data.label_column=diagnosis")
    assert "its columns are label, scan, number." in str(raised.value)
    assert "set data.image_column=scan data.label_column=label" in str(raised.value)
    assert asked == {"label", "number"}


def test_a_coordinators_pictures_are_all_for_testing_in_a_folder_test(tmp_path, said):
    shades(tmp_path / "pictures" / "test", cat=range(4), dog=range(4, 9))
    config = bound(tmp_path, "pictures", GREY)
    assert len(datasets.load_test(config, tmp_path / "cache")) == 9
    assert not said()


def test_text_labels_that_are_not_as_many_as_classes(tmp_path):
    path = table(tmp_path / "data", ROWS)
    overrides = ["data=folder", f"data.path={path}", "data.num_classes=3", GREY]
    config = set_up(compose(overrides), tmp_path).config
    with pytest.raises(UserError, match="no class: cat .*, dog .*; the classes are 0, 1, 2; corr"):
        load_data(config.data, config.cache)


def test_numbers_are_classes_by_themselves_and_names_may_be_given_beside(tmp_path):
    rows = [{"image": f"{i}.png", "label": i % 2} for i in range(4)]
    path = table(tmp_path / "data", rows)
    config = bound(tmp_path, path, GREY, "data.classes=[normal,ill]")
    data = datasets.load(config, tmp_path / "cache")
    assert sorted(data.train.labels.tolist() + data.test.labels.tolist()) == [0, 0, 1, 1]
    assert config.class_names == ("normal", "ill")


def test_columns_of_another_data_set_are_named(tmp_path):
    buffer = io.BytesIO()
    Image.new("L", (28, 28)).save(buffer, "PNG")
    rows = {"image": [{"bytes": buffer.getvalue(), "path": None}] * 2, "label": [0, 1]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "train.parquet")
    config = DataConfig("cifar10", None, str(tmp_path), "img", "label", None, (3, 32, 32), 10)
    with pytest.raises(UserError) as raised:
        datasets.load(config, tmp_path / "cache")
    assert str(raised.value).endswith(
        "has no column img (data.image_column); its columns are image, label. If it is not another "
        "data set than you named, set data.image_column=image"
    )
