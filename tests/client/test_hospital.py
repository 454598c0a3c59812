"""Hospitals: what their own files allow, and what leaves them."""

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import yaml

from fed_dpsd.client import device
from fed_dpsd.client import hospital as hospitals
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.client.terms import NotAllowed, choices
from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.models import precision, to_vector
from fed_dpsd.privacy.noise import SecretStreams
from fed_dpsd.protocol import Refusal, Request, Response
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder
from tests.every import every
from tests.hospitals import (
    PLAIN,
    Hospitals,
    answer,
    request,
    site_file,
)
from tests.ledgers import entries_of

DIGITS = [str(label) for label in range(10)]


def test_a_run_over_hospitals(deployed, tmp_path):
    """In any order of nodes; nothing private is in the run folder."""
    files = [site_file(tmp_path / f"hospital{client}", client) for client in (1, 0)]
    experiment = deployed("training=plain", "answers=gradient", "answers.noise_multiplier=1000")
    folder = new_run_folder(experiment)
    federation = GridFederation(experiment, Hospitals(files), folder)
    summary = runs.run(experiment, federation, folder, lambda line: None)
    assert summary["status"] == "completed"
    assert summary["accuracy"]["ensemble"] is None
    assert summary["queries"]["answered_per_client"] is None
    notes = summary["privacy"]["proven"][0]["notes"]
    assert "spent" not in summary["privacy"]["proven"][0]
    assert notes == [
        *("per run", "tuning not covered"),
        "delta should be below 1 / (records of each client)",
        "response times are not covered: they may reveal whether a record is present",
    ]
    assert summary["accuracy"]["evaluated_on"] == "360 test images of digits, the coordinator's own"
    assert not (folder / "ledger").exists()
    asked = [json.loads(line) for line in (folder / "asks.jsonl").read_text().splitlines()]
    assert [line["query_id"] for line in asked] == [1, 2, 3]
    assert all(line["answered"] == [0, 1] and not line["refused"] for line in asked)
    for file in files:
        assert [entry.request for entry in entries_of(hospitals.open_hospital(file).ledger)] == [
            line["ask"] for line in asked
        ]


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    """The last one would win: for example, a larger budget left further down in the template."""
    file = site_file(tmp_path / "hospital", budget=1.0)
    file.write_text(f"{file.read_text()}\nbudget: 8.0\n")
    with pytest.raises(UserError, match="budget is given twice, in the keys from line 1 on; keep"):
        hospitals.open_hospital(file)


def test_a_path_in_an_unknown_home_folder_is_named(tmp_path, deployed, request):
    text = deployed("training=plain").to_json()  # from a coordinator, who has one
    request.getfixturevalue("homeless")
    files = {"image_column": "image", "label_column": "label", "patient_column": None}
    files |= {"skip_unreadable": False, "path": "~bob/images"}
    for key, change in {"files.path": {"files": files}, "state": {"state": "~/state"}}.items():
        with pytest.raises(UserError, match=rf"^site.{key}=~.*: its home folder is not known"):
            hospitals.open_hospital(site_file(tmp_path / key, **change))
    site = hospitals.open_hospital(site_file(tmp_path, methods=["fed_dpsd"]))
    assert site.experiment(text, 0)  # no path of a hospital starts there by default


def test_a_method_of_the_same_class_is_allowed_by_its_own_name_and_needs_only(deployed, tmp_path):
    """Methods that are settings of others share a class, and a message has its name and needs."""
    site = hospitals.open_hospital(site_file(tmp_path, methods=["central", "dgd"]))
    raw = json.loads(deployed("method=ensemble").to_json())
    target, refused = raw["method"]["_target_"], r"allows only method=central or dgd"
    allowed = {**raw["method"], "name": "central", "needs": {"num_clients": 1}}
    site.check({**raw, "method": allowed})  # the control
    assert allowed["_target_"] == target
    for wrong in ({"name": "ensemble"}, {"needs": {}}, {"name": "dgd"}, {"name": ["central"]}):
        with pytest.raises(NotAllowed, match=refused):
            site.check({**raw, "method": {**allowed, **wrong}})


@every(
    ("overrides", "changes", "reason"),
    [
        (
            ("method=dense", "training=plain", "answers=probabilities"),
            {},
            r"allows only method=fed_dpsd \(methods: in its file\)",
        ),
        (
            ("training=plain", "answers=votes"),
            {},
            r"allows only answers=label or gradient or probabilities \(answers: in its file\)",
        ),
        (
            ("training=plain", "answers=probabilities"),
            {"answers": ["label", "gradient"]},
            r"allows only answers=label or gradient \(answers: in its file\)",
        ),
        (
            ("training=plain", "answers=label"),
            {"training": ["dp_sgd"]},
            r"allows only training=dp_sgd \(training: in its file\)",
        ),
        # Both are allowed in other runs; without any noise, no budget is enough.
        (("training=plain", "answers=probabilities"), {"budget": 1e300}, "budget is spent"),
        (
            ("training=plain", "answers=gradient", "answers.noise_at=server"),
            {},
            "needs server in trust:",
        ),
        (("model.teacher=mlp",), {}, "allows only the teachers cnn or scattering"),
        (("model.teachers=[cnn,mlp]",), {}, "allows only the teachers cnn or scattering"),
        (("teacher.epochs=301",), {}, "teacher.epochs is at most 300"),
        (
            ("teacher.epochs=1",),
            {"limits": {"teacher.epochs": 0}},
            "teacher.epochs is at most 0",
        ),
        (("teachers_per_client=101",), {}, "teachers_per_client is at most 100"),
        (("teacher.path=/etc/passwd", "teacher.arch=cnn"), {}, "trains its own teachers"),
        (
            (),
            {"classes": DIGITS[::-1]},
            "the hospital's classes are .*'1', '0'\\], the experiment's are .*'9'\\]",
        ),
        ((), {"classes": [*DIGITS, "none"]}, "only the hospital has 'none'"),
        ((), {"shape": [1, 12, 12]}, r"data.shape is \[1, 12, 12\]"),
        ((), {"fit": "pad"}, "data.fit is pad"),
        (("num_clients=3",), {}, "num_clients is 2"),
        (("queries_per_round=8",), {}, "16 images in one request"),
        ((), {"budget": 0.0}, "budget is spent"),
        ((), {"queries": 15}, "lifetime query limit"),
    ],
)
def test_what_a_file_does_not_allow_is_refused_and_not_charged(
    deployed, tmp_path, overrides, changes, reason
):
    files = [site_file(tmp_path / f"hospital{client}", client) for client in (0, 1)]
    files[0] = site_file(tmp_path / "hospital0", 0, **changes)
    experiment = deployed(*overrides)
    hospital = hospitals.open_hospital(files[0])
    given = answer(hospital, experiment.to_json(), request())
    assert isinstance(given, Refusal)
    assert re.search(reason, given.reason)
    assert not entries_of(hospital.ledger)


def test_pictures_are_windowed_as_the_exported_student_will(deployed, tmp_path):
    """A student's file has the coordinator's window, so a hospital with another one refuses."""
    file = site_file(tmp_path / "hospital", 0)
    settings = yaml.safe_load(file.read_text())
    for window, refused in (("header", True), ([40, 400], True), (None, False)):
        files = settings["files"] | {"window": window}
        file.write_text(yaml.safe_dump(settings | {"files": files}))
        hospital = hospitals.open_hospital(file)
        given = answer(hospital, deployed(*PLAIN).to_json(), request())
        assert isinstance(given, Refusal) == refused
        if refused:
            assert re.search(r"data.window is (header|\[40.0, 400.0\]) at this site", given.reason)
            assert not entries_of(hospital.ledger)


@every(
    ("path", "value"),
    [
        (("method", "_target_"), "os.system"),
        (("method", "_target_"), ["fed_dpsd.methods.fed_dpsd.FedDPSD"]),
        (("answers", "_target_"), None),
        (("answers", "noise_multiplier"), "tiny"),
        (("answers", "noise_multiplier"), float("nan")),
        (("answers", "noise_multiplier"), 0.0),
        (("training", "_target_"), None),
        (("training", "_target_"), "fed_dpsd.privacy.gaussian.NormalizedGradient"),
        (("answers", "_target_"), "fed_dpsd.privacy.dp_sgd.DPSGD"),
        (("privacy",), None),
        (("teacher", "epochs"), float("nan")),
        (("teacher", "epochs"), "1"),
        (("data",), None),
        (("data", "classes"), None),
        (("data", "classes"), "0123456789"),
        (("data", "classes"), [*DIGITS[:9], 9]),
        (("data", "classes"), [*DIGITS[:9], "9\n"]),
        (("data", "num_classes"), 10**12),
        (("model", "teachers"), 3),
        (("rounds",), -1),
    ],
)
def test_a_malformed_experiment_is_refused(deployed, tmp_path, path, value):
    hospital = hospitals.open_hospital(site_file(tmp_path / "hospital"))
    raw = json.loads(deployed("training=plain", "answers=gradient").to_json())
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(NotAllowed):
        hospital.experiment(json.dumps(raw), 16)
    for text in ("", "[]", "{}", "null", "{" * 100_000):
        with pytest.raises(NotAllowed, match="malformed"):
            hospital.experiment(text, 16)


def test_what_a_message_says_of_budget_data_and_places_is_not_read(deployed, tmp_path):
    own = {"budget": 2.0, "budget_relation": "replace_one"}
    hospital = hospitals.open_hospital(site_file(tmp_path / "hospital", **own))
    hospital = replace(hospital, files=replace(hospital.files, patient_column="patient"))
    raw = json.loads(deployed("training=plain", "answers=gradient").to_json())
    raw["privacy"] |= {"budget": 1e9, "budget_relation": "add_remove", "delta": 0.9}
    raw["data"] |= {"path": "/etc", "patient_column": "image", "hub": "x"}
    raw |= {"cache": "/etc", "ledger": "/etc", "out": "/etc", "run_folder": "/etc"}
    raw |= {"threads_client": 64, "noise": "seeded"}
    raw |= {"client_device": "cuda:3", "server_device": "cuda:3", "precision": "bfloat16"}
    config = hospital.experiment(json.dumps(raw), 16).config
    assert (config.privacy.budget, config.privacy.delta) == (2.0, 1e-5)
    assert config.privacy.budget_relation == "replace_one"
    assert (config.data.path, config.data.hub) == (None, None)
    assert config.data.patient_column == "patient"
    assert (config.noise, config.threads_client) == ("secure", 1)
    assert (config.client_device, config.server_device, config.precision) == ("cpu", "cpu", "auto")
    assert "/etc" not in str(config)


def test_delta_must_be_below_one_over_the_number_of_records(tmp_path):
    hospital = hospitals.open_hospital(site_file(tmp_path, delta=0.25))
    assert [bool(hospital.problem_of_delta(count)) for count in (3, 4)] == [False, True]


def test_a_hospitals_precision_is_set_in_its_file(deployed, tmp_path, monkeypatch):
    text = deployed("training=plain", "answers=gradient", "precision=float32").to_json()
    hospital = hospitals.open_hospital(site_file(tmp_path / "hospital", precision="bfloat16"))
    experiment = hospital.experiment(text, 16)
    assert experiment.config.precision == "bfloat16"
    monkeypatch.setattr(precision, "has_bfloat16", lambda _: False)
    with pytest.raises(UserError, match="^precision=bfloat16: .* use precision=auto or float32"):
        hospital.open(experiment, "run")
    assert not hospital.folder.exists()
    with pytest.raises(ConfigError, match="precision='half'|precision=half"):
        hospitals.open_hospital(site_file(tmp_path / "other", precision="half"))


def test_a_hospitals_device_is_that_of_its_file(deployed, tmp_path, monkeypatch):
    text = deployed("training=plain", "answers=gradient", "client_device=cpu").to_json()
    hospital = hospitals.open_hospital(site_file(tmp_path / "hospital", device="cuda:1"))
    experiment = hospital.experiment(text, 16)
    assert experiment.config.client_device == "cuda:1"
    with pytest.raises(UserError, match="device=cuda:1: this machine has no usable GPU; use dev"):
        hospital.open(experiment, "run")
    assert not hospital.folder.exists()
    for module in (hospitals, device):
        monkeypatch.setattr(module, "number_of_gpus", lambda: 2)
    assert hospital.open(experiment, "run").client == 0
    with pytest.raises(ConfigError, match="device=tpu must be auto, cpu, cuda or cuda:N"):
        hospitals.open_hospital(site_file(tmp_path / "other", device="tpu"))


def test_noise_is_the_hospitals_own_and_the_same_for_the_same_request(deployed, tmp_path):
    """Two hospitals with the same records: only their secrets differ."""
    text = deployed("training=plain", "answers=gradient").to_json()
    answers = []
    for number in range(2):
        hospital = hospitals.open_hospital(site_file(tmp_path / f"{number}"))
        answers.append(answer(hospital, text, request()).values)
        assert (answer(hospital, text, request()).values == answers[-1]).all()
        assert (hospital.folder / "secret").stat().st_mode & 0o777 == 0o600
    assert np.abs(np.corrcoef(answers[0].ravel(), answers[1].ravel())[0, 1]) < 0.5
    (hospital.folder / "secret").chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        answer(hospital, text, request(2))


@pytest.mark.slow
def test_all_noise_of_a_hospital_comes_from_its_secret(deployed, tmp_path, monkeypatch):
    """The coordinator sets the seeds."""
    drawn, noise = set(), SecretStreams.noise

    def watched(streams, purpose, *rest, **named):
        drawn.add(purpose)
        return noise(streams, purpose, *rest, **named)

    monkeypatch.setattr(SecretStreams, "noise", watched)
    private = "training=dp_sgd", "training.steps=1", "answers=probabilities", "model=scattering"
    imageless = partial(Request.without_images, image_shape=(1, 8, 8), num_classes=10)
    start = to_vector(make_teacher(deployed(*private).config, 0, 0)).detach().numpy()
    for name, settings, asked in (
        ("fed_dpsd", "training.count_fraction=1.0", request()),
        ("fed_dpsd", "training.count_fraction=1.0", imageless("counts")),
        ("dp_fedavg", "teacher.same_start=true", imageless("train", weights=start)),
    ):
        hospital = hospitals.open_hospital(site_file(tmp_path / asked.kind, methods=[name]))
        text = deployed(f"method={name}", *private, settings).to_json()
        given = answer(hospital, text, asked)
        assert isinstance(given, Response), given
    training = {"private training of a teacher", "retraining 0", "class counts"}
    assert drawn == training | {
        "answers: probabilities",
        "counts: class_counts",
        "train: weights",
    }


def test_a_hospital_keeps_its_number(deployed, tmp_path):
    """Another number would be another account, with a fresh budget."""
    experiment = deployed("training=plain", "answers=gradient")
    answer(hospitals.open_hospital(site_file(tmp_path, 0)), experiment.to_json(), request())
    renumbered = hospitals.open_hospital(site_file(tmp_path, 1))
    with pytest.raises(UserError, match="client=1: .* holds the account of client_000"):
        answer(renumbered, experiment.to_json(), request())


def test_patients_share_a_shard(deployed, tmp_path):
    file = site_file(tmp_path / "hospital")
    settings = yaml.safe_load(file.read_text())
    settings["files"]["patient_column"] = "patient"
    file.write_text(yaml.safe_dump(settings))
    hospital = hospitals.open_hospital(file)
    experiment = hospital.experiment(deployed("teachers_per_client=4").to_json(), 16)
    assert experiment.answers.shards.by == "patient"


# --- rounds without some ---


def test_a_bad_file_names_every_problem(tmp_path):
    file = site_file(tmp_path / "a", budget="three", trust=["everybody"], clinet=3)
    with pytest.raises(ConfigError) as caught:
        hospitals.open_hospital(file)
    said = str(caught.value)
    assert "site.budget=three must be a number" in said
    assert "site.clinet=3 is not a key of site; did you mean client?" in said
    text = site_file(tmp_path / "e").read_text().replace("budget:", "budgets:")
    (tmp_path / "e.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        hospitals.open_hospital(tmp_path / "e.yaml")
    (said,) = caught.value.problems
    assert said.endswith(" is not a key of site; did you mean budget?")
    text = text.replace("budgets:", "budget:").replace("num_clients:", "clients:")
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        hospitals.open_hospital(tmp_path / "f.yaml")
    (said,) = caught.value.problems
    assert said.endswith(" is not a key of site; did you mean num_clients?")
    (tmp_path / "f.yaml").write_text(text.replace("client: ", "patients: "))
    with pytest.raises(ConfigError) as caught:
        hospitals.open_hospital(tmp_path / "f.yaml")
    assert "site.client is missing" in caught.value.problems
    for changes, problem in (
        (
            {"trust": ["everybody"]},
            "trust=everybody must be nobody, threshold or server",
        ),
        ({"methods": ["voodoo"]}, "methods: 'voodoo' is unknown"),
        ({"name": ""}, "site.name= is empty; give a name of the data set"),
        ({"state": " "}, "site.state= is empty; give a folder"),
        ({"client": 2}, "client=2 must be below num_clients=2"),
        ({"budget": float("inf")}, "site.budget=inf must be"),
        ({"delta": 1.0}, "site.delta=1.0 must be < 1"),
        ({"delta": "5e-6"}, r"must be a number; YAML reads 5e-6 as text, so write 5.0e-6"),
        ({"queries": "1e6"}, "must be an integer; YAML reads 1e6 as text, so write 1000000"),
        ({"num_clients": 10**20}, "num_clients=10+ must be <= 1,000,000"),
        ({"threads": 10**5}, "threads=100000 must be <= 1,024"),
        ({"shape": [1, 10**6, 10**6]}, r"must be \[1 or 3, size, size\], size <= 4096"),
        ({"methods": []}, r"site.methods=\[\] allows no experiment; name at least one"),
        ({"trust": []}, r"site.trust=\[\] allows no experiment"),
        ({"limits": {"teacher.epochs": -5}}, "site.limits.teacher.epochs=-5 must be >= 0"),
        ({"limits": {"speed": 3}}, "limits.speed=3: give numbers for"),
        ({"files": None}, "site.files=null: site.files is a group of keys"),
        ({"files": "images"}, "site.files=images: site.files is a group of keys"),
        ({"classes": ["a", "a"]}, "site.classes=.a, a. must be two or more different names"),
        ({"classes": ["a", " "]}, "must be two or more different names, printable and not empty"),
        ({"classes": [0, 1]}, "site.classes=0 must be a string; quote it"),
        ({"classes": {"normal": 0}}, "site.classes={normal: 0} must be a list"),
        ({"shape": [28, 28]}, r"shape=\[28, 28\] must be \[1 or 3, size, size\]"),
        ({"shape": [1, 8, 9]}, r"shape=\[1, 8, 9\] must be"),
    ):
        with pytest.raises(ConfigError, match=problem):
            hospitals.open_hospital(site_file(tmp_path / "b", **changes))
    for labels, problem in (
        ({"nine": 9}, "site.files.labels.nine=9 must be the name of one of the classes"),
        (["nine"], "site.files.labels=.nine. must be a group of keys"),
        ({9: "9"}, "site.files.labels: 9 is not text; quote it: '9': 9"),
        ({"ten": "10"}, "site.files.labels.ten=10: the classes are 0, 1, .*; name one"),
    ):
        with pytest.raises(ConfigError, match=problem):
            hospitals.open_hospital(with_files(tmp_path / "c", labels=labels))
    with pytest.raises(ConfigError, match=r"site\.files\.path= is empty; give a folder or a table"):
        hospitals.open_hospital(with_files(tmp_path / "d", path=""))
    with pytest.raises(UserError, match="is not a site file: No such file"):
        hospitals.open_hospital(tmp_path / "nowhere.yaml")
    wrong = (("", "it is empty"), ("- a", "no KEY: VALUE lines"), ("a: 1\n\tb: 2", r"line 2"))
    for text, problem in wrong:
        (tmp_path / "wrong.yaml").write_text(text)
        with pytest.raises(UserError, match=problem):
            hospitals.open_hospital(tmp_path / "wrong.yaml")


def with_files(folder, **changes):
    """A hospital's file with other keys under `files`."""
    path = site_file(folder)
    settings = yaml.safe_load(path.read_text())
    settings["files"] |= changes
    path.write_text(yaml.safe_dump(settings))
    return path


@every("group", ["method", "training", "answers"])
def test_every_choice_that_a_file_may_allow_names_its_class(group):
    """A choice that only inherits its class would keep all hospitals from opening."""
    assert all(name.startswith("fed_dpsd.") for name in choices(group).values())
