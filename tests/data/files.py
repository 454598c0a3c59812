"""Data sets to test with: folders of classes and tables, with pictures of one shade each."""

import csv
import io

import pyarrow
import pyarrow.parquet
import pydicom
from PIL import Image

from fed_dpsd.client import records
from fed_dpsd.config.compose import compose
from fed_dpsd.data import datasets
from fed_dpsd.experiment import set_up

CLASSES = ("ill", "well")
NAME, BORN = "Mockingbird^Quillan", "19010203"  # in the headers of DICOM files


def bound(base, path, *overrides):
    """The configuration of the data set at a path."""
    chosen = ["data=imagefolder", f'data.path="{path}"', "data.shape=[1,8,8]", *overrides]
    return set_up(compose(chosen), base).config.data


def loaded(base, path, *overrides):
    return datasets.load(bound(base, path, *overrides), base / "cache")


def hospital(path, **changes):
    """What a hospital reads at a path."""
    given = {"image_column": "image", "label_column": "label", "patient_column": None}
    files = records.HospitalFiles(str(path), skip_unreadable=True, **given | changes)
    return records.read(files, (1, 8, 8), CLASSES)


def png(shade, size=(8, 8), mode="L"):
    buffer = io.BytesIO()
    Image.new(mode, size, shade).save(buffer, "PNG")
    return buffer.getvalue()


def dicom(pixels, bits=None, form=pydicom.uid.ExplicitVRLittleEndian, **tags):
    """A DICOM file of (H, W) or (H, W, 3) pixels, with a made-up person in its header."""
    header = pydicom.Dataset()
    header.file_meta = pydicom.dataset.FileMetaDataset()
    header.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    header.SOPClassUID, header.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.1", "1.2.3"
    header.PatientName, header.PatientBirthDate = NAME, BORN
    header.Rows, header.Columns = pixels.shape[:2]
    header.SamplesPerPixel, header.PhotometricInterpretation = 1, "MONOCHROME2"
    if pixels.ndim == 3:
        header.SamplesPerPixel, header.PhotometricInterpretation = 3, "RGB"
        header.PlanarConfiguration = 0
    header.BitsAllocated = 8 * pixels.itemsize
    header.BitsStored = bits or header.BitsAllocated
    header.HighBit = header.BitsStored - 1
    header.PixelRepresentation = int(pixels.dtype.kind == "i")
    header.PixelData = pixels.tobytes()
    for tag, value in tags.items():
        setattr(header, tag, value)
    if form == pydicom.uid.RLELossless:
        header.compress(form)
    header.file_meta.TransferSyntaxUID = form
    content = io.BytesIO()
    header.save_as(content, enforce_file_format=True)
    return content.getvalue()


def picture(path, shade=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), shade).save(path)


def shades(folder, **classes):
    """A folder for each class, with a picture for each shade."""
    for name, values in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for shade in values:
            picture(folder / name / f"{shade}.png", shade)
    return folder


def table(path, rows, head="image,label"):
    """A CSV of these rows, with a picture for each path in it that does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row.split(",") if isinstance(row, str) else row for row in rows]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head.split(","), *rows])
    for shade, (name, *_) in enumerate(rows, 1):
        place = path.parent / name.replace("\\", "/")
        if not place.exists():
            picture(place, shade)
    return path


def parquet(folder, pictures, names=("train", "test"), image="image", **columns):
    """Parquet files of encoded pictures, in the layout of the hub."""
    folder.mkdir(exist_ok=True)
    images = [None if each is None else {"bytes": each, "path": None} for each in pictures]
    for name in names:
        rows = pyarrow.table({image: images, **{key: list(own) for key, own in columns.items()}})
        pyarrow.parquet.write_table(rows, folder / f"{name}.parquet")
    return folder


def number_of(split):
    """Each shade's label."""
    return dict(zip(split.images[:, 0, 0, 0].tolist(), split.labels.tolist(), strict=True))


def everything(data):
    return number_of(data.train) | number_of(data.test)
