"""Checkpoints in safetensors and JSON, written atomically; two states and all queries are kept."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import safetensors.torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from fed_dpsd.errors import UserError
from fed_dpsd.methods.method import ReplayBuffer, State
from fed_dpsd.storage import write_atomically

KEPT = 2


def save(folder: Path, state: State) -> None:
    """Write `state` below `folder`; a crash at any time leaves a complete older checkpoint.

    The newest part of the replay buffer is written first, and its images are read from that file
    from then on. The tensors follow. The JSON file is written last and makes the checkpoint valid.
    Then all states except the last two are removed.
    """
    digests = []
    if state.buffer:
        # safetensors writes memory as it is, which could transpose arrays that are not contiguous.
        part = {name: np.ascontiguousarray(a) for name, a in vars(state.buffer[-1]).items()}
        file = _buffer_file(folder, len(state.buffer))
        digests = [_write(file, safetensors.numpy.save(part))]
        state.buffer[-1] = _mapped(file, part)
    if state.buffer and state.round > 1:
        digests = [*_read_index(folder, state.round - 1)["bank"], *digests]
    tensors = {name: tensor.cpu().contiguous() for name, tensor in state.tensors.items()}
    index = {
        "round": state.round,
        "tensors": _write(_state_file(folder, state.round), safetensors.torch.save(tensors)),
        "bank": digests,
    }
    _write(_index_file(folder, state.round), json.dumps(index).encode())
    for number in _rounds(folder)[:-KEPT]:
        _index_file(folder, number).unlink()
        _state_file(folder, number).unlink(missing_ok=True)


def _mapped(file: Path, part: dict[str, NDArray[Any]]) -> ReplayBuffer:
    """Return a round's samples; images are mapped from the file, so they take no memory."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        start = json.loads(opened.read(length))["images"]["data_offsets"][0]
    shape = part["images"].shape
    if part["images"].size:
        images = np.memmap(file, np.uint8, "r", 8 + length + start, shape)
        part = {**part, "images": images}
    return ReplayBuffer(**part)


def latest(folder: Path) -> int:
    """Return the number of the last round saved below `folder`; 0 if there is none."""
    return max(_rounds(folder), default=0)


def load(folder: Path) -> State | None:
    """Return the newest checkpoint below `folder`; None if there is none yet."""
    rounds = _rounds(folder)
    if not rounds:
        return None
    newest = rounds[-1]
    remedy = (
        f"delete {_index_file(folder, newest).name} to continue from round {rounds[-2]}"
        if len(rounds) > 1
        else f"delete the folder {folder} to start the run again (its ledger stays)"
    )
    index = _read_index(folder, newest, remedy)
    state_file = _state_file(folder, newest)
    try:
        tensors = safetensors.torch.load(_read(state_file, index["tensors"], remedy))
    except SafetensorError as error:
        raise _corrupt(state_file, str(error), remedy) from error
    buffer = []
    for number, digest in enumerate(index["bank"], start=1):
        file = _buffer_file(folder, number)
        buffer.append(_mapped(file, safetensors.numpy.load(_read(file, digest, remedy))))
    return State(newest, tensors, buffer)


def _write(path: Path, content: bytes) -> str:
    write_atomically(path, content)
    return hashlib.sha256(content).hexdigest()


def _read(path: Path, digest: str, remedy: str) -> bytes:
    if not path.is_file():
        raise _corrupt(path, "it is missing", remedy)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise _corrupt(path, "its checksum does not match", remedy)
    return content


def _read_index(folder: Path, number: int, remedy: str = "") -> dict[str, Any]:
    path = _index_file(folder, number)
    try:
        index = json.loads(path.read_text())
        return {"tensors": str(index["tensors"]), "bank": list(index["bank"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _corrupt(path, str(error), remedy) from error


def _corrupt(path: Path, problem: str, remedy: str) -> UserError:
    return UserError(f"the checkpoint file {path} is corrupt ({problem}); {remedy}")


def _rounds(folder: Path) -> list[int]:
    names = (re.fullmatch(r"round_(\d+)\.json", path.name) for path in folder.glob("*.json"))
    return sorted(int(name.group(1)) for name in names if name)


def _index_file(folder: Path, number: int) -> Path:
    return folder / f"round_{number:05d}.json"


def _state_file(folder: Path, number: int) -> Path:
    return folder / f"round_{number:05d}.safetensors"


def _buffer_file(folder: Path, number: int) -> Path:
    return folder / "bank" / f"round_{number:05d}.safetensors"
