"""A hospital's node runs the hospital's own code, and quickly."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from flwr.supernode.runtime import run_clientapp

import client_app
from fed_dpsd.flower import supernode
from tests.hospitals import site_file

STUB = f"""
{supernode.importing()}
import os, time
from fed_dpsd.flower import supernode
def client():
    if sys.argv[1] == "prepared":
        from fed_dpsd.models.fixed_features import whitening
        before = set(sys.modules)
        from flwr.supernode.cli import flwr_clientapp
        print(whitening.cache_info().currsize, set(sys.modules) - before)
        return
    if sys.argv[1] == "broken":
        raise ValueError("this command fails")
    if sys.argv[1] == "exits":
        sys.exit(int(sys.argv[2]))
    print(sys.argv[1], os.environ["WORD"], os.getcwd(), flush=True)
    time.sleep(float(sys.argv[2]))
    print("ended", flush=True)
supernode._client = client
"""


def keeping(folder):
    """A program that keeps a stub imported, prepared for a site's file."""
    path = site_file(folder, models=["scattering"], shape=[1, 8, 8])
    return f"{STUB}keep({str(path)!r})"


def environment(folder):
    return supernode.environment(folder / "commands", {**os.environ, "WORD": "one"})


@pytest.fixture
def settings(tmp_path):
    return environment(tmp_path)


def call(settings, *arguments, **options):
    command = [sys.executable, "-c", f"{supernode.importing()}; pass_on()", *arguments]
    return subprocess.Popen(command, env=settings, text=True, **options)


@pytest.fixture(scope="module")
def keeper(tmp_path_factory):
    """A process that keeps a stub imported; what its forks print goes to a file in its folder."""
    folder = tmp_path_factory.mktemp("keeper")
    command = [sys.executable, "-c", keeping(folder)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment(folder), stdout=log, stderr=log)
    deadline = time.monotonic() + 60
    while not (folder / "commands" / "socket").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield SimpleNamespace(folder=folder, settings=environment(folder), poll=process.poll)
    process.kill()
    process.wait()


def test_each_command_is_a_fork_with_its_own_arguments_environment_and_folder(keeper):
    calls = [
        call({**keeper.settings, "WORD": word}, word, "0.2", cwd=keeper.folder / folder)
        for word, folder in (("one", "."), ("two", "commands"))
    ]
    assert [each.wait(30) for each in calls] == [0, 0]
    printed = (keeper.folder / "log").read_text()
    assert f"one one {keeper.folder}\n" in printed
    assert f"two two {keeper.folder}/commands\n" in printed
    assert printed.count("ended") == 2  # a command ends when its fork does
    assert keeper.poll() is None


def test_a_command_that_is_ended_ends_its_fork(keeper):
    log = keeper.folder / "log"
    ended = log.read_text().count("ended")
    command = call(keeper.settings, "long", "60")
    deadline = time.monotonic() + 30
    while "long" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    command.send_signal(signal.SIGTERM)
    assert command.wait(30) == 1
    assert log.read_text().count("ended") == ended


def test_a_command_that_fails_says_why(keeper):
    assert call(keeper.settings, "broken").wait(30) == 1
    assert "ValueError: this command fails" in (keeper.folder / "log").read_text()
    assert [call(keeper.settings, "exits", code).wait(30) for code in "03"] == [0, 3]
    assert keeper.poll() is None


def test_the_keeper_ends_with_its_parent(settings, tmp_path):
    program = f"{STUB}supernode._prepare = print; keep('site.yaml')"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            f"kept = subprocess.Popen([sys.executable, '-c', {program!r}])\n"
            "print(kept.pid, flush=True)\ntime.sleep(60)",
        ],
        env=settings,
        stdout=subprocess.PIPE,
        text=True,
    )
    kept = int(parent.stdout.readline())
    deadline = time.monotonic() + 60
    while not (tmp_path / "commands" / "socket").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while True:
        try:
            os.kill(kept, 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_app_is_the_installed_one_whatever_a_coordinator_sends(monkeypatch):
    """Flower's own functions, the control, would install and load what came."""
    for name in ("install_from_fab", "get_load_client_app_fn"):
        monkeypatch.setattr(run_clientapp, name, getattr(run_clientapp, name))
    loaded = []

    def run():
        run_clientapp.install_from_fab(b"not even a bundle", skip_prompt=True)
        load = run_clientapp.get_load_client_app_fn(
            default_app_ref="", app_path=None, multi_app=True
        )
        loaded.append(load("evil/app", "1.0", "00"))

    with pytest.raises(Exception, match=r"zip|bundle|FAB"):
        run()
    monkeypatch.setattr("flwr.supernode.cli.flwr_clientapp", run)
    supernode._client()
    assert loaded == [client_app.app]


def test_every_other_kind_of_process_is_refused(settings):
    for name in supernode.REFUSED:
        done = subprocess.run([name], env=settings, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "this site runs client processes only" in done.stderr


def test_what_is_prepared_is_what_a_site_allows(keeper):
    """Before a command comes: fixed features are computed, and Flower's client is imported."""
    assert call(keeper.settings, "prepared").wait(30) == 0
    assert "1 set()\n" in (keeper.folder / "log").read_text().splitlines(keepends=True)
