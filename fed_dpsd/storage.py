"""Storage: where files lie, and atomic writes, so that a crash leaves the old or the new file."""

import io
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

RUN_NAME = "name"  # the file of a run folder that keeps the run's name


def home() -> Path:
    """Return FED_DPSD_HOME, by default ~/.fed-dpsd.

    It holds caches and, by default, the runs of `flwr run`.
    """
    return Path(os.environ.get("FED_DPSD_HOME") or Path.home() / ".fed-dpsd").absolute()


def app_folder() -> Path:
    """Return the folder of the Flower app: inside an installed wheel, otherwise the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_app"
    return installed if installed.is_dir() else package.parent


def conf_folder() -> Path:
    """Return the folder of YAML files."""
    return app_folder() / "conf"


def client_name(client: int) -> str:
    """Return the name that a client's files begin with."""
    return f"client_{client:03d}"


def run_name(folder: Path) -> str:
    """Return the name of a run, under which clients are charged: its folder's when it was made.

    A folder that is renamed or copied holds the same run, whose charges are not due again.
    """
    name = folder / RUN_NAME  # folders of former versions have none
    return name.read_text() if name.exists() else folder.name


def npz_of(arrays: Mapping[str, Any]) -> bytes:
    """Return an npz of named arrays or numbers."""
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces `path` when the block ends; durable then.

    An error inside leaves `path` as it was. The folder is created if it does not exist.
    """
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)  # another process may just have made it
        sync(path.parent.parent)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    yield temporary
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until the block ends, which is for short blocks.

    Elsewhere the exception of a signal may be raised between any two steps of Python, even in a
    `finally`, and a lock that was just taken or is about to be let go of would be kept. Only the
    main thread is interrupted by signals, so in another thread there is nothing to wait for.
    """
    waiting: list[int] = []
    former = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if handler := signal.getsignal(number):  # what is not Python's own stays as it is
                    former[number] = handler
                    signal.signal(number, lambda received, _: waiting.append(received))
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        for number in waiting:
            signal.raise_signal(number)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, or leave it as it was; durable on return."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def json_of(content: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file that people can read."""
    return (json.dumps(content, indent=2) + "\n").encode()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that people can read, atomically."""
    write_atomically(path, json_of(content))


def remove(path: Path) -> None:
    """Delete a file if it exists; it stays deleted after a loss of power."""
    path.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
