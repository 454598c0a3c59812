"""A deployment on one machine: a coordinator and hospitals, each with its own processes.

All of them use this machine's loopback interface. Everything else is as in docs/deployment.md:
certificates, node keys, a SuperLink with a database, and SuperNodes.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from fed_dpsd.accounts.secret import exchange_key, load_or_create_secret
from fed_dpsd.client.hospital import Hospital, open_hospital
from fed_dpsd.config.compose import compose_skipping_invalid
from fed_dpsd.config.errors import quoted
from fed_dpsd.config.grid import require_one_run
from fed_dpsd.engines.clients import with_patients
from fed_dpsd.engines.flower import QUIET, direct
from fed_dpsd.engines.flower.supernode import check_state
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import from_overrides, load_data, partitions
from fed_dpsd.privacy.secure_sum import public_key
from fed_dpsd.progress import track
from fed_dpsd.rehearsal.sites import site_keys, write_site
from fed_dpsd.server.run_folder import REHEARSAL
from fed_dpsd.storage import app_folder, writing

PORT = 9192
START_SECONDS = 90.0
COORDINATOR = "coordinator"
COMPLETED = "finished:completed"


class Rehearsal:
    """A federation of hospitals on this machine, which ends with the `with` block.

    Each hospital has the records of the simulated client with its number. Its files name patients
    if the data does, or if `data.records_per_patient` makes up patients.

    Args:
        folder: an empty folder; hospital J uses folder/hospitalJ, and runs are in folder/runs.
        overrides: overrides of the experiment, on top of conf/federation/deployment.yaml.

    Raises:
        UserError: the overrides do not describe one experiment, the folder's path is too long, or a
            process cannot be started.
    """

    listens_on = "127.0.0.1"  # the SuperLink's address

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        require_one_run(overrides, composition := compose_skipping_invalid(overrides))
        # The hospitals' files have the simulated patients; a deployment knows only real ones.
        self._made_up = composition.values["data"]["records_per_patient"]
        self._overrides = [
            *("federation=deployment", f"out={quoted(str(folder / 'runs'))}"),
            *(*overrides, "data.records_per_patient=null"),
        ]
        self.experiment = from_overrides(self._with_unit(), Path.cwd())
        config = self.experiment.config
        if config.data.path is not None:
            self._overrides.append(f"data.path={quoted(config.data.path)}")
        self.folder = folder
        self.hospitals = range(config.num_clients)
        self._processes: dict[str, psutil.Popen] = {}
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        train = load_data(config.data, config.cache).train
        parts = partitions(self.experiment)
        facts = site_keys(self.experiment)
        secrets = (
            load_or_create_secret(self.site(number).parent / facts["state"] / "secret")
            for number in self.hospitals
        )
        facts["keys"] = [public_key(exchange_key(secret)).hex() for secret in secrets]
        for number, indices in enumerate(parts):
            records = with_patients(train.take(indices), self._made_up)
            own = {"client": number, **facts}
            write_site(self.site(number), records, config.data.class_names, own)
            check_state(self.hospital(number).folder)

    def _with_unit(self, *overrides: str) -> list[str]:
        """Return the run's overrides and further ones; the unit is a simulated patient, if any."""
        whole = [*self._overrides, *overrides]
        values = compose_skipping_invalid(whole).values
        chosen = ("training", "answers") if self._made_up else ()
        unset = [group for group in chosen if values[group].get("unit", "") is None]
        return [*whole, *(f"{group}.unit=patient" for group in unset)]

    # --- hospitals ---

    def site(self, number: int) -> Path:
        """Return the path of a hospital's file."""
        return self.folder / f"hospital{number}" / "site.yaml"

    def hospital(self, number: int) -> Hospital:
        """Return a hospital as described by its file."""
        return open_hospital(self.site(number))

    def address(self, number: int) -> str:
        """Return the coordinator's address for hospital `number`."""
        return "127.0.0.1"

    def command_on(self, host: str, *command: str) -> list[str]:
        """Return the command that runs `command` on a host, such as "hospital0"."""
        return [*command]

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
        names = sorted({"127.0.0.1", *map(self.address, self.hospitals)})
        script = app_folder() / "deploy" / "certificates.sh"
        _run(str(script), str(self.folder / "certificates"), *names)
        self.start_superlink()
        (self.folder / COORDINATOR / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{PORT}"\n'
            f'root-certificates = "{self.folder / "certificates" / "ca.crt"}"\n'
        )
        for number in track("hospitals started", self.hospitals):
            key = self.node_key(number)
            _run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(key))
            self._register(number)
            self.start_hospital(number)

    def _register(self, number: int) -> None:
        """Register a hospital's node with the coordinator."""
        key = f"{self.node_key(number)}.pub"
        response = self.flwr("supernode", "register", key, "here", "--name", f"h{number}")
        if not response.get("success"):
            text = " ".join(str(response.get("error-message") or response).split())
            raise UserError(f"hospital {number} was not registered: {text}; see {self.folder}")

    def node_key(self, number: int) -> Path:
        """Return the path of a node's private key."""
        return self.site(number).parent / "node_key"

    def start_superlink(self) -> None:
        """Start the coordinator's SuperLink, and wait until it listens.

        Raises:
            UserError: another process listens at its port, or it does not start.
        """
        home, certificates = self.folder / COORDINATOR, self.folder / "certificates"
        if self._listening():
            raise UserError(
                f"another process listens at port {PORT}, such as the SuperLink of another "
                "rehearsal or deployment; stop it (`ss -ltnp` names it)"
            )
        self._spawn(
            COORDINATOR,
            *("flower-superlink", "--host", self.listens_on, "--port", str(PORT)),
            *("--ssl-ca-certfile", str(certificates / "ca.crt")),
            *("--ssl-certfile", str(certificates / "server.pem")),
            *("--ssl-keyfile", str(certificates / "server.key")),
            *("--enable-supernode-auth", "--database", str(home / "superlink.db")),
            "--disable-runtime-dependency-installation",
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._listening():
            if time.monotonic() > deadline or self._processes[COORDINATOR].poll() is not None:
                raise UserError(f"the SuperLink did not start; see {home}/log")
            time.sleep(0.3)

    def _listening(self) -> bool:
        """Return whether a process listens at the SuperLink's port."""
        probe = f"import socket; socket.create_connection(('127.0.0.1', {PORT}), 2)"
        return not _run(
            *self.command_on(COORDINATOR, "python3", "-c", probe), check=False
        ).returncode

    def start_hospital(self, number: int) -> None:
        """Start a hospital's SuperNode."""
        self._spawn(
            f"hospital{number}",
            *("fed-dpsd", "site", "serve", str(self.site(number))),
            *("--superlink", f"{self.address(number)}:{PORT}"),
            *("--certificate", str(self.folder / "certificates" / "ca.crt")),
            *("--node-key", str(self.node_key(number))),
        )

    def _environment(self, host: str) -> dict[str, str]:
        home = self.folder / host
        addresses = map(self.address, self.hospitals)
        shared = {**os.environ, **QUIET, **direct(os.environ, addresses)}
        if host != COORDINATOR:
            return {**shared, "FLWR_HOME": str(home / "flower")}
        own = {"FLWR_HOME": str(home), "FED_DPSD_HOME": str(home / "fed-dpsd"), REHEARSAL: "1"}
        return {**shared, **own}

    def _spawn(self, host: str, *command: str) -> None:
        home = self.folder / host
        home.mkdir(exist_ok=True)
        with (home / "log").open("ab") as log:
            self._processes[host] = psutil.Popen(
                self.command_on(host, *command),
                cwd=home,
                env=self._environment(host),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self, host: str) -> list[psutil.Process]:
        """Return the processes of a host."""
        root = self._processes[host]
        with contextlib.suppress(psutil.Error):
            return [root, *root.children(recursive=True)]
        return [root]

    def kill(self, host: str) -> None:
        """Kill all processes of a host at once, as a power cut would."""
        for process in self.processes(host):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._processes.pop(host).wait()

    def stop(self) -> None:
        """End every process."""
        for host in list(self._processes):
            self.kill(host)

    # --- runs ---

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Run a `flwr` command at the coordinator, and return its JSON output."""
        done = subprocess.run(
            self.command_on(COORDINATOR, "flwr", *arguments, "--format", "json"),
            cwd=self.folder,
            env=self._environment(COORDINATOR),
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
        try:
            return dict(json.loads(done.stdout[done.stdout.find("{") :]))
        except ValueError:
            output = " ".join((done.stdout + done.stderr).split())[-300:]
            raise UserError(f"`flwr {arguments[0]}` failed: {output}") from None

    def submit(self, *overrides: str) -> str:
        """Submit a run of the experiment, with further overrides; return its id."""
        return self.submit_app(overrides=" ".join(self._with_unit(*overrides)))

    def submit_app(self, **config: str) -> str:
        """Submit a run of the app with this run configuration; return its id."""
        path = self.folder / "run.toml"
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items()))
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
            timeout: maximum seconds to wait.
            look: called every few seconds, and when the run is finished.
        """
        deadline = time.monotonic() + timeout
        while not (status := self.status(run_id)).startswith("finished"):
            if time.monotonic() > deadline:
                raise UserError(f"run {run_id} is {status} after {timeout:g} s")
            look()
            time.sleep(2)
        look()
        return status


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise UserError(f"`{' '.join(command[:4])} ...` failed: {done.stderr.strip()[-300:]}")
    return done
