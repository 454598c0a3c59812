"""A student that is taken away answers as it did in its run, and its file says what it cost."""

import json
import math
from collections import OrderedDict

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch

from fed_dpsd.errors import UserError
from fed_dpsd.experiment import test_split as held_out
from fed_dpsd.models import fixed_features, patches
from fed_dpsd.models.inference import predict
from fed_dpsd.server import checkpoint
from fed_dpsd.server import run as runs
from fed_dpsd.server.export import FACTS, Network, export, open_student
from fed_dpsd.server.run_folder import new_run_folder
from fed_dpsd.simulation.local import LocalFederation


@pytest.fixture
def finished(small):
    """Runs a small experiment; its folder, summary and test split."""

    def make(*overrides):
        experiment = small("rounds=1", *overrides)
        folder = new_run_folder(experiment)
        federation = LocalFederation(experiment, folder)
        summary = runs.run(experiment, federation, folder, lambda line: None)
        return folder, summary, held_out(experiment)

    return make


FEDAVG = (
    *("method=fedavg", "training=plain", "answers=probabilities", "model.teacher=cnn_bn"),
    *("teacher.same_start=true", "model.teacher_width=6"),
)


RESNET34 = ("model.student=resnet34", "queries_per_round=8", "method.final_student_steps=2")
STUDENTS = [(), ("model=scattering",), ("model.student=cnn_datalens",), RESNET34, FEDAVG]


@pytest.mark.parametrize("overrides", STUDENTS, ids=lambda o: str(o[:1]))
def test_a_student_from_its_file_scores_as_in_its_run(finished, tmp_path, overrides):
    folder, summary, test = finished(*overrides)
    path = export(folder, tmp_path / "model", "safetensors")
    student = open_student(path)
    scores = predict(student.model, test.images, torch.device("cpu"))
    assert (scores.argmax(1) == test.labels).mean() == summary["accuracy"]["student"]
    assert checkpoint.digest_of(student.model.state_dict()) == summary["student_sha256"]
    assert student.facts["privacy"] == summary["privacy"]
    assert "proven" in student.facts["result"]


def test_a_processor_with_other_features_is_refused(finished, tmp_path, monkeypatch):
    """As where rounding has clusters of patches part otherwise; the control is this processor."""
    path = export(finished("model=patches")[0], tmp_path, "safetensors")
    open_student(path)
    kernels, offsets = patches.patterns((1, 8, 8))
    monkeypatch.setattr(patches, "patterns", lambda _: (kernels.flip(0), offsets))
    monkeypatch.setattr(fixed_features, "_remembered", lambda *_: OrderedDict())
    with pytest.raises(UserError, match="other fixed features than the one that trained"):
        open_student(path)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("overrides", [(), ("model=scattering",)], ids=["cnn", "scattering"])
def test_an_onnx_file_gives_the_same_probabilities(finished, tmp_path, overrides):
    folder, summary, test = finished(*overrides)
    own = open_student(export(folder, tmp_path, "safetensors"))
    session = onnxruntime.InferenceSession(export(folder, tmp_path, "onnx"))
    images = (test.images[:7] / 255).astype(np.float32)
    (given,) = session.run(["probabilities"], {"images": images})
    wanted = predict(own.model, test.images[:7], torch.device("cpu"))
    np.testing.assert_allclose(given, wanted, atol=1e-5)
    facts = json.loads(session.get_modelmeta().custom_metadata_map[FACTS])
    assert facts["privacy"] == summary["privacy"]


def test_what_cannot_be_exported_is_said(finished, tmp_path):
    folder, _, _ = finished("method=ensemble", "training=plain", "answers=probabilities")
    with pytest.raises(UserError, match="method ensemble has no student of its own"):
        export(folder, tmp_path, "safetensors")
    with pytest.raises(UserError, match="is not a run folder"):
        export(tmp_path, tmp_path, "safetensors")
    (folder / "summary.json").unlink()
    with pytest.raises(UserError, match="this run is not completed; go on with `fed-dpsd resume"):
        export(folder, tmp_path, "safetensors")


def test_a_file_is_never_overwritten(finished, tmp_path):
    folder, _, _ = finished()
    path = export(folder, tmp_path, "safetensors")
    content = path.read_bytes()
    with pytest.raises(UserError, match="exists already"):
        export(folder, tmp_path, "safetensors")
    assert path.read_bytes() == content


NETWORK = {"architecture": "cnn", "width": 4, "shape": [1, 8, 8], "num_classes": 10}


@pytest.mark.parametrize(
    ("network", "told"),
    [
        (None, "it holds no network"),
        ({**NETWORK, "architecture": "os.system"}, "architecture='os.system' is not one of"),
        ({**NETWORK, "width": 0}, "a size that no network has"),
        ({**NETWORK, "width": "4"}, "network.width='4' must be an integer"),
        ({**NETWORK, "width": 5}, "has shape"),
        ({**NETWORK, "more": 1}, "network.more=1 is not a key"),
    ],
)
def test_a_file_that_is_no_student_is_refused(tmp_path, network, told):
    model = Network("cnn", 4, (1, 8, 8), 10).build()
    facts = {} if network is None else {"network": network}
    path = tmp_path / "student.safetensors"
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    path.write_bytes(safetensors.torch.save(weights, {FACTS: json.dumps(facts)}))
    with pytest.raises(UserError, match=told):
        open_student(path)


def test_a_damaged_student_is_refused(finished, tmp_path):
    path = export(finished()[0], tmp_path, "safetensors")
    weights = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        facts = file.metadata()
    next(iter(weights.values())).fill_(math.nan)
    path.write_bytes(safetensors.torch.save(weights, facts))
    with pytest.raises(UserError, match="is damaged: its weights are not those exported"):
        open_student(path)


def test_weights_without_facts_are_no_student(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(safetensors.torch.save({"weight": torch.zeros(2)}))
    with pytest.raises(UserError, match="is not an exported student"):
        open_student(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="is not a safetensors file"):
        open_student(path)
