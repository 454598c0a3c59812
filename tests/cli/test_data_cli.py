"""`fed-dpsd data`: splits, and each client's records by class, as text and as a picture."""

import re

import numpy as np
from PIL import Image

from fed_dpsd.cli.data import _size
from fed_dpsd.data.intake import Records
from tests.shapes import write_shapes


def test_data_shows_every_client_and_class(fed_dpsd):
    code, (count, heading, header, *out, need, sent), _ = fed_dpsd("data", "num_clients=3")
    assert code == 0
    assert need.startswith("estimated need: memory about ")
    assert sent.startswith("estimated traffic: about ")
    assert count == "digits: 1,797 images found, 1,797 used"
    assert heading.startswith("digits: 1,437 to train, 360 to test, 10 classes, shape [1, 8, 8]; ")
    assert header.split() == ["client", "records", *"0123456789"]
    rows = [re.findall(r"[\d,]+", line) for line in out]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    records = [int(row[1].replace(",", "")) for row in rows]
    assert sum(records) == 1_437
    assert records == [sum(map(int, row[2:])) for row in rows]
    assert all(len(line) <= 80 for line in out)


def test_a_sheet_of_test_images_is_drawn(fed_dpsd, tmp_path):
    code, (*_, path), _ = fed_dpsd("data", "--sheet", "sheet.png")
    assert (code, path) == (0, str(tmp_path / "sheet.png"))
    with Image.open(path) as picture:
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10


def test_patients_are_counted_where_they_are_known():
    images, labels = np.zeros((3, 1, 8, 8), np.uint8), np.zeros(3, np.int64)
    assert _size(Records(images, labels)) == "3"
    assert _size(Records(images, labels, np.array([4, 9, 4]))) == "3 (2 patients)"
    assert _size(Records(images, labels, labels)) == "3 (1 patient)"


def test_names_of_classes_are_column_heads_and_the_picture_lies_where_it_is_wanted(
    fed_dpsd, tmp_path, caplog
):
    write_shapes(tmp_path / "pictures", 60)
    overrides = "data=imagefolder", "data.path=pictures", "num_clients=2"
    code, lines, _ = fed_dpsd("data", *overrides, "--out", "parts.png")
    count, heading, fit, header, *rows, _, _, path = lines
    assert code == 0
    assert count == "imagefolder: 60 files found, 60 used"
    found = re.match(r"imagefolder: (\d+) to train, (\d+) to test, 3 classes, shape \[3,", heading)
    assert sum(map(int, found.groups())) == 60
    assert fit == "fit: crop; window: null"
    assert header.split() == ["client", "records", "circle", "square", "triangle"]
    assert len(rows) == 2
    assert path == str(tmp_path / "parts.png")
    with Image.open(path) as picture:
        assert picture.width == 2_040
    assert "one image in 5 is for testing" in caplog.text


def test_records_of_no_client_are_counted_once_with_their_reason(fed_dpsd):
    overrides = "num_clients=3", "partition=class", "partition.classes_per_client=1"
    code, out, _ = fed_dpsd("data", *overrides)
    assert code == 0
    (said,) = [line for line in out if "partition: " in line]
    assert said == (
        "partition: 437 of 1,437 training records have a client; 1,000 have none, because 7 of "
        "10 classes have no client with partition.classes_per_client=1 and num_clients=3; raise "
        "the first to 8, or the second to 10"
    )


def test_names_of_files_and_classes_are_printed_with_escapes(fed_dpsd, tmp_path, caplog):
    for number in range(40):
        folder = tmp_path / "pictures" / ("i\x1b[31mll", "[red]no\nrm")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(folder / f"{number}.png")
    (folder / "\x1b]0;title\x07.png").write_bytes(b"broken")
    overrides = "data=imagefolder", "data.path=pictures", "data.shape=[1,8,8]", "num_clients=2"
    code, out, _ = fed_dpsd("data", *overrides)
    assert code == 0
    assert out[3].split() == ["client", "records", r"[red]no\nrm", r"i\x1b[31mll"]
    assert r"1 unreadable ([red]no\nrm/\x1b]0;title\x07.png: it is not a PNG" in caplog.text
    code, _, err = fed_dpsd("data", *overrides[:1], 'data.path="no\x1b[31m"')
    assert (code, r"no\x1b[31m does not exist" in err) == (1, True)
    assert "\x1b" not in "".join(out) + err + caplog.text
