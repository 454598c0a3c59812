"""A hospital's own files: every format, and everything that may be wrong with them."""

import contextlib
import csv
import os
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fed_dpsd.client.records import HospitalFiles, read
from fed_dpsd.errors import UserError
from tests.data.files import png

SHAPE = (1, 8, 8)
RECORDS = [("well", 0, "ann"), ("ill", 100, "bob"), ("ill", 255, "ann")]
CLASSES = ("fine", "better", "bad")
FILES = HospitalFiles("files", "image", "label", "patient", False, {"well": "fine", "ill": "bad"})


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


WRITERS = (folder, table, npz, parquet)


@pytest.mark.parametrize("write", WRITERS)
def test_every_format_gives_the_same_records_and_lasting_ids(tmp_path, write):
    """An id stays when other records come or go, and the order of records does not matter.

    Otherwise a re-exported CSV would be another training, charged again.
    """

    def found(name, records):
        (tmp_path / name).mkdir()
        return read(write(tmp_path / name, records), SHAPE, CLASSES)

    before = found("before", RECORDS)
    records, shades = before.records, before.records.images[:, 0, 0, 0].tolist()
    assert dict(zip(shades, records.labels.tolist(), strict=True)) == {0: 0, 100: 2, 255: 2}
    assert records.images.shape == (3, *SHAPE)
    assert (before.count.found, before.count.used, before.count.skipped) == (3, 3, {})
    if write is folder:
        assert records.patients is None
    else:
        patients = dict(zip(shades, records.patients, strict=True))
        assert patients[0] == patients[255] != patients[100]
    assert (np.diff(before.ids) > 0).all()

    after = found("after", [*RECORDS[1:], ("well", 7, "eve")])
    ids, later = (
        dict(zip(each.records.images[:, 0, 0, 0].tolist(), each.ids, strict=True))
        for each in (before, after)
    )
    assert len({*ids.values(), *later.values()}) == 4
    assert all(ids[shade] == later[shade] for shade in (100, 255))

    again = [*RECORDS, ("well", 255, "eve"), ("well", 255, "ann")]  # one image, three records
    one, two = (found(n, each).records for n, each in (("one", again), ("two", again[::-1])))
    assert np.array_equal(one.images, two.images)
    assert np.array_equal(one.labels, two.labels)
    assert write is folder or np.array_equal(one.patients, two.patients)


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
    records = read(files, SHAPE, CLASSES).records
    red = 60  # as grey
    middles = {image[0, 4, 4]: image for image in records.images}
    assert set(middles) == {128, red, 90}
    assert all(len(np.unique(middles[shade])) == 1 for shade in (128, red))
    assert np.median(middles[90]) == 90
    coloured = read(files, (3, 8, 8), CLASSES).records
    assert [200, 0, 0] in coloured.images[:, :, 0, 0].tolist()


def test_a_tiff_says_which_end_is_white_and_what_its_numbers_are(tmp_path):
    files = folder(tmp_path, RECORDS[1:])
    path = tmp_path / "scans" / "well" / "x.tiff"
    path.parent.mkdir()
    for kind, level, white_is_zero, shade in (
        (np.uint16, 200 << 8, False, 200),
        (np.uint16, 200 << 8, True, 55),
        (np.uint8, 200, False, 200),
        (np.uint8, 200, True, 200),  # Pillow writes and reads it inverted
    ):
        tags = {262: 0} if white_is_zero else {}
        Image.fromarray(np.full((8, 8), level, kind)).save(path, tiffinfo=tags)
        records = read(files, SHAPE, CLASSES).records
        assert records.images[records.labels == 0].max() == shade, (kind, white_is_zero)
    for kind in (np.float32, np.int32):
        Image.fromarray(np.full((8, 8), 7, kind)).save(path)
        with pytest.raises(UserError, match="x.tiff: its pixels are floats, signed or 32-bit"):
            read(files, SHAPE, CLASSES)


def test_whatever_a_plugin_raises_is_an_unreadable_image(tmp_path, monkeypatch):
    files = folder(tmp_path)

    def broken(*_, **__):
        raise SyntaxError("broken chunk")

    monkeypatch.setattr("fed_dpsd.data.images.ImageOps.exif_transpose", broken)
    with pytest.raises(UserError, match=r"no record can be read: .* 3 unreadable \(.*broken chunk"):
        read(files, SHAPE, CLASSES)

    def exhausted(*_, **__):
        raise MemoryError

    monkeypatch.setattr("fed_dpsd.data.images.ImageOps.exif_transpose", exhausted)
    with pytest.raises(MemoryError):  # otherwise free memory would decide which records exist
        read(replace(files, skip_unreadable=True), SHAPE, CLASSES)


def test_nothing_in_a_folder_is_lost_in_silence(tmp_path):
    files = folder(tmp_path)
    scans = tmp_path / "scans"
    (scans / "linked").symlink_to(scans / "ill", target_is_directory=True)
    with pytest.raises(UserError, match="is named twice, by rows or links"):
        read(files, SHAPE, CLASSES)
    (scans / "linked").unlink()
    (scans / "more").mkdir()
    (scans / "more" / "x.png").write_bytes(png(9))
    with pytest.raises(UserError, match=r"no class: more \(more/x.png\); add each to files.labels"):
        read(files, SHAPE, CLASSES)
    (scans / "more" / "x.png").unlink()
    (scans / "more").rmdir()
    (scans / "ill" / "up").symlink_to(scans, target_is_directory=True)
    with pytest.raises(UserError, match="ill/up links to a folder that contains it"):
        read(files, SHAPE, CLASSES)
    (scans / "ill" / "up").unlink()
    (scans / "ill" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (scans / "loose.png").write_bytes(png(3))
    (scans / "ill" / ".ipynb_checkpoints").mkdir()
    (scans / "ill" / ".ipynb_checkpoints" / "copy.png").write_bytes(png(4))
    os.mkfifo(scans / "ill" / "pipe.png")
    found = read(replace(files, skip_unreadable=True), SHAPE, CLASSES)
    names = ["ill/gone.png", "ill/pipe.png", "loose.png"]
    lost = [line for lines in found.count.skipped.values() for line in lines]
    assert sorted(line.partition(":")[0] for line in lost) == names
    assert len(found.ids) == 3
    with pytest.raises(UserError, match="names 'fine', but .* has no such class folder; it has "):
        read(replace(files, labels={**FILES.labels, "fine": "fine"}), SHAPE, CLASSES)


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    files = folder(tmp_path)

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(
        UserError, match="scans cannot be read .* or the service's user, may read it"
    ):
        read(files, SHAPE, CLASSES)


def test_every_record_has_a_patient(tmp_path):
    """Otherwise a second teacher might see records of the same patient."""
    for number, (write, patients) in enumerate(
        [
            (table, ("ann", "bob", "")),
            (table, ("ann", "bob", "  ")),
            (parquet, ("ann", "bob", None)),
            (parquet, (1.0, 2.0, float("nan"))),
            (npz, (1.0, 2.0, float("nan"))),
            (npz, ("ann", "bob", "nan")),
            (npz, (b"ann", b"bob", b" ")),
        ]
    ):
        records = [(*each[:2], patient) for each, patient in zip(RECORDS, patients, strict=True)]
        place = tmp_path / f"{number}"
        place.mkdir()
        with pytest.raises(UserError, match="has no patient; name its patient, delete it, or set"):
            read(write(place, records), SHAPE, CLASSES)


def test_unreadable_images_are_named_and_skipped_only_where_that_is_allowed(tmp_path):
    files = table(tmp_path)
    (tmp_path / "0.png").write_bytes(b"no image")
    (tmp_path / "2.png").unlink()
    with pytest.raises(
        UserError, match=r"3 rows found, 1 used, 2 skipped: 2 unreadable \(0.png: .*, 2.png: .*skip"
    ):
        read(files, SHAPE, CLASSES)
    found = read(replace(files, skip_unreadable=True), SHAPE, CLASSES)
    assert found.records.labels.tolist() == [2]
    lost = found.count.skipped["unreadable"]
    assert [line.partition(":")[0] for line in lost] == ["0.png", "2.png"]
    (tmp_path / "1.png").unlink()
    with pytest.raises(UserError, match="no record can be read: 3 rows found, 0 used"):
        read(replace(files, skip_unreadable=True), SHAPE, CLASSES)


def test_a_file_that_is_no_image_or_too_large_is_unreadable(tmp_path, monkeypatch):
    files = folder(tmp_path)
    (tmp_path / "scans" / "ill" / "scan.dcm").write_bytes(b"\0" * 128 + b"DICM")
    (tmp_path / "scans" / "ill" / ".hidden").write_bytes(b"")
    with pytest.raises(UserError, match=r"1 unreadable \(ill/scan.dcm: .* DICOM without pixels"):
        read(files, SHAPE, CLASSES)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8 * 8 // 2 - 1)
    with pytest.raises(UserError, match=r"4 unreadable \(.*decompression bomb"):
        read(files, SHAPE, CLASSES)


def test_what_is_wrong_is_named_with_the_remedy(tmp_path):
    unknown = r"no class: ill \(1.png\), well \(0.png\); .* one of the classes fine, better"
    for change, message in (
        ({"labels": {"well": "fine"}}, r"no class: ill \(1.png\); add each to files.labels, with"),
        ({"labels": {}}, unknown),
        ({"image_column": "scan"}, r"no column scan \(files.image_column\); its columns are image"),
        ({"patient_column": "name"}, r"no column name \(files.patient_column\)"),
        ({"path": "nowhere"}, "path=nowhere does not exist; give a folder"),
        ({"path": __file__}, "is not a .parquet, .csv, .npz file; give a folder"),
    ):
        with pytest.raises(UserError, match=message):
            read(replace(table(tmp_path), **change), SHAPE, CLASSES)
    with pytest.raises(UserError, match="files.patient_column=patient: class folders name no"):
        read(replace(folder(tmp_path), patient_column="patient"), SHAPE, CLASSES)


def test_arrays_that_do_not_fit_are_errors(tmp_path):
    """Objects among them would be unpickled, so they are refused."""
    for arrays, message in (
        ({"image": np.zeros((3, 8, 8))}, r"float64 .* be uint8 .* x = \(255 \* x\)\.round"),
        ({"image": np.zeros((3, 3, 8, 8), np.uint8)}, r"convert .* x = x.transpose\(0, 2, 3, 1\)"),
        ({"image": np.zeros((3, 8, 8, 4), np.uint8)}, r"must be uint8 of shape \(N, H, W\)"),
        ({"image": np.zeros((3, 0, 8), np.uint8)}, r"must be uint8 of shape \(N, H, W\)"),
        ({"label": np.zeros(2)}, "3 images but 2 values in label"),
        ({"patient": np.zeros(4)}, "3 images but 4 values in patient"),
        ({"label": np.array(["ill", None, 3], object)}, "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            read(npz(tmp_path, **arrays), SHAPE, CLASSES)


def test_arrays_of_one_channel_are_grey_images(tmp_path):
    flat = read(npz(tmp_path), SHAPE, CLASSES)
    with np.load(tmp_path / "scans.npz") as arrays:
        channel = arrays["image"][..., None]
    assert (
        read(npz(tmp_path, image=channel), SHAPE, CLASSES).records.images == flat.records.images
    ).all()


def test_missing_arrays_are_named_with_their_keys(tmp_path):
    with pytest.raises(UserError, match=r"no array scan .* Set files.image_column=ARRAY$"):
        read(replace(npz(tmp_path), image_column="scan"), SHAPE, CLASSES)


def test_labels_are_mapped_to_names():
    for change, message in (
        ({"labels": {0: "fine"}}, "labels: 0 is not text; quote it: '0': fine"),
        ({"labels": {False: "fine"}}, "labels: False is not text; quote it: 'no': fine"),
        ({"labels": {"1": "fine", "1.0": "bad"}}, "labels: '1' and '1.0' are the same label"),
        ({"labels": {"true": "fine", "True": "bad"}}, "'true' and 'True' are the same label"),
        ({"labels": {"ill": 1}}, "labels.ill=1 must be the name of one of the classes"),
        ({"label_columns": ("a", "b")}, "give one of label_column and label_columns"),
        ({"label_column": None}, "give one of label_column and label_columns"),
        ({"pixel_bits": 7}, "pixel_bits=7 must be between 8 and 16"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(FILES, **change)


def test_labels_are_mapped_to_classes_that_there_are():
    FILES.check(CLASSES)
    with pytest.raises(ValueError, match="labels.ill=bad: the classes are fine, better; name one"):
        FILES.check(CLASSES[:2])


def test_what_is_no_such_file_is_an_error(tmp_path):
    for suffix in (".npz", ".parquet", ".csv"):
        for content in (b"", b"garbage", b"PAR1"):
            path = tmp_path / f"scans{suffix}"
            path.write_bytes(content)
            with pytest.raises(UserError, match=str(path)):
                read(replace(FILES, path=str(path)), SHAPE, CLASSES)


def test_parquet_holds_encoded_images_or_paths(tmp_path):
    files = replace(parquet(tmp_path), skip_unreadable=True)
    none = (
        r"no record can be read: .* 3 unreadable \(row 1: it is empty, .*, row 3: it is not a PNG"
    )
    for images, expected in (
        (["a", "b", "c"], r"3 unreadable \(a: No such file"),
        ([1, 2, 3], "row 1 is of type int; it must be an encoded image"),
        ([None, b"", b"x"], none),
    ):
        columns = {"image": images, "label": ["well"] * 3, "patient": ["a", "b", "c"]}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "scans.parquet")
        with pytest.raises(UserError, match=expected):
            read(files, SHAPE, CLASSES)


@pytest.mark.parametrize("write", [npz, parquet])
def test_a_file_that_was_damaged_is_an_error_or_its_images_are(tmp_path, write):
    """At any byte; compressed, so that some files cannot be inflated."""
    files = write(tmp_path)
    path = tmp_path / f"scans{files.path[files.path.rindex('.') :]}"
    if write is npz:
        with np.load(path) as arrays:
            found = dict(arrays)
        np.savez_compressed(path, **found)
    content = path.read_bytes()
    rng = np.random.Generator(np.random.PCG64(0))
    for at in rng.integers(0, len(content), 300):
        path.write_bytes(content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :])
        with contextlib.suppress(UserError):
            read(replace(files, skip_unreadable=True), SHAPE, CLASSES)
