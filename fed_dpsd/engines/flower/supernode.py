"""A SuperNode with client processes that run only the hospital's installed code.

Flower sends an app's code with each run, so anyone who may submit a run could run any code at every
hospital. However, a SuperNode starts its client processes by name, and `environment` puts this
library's commands first on the path. The client process is Flower's own, except that it loads the
installed app. All other kinds of processes are refused.

Flower starts a process for each message. Imports and the constants of fixed features take seconds,
so the commands forward their arguments to a process that has both ready and forks for each command.
"""

import contextlib
import functools
import json
import logging
import os
import re
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, NoReturn

from fed_dpsd.errors import UserError, one_line, reason_of
from fed_dpsd.storage import try_lock, write_atomically, writing

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

CLIENT = "flwr-clientapp"
REFUSED = ("flwr-serverapp", "flwr-agentapp", "flwr-model", "flwr-connector", "flwr-simulation")
COMMANDS = "commands"  # folder in a hospital's folder
SOCKET = "FED_DPSD_SITE_SOCKET"
PARENT_CHECK_SECONDS = 1.0
LAST_LINES_SECONDS = 1.0  # for what a node writes as it ends
LAST_SECONDS = 5.0  # for a node to end
RESTART_SECONDS = 10.0
FORK_SECONDS = 120.0  # until a command gives up on the process that should fork for it
REJECTED = (
    "with status 0: the coordinator may have rejected its signature because this machine's clock "
    "is wrong (check NTP, for example with `timedatectl`) or its key is no longer registered"
)
LOG = "flower.log"  # in a hospital's folder: all lines of Flower's processes
LARGEST_LOG = 10_000_000  # bytes
MARK = "FED_DPSD_SITE_MARK"  # how lines of our own begin, which no coordinator knows
NODE, AGAIN = re.compile(r"SuperNode ID: (\d+)$"), "Connection successful after"
UNREACHED, PATIENCE = "Connection attempt failed", 3  # lines until this is a problem
RUNS_NOTHING_ELSE = "this site runs client processes only"
# What Flower's lines mean; the first that is in a line counts.
PROBLEMS = {
    "Hostname mismatch": "the coordinator's certificate is not for the host of --superlink "
    "{superlink}; give the name in the certificate",
    "IP address mismatch": "the coordinator's certificate is not for the address of --superlink "
    "{superlink}; give the name in the certificate",
    "certificate is not yet valid": "the coordinator's certificate is not valid yet, or this "
    "machine's clock is wrong",
    "certificate has expired": "the coordinator's certificate has expired, or this machine's clock "
    "is wrong",
    "certificate verify failed": "the authority of --certificate {authority} has not signed the "
    "coordinator's certificate; ask the coordinator for its ca.crt",
    "Failed to activate SuperNode": "the coordinator does not admit the key of --node-key {key}: "
    "it has not registered its .pub, or a node with this key crashed less than a minute ago, or "
    "this machine's clock is wrong. This node tries again",
    RUNS_NOTHING_ELSE: f"a process of another kind was refused: {RUNS_NOTHING_ELSE}",
    "Traceback (most recent call last)": "a process of this node failed; see {log}",
    UNREACHED: "no coordinator answers at --superlink {superlink}; this node tries again. If it "
    "lasts, check the address and the firewall",
}
LONGEST_SOCKET = 107  # bytes of a path that AF_UNIX allows on Linux
USUAL_WIDTH = 16  # of teachers in conf/model; with other widths each message computes constants


def serve(
    site: Path, folder: Path, superlink: str, authority: Path, key: Path, port: int | None
) -> NoReturn:
    """Run a SuperNode until a signal ends this process; restart it whenever it ends by itself.

    Flower's SuperNode ends with status 0 when the coordinator rejects its signed timestamp.

    Args:
        site: the hospital's file.
        folder: the hospital's folder, which contains its secret.
        superlink: the coordinator's HOST:PORT.
        authority: certificate of the coordinator's authority.
        key: the node's private key.
        port: port of the node's own processes on this machine; None for any free one.

    Raises:
        UserError: Flower cannot use the certificate or the key, the folder's path is too long, or
            another process serves the folder; nothing was started.
    """
    check_address(superlink)
    check_certificate(authority)
    check_key(key)
    check_state(folder)
    from fed_dpsd.accounts.secret import load_or_create_secret
    from fed_dpsd.engines.flower import QUIET, direct

    load_or_create_secret(folder / "secret")  # draws the secret if there is none yet
    command = [
        *(sys.executable, "-c", f"{import_line()}; node({os.getpid()})", "--superlink", superlink),
        *("--root-certificates", str(authority.absolute())),
        *("--auth-supernode-private-key", str(key.absolute())),
        *("--node-config", f"site={json.dumps(str(site.absolute()))}"),
    ]
    with _lock_folder(folder):
        settings = environment(folder / COMMANDS, {**QUIET, **os.environ, **direct(os.environ)})
        settings.setdefault("FLWR_HOME", str(folder / "flower"))
        settings[MARK] = f"{secrets.token_hex(8)} "
        names = {"superlink": superlink, "authority": authority, "key": key}
        console = Console(folder / LOG, settings[MARK], names)
        kept = f"{import_line()}; keep_ready({str(site.absolute())!r})"
        lines, output = os.pipe()
        subprocess.Popen([sys.executable, "-c", kept], env=settings, stdout=output, stderr=output)
        Thread(target=_check_records, args=(site,), name="records", daemon=True).start()
        follower = Thread(target=console.follow, args=(lines,), daemon=True)
        follower.start()
        try:
            while True:
                status = _run([*command, "--port", str(port or _free_port())], settings, output)
                why = f"with an error, see {folder / LOG}" if status else REJECTED
                console.say(f"the node ended {why}; it starts again every {RESTART_SECONDS:g} s")
                time.sleep(RESTART_SECONDS)
        finally:
            os.close(output)
            follower.join(LAST_LINES_SECONDS)


class Console:
    """What a hospital's administrator sees: one line per event, each once until another happens.

    Args:
        log: the file that gets every line; it is moved to NAME.1 when it is large.
        mark: how lines of our own begin.
        names: the settings that PROBLEMS names.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, log: Path, mark: str, names: Mapping[str, object]) -> None:
        self._log, self._mark, self._names = log, mark, names
        self._said: set[str] = set()
        self._last: deque[str] = deque(maxlen=2)  # a refused hello has two lines
        self._unreached = 0
        with writing(log):
            self._open().close()

    def say(self, text: str) -> None:
        """Print a line, unless it was printed since the node was last connected."""
        if text not in self._said:
            self._said.add(text)
            self._print(text)

    def follow(self, lines: int) -> None:
        """Write the lines of a pipe to the file; print our own, and what Flower's mean."""
        with open(lines, encoding="utf-8", errors="replace") as every:
            for line in every:
                try:
                    if self._log.stat().st_size > LARGEST_LOG:
                        self._log.replace(self._log.with_name(f"{self._log.name}.1"))
                    with self._open() as file:
                        file.write(line.removeprefix(self._mark))
                except OSError as error:  # the node continues without this file
                    self.say(f"warning: {self._log} cannot be written ({reason_of(error)})")
                self.read(line.strip())

    def read(self, line: str) -> None:
        """Print a line of ours, or what a line of Flower's means."""
        self._unreached = self._unreached + 1 if UNREACHED in line else 0
        problem = next((PROBLEMS[part] for part in PROBLEMS if part in line), "")
        if line.startswith(self._mark):
            own = line.removeprefix(self._mark)
            event = own.partition(": ")[2] or own  # without its time
            if event not in self._last or event.startswith("run "):  # a request
                self._print(own)
            self._last.append(event)
        elif node := NODE.search(line):
            self._said.clear()
            self._last.clear()
            self._print(f"connected to {self._names['superlink']}: node {node[1]}")
        elif AGAIN in line and self._said:
            self._said.clear()
            self._print(f"connected to {self._names['superlink']} again")
        elif problem and (UNREACHED not in line or self._unreached == PATIENCE):
            self.say(problem.format(log=self._log, **self._names))

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _open(self) -> IO[str]:
        return open(self._log, "a", encoding="utf-8", opener=lambda p, f: os.open(p, f, 0o600))


def _lock_folder(folder: Path) -> IO[bytes]:
    """Lock a hospital's folder while this process lives, since its socket and ledger are unique.

    Raises:
        UserError: another process serves the folder.
    """
    lock = try_lock(folder / "serving")
    if lock is None:
        raise UserError(
            f"state={folder} is in use by another `fed-dpsd site serve`; stop it, or give each "
            "hospital its own `state` in its file"
        )
    return lock


def _free_port() -> int:
    """Return a free port, so that any number of hospitals can run on one machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_address(superlink: str) -> None:
    """Check that an address is HOST:PORT, which Flower would otherwise retry for ever.

    Raises:
        UserError: it has a scheme or a path, or no port.
    """
    host, _, port = superlink.rpartition(":")
    if not host or "/" in superlink or not (port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(
            f"--superlink {superlink} must be HOST:PORT, such as fl.example.org:9092, without a "
            "scheme"
        )


def check_certificate(path: Path) -> None:
    """Check that a file holds certificates.

    Raises:
        UserError: the file cannot be read or contains no certificate.
    """
    from cryptography import x509

    try:
        x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise UserError(f"--certificate {path} cannot be read ({reason_of(error)})") from None
    except ValueError:
        raise UserError(
            f"--certificate {path} is not a certificate in PEM format; ask the coordinator for the "
            "ca.crt of its certificate authority"
        ) from None


def check_key(path: Path) -> None:
    """Check that Flower can sign with a key file; otherwise, the node would never connect.

    Raises:
        UserError: Flower cannot sign with it; the message has a command that makes a new key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    problem = "is not an ECDSA key in OpenSSH's private format, without a passphrase"
    try:
        if isinstance(load_ssh_private_key(path.read_bytes(), None), ec.EllipticCurvePrivateKey):
            return
    except OSError as error:
        problem = f"cannot be read ({reason_of(error)})"
    except (TypeError, ValueError, UnsupportedAlgorithm):
        pass
    new = path.with_name(f"{path.stem}_ecdsa")
    raise UserError(
        f"--node-key {path} {problem}; give one, as made by "
        f'ssh-keygen -t ecdsa -b 384 -N "" -f {shlex.quote(str(new))}; the coordinator registers '
        "its .pub"
    )


def check_state(folder: Path) -> None:
    """Check that a hospital's folder can hold the socket that every command connects to.

    Raises:
        UserError: the socket's path would be too long.
    """
    length = len(os.fsencode(_socket_in(folder / COMMANDS)))
    if length > LONGEST_SOCKET:
        raise UserError(
            f"state={folder} is too long: the path of its socket has {length} bytes, and a Unix "
            f"socket allows at most {LONGEST_SOCKET}; give a folder with a shorter path"
        )


def _socket_in(commands: Path) -> Path:
    return commands / "socket"


def _check_records(site: Path) -> None:
    """Warn on this console only if the records cannot be read, or delta is too large for them."""
    from fed_dpsd.client.hospital import open_hospital

    try:
        hospital = open_hospital(site)
        problem = hospital.problem_of_delta(len(hospital.read().ids))
    except Exception as error:  # each request fails, too, until it is fixed
        problem = one_line(error)
    if problem:
        print(f"warning: {problem}", file=sys.stderr, flush=True)


def _run(command: list[str], settings: dict[str, str], output: int) -> int:
    """Run a node, which never outlives this process; return its exit status."""
    process = subprocess.Popen(command, env=settings, stdout=output, stderr=output)
    try:
        return process.wait()
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # its own processes end after it
            process.wait(LAST_SECONDS)


def node(parent: int) -> None:
    """Run Flower's SuperNode as long as `fed-dpsd site serve` lives, even if that is killed."""
    from flwr.supernode.cli import flower_supernode

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=end_with_parent, name="parent", daemon=True).start()
    flower_supernode()


def environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Write replacements of Flower's commands; return `base` with `folder` first in PATH."""
    _write(folder / CLIENT, f"{import_line()}; forward()")
    for name in REFUSED:
        _write(folder / name, f"raise SystemExit('{name}: {RUNS_NOTHING_ELSE}')")
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), base.get("PATH", "")])
    return {**base, "PATH": path, SOCKET: str(_socket_in(folder))}


def import_line() -> str:
    """Return a line of Python that imports this module from the same place as this process."""
    places = [place for place in sys.path if place]
    return (
        f"import sys; sys.path[:0] = {places!r}; from {__name__} import forward, keep_ready, node"
    )


def _write(path: Path, program: str) -> None:
    write_atomically(path, f"#!{sys.executable}\n{program}\n".encode())
    path.chmod(0o755)


# --- the command that Flower starts ---


def forward() -> None:
    """Run this command in a fork of the process that has everything ready, or else in this one."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.environ[SOCKET])
    except (OSError, KeyError):
        _client()
        return
    request = {"arguments": sys.argv, "environment": dict(os.environ), "folder": os.getcwd()}
    passed_on = signal.SIGTERM, signal.SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until the fork's process id is known
    connection.sendall(json.dumps(request).encode() + b"\n")
    connection.settimeout(FORK_SECONDS)
    with connection.makefile("rb") as reply:
        pid = int(reply.readline())
        connection.settimeout(None)
        for number in passed_on:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        code = reply.read()  # returns when the other process has ended
    raise SystemExit(int(code or 1))


# --- the process that keeps everything ready ---


def keep_ready(site: str) -> None:
    """Warm up a site file's models, and fork a process per command as long as the parent lives."""
    parent = os.getppid()
    _prepare(Path(site))
    path = os.environ[SOCKET]
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    os.umask(0o077)
    listener.bind(path)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the forked ones
    while os.getppid() == parent:
        if not select.select([listener], [], [], PARENT_CHECK_SECONDS)[0]:
            continue
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _serve(connection)
        connection.close()


def _prepare(site: Path) -> None:
    """Import a command's modules, and answer an image with a teacher of each allowed kind."""
    import torch
    from flwr.supernode import cli  # noqa: F401

    from fed_dpsd.client.hospital import open_hospital
    from fed_dpsd.engines.flower.codec import code_digest
    from fed_dpsd.models import initialise
    from fed_dpsd.models.classifiers import CLASSIFIERS

    _installed()
    code_digest()  # caches the digest of the running code
    torch.set_num_threads(1)  # more would not survive a fork
    hospital = open_hospital(site)
    for name in hospital.models:
        if name == "pretrained" and hospital.weights:
            continue  # its network is known from the first message
        build = functools.partial(CLASSIFIERS[name], hospital.shape, hospital.num_classes)
        teacher = initialise(functools.partial(build, USUAL_WIDTH), torch.Generator()).eval()
        with torch.inference_mode():
            teacher(torch.zeros(1, *hospital.shape))


def _serve(connection: socket.socket) -> None:
    """Run a command in this process, send the process id and exit status, and end the process."""
    status = 1
    try:
        with connection.makefile("rb") as requests:
            request = json.loads(requests.readline())
        connection.sendall(f"{os.getpid()}\n".encode())
        sys.argv = request["arguments"]
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        _client()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(b"%d" % status)
        os._exit(0)


def _client() -> None:
    """Run Flower's client process with the app that is installed here."""
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp

    ours: dict[str, Any] = {
        "install_from_fab": lambda *_, **__: None,
        "get_load_client_app_fn": lambda **_: _installed,
    }
    for name, function in ours.items():
        getattr(run_clientapp, name)  # fails if Flower has changed and would not use these
        setattr(run_clientapp, name, function)
    _log_to_console()
    flwr_clientapp()


def _log_to_console() -> None:
    """Show the hospital's own log only on the console that the node runs on."""
    handler = logging.StreamHandler()
    mark = os.environ.get(MARK, "")
    handler.setFormatter(logging.Formatter(f"{mark}%(asctime)s %(levelname)s: %(message)s"))
    logger = logging.getLogger("fed_dpsd")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _installed(*_: str) -> "ClientApp":
    """Return the installed app.

    The import is deferred because Flower ends processes that take long to report.
    """
    from fed_dpsd.engines.flower.client import app

    return app
