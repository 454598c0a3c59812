"""A run's folder: its name, configuration, log, predictions and pictures."""

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import platform
import secrets
import subprocess
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fed_dpsd import __version__
from fed_dpsd.accounts.secret import LEDGER, draw_secret
from fed_dpsd.config.bind import read_run
from fed_dpsd.data.intake import Records
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import Experiment, set_up
from fed_dpsd.methods.method import ReplayBuffer, State
from fed_dpsd.server import checkpoint
from fed_dpsd.server.inputs import ELSEWHERE, inputs_of, inputs_path, new_inputs_name
from fed_dpsd.server.summary import read_summary
from fed_dpsd.storage import (
    RUN_NAME,
    Unwritable,
    is_run_folder,
    replacing,
    shown_path,
    to_json_bytes,
    to_npz,
    write_atomically,
    write_together,
    writing,
)

PREDICTIONS = "predictions.npz"  # of the student, for the test images
TEST_IMAGES = "test_images"  # the folder of pictures of test images, one for each class
LARGEST_GRID = 4_096  # pixels of a side of a picture; larger ones are scaled down
GAP = 2  # pixels between images of a picture
TYPED = "overrides.json"  # what the user typed; null if unknown
REHEARSAL = "FED_DPSD_REHEARSAL"  # set in the environment of a rehearsal's coordinator
_LIBRARIES = ("flwr", "ray", "torch", "torchvision", "numpy", "hydra-core", "dp-accounting")


def name_run_folder(experiment: Experiment) -> Path:
    """Return the folder of a new run: `run_folder`, or a new name below `out`."""
    config = experiment.config
    if config.run_folder:
        return Path(config.run_folder)
    time = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    facts = f"{experiment.method_name}-{config.data.name}-seed{config.seed}"
    return Path(config.out) / f"{time}-{facts}-{secrets.token_hex(2)}"


def new_run_folder(experiment: Experiment) -> Path:
    """Create the run folder with its configuration; never overwrite an existing folder.

    The secret of its noise, if any, is drawn and stored outside it. The data of a simulation is
    read, unless this process has read it, and a coordinator's test images are.
    """
    folder = name_run_folder(experiment)
    if folder.is_dir():
        remedy = "choose another"
        if is_run_folder(folder):
            remedy += f", or resume the run in it: fed-dpsd resume {shown_path(folder)}"
        raise UserError(f"run_folder={folder} already exists; {remedy}")
    inputs = inputs_of(experiment)
    try:
        with writing(folder):
            folder.mkdir(parents=True)
        try:
            write_atomically(folder / RUN_NAME, os.fsencode(_new_run_name(experiment, folder)))
            write_together(draw_secret(experiment, folder) | new_inputs_name(experiment, folder))
            files = {
                inputs_path(experiment, folder): to_json_bytes(inputs),
                folder / "versions.json": to_json_bytes(versions()),
                folder / TYPED: to_json_bytes(experiment.overrides),
                # This file comes last, since it makes the folder a run folder.
                folder / "config.yaml": experiment.to_yaml().encode(),
            }
            write_together(files)
        except UserError:
            for name in (LEDGER, RUN_NAME, ELSEWHERE):
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
            raise
    except Unwritable as error:
        typed = f"run_folder={folder}" if experiment.config.run_folder else f"out={folder.parent}"
        raise UserError(f"{typed}: {error}") from None
    return folder


def _new_run_name(experiment: Experiment, folder: Path) -> str:
    """Return the name of a new run; if its server draws secret noise, no other run has it.

    Clients repeat the answers of a run. If the server of another run of the same name drew
    its own noise for them, they would be released twice for one charge.
    """
    drawn = experiment.answers.noise_at == "server" and not experiment.seeded
    return folder.name + (f"-{secrets.token_hex(8)}" if drawn else "")


def versions() -> dict[str, str | None]:
    """Return the versions of libraries, the commit of this code and the machine's hardware.

    `rehearsal` states that all hospitals are on one machine; it is None for any other run.
    """
    installed: dict[str, str | None] = {name: metadata.version(name) for name in _LIBRARIES}
    installed |= {"fed-dpsd": __version__, "python": platform.python_version()}
    rehearsal = "all hospitals on one machine" if REHEARSAL in os.environ else None
    return installed | {"commit": _commit(), "machine": _machine(), "rehearsal": rehearsal}


@functools.cache  # cached, since later commits do not change the imported code
def _commit() -> str | None:
    """Return the commit of this package's Git checkout, "+dirty" if changed; None without one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # fails if it is not a tracked file
        return git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+dirty")
    except (OSError, subprocess.CalledProcessError):
        return None


def _machine() -> str:
    """Describe the hardware that the run's times depend on, omitting the host name."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()}, {os.cpu_count()} cores, {gpu}"


def open_run_folder(folder: Path) -> Experiment:
    """Return the experiment of an existing run folder."""
    experiment = set_up(read_run(folder), None, written=True)
    with contextlib.suppress(OSError, ValueError):  # only reports need it
        typed = json.loads((folder / TYPED).read_text())
        return dataclasses.replace(experiment, overrides=typed)
    return experiment


@dataclass(frozen=True)
class CompletedRun:
    """A completed run, read from its folder."""

    folder: Path
    experiment: Experiment
    summary: Mapping[str, Any]
    state: State  # the last checkpoint; it has no tensors if the method keeps none


def open_completed(folder: Path) -> CompletedRun:
    """Read the folder of a completed run."""
    experiment = open_run_folder(folder)
    summary = read_summary(folder)
    if summary.get("status") != "completed":
        cause = f" ({summary['error']})" if summary.get("error") else ""
        raise UserError(
            f"{folder}: this run has not completed{cause}; continue it with `fed-dpsd resume "
            f"{shown_path(folder)}`, or run it again with other settings"
        )
    require_checkpoint(folder, summary)
    state = checkpoint.load(folder / "checkpoint") or State(0, {}, [])
    return CompletedRun(folder, experiment, summary, state)


def require_checkpoint(folder: Path, summary: Mapping[str, Any]) -> None:
    """Check that a completed run still has its checkpoint; method=local writes none.

    Raises:
        UserError: the checkpoint is missing.
    """
    path = folder / "checkpoint"
    if summary.get("student_sha256") is not None and not checkpoint.latest(path):
        raise UserError(
            f"{path}, with the student, is missing or empty; restore it from a backup, or delete "
            f"{folder / 'summary.json'} and resume the run: it starts again (its ledger stays)"
        )


def open_log(path: Path, rounds: int) -> tuple[Path, list[dict[str, Any]]]:
    """Cut a log, which may be ahead of its checkpoint, to `rounds` lines; return path and lines.

    Raises:
        UserError: the log has fewer lines, or is damaged.
    """
    text = path.read_text().splitlines()[:rounds] if path.exists() else []
    try:
        lines = [json.loads(line) for line in text]
    except ValueError:
        lines = []
    if len(lines) < rounds:
        raise UserError(
            f"{path} does not hold the {rounds} rounds of its checkpoint; delete the folder "
            f"{path.with_name('checkpoint')} to start the run again (its ledger stays)"
        )
    write_atomically(path, "".join(line + "\n" for line in text).encode())
    return path, lines


def read_log(folder: Path, seen: int = 0) -> list[dict[str, Any]]:
    """Return the complete lines of a run's rounds.jsonl after the first `seen` lines.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / "rounds.jsonl"
    lines = path.read_text().split("\n")[seen:-1] if path.exists() else []
    try:
        return [json.loads(line) for line in lines]
    except ValueError:
        raise UserError(f"{path} is damaged; restore it from a backup") from None


def save_predictions(
    folder: Path, probabilities: NDArray[np.floating], test: Records, number: int
) -> None:
    """Write the student's predictions for the test images after a round.

    `choosing` marks the half of the images for choosing a threshold; all images of a patient, or
    all copies of an image, are in the same half.
    """
    arrays = {"probabilities": probabilities.astype(np.float32), "labels": test.labels}
    arrays |= {"choosing": test.ids % 2 == 0, "round": np.array(number)}
    write_atomically(folder / PREDICTIONS, to_npz(arrays))


def read_predictions(folder: Path, number: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of `save_predictions`; empty unless the file is of round `number`."""
    path = folder / PREDICTIONS
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as kept:
            arrays = dict(kept)
    except (OSError, ValueError, zipfile.BadZipFile):
        raise UserError(f"{path} is damaged; restore it from a backup, or delete it") from None
    return arrays if arrays.pop("round") == number else {}


def save_samples(folder: Path, buffer: ReplayBuffer, number: int) -> None:
    """Write a PNG grid of the round's first 64 synthetic images, 8 in a row."""
    _save_grid(buffer.images[:64], sample_path(folder, number))


def save_test_images(folder: Path, sheet: Mapping[int, NDArray[np.uint8]]) -> None:
    """Write a PNG grid of public test images of each class, 8 in a row, scaled."""
    for label, images in sheet.items():
        _save_grid(images, folder / TEST_IMAGES / f"{label:05d}.png")


def _save_grid(images: NDArray[np.uint8], path: Path) -> None:
    count, channels, *size = images.shape
    height, width = (side + GAP for side in size)
    rows, columns = -(-count // 8), min(count, 8)
    grid = np.zeros((channels, rows * height + GAP, columns * width + GAP), np.uint8)
    for place, image in enumerate(images):
        top, left = place // 8 * height + GAP, place % 8 * width + GAP
        grid[:, top : top + size[0], left : left + size[1]] = image
    colours = np.broadcast_to(grid, (3, *grid.shape[1:]))
    picture = Image.fromarray(np.ascontiguousarray(colours.transpose(1, 2, 0)))
    picture.thumbnail((LARGEST_GRID, LARGEST_GRID))
    with replacing(path) as temporary:
        picture.save(temporary, "png")


def sample_path(folder: Path, number: int) -> Path:
    """Return the path of a round's picture of synthetic images."""
    return folder / "samples" / f"round_{number:05d}.png"
