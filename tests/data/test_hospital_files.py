"""A hospital's own files: every format, and everything that may be wrong with them."""

import csv
import io
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fed_dpsd.config import UserError
from fed_dpsd.data.hospital import HospitalFiles, read

SHAPE = (1, 8, 8)
RECORDS = [("well", 0, "ann"), ("ill", 100, "bob"), ("ill", 255, "ann")]
FILES = HospitalFiles("", {"well": 0, "ill": 2}, "image", "label", "patient", False)


def png(shade, size=(8, 8), mode="L"):
    buffer = io.BytesIO()
    Image.new(mode, size, shade).save(buffer, "PNG")
    return buffer.getvalue()


def folder(tmp_path, records=RECORDS):
    for index, (label, shade, _) in enumerate(records):
        path = tmp_path / "scans" / label / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(shade))
    return replace(FILES, path=str(tmp_path / "scans"), patient_column=None)


def table(tmp_path, records=RECORDS):
    with (tmp_path / "scans.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label", "patient"])
        for index, (label, shade, patient) in enumerate(records):
            (tmp_path / f"{index}.png").write_bytes(png(shade))
            writer.writerow([f"{index}.png", label, patient])
    return replace(FILES, path=str(tmp_path / "scans.csv"))


def npz(tmp_path, records=RECORDS, **arrays):
    labels, shades, patients = zip(*records, strict=True)
    images = np.array(shades, np.uint8)[:, None, None] * np.ones((1, 8, 8), np.uint8)
    given = {"image": images, "label": np.array(labels)[:, None], "patient": np.array(patients)}
    np.savez(tmp_path / "scans.npz", **given | arrays)
    return replace(FILES, path=str(tmp_path / "scans.npz"))


def parquet(tmp_path, records=RECORDS):
    labels, shades, patients = zip(*records, strict=True)
    columns = {"image": [{"bytes": png(s), "path": None} for s in shades], "label": labels}
    pyarrow.parquet.write_table(
        pyarrow.table(columns | {"patient": patients}), tmp_path / "scans.parquet"
    )
    return replace(FILES, path=str(tmp_path / "scans.parquet"))


@pytest.mark.parametrize("write", [folder, table, npz, parquet])
def test_every_format_gives_the_same_records(tmp_path, write):
    found = read(write(tmp_path), SHAPE, 3)
    shades = found.records.images[:, 0, 0, 0].tolist()
    assert sorted(zip(shades, found.records.labels.tolist(), strict=True)) == [
        (0, 0),
        (100, 2),
        (255, 2),
    ]
    assert found.records.images.shape == (3, *SHAPE)
    assert found.unreadable == ()
    patients = found.records.patients
    if write is folder:
        assert patients is None
    else:
        assert patients[0] == patients[2] != patients[1]


@pytest.mark.parametrize("write", [folder, table, npz, parquet])
def test_an_id_stays_when_other_records_come_or_go(tmp_path, write):
    def by_shade(name, records):
        (tmp_path / name).mkdir()
        found = read(write(tmp_path / name, records), SHAPE, 3)
        return dict(zip(found.records.images[:, 0, 0, 0].tolist(), found.ids, strict=True))

    before = by_shade("before", RECORDS)
    after = by_shade("after", [*RECORDS[1:], ("well", 7, "eve")])
    assert len(set(before.values()) | set(after.values())) == 4
    assert all(before[shade] == after[shade] for shade in (100, 255))


def test_colours_sizes_and_depths_become_the_federations(tmp_path):
    """Sixteen bits are scaled, not cut off; the middle of a wide image is kept."""
    files = folder(tmp_path)
    scans = tmp_path / "scans"
    deep = np.full((8, 8), 128 << 8, np.uint16)
    Image.fromarray(deep).save(scans / "well" / "0.png")
    (scans / "ill" / "1.png").write_bytes(png((200, 0, 0), (40, 20), "RGB"))
    wide = np.zeros((10, 30), np.uint8)
    wide[:, 10:20] = 90
    Image.fromarray(wide).save(scans / "ill" / "2.png")
    records = read(files, SHAPE, 3).records
    assert records.images[2].max() == records.images[2].min() == 128
    assert len(np.unique(records.images[0])) == 1
    assert np.median(records.images[1]) == 90
    coloured = read(files, (3, 8, 8), 3).records
    assert coloured.images[0, :, 0, 0].tolist() == [200, 0, 0]


def test_unreadable_images_are_named_and_skipped_only_where_that_is_allowed(tmp_path):
    files = table(tmp_path)
    (tmp_path / "0.png").write_bytes(b"no image")
    (tmp_path / "2.png").unlink()
    with pytest.raises(
        UserError, match=r"2 images \(0.png: .*, 2.png: .*\) are unreadable; .*skip"
    ):
        read(files, SHAPE, 3)
    found = read(replace(files, skip_unreadable=True), SHAPE, 3)
    assert found.records.labels.tolist() == [2]
    assert [line.partition(":")[0] for line in found.unreadable] == ["0.png", "2.png"]
    (tmp_path / "1.png").unlink()
    with pytest.raises(UserError, match="holds no image that can be read"):
        read(replace(files, skip_unreadable=True), SHAPE, 3)


def test_a_file_that_is_no_image_is_not_passed_over_in_silence(tmp_path):
    files = folder(tmp_path)
    (tmp_path / "scans" / "ill" / "scan.dcm").write_bytes(b"\0" * 128 + b"DICM")
    (tmp_path / "scans" / "ill" / ".hidden").write_bytes(b"")
    with pytest.raises(UserError, match=r"1 images \(ill/scan.dcm: it is none of PNG, JPEG"):
        read(files, SHAPE, 3)


def test_a_decompression_bomb_is_unreadable(tmp_path, monkeypatch):
    files = folder(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8 * 8 // 2 - 1)
    with pytest.raises(UserError, match=r"3 images \(.*decompression bomb.*\) are unreadable"):
        read(files, SHAPE, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": {"well": 0}}, r"1 labels \(ill\) are not in classes; add each"),
        ({"classes": {"well": 0, "ill": 3}}, "classes.ill=3: the federation has classes 0 to 2"),
        ({"image_column": "scan"}, "there is no image_column='scan'; it has image, label, patient"),
        ({"patient_column": "name"}, "there is no patient_column='name'"),
        ({"path": "nowhere"}, "path=nowhere is not there; give a folder"),
        ({"path": __file__}, "is no .csv, .npz, .parquet file; give a folder"),
    ],
)
def test_what_is_wrong_is_named_with_the_remedy(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        read(replace(table(tmp_path), **change), SHAPE, 3)


def test_a_folder_of_classes_knows_no_patients(tmp_path):
    with pytest.raises(UserError, match="patient_column='patient': a folder of classes"):
        read(replace(folder(tmp_path), patient_column="patient"), SHAPE, 3)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"image": np.zeros((3, 8, 8))}, "image is float64 of shape .* it must be uint8"),
        ({"label": np.zeros(2)}, "3 images but 2 labels"),
        ({"label": np.array(["ill", None, 3], object)}, "cannot be read"),
    ],
)
def test_arrays_that_do_not_fit_are_errors(tmp_path, arrays, message):
    """Objects among them would be unpickled, so they are refused."""
    with pytest.raises(UserError, match=message):
        read(npz(tmp_path, **arrays), SHAPE, 3)


@pytest.mark.parametrize(
    ("classes", "message"),
    [({}, "names no label"), ({"ill": -1}, "classes.ill=-1"), ({"ill": True}, "classes.ill=True")],
)
def test_classes_are_numbers(classes, message):
    with pytest.raises(ValueError, match=message):
        replace(FILES, classes=classes)
