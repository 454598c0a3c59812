"""`fed-dpsd export`, `predict` and `synthesize`: from a run to classes of images, and to images."""

import csv
import json
import sys

import numpy as np
import pytest
from PIL import Image

from fed_dpsd.experiment import test_split as held_out
from fed_dpsd.server.run_folder import open_run_folder
from tests.conftest import SMALL
from tests.data.files import dicom
from tests.shapes import CLASSES, write_shapes


@pytest.fixture
def model(model_of, run_of):
    """An exported student's path, next to the folder of its run."""
    run_of("rounds=1")
    return model_of()


def test_images_of_any_size_get_a_class_and_its_probability(fed_dpsd, tmp_path, model):
    rng = np.random.default_rng(0)
    for name, shape in (("grey.png", (8, 8)), ("large.jpg", (40, 60, 3))):
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(tmp_path / name)
    code, printed, err = fed_dpsd("predict", model, "grey.png", "large.jpg", "--all")
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(printed))
    assert [row["file"] for row in rows] == ["grey.png", "large.jpg"]
    for row in rows:
        scores = [float(row[str(label)]) for label in range(10)]
        assert sum(scores) == pytest.approx(1, abs=1e-3)
        assert int(row["class"]) == int(np.argmax(scores))
        assert float(row["probability"]) == max(scores)
    code, short, err = fed_dpsd("predict", model, "grey.png", "large.jpg", "--about")
    assert code == 0
    assert short == [",".join(line.split(",")[:3]) for line in printed]
    assert "proven" in err  # the run's result, with what it cost
    assert "# Privacy card" in err
    assert "| record | add_remove |" in err


def test_a_terminal_shows_the_first_images_and_a_file_has_them_all(
    fed_dpsd, tmp_path, model, monkeypatch
):
    (tmp_path / "new").mkdir()
    for number in range(25):
        Image.new("L", (8, 8), 10 * number).save(tmp_path / "new" / f"[{number:02}].png")
    _, piped, _ = fed_dpsd("predict", model, "new")
    code, printed, err = fed_dpsd("predict", model, "new", "--out", "sub/all.csv")
    assert (code, err) == (0, "")
    assert printed == [str(tmp_path / "sub" / "all.csv")]
    assert (tmp_path / "sub" / "all.csv").read_text().splitlines() == piped
    code, _, err = fed_dpsd("predict", model, "new", "--out", "sub/all.csv")
    assert (code, "sub/all.csv already exists" in err) == (1, True)

    monkeypatch.setenv("TERM", "dumb")  # no bold letters
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, shown, _ = fed_dpsd("predict", model, "new")
    assert code == 0
    assert shown[0].split() == ["file", "class", "probability"]
    assert [line.split() for line in shown[1:21]] == [line.split(",") for line in piped[1:21]]
    assert shown[21] == "and 5 more; --out FILE.csv writes all"
    assert shown[22].startswith("25 images: ")
    classes = [row["class"] for row in csv.DictReader(piped)]
    assert f"{classes[0]} ({classes.count(classes[0])})" in shown[22]
    _, shown, _ = fed_dpsd("predict", model, "new", "--all")
    assert shown[0].startswith("file,class,probability,0,1,")
    assert len(shown) == 26
    code, shown, _ = fed_dpsd("predict", model, "lost.png")
    assert (code, shown) == (1, ["no image can be read"])


def test_bad_images_are_named_and_the_good_ones_predicted(fed_dpsd, tmp_path, model):
    folder = write_shapes(tmp_path / "new", 9, broken=2)
    (folder / ".hidden").write_text("no image")
    (folder / "notes.txt").write_text("no image")
    code, printed, err = fed_dpsd("predict", model, "lost.png", "new")
    assert code == 1
    assert [row["file"] for row in csv.DictReader(printed)] == [
        str(path.relative_to(tmp_path))
        for path in sorted(folder.rglob("*.*g"))
        if "000" not in path.name and "001" not in path.name
    ]
    lines = err.splitlines()
    assert len(lines) == 4
    assert lines[0] == "lost.png is skipped: No such file or directory"
    assert "new/notes.txt is skipped: it is not a PNG, " in err


def test_deep_images_are_predicted_with_the_runs_bits(fed_dpsd, tmp_path):
    write_shapes(tmp_path / "pictures", 30)
    settings = *SMALL, "rounds=1", "data=imagefolder", "data.path=pictures", "data.pixel_bits=12"
    _, printed, _ = fed_dpsd("run", *settings, "num_clients=1")
    _, (student, *_), _ = fed_dpsd("export", printed[-1])
    for name, value, kind in (("12.png", 4_000, np.uint16), ("8.png", 250, np.uint8)):
        Image.fromarray(np.full((8, 8), value, kind)).save(tmp_path / name)
    Image.fromarray(np.full((8, 8), 5_000, np.uint16)).save(tmp_path / "13.png")
    code, printed, err = fed_dpsd("predict", student, "12.png", "8.png", "13.png")
    assert (code, len(printed)) == (1, 3)
    assert printed[1].replace("12.png", "8.png") == printed[2]
    assert "13.png is skipped: its pixels have 13 bits, more than pixel_bits=12" in err


def test_images_are_predicted_with_the_runs_window_and_fit(fed_dpsd, tmp_path):
    write_shapes(tmp_path / "pictures", 30)
    settings = *SMALL, "rounds=1", "data=imagefolder", "data.path=pictures", "data.shape=[1,8,8]"
    more = "num_clients=1", "data.window=[1000,201]", "data.fit=pad"
    _, printed, _ = fed_dpsd("run", *settings, *more)
    _, (student, *_), _ = fed_dpsd("export", printed[-1])
    (tmp_path / "scan").write_bytes(dicom(np.full((8, 16), 1_000, np.uint16), 12))
    for name, rows in (("seen", slice(2, 6)), ("unseen", slice(8))):
        pixels = np.zeros((8, 8), np.uint8)
        pixels[rows] = 128
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    _, (_, scan, seen, unseen), _ = fed_dpsd("predict", student, "scan", "seen.png", "unseen.png")
    assert scan.partition(",")[2] == seen.partition(",")[2] != unseen.partition(",")[2]


def test_a_folder_without_files_is_an_error(fed_dpsd, tmp_path, model):
    (tmp_path / "new").mkdir()
    code, printed, err = fed_dpsd("predict", model, "new")
    assert (code, printed) == (1, [])
    assert "error: new contains no file" in err


def test_a_class_has_its_name_from_the_folder_of_images_to_the_prediction(fed_dpsd, tmp_path):
    write_shapes(tmp_path / "pictures", 30)
    settings = *SMALL, "rounds=1", "data=imagefolder", "data.path=pictures", "partition=iid"
    _, printed, _ = fed_dpsd("run", *settings, "num_clients=1")
    assert (
        "- circle\n  - square\n  - triangle" in (tmp_path / printed[-1] / "config.yaml").read_text()
    )
    _, printed, _ = fed_dpsd("export", printed[-1])
    code, printed, _ = fed_dpsd("predict", printed[-1], "pictures", "--all")
    assert code == 0
    assert printed[0] == "file,class,probability,circle,square,triangle"
    assert {row["class"] for row in csv.DictReader(printed)} <= set(CLASSES)


def test_predictions_of_the_test_images_are_as_good_as_the_runs_student(fed_dpsd, tmp_path, model):
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    test = held_out(open_run_folder(run))
    (tmp_path / "new").mkdir()
    for number, image in enumerate(test.images):
        Image.fromarray(image[0]).save(tmp_path / "new" / f"{number:03}.png")
    code, printed, _ = fed_dpsd("predict", model, "new")
    assert code == 0
    classes = [int(row["class"]) for row in csv.DictReader(printed)]
    assert np.mean(classes == test.labels) == pytest.approx(
        summary["accuracy"]["student"], abs=1e-4
    )


def test_synthesize_prints_the_path_and_says_how_the_images_were_drawn(fed_dpsd, tmp_path, model):
    (run,) = (tmp_path / "runs").iterdir()
    words = "synthesize", str(run), "--num", "10", "--out", "images/train.parquet"
    code, printed, err = fed_dpsd(*words, "--labels", "--from", "queries")
    assert (code, printed) == (0, [str(tmp_path / "images" / "train.parquet")])
    assert "that the run's next rounds would have sent" in err
    code, _, err = fed_dpsd(*words)
    assert code == 1
    assert "images/train.parquet already exists" in err
    code, _, _ = fed_dpsd("synthesize", str(run), "--num", "0", "--out", "more/train.parquet")
    assert code == 2
