"""Run folders: complete or absent, never overwritten, with the code and machine of the run."""

import json
import os
import re
import subprocess

import pytest

from fed_dpsd.errors import UserError
from fed_dpsd.server import run_folder
from fed_dpsd.server.run_folder import (
    new_run_folder,
    open_completed,
    open_run_folder,
    read_log,
)
from fed_dpsd.server.student import open_student
from fed_dpsd.server.summary import read_summary
from fed_dpsd.sweep.reported import tables_of
from tests.every import every


def test_a_run_folder_is_never_overwritten(small, tmp_path):
    experiment = small(f"run_folder={tmp_path}/mine")
    new_run_folder(experiment)
    with pytest.raises(UserError, match="already exists"):
        new_run_folder(experiment)


def test_an_out_that_cannot_be_written_is_an_error(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"out=.*file: .* cannot be written .*choose another folder"
    ):
        new_run_folder(small(f"out={tmp_path}/file"))


@every(
    ("content", "expected"),
    [(None, "has no config.yaml"), ("", "is empty"), ("{a: [", "not valid YAML")],
)
def test_a_folder_that_is_no_run_is_an_error(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=f"is not a run folder.*{expected}"):
        open_run_folder(tmp_path)
    with pytest.raises(UserError, match="does not exist.*the path that `run` printed last"):
        open_run_folder(tmp_path / "nowhere")


def test_commands_in_errors_quote_paths_for_a_shell(small, tmp_path):
    folder = tmp_path / "my runs" / "first"
    experiment = small(f"run_folder='{folder}'")
    new_run_folder(experiment)
    for use, command in (
        (lambda: new_run_folder(experiment), f"fed-dpsd resume '{folder}'"),
        (lambda: open_completed(folder), f"`fed-dpsd resume '{folder}'`"),
        (lambda: open_student(folder), f"`fed-dpsd export '{folder}'`"),
        (lambda: tables_of([folder]), f"fed-dpsd report '{folder}'"),
    ):
        with pytest.raises(UserError, match=re.escape(command)):
            use()
    (folder / "summary.json").write_text("{")
    with pytest.raises(UserError, match=f"`fed-dpsd resume '{folder}'`"):
        read_summary(folder)


def test_a_run_says_what_code_on_which_machine(small, tmp_path, monkeypatch):
    def versions(name):
        run_folder._commit.cache_clear()
        folder = new_run_folder(small(f"run_folder={tmp_path}/{name}"))
        return json.loads((folder / "versions.json").read_text())

    package = tmp_path / "checkout" / "package"
    package.mkdir(parents=True)
    (package / "run.py").write_text("")
    monkeypatch.setattr(run_folder, "__file__", str(package / "run.py"))

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=package, check=True, capture_output=True)

    assert versions("none")["commit"] is None
    git("init", "..")
    (package.parent / "other.py").write_text("")
    git("add", "../other.py")
    git("commit", "-m", "without the package")
    assert versions("installed inside a checkout")["commit"] is None
    git("add", "run.py")
    git("commit", "-m", "with it")
    commit = versions("clean")["commit"]
    assert len(commit) == 12
    (package / "run.py").write_text("pass")
    assert versions("dirty")["commit"] == f"{commit}+dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions("no git")["commit"] is None
    assert "cores, " in versions("machine")["machine"]
    run_folder._commit.cache_clear()


def test_no_run_folder_counts_before_it_is_complete(small, monkeypatch):
    """config.yaml is what makes it one, so it comes last."""
    written = []
    original = os.replace

    def record(temporary, path):
        written.append(path.name)
        original(temporary, path)

    monkeypatch.setattr(os, "replace", record)
    new_run_folder(small())
    assert written == ["name", "inputs.json", "versions.json", "overrides.json", "config.yaml"]


def test_a_log_is_read_while_it_is_written(tmp_path):
    assert read_log(tmp_path) == []
    (tmp_path / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert read_log(tmp_path) == [{"round": 1}, {"round": 2}]
