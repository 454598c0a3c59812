"""The command line, called in this process."""

import sys

import pytest

from fed_dpsd import cli
from fed_dpsd.cli.console import console


@pytest.fixture
def few_draws(monkeypatch):
    """Sampler tests of fewer draws: what they find in full is in privacy/test_mutations.py."""
    monkeypatch.setattr("fed_dpsd.audits.sampling.DRAWS", 2**15)
    monkeypatch.setattr("fed_dpsd.audits.sampling.OWN_DRAWS", 2**15)
    monkeypatch.setattr("fed_dpsd.audits.sampling.MOST_STEPS", 20)
    monkeypatch.setattr("fed_dpsd.audits.trainings.SAMPLED_STEPS", 100)


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
