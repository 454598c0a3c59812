"""Completed runs."""

import copy
import itertools
import shutil

import pytest

from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.experiment import test_split as held_out
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder


@pytest.fixture(scope="session")
def _finished_runs():
    return {}


@pytest.fixture
def finished(small, tmp_path, _finished_runs):
    """Runs a small experiment, once in a session; a copy of its folder, summary and test split."""
    numbers = itertools.count()

    def make(*overrides):
        if overrides not in _finished_runs:
            experiment = small("rounds=1", *overrides)
            folder = new_run_folder(experiment)
            federation = LocalFederation(experiment, folder)
            summary = runs.run(experiment, federation, folder, lambda line: None)
            _finished_runs[overrides] = folder, summary, held_out(experiment)
        folder, summary, test = _finished_runs[overrides]
        copied = shutil.copytree(folder, tmp_path / f"run{next(numbers)}" / folder.name)
        return copied, copy.deepcopy(summary), test

    return make
