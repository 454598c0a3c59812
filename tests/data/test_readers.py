"""Common tables and arrays, and the bits of their pictures."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fed_dpsd.config import DataConfig
from fed_dpsd.config.compose import compose
from fed_dpsd.data import datasets, intake, sources
from fed_dpsd.data.images import open_image
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.experiment import load_data, set_up
from fed_dpsd.progress import Display, PlainConsole, listening
from tests.data.files import (
    CLASSES,
    bound,
    everything,
    hospital,
    loaded,
    number_of,
    parquet,
    picture,
    png,
    shades,
    table,
)

ROWS = [(f"{i}.png", ("dog", "cat")[i % 2], str(i // 4)) for i in range(40)]
PATIENTS = ("image,label,patient", "data.patient_column=patient")


def test_a_csv_of_paths_and_names_and_a_parquet_file_of_them(tmp_path):
    path = table(tmp_path / "own.csv", ROWS, PATIENTS[0])
    assert bound(tmp_path, path).classes == ("cat", "dog")
    expected = {i + 1: (i + 1) % 2 for i in range(40)}
    assert everything(loaded(tmp_path, path)) == expected
    images, labels, _ = zip(*ROWS, strict=True)
    pyarrow.parquet.write_table(
        pyarrow.table({"image": images, "label": labels}), tmp_path / "own.parquet"
    )
    path = tmp_path / "own.parquet"
    assert everything(loaded(tmp_path, path)) == expected
    before = sources.Source(bound(tmp_path, path), "train").fingerprint()
    Image.new("L", (9, 9)).save(tmp_path / "0.png")
    assert sources.Source(bound(tmp_path, path), "train").fingerprint() != before
    numbers = compose(["data=folder", f"data.path={path}", "data.num_classes=3"])
    config = set_up(numbers, tmp_path).config
    with pytest.raises(UserError, match="no class: cat .*, dog .*; the classes are 0, 1, 2; corr"):
        load_data(config.data, config.cache)


@pytest.mark.parametrize("form", ["no bytes", "empty bytes", "no column of bytes", "absolute"])
def test_paths_in_a_parquet_file_of_the_hub_are_read_where_there_are_no_bytes(tmp_path, form):
    table(tmp_path / "own.csv", ROWS, PATIENTS[0])
    images, labels, _ = zip(*ROWS, strict=True)
    given = [{"bytes": None, "path": name} for name in images]
    if form == "empty bytes":
        given = [{"bytes": b"", "path": name} for name in images]
    if form == "no column of bytes":
        given = [{"path": name} for name in images]
    if form == "absolute":
        given = [{"bytes": None, "path": str(tmp_path / name)} for name in images]
    expected = {i + 1: (i + 1) % 2 for i in range(40)}
    if form != "no column of bytes":
        given[0] = {"bytes": png(50), "path": "nowhere.png"}
        expected[50] = expected.pop(1)
    path = tmp_path / "own.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"image": given, "label": labels}), path)
    assert everything(loaded(tmp_path, path)) == expected
    before = sources.Source(bound(tmp_path, path), "train").fingerprint()
    Image.new("L", (9, 9)).save(tmp_path / "39.png")
    assert sources.Source(bound(tmp_path, path), "train").fingerprint() != before


@pytest.mark.parametrize("kind", ["missing", "folder", "links"])
def test_many_images_that_cannot_be_opened_are_an_early_error(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(intake, "LOST_AT_MOST", 5)
    folder = shades(tmp_path / "D", ill=[1, 2, 3, 4], well=[])
    names = [f"ill/{shade}.png" for shade in (1, 2, 3, 4)] + [f"lost/{i}.png" for i in range(9)]
    path = folder / "t.csv"
    if kind == "folder":  # a file in the place of a folder
        (folder / "lost").touch()
    if kind == "links":
        path = folder
        for name in names[4:]:
            (folder / f"well/{Path(name).name}").symlink_to(tmp_path / "away" / name)
    else:
        rows = [f"{name},{('ill', 'well')[i % 2]}" for i, name in enumerate(names)]
        path.write_text("\n".join(["image,label", *rows]))
    with pytest.raises(UserError) as raised:
        loaded(tmp_path, path)
    assert "5 of the first 9 images cannot be opened; the first is " in str(raised.value)
    place = folder / ("well" if kind == "links" else "lost")
    assert f"looked for in {place}; check the paths" in str(raised.value)
    monkeypatch.setattr(intake, "LOST_AT_MOST", 10)  # the control
    assert sorted(everything(loaded(tmp_path, path))) == [1, 2, 3, 4]


def test_a_long_table_shows_its_progress(tmp_path):
    path, console = (
        table(tmp_path / "own.csv", [row[:2] for row in ROWS]),
        PlainConsole(file=io.StringIO()),
    )
    display = Display(console)
    display.say = lambda text="": console.print(
        [(t.description, t.completed) for t in display.tasks]
    )
    with listening(display):
        loaded(tmp_path, path)
    for work in ("labels read", "files looked up", "rows read"):
        assert f"('{work}', 40)" in console.file.getvalue()


def test_numbers_are_classes_and_may_be_given_names(tmp_path):
    path = table(tmp_path / "t.csv", [f"{i}.png,{i % 2}" for i in range(4)])
    names = "data.classes=[normal,ill]"
    assert everything(loaded(tmp_path, path, names)) == {1: 0, 2: 1, 3: 0, 4: 1}
    assert bound(tmp_path, path, names).class_names == ("normal", "ill")
    true = parquet(tmp_path / "true", [png(1), png(2)], label=[True, False])
    assert everything(loaded(tmp_path, true, "data.num_classes=2")) == {1: 1, 2: 0}


def test_a_parquet_file_of_the_hub_declares_its_classes(tmp_path):
    rows = pyarrow.table({"image": [png(0)] * 8, "label": [1, 0] * 4})  # one image
    for declared, expected in (
        (["normal", "pneumonia"], ("normal", "pneumonia")),
        (["3", "5"], ("3", "5")),
        (None, ("0", "1")),
        (["normal", 5], ("0", "1")),
        ("normal", ("0", "1")),
    ):
        info = {"features": {"label": {"names": declared, "_type": "ClassLabel"}}}
        metadata = {"huggingface": json.dumps({"info": info} if declared else {})}
        path = tmp_path / "pictures.parquet"
        pyarrow.parquet.write_table(rows.replace_schema_metadata(metadata), path)
        assert bound(tmp_path, path).class_names == expected
        assert loaded(tmp_path, path).train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_spellings_of_a_csv(tmp_path):
    for number, (mark, separator, end) in enumerate(
        [("", ",", "\n"), ("\ufeff", ";", "\r\n"), ("", "\t", "\r\n"), ("\ufeff", ",", "\n")]
    ):
        path = table(
            tmp_path / f"{number}" / "t.csv", ["0.png,no,007", "1.png,1e5,08"], PATIENTS[0]
        )
        text = mark + path.read_text().replace(",", separator).replace("\n", end)
        path.write_bytes(text.encode())
        assert bound(tmp_path, path, PATIENTS[1]).class_names == ("1e5", "no"), number
        data = loaded(tmp_path, path, PATIENTS[1])
        assert everything(data) == {1: 1, 2: 0}, number
        assert len({*data.train.patients, *data.test.patients}) == 2, number


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


# --- patients ---


def test_patients_are_in_one_split(tmp_path):
    path = table(tmp_path / "t.csv", ROWS, PATIENTS[0])
    data = loaded(tmp_path, path, PATIENTS[1])
    assert len(data.train) + len(data.test) == 40
    assert len(set(data.train.patients) | set(data.test.patients)) == 10
    assert not set(data.train.patients) & set(data.test.patients)
    assert len(data.test)
    path = table(tmp_path / "u.csv", [*ROWS[:7], ("7.png", "cat", " NaN ")], PATIENTS[0])
    with pytest.raises(UserError, match="7.png has no patient; name its patient, delete it, or"):
        loaded(tmp_path, path, PATIENTS[1])


def test_a_patients_number_is_the_same_in_every_format(tmp_path):
    """019 in a CSV file and 19 in a parquet file counted as two people."""
    table(tmp_path / "D" / "train.csv", ["0.png,ill,019", "1.png,well,7a"], PATIENTS[0])
    parquet(tmp_path / "D", [png(9)], ["test"], label=["ill"], patient=[19])
    with pytest.raises(UserError, match="1 patient is in train and in test"):
        loaded(tmp_path, tmp_path / "D", PATIENTS[1], "data.classes=[ill,well]")
    read = {
        name: hospital(tmp_path / "D" / name, patient_column="patient").records.patients
        for name in ("train.csv", "test.parquet")
    }
    assert set(read["test.parquet"]) < set(read["train.csv"])


def test_given_splits_that_share_patients_are_refused_unless_that_is_allowed(tmp_path, said):
    path = tmp_path / "data"
    table(path / "train.csv", ROWS[:24], PATIENTS[0])
    table(path / "test.csv", ROWS[16:36], PATIENTS[0])  # patients 4 and 5 are in both
    shared = f"2 patients are in train and in test (data.path={path})"
    for _ in range(2):  # read from the files, and from the cache
        with pytest.raises(UserError) as caught:
            loaded(tmp_path, path, PATIENTS[1])
        assert str(caught.value).startswith(f"{shared}; keep all records of a patient in one")
        assert "or set data.shared_patients=allow" in str(caught.value)
    assert said() == []
    # Nothing is refused where the other split is not read: hospitals hold it.
    assert len(datasets.load_test(bound(tmp_path, path, PATIENTS[1]), tmp_path / "cache")) == 20
    data = loaded(tmp_path, path, PATIENTS[1], "data.shared_patients=allow")
    assert (len(data.train), len(data.test)) == (24, 20)
    line = said()[0]
    assert line.startswith(f"{shared}: scores are inflated")
    table(path / "test.csv", ROWS[24:36], PATIENTS[0])
    for allowed in ((), ("data.shared_patients=allow",)):
        assert len(loaded(tmp_path, path, PATIENTS[1], *allowed).test) == 12
    assert [each for each in said() if "patient" in each] == [line]


# --- problems of tables ---


def test_what_is_wrong_with_a_table_is_named(tmp_path):
    picture(tmp_path / "0.png")
    cases = [
        ("image,label,label\n0.png,a,b\n", "has several columns named label; rename or delete one"),
        ("image,label\n0.png,a\n0.png,b, c\n", "line 3 has 3 cells, but there are 2 columns; put"),
        ('image,label\n0.png,a\n"0.png,b\n', r"cannot be read as CSV in UTF-8 \(unexpected end"),
        ('image,"label\n0.png,a\n1.png,"\n2.png,b\n', "ends in line 3 has a cell with a line"),
        (
            'image,label,age\n0.png,a,"3\n1.png,b,4\n2.png,a,5"\n',
            "ends in line 4 has a cell with a line",
        ),
        ("image,label\n" + "".join(f"{i}.png,{i / 7:.3f}\n" for i in range(30)), "30 different"),
        (b"\xff\xfe\x00", "cannot be read as CSV in UTF-8"),
        (
            "0.png,a\n1.png,b\n",
            "has no column image .* its columns are 0.png, a",
        ),
    ]
    for content, expected in cases:
        (tmp_path / "t.csv").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
        with pytest.raises(ConfigError, match=expected):
            bound(tmp_path, tmp_path / "t.csv")
        if "several" in expected:
            with pytest.raises(UserError, match=expected):
                hospital(tmp_path / "t.csv")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match="cannot be read as a parquet file .*; export it again"):
        bound(tmp_path, tmp_path / "broken.parquet")
    rows = pyarrow.table({"image": ["0.png"] * 2, "label": [["ill"], ["ill", "well"]]})
    pyarrow.parquet.write_table(rows, tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match=r"row 1: label holds \['ill'\]; a record has one class"):
        bound(tmp_path, tmp_path / "t.parquet")


def test_a_missing_column_is_reported_with_those_that_there_are(tmp_path):
    for name in ("train.csv", "test.csv"):
        table(tmp_path / "D" / name, [f"{i}.png,{5 + i % 3}" for i in range(6)], "file,kind")
    with pytest.raises(ConfigError) as raised:
        bound(tmp_path, tmp_path / "D")
    (problem,) = raised.value.problems
    assert "has no column image (data.image_column), label (data.label_column); its" in problem
    assert "its columns are file, kind. " in problem
    assert problem.endswith("set data.image_column=COLUMN data.label_column=COLUMN")
    columns = "data.image_column=file", "data.label_column=kind"
    assert bound(tmp_path, tmp_path / "D", *columns).classes == ("5", "6", "7")
    train = loaded(tmp_path, tmp_path / "D", *columns).train
    assert train.labels.tolist() == [0, 1, 2] * 2

    path = parquet(tmp_path / "other", [png(0, (28, 28))] * 2, label=[0, 1])
    config = DataConfig("cifar10", None, str(path), "img", "label", None, (3, 32, 32), 10)
    with pytest.raises(UserError) as raised:
        datasets.load(config, tmp_path / "cache")
    assert str(raised.value).endswith(
        "has no column img (data.image_column); its columns are image, label. If this is the data "
        "set you mean, set data.image_column=COLUMN"
    )


@pytest.mark.parametrize("name", ["patients.csv", "patients.parquet", "patients.txt"])
def test_a_table_next_to_loose_images_is_named_in_place_of_a_long_list(tmp_path, name):
    for number in range(30):
        picture(tmp_path / "D" / f"{number}.png", number)
    for file in (name, "._own.csv"):
        (tmp_path / "D" / file).touch()
    with pytest.raises(ConfigError) as raised:
        bound(tmp_path, tmp_path / "D")
    remedy = f"; for a table, give data.path={tmp_path / 'D' / name}"
    assert str(raised.value).endswith(remedy) == (not name.endswith("txt"))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_records_without_a_label_or_a_file_are_counted_and_skipped_alike(tmp_path, said, form):
    """Spaces around a label do not matter, and an empty label is no class."""
    rows = ["0.png,well", "1.png, ill ", "2.png,", "3.png,  ", "4.png,ill", "lost.png,ill"]
    path = table(tmp_path / "t.csv", rows)
    (tmp_path / "lost.png").unlink()
    if form == "parquet":
        names, labels = zip(*(row.split(",") for row in rows), strict=True)
        columns = {"image": names, "label": [label or None for label in labels]}
        path = tmp_path / "t.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    data, read = loaded(tmp_path, path), hospital(path)
    assert everything(data) == number_of(read.records) == {1: 1, 2: 0, 5: 0}
    assert str(read.count) in said()[0]
    assert "6 rows found, 3 used, 3 skipped: 1 unreadable (lost.png: No such" in str(read.count)
    assert str(read.count).endswith("2 without a label (2.png, 3.png)")


def test_one_hot_columns_of_a_csv(tmp_path, said):
    """Rows of several labels are counted, not dropped in silence."""
    columns = ("data.label_column=null", "data.label_columns=[well,ill]")
    counted = (
        "5 rows found, 3 used, 2 skipped: 1 with several labels (2.png); 1 without a label (3.png)"
    )
    for one, zero in (("1", "0"), ("1.0", "0.0"), ("True", "False")):
        flags = [(one, zero), (zero, one), (one, one), (zero, zero), ("", one)]
        rows = [f"{i}.png,{a},{b}" for i, (a, b) in enumerate(flags)]
        path = table(tmp_path / one / "t.csv", rows, "image,well,ill")
        datasets.warn_once.cache_clear()
        assert everything(loaded(tmp_path, path, *columns)) == {1: 0, 2: 1, 5: 1}
        assert any(counted in line for line in said()[-4:])
        read = hospital(path, label_column=None, label_columns=("well", "ill"))
        assert str(read.count) == counted
        assert number_of(read.records) == {1: 1, 2: 0, 5: 0}  # the federation's order
    path = table(tmp_path / "t.csv", ["0.png,0.7,0.3"], "image,well,ill")
    with pytest.raises(UserError, match="0.png: well is 0.7; it must be 0 or 1"):
        loaded(tmp_path, path, *columns)
    with pytest.raises(UserError, match=r"no column red \(data.label_columns\[1\]\); its"):
        loaded(tmp_path, path, "data.label_column=null", "data.label_columns=[well,red]")


def test_patients_follow_the_one_column_that_is_true(tmp_path, said):
    """Records with none or several true are left out, with their patients."""
    path = parquet(
        tmp_path / "data",
        [*map(png, range(6))],
        black=[True, False, False, True, False, None],
        brown=[False, True, False, True, True, None],
        patient=["a", "b", "c", "d", "b", "f"],
    )
    columns = ("data.label_column=null", "data.label_columns=[black,brown]", PATIENTS[1])
    train = loaded(tmp_path, path, *columns, "data.shared_patients=allow").train
    assert number_of(train) == {0: 0, 1: 1, 4: 1}
    patients = dict(zip(train.images[:, 0, 0, 0].tolist(), train.patients, strict=True))
    assert patients[1] == patients[4] != patients[0]


def test_a_column_of_splits_is_reported(tmp_path, said):
    path = table(tmp_path / "t.csv", ["0.png,ill,train", "1.png,well,test"], "image,label,Split")
    loaded(tmp_path, path)
    sentence = "its column Split is not used as a split; to test on some of its rows"
    assert any(sentence in line for line in said())


# --- pictures ---


def test_twelve_bits_in_sixteen_are_reported_and_scaled(tmp_path, said):
    """As they are, pixels would be 0 to 15 of 255."""
    path = tmp_path / "D"
    for name, value in (("ill", 4_000), ("well", 2_000)):
        (path / name).mkdir(parents=True)
        deep = np.full((8, 8), value, np.uint16)
        for split in range(12):
            deep[0, 0] = value + split
            Image.fromarray(deep).save(path / name / f"{split}.png")
    assert loaded(tmp_path, path).train.images.max() == 15
    dark = "16-bit images use at most 12 bits, so they are nearly black; pixel_bits=12"
    assert any(dark in line for line in said())
    right = loaded(tmp_path, path, "data.pixel_bits=12")
    levels = zip(right.train.labels, right.train.images[:, 0, 4, 4], strict=True)
    assert dict(levels).items() <= {0: 250, 1: 125}.items()
    assert hospital(path).notes
    assert not hospital(path, pixel_bits=12).notes
    assert hospital(path, pixel_bits=12).records.images.max() == 250
    Image.new("L", (8, 8), 9).save(path / "ill" / "grey.png")
    assert not hospital(path, pixel_bits=12).notes
    loaded(tmp_path, path, "data.pixel_bits=11")
    wide = "12 unreadable (ill/0.png: its pixels have 12 bits, more than"
    assert any(wide in line for line in said())


def test_bits_that_no_picture_has_are_reported(tmp_path, said):
    path = shades(tmp_path / "D", ill=[1, 2], well=[3, 4])
    none = "pixel_bits=12 has no effect: none of its images has 16 bits"
    loaded(tmp_path, path, "data.pixel_bits=12")
    assert any(none in line for line in said())
    assert none in hospital(path, pixel_bits=12).notes[0]
    assert not hospital(path).notes


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_pictures_of_all_kinds(tmp_path):
    """EXIF rotation, CMYK, opaque palettes, large, truncated, empty and of several pages."""
    place = tmp_path / "D" / "ill"
    shades(tmp_path / "D", ill=[], well=[1])
    halves = np.zeros((8, 8), np.uint8)
    halves[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    Image.fromarray(halves).save(place / "exif.png", exif=exif)
    Image.new("CMYK", (8, 8), (0, 0, 0, 128)).save(place / "cmyk.jpg")
    Image.new("RGBA", (8, 8), (9, 9, 9, 255)).convert("P").save(place / "palette.png")
    Image.new("L", (6_000, 6_000), 77).save(place / "large.png")
    Image.new("L", (80, 80), 5).save(place / "cut.jpg")
    (place / "cut.jpg").write_bytes((place / "cut.jpg").read_bytes()[:-60])
    (place / "empty.png").write_bytes(b"")
    pages = [Image.new("L", (8, 8), shade) for shade in (11, 12, 13)]
    pages[0].save(place / "one.tiff")
    pages[0].save(place / "several.tiff", save_all=True, append_images=pages[1:])
    for name in (".DS_Store", "._0.png", "../__MACOSX/ill/._0.png"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"\0")
    assert bound(tmp_path, tmp_path / "D").class_names == CLASSES
    read = hospital(tmp_path / "D")
    lost = dict(line.split(": ", 1) for line in read.count.skipped["unreadable"])
    assert lost.keys() == {"ill/cut.jpg", "ill/empty.png", "ill/several.tiff"}
    assert lost["ill/several.tiff"] == "it has 3 pages; save each as a separate file"
    assert (read.count.found, read.count.used) == (9, 6)
    assert open_image(place / "exif.png", 1).getpixel((0, 0)) == 0
    assert any((image == 77).all() for image in read.records.images)


# --- arrays ---

IMAGES = np.arange(4, dtype=np.uint8)[:, None, None] * np.ones((1, 8, 8), np.uint8)


def test_arrays_are_read_like_files(tmp_path):
    labels = np.array([[0], [1], [0], [1]])
    np.savez(
        tmp_path / "m.npz",
        train_images=IMAGES,
        train_labels=labels,
        test_images=IMAGES[:2],
        test_labels=labels[:2],
    )
    columns = ("data.image_column=images", "data.label_column=labels")
    data = loaded(tmp_path, tmp_path / "m.npz", *columns)
    assert (number_of(data.train), number_of(data.test)) == ({0: 0, 1: 1, 2: 0, 3: 1}, {0: 0, 1: 1})
    with pytest.raises(ConfigError, match=r"no array image \(data.image_column\).*; its arrays"):
        bound(tmp_path, tmp_path / "m.npz")
    for array, problem in (
        (labels.astype(float)[:3], "4 images but 3 values in label"),
        (np.zeros((4, 14)), "4 images but 56 values in label"),
    ):
        np.savez(tmp_path / "n.npz", image=IMAGES, label=array)
        with pytest.raises(UserError, match=problem):
            loaded(tmp_path, tmp_path / "n.npz", "data.num_classes=2")


def test_arrays_that_are_not_read_are_reported_or_refused(tmp_path, said):
    own = {"image": IMAGES, "label": np.array([0, 1, 0, 1])}

    def of(split, shade=0):
        return {f"{split}_image": IMAGES + np.uint8(shade), f"{split}_label": own["label"]}

    np.savez(tmp_path / "all.npz", **own, **of("test"))
    loaded(tmp_path, tmp_path / "all.npz")
    assert any("its array test_image is not used as a split" in line for line in said())
    np.savez(tmp_path / "three.npz", **of("train"), **of("test", 9), **of("val"))
    loaded(tmp_path, tmp_path / "three.npz")
    sentence = "val_image is not read: nothing is selected on a validation split"
    assert any(line.endswith(sentence) for line in said())
    np.savez(tmp_path / "two.npz", **of("train"), **of("val"))
    with pytest.raises(UserError, match=r"two.npz has no array test_image; give one for each"):
        loaded(tmp_path, tmp_path / "two.npz")
