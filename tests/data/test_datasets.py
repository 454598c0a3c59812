"""The loader: digits, parquet folders, hub names, and what is wrong with a folder."""

import hashlib
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fed_dpsd.config import DataConfig
from fed_dpsd.data import datasets, partition
from fed_dpsd.errors import UserError

CONFIG = DataConfig("folder", None, None, "image", "label", None, (1, 8, 8), 3)


def picture(shade, size=8):
    buffer = io.BytesIO()
    Image.new("L", (size, size), shade).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def write(folder, shades, labels, size=8, names=("image", "label")):
    folder.mkdir(exist_ok=True)
    table = pyarrow.table({names[0]: [picture(s, size) for s in shades], names[1]: labels})
    for split in ("train", "test"):
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet")
    return replace(CONFIG, path=str(folder))


def test_digits_are_embedded_with_a_fixed_split(tmp_path):
    config = DataConfig("digits", None, None, "image", "label", None, (1, 8, 8), 10)
    data = datasets.load(config, tmp_path)
    assert (len(data.train), len(data.test)) == (1_437, 360)
    assert data.train.images.shape == (1_437, 1, 8, 8)
    assert data.train.images.dtype == np.uint8
    assert data.train.images.max() == 255
    assert set(data.test.labels) == set(range(10))
    again = datasets.load(config, tmp_path)
    assert (again.test.images == data.test.images).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_parquet_folder_is_decoded_once(tmp_path, channels, monkeypatch):
    config = replace(write(tmp_path / "data", [0, 100, 255], [0, 1, 2]), shape=(channels, 8, 8))
    data = datasets.load(config, tmp_path / "cache")
    assert data.train.images[:, 0, 0, 0].tolist() == [0, 100, 255]
    assert data.train.images.shape == (3, channels, 8, 8)
    assert data.test.labels.tolist() == [0, 1, 2]
    monkeypatch.setattr(datasets, "_decode", None)  # a second load needs no decoding
    assert datasets.load(config, tmp_path / "cache").train.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"image_column": "img"},
            r"no column img \(data.image_column\); its columns are image, label",
        ),
        ({"label_column": "y"}, r"no column y \(data.label_column\)"),
        ({"num_classes": 2}, "labels are 0 to 2, but data.num_classes=2 needs 0 to 1"),
        ({"shape": (1, 12, 12)}, r"image 0 has shape \[1, 8, 8\], but data.shape=\[1, 12, 12\]"),
    ],
)
def test_data_that_is_not_as_configured_is_an_error(tmp_path, change, expected):
    config = replace(write(tmp_path / "data", [0, 1, 2], [0, 1, 2]), **change)
    with pytest.raises(UserError, match=expected):
        datasets.load(config, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_later_keys_leave_the_cache_of_former_versions_alone(tmp_path):
    config = write(tmp_path / "data", [0, 1, 2], [0, 1, 2])
    file = tmp_path / "data" / "train.parquet"
    status = file.stat()
    text = (
        f"{file.resolve()} {status.st_size} {status.st_mtime_ns} train DataConfig(name='folder', "
        f"hub=None, path='{tmp_path}/data', image_column='image', label_column='label', "
        "patient_column=None, shape=(1, 8, 8), num_classes=3)"
    )
    datasets.load(config, tmp_path / "cache")
    names = {path.name for path in (tmp_path / "cache" / "data").iterdir()}
    assert f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.images.npy" in names
    datasets.load(replace(config, resize=True), tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "data").iterdir())) == 2 * len(names)


def test_an_empty_table_is_an_error(tmp_path):
    config = write(tmp_path / "data", [0], [0])
    empty = pyarrow.parquet.read_table(tmp_path / "data" / "train.parquet").slice(0, 0)
    pyarrow.parquet.write_table(empty, tmp_path / "data" / "train.parquet")
    with pytest.raises(UserError, match="there is no image with a label; give a folder"):
        datasets.load(config, tmp_path / "cache")


def test_a_folder_without_parquet_and_a_set_without_source(tmp_path):
    with pytest.raises(
        UserError, match=r"has no folder of a class; it holds nothing: give a folder"
    ):
        datasets.load(replace(CONFIG, path=str(tmp_path)), tmp_path)
    with pytest.raises(UserError, match=r"data=folder needs data.path=PATH: a folder with"):
        datasets.load(CONFIG, tmp_path)


def test_a_validation_split_is_not_read(tmp_path):
    config = write(tmp_path / "data", [0, 100, 255], [0, 1, 2])
    (tmp_path / "data" / "val.parquet").write_text("no parquet")
    data = datasets.load(config, tmp_path / "cache")
    assert (len(data.train), len(data.test)) == (3, 3)


class FakeHub:
    """Stands for flwr_datasets.FederatedDataset where there is no network."""

    subset = "not asked for"

    def __init__(self, dataset, subset, partitioners):
        self.dataset = dataset
        FakeHub.subset = subset

    def load_split(self, split):
        if self.dataset == "missing/set":
            raise ConnectionError("no network")
        from datasets import Dataset, Features, Image, Value

        rows = {"image": [picture(7), picture(8)], "label": [1, 2]}
        return Dataset.from_dict(
            rows, features=Features({"image": Image(), "label": Value("int64")})
        )


def test_a_hub_name_goes_the_same_way_as_a_folder(tmp_path, monkeypatch):
    import flwr_datasets

    monkeypatch.setattr(flwr_datasets, "FederatedDataset", FakeHub)
    monkeypatch.setattr(partition, "_is_online", lambda: True)
    data = datasets.load(replace(CONFIG, hub="some/set"), tmp_path)
    assert data.train.images[:, 0, 0, 0].tolist() == [7, 8]
    assert data.train.labels.tolist() == [1, 2]
    assert FakeHub.subset is None
    datasets.load(replace(CONFIG, hub="some/set/cropped"), tmp_path)
    assert FakeHub.subset == "cropped"


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (["shirt", "coat", "bag"], ("shirt", "coat", "bag")),
        (["0", "1", "2"], ("0", "1", "2")),
        (["shirt", "coat", "bag", "boot"], ("0", "1", "2")),  # of another number of classes
        (None, ("0", "1", "2")),
    ],
)
def test_classes_have_the_names_that_a_data_set_of_the_hub_declares(
    tmp_path, monkeypatch, declared, expected
):
    import flwr_datasets
    from datasets import ClassLabel, Dataset, Features, Image, Value

    label = ClassLabel(names=declared) if declared else Value("int64")

    class Declaring(FakeHub):
        def load_split(self, split):
            rows = {"image": [picture(7), picture(8)], "label": [1, 2]}
            return Dataset.from_dict(rows, features=Features({"image": Image(), "label": label}))

    monkeypatch.setattr(flwr_datasets, "FederatedDataset", Declaring)
    monkeypatch.setattr(partition, "_is_online", lambda: True)
    config = replace(CONFIG, hub="some/set")
    assert datasets.class_names(config, tmp_path) == ("0", "1", "2")  # before it is loaded
    datasets.load(config, tmp_path)
    assert datasets.class_names(config, tmp_path) == expected
    own = replace(config, classes=("a", "b", "c"))
    assert datasets.class_names(own, tmp_path) == ("a", "b", "c")


@pytest.mark.parametrize("online", [False, True])
def test_what_cannot_be_downloaded_is_one_line(tmp_path, monkeypatch, online):
    """Without a network the libraries are told so, since they would try for half a minute."""
    import datasets as library
    import flwr_datasets

    offline = []

    class Failing(FakeHub):
        def load_split(self, split):
            offline.append(library.config.HF_HUB_OFFLINE)
            return super().load_split(split)

    monkeypatch.setattr(flwr_datasets, "FederatedDataset", Failing)
    monkeypatch.setattr(partition, "_is_online", lambda: online)
    with pytest.raises(UserError) as raised:
        datasets.load(replace(CONFIG, hub="missing/set"), tmp_path)
    connect = "" if online else "connect this machine, or "
    assert str(raised.value) == (
        "data=folder: split train of missing/set cannot be downloaded from huggingface.co; "
        f"{connect}set data.path to a folder with train.parquet and test.parquet"
    )
    assert offline == [not online]


def test_a_machine_is_online_by_the_hub_or_a_proxy(monkeypatch):
    def refused(*_, **__):
        raise OSError

    monkeypatch.setattr(partition.socket, "create_connection", refused)
    monkeypatch.setattr(partition, "getproxies", lambda: {})
    assert not partition._is_online()
    monkeypatch.setattr(partition, "getproxies", lambda: {"https": "http://proxy:3128"})
    assert partition._is_online()


def test_only_one_file_imports_the_partitioning_library():
    package = Path(partition.__file__).parents[1]
    users = [p.name for p in package.rglob("*.py") if "import flwr_datasets" in p.read_text()]
    users += [p.name for p in package.rglob("*.py") if "from flwr_datasets" in p.read_text()]
    assert set(users) == {"partition.py"}
