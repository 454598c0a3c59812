"""Exported students: a file with weights, network and privacy card, plus separate cards."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

from fed_dpsd.errors import UserError
from fed_dpsd.experiment import test_split
from fed_dpsd.models import procedural
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.inference import predict
from fed_dpsd.server import onnx_file, program_file
from fed_dpsd.server.cards import cards_in, model_card
from fed_dpsd.server.completed import student_of
from fed_dpsd.server.run_folder import CompletedRun, open_completed
from fed_dpsd.server.student import FACTS, Student, constants_of
from fed_dpsd.storage import to_json_bytes, to_utf8, write_together
from fed_dpsd.streams import Streams

NAME = "student"
Format = Literal["safetensors", "onnx", "pt2"]
CARDS = ("privacy_card.json", "PRIVACY.md", "README.md", "config.json")
AGREEMENT = 1e-4  # largest allowed difference of a probability between a file and the student
DRAWN = 256  # images for the comparison if the run's test split cannot be read


class Exported(NamedTuple):
    """An exported student's file, and its comparison with the student ("" for safetensors)."""

    path: Path
    compared: str


def export(run_folder: Path, folder: Path, form: Format) -> Exported:
    """Write the student of a completed run to FOLDER/student.FORM, and its cards.

    The file's metadata contains the network, its classes, the run's result and its privacy card. A
    safetensors file has everything that fixed features are computed with, but no public network.
    The cards next to the file are privacy_card.json and PRIVACY.md, README.md (a model card for the
    Hugging Face hub) and config.json (classes and sizes). An ONNX or pt2 file is compared with the
    student on the run's test images before it is written.
    """
    path = folder / f"{NAME}.{form}"
    if path.exists():
        raise UserError(f"{path} already exists; choose another folder")
    if form == "onnx":
        onnx_file.require()
    run = open_completed(run_folder)
    student = student_of(run)
    backbone = run.experiment.config.model.backbone
    if form == "safetensors" and backbone and student.network.architecture == "pretrained":
        raise UserError(
            f"--format safetensors would leave out the features of model.backbone={backbone}; use "
            "--format onnx or pt2, which include them"
        )
    digest = str(student.facts["student_sha256"])
    files = _files_of(folder, digest)
    metadata, compared = {FACTS: json.dumps(student.facts)}, ""
    if form == "onnx":
        content = onnx_file.to_onnx(student.model, student.network.shape, metadata)
        compared = _compared("ONNX", onnx_file.OnnxModel(content).predict, student, run)
    elif form == "pt2":
        content = program_file.to_pt2(student.model, student.network.shape, metadata)
        compared = _compared("the program", program_file.predictor(content), student, run)
    else:
        weights = student.model.state_dict() | constants_of(student.model)
        content = safetensors.torch.save({k: w.contiguous() for k, w in weights.items()}, metadata)
    files[path.name] = {"sha256": hashlib.sha256(content).hexdigest(), "compared": compared or None}
    card = {"artefact": f"the student in {' and '.join(sorted(files))}", **student.card}
    card["files"] = files
    contents = cards_in(folder, card)  # written first: later exports recognise the folder by them
    if not (folder / "README.md").exists():  # users may have edited it
        text = model_card(run, path.name, student.classes, card)
        contents[folder / "README.md"] = to_utf8(text)
    write_together(
        contents | {folder / "config.json": to_json_bytes(_config(student)), path: content}
    )
    return Exported(path, compared)


def _files_of(folder: Path, digest: str) -> dict[str, Any]:
    """Return the entries for files in a folder's card; {} for a new folder."""
    there = [name for name in CARDS if (folder / name).exists()]
    if not there:
        return {}
    try:
        card = json.loads((folder / "privacy_card.json").read_text())
        if card["run"]["student_sha256"] == digest:
            return dict(card["files"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(
        f"{folder / there[0]} already exists and is not from this student; choose another folder"
    )


def _config(student: Student[Classifier]) -> dict[str, Any]:
    names = dict(enumerate(student.classes))
    return {
        **{key: list(v) if isinstance(v, tuple) else v for key, v in vars(student.network).items()},
        "id2label": names,
        "label2id": {name: number for number, name in names.items()},
        "student_sha256": student.facts["student_sha256"],
    }


def _compared(
    what: str,
    exported: Callable[[NDArray[np.uint8]], NDArray[np.float32]],
    student: Student[Classifier],
    run: CompletedRun,
) -> str:
    images, named = _test_images(run)
    own = predict(student.model, images, torch.device("cpu"))
    largest = float(np.abs(exported(images) - own).max())
    compared = f"{what} and the student differ by at most {largest:.1e} on {named}"
    if not largest <= AGREEMENT:
        raise UserError(
            f"{compared}, more than {AGREEMENT:g}; nothing was written: use --format safetensors"
        )
    return compared


def _test_images(run: CompletedRun) -> tuple[NDArray[np.uint8], str]:
    """Return the run's test images (or random images if they cannot be read) and their name.

    The name appears on the card, so it contains no path of this machine.
    """
    try:
        test = test_split(run.experiment)
    except UserError:
        test = None
    if test is not None:
        return test.images, f"{len(test):,} test images of {run.experiment.config.data.name}"
    rng = Streams(0).numpy("compared images")
    shape = run.experiment.config.data.shape
    named = f"{DRAWN} random images, because the run has no test images that can be read here"
    return procedural.areas(DRAWN, shape, rng), named
