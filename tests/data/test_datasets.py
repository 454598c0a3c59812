"""The loader: digits, the hub, the cache, and the data sets of conf/data."""

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fed_dpsd.config import DataConfig
from fed_dpsd.config.compose import compose
from fed_dpsd.data import datasets, partition
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.experiment import load_data, set_up
from fed_dpsd.storage import conf_folder
from tests.data.files import (
    everything,
    loaded,
    number_of,
    parquet,
    picture,
    png,
    shades,
    table,
)

CONFIG = DataConfig("folder", None, None, "image", "label", None, (1, 8, 8), 3)


def test_digits_are_embedded_with_a_fixed_split(tmp_path):
    config = DataConfig("digits", None, None, "image", "label", None, (1, 8, 8), 10)
    data = datasets.load(config, tmp_path)
    assert (len(data.train), len(data.test)) == (1_437, 360)
    assert data.train.images.shape == (1_437, 1, 8, 8)
    assert data.train.images.dtype == np.uint8
    assert data.train.images.max() == 255
    assert set(data.test.labels) == set(range(10))
    assert data.counts == ("1,797 images found, 1,797 used",)
    assert (datasets.load_test(config, tmp_path).images == data.test.images).all()


def test_parquet_files_are_read_before_folders_and_decoded_once(tmp_path, monkeypatch):
    shades(tmp_path / "train", cat=[1])
    pictures = [png(shade) for shade in (0, 100, 255)]
    config = replace(CONFIG, path=str(parquet(tmp_path, pictures, label=[0, 1, 2])))
    (tmp_path / "val.parquet").write_text("no parquet")
    coloured = replace(config, shape=(3, 8, 8))
    assert datasets.load(coloured, tmp_path / "cache").train.images.shape == (3, 3, 8, 8)
    data = datasets.load(config, tmp_path / "cache")
    assert data.train.images[:, 0, 0, 0].tolist() == [0, 100, 255]
    assert data.test.labels.tolist() == [0, 1, 2]
    monkeypatch.setattr(datasets, "_read", None)  # a second load needs no decoding
    assert datasets.load(config, tmp_path / "cache").train.labels.tolist() == [0, 1, 2]


def test_data_that_is_not_as_configured_is_an_error(tmp_path):
    path = parquet(tmp_path / "data", [png(shade) for shade in range(3)], label=[0, 1, 2])
    parquet(tmp_path / "none", [], label=[])
    (tmp_path / "empty").mkdir()
    cases = [
        (
            {"image_column": "img"},
            "no column img (data.image_column); its columns are image, label",
        ),
        ({"label_column": "y"}, "no column y (data.label_column)"),
        ({"num_classes": 2}, "name no class: 2 (row 3); the classes are 0, 1; correct the"),
        ({"shape": (1, 12, 12)}, "row 1 has shape [1, 8, 8], but data.shape=[1, 12, 12]"),
        ({"path": str(tmp_path / "none")}, "there is no image; give images with labels"),
        ({"path": str(tmp_path / "empty")}, "has no class folder; it holds nothing: give a"),
        ({"path": None}, "data=folder needs data.path=PATH: a folder with"),
    ]
    for change, expected in cases:
        with pytest.raises(UserError, match=re.escape(expected)):
            datasets.load(replace(CONFIG, **{"path": str(path)} | change), tmp_path / "cache")
        assert not list((tmp_path / "cache").rglob("*.npy"))


# --- the hub ---


@pytest.fixture
def hub(monkeypatch):
    """A function that puts rows of labels, whose classes may be declared, at a fake hub."""
    import datasets as library
    import flwr_datasets

    asked = []

    def set_to(labels, declared=None, online=True):
        class Hub:
            def __init__(self, dataset, subset, partitioners):
                asked.append((dataset, subset, library.config.HF_HUB_OFFLINE))

            def load_split(self, split):
                if labels is None:
                    raise ConnectionError("no network")
                rows = {"image": [{"bytes": png(10 + n), "path": None} for n in labels]}
                kind = library.ClassLabel(names=declared) if declared else library.Value("int64")
                features = library.Features({"image": library.Image(), "label": kind})
                return library.Dataset.from_dict(rows | {"label": labels}, features=features)

        monkeypatch.setattr(flwr_datasets, "FederatedDataset", Hub)
        monkeypatch.setattr(partition, "_is_online", lambda: online)
        return replace(CONFIG, hub="some/set")

    set_to.asked = asked
    return set_to


def test_a_hub_name_is_read_like_a_folder(tmp_path, hub):
    config = hub([1, 2])
    data = datasets.load(config, tmp_path)
    assert number_of(data.train) == {11: 1, 12: 2}
    datasets.load(replace(config, hub="some/set/cropped"), tmp_path)
    assert [each[:2] for each in hub.asked] == [("some/set", None)] * 2 + [
        ("some/set", "cropped")
    ] * 2


def test_a_hubs_classes_are_places_until_they_are_named(tmp_path, hub, said):
    """The numbers in the table index the names that it declares, and no other list."""
    config = hub([0, 1, 2], ["shirt", "coat", "bag"])
    assert datasets.load(config, tmp_path).train.labels.tolist() == [0, 1, 2]
    assert "names its classes; data.classes=[shirt,coat,bag] uses these names" in said()[0]
    named = replace(config, classes=("bag", "shirt", "coat"))
    assert datasets.load(named, tmp_path).train.labels.tolist() == [1, 2, 0]
    with pytest.raises(UserError, match=r"no class: shirt \(row 1\); the classes are a, coat, bag"):
        datasets.load(replace(config, classes=("a", "coat", "bag")), tmp_path)
    with pytest.raises(UserError, match=r"no class: bag \(row 3\), coat \(row 2\), shirt"):
        datasets.load(replace(config, num_classes=4), tmp_path)


def test_what_cannot_be_downloaded_is_one_line(tmp_path, hub):
    """Without a network the libraries are set offline; they would retry for half a minute."""
    for online, connect in ((False, "connect this machine to the network, or "), (True, "")):
        config = hub(None, online=online)
        with pytest.raises(UserError) as raised:
            datasets.load(config, tmp_path)
        assert str(raised.value) == (
            "data=folder: split train of some/set cannot be downloaded from huggingface.co; "
            f"{connect}set data.path to a folder with train.parquet and test.parquet"
        )
    assert [offline for _, _, offline in hub.asked] == [True, False]


def test_a_machine_is_online_by_the_hub_or_a_proxy(monkeypatch):
    def refused(*_, **__):
        raise OSError

    monkeypatch.setattr(partition.socket, "create_connection", refused)
    monkeypatch.setattr(partition, "getproxies", lambda: {})
    assert not partition._is_online()
    monkeypatch.setattr(partition, "getproxies", lambda: {"https": "http://proxy:3128"})
    assert partition._is_online()


# --- the cache ---


def test_a_folder_is_decoded_again_only_when_its_files_change(tmp_path, monkeypatch):
    """A file with another content, and its old size and time, is another file."""
    read, decoded = datasets._read, []
    monkeypatch.setattr(datasets, "_read", lambda *given: decoded.append(1) or read(*given))
    changed = tmp_path / "D" / "well" / "0.bmp"
    picture(tmp_path / "D" / "ill" / "0.bmp", 1)
    picture(changed, 2)
    for _ in range(2):
        assert everything(loaded(tmp_path, tmp_path / "D")) == {1: 0, 2: 1}
    number = len(decoded)
    before = changed.stat()
    picture(changed, 7)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert changed.stat().st_size == before.st_size
    assert changed.stat().st_mtime_ns == before.st_mtime_ns
    assert everything(loaded(tmp_path, tmp_path / "D")) == {1: 0, 7: 1}
    assert len(decoded) > number


def test_other_code_decodes_a_folder_again(tmp_path, monkeypatch):
    """Images that an earlier version decoded otherwise would be used for ever."""
    picture(tmp_path / "D" / "ill" / "0.bmp", 1)
    picture(tmp_path / "D" / "well" / "0.bmp", 2)
    loaded(tmp_path, tmp_path / "D")
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "_read", None)
        loaded(tmp_path, tmp_path / "D")  # the control
    monkeypatch.setattr(datasets, "_code_digest", lambda: "another version")
    monkeypatch.setattr(datasets, "_read", lambda *_: pytest.fail("decoded"))
    with pytest.raises(pytest.fail.Exception, match="decoded"):
        loaded(tmp_path, tmp_path / "D")


def test_images_are_mapped_from_the_cache_at_once_and_take_no_memory(tmp_path):
    for number in range(8):
        picture(tmp_path / "D" / ("ill", "well")[number % 2] / f"{number}.bmp", number)
    for _ in range(2):
        data = loaded(tmp_path, tmp_path / "D")
        assert isinstance(data.train.images, np.memmap)
        assert isinstance(data.test.images, np.memmap)
        assert everything(data) == {number: number % 2 for number in range(8)}


def test_a_failure_that_may_pass_is_not_cached(tmp_path, monkeypatch):
    """Otherwise the failure would stay cached after permissions are fixed."""
    path = table(tmp_path / "t.csv", [f"{i}.png,{('ill', 'well')[i % 2]}" for i in range(20)])
    read_bytes = Path.read_bytes

    def denied(path):
        if path.name == "3.png":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert len(everything(loaded(tmp_path, path))) == 19
    assert not (tmp_path / "cache").exists()
    monkeypatch.undo()
    assert len(everything(loaded(tmp_path, path))) == 20
    (tmp_path / "5.png").unlink()
    assert len(everything(loaded(tmp_path, path))) == 19
    picture(tmp_path / "5.png", 200)  # a file that appears is seen, though its absence was cached
    assert 200 in everything(loaded(tmp_path, path))


def test_a_part_of_the_cache_that_is_lost_or_damaged_is_made_again(tmp_path):
    """Without the file of patients, records had none, so a patient was in several shards."""
    rows = [f"{i}.png,{'ill' if i % 2 else 'well'},{i // 2}" for i in range(20)]
    path = table(tmp_path / "t.csv", rows, "image,label,patient")
    before = loaded(tmp_path, path, "data.patient_column=patient").train
    for part in ("about.json", "images.npy", "patients.npy", "labels.npy"):
        for whole in (True, False):
            for file in (tmp_path / "cache" / "data").glob(f"*.{part}"):
                content = file.read_bytes()
                file.unlink()
                if not whole:
                    file.write_bytes(content[: len(content) // 2])
            after = loaded(tmp_path, path, "data.patient_column=patient").train
            assert np.array_equal(after.patients, before.patients), (part, whole)
            assert np.array_equal(after.images, before.images), (part, whole)


# --- the data sets of conf/data ---

HAIR, GENDER = ("Black_Hair", "Blond_Hair", "Brown_Hair", "Gray_Hair"), "Male"
FACES = {**{name: np.arange(12) % 4 == i for i, name in enumerate(HAIR)}, "celeb_id": range(12)}
FACES[GENDER] = np.arange(12) % 3 == 0
# The hub's columns, and the sizes of pictures that the data set has.
OWN_FORMATS = {
    "mnist": ("image", {"label": range(10)}, ("L", (28, 28))),
    "fashion_mnist": ("image", {"label": range(10)}, ("L", (28, 28))),
    "cifar10": ("img", {"label": range(10)}, ("RGB", (32, 32))),
    "cifar100": (
        "img",
        {"fine_label": range(88, 100), "coarse_label": range(12)},
        ("RGB", (32, 32)),
    ),
    "svhn": ("image", {"label": range(10)}, ("RGB", (32, 32))),
    "medmnist": ("image", {"label": [0, 1]}, ("L", (28, 28))),
    "pathmnist": ("image", {"label": range(9)}, ("RGB", (28, 28))),
    "celeba_hair": ("image", FACES, ("RGB", (178, 218))),
    "celeba_gender": ("image", FACES, ("RGB", (178, 218))),
    "covidx": ("image", {"label": range(3)}, ("RGB", (120, 100))),
    "imagenet": ("image", {"label": range(988, 1000)}, ("RGB", (500, 375))),
}
LABELS = {
    "celeba_hair": [0, 1, 2] * 3,
    "celeba_gender": [1, 0, 0] * 4,
    "cifar100": list(range(88, 100)),
}


def test_every_data_set_has_a_format_here():
    own = {"digits", "folder", "imagefolder"}
    assert set(OWN_FORMATS) == {path.stem for path in conf_folder().glob("data/*.yaml")} - own


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_each_data_set_is_read_from_its_parquet_files_and_from_folders(tmp_path, name):
    """Folders of no more than ten classes; the k of the paper is one of the data set."""
    image, columns, (mode, size) = OWN_FORMATS[name]
    count = len(next(iter(columns.values())))
    path = parquet(tmp_path / "hub", [png(0, size, mode)] * count, image=image, **columns)
    config = set_up(compose([f"data={name}", f"data.path={path}"]), tmp_path).config
    train = load_data(config.data, config.cache).train
    labels = LABELS.get(name, list(next(iter(columns.values()))))
    assert train.labels.tolist() == labels
    assert train.images.shape == (len(labels), *config.data.shape)

    overrides = [f"data={name}", f"data.path={tmp_path}/folders"]
    classes = compose(overrides)["data"]["num_classes"]
    if classes > 10:
        classes, overrides = 10, [*overrides, "data.num_classes=10"]
    for split in ("train", "test"):
        for label in range(classes):
            path = tmp_path / "folders" / split / f"n{label:04}" / "a.jpeg"
            path.parent.mkdir(parents=True)
            Image.new(mode, size).save(path, "JPEG")
    config = set_up(compose(overrides), tmp_path).config
    test = load_data(config.data, config.cache).test
    assert test.labels.tolist() == list(range(classes))
    assert test.images.shape == (classes, *config.data.shape)

    text = (conf_folder() / "data" / f"{name}.yaml").read_text()
    if k := re.search(r"k of the paper: (\d+)", text):
        chosen = [f"data={name}", "training=plain", "answers=label", f"answers.k={k.group(1)}"]
        assert set_up(compose(chosen), tmp_path).answers.k == int(k.group(1))


def test_labels_come_from_one_place(tmp_path):
    cases = [
        ("data.label_column=label", "label_columns=.*: give one of the two"),
        ("data.label_columns=[]", "label_column=null and label_columns=.*: give one of the two"),
        ("data.num_classes=2", "label_columns=.* has 3 classes, but num_classes=2"),
    ]
    for override, expected in cases:
        with pytest.raises(ConfigError, match=expected):
            set_up(compose(["data=celeba_hair", override]), tmp_path)
