"""Layouts and files that people have: what is found, used and skipped, and what is refused."""

import os
import shlex
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fed_dpsd.client import records as hospitals
from fed_dpsd.client.records import HospitalFiles
from fed_dpsd.config.compose import compose
from fed_dpsd.data import datasets
from fed_dpsd.data.images import open_image
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.experiment import load_data, set_up

CLASSES = ("ill", "well")


@pytest.fixture
def said(caplog):
    datasets._say_once.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records]


def bound(base, path, *overrides):
    chosen = ["data=imagefolder", f'data.path="{path}"', "data.shape=[1,8,8]"]
    return set_up(compose([*chosen, *overrides]), base).config.data


def loaded(base, path, *overrides):
    return datasets.load(bound(base, path, *overrides), base / "cache")


def picture(path, shade):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), shade).save(path)


def table(place, rows, head="image,label"):
    """A CSV of these rows, with a picture for each path in it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("\n".join([head, *rows]) + "\n")
    for shade, row in enumerate(rows, 1):
        picture(place.parent / row.split(",")[0].replace("\\", "/"), shade)
    return place


def number_of(split):
    return dict(zip(split.images[:, 0, 0, 0].tolist(), split.labels.tolist(), strict=True))


def everything(data):
    return number_of(data.train) | number_of(data.test)


def hospital(path, **changes):
    given = {"image_column": "image", "label_column": "label", "patient_column": None}
    files = HospitalFiles(str(path), skip_unreadable=True, **given | changes)
    return hospitals.read(files, (1, 8, 8), CLASSES)


# --- splits ---


@pytest.mark.parametrize("names", [("Training", "Testing"), ("TRAIN", "test"), ("train", "Test")])
def test_splits_have_names_in_any_case(tmp_path, names):
    """F3: Training and Testing were the two classes."""
    for split, shade in zip(names, (10, 20), strict=True):
        picture(tmp_path / "B" / split / "a" / "0.png", shade)
        picture(tmp_path / "B" / split / "b" / "0.png", shade + 1)
    config = bound(tmp_path, tmp_path / "B")
    assert config.class_names == ("a", "b")
    data = datasets.load(config, tmp_path / "cache")
    assert (number_of(data.train), number_of(data.test)) == ({10: 0, 11: 1}, {20: 0, 21: 1})


def test_two_places_of_one_split_are_refused(tmp_path):
    for split in ("train", "Training", "test"):
        picture(tmp_path / split / "a" / "0.png", 1)
        picture(tmp_path / split / "b" / "0.png", 2)
    with pytest.raises(ConfigError, match="Training and train are both for train; join them"):
        bound(tmp_path, tmp_path)


def test_a_validation_split_is_said_to_be_left(tmp_path, said):
    for split in ("train", "dev", "test"):
        picture(tmp_path / "B" / split / "a" / "0.png", 1)
        picture(tmp_path / "B" / split / "b" / "0.png", 2)
    loaded(tmp_path, tmp_path / "B")
    assert any("dev (2 files) is not read" in line for line in said())


@pytest.mark.parametrize("names", [("train_set", "test_set"), ("X_train", "X_val")])
def test_names_that_look_like_splits_are_refused_unless_they_are_classes(tmp_path, names):
    """They were the two classes, as Training and Testing once were."""
    for shade, split in enumerate(names):
        picture(tmp_path / split / "ill" / "0.png", shade)
    with pytest.raises(ConfigError, match="look like splits; name them"):
        bound(tmp_path, tmp_path)
    classes = bound(tmp_path, tmp_path, f"data.classes=[{','.join(sorted(names))}]").class_names
    assert classes == tuple(sorted(names))
    for name in ("trainer", "oval"):  # no split's
        picture(tmp_path / "D" / name / "0.png", 1)
    assert bound(tmp_path, tmp_path / "D").class_names == ("oval", "trainer")


def test_splits_inside_folders_of_classes_are_not_passed_over_in_silence(tmp_path, said):
    for name in ("ill/train", "ill/test", "well/train", "well/test"):
        picture(tmp_path / "D" / name / "0.png", len(name))
    loaded(tmp_path, tmp_path / "D")
    assert any("folder ill/test is not taken as a split" in line for line in said())


def test_images_of_both_splits_are_counted(tmp_path, said):
    """Two folders of links to the same pictures gave a score of pictures that were trained on."""
    for shade, name in enumerate(("ill/0", "ill/1", "well/2", "well/3")):
        picture(tmp_path / "D" / "train" / f"{name}.png", shade)
        picture(tmp_path / "D" / "test" / f"{name}.bmp", shade if shade < 3 else 9)
    for _ in range(2):  # read from the files, and from the cache
        datasets._say_once.cache_clear()
        loaded(tmp_path, tmp_path / "D")
    sentence = "3 of 4 test images are training images too, pixel for pixel: scores are too good"
    assert [line.endswith(sentence) for line in said()] == [True, True]


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.parquet"])
def test_a_table_of_the_hub_that_is_not_read_is_refused(tmp_path, name):
    """Its labels were not read, and folders named the classes, or "data.path is needed"."""
    for place in ("D/ill", "D/well", "E/train", "E/test"):
        picture(tmp_path / place / "0.png", 1)
    (tmp_path / "D" / name).touch()
    (tmp_path / "E" / "train" / name).touch()
    for folder in ("D", "E"):
        with pytest.raises(ConfigError, match=f"{name} is not read; write it as metadata.csv"):
            bound(tmp_path, tmp_path / folder)
    with pytest.raises(UserError, match=f"{name} is not read; write it as metadata.csv"):
        hospital(tmp_path / "D")


# --- tables ---


def test_two_columns_of_one_name_are_refused(tmp_path):
    """F8: the last one won."""
    path = table(tmp_path / "t.csv", ["0.png,a,b", "1.png,b,a"], "image,label,label")
    with pytest.raises(ConfigError, match="t.csv has several columns label; rename or delete one"):
        bound(tmp_path, path)
    with pytest.raises(UserError, match="t.csv has several columns label"):
        hospital(path)


def test_a_row_that_is_longer_than_the_first_line_is_refused(tmp_path):
    path = table(tmp_path / "t.csv", ["0.png,well", "1.png,ill, not well"])
    with pytest.raises(ConfigError, match="line 3 has 3 cells, but there are 2 columns; put"):
        bound(tmp_path, path)
    path.write_text('image,label\n0.png,well\n"1.png,ill\n')  # the rest would be one cell
    with pytest.raises(ConfigError, match=r"cannot be read as CSV in UTF-8 \(unexpected end"):
        bound(tmp_path, path)


@pytest.mark.parametrize("one", ["1", "1.0", "True"])
def test_one_hot_columns_of_a_csv(tmp_path, said, one):
    """F13: no image with a label; rows of several labels were dropped without a count."""
    zero = {"1": "0", "1.0": "0.0", "True": "False"}[one]
    flags = [(one, zero), (zero, one), (one, one), (zero, zero), ("", one)]
    rows = [f"{i}.png,{a},{b}" for i, (a, b) in enumerate(flags)]
    path = table(tmp_path / "t.csv", rows, "image,well,ill")
    columns = ("data.label_column=null", "data.label_columns=[well,ill]")
    data = loaded(tmp_path, path, *columns)
    assert everything(data) == {1: 0, 2: 1, 5: 1}
    counted = (
        "5 rows found, 3 used, 2 skipped: 1 with several labels (2.png); 1 without a label (3.png)"
    )
    assert counted in said()[0]
    read = hospital(path, label_column=None, label_columns=("well", "ill"))
    assert str(read.count) == counted
    assert number_of(read.records) == {1: 1, 2: 0, 5: 0}  # the federation's order


def test_a_one_hot_column_of_shares_is_refused(tmp_path):
    path = table(tmp_path / "t.csv", ["0.png,0.7,0.3"], "image,well,ill")
    config = bound(tmp_path, path, "data.label_column=null", "data.label_columns=[well,ill]")
    with pytest.raises(UserError, match="0.png: well is 0.7; it must be 0 or 1"):
        datasets.load(config, tmp_path / "cache")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_records_without_a_label_are_counted_and_skipped_alike(tmp_path, said, form):
    """F15: one reader stripped spaces, the other refused; an empty label became a class."""
    rows = ["0.png,well", "1.png, ill ", "2.png,", "3.png,  ", "4.png,ill"]
    path = table(tmp_path / "t.csv", rows)
    if form == "parquet":
        names, labels = zip(*(row.split(",") for row in rows), strict=True)
        labels = [label or None for label in labels]
        columns = pyarrow.table({"image": names, "label": labels})
        path = tmp_path / "t.parquet"
        pyarrow.parquet.write_table(columns, path)
    data, read = loaded(tmp_path, path), hospital(path)
    assert everything(data) == number_of(read.records) == {1: 1, 2: 0, 5: 0}
    assert str(read.count) in said()[0]
    assert str(read.count).endswith("2 skipped: 2 without a label (2.png, 3.png)")


def test_layouts_of_the_hub_and_of_excel(tmp_path):
    """F17."""
    folder = tmp_path / "hub"
    for split in ("train", "test"):
        table(folder / split / "metadata.csv", ["a/0.png,well", "1.png,ill"], "file_name,label")
    data = loaded(tmp_path, folder)
    assert number_of(data.train) == number_of(data.test) == {1: 1, 2: 0}
    assert number_of(hospital(folder / "train").records) == {1: 1, 2: 0}

    excel = table(tmp_path / "excel" / "T.CSV", ["well\\0.png,well", "ill\\1.png,ill"])
    excel.write_text("sep=;\n" + excel.read_text().replace(",", ";"))
    assert everything(loaded(tmp_path, excel)) == {1: 1, 2: 0}
    assert number_of(hospital(excel).records) == {1: 1, 2: 0}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_spellings_of_a_csv_that_have_always_passed(tmp_path, mark, separator, end):
    path = table(tmp_path / "t.csv", ["0.png,no,007", "1.png,1e5,08"], "image,label,patient")
    text = mark + path.read_text().replace(",", separator).replace("\n", end)
    path.write_bytes(text.encode())
    config = bound(tmp_path, path, "data.patient_column=patient")
    assert config.class_names == ("1e5", "no")
    data = datasets.load(config, tmp_path / "cache")
    assert everything(data) == {1: 1, 2: 0}
    assert len({*data.train.patients, *data.test.patients}) == 2


# --- pictures ---


def test_twelve_bits_in_sixteen_are_said_and_scaled(tmp_path, said):
    """F16: pixels were 0 to 15 of 255, without a word."""
    for name, value in (("ill", 4_000), ("well", 2_000)):
        (tmp_path / "D" / name).mkdir(parents=True)
        deep = np.full((8, 8), value, np.uint16)
        for split in range(12):
            deep[0, 0] = value + split
            Image.fromarray(deep).save(tmp_path / "D" / name / f"{split}.png")
    path = tmp_path / "D"
    dark = loaded(tmp_path, path)
    assert dark.train.images.max() == 15
    assert any(
        "16 bits use 12 at most, so they are nearly black; pixel_bits=12" in x for x in said()
    )
    right = loaded(tmp_path, path, "data.pixel_bits=12")
    shades = zip(right.train.labels, right.train.images[:, 0, 4, 4], strict=True)
    assert dict(shades).items() <= {0: 250, 1: 125}.items()
    assert hospital(path).notes
    assert not hospital(path, pixel_bits=12).notes
    assert hospital(path, pixel_bits=12).records.images.max() == 250
    loaded(tmp_path, path, "data.pixel_bits=11")
    assert any("12 unreadable (ill/0.png: its pixels have 12 bits, more than" in x for x in said())


def test_pictures_that_have_always_passed(tmp_path):
    """EXIF's turn, CMYK, palettes with alpha, 16 bits, large, truncated and empty ones."""
    place = tmp_path / "D" / "ill"
    picture(tmp_path / "D" / "well" / "0.png", 1)
    place.mkdir()
    apply_polarity = np.zeros((8, 8), np.uint8)
    apply_polarity[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    Image.fromarray(apply_polarity).save(place / "exif.png", exif=exif)
    Image.new("CMYK", (8, 8), (0, 0, 0, 128)).save(place / "cmyk.jpg")
    Image.new("RGBA", (8, 8), (9, 9, 9, 9)).convert("P").save(place / "palette.png")
    Image.new("L", (6_000, 6_000), 77).save(place / "large.png")
    Image.new("L", (80, 80), 5).save(place / "cut.jpg")
    (place / "cut.jpg").write_bytes((place / "cut.jpg").read_bytes()[:-60])
    (place / "empty.png").write_bytes(b"")
    for name in (".DS_Store", "._0.png", "../__MACOSX/ill/._0.png"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"\0")
    assert bound(tmp_path, tmp_path / "D").class_names == CLASSES
    read = hospital(tmp_path / "D")
    assert sorted(line.partition(":")[0] for line in read.count.skipped["unreadable"]) == [
        "ill/cut.jpg",
        "ill/empty.png",
    ]
    assert (read.count.found, read.count.used) == (7, 5)
    assert open_image(place / "exif.png", 1).getpixel((0, 0)) == 0
    assert any((image == 77).all() for image in read.records.images)


# --- names, and the cache ---


def test_names_in_latin_1_are_read_and_named(tmp_path, monkeypatch):
    """F7: a traceback. Messages are kept from the log, whose text xdist could not send."""
    said: list[str] = []
    monkeypatch.setattr(datasets, "_say_once", said.append)
    place = tmp_path / "L"
    picture(place / "well" / "0.png", 1)
    picture(place / "ill" / "1.png", 2)
    os.rename(bytes(place / "well" / "0.png"), bytes(place) + b"/well/r\xe9s.png")
    (place / "ill" / "x.png").write_bytes(b"broken")
    os.rename(bytes(place / "ill" / "x.png"), bytes(place) + b"/ill/\xe9.png")
    assert everything(loaded(tmp_path, place)) == {1: 1, 2: 0}
    assert any("3 files found, 2 used, 1 skipped: 1 unreadable (ill/" in line for line in said)
    os.rename(bytes(place / "well"), bytes(place) + b"/w\xe9ll")
    config = bound(tmp_path, place)
    assert len(config.class_names) == 2
    assert len(everything(datasets.load(config, tmp_path / "cache"))) == 2


def test_a_failure_that_may_pass_is_not_cached(tmp_path, monkeypatch):
    """Permissions were repaired, and the failure stayed in the cache."""
    table(tmp_path / "t.csv", [f"{i}.png,{CLASSES[i % 2]}" for i in range(20)])
    read_bytes = Path.read_bytes

    def denied(path):
        if path.name == "3.png":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert len(everything(loaded(tmp_path, tmp_path / "t.csv"))) == 19
    assert not (tmp_path / "cache").exists()
    monkeypatch.undo()
    assert len(everything(loaded(tmp_path, tmp_path / "t.csv"))) == 20
    (tmp_path / "5.png").unlink()
    assert len(everything(loaded(tmp_path, tmp_path / "t.csv"))) == 19
    picture(tmp_path / "5.png", 200)  # a file that appears is seen, though its absence was cached
    assert 200 in everything(loaded(tmp_path, tmp_path / "t.csv"))


def test_a_file_with_other_content_and_its_old_size_and_time_is_another(tmp_path):
    picture(tmp_path / "D" / "ill" / "0.bmp", 1)
    picture(tmp_path / "D" / "well" / "0.bmp", 2)
    assert everything(loaded(tmp_path, tmp_path / "D")) == {1: 0, 2: 1}
    changed = tmp_path / "D" / "well" / "0.bmp"
    before = changed.stat()
    content = bytearray(changed.read_bytes())
    picture(changed, 7)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (changed.stat().st_size, changed.stat().st_mtime_ns) == (
        before.st_size,
        before.st_mtime_ns,
    )
    assert changed.read_bytes() != content
    assert everything(loaded(tmp_path, tmp_path / "D")) == {1: 0, 7: 1}


@pytest.mark.parametrize("part", ["about.json", "images.npy", "patients.npy", "labels.npy"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_part_of_the_cache_that_goes_or_breaks_is_made_again(tmp_path, part, whole):
    """Without the file of patients, records had none, so that a patient was in several shards."""
    rows = [f"{i}.png,{'ill' if i % 2 else 'well'},{i // 2}" for i in range(20)]
    path = table(tmp_path / "t.csv", rows, "image,label,patient")
    before = loaded(tmp_path, path, "data.patient_column=patient").train
    for file in (tmp_path / "cache" / "data").glob(f"*.{part}"):
        content = file.read_bytes()
        file.unlink()
        if not whole:
            file.write_bytes(content[: len(content) // 2])
    after = loaded(tmp_path, path, "data.patient_column=patient").train
    assert np.array_equal(after.patients, before.patients)
    assert np.array_equal(after.images, before.images)


# --- counts ---


def test_counts_are_there_where_nothing_is_skipped(tmp_path, said):
    table(tmp_path / "train.csv", ["0.png,well", "1.png,ill"])
    table(tmp_path / "test.csv", ["2.png,well", "3.png,ill"])
    picture(tmp_path / "2.png", 3)
    picture(tmp_path / "3.png", 4)
    counts = loaded(tmp_path, tmp_path).counts
    assert counts == ("train: 2 rows found, 2 used", "test: 2 rows found, 2 used")
    assert not said()
    assert load_data(set_up(compose([]), tmp_path).config.data, "").counts == (
        "1,797 images found, 1,797 used",
    )


def test_arrays_in_memory_are_those_of_a_file(tmp_path):
    images = np.arange(4, dtype=np.uint8)[:, None, None] * np.ones((1, 8, 8), np.uint8)
    labels = np.array([[0], [1], [0], [1]])
    np.savez(
        tmp_path / "m.npz",
        train_images=images,
        train_labels=labels,
        test_images=images[:2],
        test_labels=labels[:2],
    )
    columns = ("data.image_column=images", "data.label_column=labels")
    data = loaded(tmp_path, tmp_path / "m.npz", *columns)
    assert (number_of(data.train), number_of(data.test)) == ({0: 0, 1: 1, 2: 0, 3: 1}, {0: 0, 1: 1})
    with pytest.raises(
        ConfigError, match=r"no array image \(data.image_column\).*; its arrays are"
    ):
        bound(tmp_path, tmp_path / "m.npz")
    for array, problem in (
        (labels.astype(float)[:3], "4 images but 3 in label"),
        (np.zeros((4, 14)), "4 images but 56 in label"),
    ):
        np.savez(tmp_path / "n.npz", image=images, label=array)
        config = bound(tmp_path, tmp_path / "n.npz", "data.num_classes=2")
        with pytest.raises(UserError, match=problem):
            datasets.load(config, tmp_path / "cache")


def test_arrays_that_are_not_read_are_said_or_refused(tmp_path, said):
    images = np.arange(4, dtype=np.uint8)[:, None, None] * np.ones((1, 8, 8), np.uint8)
    own = {"image": images, "label": np.array([0, 1, 0, 1])}

    def of(split, shade=0):
        return {f"{split}_image": images + np.uint8(shade), f"{split}_label": own["label"]}

    np.savez(tmp_path / "all.npz", **own, **of("test"))
    loaded(tmp_path, tmp_path / "all.npz")
    assert any("its array test_image is not taken as a split" in line for line in said())
    np.savez(tmp_path / "three.npz", **of("train"), **of("test", 9), **of("val"))
    loaded(tmp_path, tmp_path / "three.npz")
    assert said()[-1].endswith("val_image is not read: nothing is selected on a validation split")
    np.savez(tmp_path / "two.npz", **of("train"), **of("val"))
    with pytest.raises(UserError, match=r"two.npz has no array test_image; give one for each"):
        loaded(tmp_path, tmp_path / "two.npz")


# --- columns and names that are not what they seem ---


def test_names_that_differ_in_capitals_alone_are_refused(tmp_path):
    picture(tmp_path / "D" / "Normal" / "0.png", 1)
    picture(tmp_path / "D" / "normal" / "0.png", 2)
    with pytest.raises(ConfigError, match="Normal and normal differ in capitals alone; give them"):
        bound(tmp_path, tmp_path / "D")
    listed = bound(tmp_path, tmp_path / "D", "data.classes=[Normal,normal]")
    assert everything(datasets.load(listed, tmp_path / "cache")) == {1: 0, 2: 1}


def test_a_column_of_ids_or_measures_is_no_column_of_classes(tmp_path):
    path = table(tmp_path / "t.csv", [f"{i}.png,{i / 7:.3f}" for i in range(30)])
    with pytest.raises(ConfigError, match="label has 30 different texts in 30 rows, as an id or"):
        bound(tmp_path, path)


def test_a_label_that_is_a_list_is_refused(tmp_path):
    picture(tmp_path / "0.png", 1)
    rows = pyarrow.table({"image": ["0.png"] * 2, "label": [["ill"], ["ill", "well"]]})
    pyarrow.parquet.write_table(rows, tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match=r"row 1: label holds \['ill'\]; a record has one class"):
        bound(tmp_path, tmp_path / "t.parquet")


def test_a_column_of_splits_is_not_passed_over_in_silence(tmp_path, said):
    path = table(tmp_path / "t.csv", ["0.png,ill,train", "1.png,well,test"], "image,label,Split")
    loaded(tmp_path, path)
    assert any(
        "its column Split is not taken as a split; to test on some of its rows" in line
        for line in said()
    )


@pytest.mark.parametrize("names", ["'1','1.0'", "'True','true'", "'é','e\u0301'", "ill,' ill'"])
def test_names_of_one_text_are_no_two_classes(tmp_path, names):
    """The last would take the records of both."""
    picture(tmp_path / "D" / "ill" / "0.png", 1)
    with pytest.raises(ConfigError, match="must be num_classes=2 different names"):
        bound(tmp_path, tmp_path / "D", f"data.classes=[{names}]")


def test_classes_are_named_as_they_are_typed(tmp_path):
    for split, names in {"train": ("0", "1", "a, b"), "test": ("0", "a, b")}.items():
        for shade, name in enumerate(names):
            picture(tmp_path / "D" / split / name / "0.png", shade)
    with pytest.raises(ConfigError) as caught:
        bound(tmp_path, tmp_path / "D")
    (setting,) = shlex.split(str(caught.value).partition("name all: ")[2])
    assert bound(tmp_path, tmp_path / "D", setting).class_names == ("0", "1", "a, b")
