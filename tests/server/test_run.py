"""The loop: its files, resuming, and failing without losing anything."""

import json
import os
import re
import shutil
import signal
import sys
import time

import numpy as np
import pytest
from PIL import Image

from fed_dpsd import cli
from fed_dpsd.accounts.words import PrivacyCard, sentences
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import partitions
from fed_dpsd.methods.method import ReplayBuffer, State
from fed_dpsd.models import precision
from fed_dpsd.server import checkpoint
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder, open_run_folder
from fed_dpsd.server.summary import OF_TEACHERS, result_line, round_text, scores_of
from tests.every import every
from tests.forks import finished, fork

DENSE = ("training=plain", "answers=probabilities", "method=dense", "method.generator_steps=2")
FEDAVG = ("training=plain", "answers=probabilities", "method=fedavg", "teacher.same_start=true")
WITHOUT_COUNTS = "training.count_fraction=null"
PRIVATE = (
    "training=dp_sgd",
    "answers=probabilities",
    "training.steps=5",
    "model=scattering",
    "model.student_width=4",
)


def complete(experiment, folder=None):
    folder = folder or new_run_folder(experiment)
    lines = []
    summary = runs.run(experiment, LocalFederation(experiment, folder), folder, lines.append)
    return folder, summary, lines


@pytest.fixture(scope="module")
def completed():
    return {}


@pytest.fixture
def straight(small, completed):
    """Complete runs, each made once: to be read, and never to be written to."""

    def run(*overrides):
        if overrides not in completed:
            completed[overrides] = complete(small(*overrides))
        return completed[overrides]

    return run


def test_what_a_run_leaves_behind(straight):
    folder, summary, lines = straight()
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert (summary["status"], summary["error"], summary["engine"]) == ("completed", None, "local")
    assert summary["accuracy"]["student"] == lines[-1]["student_accuracy"]
    assert summary["confusion"] == lines[-1]["student_confusion"]
    right = sum(summary["confusion"][label][label] for label in range(10))
    assert right / sum(map(sum, summary["confusion"])) == summary["accuracy"]["student"]
    assert all(summary["accuracy"][role] is None for role in OF_TEACHERS)  # no epsilon covers them
    scores = scores_of(summary, "accuracy")
    assert len(scores["clients"]) == 2
    assert all(0 <= scores[name] <= 1 for name in ("ensemble", "vote"))
    assert summary["diagnostics"]["records_of_largest_client"] == max(
        map(len, partitions(open_run_folder(folder)))
    )
    assert summary["queries"] == {
        "answered_per_client": 192,
        "forward_answers": 2 * 3 * 64,
        "backward_answers": 0,
        "bytes_to_clients": 2 * 3 * 64 * (64 + 40),
        "bytes_to_server": 2 * 3 * 64 * 10,  # a byte for each class
    }
    logged = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert logged == json.loads(json.dumps(lines))
    assert [line["round"] for line in logged] == [1, 2, 3]
    assert [line["round_queries"] for line in logged] == [64] * 3
    assert sum(line["round_seconds"] for line in logged) == pytest.approx(logged[-1]["seconds"])
    assert f"64 queries · {logged[2]['round_seconds']:.1f} s" in round_text(logged[2])
    names = {path.name for path in (folder / "checkpoint").glob("round_*")}
    assert names == {f"round_0000{n}.{kind}" for n in (2, 3) for kind in ("json", "safetensors")}
    assert len(list((folder / "checkpoint" / "bank").iterdir())) == 3
    sent = sorted(path.name for path in (folder / "asks").iterdir())
    assert sent == ["00002_answers.npz", "00003_answers.npz"]  # the first is in both checkpoints
    assert Image.open(folder / "samples" / "round_00003.png").size == (82, 82)
    assert len(list((folder / "test_images").iterdir())) == 10
    assert json.loads((folder / "versions.json").read_text())["torch"]
    assert not list(folder.rglob("*.tmp"))


def test_without_diagnostics_no_teacher_is_scored(straight):
    """The student is the same."""
    (_, scored, _), (_, summary, _) = straight(), straight("diagnostics=false")
    scores = scores_of(summary, "accuracy")
    assert scores["student"] == scores_of(scored, "accuracy")["student"]
    assert scores["ensemble"] is None
    assert not scores["clients"]
    assert summary["student_sha256"] == scored["student_sha256"]


def test_the_privacy_card_of_a_summary(small):
    _, summary, _ = complete(small("privacy.epsilon_stated=10"))
    card = summary["privacy"]
    assert (card["training"], card["answers"]) == ("plain", "label")
    assert (card["epsilon_stated"], card["epsilon_published"]) == (10, 10)
    assert [(row["unit"], row["relation"]) for row in card["proven"]] == [
        ("record", "add_remove"),
        ("record", "replace_one"),
        ("patient", "add_remove"),
        ("patient", "replace_one"),
        ("client", "add_remove"),
        ("client", "replace_one"),
    ]
    for row in card["proven"]:
        assert row["epsilon"] == row["spent"] == pytest.approx(1_920)
        assert (row["basis"], row["beside"]) == ("answers", [])
        assert (row["queries"], row["trust"], row["delta"]) == (192, "nobody", 0)
        assert row["notes"][:6] == [
            *("seeded noise", "per run", "tuning not covered"),
            "delta should be below 1 / (records of each client)",
            "test images are taken as public",
            "the partition among simulated clients is taken as given",
        ]
        assert row["notes"][6:] == (
            ["a patient known at one client only"] if row["unit"] == "patient" else []
        )
    largest = max(map(len, partitions(small())))
    assert not re.search(rf"\b{largest}\b", json.dumps(card))  # cards are public
    line = result_line(small(), summary)
    assert "published 10 (label) · proven 1,921 (record, add_remove), 1,921 (replace_one)" in line
    assert ", trust nobody, delta 0, seeded noise: " in line
    assert line.endswith("no meaningful protection")


@pytest.mark.slow
def test_an_infinite_published_epsilon_is_not_shown_next_to_a_finite_proof(straight, small):
    """It would read as no privacy at all; with nothing proven it is the truth."""
    _, summary, _ = straight(*PRIVATE)
    assert " · nothing published (probabilities) · proven " in result_line(small(), summary)
    _, summary, _ = straight("training=plain", "answers=probabilities")
    assert " · published inf (probabilities) · proven inf (" in result_line(small(), summary)


def test_the_unit_that_was_asked_for_comes_first(small):
    """The patient's epsilon is the one in every line, and the card's first row."""
    own = ("data.records_per_patient=2", "training.unit=patient", "training.records_per_patient=2")
    experiment = small(*PRIVATE, *own, "privacy.target_epsilon=3", "rounds=1")
    _, summary, (line,) = complete(experiment)
    card = summary["privacy"]
    asked, *others = card["proven"]
    assert (card["unit"], asked["unit"], asked["relation"]) == ("patient", "patient", "add_remove")
    assert asked["epsilon"] == pytest.approx(3, abs=0.01)
    record = next(row for row in others if row["unit"] == "record")
    assert record["epsilon"] > 5  # the control: it would be another number
    assert "proven 3 (patient, add_remove), " in result_line(experiment, summary)
    assert "(record" not in result_line(experiment, summary)
    assert (line["spent"]["unit"], line["spent"]["epsilon"]) == ("patient", asked["epsilon"])
    assert "epsilon 3 spent (patient, add_remove, seeded noise)" in round_text(line)
    said = list(sentences(PrivacyCard(card), experiment.seeded))
    assert said[0].startswith("for all records of a patient at a client: epsilon 3 for one added")
    assert sum("patient" in sentence for sentence in said) == 1


def test_a_method_that_releases_nothing_proves_nothing(small):
    """An epsilon of 0 in the last line would look like the result of a proof."""
    experiment = small("method=local", "rounds=1")
    _, summary, _ = complete(experiment)
    assert [row["notes"] for row in summary["privacy"]["proven"]] == [["nothing is released"]] * 6
    line = result_line(experiment, summary)
    assert line.endswith("nothing is released")
    assert "proven" not in line


def test_a_summary_without_simulation_has_no_exact_accuracies(small):
    noise = "training=plain", "answers=gradient", "answers.noise_at=server"
    _, summary, _ = complete(small("federation.simulation=false", "rounds=1", *noise))
    for metric in ("accuracy", "auroc"):
        scores = scores_of(summary, metric)
        assert all(scores.get(role) is None for role in OF_TEACHERS)
        assert scores["student"] is not None


@pytest.mark.slow
def test_a_run_folder_records_the_precision(small, monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: True)
    private = ("training=dp_sgd", "training.steps=2")
    hashes = set()
    for overrides, asked, teachers, student in (
        (("precision=auto",), "auto", "float32", "float32"),
        (("precision=bfloat16",), "bfloat16", "bfloat16", "bfloat16"),
        (("precision=bfloat16", *private), "bfloat16", "float32", "bfloat16"),
    ):
        folder, summary, _ = complete(small(*overrides, "rounds=1"))
        found = json.loads((folder / "summary.json").read_text())["precision"]
        assert found == {"asked": asked, "teachers": teachers, "student": student}
        hashes.add(summary["student_sha256"])
    assert len(hashes) == 3


def test_precision_bfloat16_goes_with_a_student_that_computes_in_float64(small, monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: True)  # torch emulates it elsewhere
    settings = ("precision=bfloat16", "model=scattering", "rounds=1", "diagnostics=false")
    _, summary, _ = complete(small(*settings))
    assert summary["status"] == "completed"


def test_a_budget_that_ends_early_is_a_completed_run_that_spent_less(small):
    """Every fifth student would have been scored, and the last one is."""
    settings = ("answers.epsilon_per_answer=1", "answers.k=3", "privacy.budget=100")
    _, summary, lines = complete(small(*settings, "evaluate_every=5"))
    assert summary["status"] == "completed"
    assert lines[-1]["student_accuracy"] is None
    assert summary["accuracy"]["student"] is not None
    assert summary["confusion"] is not None
    assert [line["round"] for line in lines] == [1, 2, 2]  # the last student of what was answered
    assert len(lines[-1]["refused"]) == 2
    row = summary["privacy"]["proven"][0]
    assert (row["queries"], summary["queries"]["answered_per_client"]) == (192, 128)
    assert row["spent"] < 100 < row["epsilon"]


@pytest.mark.parametrize(
    ("settings", "target"),
    [
        (("training=plain", "answers=gradient"), 0.3),
        (("training=plain", "answers=votes"), 11),
        (("training=dp_sgd", "answers=probabilities", "training.steps=5"), 2.5),
        pytest.param(
            (
                "training=dp_sgd",
                "answers=probabilities",
                "training.steps=5",
                "training.sample_rate=0.2",
                WITHOUT_COUNTS,
            ),
            1.0,
            marks=pytest.mark.slow,  # to calibrate
        ),
    ],
    ids=str,
)
def test_a_calibrated_run_spends_what_was_asked_and_is_answered_to_its_end(small, settings, target):
    """With the target as the budget: at most the target, and at least 98 % of it."""
    asked = (f"privacy.target_epsilon={target}", f"privacy.budget={target}", "diagnostics=false")
    _, summary, lines = complete(small(*settings, *asked, "num_clients=1"))
    row = summary["privacy"]["proven"][0]
    assert (row["unit"], row["relation"]) == ("record", "add_remove")
    assert 0.98 * target <= row["spent"] <= target
    assert row["spent"] == row["epsilon"]
    assert not any(line["refused"] for line in lines)


# --- failing ---


class Breaking(LocalFederation):
    """Clients that fail in a round."""

    error: BaseException = RuntimeError("the disk\nis full")
    round = 3

    def _deliver(self, request):
        if request.query_id == self.round:
            raise self.error
        return super()._deliver(request)


def failed(experiment, folder, error, number):
    """The summary of a run whose clients fail in a round."""
    federation = Breaking(experiment, folder)
    federation.error, federation.round = error, number
    with pytest.raises(type(error)):
        runs.run(experiment, federation, folder, lambda line: None)
    return json.loads((folder / "summary.json").read_text())


@every(
    ("error", "expected"),
    [
        (UserError("no node"), "no node"),
        (KeyboardInterrupt(), "stopped by Ctrl-C"),
        (SystemExit(143), "stopped by SIGTERM"),
    ],
)
def test_a_failed_run_says_why(small, error, expected):
    experiment = small("rounds=1", "diagnostics=false")
    summary = failed(experiment, new_run_folder(experiment), error, 1)
    assert (summary["status"], summary["error"]) == ("failed", expected)


def test_a_failed_run_keeps_all_that_was_done(small):
    experiment = small("training=plain", "answers=probabilities")
    folder = new_run_folder(experiment)
    summary = failed(experiment, folder, RuntimeError("the disk\nis full"), 3)
    expected = ("failed", "RuntimeError: the disk is full")
    assert (summary["status"], summary["error"]) == expected
    assert scores_of(summary, "accuracy")["ensemble"] is not None
    assert summary["queries"]["answered_per_client"] == 128
    assert checkpoint.load(folder / "checkpoint").round == 2
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 2


GENERATORS = ("method.generator_steps=2", "model.student=cnn_bn")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("training=plain", "answers=probabilities"), marks=pytest.mark.slow),
        DENSE,
        pytest.param(FEDAVG, marks=pytest.mark.slow),
        GENERATORS,
    ],
    ids=str,
)
def test_a_run_stopped_after_its_first_round_is_the_straight_one(small, straight, settings):
    """Weights and class counts, fetched before the first round that is left, count once.

    Generators are trained against a student that, where it was not resumed, has just been tested.
    """
    experiment = small(*settings)
    folder = new_run_folder(experiment)

    def stop(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(experiment, LocalFederation(experiment, folder), folder, stop)
    _, resumed, lines = complete(experiment, folder)
    _, whole, _ = straight(*settings)
    assert [line["round"] for line in lines] == [2, 3]
    assert resumed["status"] == "completed"
    assert resumed["queries"] == whole["queries"]
    assert resumed["student_sha256"] == whole["student_sha256"]
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 3


@pytest.fixture
def copied(straight, tmp_path):
    """The folder of a complete run, to be written to, and its summary."""

    def copy_of(*overrides):
        folder, summary, _ = straight(*overrides)
        return shutil.copytree(folder, tmp_path / "copied"), summary

    return copy_of


def test_saved_images_are_read_from_the_checkpoint_and_take_no_memory(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 8, 8), dtype=np.uint8)
    rows = np.zeros((5, 2), np.float32)
    state = State(1, {}, [ReplayBuffer(images, rows, rows)])
    checkpoint.save(tmp_path, state)
    for saved in (state, checkpoint.load(tmp_path)):
        (part,) = saved.buffer
        assert isinstance(part.images, np.memmap)
        assert (part.images == images).all()
        assert not part.images.flags.writeable


def test_a_log_that_holds_less_than_its_checkpoint_is_named(small, copied):
    experiment = small("rounds=2")
    folder, _ = copied("rounds=2")
    expected = r"rounds.jsonl does not hold the 2 rounds .* delete the"
    for content in ("", "{}\n", '{"round": 1}\n{"rou'):
        (folder / "rounds.jsonl").write_text(content)
        with pytest.raises(UserError, match=expected):
            complete(experiment, folder)
        assert (folder / "rounds.jsonl").read_text() == content


def test_a_run_whose_folder_is_renamed_is_the_same_run(copied):
    folder, first = copied()
    moved = folder.rename(folder.with_name("my baseline"))
    (moved / "summary.json").unlink()
    _, again, _ = complete(open_run_folder(moved), moved)
    assert again["student_sha256"] == first["student_sha256"]
    assert again["privacy"] == first["privacy"]


def test_a_corrupt_checkpoint_names_the_file_and_the_way_back(small, copied):
    experiment = small()
    folder, first = copied()
    place = folder / "checkpoint"
    names = ("bank/round_00003.safetensors", "round_00003.safetensors", "round_00003.json")
    for path in (place / name for name in names):
        content = path.read_bytes()
        path.write_bytes(content[:-7])
        with pytest.raises(UserError, match=r"round_00003.* is corrupt .*delete round_00003.json"):
            complete(experiment, folder)
        assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
        path.write_bytes(content)
    (place / "round_00003.json").unlink()
    _, again, _ = complete(experiment, folder)
    assert again["student_sha256"] == first["student_sha256"]


def test_a_missing_checkpoint_file_is_named(small, copied):
    experiment = small("rounds=1")
    folder, _ = copied("rounds=1")
    (folder / "checkpoint" / "round_00001.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"it is missing\); delete the folder .*start the run again"
    ):
        complete(experiment, folder)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, pytest.param(0.7, marks=pytest.mark.slow)])
def test_kill_nine_at_any_moment_then_resume_gives_the_straight_run(
    small, straight, tmp_path, delay
):
    """The killed process runs the real command; `delay` is seconds after its first round."""
    experiment = small("rounds=6", f"run_folder={tmp_path}/killed")
    folder = new_run_folder(experiment)

    def resume():
        sys.argv = ["fed-dpsd", "resume", str(folder)]
        cli.main()

    child = fork(resume, tmp_path / "log")
    log = folder / "rounds.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and log.read_text()):
        time.sleep(0.01)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    finished(child)
    _, resumed, _ = complete(open_run_folder(folder), folder)
    _, whole, _ = straight("rounds=6")
    assert resumed["student_sha256"] == whole["student_sha256"]
    assert resumed["queries"]["answered_per_client"] == 6 * 64


@pytest.mark.slow
def test_students_are_scored_every_so_many_rounds_and_at_the_end(small, straight):
    """Scoring less often changes no student; a round without a score says so."""
    _, every, _ = straight("rounds=5")
    _, summary, lines = complete(small("rounds=5", "evaluate_every=2"))
    scored = [line["student_accuracy"] is not None for line in lines]
    assert scored == [False, True, False, True, True]
    assert "student not scored" in round_text(lines[0])
    assert summary["accuracy"]["student"] == lines[-1]["student_accuracy"]
    assert scores_of(summary, "accuracy") == scores_of(every, "accuracy")
    assert summary["student_sha256"] == every["student_sha256"]
