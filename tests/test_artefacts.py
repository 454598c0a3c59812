"""docs/artefacts.md: its commands and its Python, unchanged and in order."""

import csv
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fed_dpsd import cli
from fed_dpsd.experiment import from_overrides
from fed_dpsd.experiment import test_split as held_out
from fed_dpsd.server.run_folder import open_completed
from tests.conftest import SMALL

PAGE = (Path(__file__).parents[1] / "docs" / "artefacts.md").read_text()
COMMANDS = re.findall(r"^fed-dpsd .*$", PAGE, re.MULTILINE)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run a command line in its own folder; return the lines of stdout, and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(line):
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as done:
            cli.main()
        printed = capsys.readouterr()
        assert not done.value.code, printed.err
        return printed.out.splitlines(), printed.err

    return call


@pytest.mark.slow
def test_the_pages_commands_lead_from_a_run_to_what_is_taken_away(command, tmp_path, capsys):
    words = [line.split()[1] for line in COMMANDS]
    assert words == ["run", *["export"] * 3, *["predict"] * 2, *["synthesize"] * 2]
    run, *others = COMMANDS
    command(f"{run} {shlex.join(SMALL)}")
    summary = open_completed(tmp_path / "trained").summary
    test = held_out(from_overrides(["data=digits"], tmp_path))
    (tmp_path / "new").mkdir()
    for number, image in enumerate(test.images):
        Image.fromarray(image[0]).save(tmp_path / "new" / f"{number:03}.png")
    wide = np.linspace(0, 255, 30 * 20 * 3).astype(np.uint8).reshape(20, 30, 3)
    Image.fromarray(wide).save(tmp_path / "new" / "wide.png")
    for line in others:
        printed, err = command(line)
        if re.search("export.*(onnx|pt2)", line):
            assert "and the student differ by at most" in err
        if "predict" in line:
            predicted = list(csv.DictReader(printed))
            classes = [int(row["class"]) for row in predicted[:-1]]
            right = np.mean(np.array(classes) == test.labels)
            assert right == pytest.approx(summary["accuracy"]["student"], abs=1e-4)
        else:
            assert Path(printed[-1]).is_file()
    (recipe,) = PYTHON
    exec(compile(recipe, "artefacts.md", "exec"), {})
    for row, line in zip(predicted, capsys.readouterr().out.splitlines(), strict=True):
        file, label, probability = line.split(",")
        assert (file, label) == (row["file"], row["class"])
        assert float(probability) == pytest.approx(float(row["probability"]), abs=2e-4)
    assert (tmp_path / "synthetic" / "PRIVACY.md").is_file()
    cells = "".join(re.findall(r"^\| ([^|]+) \|", PAGE, re.MULTILINE))
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert files == set(re.findall(r"`(\w+\.\w+)`", cells))
