"""The commands and the Python code of README.md and docs/commands.md run."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image

from fed_dpsd import api, cli
from fed_dpsd.audits import attacks, sampling
from fed_dpsd.experiment import one_run
from tests.conftest import SMALL, quick_for, small_for

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [README, (ROOT / "docs" / "commands.md").read_text()]
COMMANDS = [line for text in PAGES for line in re.findall(r"^fed-dpsd .*$", text, re.MULTILINE)]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run `fed-dpsd` in process, in its own folder; return the last line of stdout."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["fed-dpsd", *words])
        with pytest.raises(SystemExit) as done:
            cli.main()
        assert not done.value.code
        return capsys.readouterr().out.splitlines()[-1]

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [c for c in COMMANDS if not {"--engine", "rehearse", "bench"} & set(c.split())],
)
def test_the_commands_of_readme_and_of_the_page_of_commands_run(command, call, monkeypatch):
    """At a small size; RUN is a run folder.

    Commands that start Flower run in test_simulation, test_rehearsal and test_rows.
    """
    words = shlex.split(command, comments=True)[1:]
    if "RUN" in words:
        folder = call("run", *SMALL)
        words = [folder if word == "RUN" else word for word in words]
    monkeypatch.setattr(attacks, "CLOSE_RUNS", 20_000)
    monkeypatch.setattr(sampling, "OWN_DRAWS", 2**15)
    monkeypatch.setattr(sampling, "DRAWS", 2**15)
    if words[0] == "report":
        call("sweep", *SMALL, "seed=0,1")
    if words[0] == "predict":
        call("export", call("run", *SMALL), "--out", "model")
        Image.new("L", (8, 8)).save("IMAGE", "PNG")
    if words[0] in ("run", "sweep"):
        words = [word for word in words if not word.startswith("rounds=")]
        given = {word.partition("=")[0] for word in words}
        small = [*small_for(words), *quick_for(words)]
        if "--only" in words:  # the experiment's grid chooses these
            chosen = ("training=", "answers=", "model=", "method.")
            small = [setting for setting in small if not setting.startswith(chosen)]
        words += [setting for setting in small if setting.partition("=")[0] not in given]
    call(*words)


def test_the_readmes_python_runs(tmp_path, monkeypatch):
    """With teachers and a student of few steps."""
    steps = ("training.steps=20", "method.student_steps=5", "method.final_student_steps=10")
    monkeypatch.setattr(api, "one_run", lambda typed, base: one_run([*steps, *typed], base))
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    assert names["run"].summary["status"] == "completed"
    assert names["student"].facts["privacy"] == names["run"].privacy.content
