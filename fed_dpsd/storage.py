"""Storage: file paths, and atomic writes that leave the old or the new file after a crash.

A full disk or an unwritable folder is reported in one line with the remedy, and leaves no partial
file.
"""

import codecs
import errno
import fcntl
import functools
import io
import json
import logging
import math
import mmap
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.errors import UserError, is_disk_full, reason_of

if TYPE_CHECKING:
    from jinja2 import Environment

logger = logging.getLogger("fed_dpsd")
CLIENT = "client_"  # how the names of a client's files begin
RUN_NAME = "name"  # the file of a run folder that keeps the run's name
LARGE = 2**28  # bytes of an array that need not be in memory


class Unwritable(UserError):
    """A file or folder cannot be written: the message names it, the reason and the remedy."""


def home() -> Path:
    """Return FED_DPSD_HOME, by default ~/.fed-dpsd.

    It holds caches, the secrets and ledgers of runs with `noise=secure`, and, by default, the runs
    of `flwr run`.
    """
    return expanded(os.environ.get("FED_DPSD_HOME") or "~/.fed-dpsd").absolute()


def expanded(path: str) -> Path:
    """Return a path in which ~ or ~USER is that user's home folder.

    Raises:
        UserError: the home folder is not known, as in a container without such a user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path}: its home folder is not known; write the whole path (for ~/.fed-dpsd, set "
            "FED_DPSD_HOME)"
        ) from None


def nearest_existing(folder: Path) -> Path:
    """Return a folder, or its nearest existing ancestor."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def app_folder() -> Path:
    """Return the folder of the Flower app: inside an installed wheel, otherwise the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_app"
    return installed if installed.is_dir() else package.parent


def conf_folder() -> Path:
    """Return the folder of YAML files."""
    return app_folder() / "conf"


def try_lock(path: Path) -> IO[bytes] | None:
    """Open and lock a file; return None if another process holds the lock.

    Closing the file releases the lock.
    """
    file = path.open("wb")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def templates_folder(module: str) -> Path:
    """Return the folder `templates` next to a module's file."""
    folder = Path(module).with_name("templates")
    if not folder.is_dir():
        raise UserError(
            f"{folder} does not exist: a Flower bundle has no page templates; run this command "
            "where FedDPSD is installed from its wheel or repository"
        )
    return folder


def jinja_environment(module: str, **options: Any) -> "Environment":
    """Return a Jinja environment for the templates next to a module's file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # few commands need it

    return Environment(
        loader=FileSystemLoader(templates_folder(module)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )


def client_name(client: int) -> str:
    """Return the prefix of the names of a client's files."""
    return f"{CLIENT}{client:03d}"


def shown_path(path: Path) -> str:
    """Return a path as typed in a shell, relative if it is below the working directory."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder holds the configuration of a run."""
    return (folder / "config.yaml").is_file()


def run_name(folder: Path) -> str:
    """Return the name under which a run charges clients: its folder's original name.

    If its server draws secret noise, random digits follow. A renamed or copied folder is the same
    run and is not charged again.
    """
    name = folder / RUN_NAME  # an engine may use a folder without it
    return os.fsdecode(name.read_bytes()) if name.exists() else folder.name


def large_array(shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
    """Return an array of zeros or, in memory, of any values, to be filled.

    One of LARGE bytes or more is mapped from an unnamed file in the folder for temporary files,
    which disappears with the array or the process. It is in memory if that folder lacks the room.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < LARGE:
        return np.empty(shape, dtype)
    try:
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a write to a map cannot report a full disk
            return np.ndarray(shape, dtype, mmap.mmap(file.fileno(), size))
    except OSError as error:
        logger.warning(
            "%s has no room for %.1f GB, now kept in memory (%s); TMPDIR names another folder",
            *(tempfile.gettempdir(), size / 1e9, reason_of(error)),
        )
        return np.empty(shape, dtype)


def to_npz(arrays: Mapping[str, Any]) -> bytes:
    """Return an npz file of named arrays or numbers."""
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


@contextmanager
def writing(path: Path, size: int = 0) -> Iterator[None]:
    """Report write errors of a file or folder in this block, in one line with the remedy.

    Args:
        path: the file or folder.
        size: bytes to write, if known.

    Raises:
        Unwritable: the disk is full, the folder is not writable, or the name is invalid.
    """
    try:
        yield
    except OSError as error:
        ours = False
        with suppress(UserError):  # there is no home
            ours = path.is_relative_to(home())
        choose = "set FED_DPSD_HOME to" if ours else "choose"
        if not is_disk_full(error):
            reason = reason_of(error)
            text = f"{path} cannot be written ({reason}); {choose} another folder"
            raise Unwritable(text) from None
        free = 0
        with suppress(OSError, StopIteration):
            path = next(folder for folder in path.parents if folder.is_dir())
            free = 0 if error.errno == errno.EDQUOT else shutil.disk_usage(path).free
        lacking = max(1, math.ceil((size - free) / 1e6))
        raise Unwritable(
            f"no space left in {path}; free {lacking:,} MB or more, or {choose} a folder on "
            "another disk"
        ) from None


@contextmanager
def replacing(path: Path, size: int = 0) -> Iterator[Path]:
    """Yield the path of a file to write; the file durably replaces `path` when the block ends.

    If the block raises an error, `path` is unchanged and no other file remains. The folder is
    created if it does not exist. Temporary files left there by killed processes are removed.

    Args:
        path: the file.
        size: bytes to write, if known.

    Raises:
        Unwritable: the file or its folder cannot be written.
    """
    with _renamed(path, size) as temporary:
        yield temporary
        sync(temporary)


@contextmanager
def _renamed(path: Path, size: int) -> Iterator[Path]:
    """Yield the path of a file to write durably (see `replacing`)."""
    with writing(path, size):
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)  # another process may have just made it
            sync(path.parent.parent)
        _remove_leftovers(path.parent.absolute())
        temporary = path.with_name(f"{path.name}.{_host()}.{os.getpid()}.tmp")
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        sync(path.parent)


@functools.lru_cache(maxsize=1_000)  # scans once: a folder may hold thousands of files
def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files left in a folder by dead processes of this machine."""
    with suppress(OSError):  # they do no harm
        for path in folder.glob(f"*.{_host()}.*.tmp"):
            number = path.name.split(".")[-2]
            if number.isdecimal() and not _is_running(int(number)):
                path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True


@functools.cache
def _host() -> str:
    """Return an identifier that distinguishes machines and containers that share a folder.

    A process id identifies a process only within one of them.
    """
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(f'{platform.node()} {namespace}'.encode()):08x}"


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block, which should be short.

    Otherwise a signal could raise an exception between any two steps of Python, even in a
    `finally`, and a lock that was just taken or is about to be released would be kept. Signals
    interrupt only the main thread, so other threads need no delay.
    """
    waiting: list[int] = []
    former = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if handler := signal.getsignal(number):  # None if not installed from Python
                    former[number] = handler
                    signal.signal(number, lambda received, _: waiting.append(received))
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        for received in waiting:
            signal.raise_signal(received)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` with `content`, durably, or leave it unchanged."""
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes | NDArray[Any]]) -> None:
    """Replace several files durably; arrays are written as .npy.

    All contents are written before any file is replaced, so a full disk changes nothing. Files are
    replaced in the given order: if the last one exists, all of them do.
    """
    sizes = [len(each) if isinstance(each, bytes) else each.nbytes for each in contents.values()]
    with ExitStack() as stack:
        for number, (path, content) in reversed(list(enumerate(contents.items()))):
            temporary = stack.enter_context(_renamed(path, sum(sizes[: number + 1])))
            with temporary.open("wb") as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:  # when NumPy writes to a file directly, its errors give no reason
                    np.save(SimpleNamespace(write=file.write), content, allow_pickle=False)
            sync(temporary)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file; durable on return. An error leaves earlier lines unchanged."""
    with writing(path, len(line)), path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            content = f"{line}\n".encode()
            while content:
                content = content[file.write(content) :]
            sync(path)
        except OSError:
            file.truncate(end)
            raise


def to_utf8(text: str) -> bytes:
    """Return text as UTF-8; bytes that it cannot encode, as in file names, are escaped."""
    return text.encode(errors="backslashreplace")


def _encode_any_text(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encode characters that an encoding lacks: UTF-8 keeps bytes of file names, others escape.

    Escapes keep names distinct; question marks would not.
    """
    assert isinstance(error, UnicodeEncodeError)
    if error.encoding == "utf-8":
        with suppress(UnicodeEncodeError):
            return codecs.lookup_error("surrogateescape")(error)
    return codecs.backslashreplace_errors(error)


ANY_TEXT = "fed_dpsd"  # error handler for characters that a stream's encoding lacks
codecs.register_error(ANY_TEXT, _encode_any_text)


def print_any_text() -> None:
    """Let stdout and stderr accept any text in any encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's streams accept any text
            stream.reconfigure(errors=ANY_TEXT)


def to_json_bytes(content: object) -> bytes:
    """Return the content of a human-readable JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a human-readable JSON file atomically."""
    write_atomically(path, to_json_bytes(content))


def remove(path: Path) -> None:
    """Delete a file if it exists; the deletion survives power loss."""
    with writing(path):
        path.unlink(missing_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
