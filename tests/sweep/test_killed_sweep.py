"""A sweep that is killed at random moments gives the same table."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sweep.test_sweep import rows

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from fed_dpsd.cli import main; main()"]
COMMAND += ["sweep", "experiment=ci", "--only", "FedDPSD,DPSD", "threads_server=1"]
KILLS = 8


def timeless(rows):
    unlike = {"seconds", "seconds_rounds"}
    return [{k: v for k, v in row.items() if k not in unlike} for row in rows]


@pytest.mark.slow(seconds=60)
def test_a_sweep_killed_at_random_gives_the_same_table(tmp_path):
    """The moments are drawn from a fixed seed, over the time that the whole sweep took."""

    def start(name):
        # A separate cache: teachers are trained too, and their training is interrupted.
        places = [f"cache={tmp_path / name}_cache", f"--out={tmp_path / name}"]
        command = [*COMMAND, *places, f"--csv={tmp_path / name}.csv"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with (tmp_path / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    began = time.monotonic()
    assert start("whole").wait() == 0, (tmp_path / "whole.log").read_text()
    took = time.monotonic() - began

    moments = random.Random(0)
    killed = 0
    for _ in range(KILLS):
        process = start("killed")
        try:
            assert process.wait(moments.uniform(0.1, 0.5) * took) == 0
            break
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
    assert killed >= 2
    assert start("killed").wait() == 0, (tmp_path / "killed.log").read_text()
    for suffix in ("", "_rounds"):
        whole, table = (
            timeless(rows(tmp_path / f"{name}.csv", suffix)) for name in ("whole", "killed")
        )
        assert table == whole
