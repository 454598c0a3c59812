"""Trackers: what they get, what they never get, and that their failure does not end a run."""

import json
import logging

import pytest

from fed_dpsd import api
from fed_dpsd.errors import UserError
from fed_dpsd.server import trackers
from fed_dpsd.server.run_folder import new_run_folder
from fed_dpsd.server.trackers import Tracking
from fed_dpsd.server.words import describe_start
from tests.conftest import SMALL
from tests.every import every

EPSILON = "privacy/epsilon_proven/record/add_remove/trust_nobody/seeded_noise"
SPENT = "rounds/epsilon_spent/record/add_remove/trust_nobody/seeded_noise"


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self, folder, settings):
        self.settings, self.rounds, self.run, self.closed = settings, [], {}, None
        Kept.last = self

    def log(self, numbers, step):
        if EPSILON in numbers:
            self.run = numbers
        else:
            self.rounds.append((step, numbers))

    def close(self, completed):
        self.closed = completed


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Kept)
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    return Kept


def tracked(tmp_path, name, **options):
    return api.run(*SMALL, f"out={tmp_path}/runs", f"tracker={name}", progress=False, **options)


def logged(run):
    return [json.loads(line) for line in (run.folder / "rounds.jsonl").read_text().splitlines()]


def test_a_tracker_gets_the_numbers_of_rounds_and_of_the_run(kept, tmp_path):
    run = tracked(tmp_path, "wandb")
    assert [step for step, _ in kept.last.rounds] == [1, 2, 3]
    for (_, numbers), line in zip(kept.last.rounds, logged(run), strict=True):
        assert numbers["rounds/student_accuracy"] == line["student_accuracy"]
        assert numbers["rounds/bytes_to_server"] == line["bytes_to_server"]
        assert numbers["rounds/refusing_clients"] == 0
    assert kept.last.run["run/accuracy/student"] == run.summary["accuracy"]["student"]
    assert run.summary["diagnostics"]["accuracy"]["ensemble"]  # no epsilon covers it
    assert not any("ensemble" in name for name in kept.last.run)
    assert kept.last.run["run/queries/bytes_to_clients"] == 2 * 3 * 64 * (64 + 40)
    assert kept.last.run[EPSILON] == run.summary["privacy"]["proven"][0]["epsilon"]
    assert kept.last.closed is True


def test_every_epsilon_names_its_meaning_and_no_setting_names_a_place(kept, tmp_path):
    tracked(tmp_path, "wandb")
    names = [name for name in kept.last.run if "epsilon" in name]
    assert names.pop(0) == "privacy/epsilon_published/no_guarantee"
    assert len(names) == 2 * 6  # proven and spent
    for name in names:
        _, _, unit, relation, trust, noise = name.split("/")
        assert unit in ("record", "patient", "client")
        assert relation in ("add_remove", "replace_one")
        assert (trust, noise) == ("trust_nobody", "seeded_noise")
    assert kept.last.settings["rounds"] == 3
    assert kept.last.settings["data.shape"] == "[1, 8, 8]"
    assert str(tmp_path) not in json.dumps(kept.last.settings)
    assert not {"out", "cache", "run_folder"} & kept.last.settings.keys()


def test_a_resumed_run_is_tracked_from_there(kept, tmp_path):
    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.run(*SMALL, f"out={tmp_path}/runs", "tracker=wandb", progress=stop)
    assert [step for step, _ in kept.last.rounds] == [1]
    assert kept.last.closed is False
    (folder,) = (tmp_path / "runs").iterdir()
    api.resume(folder, progress=False)
    assert [step for step, _ in kept.last.rounds] == [2, 3]


def test_a_tracker_that_fails_is_dropped_and_the_run_continues(kept, tmp_path, monkeypatch, caplog):
    def full(self, numbers, step):
        raise OSError("no space left")

    monkeypatch.setattr(Kept, "log", full)
    with caplog.at_level(logging.WARNING):
        assert tracked(tmp_path, "wandb").summary["status"] == "completed"
    said = "tracker=wandb failed and is no longer used: OSError: no space left"
    assert caplog.text.count(said) == 1
    assert kept.last.closed is None


def test_a_tracker_that_cannot_be_opened_ends_the_run_before_anything_is_asked(
    kept, tmp_path, monkeypatch
):
    def denied(self, folder, settings):
        raise ValueError("no API key")

    monkeypatch.setattr(Kept, "__init__", denied)
    with pytest.raises(
        UserError, match=r"tracker=wandb cannot be opened \(.*no API key.*tracker=none"
    ):
        tracked(tmp_path, "wandb")
    (folder,) = (tmp_path / "runs").iterdir()
    assert "no API key" in api.read_summary(folder)["error"]
    assert not (folder / "rounds.jsonl").exists()


@every("name", ["tensorboard", "wandb", "mlflow"])
@every("engine", ["local", "flower"])
def test_a_missing_package_names_the_extra_before_a_folder_is_made(
    tmp_path, monkeypatch, name, engine
):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"tracker={name} .*: pip install 'fed-dpsd\[{name}\]'"):
        tracked(tmp_path, name, engine=engine)
    assert not (tmp_path / "runs").exists()


def test_without_a_tracker_nothing_is_left_next_to_the_run(small):
    experiment = small()
    folder = new_run_folder(experiment)
    tracking = Tracking(experiment, folder)
    tracking.open()
    tracking.log({"round": 1, "refused": {}})
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "inputs.json",
        "name",
        "overrides.json",
        "versions.json",
    ]


# --- the real packages ---


def test_tensorboard_reads_what_a_run_wrote(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    run = tracked(tmp_path, "tensorboard")
    read = event_accumulator.EventAccumulator(str(run.folder / "tensorboard"))
    read.Reload()
    scores = [event.value for event in read.Scalars("rounds/student_accuracy")]
    assert scores == pytest.approx([line["student_accuracy"] for line in logged(run)])
    assert [event.step for event in read.Scalars("rounds/student_loss")] == [1, 2, 3]
    (epsilon,) = read.Scalars(EPSILON)
    assert epsilon.value == pytest.approx(run.summary["privacy"]["proven"][0]["epsilon"])
    curve = [event.value for event in read.Scalars(SPENT)]
    assert curve == pytest.approx([line["spent"]["epsilon"] for line in logged(run)])
    assert curve == sorted(set(curve))
    (tag,) = read.Tags()["images"]
    assert [event.step for event in read.Images(tag)] == [1, 2, 3]
    assert read.Images(tag)[0].encoded_image_string.startswith(b"\x89PNG")
    for path in (run.folder / "tensorboard").iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()


def test_a_run_prints_the_command_that_shows_its_curves(tmp_path, small, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for tracker, lines in (
        ("tensorboard", ["curves and images: tensorboard --logdir runs"]),
        ("none", []),
    ):
        experiment = small(f"tracker={tracker}")
        said = list(describe_start(experiment, tmp_path / "runs" / "one"))
        assert [line for line in said if "logdir" in line] == lines


def test_weights_and_biases_keeps_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tracked(tmp_path, "wandb")
    (record,) = (run.folder / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert EPSILON.encode() in content
    assert b"rounds/student_accuracy" in content
    assert run.folder.name.encode() in content
    assert str(tmp_path).encode() not in content


def test_mlflow_reads_what_a_run_logged(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tracked(tmp_path, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("fed-dpsd")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == run.folder.name
    assert found.info.status == "FINISHED"
    assert found.data.metrics[EPSILON] == run.summary["privacy"]["proven"][0]["epsilon"]
    history = client.get_metric_history(found.info.run_id, "rounds/student_accuracy")
    assert [metric.value for metric in history] == [
        line["student_accuracy"] for line in logged(run)
    ]
    assert str(tmp_path) not in json.dumps([found.data.params, found.data.tags])
