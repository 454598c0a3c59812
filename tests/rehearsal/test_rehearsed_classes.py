"""Lists of class names over TLS: two hospitals and a coordinator that scores on folders."""

import csv
import json
import os
import subprocess
import time

import numpy as np
import pytest
from PIL import Image

from fed_dpsd.cli.student import predict
from fed_dpsd.rehearsal.faults import COMPLETED
from fed_dpsd.rehearsal.rehearsal import COORDINATOR, Rehearsal, can_make_hosts
from fed_dpsd.server.export import export
from tests.ledgers import entries_of

pytestmark = pytest.mark.slow

NAMES = ["normal", "covid"]
BOTH = "the hospital's classes are ['normal', 'covid'], the experiment's are ['covid', 'normal']"
MEANS = {"normal": 70, "covid": 180}
SMALL = (
    *("num_clients=2", "partition=iid", "data=imagefolder", "data.shape=[1,8,8]", "rounds=2"),
    *("training=plain", "answers=gradient", "answers.noise_multiplier=0.05", "model=cnn"),
    *("queries_per_round=128", "method.final_student_steps=150", "teacher.min_steps=60"),
)


def pictures(folder, normal, covid):
    rng = np.random.Generator(np.random.PCG64(normal))
    for name, count in (("normal", normal), ("covid", covid)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.normal(MEANS[name], 20, (8, 8)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def screen_of(rehearsal, run_id):
    """What `flwr run --stream` shows the coordinator of a run, on one line."""
    command = ("flwr", "log", run_id, "here", "--show")
    shown = subprocess.run(
        rehearsal.on(COORDINATOR, *command),
        env={**os.environ, "FLWR_HOME": str(rehearsal.folder / "coordinator")},
        capture_output=True,
        text=True,
        check=True,
    )
    return " ".join(shown.stdout.split())


def test_classes_are_compared_before_a_run_and_named_after_it(tmp_path):
    """The hospitals' list is not in the alphabet's order, in which the coordinator has folders."""
    pictures(tmp_path / "data" / "train", 45, 40)
    test = pictures(tmp_path / "data" / "test", 40, 20)  # exchanged classes score otherwise
    overrides = (*SMALL, f"data.path={tmp_path / 'data'}")
    settings = {"classes": NAMES, "budget": 1e9}
    with Rehearsal(tmp_path / "all", overrides, settings, can_make_hosts()) as rehearsal:
        assert rehearsal.experiment.config.data.class_names == ("covid", "normal")
        began = time.monotonic()
        refused = rehearsal.submit()
        assert rehearsal.wait(refused, 500) != COMPLETED
        assert time.monotonic() - began < 300  # of federation.node_timeout_seconds=600
        screen = screen_of(rehearsal, refused)
        for number in rehearsal.hospitals:
            assert f"client {number}: {BOTH}" in screen
            log = (rehearsal.folder / f"hospital{number}" / "log").read_text()
            assert f"refused: {BOTH}" in log
            hospital = rehearsal.hospital(number)
            assert not entries_of(hospital.ledger)
            assert not (hospital.folder / "cache").exists()
        (failed,) = (rehearsal.folder / "runs").iterdir()
        assert BOTH in json.loads((failed / "summary.json").read_text())["error"]

        agreed = rehearsal.submit("data.classes=[normal,covid]")
        assert rehearsal.wait(agreed, 600) == COMPLETED
        (folder,) = set((rehearsal.folder / "runs").iterdir()) - {failed}
    accuracy = json.loads((folder / "summary.json").read_text())["accuracy"]["student"]
    assert accuracy > 0.75  # with the classes exchanged, below 0.25
    model = export(folder, tmp_path / "model", "safetensors").path
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "normal", "1": "covid"}
    predict(model, [test], out=tmp_path / "predicted.csv")
    with (tmp_path / "predicted.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    right = [row["class"] == row["file"].split("/")[-2] for row in rows]
    assert (len(right), np.mean(right)) == (60, pytest.approx(accuracy, abs=1e-12))
