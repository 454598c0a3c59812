"""docs/tutorial.md: its commands on pictures teach a student to classify new ones."""

import csv
import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from fed_dpsd import cli
from fed_dpsd.data import datasets
from tests.shapes import CLASSES, picture, write_shapes

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
SECTION = PAGE.split("\n## Classify your own pictures\n")[1].split("\n## ")[0]
COMMANDS = re.findall(r"^fed-dpsd .*$", SECTION, re.MULTILINE)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run a command line in its own folder; return stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    datasets._say_once.cache_clear()

    def call(line):
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as done:
            cli.main()
        printed = capsys.readouterr()
        assert not done.value.code, printed.err
        return printed.out, printed.err

    return call


@pytest.mark.slow
def test_the_tutorial_goes_from_a_folder_of_pictures_to_names_of_classes(command, tmp_path, caplog):
    assert [line.split()[1] for line in COMMANDS] == ["data", "run", "export", "predict"]
    write_shapes(tmp_path / "pictures", 200, broken=2)
    os.mkdir(tmp_path / "new")
    rng = np.random.default_rng(1)
    for number in range(60):
        name = CLASSES[number % 3]
        picture(name, rng).save(tmp_path / "new" / f"{name}{number}.png")
    first, run, export, predict = COMMANDS

    shown, _ = command(first)
    trained, tested = re.search(r"(\d+) to train, (\d+) to test, 3 classes", shown).groups()
    assert int(trained) + int(tested) == 198
    assert "circle square triangle" in " ".join(shown.split())
    assert "200 files found, 198 used, 2 skipped: 2 unreadable (circle/000" in caplog.text
    assert (tmp_path / "partition.png").is_file()
    command(run)
    command(export)
    printed, _ = command(predict)
    rows = list(csv.DictReader(printed.splitlines()))
    assert len(rows) == 60
    right = [Path(row["file"]).name.startswith(row["class"]) for row in rows]
    assert np.mean(right) > 0.8
