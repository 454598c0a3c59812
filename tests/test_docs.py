"""Docs that stay true: names import, commands run, numbers in the docs are computed."""

import math
import re
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image

from fed_dpsd import api, cli
from fed_dpsd.audits import attacks, sampling
from fed_dpsd.config.compose import compose
from fed_dpsd.engines.placement import place
from fed_dpsd.experiment import one_run, set_up
from fed_dpsd.models.devices import Device, gib
from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.published import published_epsilon
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.votes import NoisyVotes
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


PRIVACY = (ROOT / "docs" / "privacy.md").read_text()


@pytest.mark.parametrize(
    ("mechanism", "queries", "printed"),
    [
        (TopKRandomizedResponse(10, 1.0, 2), 51_200, "24,512.6"),
        (TopKRandomizedResponse(10, 0.1, 2), 51_200, "351.23"),
        (TopKRandomizedResponse(10, 10.0, 3), 51_200, "| 10 | 512,001 |"),
        (TopKRandomizedResponse(10, 1.0, 3), 51_200, "| 1 | 19,425 |"),
        (NormalizedGradient(10, 100.0), 51_200, "| 0.0456 | 28.839 |"),
        (NormalizedGradient(10, 100.0, bound=5e-3), 51_200, "| 0.2614 | 28.839 |"),
        (NoisyVotes(10, 40.0, "laplace"), 400, "| 5.799 | 2.924 |"),
    ],
)
def test_numbers_in_the_privacy_text_are_computed(mechanism, queries, printed):
    assert printed in PRIVACY
    *published, proven = (float(n) for n in re.findall(r"[\d.]+", printed.replace(",", "")))
    claim = prove([Stage(mechanism, 1, queries)], 1e-5, "record", "replace_one")
    assert proven == pytest.approx(claim.value, rel=2e-4)
    for number in published:
        expected = published_epsilon(mechanism, queries, 1e-5)
        assert number == pytest.approx(expected, rel=2e-3)


def test_the_two_readings_of_the_papers_norm_are_computed():
    """Over a batch of 256 as one release, 200 times; the published formula knows no such norm."""
    assert "each normalised as a whole | 0.0456 | 1.061 |" in PRIVACY
    mechanism = NormalizedGradient(10, 100.0, normalise="batch")
    claim = prove([Stage(mechanism, 200, 256)], 1e-5, "record", "replace_one")
    assert claim.value == pytest.approx(1.061, abs=1e-3)
    assert published_epsilon(mechanism, 51_200, 1e-5) == pytest.approx(0.0456, rel=2e-3)


def test_the_first_page_says_what_an_epsilon_does_to_a_coin_toss():
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) %", PRIVACY, re.MULTILINE)
    assert len(rows) == 4
    for epsilon, percent in rows:
        odds = math.exp(float(epsilon))
        assert float(percent) == pytest.approx(100 * odds / (1 + odds), abs=0.06)


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


GPUS = re.findall(
    r"^\| (\w+) \| ([\d,]+) \| (\d+) \((\d+)\) \| (.+) \|$",
    (ROOT / "docs" / "gpus.md").read_text(),
    re.MULTILINE,
)


def test_the_shares_of_gpus_are_computed(tmp_path):
    assert GPUS
    for teacher, clients, total, free, printed in GPUS:
        overrides = ["training=plain", "data=mnist", "device=cuda", f"model.teacher={teacher}"]
        number = int(clients.replace(",", ""))
        experiment = set_up(compose([*overrides, f"num_clients={number}"]), tmp_path)
        card = Device("cuda:0", "", int(total) * 2**30, int(free) * 2**30)
        placed = place(experiment, number, (card,), 16)
        assert printed == (
            f"{placed.processes} | {placed.fraction:g} | {gib(placed.share)}"
            f" | {gib(placed.teachers)}"
        )
