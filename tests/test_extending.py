"""docs/extending.md: its files as an installed package, and its commands."""

import io
import logging
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from fed_dpsd.server.summary import read_summary
from tests.conftest import SMALL
from tests.environments import said_by, with_wheel
from tests.forks import finished, fork
from tests.plugin import PAGE, write

COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def run_all(commands, folder):
    """The page's commands, next to the page's package."""
    sys.path.insert(0, str(folder))
    logging.getLogger().handlers.clear()  # pytest's
    from fed_dpsd import errors
    from fed_dpsd.cli import main

    errors.warn_once.cache_clear()  # a fork knows what its parent has said
    for words in commands:
        sys.argv = words
        try:
            main()
        except SystemExit as done:
            if done.code:
                sys.exit(f"failed: {words}")


def write_retinas(folder):
    """A folder of colour images for the page's data set."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        rows = []
        for index in range(60):
            buffer = io.BytesIO()
            pixels = rng.integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(buffer, "PNG")
            picture = {"bytes": buffer.getvalue(), "path": None}
            rows.append({"image": picture, "label": index % 5, "patient": f"{split}{index // 3}"})
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet")


@pytest.fixture
def project(tmp_path):
    """The page's package, and a folder of images."""
    write(tmp_path)
    write_retinas(tmp_path / "FOLDER")
    return tmp_path


def small(command):
    """A command of the page at a small size."""
    words = shlex.split(command, comments=True)
    if words[1] == "data":
        return [*words, "num_clients=2"]
    kept = [s for s in SMALL if not s.startswith("privacy")]
    if "method=blend" in words:
        kept = [s for s in kept if not s.startswith("method.") or s.startswith("method.batch")]
    return [*words[:1], *words[1 : 3 - ("run" in words)], *kept, *words[3 - ("run" in words) :]]


@pytest.mark.slow(seconds=30)
def test_the_page_adds_a_method_a_mechanism_a_training_a_network_and_a_data_set(project):
    assert COMMANDS
    commands = [small(command) for command in COMMANDS]
    log = project / "log"
    code = finished(fork(lambda: run_all(commands, project), log, project))
    text = log.read_text()
    assert code == 0, text
    results = re.findall(r"^student \d.* · proven .*", text, re.MULTILINE)
    assert len(results) == 3
    note = "not reviewed: nothing is proven of what fed_dpsd_example does"
    assert "training: on labels smoothed by 0.1, without noise\n" in text
    assert "answers: probabilities, with Laplace noise of 40 on each\n" in text
    audits = re.findall(r"proven epsilon .*", text)
    assert audits
    assert all(", not reviewed)" in line for line in audits)
    for folder in (project / "runs").iterdir():
        assert all(note in row["notes"] for row in read_summary(folder)["privacy"]["proven"])
        assert "plugins:\n- fed_dpsd_example\n" in (folder / "config.yaml").read_text()


def audited():
    """Audits of the page's mechanism, unchanged and with an event of half the sensitivity."""
    sys.path.insert(0, os.getcwd())
    from dp_accounting import LaplaceDpEvent
    from fed_dpsd_example.laplace_probabilities import LaplaceProbabilities

    from fed_dpsd.audits.black_box import audit
    from fed_dpsd.privacy.accounting import Stage, prove

    class TooSmall(LaplaceProbabilities):
        def event(self, unit, relation):
            return LaplaceDpEvent(self.noise_multiplier)

    for cls in (LaplaceProbabilities, TooSmall):
        mechanism = cls(4, 1.0)
        claim = prove([Stage(mechanism, 1, 1)], 1e-5, "record", "replace_one")
        rng = np.random.default_rng(0)

        def client(requests, row, mechanism=mechanism, rng=rng):
            return [
                mechanism.add_noise(mechanism.constrain_sensitivity(values[0], row)[None], row, rng)
                for values in requests
            ]

        found = audit(mechanism, client, 1, 40_000, 1e-5, 1e-6)
        print(found.lower_bound <= claim.value, found.refutes(claim.value, 1e-5, 1))


def test_the_pages_mechanism_is_refuted_where_its_event_is_too_small(project):
    """Audited: the claim holds; with half the sensitivity it is refuted (probability 1 - 1e-6)."""
    log = project / "log"
    assert finished(fork(audited, log, project)) == 0, log.read_text()
    assert log.read_text().split() == ["True", "False", "False", "True"]


@pytest.mark.slow
def test_a_wheel_and_a_package_of_ones_own_give_the_same_bits_on_both_engines(tmp_path):
    """In a separate environment with both installed; every part is the plug-in's."""
    program = with_wheel(tmp_path, write(tmp_path / "package"))
    write_retinas(tmp_path / "FOLDER")
    settings = [s for s in SMALL if not s.startswith(("method.", "answers="))]
    chosen = ["method=blend", "answers=laplace_probabilities", "model.teacher=mlp_deep"]
    chosen += ["training=smoothed", "training.steps=5", "data=retina", "data.path=FOLDER"]
    words = [
        "run",
        "plugins=fed_dpsd_example",
        *settings,
        *chosen,
        "method.batch_size=32",
        "rounds=2",
    ]
    hashes = set()
    for engine in (["local"], ["flower", "--nodes", "2"]):
        done = said_by(program, tmp_path, *words, f"out={tmp_path}/runs", "--engine", *engine)
        assert "not reviewed: nothing is proven of what fed_dpsd_example does" in done.stderr
        hashes.add(read_summary(Path(done.stdout.splitlines()[-1]))["student_sha256"])
        shutil.rmtree(tmp_path / "home" / "cache" / "teachers")
    assert len(hashes) == 1
    words = ["privacy", "plan", "plugins=fed_dpsd_example", "training=smoothed"]
    plan = said_by(program, tmp_path, *words, "answers=laplace_probabilities").stdout
    assert "training: on labels smoothed by 0.1, without noise\n" in plan
    assert "answers: probabilities, with Laplace noise of 40 on each\n" in plan
