"""Every command of the docs is run by a test, or its page says that it is not.

The pages of HERE are run unchanged, in order, in a folder prepared by `given`, at a small size; the
commands of COMPOSED only make their experiments. A new page with commands is one of HERE unless
another set names it. A comment "exit code 1" behind a command is checked, and "not run", with a
reason, leaves one out. Commands with `=cuda` need a GPU.
"""

import csv
import functools
import itertools
import operator
import re
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from fed_dpsd import api, cli
from fed_dpsd.config.grid import expand
from fed_dpsd.experiment import from_overrides, one_run
from fed_dpsd.report.settings import NEEDED, read_settings
from fed_dpsd.storage import conf_folder
from tests import pages
from tests.conftest import composed
from tests.every import every
from tests.shapes import CLASSES, picture, write_shapes

# Pages with a test of their own, which is to name them.
ELSEWHERE = {
    "docs/artefacts.md": "tests/test_artefacts.py",
    "docs/extending.md": "tests/plugin.py",
    "docs/scaling.md": "tests/engines/test_ray_cluster.py",
}
# Commands that start processes, or hosts, of their own, and the tests that run them.
STARTING = {
    "flwr run": "tests/engines/flower/test_simulation.py",
    "fed-dpsd rehearse": "tests/rehearsal/test_rehearsal.py",
}
NEITHER = re.compile(r"^No test runs the commands .{40,}", re.MULTILINE)
RESULTS = [name for name in pages.names() if name.startswith("results/")]
COMPOSED = ("README.md", "docs/commands.md")  # examples of the help texts run each command
HERE = [
    name
    for name in pages.names()
    if name not in (*ELSEWHERE, *RESULTS, *COMPOSED)
    and pages.commands(pages.text_of(name))
    and not NEITHER.search(pages.text_of(name))
]
QUICK = (
    *("rounds=2", "queries_per_round=64", "teacher.min_steps=20", "teacher.epochs=0"),
    *("method.student_steps=5", "method.final_student_steps=10", "method.batch_size=32"),
    *("model.teacher_width=4", "model.student_width=4", "model.generator_width=4"),
    *("device=cpu", "threads_server=1"),
)


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A folder with pictures, a table of them and a parquet file of each split."""
    monkeypatch.chdir(tmp_path)
    folder = write_shapes(tmp_path / "pictures", 90)
    files = sorted(folder.rglob("*.*"))
    lines = [
        f"{file.relative_to(tmp_path)},{file.parent.name},p{number // 3}"
        for number, file in enumerate(files)
    ]
    (tmp_path / "pictures.csv").write_text("\n".join(["file,kind,patient", *lines, ""]))
    (tmp_path / "new").mkdir()
    for name in CLASSES:
        picture(name, np.random.default_rng(1)).save(tmp_path / "new" / f"{name}.png")
    (tmp_path / "FOLDER").mkdir()
    for split, chosen in (("train", files[::2]), ("test", files[1::2])):
        rows = []
        for file in chosen:
            small = tmp_path / "small.png"
            Image.open(file).convert("RGB").resize((32, 32)).save(small)
            image = {"bytes": small.read_bytes(), "path": None}
            rows.append({"image": image, "label": file.parent.name})
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, tmp_path / "FOLDER" / f"{split}.parquet")
    return tmp_path


@pytest.fixture
def typed(monkeypatch, capsys):
    """Run a line as typed; return its exit code and output."""

    def typed(words):
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as done:
            cli.main()
        captured = capsys.readouterr()
        return done.value.code or 0, captured.out + captured.err

    return typed


def small(words):
    """A command with the settings of a small run that it has keys for and does not set itself."""
    if words[1] not in ("run", "sweep"):
        return words
    given = {word.partition("=")[0] for word in words}
    choices = [w for w in words[2:] if re.match(r"(method|experiment)=", w)]
    keys = composed(*choices)["method"]
    quick = [
        setting
        for setting in QUICK
        for key in [setting.partition("=")[0]]
        if key not in given and (not key.startswith("method.") or key[7:] in keys)
    ]
    return [*words[:2], *quick, *words[2:]]


def possible(command):
    if " ".join(command.words[:2]) in STARTING:
        return False
    return torch.cuda.is_available() or not any("=cuda" in word for word in command.words)


@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize("name", HERE)
def test_every_command_of_a_page_runs(name, given, typed):
    names = {}
    for step in pages.steps(pages.text_of(name)):
        if isinstance(step, str):
            exec(compile(pages.of_few_patients(step), name, "exec"), names)
        elif not step.said_not_to_run and possible(step):
            code, said = typed(small(step.words))
            assert code == step.code, f"{step.line}\n{said}"


@pytest.mark.slow
@every("command", [each for name in COMPOSED for each in pages.commands(pages.text_of(name))])
def test_the_settings_of_every_command_make_an_experiment(command, tmp_path):
    settings = [word for word in command.words[1:] if re.match(r"[\w.@]+=", word)]
    for cell in expand(settings):
        from_overrides([f"{key}={value}" for key, value in cell.overrides.items()], tmp_path)


@pytest.mark.slow(seconds=5)
def test_the_readmes_python_runs(tmp_path, monkeypatch):
    """With teachers and a student of few steps."""
    steps = ("training.steps=20", "method.student_steps=5", "method.final_student_steps=10")
    monkeypatch.setattr(api, "one_run", lambda typed, base: one_run([*steps, *typed], base))
    monkeypatch.chdir(tmp_path)
    text = pages.text_of("README.md")
    (block,) = (step for step in pages.steps(text) if isinstance(step, str))
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["run"].summary["status"] == "completed"
    assert names["student"].facts["privacy"] == names["run"].privacy.content


def test_pages_can_be_followed_in_one_folder():
    """No command makes the run folder of another page again."""
    texts = map(pages.text_of, pages.names())
    command = re.compile(r"^fed-dpsd run.* run_folder=(\w+)", re.MULTILINE)
    made = [folder for text in texts for folder in command.findall(text)]
    assert len(made) > 3
    assert len(made) == len(set(made))


def test_the_tables_of_sweeps_can_be_reported():
    """A row that is measured again at equal settings would stop the report of its table."""
    reported = 0
    for table in pages.ROOT.glob("results/*.csv"):
        with table.open(newline="") as file:
            if set(NEEDED) <= set(next(csv.reader(file))):
                reported += len(read_settings([table])) > 0
    assert reported > 40


@pytest.mark.slow
def test_the_commands_of_results_compose():
    """No data is read. The choices of a command's first cell have all its other keys."""
    for command in (each for name in RESULTS for each in pages.commands(pages.text_of(name))):
        verb, *settings = command.words[1:]
        if verb not in ("run", "sweep"):
            continue
        settings = [w for w in settings if re.match(r"(?!run_folder=)[\w.@]+=", w)]
        named = [w for option, w in itertools.pairwise(command.words) if option == "--only"]
        cell = expand(settings, named)[0].overrides
        chosen = {key: value for key, value in cell.items() if (conf_folder() / key).is_dir()}
        whole = composed(*(f"{key}={value}" for key, value in chosen.items()))
        for key in cell.keys() - chosen.keys():
            functools.reduce(operator.getitem, key.split("."), whole)
