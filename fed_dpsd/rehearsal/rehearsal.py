"""A deployment on one machine: a coordinator and hospitals, each on a host of its own.

A host is a network namespace with a link to the coordinator's (Linux, root, iproute2). Where this
is not permitted, all share this machine's loopback interface. Everything else is as in
docs/deployment.md: certificates, node keys, a SuperLink with a database, SuperNodes.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fed_dpsd.accounts.secret import exchange_key, secret_of
from fed_dpsd.client.hospital import Hospital, open_file
from fed_dpsd.config.compose import read
from fed_dpsd.engines.clients import with_patients
from fed_dpsd.engines.flower.superlink import QUIET, run_flwr
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import from_overrides, load_data, partitions
from fed_dpsd.privacy.secure_sum import public_key
from fed_dpsd.progress import reported
from fed_dpsd.rehearsal.sites import agreeing, write_site
from fed_dpsd.storage import app_folder, writing
from fed_dpsd.sweep.grid import require_one_run

PORT = 9192
START_SECONDS = 90.0
COORDINATOR = "coordinator"
SERVER = "flwr-serverapp"


def can_make_hosts() -> bool:
    """Return whether network namespaces may be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"fed-dpsd-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.returncode == 0


class Rehearsal:
    """A federation of hospitals on this machine; `stop` ends everything that it started.

    Each hospital has the records that the client of its number has in a simulation, and its files
    name their patients where the data does, or where `data.records_per_patient` makes some up.

    Args:
        folder: an empty folder; hospital J's is folder/hospitalJ, and runs are in folder/runs.
        overrides: overrides of the experiment, on top of conf/federation/deployment.yaml.
        settings: keys of every site's file, in place of those written here.
        hosts: whether each host is a network namespace.

    Raises:
        UserError: the overrides are no experiment, or a host or a process cannot be made.
    """

    def __init__(
        self, folder: Path, overrides: Sequence[str], settings: Mapping[str, Any], hosts: bool
    ) -> None:
        require_one_run(overrides, composition := read(overrides))
        # Patients are made up here, in the hospitals' files; a deployment knows only real ones.
        made_up = composition.values["data"]["records_per_patient"]
        self._overrides = [
            *("federation=deployment", f"out={folder / 'runs'}"),
            *(*overrides, "data.records_per_patient=null"),
        ]
        self.experiment = from_overrides(self._overrides, Path.cwd())
        config = self.experiment.config
        if config.data.path is not None:
            self._overrides.append(f"data.path={config.data.path}")
        self.folder = folder
        self.hospitals = range(config.num_clients)
        self.hosts = hosts
        self._prefix = f"fd{os.getpid() % 10_000}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        train = load_data(config.data, config.cache).train
        facts = {**agreeing(self.experiment, overrides), **settings}
        for number, indices in enumerate(partitions(self.experiment)):
            records = with_patients(train.take(indices), made_up)
            own = {"client": number, **facts}
            write_site(self.site(number), records, config.data.class_names, own)
        keys = [
            public_key(exchange_key(secret_of(self.hospital(n).folder / "secret"))).hex()
            for n in self.hospitals
        ]
        for number in self.hospitals:
            path = self.site(number)
            path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"keys": keys}))

    # --- hospitals ---

    def site(self, number: int) -> Path:
        """Return the path of a hospital's file."""
        return self.folder / f"hospital{number}" / "site.yaml"

    def hospital(self, number: int) -> Hospital:
        """Return a hospital, as its file says."""
        return open_file(self.site(number))

    def forget(self) -> None:
        """Make every hospital forget its answers and teachers; each keeps its secret.

        A repeated request then gets a new answer with the same values.
        """
        for number in self.hospitals:
            for name in ("ledger", "cache"):
                shutil.rmtree(self.hospital(number).folder / name, ignore_errors=True)

    # --- hosts ---

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _link(self, number: int) -> tuple[str, str]:
        """Return the two ends of a hospital's link: at the hospital, at the coordinator."""
        return f"{self._prefix}h{number}", f"{self._prefix}c{number}"

    def address(self, number: int) -> str:
        """Return the coordinator's address for hospital `number`."""
        return f"10.77.{number}.1" if self.hosts else "127.0.0.1"

    def _make_hosts(self) -> None:
        center = self._namespace(COORDINATOR)
        _ip("netns", "add", center)
        _ip("-n", center, "link", "set", "lo", "up")
        for number in self.hospitals:
            host, (near, far) = self._namespace(f"hospital{number}"), self._link(number)
            _ip("netns", "add", host)
            _ip("link", "add", near, "netns", host, "type", "veth", "peer", far, "netns", center)
            for place, link, last in ((host, near, 2), (center, far, 1)):
                _ip("-n", place, "addr", "add", f"10.77.{number}.{last}/30", "dev", link)
                _ip("-n", place, "link", "set", link, "up")
            _ip("-n", host, "link", "set", "lo", "up")

    def cut(self, number: int) -> None:
        """Take a hospital's link down."""
        _ip("-n", self._namespace(COORDINATOR), "link", "set", self._link(number)[1], "down")

    def mend(self, number: int) -> None:
        """Take a hospital's link up again."""
        _ip("-n", self._namespace(COORDINATOR), "link", "set", self._link(number)[1], "up")

    def on(self, host: str, *command: str) -> list[str]:
        """Return a command as it is run on a host."""
        inside = ["ip", "netns", "exec", self._namespace(host)] if self.hosts else []
        return [*inside, *command]

    # --- processes ---

    def __enter__(self) -> "Rehearsal":
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        if self.hosts:
            self._make_hosts()
        names = sorted({"127.0.0.1", *(self.address(number) for number in self.hospitals)})
        script = app_folder() / "deploy" / "certificates.sh"
        _run([str(script), str(self.folder / "certificates"), *names])
        self.start_superlink()
        home = self.folder / "coordinator"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{PORT}"\n'
            f'root-certificates = "{self.folder / "certificates" / "ca.crt"}"\n'
        )
        for number in reported("hospitals started", self.hospitals):
            key = self.node_key(number)
            _run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(key)])
            self.flwr("supernode", "register", f"{key}.pub", "here", "--name", f"h{number}")
            self.start_hospital(number)

    def node_key(self, number: int) -> Path:
        """Return the path of a node's private key."""
        return self.site(number).parent / "node_key"

    def start_superlink(self) -> None:
        """Start the coordinator's SuperLink, and wait until it listens."""
        home, certificates = self.folder / "coordinator", self.folder / "certificates"
        home.mkdir(exist_ok=True)
        self._spawn(
            COORDINATOR,
            *("flower-superlink", "--host", "0.0.0.0", "--port", str(PORT)),
            *("--ssl-ca-certfile", str(certificates / "ca.crt")),
            *("--ssl-certfile", str(certificates / "server.pem")),
            *("--ssl-keyfile", str(certificates / "server.key")),
            *("--enable-supernode-auth", "--database", str(home / "superlink.db")),
            "--disable-runtime-dependency-installation",
        )
        deadline = time.monotonic() + START_SECONDS
        probe = f"import socket; socket.create_connection(('127.0.0.1', {PORT}), 2)"
        while _fails(self.on(COORDINATOR, "python3", "-c", probe)):
            if time.monotonic() > deadline or self._processes[COORDINATOR].poll() is not None:
                raise UserError(f"the SuperLink did not start; see {home}/log")
            time.sleep(0.3)

    def start_hospital(self, number: int) -> None:
        """Start a hospital's SuperNode."""
        self._spawn(
            f"hospital{number}",
            *("fed-dpsd", "site", "serve", str(self.site(number))),
            *("--superlink", f"{self.address(number)}:{PORT}"),
            *("--certificate", str(self.folder / "certificates" / "ca.crt")),
            *("--node-key", str(self.node_key(number)), "--port", str(9_300 + number)),
        )

    def _spawn(self, host: str, *command: str) -> None:
        home = self.folder / host
        home.mkdir(exist_ok=True)
        environment = {**os.environ, **QUIET, "FLWR_HOME": str(home / "flower")}
        if host == COORDINATOR:
            environment["FLWR_HOME"] = str(home)
            environment["FED_DPSD_HOME"] = str(home / "fed-dpsd")
        with (home / "log").open("ab") as log:
            self._processes[host] = subprocess.Popen(
                self.on(host, *command),
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self, host: str, command: str = "") -> list[int]:
        """Return the ids of a host's processes whose command line contains `command`."""
        pids, parents = [self._processes[host].pid], _parents()
        for pid in pids:  # the list grows by the children of each process in it
            pids += [child for child, parent in parents.items() if parent == pid]
        return [pid for pid in pids if command in _command(pid)]

    def kill(self, host: str) -> None:
        """Kill a host's processes, all at once, as a power cut would."""
        _kill(self.processes(host))
        self._processes.pop(host).wait()

    def kill_some(self, host: str, command: str) -> bool:
        """Kill the processes of a host that run a command; return whether there were any."""
        pids = self.processes(host, command)
        _kill(pids)
        return bool(pids)

    def stop(self) -> None:
        """End every process, and delete every host."""
        for host in list(self._processes):
            self.kill(host)
        if self.hosts:
            for host in (COORDINATOR, *(f"hospital{n}" for n in self.hospitals)):
                name = self._namespace(host)
                command = ["ip", "netns", "pids", name]
                left = subprocess.run(command, capture_output=True, text=True, check=False)
                _kill(map(int, left.stdout.split()))
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    # --- runs ---

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Run a `flwr` command at the coordinator, and return its JSON answer.

        Raises:
            UserError: the command failed.
        """
        environment = {**os.environ, **QUIET, "FLWR_HOME": str(self.folder / "coordinator")}
        command = self.on(COORDINATOR, "flwr", *arguments, "--format", "json")
        try:
            return run_flwr(command, self.folder, environment, START_SECONDS)
        except ValueError as error:
            raise UserError(f"`flwr {arguments[0]}` failed: {error}") from None

    def submit(self, *overrides: str) -> str:
        """Submit a run of the experiment, with further overrides; return its id."""
        return self._submit("overrides", " ".join([*self._overrides, *overrides]))

    def resume(self, run_folder: Path) -> str:
        """Submit a run that goes on with an earlier one; return its id."""
        return self._submit("resume", str(run_folder))

    def _submit(self, key: str, value: str) -> str:
        path = self.folder / "run.toml"
        path.write_text(f"{key} = {json.dumps(value)}\n")
        response = self.flwr("run", str(app_folder()), "here", "--run-config", str(path))
        if "run-id" not in response:
            raise UserError(f"Flower refused the run: {response}")
        return str(response["run-id"])

    def status(self, run_id: str) -> str:
        """Return Flower's status of a run."""
        response = self.flwr("ls", "here", "--run-id", run_id)
        return str((response.get("runs") or [{}])[0].get("status"))

    def wait(self, run_id: str, timeout: float, look: Callable[[], None] = lambda: None) -> str:
        """Wait until a run has finished; return its status.

        Args:
            run_id: the run.
            timeout: seconds to wait at most.
            look: called every few seconds, and when the run has finished.
        """
        deadline = time.monotonic() + timeout
        while not (status := self.status(run_id)).startswith("finished"):
            if time.monotonic() > deadline:
                raise UserError(f"run {run_id} is {status} after {timeout:g} s")
            look()
            time.sleep(2)
        look()
        return status


def _parents() -> dict[int, int]:
    """Return the id of the parent of every process of this machine (Linux), by its own id."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return parents


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"`{' '.join(command[:4])} ...` failed: {done.stderr.strip()[-300:]}")


def _fails(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode != 0
