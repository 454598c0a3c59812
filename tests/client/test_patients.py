"""Training by patient at a client: shards, digests, counts, and what files and ledgers say."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import yaml

from fed_dpsd.accounts.card import planned_run, privacy_card
from fed_dpsd.client import hospital as hospitals
from fed_dpsd.client.teachers import Teachers
from fed_dpsd.data.intake import Records
from fed_dpsd.data.partition import made_up_patients
from fed_dpsd.engines.clients import Clients
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.experiment import from_json, load_data, partitions
from fed_dpsd.privacy.accounting import best_bound
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS
from fed_dpsd.protocol import Refusal, Response
from fed_dpsd.server.words import describe_start
from tests.every import every
from tests.hospitals import answer, request, site_file
from tests.ledgers import entries_of
from tests.proofs import spent
from tests.server.test_scores import two_digits

PRIVATE = ("training=dp_sgd", "answers=probabilities", "training.steps=2")
BY_PATIENT = (*PRIVATE, "training.unit=patient", "training.records_per_patient=3")
MADE_UP = (*BY_PATIENT, "data.records_per_patient=3")
NAMED = ("data=folder", "data.shape=[1,8,8]", "data.num_classes=10", "data.patient_column=who")


@pytest.fixture
def records(small):
    config = small().config
    split = load_data(config.data, config.cache).train.take(np.arange(60))
    return Records(split.images, split.labels, np.arange(60) % 20)


def make(experiment, records):
    return Teachers(experiment.config, experiment.training, 0, records, np.arange(len(records)))


def weights(teachers):
    return [
        np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])
        for model in teachers.models
    ]


# --- teachers ---


def test_shards_are_by_patient_and_one_patient_changes_one_teacher(small, records):
    """Whatever ids the site gives: the theorem needs each patient in one shard."""
    experiment = small(*MADE_UP, "teachers_per_client=4", "training.noise_multiplier=1e-3")
    before = make(experiment, records)
    assert sum(len(set(shard.patients)) for shard in before._shards) == 20
    images = records.images.copy()
    images[records.patients == 7] = 255 - images[records.patients == 7]
    after = make(experiment, replace(records, images=images))
    changed = [(a != b).any() for a, b in zip(weights(before), weights(after), strict=True)]
    own = [7 in shard.patients for shard in before._shards]
    assert changed == own
    assert sum(own) == 1


def test_records_that_change_hands_get_other_noise(small, records):
    """The same images and labels, in other patients: the same noise would show the difference."""
    experiment = small(*MADE_UP, "training.count_fraction=1.0")
    other = replace(records, patients=np.arange(60) // 3)
    one, two = make(experiment, records), make(experiment, other)
    assert one.digests != two.digests
    assert one.records_digest != two.records_digest
    by_record = small(*PRIVATE)
    assert make(by_record, records).digests == make(by_record, other).digests


def test_a_training_by_record_does_not_read_who_the_patients_are(small, records):
    named, unnamed = records, replace(records, patients=None)
    by_record = small(*PRIVATE)
    assert make(by_record, named).digests == make(by_record, unnamed).digests


def test_teachers_see_each_patients_records_and_their_copies(small, records, monkeypatch):
    seen = []
    monkeypatch.setattr(DPSGD, "train", lambda self, _, inputs, labels, rng: seen.append(labels))
    expected = np.stack([records.labels[records.patients == number] for number in range(20)])
    for model, copies in (("cnn", 1), ("scattering", 2)):
        settings = f"model={model}", "model.teacher_width=4", f"training.copies={copies}", "seed=21"
        assert make(small(*MADE_UP, *settings), records).models
        labels = seen.pop()
        assert (labels.numpy() == expected.repeat(copies, axis=1)).all(), model
        assert (labels[:, 0] != labels[:, -1]).any(), model  # a patient's labels may differ


def test_class_counts_are_of_patients(small, records):
    experiment = small(*MADE_UP, "training.noise_multiplier=1e-6", "training.count_fraction=1.0")
    counts = make(experiment, records).class_counts[0, 0]
    assert counts == pytest.approx(np.bincount(records.labels, minlength=10) / 3, abs=1e-4)
    one = replace(records, patients=np.zeros(60, np.int64))
    counts = make(experiment, one).class_counts[0, 0]
    assert counts == pytest.approx(np.bincount(records.labels[:3], minlength=10) / 3, abs=1e-4)


# --- patients that are missing, or made up ---


def test_records_without_patients_are_an_error_before_anything_is_trained(small, records):
    with pytest.raises(UserError, match=r"the records name no patients; give data.patient_column"):
        make(small(*MADE_UP), replace(records, patients=None))


@every(
    ("overrides", "problem"),
    [
        (
            BY_PATIENT,
            r"training.unit=patient: .*data.patient_column, or data.records_per_patient=N",
        ),
        (
            (*MADE_UP, "federation=deployment"),
            "data.records_per_patient=3 makes up patients, which only simulations may do",
        ),
        (("data.records_per_patient=0",), "data.records_per_patient=0 must be >= 1"),
        (
            ("data.records_per_patient=2", "data.patient_column=who"),
            "records_per_patient=2 makes up patients, and patient_column=who names them",
        ),
    ],
)
def test_a_configuration_whose_patients_are_missing_is_refused(small, overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        small(*overrides)


def test_a_known_patient_lies_in_one_shard_of_all_clients(small, tmp_path):
    """A patient of two records each, at three simulated clients of four teachers."""
    overrides = *BY_PATIENT, "data.patient_column=patient", "num_clients=3"
    experiment = two_digits(small, tmp_path, None, *overrides, "teachers_per_client=4")
    shards = [
        set(shard.patients.tolist())
        for client in range(3)
        for shard in Clients(experiment, tmp_path / "run")[client]._teachers._shards
    ]
    everybody = set(load_data(experiment.config.data, experiment.config.cache).train.patients)
    assert sum(map(len, shards)) == len(set().union(*shards)) == len(everybody) > 100


def test_made_up_patients_have_records_of_one_class_at_one_client(small, tmp_path):
    labels = np.array([1, 0, 1, 1, 0, 1, 1])
    patients = made_up_patients(labels, 2)
    groups = sorted(np.flatnonzero(patients == each).tolist() for each in set(patients.tolist()))
    assert groups == [[0, 2], [1, 4], [3, 5], [6]]
    experiment = small(*MADE_UP)
    site = Clients(experiment, tmp_path)[1]
    (shard,) = site._teachers._shards
    own = load_data(experiment.config.data, experiment.config.cache).train.take(
        partitions(experiment)[1]
    )
    assert (shard.patients == made_up_patients(own.labels, 3)).all()
    assert np.unique(shard.patients, return_counts=True)[1].max() == 3


# --- the unit by default ---


@every(
    ("overrides", "unit", "most"),
    [
        (PRIVATE, "record", 1),
        ((*PRIVATE, "data.records_per_patient=3"), "patient", 6),
        ((*PRIVATE, *NAMED), "patient", 6),
        ((*PRIVATE, *NAMED, "training.records_per_patient=2"), "patient", 2),
        ((*PRIVATE, *NAMED, "training.unit=record"), "record", 1),
        (("training=gep", "answers=probabilities", *NAMED), "patient", 6),
        ((*PRIVATE, "federation=deployment"), "record", 1),  # a coordinator has no records
        ((*PRIVATE, *NAMED, "federation=deployment"), "patient", 6),
        ((*PRIVATE, "federation=deployment", "training.unit=patient"), "patient", 6),
    ],
)
def test_the_unit_is_the_patient_if_the_data_name_patients(small, overrides, unit, most):
    """Everything later reads it from the configuration, which a run folder keeps."""
    experiment = small(*overrides)
    training = experiment.training
    assert (training.unit, training.records_per_patient) == (unit, most)
    assert privacy_card(experiment, experiment.plan)["unit"] == unit
    written = json.loads(experiment.to_json())["training"]
    assert (written["unit"], written["records_per_patient"]) == (unit, most)
    assert from_json(experiment.to_json()).training == training


def test_a_baseline_of_all_records_keeps_the_record(small):
    """Its unit can be no other; the card then promises patients nothing."""
    settings = "method=dgd", "training@method.baseline=dp_sgd", "data.records_per_patient=2"
    experiment = small(*settings)
    assert experiment.method.baseline.unit == experiment.config.method["baseline"]["unit"]
    assert experiment.method.baseline.unit == "record"
    card = privacy_card(experiment, experiment.plan)
    patients = [row["epsilon"] for row in card["proven"] if row["unit"] == "patient"]
    assert set(patients) == {"inf"}


def test_a_wrong_unit_is_one_problem(small):
    with pytest.raises(ConfigError, match=r"training.unit=person must be") as error:
        small(*PRIVATE, *NAMED, "training.unit=person")
    assert len(error.value.problems) == 1


def test_a_run_by_patient_says_so_first(small, tmp_path):
    by_record, by_patient = small(*PRIVATE), small(*PRIVATE, "data.records_per_patient=2")
    said = ["\n".join(describe_start(each, tmp_path)) for each in (by_record, by_patient)]
    assert [", by patient)" in each for each in said] == [False, True]
    first = [str(planned_run(each)).splitlines()[0] for each in (by_record, by_patient)]
    assert [each.startswith("for all records of a patient") for each in first] == [False, True]


# --- calibration, card, ledger ---


def test_the_target_is_spent_on_a_patient_and_the_card_says_who_patients_are(small):
    experiment = small(*MADE_UP, "privacy.target_epsilon=2")
    card = privacy_card(experiment, experiment.plan)
    rows = {(row["unit"], row["relation"]): row for row in card["proven"]}
    assert rows["patient", "add_remove"]["epsilon"] == pytest.approx(2, rel=1e-2)
    replaced = rows["patient", "replace_one"]["epsilon"]
    assert 2 < replaced == rows["record", "add_remove"]["epsilon"]
    assert replaced == rows["record", "replace_one"]["epsilon"]
    assert rows["client", "add_remove"]["epsilon"] == "inf"
    note = "patients are made up, 3 records of one class each, and taken as given"
    assert all(note in row["notes"] for row in rows.values())  # a record's part depends on them
    assert "replaced by a record of the same patient" in rows["record", "replace_one"]["notes"]
    assert card["reason"].endswith("a client's number of patients is not bounded")
    plain = small(*PRIVATE, "privacy.target_epsilon=2")
    (row, *_) = privacy_card(plain, plain.plan)["proven"]
    assert row["epsilon"] == pytest.approx(2, rel=1e-2)
    assert not any("patient" in note for note in row["notes"])


def with_patients(folder, **changes):
    """A site's file whose records name their patients: twenty, of two records each."""
    file = site_file(folder, **changes)
    settings = yaml.safe_load(file.read_text())
    settings["files"]["patient_column"] = "patient"
    file.write_text(yaml.safe_dump(settings))
    return hospitals.open_hospital(file)


def test_a_hospitals_ledger_names_the_unit_and_bounds_a_record(deployed, tmp_path):
    hospital = with_patients(tmp_path)
    text = deployed(*BY_PATIENT).to_json()
    assert isinstance(answer(hospital, text, request()), Response)
    training, _ = entries_of(hospital.ledger)
    assert "unit='patient', records_per_patient=3" in training.mechanism
    costs = {
        pair: best_bound(spent([training], *pair, "training"), 1e-5).epsilon
        for pair in UNITS_AND_RELATIONS[:4]
    }
    assert costs["record", "add_remove"] == costs["patient", "replace_one"]
    middle = (costs["patient", "add_remove"] + costs["record", "add_remove"]) / 2
    poor = with_patients(tmp_path / "poor", budget=middle)
    refusal = answer(poor, text, request())
    assert isinstance(refusal, Refusal)
    assert "budget is spent" in refusal.reason


# --- what a hospital's file allows ---

BY_DEFAULT = (
    r"training.unit=record: .* only by patient, because its data names patients; use "
    r"training.unit=patient, or allow it in its file with `units: \[record, patient\]`"
)


@every(
    ("overrides", "known", "changes", "reason"),
    [
        (
            BY_PATIENT,
            False,
            {},
            r"no patient column; use training.unit=record, or .*`patient_column: COLUMN` under",
        ),
        (
            BY_PATIENT,
            True,
            {"units": ["record"]},
            r"only by record; .*`units: \[record, patient\]`",
        ),
        (
            PRIVATE,
            True,
            {"units": ["patient"]},
            r"only by patient; use training.unit=patient, or .*`units: \[record, patient\]`",
        ),
        (PRIVATE, True, {}, BY_DEFAULT),
        (("training=dp_sgd", "answers=label"), True, {"units": None}, BY_DEFAULT),
        (PRIVATE, True, {"units": []}, r"only by none; .*`units: \[record\]`"),
        (
            (*PRIVATE, "training.unit=patient", "training.records_per_patient=17"),
            *(True, {}, "training.records_per_patient is at most 16"),
        ),
        (
            *(BY_PATIENT, True, {"limits": {"training.records_per_patient": 2}}),
            "training.records_per_patient is at most 2",
        ),
    ],
)
def test_a_unit_that_a_file_does_not_allow_is_refused_and_not_charged(
    deployed, tmp_path, monkeypatch, overrides, known, changes, reason
):
    monkeypatch.setattr(DPSGD, "train", lambda *_: pytest.fail("it was trained"))
    tmp_path = tmp_path / "hospital"
    hospital = (
        with_patients(tmp_path, **changes)
        if known
        else hospitals.open_hospital(site_file(tmp_path))
    )
    refusal = answer(hospital, deployed(*overrides).to_json(), request())
    assert isinstance(refusal, Refusal)
    assert re.search(reason, refusal.reason)
    assert not entries_of(hospital.ledger)


@every(
    ("overrides", "known", "changes"),
    [
        (BY_PATIENT, True, {}),
        (PRIVATE, False, {}),
        (PRIVATE, True, {"units": ["record", "patient"]}),
        (BY_PATIENT, True, {"units": ["record", "patient"]}),
    ],
)
def test_a_unit_that_suits_the_data_or_that_a_file_lists_is_answered(
    deployed, tmp_path, overrides, known, changes
):
    make = with_patients if known else lambda *a, **k: hospitals.open_hospital(site_file(*a, **k))
    hospital = make(tmp_path / "hospital", **changes)
    assert isinstance(answer(hospital, deployed(*overrides).to_json(), request()), Response)


def test_a_message_without_a_unit_gets_the_units_of_the_file(deployed, tmp_path):
    raw = json.loads(deployed(*PRIVATE).to_json())
    raw["training"] |= {"unit": None, "records_per_patient": 2}
    own = with_patients(tmp_path).experiment(json.dumps(raw), 16).training
    assert (own.unit, own.records_per_patient) == ("patient", 2)


def test_units_are_about_trainings_only(deployed, tmp_path):
    """Noisy answers have no unit of their own: all units have a number there."""
    hospital = with_patients(tmp_path, units=["patient"])
    assert isinstance(
        answer(hospital, deployed("training=plain", "answers=gradient").to_json(), request()),
        Response,
    )
    with pytest.raises(ConfigError, match="units=client must be record or patient"):
        with_patients(tmp_path, units=["client"])


def test_a_message_cannot_make_a_hospitals_patients_up(deployed, tmp_path):
    raw = json.loads(deployed(*BY_PATIENT).to_json())
    raw["data"]["records_per_patient"] = 3
    unknown = hospitals.open_hospital(site_file(tmp_path / "unknown"))
    assert "no patient column" in answer(unknown, json.dumps(raw), request()).reason
    experiment = with_patients(tmp_path / "known").experiment(json.dumps(raw), 16)
    assert experiment.config.data.records_per_patient is None
