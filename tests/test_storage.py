"""Files after a crash: the old one or the new one; and file paths."""

import errno
import io
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest

from fed_dpsd import storage
from fed_dpsd.errors import UserError
from fed_dpsd.storage import (
    Unwritable,
    append_line,
    large_array,
    replacing,
    write_atomically,
    write_together,
)
from tests.every import every
from tests.forks import finished, fork


class PowerLoss(BaseException):
    """An exception that no handler may catch."""


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_crash_before_the_file_is_whole_leaves_the_old_one(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def lost(*_):
        raise PowerLoss

    with monkeypatch.context() as patch:
        patch.setattr(os, call, lost)
        with pytest.raises(PowerLoss):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer"


def test_a_crash_after_the_file_is_whole_leaves_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def lost_in_the_folder(path):
        if path.is_dir():
            raise PowerLoss

    monkeypatch.setattr(storage, "sync", lost_in_the_folder)
    with pytest.raises(PowerLoss):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_file_is_durable_before_it_has_its_name_and_its_name_on_return(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def replaced(old, new):
        calls.append(f"-> {os.path.basename(new)}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_atomically(tmp_path / "folder" / "file", b"content")
    assert calls == [
        tmp_path.name,
        f"file.{storage._host()}.{os.getpid()}.tmp",
        "-> file",
        "folder",
    ]


def test_two_processes_may_make_a_folder_at_once(tmp_path, monkeypatch):
    """The other one makes it after this one finds it missing."""
    path = tmp_path / "cache" / "teachers" / "one"
    path.parent.mkdir(parents=True)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: self != path.parent and exists(self))
    write_atomically(path, b"whole")
    assert path.read_bytes() == b"whole"


def _old(folder):
    contents = {folder / name: b"old" for name in ("card.json", "labels.npy", "student")}
    write_together(contents)
    return contents


def _failing_at(monkeypatch, number, cause):
    """Simulate a disk that fails at one file after all of it is written, the latest moment."""
    calls, sync = [], storage.sync

    def refused(path):
        calls.extend([path] * (not path.is_dir()))
        if len(calls) > number and not path.is_dir():
            raise OSError(cause, os.strerror(cause))
        sync(path)

    monkeypatch.setattr(storage, "sync", refused)


@every("number", range(4))
@every(
    ("cause", "words"),
    [
        (errno.ENOSPC, "no space left in {}; free 1 MB or more, or choose a folder on another"),
        (errno.EDQUOT, "no space left in {}; free 1 MB or more, or choose a folder on another"),
        (
            errno.EACCES,
            "{}/.* cannot be written \\(Permission denied\\); choose another folder",
        ),
        (
            errno.EROFS,
            "{}/.* cannot be written \\(Read-only file system\\); choose another folder",
        ),
    ],
)
def test_a_disk_that_refuses_any_of_several_files_leaves_all_as_they_were(
    tmp_path, monkeypatch, number, cause, words
):
    """The control is a disk that refuses none of the three."""
    old = _old(tmp_path)
    new = dict(zip(old, (b"new", np.zeros(9), b"newer"), strict=True))
    _failing_at(monkeypatch, number, cause)
    if number == 3:
        monkeypatch.undo()
        write_together(new)
        assert (tmp_path / "card.json").read_bytes() == b"new"
        assert np.array_equal(np.load(tmp_path / "labels.npy"), np.zeros(9))
    else:
        with pytest.raises(UserError, match=words.format(tmp_path)):
            write_together(new)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == old


def test_the_home_is_what_is_to_be_moved_if_it_cannot_be_written(monkeypatch):
    monkeypatch.setenv("FED_DPSD_HOME", "/proc/nope")
    with pytest.raises(Unwritable, match="^/proc/nope/cache/x cannot be .*set FED_DPSD_HOME to"):
        write_atomically(storage.home() / "cache" / "x", b"")


def test_a_line_that_cannot_be_added_leaves_those_before_it(tmp_path, monkeypatch):
    path = tmp_path / "log"
    append_line(path, "first")
    _failing_at(monkeypatch, 0, errno.ENOSPC)
    with pytest.raises(Unwritable, match="no space left"):
        append_line(path, "second")
    assert path.read_text() == "first\n"
    monkeypatch.undo()
    append_line(path, "third")
    assert path.read_text() == "first\nthird\n"


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path):
    """The first is left by a process that is killed while it writes."""

    def killed():
        with replacing(tmp_path / "one") as temporary:
            temporary.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    child = fork(killed, tmp_path.with_suffix(".log"))
    assert finished(child) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name == f"one.{storage._host()}.{child}.tmp"
    alive, host = os.getppid(), storage._host()
    kept = [f"a.{host}.{alive}.tmp", f"b.{host}.1.tmp", f"c.{host}.x.tmp", f"d.{child}.tmp"]
    kept += [f"e.00000000.{child}.tmp", f"{host}.{child}.tmp.npy"]
    for name in kept:
        (tmp_path / name).touch()
    write_atomically(tmp_path / "two", b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "two"}


def test_what_an_error_or_ctrl_c_cuts_short_leaves_nothing(tmp_path):

    def write(error):
        with replacing(tmp_path / "file") as temporary:
            temporary.write_bytes(b"half")
            raise error

    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            write(error)
    assert not list(tmp_path.iterdir())


def test_a_user_without_a_home_folder_is_asked_for_one(monkeypatch, tmp_path, homeless):
    """As in a container with an unknown uid."""
    with pytest.raises(UserError, match=r"^~/.fed-dpsd: its home .* not known; .*set FED_DPSD_H"):
        storage.home()
    with pytest.raises(UserError, match=r"^~nobody.here/x: its home folder is not known; write"):
        storage.expanded("~nobody.here/x")
    with pytest.raises(Unwritable, match="^/proc/x cannot be written .*; choose another folder"):
        storage.write_atomically(Path("/proc/x"), b"")
    monkeypatch.setenv("FED_DPSD_HOME", str(tmp_path))
    assert storage.home() == tmp_path


@pytest.mark.parametrize(("own", "name"), [("~/here", "here"), ("", ".fed-dpsd")])
def test_a_home_that_starts_with_a_tilde_is_in_the_users_folder(monkeypatch, tmp_path, own, name):
    """As set in a unit or an image, where no shell expands it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FED_DPSD_HOME", own)
    assert storage.home() == tmp_path / name


def test_the_home_is_what_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("FED_DPSD_HOME", str(tmp_path))
    assert storage.home() == tmp_path
    monkeypatch.setenv("FED_DPSD_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    assert storage.home() == tmp_path / "user" / ".fed-dpsd"
    assert (storage.app_folder() / "pyproject.toml").is_file()
    assert (storage.conf_folder() / "config.yaml").is_file()


ODD = "é β \udce9 😀"


@every(
    ("encoding", "shown"),
    [
        ("utf-8", "é β ".encode() + b"\xe9" + " 😀".encode()),
        ("latin-1", rb"\xe9 \u03b2 \udce9 \U0001f600".replace(rb"\xe9", b"\xe9")),
        ("ascii", rb"\xe9 \u03b2 \udce9 \U0001f600"),
        ("utf-16-le", rb"\udce9"),
    ],
)
def test_streams_take_any_text_in_any_encoding(monkeypatch, encoding, shown):
    """The control prints the same before streams are set to accept it."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2)]
    monkeypatch.setattr("sys.stdout", streams[0])
    monkeypatch.setattr("sys.stderr", streams[1])
    with pytest.raises(UnicodeEncodeError):
        print(ODD)
    storage.print_any_text()
    for stream in streams:
        print(ODD, end="", file=stream, flush=True)
        if encoding == "utf-16-le":
            assert shown.decode() in stream.buffer.getvalue().decode(encoding)
        else:
            assert stream.buffer.getvalue() == shown


def test_text_that_is_no_unicode_is_an_escape_too(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr("sys.stdout", stream)
    storage.print_any_text()
    print("\ud800 \udce9", end="", flush=True)
    assert stream.buffer.getvalue() == b"\\ud800 \xe9"
    assert storage.to_utf8("\ud800 \udce9 é") == rb"\ud800 \udce9 " + "é".encode()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_large_array_is_in_a_file_without_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "LARGE", 2**22)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    array = large_array((2**20,), np.float32)
    array[:] = 7
    assert f"{tmp_path}/" in Path("/proc/self/maps").read_text()
    assert list(tmp_path.iterdir()) == []
    assert array.sum() == 7 * 2**20


def test_a_large_array_that_no_disk_can_hold_is_in_memory(small_disk, monkeypatch, caplog):
    folder, _ = small_disk
    monkeypatch.setattr(storage, "LARGE", 2**20)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    array = large_array((2**20,), np.uint8)
    array[:] = 1
    assert array.sum() == 2**20
    assert f"{folder} has no room for 0.0 GB" in caplog.text
