"""The loader: digits, parquet folders, hub names, and what is wrong with a folder."""

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
    monkeypatch.setattr(datasets, "_read", None)  # a second load needs no decoding
    assert datasets.load(config, tmp_path / "cache").train.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"image_column": "img"},
            r"no column img \(data.image_column\); its columns are image, label",
        ),
        ({"label_column": "y"}, r"no column y \(data.label_column\)"),
        (
            {"num_classes": 2},
            r"labels that name no class: 2 \(row 3\); the classes are 0, 1; correct",
        ),
        ({"shape": (1, 12, 12)}, r"row 1 has shape \[1, 8, 8\], but data.shape=\[1, 12, 12\]"),
    ],
)
def test_data_that_is_not_as_configured_is_an_error(tmp_path, change, expected):
    config = replace(write(tmp_path / "data", [0, 1, 2], [0, 1, 2]), **change)
    with pytest.raises(UserError, match=expected):
        datasets.load(config, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_an_empty_table_is_an_error(tmp_path):
    config = write(tmp_path / "data", [0], [0])
    empty = pyarrow.parquet.read_table(tmp_path / "data" / "train.parquet").slice(0, 0)
    pyarrow.parquet.write_table(empty, tmp_path / "data" / "train.parquet")
    with pytest.raises(UserError, match="there is no image; give images with labels"):
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


def declaring(monkeypatch, declared, labels):
    """A data set of the hub that declares its classes."""
    import flwr_datasets
    from datasets import ClassLabel, Dataset, Features, Image

    class Declaring(FakeHub):
        def load_split(self, split):
            rows = {"image": [picture(10 + label) for label in labels], "label": labels}
            features = Features({"image": Image(), "label": ClassLabel(names=declared)})
            return Dataset.from_dict(rows, features=features)

    monkeypatch.setattr(flwr_datasets, "FederatedDataset", Declaring)
    monkeypatch.setattr(partition, "_is_online", lambda: True)
    return replace(CONFIG, hub="some/set")


def test_a_hubs_classes_are_places_until_they_are_named(tmp_path, monkeypatch, caplog):
    config = declaring(monkeypatch, ["shirt", "coat", "bag"], [1, 2])
    assert datasets.load(config, tmp_path).train.labels.tolist() == [1, 2]
    assert "names its classes; data.classes=[shirt,coat,bag] uses these names" in caplog.text
    named = replace(config, classes=("shirt", "coat", "bag"))
    assert datasets.load(named, tmp_path).train.labels.tolist() == [1, 2]


def test_a_hubs_classes_keep_their_names_in_another_order(tmp_path, monkeypatch):
    """The numbers in the table are those of the names that it declares, and of no other list."""
    config = declaring(monkeypatch, ["shirt", "coat", "bag"], [0, 1, 2])
    apply_polarity = replace(config, classes=("bag", "shirt", "coat"))
    assert datasets.load(apply_polarity, tmp_path).train.labels.tolist() == [1, 2, 0]
    with pytest.raises(UserError, match=r"no class: shirt \(row 1\); the classes are a, coat, bag"):
        datasets.load(replace(config, classes=("a", "coat", "bag")), tmp_path)
    with pytest.raises(UserError, match=r"no class: bag \(row 3\), coat \(row 2\), shirt"):
        datasets.load(replace(config, num_classes=4), tmp_path)


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
