"""Classes by name: both ends of a deployment compare whole lists before anything is spent."""

import csv
import json
import logging
import unicodedata

import numpy as np
import pytest
import yaml
from PIL import Image

from fed_dpsd.cli.student import predict
from fed_dpsd.client import hospital as hospitals
from fed_dpsd.client import terms
from fed_dpsd.engines.flower import codec
from fed_dpsd.engines.flower import grid as grids
from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.errors import ProtocolError, UserError
from fed_dpsd.protocol import MOST_CLASSES, require_equal_classes
from fed_dpsd.server import run as runs
from fed_dpsd.server.export import export
from fed_dpsd.server.run_folder import new_run_folder
from tests.hospitals import Hospitals, charges, federate, request, site_file

NAMES = ["normal", "covid"]
OWN = {"normal": "NORMAL", "covid": "Covid"}  # how one hospital names its folders
BOTH = "the hospital's classes are ['normal', 'covid'], the experiment's are ['covid', 'normal']"
MEANS = {"normal": 70, "covid": 180}
LEARNING = (
    *("answers.noise_multiplier=0.05", "teacher.min_steps=60", "rounds=2"),
    *("method.student_steps=10", "method.final_student_steps=150", "queries_per_round=128"),
)


def pictures(folder, counts, names=None, seed=0):
    """A folder for each class, with grey pictures that a small network can distinguish."""
    rng = np.random.Generator(np.random.PCG64(seed))
    for name, count in counts.items():
        own = folder / (names or {}).get(name, name)
        own.mkdir(parents=True)
        for number in range(count):
            pixels = rng.normal(MEANS[name], 20, (8, 8)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(own / f"{number}.png")
    return folder


def two_hospitals(tmp_path, *lists):
    """Site files with records in folders; one maps its own labels, the other has the names."""
    files = []
    for client, (names, own) in enumerate(zip(lists or (NAMES, NAMES), (OWN, {}), strict=True)):
        file = site_file(tmp_path / f"hospital{client}", client, classes=names, budget=1e9)
        pictures(file.parent / "scans", {"normal": 20, "covid": 20}, own, seed=1 + client)
        settings = yaml.safe_load(file.read_text())
        settings["files"] |= {"path": "scans", "labels": {own[name]: name for name in own}}
        file.write_text(yaml.safe_dump(settings))
        files.append(file)
    return files


def experiment_of(deployed, tmp_path, *overrides):
    """The coordinator's: without data.classes, the classes are its folders in their own order."""
    test = tmp_path / "data" / "test"
    if not test.exists():  # unequal counts, so that swapped classes have another accuracy
        pictures(test, {"normal": 40, "covid": 20})
    return deployed(
        *("data=folder", f"data.path={test.parent}", "data.shape=[1,8,8]", "data.num_classes=2"),
        *("training=plain", "answers=gradient", *overrides),
    )


def untouched(files):
    """Whether no hospital has a charge, a teacher or a secret."""
    folders = [hospitals.open_hospital(file).folder for file in files]
    made = [folder / name for folder in folders for name in ("cache", "secret")]
    return not any(map(charges, files)) and not any(path.exists() for path in made)


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_two_orders_of_one_list_are_refused_by_both_sides_before_anything(
    deployed, tmp_path, caplog, clock
):
    files = two_hospitals(tmp_path)
    experiment = experiment_of(deployed, tmp_path, "federation.node_timeout_seconds=300")
    assert experiment.config.data.class_names == ("covid", "normal")
    with pytest.raises(UserError) as caught:
        federate(experiment, Hospitals(files))
    assert clock[0] == 0  # it does not wait
    assert f"hospital 0: {BOTH}; hospital 1: {BOTH}. Nothing was charged. " in str(caught.value)
    said = [line for line in warned(caplog) if line.startswith("refused run ")]
    assert [line.endswith(f": {BOTH}") for line in said] == [True, True]  # in each hospital's log
    assert untouched(files)


def test_either_side_alone_would_refuse(deployed, tmp_path, monkeypatch, caplog):
    """A coordinator that does not compare gets no answer, with or without a hello."""
    files = two_hospitals(tmp_path)
    experiment = experiment_of(deployed, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(grids.GridFederation, "_refusal", lambda self, meta: "")
        federation = federate(experiment, Hospitals(files))
        with pytest.raises(
            UserError, match="^2 of 2 hospitals refused or did not answer "
        ) as caught:
            federation.total(request())
        assert f"hospital 0: {BOTH}; hospital 1: {BOTH}); see their logs, " in str(caught.value)
    said = [line for line in warned(caplog) if "refused" in line and BOTH in line]
    assert len(said) == 4  # at hello and at the request
    assert untouched(files)
    caplog.clear()
    with monkeypatch.context() as patch:  # hospitals that do not compare are not asked
        patch.setattr(terms, "require_equal_classes", lambda hospital, experiment: None)
        with pytest.raises(UserError, match="hospital 0: the hospital's classes are"):
            federate(experiment, Hospitals(files))
        assert untouched(files)
        patch.setattr(grids, "require_equal_classes", lambda hospital, experiment: None)
        federation = federate(experiment, Hospitals(files))
        assert not federation.total(ask_of_two()).refused  # the control: neither side compares
    assert not untouched(files)


def ask_of_two():
    """A request about two classes."""
    whole = request()
    predictions = np.full((len(whole.images), 2), 0.5, np.float32)
    return type(whole)(whole.query_id, whole.images, predictions)


def test_names_decide_what_a_student_calls_a_picture(deployed, tmp_path):
    """Its accuracy equals that from `predict` on the same pictures, by their folders' names."""
    files = two_hospitals(tmp_path)
    experiment = experiment_of(deployed, tmp_path, "data.classes=[normal,covid]", *LEARNING)
    folder = new_run_folder(experiment)
    federation = GridFederation(experiment, Hospitals(files), folder)
    summary = runs.run(experiment, federation, folder, lambda line: None)
    accuracy = summary["accuracy"]["student"]
    assert accuracy > 0.75  # with the classes exchanged, below 0.25

    model = export(folder, tmp_path / "model", "safetensors").path
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "normal", "1": "covid"}
    predict(model, [tmp_path / "data" / "test"], out=tmp_path / "predicted.csv")
    with (tmp_path / "predicted.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    right = [row["class"] == row["file"].split("/")[-2] for row in rows]
    assert (len(right), np.mean(right)) == (60, pytest.approx(accuracy, abs=1e-12))


def test_a_hospital_with_other_classes_is_left_out_where_the_others_are_enough(
    deployed, tmp_path, caplog, clock
):
    files = two_hospitals(tmp_path, NAMES, [*NAMES, "flu"])
    experiment = experiment_of(
        deployed, tmp_path, "data.classes=[normal,covid]", "federation.node_timeout_seconds=300"
    )
    federation = federate(experiment, Hospitals(files))
    assert clock[0] == 0
    (said,) = (line for line in warned(caplog) if line.startswith("hospital 1 cannot take "))
    assert said.endswith("; only the hospital has 'flu'")
    total = federation.total(ask_of_two())
    assert (total.count, list(total.refused)) == (1, [1])
    assert "only the hospital has 'flu'" in total.refused[1]
    assert untouched(files[1:])
    needed = experiment_of(
        *(deployed, tmp_path, "data.classes=[normal,covid]", "federation.min_clients=2"),
        "federation.node_timeout_seconds=300",
    )
    with pytest.raises(UserError, match="^hospital 1: .*; only the hospital has 'flu'. Nothing"):
        federate(needed, Hospitals(files))
    # Its file is corrected, so it takes part from the next round.
    settings = yaml.safe_load(files[1].read_text())
    files[1].write_text(yaml.safe_dump(settings | {"classes": NAMES}))
    query = ask_of_two()
    again = federation.total(type(query)(2, query.images, query.predictions))
    assert (again.count, dict(again.refused)) == (2, {})


def test_a_list_that_changes_in_a_run_is_refused_at_the_next_request(deployed, tmp_path):
    files = two_hospitals(tmp_path)
    experiment = experiment_of(deployed, tmp_path, "data.classes=[normal,covid]")
    federation = federate(experiment, Hospitals(files))
    settings = yaml.safe_load(files[0].read_text())
    files[0].write_text(yaml.safe_dump(settings | {"classes": NAMES[::-1]}))
    total = federation.total(ask_of_two())
    assert (total.count, list(total.refused)) == (1, [0])
    assert "classes are ['covid', 'normal']" in total.refused[0]
    assert untouched(files[:1])


# --- lists of a peer ---


MALFORMED = [
    *(None, "normal,covid", 7, [0, 1], [b"normal", b"covid"], ["normal"]),
    *(["normal", "normal"], ["normal", ""], ["normal", " covid"], ["normal", "x" * 256]),
    *(["normal", "covid\nwarning: all is well"], ["normal", "c\u200bovid"]),
    [str(number) for number in range(MOST_CLASSES + 1)],
]


def test_a_malformed_list_is_a_refusal_in_one_printable_line(deployed, tmp_path, caplog):
    def lie(node, reply):
        if node == 101 and reply.metadata.message_type == codec.HELLO:
            del reply.content["meta"]["classes"]
            if classes is not None:
                reply.content["meta"]["classes"] = classes
        return reply

    grid = Hospitals(two_hospitals(tmp_path), lie)
    experiment = experiment_of(deployed, tmp_path, "data.classes=[normal,covid]")
    for number in range(len(MALFORMED)):
        classes = MALFORMED[number]
        caplog.clear()
        federation = federate(experiment, grid)
        (said,) = warned(caplog)
        assert said.startswith("hospital 1 cannot take part: the hospital's classes must be a list")
        assert said.isprintable(), classes
        assert federation._clients == {0}, classes
        with pytest.raises(ProtocolError):
            require_equal_classes(NAMES, classes)


def test_long_lists_differ_at_a_place_and_by_names():
    names = [f"class {number}" for number in range(1_000)]
    require_equal_classes(names, tuple(names))
    moved = [*names[:5], names[6], names[5], *names[7:]]
    with pytest.raises(ProtocolError) as caught:
        require_equal_classes(names, moved)
    assert str(caught.value) == "class 5 is 'class 5' at the hospital, 'class 6' in the experiment"
    with pytest.raises(ProtocolError) as caught:
        require_equal_classes(names, [*names[:-1], "x" * 99, "y"])
    assert str(caught.value) == (
        f"class 999 is 'class 999' at the hospital, '{'x' * 27}...' in the experiment; only the "
        f"hospital has 'class 999'; only the experiment has '{'x' * 27}...', 'y'"
    )
    with pytest.raises(ProtocolError) as caught:
        require_equal_classes(names, names[:500])
    assert str(caught.value) == (
        "class 500 is 'class 500' at the hospital, '(none)' in the experiment; only the hospital "
        "has 'class 500', 'class 501', 'class 502', 'class 503', 'class 504', ..."
    )


def test_one_spelling_of_an_accent_is_as_good_as_the_other():
    spelled = [unicodedata.normalize(form, "pneumonía") for form in ("NFC", "NFD")]
    assert spelled[0] != spelled[1]
    require_equal_classes(["normal", spelled[0]], ["normal", spelled[1]])
    with pytest.raises(ProtocolError, match="only the hospital has 'pneumonía'"):
        require_equal_classes(["normal", spelled[0]], ["normal", "pneumonia"])
