"""Scores of a run's summary: of the student, of the teachers and of their ensembles."""

import io
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from sklearn.metrics import roc_auc_score

from fed_dpsd.accounts.words import PARTITION_NOTE, PATIENT_NOTE, SHARED_NOTE
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.experiment import load_data, partitions
from fed_dpsd.models.inference import Images
from fed_dpsd.protocol import Request
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder, open_run_folder
from fed_dpsd.server.summary import result_line, scores_of
from tests.server.test_run import PRIVATE, complete


def two_digits(small, folder, test_label=None, *overrides):
    """Zeros and ones in a parquet folder; `test_label` keeps one of them in the test split."""
    digits = load_data(small().config.data, small().config.cache)
    for name, split in (("train", digits.train), ("test", digits.test)):
        kept = split.labels < 2
        if name == "test" and test_label is not None:
            kept = split.labels == test_label
        pictures = []
        for image in split.images[kept]:
            buffer = io.BytesIO()
            Image.fromarray(image[0]).save(buffer, "PNG")
            pictures.append({"bytes": buffer.getvalue()})
        patients = [f"{name} {number // 2}" for number in range(kept.sum())]  # of two neighbours
        columns = {"image": pictures, "label": split.labels[kept], "patient": patients}
        table = pyarrow.table(columns)
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    data = ("data=folder", f"data.path={folder}", "data.shape=[1,8,8]", "data.num_classes=2")
    return small(*data, "rounds=1", "partition=iid", *overrides)


def area(experiment, probabilities):
    labels = load_data(experiment.config.data, experiment.config.cache).test.labels
    classes = [1] if experiment.config.data.num_classes == 2 else range(10)
    return np.mean([roc_auc_score(labels == k, probabilities[:, k]) for k in classes])


@pytest.mark.parametrize("num_classes", [2, 10])
def test_the_areas_of_a_summary_are_those_of_its_teachers_and_its_student(
    small, tmp_path, monkeypatch, num_classes
):
    students = []
    predict = Images.predict

    def recorded(*given):
        students.append(predict(*given))
        return students[-1]

    monkeypatch.setattr(Images, "predict", recorded)
    experiment = two_digits(small, tmp_path) if num_classes == 2 else small()
    folder, summary, lines = complete(experiment)
    assert len(students) == len(lines)  # one evaluation a round serves both metrics
    teachers = list(LocalFederation(experiment, folder).diagnose())
    expected = {
        "student": area(experiment, students[-1]),
        "ensemble": area(experiment, np.concatenate(teachers).mean(0)),
        "weighted_ensemble": None,
        "clients": [area(experiment, each.mean(0)) for each in teachers],
    }
    assert scores_of(summary, "auroc") == {
        role: value and pytest.approx(value, abs=1e-6) for role, value in expected.items()
    }
    assert len(set(expected["clients"])) == 2
    assert summary["auroc"]["student"] == lines[-1]["student_auroc"]


def test_the_result_line_shows_the_area_of_two_classes_only(small, tmp_path):
    _, summary, _ = complete(small("rounds=1"))
    assert summary["auroc"]["student"] is not None
    assert "AUROC" not in result_line(small(), summary)
    experiment = two_digits(small, tmp_path)
    _, summary, _ = complete(experiment)
    summary["accuracy"] |= {"student": 0.854, "ensemble": 0.9}
    summary["auroc"] |= {"student": 0.944, "ensemble": 0.96}
    line = result_line(experiment, summary)
    assert line.startswith("student 85.4 % (AUROC 0.944) · ensemble 90.0 % (AUROC 0.960) · publ")
    summary["accuracy"]["ensemble"] = summary["auroc"]["ensemble"] = None
    line = result_line(experiment, summary)
    assert line.startswith("student 85.4 % (AUROC 0.944) · published")


def test_a_test_split_that_lacks_a_class_has_accuracies_and_no_areas(small, tmp_path):
    experiment = two_digits(small, tmp_path, test_label=1)
    _, summary, _ = complete(experiment)
    unknown = dict.fromkeys(("student", "ensemble", "weighted_ensemble"))
    assert scores_of(summary, "auroc") == unknown | {"clients": [None, None]}
    accuracies = scores_of(summary, "accuracy")["clients"]
    assert len(accuracies) == 2
    assert all(isinstance(value, float) for value in accuracies)
    assert "AUROC" not in result_line(experiment, summary)


def test_a_client_without_a_teacher_has_no_scores_and_no_part_in_the_ensembles(small):
    class Halved(LocalFederation):
        def diagnose(self):
            first, second = super().diagnose()
            yield from (first, np.full_like(second, np.nan))

    experiment = small("rounds=1")
    folder = new_run_folder(experiment)
    summary = runs.run(experiment, Halved(experiment, folder), folder, lambda line: None)
    for metric in ("accuracy", "auroc"):
        scores = scores_of(summary, metric)
        assert scores["clients"] == [scores["ensemble"], None]
        assert scores["ensemble"] is not None


def notes(summary):
    return {note for row in summary["privacy"]["proven"] for note in row["notes"]}


@pytest.mark.slow
def test_patients_are_at_one_client_and_their_rows_need_no_caveat_of_several(small, tmp_path):
    by_patient = *PRIVATE, "data.patient_column=patient", "training.unit=patient"
    experiment = two_digits(small, tmp_path, None, *by_patient)
    train = load_data(experiment.config.data, experiment.config.cache).train
    homes = [set(train.patients[indices]) for indices in partitions(experiment)]
    assert len(homes[0] | homes[1]) == len(homes[0]) + len(homes[1]) == len(set(train.patients))
    _, summary, _ = complete(experiment)
    _, alone, _ = complete(two_digits(small, tmp_path, None, *by_patient, "num_clients=1"))
    assert notes(summary) - notes(alone) == {PARTITION_NOTE}
    assert PATIENT_NOTE not in notes(summary)
    _, unknown, _ = complete(two_digits(small, tmp_path, None, *PRIVATE))  # the control
    assert PATIENT_NOTE in notes(unknown)


def test_patients_in_both_splits_are_a_caveat_of_every_number_and_are_not_counted(small, tmp_path):
    by_patient = *PRIVATE, "data.patient_column=patient"
    two_digits(small, tmp_path)
    (tmp_path / "test.parquet").write_bytes((tmp_path / "train.parquet").read_bytes())
    data = ("data=folder", f"data.path={tmp_path}", "data.shape=[1,8,8]", "data.num_classes=2")
    data += ("rounds=1", "data.shared_patients=allow", *by_patient)
    _, summary, _ = complete(experiment := small(*data))
    assert all(SHARED_NOTE in row["notes"] for row in summary["privacy"]["proven"])
    shared = len(set(load_data(experiment.config.data, experiment.config.cache).test.patients))
    assert not re.search(rf"\b{shared}\b", str(notes(summary)))  # cards are public
    _, refusing, _ = complete(two_digits(small, tmp_path, None, *by_patient))
    assert SHARED_NOTE not in notes(refusing)


@pytest.mark.parametrize(
    "settings",
    [
        PRIVATE,
        (
            "training=plain",
            "answers=probabilities",
        ),
    ],
    ids=str,
)
def test_the_weighted_ensemble_is_that_of_the_released_counts(small, settings):
    """Noisy counts of DP teachers, exact counts without privacy."""
    folder, summary, _ = complete(small(*settings, "rounds=1"))
    experiment = open_run_folder(folder)
    federation = LocalFederation(experiment, folder)
    request = Request.without_images("counts", (1, 8, 8), 10)
    counts = {client: given.values[0].clip(0) for client, given in federation.each(request).items()}
    weighted = sum(
        counts[client] / sum(counts.values()) * teachers[0]
        for client, teachers in enumerate(federation.diagnose())
    )
    test = load_data(experiment.config.data, experiment.config.cache).test
    score = (weighted.argmax(1) == test.labels).mean()
    assert summary["accuracy"]["weighted_ensemble"] == pytest.approx(score, abs=1e-6)
    assert summary["auroc"]["weighted_ensemble"] == pytest.approx(
        area(experiment, weighted / weighted.sum(1, keepdims=True)), abs=1e-6
    )
    assert summary["accuracy"]["covered_by_epsilon"] == (settings is PRIVATE)
    assert summary["queries"]["answered_per_client"] == 64  # counts are no queries
    if settings is not PRIVATE:
        labels = [site._teachers._shards[0].labels for site in federation._sites.values()]
        exact = [np.bincount(own, minlength=10) for own in labels]
        assert (np.stack(list(counts.values())) == exact).all()
