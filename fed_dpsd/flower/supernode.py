"""A SuperNode whose client processes run the hospital's own code, whatever a coordinator sends.

Flower ships an app's code with each run, so who may submit a run could have any code run at every
hospital. A SuperNode starts its client processes by name: `environment` puts commands of ours first
on its path. The client process is Flower's, but for where it finds the app; every other kind of
process is refused.

Flower starts a process for each message, and importing takes seconds, as does computing what fixed
features need. So the commands pass their arguments on to a process that has done both and forks for
each of them.
"""

import functools
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

CLIENT = "flwr-clientapp"
REFUSED = ("flwr-serverapp", "flwr-agentapp", "flwr-model", "flwr-connector", "flwr-simulation")
SOCKET = "FED_DPSD_SITE_SOCKET"
LOOKS_UP_SECONDS = 1.0
USUAL_WIDTH = 16  # of teachers, in conf/model; what another needs is computed for each message


def environment(folder: Path, of: Mapping[str, str]) -> dict[str, str]:
    """`of`, with commands in `folder` that stand for Flower's; they are written anew."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / CLIENT, f"{importing()}; pass_on()")
    for name in REFUSED:
        _write(folder / name, f"raise SystemExit('{name}: this site runs client processes only')")
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), of.get("PATH", "")])
    return {**of, "PATH": path, SOCKET: str(folder / "socket")}


def importing() -> str:
    """A line of Python that finds this module where this process has found it."""
    places = [place for place in sys.path if place]
    return f"import sys; sys.path[:0] = {places!r}; from {__name__} import keep, pass_on"


def _write(path: Path, program: str) -> None:
    path.write_text(f"#!{sys.executable}\n{program}\n")
    path.chmod(0o755)


# --- the command that Flower starts ---


def pass_on() -> None:
    """Have the process that keeps everything ready do it; without one, do it here."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.environ[SOCKET])
    except (OSError, KeyError):
        _client()
        return
    request = {"arguments": sys.argv, "environment": dict(os.environ), "folder": os.getcwd()}
    connection.sendall(json.dumps(request).encode() + b"\n")
    with connection.makefile("rb") as answers:
        pid = int(answers.readline())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        answers.read()  # until the other process has ended


# --- the process that keeps everything ready ---


def keep(site: str) -> None:
    """Prepare for what a site's file allows; fork for each command, as long as the parent lives."""
    parent = os.getppid()
    _prepare(Path(site))
    path = os.environ[SOCKET]
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    os.umask(0o077)
    listener.bind(path)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what was forked
    while os.getppid() == parent:
        if not select.select([listener], [], [], LOOKS_UP_SECONDS)[0]:
            continue
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _serve(connection)
        connection.close()


def _prepare(site: Path) -> None:
    """Import what a command needs, and have one teacher of each usual kind answer an image."""
    import torch
    from flwr.supernode import cli  # noqa: F401

    from fed_dpsd.client.hospital import open_file
    from fed_dpsd.flower.codec import code_digest
    from fed_dpsd.models import initialise
    from fed_dpsd.models.classifiers import CLASSIFIERS
    from fed_dpsd.storage import app_folder

    _installed()
    code_digest(app_folder() / "client_app" / "__init__.py")  # of what runs, not of an upgrade
    torch.set_num_threads(1)  # more would not survive a fork
    hospital = open_file(site)
    for name in hospital.models:
        build = functools.partial(CLASSIFIERS[name], hospital.shape, hospital.num_classes)
        teacher = initialise(functools.partial(build, USUAL_WIDTH), torch.Generator()).eval()
        with torch.inference_mode():
            teacher(torch.zeros(1, *hospital.shape))


def _serve(connection: socket.socket) -> None:
    """Be the process that a command stands for; the connection closes when it ends."""
    try:
        with connection.makefile("rb") as requests:
            request = json.loads(requests.readline())
        connection.sendall(f"{os.getpid()}\n".encode())
        sys.argv = request["arguments"]
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        _client()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _client() -> None:
    """Flower's client process, with the app that is installed here."""
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp

    for name in ("install_from_fab", "get_load_client_app_fn"):
        getattr(run_clientapp, name)  # else this is no Flower that is known here
    run_clientapp.install_from_fab = lambda *_, **__: None
    run_clientapp.get_load_client_app_fn = lambda **_: _installed
    flwr_clientapp()


def _installed(*_: str) -> "ClientApp":
    """The app, imported late: a process that has not said by then that it is there is given up."""
    from fed_dpsd.storage import app_folder

    folder = str(app_folder())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from client_app import app

    return app
