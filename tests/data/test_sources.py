"""Parquet files and folders of classes: every data set's own format, and what is wrong with one."""

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fed_dpsd.config import DataConfig
from fed_dpsd.config.compose import compose
from fed_dpsd.data import datasets
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.experiment import load_data, set_up
from fed_dpsd.storage import conf_folder
from tests.server.test_run import complete

ROOT = Path(__file__).parents[2]
CONFIG = DataConfig("folder", None, None, "image", "label", None, (1, 8, 8), 2)
SHADES = {"dog": [10, 20], "cat": [30], "dog/more": [40]}


def png(shade, size=(8, 8), mode="L"):
    buffer = io.BytesIO()
    Image.new(mode, size, shade).save(buffer, "PNG")
    return buffer.getvalue()


def folders(root, shades=SHADES, size=(8, 8), splits=("train", "test")):
    """Folders of classes, with a picture of one shade a file; returns their configuration."""
    for split in splits:
        for name, values in shades.items():
            for index, shade in enumerate(values):
                path = root / split / name / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(png(shade, size))
    return replace(CONFIG, path=str(root), num_classes=len(_named(shades)), classes=_named(shades))


def _named(shades):
    return tuple(sorted({name.partition("/")[0] for name in shades}))


def table(root, pictures, **columns):
    """Parquet files in the layout of the hub; returns their configuration."""
    root.mkdir(exist_ok=True)
    images = [None if each is None else {"bytes": each, "path": None} for each in pictures]
    for split in ("train", "test"):
        rows = pyarrow.table({"image": images, **columns})
        pyarrow.parquet.write_table(rows, root / f"{split}.parquet")
    return replace(CONFIG, path=str(root))


# --- folders of classes ---


@pytest.mark.parametrize("channels", [1, 3])
def test_folders_of_classes_are_numbered_in_the_order_of_their_names(tmp_path, channels):
    config = replace(folders(tmp_path / "data"), shape=(channels, 8, 8))
    (tmp_path / "data" / "train" / "cat" / ".hidden").write_text("no picture")
    train = datasets.load(config, tmp_path / "cache").train
    assert train.images.shape == (4, channels, 8, 8)
    shades = train.images[:, -1, 0, 0].tolist()
    assert sorted(shades) == [10, 20, 30, 40]
    assert train.labels.tolist() == [int(shade != 30) for shade in shades]
    assert train.patients is None


def test_parquet_files_come_before_folders(tmp_path):
    folders(tmp_path)
    config = table(tmp_path, [png(7)], label=[1])
    assert datasets.load(config, tmp_path / "cache").train.images[:, 0, 0, 0].tolist() == [7]


def test_a_folder_is_decoded_anew_only_when_its_files_change(tmp_path, monkeypatch):
    config, read, decoded = folders(tmp_path / "data"), datasets._read, []
    monkeypatch.setattr(datasets, "_read", lambda *given: decoded.append(1) or read(*given))
    for _ in range(2):
        datasets.load_test(config, tmp_path / "cache")
    assert len(decoded) == 1
    (tmp_path / "data" / "test" / "cat" / "0.png").write_bytes(png(31, (8, 8), "RGBA"))
    assert datasets.load_test(config, tmp_path / "cache").images[0, 0, 0, 0] != 30
    assert len(decoded) == 2


def test_a_test_folder_needs_no_training_folder(tmp_path):
    config = folders(tmp_path / "data", splits=["test"])
    assert len(datasets.load_test(config, tmp_path / "cache")) == 4
    with pytest.raises(UserError, match=r"has no train split; it holds test: give a folder"):
        datasets.load(config, tmp_path / "cache")


def broken(path):
    path.write_bytes(png(1)[:40])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda root: [broken(path) for path in root.rglob("*.png")],
            r"no record can be read: 4 files found, 0 used, 4 skipped: 4 unreadable \(cat/0.png: ",
        ),
        (lambda root: (root / "cat" / "a").symlink_to(root), "is a link to a folder that it lies"),
        (
            lambda root: (root / "cat" / "0.png").write_bytes(png(1, (9, 8))),
            r"cat/0.png has shape \[1, 8, 9\], but data.shape=\[1, 8, 8\]; .* data.resize=true",
        ),
        (
            lambda root: (root / "cat").rename(root / "cow"),
            r"labels that name no class: cow \(cow/0.png\); the classes are cat, dog; correct the",
        ),
    ],
)
def test_a_folder_that_is_not_as_configured_is_an_error(tmp_path, change, expected):
    config = folders(tmp_path / "data")
    change(tmp_path / "data" / "train")
    with pytest.raises(UserError, match=expected):
        datasets.load(config, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_a_folder_of_classes_may_be_named_as_a_split(tmp_path):
    """The folder beside it is none of its splits, whatever it holds. The control is above."""
    config = folders(tmp_path / "data", {"cat": [0, 10], "dog": [200, 250]})
    (tmp_path / "data" / "test" / "cat").rename(tmp_path / "data" / "test" / "cow")
    whole = replace(config, path=str(tmp_path / "data" / "train"))
    loaded = datasets.load(whole, tmp_path / "cache")
    assert len(loaded.train) + len(loaded.test) == 4
    with pytest.raises(UserError, match="labels that name no class: cow"):
        datasets.load(config, tmp_path / "cache")


def test_folders_without_images_or_with_patients_are_errors(tmp_path):
    config = folders(tmp_path / "data", {"cat": [], "dog": []})
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "data" / split / name).mkdir(parents=True)
    with pytest.raises(UserError, match="there is no image; give images with labels"):
        datasets.load(config, tmp_path / "cache")
    with pytest.raises(UserError, match="patient_column=p: folders of classes name no patients"):
        datasets.load(replace(config, patient_column="p"), tmp_path / "cache")


# --- sizes ---


@pytest.mark.parametrize("form", ["table", "folders"])
def test_the_middle_square_is_scaled_with_antialiasing(tmp_path, form):
    """Thin stripes in the middle become grey; what is left and right of them is cut off.

    A scaling that looks at single pixels, or at neighbours only, would find no stripe.
    """
    pixels = np.full((32, 64), 255, np.uint8)
    pixels[:, 16:48] = (np.arange(32) % 4 == 0) * 200
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    if form == "table":
        config = table(tmp_path / "data", [buffer.getvalue()] * 2, label=[0, 1])
    else:
        config = folders(tmp_path / "data")
        for path in (tmp_path / "data").rglob("*.png"):
            path.write_bytes(buffer.getvalue())
    with pytest.raises(UserError, match=r"has shape \[1, 32, 64\], .* data.resize=true to scale"):
        datasets.load(config, tmp_path / "cache")
    images = datasets.load(replace(config, resize=True), tmp_path / "cache").test.images
    assert images.shape[1:] == (1, 8, 8)
    assert np.abs(images[..., 1:-1].astype(int) - 200 / 4).max() <= 1
    assert images.max() < 100


# --- tables ---


def test_the_one_column_that_is_true_is_the_label(tmp_path):
    """Records with none or several true are left out, with their patients."""
    config = table(
        tmp_path / "data",
        [png(shade) for shade in range(6)],
        black=[True, False, False, True, False, None],
        brown=[False, True, False, True, True, None],
        patient=["a", "b", "c", "d", "b", "f"],
    )
    config = replace(config, label_column=None, label_columns=("black", "brown"))
    config = replace(config, shared_patients="allow")  # the table is of both splits
    train = datasets.load(replace(config, patient_column="patient"), tmp_path / "cache").train
    assert train.images[:, 0, 0, 0].tolist() == [0, 1, 4]
    assert train.labels.tolist() == [0, 1, 1]
    assert train.patients[1] == train.patients[2] != train.patients[0]
    with pytest.raises(UserError, match=r"no column red \(data.label_columns\[1\]\); its"):
        datasets.load(replace(config, label_columns=("black", "red")), tmp_path / "cache")


def test_a_column_of_truth_values_is_a_label(tmp_path):
    config = table(tmp_path / "data", [png(1), png(2)], label=[True, False])
    assert datasets.load(config, tmp_path / "cache").train.labels.tolist() == [1, 0]


def test_a_class_without_a_picture_in_a_table_is_a_warning(tmp_path, caplog):
    config = table(tmp_path / "data", [png(1), None], label=[0, 1])
    assert datasets.load(config, tmp_path / "cache").train.labels.tolist() == [0]
    assert "2 rows found, 1 used, 1 skipped: 1 unreadable (row 2: it is none" in caplog.text
    assert "no image for training of class 1" in caplog.text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.label_column=label", "label_columns=.*: give one of the two"),
        ("data.label_columns=[]", "label_column=null and label_columns=.*: give one of the two"),
        ("data.num_classes=2", "label_columns=.* has 3 classes, but num_classes=2"),
    ],
)
def test_labels_come_from_one_place(tmp_path, override, expected):
    with pytest.raises(ConfigError, match=expected):
        set_up(compose(["data=celeba_hair", override]), tmp_path)


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


def names():
    own = {"digits", "folder", "imagefolder"}
    return {path.stem for path in conf_folder().glob("data/*.yaml")} - own


def test_every_data_set_has_a_format_here():
    assert set(OWN_FORMATS) == names()


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_each_data_set_is_read_from_parquet_files_of_its_hub(tmp_path, name):
    image, columns, (mode, size) = OWN_FORMATS[name]
    count = len(next(iter(columns.values())))
    pictures = [{"bytes": png(0, size, mode), "path": None}] * count
    rows = pyarrow.table({image: pictures, **{key: list(own) for key, own in columns.items()}})
    for split in ("train", "test"):
        pyarrow.parquet.write_table(rows, tmp_path / f"{split}.parquet")
    config = set_up(compose([f"data={name}", f"data.path={tmp_path}"]), tmp_path).config
    train = load_data(config.data, config.cache).train
    expected = {
        "celeba_hair": [0, 1, 2] * 3,
        "celeba_gender": [1, 0, 0] * 4,
        "cifar100": list(range(88, 100)),
    }
    labels = expected.get(name, list(next(iter(columns.values()))))
    assert train.labels.tolist() == labels
    assert train.images.shape == (len(labels), *config.data.shape)


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_each_data_set_is_read_from_folders_of_classes(tmp_path, name):
    """Of no more than ten classes; a downloaded CelebA is sorted into such folders by hand."""
    _, _, (mode, size) = OWN_FORMATS[name]
    overrides = [f"data={name}", f"data.path={tmp_path}"]
    classes = compose(overrides)["data"]["num_classes"]
    if classes > 10:
        classes, overrides = 10, [*overrides, "data.num_classes=10"]
    for split in ("train", "test"):
        for label in range(classes):
            path = tmp_path / split / f"n{label:04}" / "a.jpeg"
            path.parent.mkdir(parents=True)
            Image.new(mode, size).save(path, "JPEG")
    config = set_up(compose(overrides), tmp_path).config
    test = load_data(config.data, config.cache).test
    assert test.labels.tolist() == list(range(classes))
    assert test.images.shape == (classes, *config.data.shape)


@pytest.mark.parametrize(("name", "tested"), [("celeba_hair", 9), ("covidx", 12)])
def test_a_run_on_tiny_files_completes(small, tmp_path, name, tested):
    """Attributes in parquet files, and X-rays in folders of classes."""
    if name == "celeba_hair":
        pictures = [png((60 * (i % 4), 0, 0), (178, 218), "RGB") for i in range(12)]
        table(tmp_path / "data", pictures, **{key: list(own) for key, own in FACES.items()})
    else:
        shades = {"COVID-19": [10] * 4, "normal": [99] * 4, "pneumonia": [200] * 4}
        folders(tmp_path / "data", shades, (120, 100))
    experiment = small(
        *(f"data={name}", f"data.path={tmp_path}/data", "partition=iid", "rounds=1"),
        *("queries_per_round=8", "method.batch_size=8", "answers.k=3"),
    )
    _, summary, _ = complete(experiment)
    assert summary["status"] == "completed"
    assert summary["accuracy"]["evaluated_on"].startswith(f"{tested} test images of {name}")


# --- the papers' k ---


def test_the_table_of_data_sets_is_that_of_conf():
    """Hub, shape, classes, and the k of the paper, which a comment of the YAML file has too."""
    page = (ROOT / "docs" / "extending.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| (?:`([\w/-]+)`|own files) \| (\S+) \| ([\d,]+) \| (\d+|none) \|$",
        page,
        re.M,
    )
    expected = []
    for name in sorted(names()):
        config = compose([f"data={name}"])["data"]
        text = (conf_folder() / "data" / f"{name}.yaml").read_text()
        k = re.search(r"^# k of the paper: (\d+) \(answers\.k\)\.$", text, re.MULTILINE)
        shape = "x".join(str(size) for size in config["shape"])
        classes = f"{config['num_classes']:,}"
        expected.append((name, config["hub"] or "", shape, classes, k.group(1) if k else "none"))
    assert sorted(rows) == expected


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_the_k_of_the_paper_is_a_k_of_the_data_set(tmp_path, name):
    text = (conf_folder() / "data" / f"{name}.yaml").read_text()
    if k := re.search(r"k of the paper: (\d+)", text):
        chosen = [f"data={name}", "training=plain", "answers=label", f"answers.k={k.group(1)}"]
        assert set_up(compose(chosen), tmp_path).answers.k == int(k.group(1))
