"""DICOM files: their grey levels, what is refused, patients, and what a header must not leak.

The rows of other formats are in test_images.py, test_class_names.py and tests/client.
"""

import io
import sys
from functools import partial

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.uid import (
    ImplicitVRLittleEndian,
    JPEGExtended12Bit,
    JPEGLSLossless,
    RLELossless,
)

from fed_dpsd.data.images import open_image, to_pixels
from fed_dpsd.errors import UserError
from tests.data.files import BORN, CLASSES, NAME, dicom, hospital, loaded, png

DEEP = np.arange(2**12, dtype=np.uint16).reshape(64, 64)  # each value of 12 bits
UPPER = (DEEP >> 4).astype(np.uint8)
FULL = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
RGB = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
WINDOW = {"WindowCenter": "1000", "WindowWidth": "201"}
INVERTED = {"PhotometricInterpretation": "MONOCHROME1"}


def grey(content, window=None):
    return np.asarray(open_image(content, 1, window=window))


def lut(entries, bits, first=0):
    item = pydicom.Dataset()
    item.add_new("LUTDescriptor", "SS" if first < 0 else "US", [len(entries), first, bits])
    item.add_new("LUTData", "OW", np.array(entries, "<u2").tobytes())
    return [item]


def saved(pixels, form="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


# --- grey levels ---


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (dicom(DEEP, 12), UPPER),
        (dicom(FULL), FULL >> 8),
        (dicom(DEEP.astype(np.uint8)), DEEP & 255),
        (dicom(DEEP, 12, **INVERTED), 255 - UPPER),
        (dicom(DEEP.astype(np.int16) - 2048, 12), UPPER),
        (dicom(DEEP, 12, RescaleSlope="0.37", RescaleIntercept="-1024.7"), UPPER),
        (dicom(FULL, RescaleSlope="2.5e-3", RescaleIntercept="-1e4"), FULL >> 8),
        (dicom(DEEP, 12, **WINDOW), UPPER),  # a window counts only where it is asked for
        (dicom(DEEP, 12, RLELossless), UPPER),
        (dicom(DEEP, 12, ImplicitVRLittleEndian), UPPER),
        (dicom(DEEP | 0x8000, 12), UPPER),  # an overlay in the bits that are not stored
        (dicom(DEEP, 12, ModalityLUTSequence=lut([*range(255, -1, -1)], 8, 3840)), None),
    ],
    ids=lambda value: "",
)
def test_without_a_window_the_upper_bits_of_what_is_stored_are_used(content, expected):
    if expected is None:  # the table inverts its range, and continues its ends
        expected = np.clip(255 - (DEEP.astype(int) - 3840), 0, 255)
    assert np.array_equal(grey(content), expected)
    assert np.array_equal(np.asarray(open_image(content, 3))[..., 0], expected)


def test_a_window_spans_all_grey_levels_after_the_rescaling():
    """Its centre is 1000 and its width 201: from 900 to 1100, in the units of the rescaling."""
    given, rescaled = (1000, 201), {"RescaleSlope": "2", "RescaleIntercept": "-1000"}
    for content, window, value in (
        (dicom(DEEP, 12), given, DEEP),
        (dicom(DEEP, 12, **WINDOW), "header", DEEP),
        (dicom(DEEP, 12, WindowCenter=["1000", "5"], WindowWidth=["201", "9"]), "header", DEEP),
        (dicom(DEEP, 12, WindowCenter="7", WindowWidth="9"), given, DEEP),
        (dicom(DEEP, 12, **rescaled), given, 2 * DEEP.astype(int) - 1000),
        (dicom(DEEP, 12, **rescaled, **WINDOW), "header", 2 * DEEP.astype(int) - 1000),
    ):
        shades = grey(content, window)
        assert (shades[value <= 899] == 0).all()
        assert (shades[value >= 1101] == 255).all()
        assert set(shades[abs(value - 1000) <= 1]) <= {126, 127, 128, 129}
        assert (np.diff(shades[value > 0].astype(int)) >= 0).all()
        assert len(np.unique(shades)) > 90
    inverted = dicom(DEEP, 12, **WINDOW, **INVERTED)
    assert np.array_equal(grey(inverted, "header"), 255 - grey(dicom(DEEP, 12, **WINDOW), "header"))


def test_a_table_of_grey_levels_in_the_header_precedes_its_window():
    steps = lut([0, 2**12 // 2, 2**12 - 1], 12, first=100)
    shades = grey(dicom(DEEP, 12, VOILUTSequence=steps, **WINDOW), "header").ravel()
    assert shades[[0, 100, 101, 102, 4_000]].tolist() == [0, 0, 128, 255, 255]
    steps = lut(UPPER.ravel().tolist(), 8)
    assert np.array_equal(grey(dicom(DEEP, 12, VOILUTSequence=steps), "header"), UPPER)
    signed = FULL.astype(np.int32) - 2**15
    steps = lut([0, 255], 8, first=-(2**15))
    content = dicom(signed.astype(np.int16), VOILUTSequence=steps)
    assert np.array_equal(grey(content, "header"), np.where(FULL == 0, 0, 255))


def test_a_header_without_a_window_is_counted(tmp_path, said):
    for name, tags in (("ill/1", WINDOW), ("ill/2", {}), ("well/3", {})):
        file = tmp_path / "scans" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(dicom(DEEP + len(name), 16, **tags))
    read = hospital(tmp_path / "scans", window="header")
    assert any("2 DICOM images have no window of their own" in note for note in read.notes)
    (note,) = hospital(tmp_path / "scans").notes
    assert "its DICOM images use at most 17 of 256 grey levels; window=header or" in note
    assert not hospital(tmp_path / "scans", window=(2_000, 4_000)).notes


def test_colours_are_read_as_rgb():
    ybr = np.asarray(Image.fromarray(RGB).convert("YCbCr"))
    for content, error in (
        (dicom(RGB), 0),
        (dicom(RGB, None, RLELossless), 0),
        (dicom(ybr, PhotometricInterpretation="YBR_FULL"), 3),
    ):
        found = to_pixels(open_image(content, 3, window="header")).transpose(1, 2, 0)
        assert abs(found.astype(int) - RGB).max() <= error
    expected = np.asarray(Image.fromarray(RGB).convert("L"))
    assert np.array_equal(grey(dicom(RGB)), expected)


# --- what is refused ---


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            dicom(np.zeros((24, 8), np.uint8), Rows=8, NumberOfFrames=3),
            "it has 3 frames; save",
        ),
        (dicom(RGB.astype(np.uint16)), "its colours are not RGB with 8 bits per"),
        (dicom(RGB.astype(np.int8)), "its colours are not RGB with 8 bits per"),
        (dicom(RGB[..., 0], PhotometricInterpretation="PALETTE COLOR"), "in a palette; save it as"),
        (dicom(np.zeros((8, 8), np.uint32)), "it stores more than 16 bits per pixel"),
        (dicom(DEEP, 12, RescaleSlope="-1", RescaleIntercept="0"), "slope is not positive"),
        (dicom(DEEP, 12, RescaleIntercept="-1024"), "slope or intercept alone; save it with"),
        (dicom(DEEP, 12, HighBit=15), "its bits do not begin with the lowest"),
        (dicom(DEEP, 12, SharedFunctionalGroupsSequence=[]), "it is an enhanced file; save it"),
        (
            dicom(RGB, PhotometricInterpretation="MONOCHROME2"),
            "its pixels are neither grey nor RGB",
        ),
        (dicom(RGB, PhotometricInterpretation="HSV"), "its pixels are neither grey nor RGB"),
        (dicom(RGB, PhotometricInterpretation="YBR_RCT"), "its pixels are neither grey nor RGB"),
        (dicom(np.zeros((24, 8), np.uint8), Rows=8), "it has several frames; save each as a"),
        (dicom(DEEP, 12, Rows=65_535, Columns=65_535), "states more than 268,435,456"),
        (dicom(DEEP, 12, Rows=65), r"cannot be read \(ValueError\)$"),
        (dicom(DEEP, 12)[:400], "it is not DICOM, or DICOM without pixels"),
        (dicom(DEEP, 12)[:4_000], r"cannot be read \(\w+\)$"),
        (
            dicom(DEEP, 12).replace(b"10008.1.2.1", b"99999.1.2.1"),
            "its transfer syntax is unknown to pydicom",
        ),
    ],
    ids=lambda value: "image" if isinstance(value, bytes) else value,
)
def test_what_would_be_lost_is_refused(content, reason):
    with pytest.raises(ValueError, match=reason):
        open_image(content, 1)


def encapsulated(form):
    """A file whose compressed pixels are none."""
    broken = pydicom.encaps.encapsulate([b"\xff\xd8\xff\xc1 no picture"])
    return dicom(DEEP, 12, form, PixelData=broken)


def test_a_missing_decoder_is_named_with_its_package():
    with pytest.raises(UserError, match=r"\(JPEG-LS Lossless .* install python-gdcm.* or pylib"):
        open_image(encapsulated(JPEGLSLossless), 1)
    with pytest.raises(ValueError, match=r"\(JPEG Extended .* cannot be decoded; if it is intact"):
        open_image(encapsulated(JPEGExtended12Bit), 1)


def test_a_missing_pydicom_is_named_with_the_extra(tmp_path, monkeypatch):
    (tmp_path / "ill").mkdir()
    (tmp_path / "ill" / "scan").write_bytes(dicom(DEEP, 12))
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(UserError, match=r"run pip install 'fed-dpsd\[dicom\]'"):
        hospital(tmp_path)


def test_a_damaged_file_is_unreadable_and_quotes_no_header(caplog, recwarn):
    """At any byte; pydicom's own messages quote what it cannot read."""
    tags = {"PatientID": "Wren7", "RescaleSlope": "1", "RescaleIntercept": "0", **WINDOW}
    content = dicom(DEEP[:8, :8], 12, **tags)
    misspelt = dicom(DEEP, 12, NumberOfFrames=7_777).replace(b"7777", b"Wren")
    with pytest.warns(UserWarning, match="'Wren'"):  # the control
        assert pydicom.dcmread(io.BytesIO(misspelt)).NumberOfFrames == "Wren"
    recwarn.clear()
    caplog.clear()
    with pytest.raises(ValueError, match=r"cannot be read \(ValueError\)$"):
        open_image(misspelt, 1)
    errors = []
    for at in np.random.default_rng(0).integers(132, len(content), 400):
        try:
            open_image(
                content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :], 1, 16, "header"
            )
        except ValueError as error:
            errors.append(error)
    assert len(errors) > 50
    assert all(error.__suppress_context__ or error.__context__ is None for error in errors)
    quoted = " ".join(map(str, errors))
    assert not [text for text in (*NAME.split("^"), BORN, "Wren7") if text in quoted]
    assert not caplog.records
    assert not recwarn.list


# --- records ---


def write(folder, image, name, number, patient="", ending=""):
    file = folder / CLASSES[number % 2] / f"{name}{ending}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(image(number, patient))


def noise(number):
    return np.random.default_rng(number).integers(0, 2**12, (10, 8), np.uint16)


def as_dicom(number, patient):
    return dicom(noise(number), 12, **({"PatientID": patient} if patient is not None else {}))


def as_png(number, _):
    return saved(noise(number))


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_records_are_those_of_png_files_of_the_same_pixels(tmp_path, fit):
    for number in range(30):
        write(tmp_path / "png", as_png, number, number, ending=".png")
        write(tmp_path / "dicom", as_dicom, number, number, ending=("", ".dcm", ".DCM")[number % 3])
    both = [
        loaded(tmp_path, tmp_path / form, "data.pixel_bits=12", f"data.fit={fit}")
        for form in ("png", "dicom")
    ]
    assert both[0].digests == both[1].digests
    png_files, dicom_files = (hospital(tmp_path / form, pixel_bits=12) for form in ("png", "dicom"))
    assert np.array_equal(png_files.records.images, dicom_files.records.images)
    assert np.array_equal(png_files.records.labels, dicom_files.records.labels)
    assert dicom_files.count.used == 30


def patients_in(folder, *overrides):
    return loaded(folder, folder / "scans", "data.patient_column=PatientID", *overrides)


def test_patients_come_from_headers_and_stay_together(tmp_path):
    for number in range(40):
        write(tmp_path / "scans", as_dicom, number, number, f"Wren{number // 4}")
    data = patients_in(tmp_path)
    assert data.train.num_patients + data.test.num_patients == 10
    assert not set(data.train.patients) & set(data.test.patients)
    read = hospital(tmp_path / "scans", patient_column="PatientID").records
    assert sorted(np.unique(read.patients, return_counts=True)[1]) == [4] * 10
    assert {*read.patients} == {*data.train.patients, *data.test.patients}


def test_leading_zeros_and_spaces_do_not_divide_a_patient(tmp_path):
    for number, patient in enumerate(("019", "19", "19 ", "20")):
        write(tmp_path, as_dicom, number, number, patient)
    assert hospital(tmp_path, patient_column="PatientID").records.num_patients == 2


@pytest.mark.parametrize("patient", [None, "", " ", "NULL"])
def test_a_picture_without_its_patient_is_an_error(tmp_path, patient):
    """Otherwise a second teacher might see pictures of the same patient."""
    write(tmp_path / "scans", as_dicom, "first", 1, "Wren1")
    write(tmp_path / "scans", as_dicom, "second", 2, patient)
    for read in (
        partial(hospital, tmp_path / "scans", patient_column="PatientID"),
        partial(patients_in, tmp_path),
    ):
        with pytest.raises(UserError, match="second has no PatientID; name its patient, delete"):
            read()


def test_other_formats_name_no_patients_and_unreadable_files_are_skipped(tmp_path):
    for number in range(3):
        write(tmp_path, as_dicom, number, number, "Wren1")
    (tmp_path / "ill" / "Thumbs.db").write_bytes(b"no image")
    (tmp_path / "ill" / "cut.dcm").write_bytes(as_dicom(9, "Wren1")[:500])
    read = hospital(tmp_path, patient_column="PatientID")
    assert (read.count.found, read.count.used, read.records.num_patients) == (5, 3, 1)
    (tmp_path / "ill" / "x.png").write_bytes(png(9))
    with pytest.raises(UserError, match=r"x.png: files.patient_column=PatientID: class folders"):
        hospital(tmp_path, patient_column="PatientID")
    with pytest.raises(UserError, match="patient_column=who: class folders name no patients; use"):
        hospital(tmp_path, patient_column="who")


# --- headers ---


def test_no_other_header_value_is_parsed(monkeypatch, tmp_path):
    kept, read = [], pydicom.dcmread

    def reading(*given, **options):
        kept.append(read(*given, **options))
        return kept[-1]

    monkeypatch.setattr(pydicom, "dcmread", reading)
    write(tmp_path, as_dicom, 1, 1, "Wren1")
    hospital(tmp_path, patient_column="PatientID")
    pixels, patient = kept
    assert [element.keyword for element in patient] == ["PatientID"]
    assert "PixelData" in pixels
    assert not [each for each in pixels if "Patient" in each.keyword or "UID" in each.keyword]


def test_a_name_stays_in_its_picture(tmp_path, capsys, caplog):
    """Neither in the cache, nor in what is printed; the patient's id only as a hash."""
    for number in range(30):
        write(tmp_path / "scans", as_dicom, number, number, f"Wren{number // 2}")
    (tmp_path / "scans" / "ill" / "cut").write_bytes(as_dicom(99, "Wren99")[:700])
    patients_in(tmp_path)
    hospital(tmp_path / "scans", patient_column="PatientID")
    secrets = (*NAME.split("^"), BORN, "Wren")
    spoken = "".join((*capsys.readouterr(), caplog.text))
    files = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert any("cache" in file.parts for file in files)
    for secret in secrets:
        assert secret not in spoken
        holding = [file for file, content in files.items() if secret.encode() in content]
        assert {file.relative_to(tmp_path).parts[0] for file in holding} == {"scans"}
