"""Seeded runs on processors that round differently: the kernels of two instruction sets."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import hashlib
import json
import sys

import torch

import fed_dpsd
from fed_dpsd.experiment import load_data
from fed_dpsd.server.run_folder import open_completed
from fed_dpsd.streams import Streams

drawn, hidden, noise = {}, {}, Streams.noise


def watched(streams, purpose, client, number, hides):
    key = f"{streams.seed} {purpose} {client} {number}"
    assert hidden.setdefault(key, hides) == hides
    drawn[key] = noise(streams, purpose, client, number, hides)
    return drawn[key]


Streams.noise = watched
run = fed_dpsd.run(f"out={sys.argv[1]}", progress=False)
completed = open_completed(run.folder)
data = load_data(completed.experiment.config.data, completed.experiment.config.cache)
parts = data.train, data.test
known = [run.student.predict(each.images).argmax(1) == each.labels for each in parts]
print(json.dumps({
    "kernels": torch.backends.cpu.get_cpu_capability(),
    "noise": {key: str(rng.bit_generator.state) for key, rng in drawn.items()},
    "first images": hashlib.sha256(completed.state.buffer[0].images.tobytes()).hexdigest(),
    "accuracy": sum(each.sum() for each in known) / sum(map(len, known)),
}))
"""


def run_on(kernels, folder):
    """The default run with torch's kernels for an instruction set."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "runs")],
        env=os.environ | {"ATEN_CPU_CAPABILITY": kernels, "FED_DPSD_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow(seconds=60)
def test_other_kernels_draw_the_same_noise_and_train_as_good_a_student(tmp_path):
    """A state of a generator of noise is its key and the number of its draws."""
    one, other = (run_on(kernels, tmp_path / kernels) for kernels in ("default", "avx2"))
    if one["kernels"] == other["kernels"]:
        pytest.skip(f"torch has only the kernels {one['kernels']} here")
    assert one["noise"] == other["noise"]
    assert len(one["noise"]) == 5 * (1 + 1 + 1 + 20)  # training, counts and their release, answers
    assert one["first images"] == other["first images"]  # the generators', too
    assert abs(one["accuracy"] - other["accuracy"]) < 0.01  # of all 1,797 digits
