"""An exported student predicts as in its run, and its file states its cost."""

import copy
import json
import math
import os
import re
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.torch
import torch

from fed_dpsd.errors import UserError
from fed_dpsd.models import digest_of, fixed_features, patches
from fed_dpsd.models.inference import predict
from fed_dpsd.server import export as exports
from fed_dpsd.server import onnx_file, program_file
from fed_dpsd.server.completed import student_of
from fed_dpsd.server.export import export
from fed_dpsd.server.run_folder import open_completed
from fed_dpsd.server.student import FACT_KEYS, FACTS, Network, open_student
from fed_dpsd.server.words import next_steps
from tests.every import every

FEDAVG = (
    *("method=fedavg", "training=plain", "answers=probabilities", "model.teacher=cnn_bn"),
    *("teacher.same_start=true", "model.teacher_width=6"),
)


RESNET34 = ("model.student=resnet34", "queries_per_round=8", "method.final_student_steps=2")
SLOW = pytest.param(RESNET34, marks=pytest.mark.slow)
STUDENTS = [(), ("model=scattering",), ("model.student=cnn_datalens",), SLOW, FEDAVG]


@pytest.mark.parametrize("overrides", STUDENTS, ids=lambda o: str(o[:1]))
def test_a_student_from_its_file_scores_as_in_its_run(finished, tmp_path, overrides):
    folder, summary, test = finished(*overrides)
    path = export(folder, tmp_path / "model", "safetensors").path
    student = open_student(path)
    scores = predict(student.model, test.images, torch.device("cpu"))
    assert (scores.argmax(1) == test.labels).mean() == summary["accuracy"]["student"]
    assert digest_of(student.model.float().state_dict()) == summary["student_sha256"]
    assert student.facts["privacy"] == summary["privacy"]
    assert "proven" in student.facts["result"]


@pytest.mark.slow  # fits patches
@pytest.mark.parametrize("kind", ["patches", "scattering"])
def test_a_file_has_all_that_fixed_features_are_computed_with(
    finished, tmp_path, monkeypatch, kind
):
    """A processor whose rounding finds other features predicts the same, and computes none."""
    folder, _, test = finished(f"model={kind}")
    path = export(folder, tmp_path, "safetensors").path
    student = open_student(path)
    expected = student.predict(test.images)
    monkeypatch.setattr(patches, "patterns", lambda _: pytest.fail("patterns"))
    monkeypatch.setattr(fixed_features, "whitening", lambda *_: pytest.fail("whitening"))
    monkeypatch.setattr(fixed_features, "_remembered", lambda *_: OrderedDict())
    again = open_student(path)
    assert (again.predict(test.images) == expected).all()
    with pytest.raises(pytest.fail.Exception):  # the control: a run computes them
        student_of(open_completed(folder))


def test_a_file_with_other_constants_is_refused(finished, tmp_path):
    path = export(finished("model=scattering")[0], tmp_path, "safetensors").path
    tensors = safetensors.torch.load(path.read_bytes())  # load_file would map the file
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    for name in ("constants.mean", "constants.components"):
        other = tensors | {name: tensors[name] + 1e-3}
        path.write_bytes(safetensors.torch.save(other, metadata))
        with pytest.raises(UserError, match="damaged"):
            open_student(path)
    path.write_bytes(safetensors.torch.save(tensors, metadata))
    open_student(path)


PREDICT = """
import sys, numpy as np
from pathlib import Path
from fed_dpsd.server.student import open_student
images = np.random.default_rng(0).integers(0, 256, (64, 1, 8, 8), np.uint8)
np.save(sys.argv[2], open_student(Path(sys.argv[1])).predict(images))
"""


@pytest.mark.slow  # two processes import torch
def test_the_instructions_of_a_processor_do_not_change_predictions(finished, tmp_path):
    path = export(finished("model=scattering")[0], tmp_path, "safetensors").path
    found = []
    for kernels in ("default", "avx2"):
        file = tmp_path / f"{kernels}.npy"
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": kernels}
        subprocess.run([sys.executable, "-c", PREDICT, path, file], env=environment, check=True)
        found.append(np.load(file))
    assert np.abs(found[0] - found[1]).max() <= 1e-6


# --- ONNX ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [(), ("model=scattering",), ("model=patches",)],
    ids=["cnn", "scattering", "patches"],
)
def test_an_onnx_file_gives_the_same_probabilities_of_every_test_image(
    finished, tmp_path, overrides
):
    folder, summary, test = finished(*overrides)
    own = open_student(export(folder, tmp_path, "safetensors").path)
    path, compared = export(folder, tmp_path, "onnx")
    session = onnxruntime.InferenceSession(path)
    (scores,) = session.run(["probabilities"], {"images": (test.images / 255).astype(np.float32)})
    np.testing.assert_allclose(scores, own.predict(test.images), atol=1e-4)
    match = re.fullmatch(
        r"ONNX and the student differ by at most (\S+) on 360 test images of digits", compared
    )
    assert float(match[1]) <= 1e-4
    facts = json.loads(session.get_modelmeta().custom_metadata_map[FACTS])
    assert facts["privacy"] == summary["privacy"]
    student = open_student(path)
    assert student.card == own.card
    assert student.classes == own.classes
    assert (student.predict(test.images).argmax(1) == test.labels).mean() == (
        summary["accuracy"]["student"]
    )
    card = json.loads((tmp_path / "privacy_card.json").read_text())
    assert card["files"]["student.onnx"]["compared"] == compared
    assert set(card["files"]) == {"student.onnx", "student.safetensors"}


def _altered(content):
    """An ONNX file with other weights."""
    model = onnx.load_from_string(content)
    weights = max(model.graph.initializer, key=lambda each: len(each.raw_data))
    weights.raw_data = bytes(len(weights.raw_data))
    return model.SerializeToString()


@pytest.mark.slow
def test_onnx_that_answers_otherwise_than_torch_is_noticed(finished, tmp_path, monkeypatch):
    folder, _, _ = finished()
    path = export(folder, tmp_path / "good", "onnx").path
    path.write_bytes(_altered(path.read_bytes()))
    with pytest.raises(UserError, match="predictions differ from the exported student's"):
        open_student(path)
    convert = onnx_file.to_onnx
    monkeypatch.setattr(onnx_file, "to_onnx", lambda *given: _altered(convert(*given)))
    with pytest.raises(UserError, match="360 test images of digits, more than 0.0001; nothing was"):
        export(folder, tmp_path / "bad", "onnx")
    assert not (tmp_path / "bad").exists()


@pytest.mark.slow
def test_without_its_test_images_a_run_is_compared_on_drawn_ones(finished, tmp_path, monkeypatch):
    def gone(experiment):
        raise UserError("/home/me/records is gone")

    monkeypatch.setattr(exports, "test_split", gone)
    compared = export(finished()[0], tmp_path, "onnx").compared
    assert "on 256 random images, because the run has no test images" in compared
    assert "/home/me" not in (tmp_path / "privacy_card.json").read_text()


@every("package", onnx_file.PACKAGES)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    finished, tmp_path, monkeypatch, package
):
    folder, _, _ = finished()
    monkeypatch.setitem(sys.modules, package, None)
    expected = f"ONNX needs {package}; run pip install 'fed-dpsd\\[onnx\\]'"
    with pytest.raises(UserError, match=expected):
        export(folder, tmp_path, "onnx")
    assert not list(tmp_path.glob("*.*"))


@every("content", [b"no model", b""])
def test_a_file_that_is_no_onnx_is_refused(tmp_path, content):
    path = tmp_path / "student.onnx"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is not an exported student .onnxruntime cannot run it"):
        open_student(path)


# --- programs of torch ---

RUN_PROGRAM = """
import json, sys, numpy, torch
facts = {"fed_dpsd": ""}
module = torch.export.load(sys.argv[1], extra_files=facts).module()
images = torch.from_numpy(numpy.load(sys.argv[2]))
every, first = module(images).detach(), module(images[:1]).detach()
assert torch.allclose(every[:1], first, atol=1e-6) and "fed_dpsd" not in sys.modules
numpy.save(sys.argv[3], every.numpy())
print(json.loads(facts["fed_dpsd"])["result"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cnn", "scattering"])
def test_torch_alone_runs_a_program(finished, tmp_path, model):
    folder, _, test = finished(f"model={model}")
    own = open_student(export(folder, tmp_path, "safetensors").path)
    path, compared = export(folder, tmp_path, "pt2")
    assert compared.endswith(" on 360 test images of digits")
    np.save(tmp_path / "images.npy", (test.images / 255).astype(np.float32))
    command = [sys.executable, "-c", RUN_PROGRAM, path, "images.npy", "scores.npy"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == own.facts["result"]
    scores = np.load(tmp_path / "scores.npy")
    np.testing.assert_allclose(scores, own.predict(test.images), atol=1e-4)
    with pytest.raises(UserError, match="is for torch.export.load; give a file of --format safe"):
        open_student(path)


@pytest.mark.slow
def test_a_program_that_answers_otherwise_is_noticed(finished, tmp_path, monkeypatch):
    def other(model, shape, metadata):
        for weights in model.parameters():
            torch.nn.init.zeros_(weights)
        return convert(model, shape, metadata)

    convert = program_file.to_pt2
    monkeypatch.setattr(program_file, "to_pt2", lambda m, *more: other(copy.deepcopy(m), *more))
    with pytest.raises(UserError, match="360 test images of digits, more than 0.0001; nothing was"):
        export(finished()[0], tmp_path / "bad", "pt2")
    assert not (tmp_path / "bad").exists()


# --- files ---


@pytest.mark.slow(seconds=6)
def test_central_trainings_only_teacher_is_its_student(finished, tmp_path):
    settings = "method=central", "num_clients=1", "training=plain", "answers=probabilities"
    folder, summary, test = finished(*settings)
    student = open_student(export(folder, tmp_path / "model", "safetensors").path)
    right = student.predict(test.images).argmax(1) == test.labels
    assert right.mean() == pytest.approx(summary["accuracy"]["student"], abs=1e-6)
    export(folder, tmp_path / "model", "onnx")  # a second export knows the folder as its own


def test_a_run_offers_only_what_it_has(finished, tmp_path):
    folder, summary, _ = finished("method=ensemble", "training=plain", "answers=probabilities")
    steps = " ".join(next_steps(folder, summary, folder / "ledger"))
    assert "export" not in steps
    assert "noise=secure" not in steps
    folder, summary, _ = finished()
    steps = [*next_steps(folder, summary, folder / "ledger")]
    assert any("export" in line for line in steps)
    assert "noise=secure" in steps[0]  # its guarantee needs secret noise


def test_what_cannot_be_exported_is_said(finished, tmp_path):
    folder, _, _ = finished("method=ensemble", "training=plain", "answers=probabilities")
    none = "method ensemble has no student of its own: its result is the ensemble of all teachers"
    with pytest.raises(UserError, match=none):
        export(folder, tmp_path, "safetensors")
    with pytest.raises(UserError, match="is not a run folder"):
        export(tmp_path, tmp_path, "safetensors")
    (folder / "summary.json").unlink()
    with pytest.raises(
        UserError, match="this run has not completed; continue it with `fed-dpsd resume"
    ):
        export(folder, tmp_path, "safetensors")


def test_a_file_is_never_overwritten(finished, tmp_path):
    folder, _, _ = finished()
    path = export(folder, tmp_path, "safetensors").path
    content = path.read_bytes()
    with pytest.raises(UserError, match="already exists"):
        export(folder, tmp_path, "safetensors")
    assert path.read_bytes() == content


NETWORK = {"architecture": "cnn", "width": 4, "shape": [1, 8, 8], "num_classes": 10}


@every(
    ("network", "expected"),
    [
        (None, "it contains no network"),
        ({**NETWORK, "architecture": "os.system"}, "architecture='os.system' is not one of"),
        ({**NETWORK, "width": 0}, "has an invalid size"),
        ({**NETWORK, "width": "4"}, "network.width='4' must be an integer"),
        ({**NETWORK, "width": 5}, "has shape"),
        ({**NETWORK, "more": 1}, "network.more=1 is not a key"),
        ({**NETWORK, "architecture": "tiny"}, "tiny is a plug-in's network.*use its ONNX file"),
    ],
)
def test_a_file_that_is_no_student_is_refused(tmp_path, network, expected):
    model = Network("cnn", 4, (1, 8, 8), 10).build()
    facts = dict.fromkeys(FACT_KEYS) | ({} if network is None else {"network": network})
    path = tmp_path / "student.safetensors"
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    path.write_bytes(safetensors.torch.save(weights, {FACTS: json.dumps(facts)}))
    with pytest.raises(UserError, match=expected):
        open_student(path)


@every("lacking", sorted(FACT_KEYS))
def test_a_student_that_lacks_a_fact_is_refused(finished, tmp_path, lacking):
    path = export(finished()[0], tmp_path, "safetensors").path
    weights = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()[FACTS])
    assert open_student(path)
    del facts[lacking]
    path.write_bytes(safetensors.torch.save(weights, {FACTS: json.dumps(facts)}))
    with pytest.raises(UserError, match=f"is not an exported student .it lacks {lacking}"):
        open_student(path)


def test_a_student_from_before_fit_and_window_predicts_as_then(finished, tmp_path):
    path = export(finished()[0], tmp_path, "safetensors").path
    with safetensors.safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()[FACTS])
    del facts["fit"], facts["window"]
    weights = safetensors.torch.load_file(path)
    path.write_bytes(safetensors.torch.save(weights, {FACTS: json.dumps(facts)}))
    assert open_student(path).conversion == ((1, 8, 8), "crop", 16, None)


def test_a_damaged_student_is_refused(finished, tmp_path):
    path = export(finished()[0], tmp_path, "safetensors").path
    weights = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        facts = file.metadata()
    next(iter(weights.values())).fill_(math.nan)
    path.write_bytes(safetensors.torch.save(weights, facts))
    with pytest.raises(UserError, match="is damaged: its weights differ from the exported ones"):
        open_student(path)


def test_weights_without_facts_are_no_student(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(safetensors.torch.save({"weight": torch.zeros(2)}))
    with pytest.raises(UserError, match="is not an exported student"):
        open_student(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="is not a safetensors file"):
        open_student(path)


# --- cards next to the file ---


def test_a_folder_with_anything_else_of_the_cards_names_is_refused(finished, tmp_path):
    folder, _, _ = finished()
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UserError, match="README.md already exists and is not from this student"):
        export(folder, tmp_path, "safetensors")
    assert not (tmp_path / "student.safetensors").exists()
    assert (tmp_path / "README.md").read_text() == "mine"


def test_another_runs_student_does_not_join(finished, tmp_path):
    export(finished()[0], tmp_path / "model", "safetensors")
    (tmp_path / "model" / "student.safetensors").unlink()
    with pytest.raises(UserError, match="already exists and is not from this student"):
        export(finished("seed=1")[0], tmp_path / "model", "safetensors")


def test_an_edited_model_card_is_kept(finished, tmp_path):
    folder, _, _ = finished()
    path = export(folder, tmp_path, "safetensors").path
    (tmp_path / "README.md").write_text("edited")
    path.unlink()
    export(folder, tmp_path, "safetensors")
    assert (tmp_path / "README.md").read_text() == "edited"
