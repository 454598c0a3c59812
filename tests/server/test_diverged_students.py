"""A run whose student is not finite fails, and no accuracy, checkpoint or file contains it."""

import json
import math

import pytest

from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import Diverged
from fed_dpsd.methods.fed_dpsd import FedDPSD
from fed_dpsd.methods.method import tensors_of
from fed_dpsd.server import checkpoint
from fed_dpsd.server import run as runs
from fed_dpsd.server.export import export
from fed_dpsd.server.run_folder import new_run_folder
from tests.every import every
from tests.server.test_run import complete

PAPER = "method=paper_fed_dpsd", "method.generator_learning_rate=0", "method.student_steps=1"


def failed(experiment, folder=None):
    """The folder, the summary and the error of a run that fails."""
    folder = folder or new_run_folder(experiment)
    with pytest.raises(Diverged) as caught:
        runs.run(experiment, LocalFederation(experiment, folder), folder, lambda line: None)
    return folder, json.loads((folder / "summary.json").read_text()), str(caught.value)


def spoiled(monkeypatch, value, last):
    """Let the student's training end with `value` in one of its weights, in round `last`."""
    server = FedDPSD.server

    def broken(self, *given):
        for finished in server(self, *given):
            if finished.state.round == last:
                name = [name for name in finished.state.tensors if name.startswith("student.")][-1]
                finished.state.tensors[name].view(-1)[0] = value
                finished.student.load_state_dict(tensors_of("student", finished.state.tensors))
            yield finished

    monkeypatch.setattr(FedDPSD, "server", broken)


@pytest.mark.slow
@every("value", [math.nan, -math.inf])
def test_what_diverged_is_neither_scored_nor_saved_and_the_rounds_before_stay(
    small, monkeypatch, value
):
    experiment = small()
    spoiled(monkeypatch, value, 2)
    folder, summary, error = failed(experiment)
    assert error.startswith("training diverged: student.")
    assert "holds NaN or infinity after round 2; lower its learning rate" in error
    assert (summary["status"], summary["error"]) == ("failed", error)
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 1
    assert checkpoint.load(folder / "checkpoint").round == 1
    monkeypatch.undo()  # the control
    assert complete(experiment, folder)[1]["status"] == "completed"


def test_finite_weights_with_predictions_that_are_not_name_the_key(small):
    """No loss of that round, whose only step is the student's, says so."""
    settings = *PAPER, "rounds=1"
    assert complete(small(*settings))[1]["status"] == "completed"  # the control
    folder, summary, error = failed(small(*settings, "method.student_learning_rate=1e30"))
    assert error == (
        "training diverged: the student predicts NaN or infinity after round 1; "
        "lower method.student_learning_rate (now 1e+30)"
    )
    assert summary["accuracy"]["student"] is None
    assert checkpoint.load(folder / "checkpoint") is None


def test_a_run_is_not_resumed_from_a_student_that_is_not_finite(small, monkeypatch):
    experiment = small()
    folder, *_ = complete(small("rounds=1"))
    state = checkpoint.load(folder / "checkpoint")
    assert complete(experiment, folder)[1]["status"] == "completed"  # the control
    for tensor in tensors_of("student", state.tensors).values():
        tensor.fill_(math.nan)
    folder, *_ = complete(small("rounds=1", "seed=1"))
    checkpoint.save(folder / "checkpoint", state)
    asked = []
    monkeypatch.setattr(LocalFederation, "_deliver", lambda self, request: asked.append(request))
    *_, error = failed(small("seed=1", "method.polarity=both"), folder)
    assert "after round 1" in error
    assert not asked


def test_a_student_that_is_not_finite_is_not_exported(finished, tmp_path):
    folder, *_ = finished()
    assert export(folder, tmp_path / "control", "safetensors").path.exists()
    state = checkpoint.load(folder / "checkpoint")
    for tensor in tensors_of("student", state.tensors).values():
        tensor.fill_(math.nan)
    checkpoint.save(folder / "checkpoint", state)
    for kind in ("safetensors", "onnx"):
        with pytest.raises(Diverged, match="the student of .* predicts NaN or infinity"):
            export(folder, tmp_path / "broken", kind)
    assert not (tmp_path / "broken").exists()
