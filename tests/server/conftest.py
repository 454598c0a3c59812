"""Completed runs."""

import pytest

from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.experiment import test_split as held_out
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder


@pytest.fixture
def finished(small):
    """Runs a small experiment; its folder, summary and test split."""

    def make(*overrides):
        experiment = small("rounds=1", *overrides)
        folder = new_run_folder(experiment)
        federation = LocalFederation(experiment, folder)
        summary = runs.run(experiment, federation, folder, lambda line: None)
        return folder, summary, held_out(experiment)

    return make
