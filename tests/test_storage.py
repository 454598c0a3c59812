"""Files after a crash: the old one or the new one, and where everything lies."""

import io
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from fed_dpsd import storage
from fed_dpsd.storage import client_name, npz_of, remove, write_atomically, write_json
from tests.forks import finished, fork


class PowerLoss(BaseException):
    """What no handler may catch."""


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
    assert calls == [tmp_path.name, f"file.{os.getpid()}.tmp", "-> file", "folder"]


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    """Two contents of a megabyte in turn; the control, a plain write, is caught half done."""
    contents = (b"0" * 2**20, b"1" * 2**20)
    path = tmp_path / "file"
    write_atomically(path, contents[0])

    def write():
        while True:
            for content in contents:
                write_atomically(path, content)

    for _ in range(5):
        child = fork(write, tmp_path / "log")
        seen = {path.read_bytes() for _ in range(50)}
        os.kill(child, signal.SIGKILL)
        assert finished(child) == -signal.SIGKILL
        assert seen | {path.read_bytes()} <= set(contents)

    def write_plainly():
        while True:
            path.write_bytes(contents[0])

    child = fork(write_plainly, tmp_path / "log")
    torn = any(path.read_bytes() not in contents for _ in range(2_000))
    os.kill(child, signal.SIGKILL)
    finished(child)
    assert torn


def test_two_processes_may_make_a_folder_at_once(tmp_path, monkeypatch):
    """The other one makes it between the question whether it is there and its making."""
    path = tmp_path / "cache" / "teachers" / "one"
    path.parent.mkdir(parents=True)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: self != path.parent and exists(self))
    write_atomically(path, b"whole")
    assert path.read_bytes() == b"whole"


def test_json_can_be_read_by_people_and_what_is_removed_may_be_gone_already(tmp_path):
    path = tmp_path / "deep" / "down" / "summary.json"
    write_json(path, {"b": 1, "a": [1.5, None]})
    assert json.loads(path.read_text()) == {"b": 1, "a": [1.5, None]}
    assert path.read_text().startswith('{\n  "b": 1,\n')
    assert path.read_text().endswith("}\n")
    remove(path)
    remove(path)
    assert not list(path.parent.iterdir())


def test_an_npz_holds_arrays_and_numbers_by_their_names():
    values = np.arange(6, dtype=np.uint8).reshape(2, 3)
    with np.load(io.BytesIO(npz_of({"values": values, "teachers": 3})), allow_pickle=False) as read:
        assert set(read.files) == {"values", "teachers"}
        assert np.array_equal(read["values"], values)
        assert read["values"].dtype == np.uint8
        assert int(read["teachers"]) == 3


def test_clients_files_sort_by_their_numbers():
    assert client_name(7) == "client_007"
    names = [client_name(number) for number in range(1_000)]
    assert sorted(names) == names


def test_the_home_is_what_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("FED_DPSD_HOME", str(tmp_path))
    assert storage.home() == tmp_path
    monkeypatch.setenv("FED_DPSD_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    assert storage.home() == tmp_path / "user" / ".fed-dpsd"
    assert (storage.app_folder() / "pyproject.toml").is_file()
    assert (storage.conf_folder() / "config.yaml").is_file()
