"""Edge settings that have always worked still work."""

import os
import subprocess
import sys

import pytest

from fed_dpsd.claims import planned_epsilon
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import from_overrides, partitions


@pytest.mark.parametrize("target", [0.01, 500])
def test_far_targets_are_met_and_not_exceeded(tmp_path, target):
    chosen = ["training=dp_sgd", f"privacy.target_epsilon={target}"]
    experiment = from_overrides(chosen, tmp_path)
    spent = planned_epsilon(experiment.plan, experiment.config.privacy.delta, "record", True)
    assert 0.98 * target <= spent <= target


def test_a_rate_of_one_in_a_thousand(tmp_path):
    experiment = from_overrides(["training=dp_sgd", "training.sample_rate=0.001"], tmp_path)
    spent = planned_epsilon(experiment.plan, experiment.config.privacy.delta, "record", True)
    assert 0 < spent < 2.99  # as with all records in each step


@pytest.mark.slow  # it looks for a number that works
def test_more_clients_than_records_are_one_error(tmp_path):
    chosen = ["num_clients=2000", "partition.alpha=1e-6", "partition.min_partition_size=1"]
    with pytest.raises(UserError, match="num_clients=2000: .* cannot give every client enough"):
        partitions(from_overrides([*chosen, f"cache={tmp_path}"], tmp_path))


@pytest.mark.slow  # python -O recompiles torch
def test_a_folder_with_a_space_a_comma_an_equals_sign_and_an_accent(tmp_path):
    """With python -O, and in the C locale: no assertion is needed, and no other encoding."""
    place = tmp_path / "é = a, b"
    place.mkdir()
    command = [sys.executable, "-O", "-c", "from fed_dpsd.cli import main; main()", "data"]
    done = subprocess.run(
        [*command, "num_clients=2"],
        cwd=place,
        env={**os.environ, "LC_ALL": "C", "FED_DPSD_HOME": str(place / "home")},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"1,437 to train, 360 to test" in done.stdout
