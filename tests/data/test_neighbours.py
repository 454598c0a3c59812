"""From files to records (docs/mechanisms.md): what one record changes, from disk to teachers.

Each test writes two data sets that differ in one record, or patient, and compares what is trained
on. The old rule, which took a part of each class by position, is the control.
"""

import csv
import functools
import io
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fed_dpsd.classes import label_numbers
from fed_dpsd.client import records as hospitals
from fed_dpsd.client.teachers import assign_shards
from fed_dpsd.config import DataConfig
from fed_dpsd.data import datasets, partition
from fed_dpsd.data.dicom import PATIENT_ID
from fed_dpsd.data.intake import hash64
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import from_overrides, load_data
from fed_dpsd.privacy.training import patient_places
from tests.data.files import dicom

CLASSES = ("cat", "cow", "dog")
SHARDS = 4


@dataclass(frozen=True)
class Record:
    """An image of random pixels, its class, its patient, and whether its file can be read."""

    image: int
    label: int
    patient: str
    broken: bool = False

    @property
    def pixels(self):
        return np.random.default_rng(self.image).integers(0, 256, (8, 8), np.uint8)

    @property
    def file(self):
        buffer = io.BytesIO()
        Image.fromarray(self.pixels).save(buffer, "PNG")
        return buffer.getvalue()[: 40 if self.broken else None]

    @functools.cached_property
    def scan(self):
        """The same as DICOM, which names the patient."""
        content = dicom(self.pixels, PatientID=self.patient)
        return content[: 400 if self.broken else None]

    @property
    def row(self):
        """The part of it that training sees."""
        return self.pixels.tobytes(), self.label, self.patient


# Patients have three records. Two images occur twice, one of them with another label.
RECORDS = [Record(i, i % 3, f"p{i // 3}") for i in range(39)]
RECORDS += [replace(RECORDS[5], label=0), RECORDS[8]]


NEW = [Record(number, number % 3, f"new{number}") for number in range(100, 130)]


def changed(edit, record, number):
    """The records after an edit of one record; `number` is the number of a new image."""
    others = list(RECORDS)
    index = others.index(record)
    if edit == "added":  # in front of all: every position moves
        return [NEW[number - 100], *others]
    if edit == "removed":
        return others[:index] + others[index + 1 :]
    if edit == "patient added":
        return [*(Record(1_000 + 3 * number + i, i, f"new{number}") for i in range(3)), *others]
    if edit == "patient removed":
        return [each for each in others if each.patient != record.patient]
    if edit == "patient replaced":
        kept = [each for each in others if each.patient != record.patient]
        return [Record(number, 1, record.patient), Record(number + 50, 2, record.patient), *kept]
    others[index] = {
        "relabelled": replace(record, label=(record.label + 1) % 3),
        "replaced": replace(record, image=number),
        "unreadable": replace(record, broken=True),
    }[edit]
    return others


RECORD_EDITS = ("added", "removed", "relabelled", "replaced", "unreadable")
ALL_EDITS = (*RECORD_EDITS, "patient added", "patient removed", "patient replaced")


# --- files ---


def folder(place, records, ending=".png", content="file"):
    for name in CLASSES:
        (place / name).mkdir(parents=True)
    for number, record in enumerate(records):
        file = place / CLASSES[record.label] / f"{number:03}{ending}"
        file.write_bytes(getattr(record, content))
    return place


def scans(place, records):
    return folder(place, records, ending="", content="scan")


def table_csv(place, records):
    place.mkdir(parents=True)
    with (place / "pictures.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label", "patient"])
        for number, record in enumerate(records):
            (place / f"{number:03}.png").write_bytes(record.file)
            writer.writerow([f"{number:03}.png", CLASSES[record.label], record.patient])
    return place / "pictures.csv"


def hub_table(records):
    return pyarrow.table(
        {
            "image": [{"bytes": record.file, "path": None} for record in records],
            "label": [CLASSES[record.label] for record in records],
            "patient": [record.patient for record in records],
        }
    )


def table_parquet(place, records):
    place.mkdir(parents=True)
    pyarrow.parquet.write_table(hub_table(records), place / "pictures.parquet")
    return place / "pictures.parquet"


def npz(place, records):
    place.mkdir(parents=True)
    arrays = {
        "image": np.stack([record.pixels for record in records]),
        "label": np.array([CLASSES[record.label] for record in records]),
        "patient": np.array([record.patient for record in records]),
    }
    np.savez(place / "pictures.npz", **arrays)
    return place / "pictures.npz"


def divided(write):
    """A layout with a training split of the records, and a test split of others."""

    def both(place, records):
        others = [Record(500 + i, i % 3, f"tested{i}") for i in range(6)]
        for split, given in (("train", records), ("test", others)):
            path = write(place / split, given)
            if path.is_file():
                text = path.read_bytes()
                if path.suffix == ".csv":
                    text = text.replace(b"\n0", f"\n{split}/0".encode())
                (place / f"{split}{path.suffix}").write_bytes(text)
        return place

    return both


TABLES = (table_csv, table_parquet, npz)
WHOLE = {"folder": folder, "scans": scans, "csv": table_csv, "parquet": table_parquet}
LAYOUTS = WHOLE | {
    f"{name}, train and test": divided(WHOLE[name]) for name in ("folder", "csv", "parquet")
}
WITH_PATIENTS = [layout for layout in (*LAYOUTS, "hub") if not layout.startswith("folder")]
# In the quick tests each edit is made in a layout of each kind; all pairs are slow.
PLACES = [(layout, False) for layout in (*LAYOUTS, "hub")]
PLACES += [(layout, True) for layout in WITH_PATIENTS]
AT_HOSPITALS = [(write, False) for write in (folder, scans, *TABLES)]
AT_HOSPITALS += [(write, True) for write in (scans, *TABLES)]


def with_edits(places):
    """Each place with a sample of edits, and as a slow case with the others."""
    for number, (place, patients) in enumerate(places):
        edits = ALL_EDITS if patients else RECORD_EDITS
        if place is npz:
            edits = [edit for edit in edits if edit != "unreadable"]
        name = f"{getattr(place, '__name__', place)}-{'patients' if patients else 'records'}"
        for half in (0, 1):
            chosen = [edit for i, edit in enumerate(edits) if (i + number) % 2 == half]
            marks = [pytest.mark.slow] * half
            yield pytest.param(place, patients, chosen, marks=marks, id=f"{name}-{half}")


CONFIG = DataConfig(
    *("pictures", None, None, "image", "label", None, (1, 8, 8), 3), classes=CLASSES
)


def rows_of(split, patients):
    """Each training record in its order, with its shard."""
    names = {hash64(record.patient): record.patient for record in (*RECORDS, *NEW)}
    shards = assign_shards(split.ids, SHARDS, 0)
    known = [names[number] for number in split.patients] if patients else [None] * len(split)
    return [
        (image.tobytes(), int(label), patient, int(shard))
        for image, label, patient, shard in zip(
            split.images, split.labels, known, shards, strict=True
        )
    ]


def column_of(layout):
    return PATIENT_ID if layout.startswith("scans") else "patient"


def load(layout, patients, place, records, monkeypatch):
    """The training records of a data set on the disk, or at the hub."""
    column = column_of(layout) if patients else None
    config = replace(CONFIG, patient_column=column, path=str(place))
    if layout == "hub":
        monkeypatch.setattr(partition, "read_hub", lambda *_: hub_table(records))
        config = replace(config, path=None, hub="some/set", shared_patients="allow")
    else:
        config = replace(config, path=str(LAYOUTS[layout](place, records)))
    return rows_of(datasets.load(config, place.with_suffix(".cache")).train, patients)


def check(before, after, records, patients, whole=True):
    """Check that two training runs differ in what differs between RECORDS and `records` alone.

    All others are in the same order, with the same labels and shards.

    Args:
        before: the training records of RECORDS.
        after: the training records of `records`.
        records: the neighbour.
        patients: whether patients are known.
        whole: whether no record is for testing.

    Returns:
        The numbers of removed and of added records.
    """

    def counted(given):
        seen = (each.row if patients else (*each.row[:2], None) for each in given)
        return Counter(row for row, each in zip(seen, given, strict=True) if not each.broken)

    old, new = counted(RECORDS), counted(records)
    gone, come = old - new, new - old
    went = Counter(row[:3] for row in before) - Counter(row[:3] for row in after)
    came = Counter(row[:3] for row in after) - Counter(row[:3] for row in before)
    assert went <= gone
    assert came <= come
    if whole:
        assert went == gone
        assert came == come

    def others(rows, without):
        left, kept = Counter(without), []
        for row in rows:
            left[row[:3]] -= 1
            if left[row[:3]] < 0:
                kept.append(row)
        return kept

    assert others(before, went) == others(after, came)
    return sum(went.values()), sum(came.values())


def on_each_side(records, patients):
    """A record for training and one for testing, of data that is not divided."""
    split = datasets.Records(
        np.stack([record.pixels[None] for record in records]),
        np.arange(len(records)),
        np.array([hash64(record.patient) for record in records]) if patients else None,
    )
    return [records[part.labels[0]] for part in datasets.divide(split)]


@pytest.mark.parametrize(("layout", "patients", "edits"), with_edits(PLACES))
def test_one_record_changes_the_training_by_itself_alone(
    tmp_path, monkeypatch, layout, patients, edits
):
    """Or one patient, where the edit is of a patient; with images that are for testing, too."""
    before = load(layout, patients, tmp_path / "before", RECORDS, monkeypatch)
    sides = zip(on_each_side(RECORDS[20:35], patients), on_each_side(NEW, patients), strict=True)
    sides = list(sides)
    for edit in edits:
        moved = []
        for record, new in sides:
            records = changed(edit, record, new.image)
            place = tmp_path / f"{edit} {record.image}"
            after = load(layout, patients, place, records, monkeypatch)
            moved.append(sum(check(before, after, records, patients, layout not in WHOLE)))
        if layout in WHOLE:  # the training sees the edit of a record for training, and no other
            assert moved[0] > 0, edit
            assert moved[1] == 0, edit


@pytest.mark.parametrize(("write", "patients", "edits"), with_edits(AT_HOSPITALS))
def test_a_hospital_reads_each_record_by_itself(tmp_path, write, patients, edits):
    column = column_of(write.__name__) if patients else None

    def read(place, records):
        path = str(write(place, records))
        files = hospitals.HospitalFiles(path, "image", "label", column, True)
        content = hospitals.read(files, CONFIG.shape, CLASSES)
        assert content.ids.tolist() == content.records.digests.tolist()
        return rows_of(content.records, patients)

    before = read(tmp_path / "before", RECORDS)
    for edit in edits:
        records = changed(edit, RECORDS[20], 100)
        after = read(tmp_path / edit, records)
        assert sum(check(before, after, records, patients)) > 0, edit


# --- controls ---


def by_position(records):
    """The old rule: one in five of each class, in a fixed permutation of the class."""
    units = np.arange(len(records)) if records.patients is None else records.patients
    _, first, unit = np.unique(units, return_index=True, return_inverse=True)
    rng = np.random.Generator(np.random.PCG64(0))
    tested = np.zeros(len(first), bool)
    for label in np.unique(records.labels[first]):
        of_class = rng.permutation(np.flatnonzero(records.labels[first] == label))
        number = len(of_class) // datasets.TEST_PART or min(1, len(of_class) - 1)
        tested[of_class[:number]] = True
    in_test = tested[unit.reshape(-1)]
    return records.take(np.flatnonzero(~in_test)), records.take(np.flatnonzero(in_test))


@pytest.mark.slow
def test_control_a_part_of_each_class_by_position_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "divide", by_position)
    edits_of = {
        "folder": ("added",),
        "scans": ("removed",),
        "csv": ("relabelled", "replaced"),
        "parquet": ("unreadable",),
    }
    for layout, edits in edits_of.items():
        before = load(layout, False, tmp_path / layout, RECORDS, monkeypatch)
        for edit in edits:
            wrong = 0
            for record in RECORDS[20:26]:
                records = changed(edit, record, 100)
                place = tmp_path / f"{edit} {record.image}"
                try:
                    check(
                        before,
                        load(layout, False, place, records, monkeypatch),
                        records,
                        False,
                        False,
                    )
                except AssertionError:
                    wrong += 1
            assert wrong, (layout, edit)


def test_control_shards_by_position_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(
        datasets.Records,
        "ids",
        property(lambda split: np.arange(len(split), dtype=np.int64)),
    )
    before = load("csv, train and test", False, tmp_path / "before", RECORDS, monkeypatch)
    records = changed("added", RECORDS[20], 100)
    after = load("csv, train and test", False, tmp_path / "after", records, monkeypatch)
    with pytest.raises(AssertionError):
        check(before, after, records, False)


# --- classes, copies, order ---


def test_copies_of_an_image_share_a_side_and_a_shard_whatever_their_format(tmp_path):
    """Under other labels, and as files of other formats."""
    classes = tmp_path / "pictures"
    for number in range(30):
        image = Image.fromarray(Record(number, 0, "").pixels)
        for label, suffix in zip(CLASSES, ("png", "bmp", "tiff"), strict=True):
            (classes / label).mkdir(parents=True, exist_ok=True)
            image.save(classes / label / f"{number}.{suffix}")
    config = replace(CONFIG, path=str(classes))
    data = datasets.load(config, tmp_path / "cache")
    train, test = (Counter(s.digests.tolist()) for s in (data.train, data.test))
    assert not train.keys() & test.keys()
    assert set(train.values()) == set(test.values()) == {3}


def test_a_class_whose_last_record_goes_stays_a_class(tmp_path):
    """In folders; a table's classes are listed in `data.classes`."""
    records = [Record(i, 2 * (i % 2), "") for i in range(20)]
    path = folder(tmp_path / "pictures", records)
    experiment = from_overrides(["data=imagefolder", f"data.path={path}"], tmp_path)
    assert experiment.config.data.classes == CLASSES
    listed = f"data.classes=[{','.join(CLASSES)}]"
    path = table_csv(tmp_path / "table", records)
    overrides = ["data=imagefolder", f"data.path={path}", "data.shape=[1,8,8]", listed]
    data = from_overrides(overrides, tmp_path).config.data
    assert set(datasets.load(data, tmp_path / "cache").train.labels) == {0, 2}


def test_a_labels_class_does_not_follow_other_labels():
    """Where a name is a number, a number that is no name is an error, and never changes others."""
    for names, one in ((("dog", "cat"), 1), (("1", "0"), 0)):
        known = label_numbers(names)
        assert [known[name] for name in names] == [0, 1]
        assert "2" not in known
        assert known["1"] == one


def test_the_order_of_rows_and_files_does_not_matter(tmp_path, monkeypatch):
    before = load("csv", True, tmp_path / "before", RECORDS, monkeypatch)
    assert load("parquet", True, tmp_path / "after", RECORDS[::-1], monkeypatch) == before


def test_a_patients_first_records_are_chosen_by_their_own_digests(tmp_path, monkeypatch):
    """Other patients' rows, and where a patient's stand in the table, do not matter."""

    def rows(name, records):
        monkeypatch.setattr(partition, "read_hub", lambda *_: hub_table(records))
        config = replace(CONFIG, hub="some/set", patient_column="patient", shared_patients="allow")
        train = datasets.load(config, tmp_path / name).train
        places = patient_places(train.patients, 2)
        return {
            int(train.patients[a]): train.take(np.array([a, b])).digests.tolist() for a, b in places
        }

    before = rows("before", RECORDS)
    assert rows("turned", RECORDS[::-1]) == before
    fewer = rows("fewer", [record for record in RECORDS if record.patient != "p3"])
    assert fewer == {patient: own for patient, own in before.items() if patient != hash64("p3")}


# --- files that are named twice ---


def named_twice(tmp_path, how):
    """A folder or table that names a file twice."""
    place = tmp_path / "data"
    folder(place, RECORDS)
    first = next(place.rglob("*.png"))
    if how == "linked file":
        (first.parent / "again.png").symlink_to(first)
    elif how == "hard link":
        (first.parent / "again.png").hardlink_to(first)
    elif how == "linked folder":
        (first.parent / "more").symlink_to(tmp_path / "elsewhere")
        folder(tmp_path / "elsewhere", RECORDS)
        (first.parent / "most").symlink_to(tmp_path / "elsewhere")
    else:
        files = [path.relative_to(place) for path in sorted(place.rglob("*.png"))]
        (place / "sub").mkdir()
        rows = [["image", "label"], *([str(file), file.parts[0]] for file in files)]
        rows.append([f"sub/../{files[0]}", files[0].parts[0]])
        if how == "spelled":
            with (place / "table.csv").open("w", newline="") as file:
                csv.writer(file).writerows(rows)
            place = place / "table.csv"
        else:  # as pandas writes a column of categories
            images, labels = map(pyarrow.array, zip(*rows[1:], strict=True))
            table = pyarrow.table({"image": images.dictionary_encode(), "label": labels})
            place = place / "table.parquet"
            pyarrow.parquet.write_table(table, place)
    return place


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    """It would be two records, which one change of the file changes together."""
    for how in ("spelled", "categories", "linked file", "hard link", "linked folder"):
        place = named_twice(tmp_path / how, how)
        files = hospitals.HospitalFiles(str(place), "image", "label", None, False)
        with pytest.raises(UserError, match="is named twice"):
            hospitals.read(files, (1, 8, 8), CLASSES)
        columns = ("data.image_column=image", "data.label_column=label") if place.is_file() else ()
        where = ("data=imagefolder", f"data.path={place}", "data.shape=[1,8,8]", *columns)
        config = from_overrides([*where, f"cache={tmp_path}/cache"], tmp_path).config
        with pytest.raises(UserError, match="is named twice"):
            load_data(config.data, config.cache)
