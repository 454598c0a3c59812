"""Classes: one list of names, and the numbers of labels of every format."""

import csv
import io
import json
import random
import unicodedata
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fed_dpsd.classes import (
    holds_several,
    label_numbers,
    look_alikes,
    sort_class_names,
    text_of,
)
from fed_dpsd.client import records as hospitals
from fed_dpsd.client.records import HospitalFiles
from fed_dpsd.data import datasets
from fed_dpsd.errors import ConfigError, UserError
from tests.data.files import bound, shades


def test_a_value_has_one_text_in_every_format():
    for values, text in [
        ((1, 1.0, "1", " 1 ", "1.0", b"1", np.int64(1), np.float32(1)), "1"),
        ((True, "True", "true", np.bool_(True)), "true"),
        (("007",), "007"),
        (("1e5", "1e5 "), "1e5"),
        (("no",), "no"),
        ((0.5, "0.5"), "0.5"),
        (("é", unicodedata.normalize("NFD", "é")), "é"),
        ((None, "", "  ", float("nan"), np.float64("nan")), ""),
    ]:
        assert {text_of(value) for value in values} == {text}


def test_numbers_come_by_value_and_before_other_texts():
    names = ["b", "10", "2", "-1", "1.5", "a", "007", "7"]
    assert sort_class_names(names) == ("-1", "1.5", "2", "007", "7", "10", "a", "b")


def test_places_are_labels_only_where_no_name_is_a_number():
    assert label_numbers(("cat", "dog", "cow"))["1"] == 1
    assert "1" not in label_numbers(("3", "5", "7"))
    assert "true" not in label_numbers(("cat", "dog", "cow"))
    assert label_numbers(("female", "male"))["true"] == 1
    assert label_numbers(("cat", "dog"), {"Katze": "cat"}) == {"Katze": 0}


@pytest.mark.parametrize(
    ("label", "several"),
    [
        ("Effusion|Mass", True),
        ("Effusion;Mass", True),
        ("Effusion, Mass", True),
        ("['Effusion', 'Mass']", True),
        ("effusion + MASS", True),
        ("Mass/Effusion", True),
        ("Mass\u3001Effusion", True),
        ("Effusion and Mass", True),
        ("Effusion and Hernia", False),
        ("Effusion|Hernia", False),
        ("Effusion|", False),
        ("Mass+", False),
        ("No Mass", False),
        ("Mass", False),
    ],
)
def test_a_label_lists_several_names_or_is_one(label, several):
    assert holds_several(label, ("Effusion", "Mass", "No")) == several


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("Mass", "Mass\u200b", True),
        ("Mass", "\ufeffMass", True),
        ("Mass", "Ma\u00adss", True),
        ("Mass", "Mass\ufe0f", True),
        ("Mass", "\u202eMass", True),
        ("no mass", "no\u00a0mass", True),
        ("no mass", "no  mass", True),
        ("é", "e\u0301", True),
        ("COVID-19", "COVID\u201119", True),
        ("COVID-19", "COVID\u201319", True),
        ("Crohn's", "Crohn\u2019s", True),
        ("Mass", "\uff2dass", True),
        ("Mass", "Mass 2", False),
        ("Mass+", "Mass-", False),
        ("Mass", "mass", False),  # capitals have a message of their own
        ("ä", "a", False),
    ],
)
def test_names_that_look_the_same_are_shown_by_code_points(one, two, same):
    assert look_alikes([one, "other", two]) == (f"{one!a} and {two!a} look the same" * same)


# --- every reader, and both sides of a deployment ---

SHAPE = (1, 8, 8)


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def rows_in(place, records, split):
    """The rows of a table of files, which are written to a folder of the split."""
    (place / split).mkdir(parents=True)
    for number, (pixels, _) in enumerate(records):
        (place / split / f"{number}.png").write_bytes(png(pixels))
    return [(f"{n}.png", label or "") for n, (_, label) in enumerate(records)]


def folders(place, records, split):
    """Folders cannot express missing labels, so pictures without one are next to the folders."""
    for number, (pixels, label) in enumerate(records):
        folder = place / split / (label or "")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(png(pixels))


def table(place, records, split):
    rows = rows_in(place, records, split)
    with (place / f"{split}.CSV").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("image", "label"), *((f"{split}/{n}", t) for n, t in rows)])


def metadata(place, records, split):
    rows = rows_in(place, records, split)
    with (place / split / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file_name", "label"), *rows])


def parquet(place, records, split):
    place.mkdir(exist_ok=True)
    images, labels = zip(*records, strict=True)
    columns = {"image": [{"bytes": png(image), "path": None} for image in images], "label": labels}
    pyarrow.parquet.write_table(pyarrow.table(columns), place / f"{split}.parquet")


def declared(place, records, split):
    """Numbers in the table's own order, in the layout of the hub."""
    place.mkdir(exist_ok=True)
    names = sorted({label for _, label in records if label}, reverse=True)
    numbers = [None if label is None else names.index(label) for _, label in records]
    images = [{"bytes": png(image), "path": None} for image, _ in records]
    rows = pyarrow.table({"image": images, "label": pyarrow.array(numbers, pyarrow.int64())})
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    info = {"huggingface": json.dumps({"info": {"features": features}})}
    pyarrow.parquet.write_table(rows.replace_schema_metadata(info), place / f"{split}.parquet")


def npz(place, records, split):
    arrays = {}
    if (place / "all.npz").exists():
        arrays = dict(np.load(place / "all.npz"))
    place.mkdir(exist_ok=True)
    images, labels = zip(*records, strict=True)
    arrays |= {f"{split}_image": np.stack(images), f"{split}_label": [t or "" for t in labels]}
    np.savez(place / "all.npz", **arrays)


LAYOUTS = (folders, table, metadata, parquet, declared, npz)
POOLS = (
    ("0", "1", "2", "9", "10", "11"),
    ("no finding", "pneumonie à virus", "COVID-19", "Röntgen", "1e5"),
    ("007", "7a", "no", "Nonesuch", "ünder"),
)


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4, 5))]
)
def test_every_reader_and_both_sides_agree_on_every_class(tmp_path, seed):
    """Random data sets in all layouts; some labels are missing. Seeds are fixed."""
    rng = random.Random(seed)
    pixels = np.random.default_rng(seed)
    names = rng.sample(POOLS[seed % len(POOLS)], rng.randint(2, 5))

    def records():
        labels = [*names, *rng.choices([*names, None], k=15)]
        return [(pixels.integers(0, 256, (8, 8), np.uint8), label) for label in labels]

    splits = {"train": records(), "test": records()}
    known = {image.tobytes(): label for some in splits.values() for image, label in some}
    found = {}
    for write in LAYOUTS:
        place = tmp_path / write.__name__
        for split, some in splits.items():
            write(place, some, split)
        path = place / "all.npz" if write is npz else place
        # The declared order is reversed, so the experiment's must win.
        own = ["data.classes=[" + ",".join(f"'{n}'" for n in sort_class_names(names)) + "]"]
        config = bound(tmp_path, path, *(own if write is declared else ()))
        assert config.class_names == sort_class_names(names)
        data = datasets.load(config, tmp_path / "cache")
        console = {}
        for split, some in (("train", data.train), ("test", data.test)):
            assert len(some) == sum(label is not None for _, label in splits[split])
            console |= {i.tobytes(): int(n) for i, n in zip(some.images, some.labels, strict=True)}
        side = path if write is npz else place / "train"
        if write in (table, parquet, declared):
            side = next(place.glob("train.*"))
        prefix = "train_" if write is npz else ""
        files = HospitalFiles(str(side), f"{prefix}image", f"{prefix}label", None, True)
        own = hospitals.read(files, SHAPE, config.class_names)
        hospital = dict(zip(map(bytes, own.records.images), own.records.labels, strict=True))
        assert len(hospital) == len(data.train)
        assert hospital.items() <= console.items()
        assert all(config.class_names[number] == known[i] for i, number in console.items())
        found[write] = console
    assert all(each == found[folders] for each in found.values())


# --- labels that name no class ---


@pytest.mark.parametrize(
    ("label", "counted"),
    [
        *((each, "with several labels") for each in ("ill|well", "ill;well", "ill, well")),
        *((each, "without a label") for each in ("NULL", "nan", "N/A", "None", " na ", "?", r"\N")),
        *((each, "without a label") for each in ("NULL\u200b", "#VALUE!", "\u2014")),
    ],
)
@pytest.mark.parametrize("write", [table, metadata, parquet, npz, folders])
def test_cells_of_several_labels_and_missing_labels_are_skipped(tmp_path, write, label, counted):
    """Alike in a simulation and at a hospital; a class may have such a name if it is listed."""
    if write is folders and "/" in label:
        return
    records = [(np.full((8, 8), n, np.uint8), ("ill", "well", label)[n % 3]) for n in range(12)]
    for split in ("train", "test"):
        write(tmp_path / "D", records, split)
    path = tmp_path / "D" / ("all.npz" if write is npz else "")
    config = bound(tmp_path, path)
    assert config.class_names == ("ill", "well")
    assert len(datasets.load(config, tmp_path / "cache").train) == 8
    side = tmp_path / "D" / "train"
    if not side.is_dir() or write is table:
        side = next(place for place in (tmp_path / "D").iterdir() if place.is_file())
    prefix = "train_" if write is npz else ""
    files = HospitalFiles(str(side), f"{prefix}image", f"{prefix}label", None, False)
    skipped = hospitals.read(files, SHAPE, ("ill", "well")).count.skipped
    assert {why: len(lines) for why, lines in skipped.items()} == {counted: 4}
    assert skipped[counted][0].endswith(f": {text_of(label)}")
    listed = bound(tmp_path, path, f"data.classes=[ill,well,'{label}']")
    assert len(datasets.load(listed, tmp_path / "cache").train) == 12
    mapped = replace(files, labels={"ill": "ill", "well": "well", label: "ill"})
    assert len(hospitals.read(mapped, SHAPE, ("ill", "well")).records) == 12


def test_a_list_of_unknown_findings_is_refused_with_the_column_of_each(tmp_path):
    """No remedy says to map it to a class."""
    rows = [(np.full((8, 8), n, np.uint8), ("ill", "well", "ill|worse")[n % 3]) for n in range(9)]
    for split in ("train", "test"):
        table(tmp_path, rows, split)
    clear = r"ill\|worse \(.*, row 3\) is one class or several .*=\[ill,well\], or set data.label_c"
    with pytest.raises(ConfigError, match=clear):
        bound(tmp_path, tmp_path)
    for read in (
        lambda: datasets.load(bound(tmp_path, tmp_path, "data.classes=[ill,well]"), tmp_path),
        lambda: hospitals.read(
            HospitalFiles(str(tmp_path / "train.CSV"), "image", "label", None, False),
            SHAPE,
            ("ill", "well"),
        ),
    ):
        with pytest.raises(UserError, match=r"class: ill\|worse .*each class in label_c") as raised:
            read()
        assert "add each" not in str(raised.value)
    third = bound(tmp_path, tmp_path, "data.classes=[ill,well,worse]")
    assert len(datasets.load(third, tmp_path / "cache").train) == 6


@pytest.mark.parametrize("write", [folders, table, npz])
@pytest.mark.parametrize("twin", ["ill\u200b", "i\u00adll", "\ufeffill", "ill\ufe0f"])
def test_classes_that_look_the_same_are_refused_with_their_code_points(tmp_path, write, twin):
    rows = [(np.full((8, 8), n, np.uint8), ("ill", "well", twin)[n % 3]) for n in range(9)]
    for split in ("train", "test"):
        write(tmp_path / "D", rows, split)
    path = tmp_path / "D" / ("all.npz" if write is npz else "")
    both = f"{min('ill', twin)!a} and {max('ill', twin)!a} look the same"
    with pytest.raises(ConfigError) as raised:
        bound(tmp_path, path)
    assert both in str(raised.value) or f"{twin!a} and 'ill' look the same" in str(raised.value)
    listed = bound(tmp_path, path, "data.classes=[ill,well]")
    with pytest.raises(UserError) as unknown:
        datasets.load(listed, tmp_path / "cache")
    assert f"'ill' and {twin!a} look the same" in str(unknown.value)
    with pytest.raises(ConfigError, match="look the same; use one of them, or rename"):
        bound(tmp_path, path, f"data.classes=[ill,well,'{twin}']")


def test_class_folders_that_differ_in_blanks_or_accents_are_refused(tmp_path):
    for number, (one, two) in enumerate([("é", "e\u0301"), ("ill", "ill "), ("ill", "ill\u00a0")]):
        shades(tmp_path / f"{number}", **{one: [1], two: [2], "well": [3]})
        with pytest.raises(ConfigError) as raised:
            bound(tmp_path, tmp_path / f"{number}")
        assert f"folder {min(one, two)!a} has the same name as another" in str(raised.value)


# --- lists that differ ---


def test_a_class_that_one_split_alone_has_is_named(tmp_path):
    shades(tmp_path / "train", cat=[1], dog=[2])
    shades(tmp_path / "test", cat=[3], dog=[4], cow=[5])
    with pytest.raises(ConfigError, match=r"class cow \(test/cow\) is in test and not in train"):
        bound(tmp_path, tmp_path)
    listed = bound(tmp_path, tmp_path, "data.classes=[cat,cow,dog]")
    assert sorted(datasets.load(listed, tmp_path / "cache").test.labels) == [0, 1, 2]
    shorter = bound(tmp_path, tmp_path, "data.classes=[cat,dog]")
    with pytest.raises(UserError, match=r"no class: cow \(cow/5.png\); the classes are cat, dog"):
        datasets.load(shorter, tmp_path / "cache")


def test_test_pictures_follow_names_and_not_the_alphabet(tmp_path):
    """The experiment's list is [normal, covid], and the coordinator has folders alone."""
    shades(tmp_path / "test", normal=[10], covid=[200])
    listed = bound(tmp_path, tmp_path, "data.classes=[normal,covid]")
    test = datasets.load_test(listed, tmp_path / "cache")
    assert dict(zip(test.images[:, 0, 0, 0], test.labels, strict=True)) == {10: 0, 200: 1}
    (tmp_path / "cache").rename(tmp_path / "test" / ".cache")
    assert bound(tmp_path, tmp_path).class_names == ("covid", "normal")
    assert replace(listed, classes=()).class_names == ("0", "1")
