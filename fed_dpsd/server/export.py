"""Exported students: a file with the weights, the network and the privacy card."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd import __version__
from fed_dpsd.binder import Binder
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.methods.method import below
from fed_dpsd.models import initialise, misfit, procedural, read_weights
from fed_dpsd.models.classifiers import CLASSIFIERS, Classifier
from fed_dpsd.models.inference import predict
from fed_dpsd.server import checkpoint
from fed_dpsd.server.run_folder import is_run_folder, open_run_folder
from fed_dpsd.server.summary import read_summary, result_line
from fed_dpsd.storage import write_atomically
from fed_dpsd.streams import Streams

FACTS = "fed_dpsd"  # key in the metadata of a file
NAME = "student"
Format = Literal["safetensors", "onnx"]
ROUNDING = 1e-3  # most that a probability may differ between processors


@dataclass(frozen=True)
class Network:
    """The architecture and sizes of a student.

    Args:
        architecture: a key of `CLASSIFIERS`.
        width: width of its first layer, >= 1.
        shape: (C, S, S) of its images.
        num_classes: number of classes, >= 2.
    """

    architecture: str
    width: int
    shape: tuple[int, ...]
    num_classes: int

    def __post_init__(self) -> None:
        if self.architecture not in CLASSIFIERS:
            known = ", ".join(CLASSIFIERS)
            raise ValueError(f"architecture={self.architecture!r} is not one of {known}")
        if len(self.shape) != 3 or min(self.width, *self.shape) < 1 or self.num_classes < 2:
            raise ValueError(f"{self} has a size that no network has")

    def build(self) -> Classifier:
        """Return the network with initial weights, to be replaced."""
        make = CLASSIFIERS[self.architecture]
        return initialise(
            lambda: make(self.shape, self.num_classes, self.width), torch.Generator()
        ).eval()


@dataclass(frozen=True)
class Student:
    """A student read from a file.

    Args:
        network: its architecture and sizes.
        model: the network, from (B, C, S, S) images in [0, 1] to (B, K) logits.
        facts: the file's facts about the run that it is from; `privacy` is that run's card.
    """

    network: Network
    model: Classifier
    facts: Mapping[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of `predict`; their numbers if none are known."""
        return tuple(self.facts.get("classes") or map(str, range(self.network.num_classes)))

    def predict(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the (B, K) probabilities of (B, C, S, S) uint8 images, S and C as in `network`.

        Raises:
            UserError: the images are of another type or shape, or there are none.
        """
        fits = images.ndim == 4 and len(images) > 0 and images.shape[1:] == self.network.shape
        if images.dtype != np.uint8 or not fits:
            raise UserError(
                f"images={images.dtype} {images.shape}: give uint8 images, values 0 to 255, of "
                f"shape (B, {', '.join(map(str, self.network.shape))}) with B >= 1"
            )
        return predict(self.model, images, torch.device("cpu"))

    def __repr__(self) -> str:
        """Return the network and the result of the run, without the weights."""
        return f"Student({self.network}, {self.facts.get('result')!r})"


def export(run_folder: Path, folder: Path, form: Format) -> Path:
    """Write the student of a completed run to FOLDER/student.safetensors or .onnx; return the path.

    The file's metadata hold the network, its classes, the run's result and its privacy card. An
    ONNX file maps `images`, (B, C, S, S) float32 in [0, 1], to `probabilities`, (B, K) float32.

    Raises:
        UserError: the run has not completed, has no student of its own, or the file exists or
            cannot be written.
    """
    path = folder / f"{NAME}.{form}"
    if path.exists():
        raise UserError(f"{path} exists already; choose another folder")
    student = student_of(run_folder)
    metadata = {FACTS: json.dumps(student.facts)}
    if form == "onnx":
        content = _to_onnx(student.model, student.network, metadata)
    else:
        weights = {name: w.contiguous() for name, w in student.model.state_dict().items()}
        content = safetensors.torch.save(weights, metadata)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); choose another folder"
        ) from None
    return path


def student_of(run_folder: Path) -> Student:
    """Return the student of a completed run, from its last checkpoint.

    Raises:
        UserError: the run has not completed, or has no student of its own.
    """
    experiment = open_run_folder(run_folder)
    summary = read_summary(run_folder)
    if summary.get("status") != "completed":
        cause = f" ({summary['error']})" if summary.get("error") else ""
        raise UserError(
            f"{run_folder}: this run is not completed{cause}; go on with `fed-dpsd resume "
            f"{run_folder}`, or run it again with other settings"
        )
    config = experiment.config
    arch, width = config.model.student, config.model.student_width
    if experiment.method.averages:  # an average of teachers has their architecture
        arch, width = config.architecture(0), config.model.teacher_width
    network = Network(arch, width, config.data.shape, config.data.num_classes)
    state = checkpoint.load(run_folder / "checkpoint")
    weights = below("student", state.tensors) if state else {}
    model = network.build()
    if reason := misfit(model, weights):
        raise UserError(
            f"{run_folder}: method {summary['method']} has no student of its own to export: "
            f"{reason}"
        )
    model.load_state_dict(weights)
    facts = {
        "version": __version__,
        "network": vars(network),
        "result": result_line(experiment, summary),
        "classes": config.data.class_names,
        "check": _check(model, network).tolist(),
        **{key: summary[key] for key in ("method", "data", "student_sha256", "privacy")},
    }
    return Student(network, model, facts)


def open_student(path: Path) -> Student:
    """Read a student that `export` wrote as safetensors.

    Raises:
        UserError: it is no such file, or it is damaged.
    """
    if problem := _no_model(path):
        raise UserError(f"{path} {problem}")
    binder = Binder()
    try:
        weights = read_weights(path)
        with safetensors.safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {})[FACTS])
        network = binder.bind(Network, facts["network"], "network.")
        binder.finish()
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        reason = "it holds no network" if isinstance(error, KeyError) else error
        raise UserError(
            f"{path} is not an exported student ({reason}); give a file of `fed-dpsd export`"
        ) from None
    model = network.build()
    if reason := misfit(model, weights):
        raise UserError(f"{path}: {reason}; export the student again")
    if checkpoint.digest_of(weights) != facts.get("student_sha256"):
        raise UserError(f"{path} is damaged: its weights are not those exported; export them again")
    model.load_state_dict(weights)
    known = facts.get("check")  # files of earlier versions have none
    if known is not None and np.abs(_check(model, network) - known).max() > ROUNDING:
        raise UserError(
            f"{path}: this processor computes other fixed features than the one that trained the "
            "student; use one of that kind, or an export with --format onnx, which holds them"
        )
    return Student(network, model, facts)


def _no_model(path: Path) -> str:
    """Return what a path is where it is no safetensors file, and what to do; "" otherwise."""
    if is_run_folder(path):
        return f"is a run folder; `fed-dpsd export {path}` writes its student to a file"
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        return f"is a folder; give the file {files[0] if files else 'that `export` wrote'}"
    if path.suffix == ".onnx":
        return "is for other tools; give a file of `fed-dpsd export RUN --format safetensors`"
    return "" if path.exists() else "is not there; `fed-dpsd export RUN` writes such a file"


def _check(model: Classifier, network: Network) -> NDArray[np.float32]:
    """Return a student's (4, K) probabilities on images of random pixels.

    A file holds no constants of fixed features, which a processor with other instructions may
    compute otherwise (fed_dpsd/models/patches.py).
    """
    images = procedural.noise(4, network.shape, Streams(0).numpy("check"))
    return predict(model, images, torch.device("cpu"))


class _Probabilities(nn.Module):
    """A classifier whose outputs are probabilities."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (B, C, S, S) images in [0, 1] to (B, K) probabilities."""
        return self.model(images).softmax(1)


def _to_onnx(model: Classifier, network: Network, metadata: Mapping[str, str]) -> bytes:
    """Return the content of an ONNX file that takes any batch size."""
    try:
        import onnxscript  # noqa: F401  (torch.onnx needs it)
    except ImportError:
        raise UserError(
            "--format onnx needs two more packages: pip install 'fed-dpsd[onnx]'"
        ) from None
    images = torch.zeros((2, *network.shape))
    model(images)  # fixed features compute their constants here, so they are not traced
    program = torch.onnx.export(
        _Probabilities(model).eval(),
        (images,),
        input_names=["images"],
        output_names=["probabilities"],
        dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(metadata)
    return program.model_proto.SerializeToString()
