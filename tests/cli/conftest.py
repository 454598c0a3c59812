"""The command line, called in this process; and finished runs."""

import shutil
import sys
from pathlib import Path

import pytest

from fed_dpsd import cli
from fed_dpsd.cli.console import console
from tests.conftest import SMALL


@pytest.fixture
def few_draws(monkeypatch):
    """Checks of draws with fewer draws than in an audit."""
    monkeypatch.setattr("fed_dpsd.audits.draws.NUMBERS", 2**12)
    monkeypatch.setattr("fed_dpsd.audits.draws.LABELS", 2**12)
    monkeypatch.setattr("fed_dpsd.audits.draws.STEPPED", 2**12)
    monkeypatch.setattr("fed_dpsd.audits.attacks.SAMPLED_STEPS", 100)


@pytest.fixture
def fed_dpsd(tmp_path, monkeypatch, capsys):
    """Run the command; returns its exit code, the lines of stdout, and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fed-dpsd", *arguments])
        monkeypatch.setattr(console, "_width", 200)
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        output = capsys.readouterr()
        return code, output.out.splitlines(), output.err

    return call


@pytest.fixture(scope="session")
def _made(tmp_path_factory):
    return tmp_path_factory.mktemp("made"), {}


@pytest.fixture
def run_of(fed_dpsd, _made):
    """A function that copies a run, made once in a session, to a folder; returns its path."""
    place, made = _made

    def copied(*settings, out="runs"):
        if settings not in made:
            _, printed, _ = fed_dpsd("run", *SMALL, *settings, f"out={place}")
            made[settings] = Path(printed[-1])
        return str(shutil.copytree(made[settings], Path.cwd() / out / made[settings].name))

    return copied


@pytest.fixture
def model_of(fed_dpsd, run_of, _made):
    """The same for the student of a run of one round, in the folder `model`."""
    place, _ = _made

    def copied():
        if not (place / "model").exists():
            fed_dpsd(
                "export", run_of("rounds=1", out=place / "exported"), "--out", f"{place}/model"
            )
        return str(shutil.copytree(place / "model", Path.cwd() / "model") / "student.safetensors")

    return copied
