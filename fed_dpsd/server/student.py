"""Students, with facts about their runs, and exported files of students.

`fed-dpsd predict` imports this file, so it imports nothing large except torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fed_dpsd.config import ModelConfig, is_function
from fed_dpsd.config.bind import bind_dataclass
from fed_dpsd.data.images import Conversion
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.models import digest_of, initialise, procedural, read_file, weights_mismatch
from fed_dpsd.models.classifiers import CLASSIFIERS, Classifier, builder
from fed_dpsd.models.functions import missing_function
from fed_dpsd.models.inference import predict
from fed_dpsd.server.onnx_file import OnnxModel
from fed_dpsd.storage import is_run_folder, shown_path
from fed_dpsd.streams import Streams

FACTS = "fed_dpsd"  # key in the metadata of a file
FACT_KEYS = {
    *("result", "classes", "pixel_bits", "check", "student_sha256", "constants_sha256"),
    *("privacy", "card"),
}
CONSTANTS = "constants."  # how the names of fixed features' tensors begin in a file
ROUNDING = 1e-4  # largest difference of a probability between processors

Model = TypeVar("Model", bound=Classifier | OnnxModel, covariant=True)


@dataclass(frozen=True)
class Network:
    """The architecture and sizes of a student."""

    architecture: str  # a key of `CLASSIFIERS`, or the name of a Python function
    width: int  # width of its first layer, >= 1
    shape: tuple[int, ...]  # (C, S, S) of its images
    num_classes: int  # number of classes, >= 2

    def __post_init__(self) -> None:
        if self.architecture not in CLASSIFIERS and not is_function(self.architecture):
            known = ", ".join(CLASSIFIERS)
            raise ValueError(f"architecture={self.architecture!r} is not one of {known}")
        if len(self.shape) != 3 or min(self.width, *self.shape) < 1 or self.num_classes < 2:
            raise ValueError(f"{self} has an invalid size")

    def build(self, model: ModelConfig | None = None) -> Classifier:
        """Return the network with placeholder weights, on the public features of `model`, if any.

        Raises:
            UserError: the network comes from a Python function that this process does not have.
        """
        if missing := missing_function("student", self.architecture):
            raise UserError(missing)
        name = self.architecture
        make = builder(name, model) if model else CLASSIFIERS[name]
        return initialise(
            lambda: make(self.shape, self.num_classes, self.width), torch.Generator()
        ).eval()


@dataclass(frozen=True)
class Student(Generic[Model]):
    """A student from a run or a file.

    Args:
        network: the student's architecture and sizes.
        model: the network, from (B, C, S, S) images in [0, 1] to (B, K) logits; or an ONNX file's
            network.
        facts: the facts about the run that it comes from, including `privacy`.
    """

    network: Network
    model: Model
    facts: Mapping[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of `predict`; the class numbers if names are unknown."""
        return tuple(self.facts["classes"] or map(str, range(self.network.num_classes)))

    @property
    def conversion(self) -> Conversion:
        """Return how the run converts images; files from before `data.fit` name no fit."""
        fit, window = self.facts.get("fit", "crop"), self.facts.get("window")
        return Conversion(self.network.shape, fit, self.facts["pixel_bits"], window)

    @property
    def card(self) -> dict[str, Any]:
        """The privacy card (fed_dpsd/server/cards.py)."""
        return {**self.facts["card"], "privacy": self.facts["privacy"]}

    def predict(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the (B, K) probabilities of (B, C, S, S) uint8 images, S and C as in `network`.

        Raises:
            UserError: the images have the wrong type or shape, or there are no images.
        """
        array = isinstance(images, np.ndarray)
        fits = array and images.ndim == 4 and len(images) > 0
        if not fits or images.dtype != np.uint8 or images.shape[1:] != self.network.shape:
            given = f"{images.dtype} {images.shape}" if array else f"a {type(images).__name__}"
            raise UserError(
                f"images={given}: give uint8 images, values 0 to 255, as a NumPy array of "
                f"shape (B, {', '.join(map(str, self.network.shape))}) with B >= 1"
            )
        return _probabilities(self.model, images)

    def __repr__(self) -> str:
        """Return the network and the result of the run, without the weights."""
        return f"Student({self.network}, {self.facts['result']!r})"


def constants_of(model: Classifier) -> dict[str, torch.Tensor]:
    """Return the tensors that a network's fixed features are computed with, as a file names them.

    They are in the file, because procedural images determine them in seconds to minutes, and
    processors of different kinds round them differently.
    """
    features = model.fixed_features
    constants = features.constants() if features else {}
    return {f"{CONSTANTS}{name}": tensor for name, tensor in constants.items()}


def open_student(path: Path) -> Student[Classifier | OnnxModel]:
    """Read a student that `export` wrote, as safetensors or ONNX."""
    if problem := _no_model(path):
        raise UserError(f"{path} {problem}")
    weights: dict[str, torch.Tensor] = {}
    model: Classifier | OnnxModel
    try:
        if path.suffix == ".onnx":
            model = OnnxModel(path)
            metadata = model.metadata
        else:
            weights, metadata = read_file(path)
        facts = json.loads(metadata[FACTS])
        name = facts["network"]["architecture"]
        if name not in CLASSIFIERS and str(name).isidentifier():
            raise UserError(
                f"{path}: {name} is a plug-in's network, which FedDPSD does not load without the "
                "plug-in; use its ONNX file as docs/artefacts.md shows"
            )
        network = bind_dataclass(Network, facts["network"], "network.")
        if lacking := FACT_KEYS - facts.keys():
            raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        reason = "it contains no network" if isinstance(error, KeyError) else error
        raise UserError(
            f"{path} is not an exported student ({reason}); give a file of `fed-dpsd export`"
        ) from None
    if path.suffix != ".onnx":
        model = _load_network(network, weights, facts, path)
    # NaN is not close to anything, so such a student is rejected too.
    if not np.abs(check_predictions(model, network) - facts["check"]).max() <= ROUNDING:
        raise UserError(f"{path}: {_why_predictions_differ(model)}")
    return Student(network, model, facts)


def _load_network(
    network: Network, tensors: dict[str, torch.Tensor], facts: Mapping[str, Any], path: Path
) -> Classifier:
    model = network.build()
    constants = {name: t for name, t in tensors.items() if name.startswith(CONSTANTS)}
    weights = {name: t for name, t in tensors.items() if name not in constants}
    if reason := weights_mismatch(model, weights):
        raise UserError(f"{path}: {reason}; export the student again")
    digests = digest_of(weights), digest_of(constants)
    if digests != (facts["student_sha256"], facts["constants_sha256"]):
        raise UserError(
            f"{path} is damaged: its weights differ from the exported ones; export it again"
        )
    model.load_state_dict(weights)
    if features := model.fixed_features:
        features.given = {name.removeprefix(CONSTANTS): t for name, t in constants.items()}
    if features is model.backbone:
        model.double()  # so that instructions of different processors agree to the last digits
    return model


def _no_model(path: Path) -> str:
    """Return why a path is not a model file, with a remedy; "" if it is a model file."""
    if is_run_folder(path):
        return f"is a run folder; `fed-dpsd export {shown_path(path)}` writes its student to a file"
    if path.is_dir():
        files = sorted([*path.glob("*.safetensors"), *path.glob("*.onnx")])
        return f"is a folder; give the file {files[-1] if files else 'that `export` wrote'}"
    if path.suffix == ".pt2":
        return "is for torch.export.load; give a file of --format safetensors or onnx"
    return "" if path.exists() else "does not exist; `fed-dpsd export RUN` writes such a file"


def check_predictions(model: Classifier | OnnxModel, network: Network) -> NDArray[np.float32]:
    """Return a student's (4, K) probabilities on images of random pixels.

    An exported file stores them, because code or a processor may compute other features.
    """
    return _probabilities(model, procedural.noise(4, network.shape, Streams(0).numpy("check")))


def _why_predictions_differ(model: Classifier | OnnxModel) -> str:
    """Return why a file's student predicts differently than when exported, with a remedy."""
    if isinstance(model, OnnxModel):
        return "its predictions differ from the exported student's; export the student again"
    return (
        "its predictions differ from the exported student's, because this processor or version "
        "computes something else; export the student again, or with --format onnx"
    )


def _probabilities(model: Classifier | OnnxModel, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    if isinstance(model, OnnxModel):
        return model.predict(images)
    return predict(model, images, torch.device("cpu"))
