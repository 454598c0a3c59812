"""The engine `flower`: a Flower simulation of our own, from its start to its last process.

A SuperLink is started in an empty directory, so client code comes from the bundle and not from the
user's directory. It has its own ports and its own Flower home, so it meets no other Flower. Every
process below it inherits a marker in its environment; at the end all of them are ended.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from fed_dpsd.engines.placement import Placement
from fed_dpsd.errors import UserError, printable
from fed_dpsd.experiment import Experiment
from fed_dpsd.server.run import Progress
from fed_dpsd.server.run_folder import is_run_folder, read_log
from fed_dpsd.server.summary import read_summary, write_failure
from fed_dpsd.storage import app_folder, write_atomically

MARKER = "FED_DPSD_SIMULATION"
START_TIMEOUT = 60.0
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Flower's actors have an environment of their own, so workers that wait for one are in vain.
    "RAY_prestart_worker_first_driver": "0",
}


class SimulationFailed(UserError):
    """The simulation did not complete; the message is the cause in one line."""


def simulate(
    experiment: Experiment,
    overrides: list[str],
    folder: Path,
    nodes: int,
    placement: Placement,
    progress: Progress,
) -> dict[str, Any]:
    """Run `experiment` in a Flower simulation and return its summary.

    Args:
        experiment: the experiment to run; the nodes host its num_clients in turn.
        overrides: the Hydra overrides that gave `experiment`, with absolute paths.
        folder: the run folder that the server app creates.
        nodes: number of simulated SuperNodes, >= 1.
        placement: the GPUs of their processes, if any.
        progress: called with each line of rounds.jsonl as it appears.

    Raises:
        SimulationFailed: the run did not complete. Nothing is left running, and the run folder
            holds Flower's own log as flower.log.
    """
    run_config = {"overrides": " ".join(overrides)}
    return run_app(app_folder(), run_config, experiment, folder, nodes, placement, progress)


def run_app(
    app: Path,
    run_config: Mapping[str, str],
    experiment: Experiment,
    folder: Path,
    nodes: int,
    placement: Placement,
    progress: Progress,
) -> dict[str, Any]:
    """Run a Flower app as `simulate` runs ours, and return the summary.json that it writes.

    Args:
        app: folder with the app's pyproject.toml.
        run_config: keys that the app declares, with their values.
        experiment: the experiment whose deadlines hold.
        folder: the folder that the app writes rounds.jsonl to and, at its end, summary.json.
        nodes: number of simulated SuperNodes, >= 1.
        placement: the GPUs of their processes, if any.
        progress: called with each line of rounds.jsonl as it appears.

    Raises:
        SimulationFailed: as in `simulate`.
    """
    with tempfile.TemporaryDirectory(prefix="fed-dpsd-") as temporary:
        place = Path(temporary)
        try:
            with _superlink(place, placement.environment) as environment:
                run_id = _submit(place, environment, app, run_config, nodes, placement)
                status = _wait(place, environment, run_id, experiment, folder, progress)
            return _outcome(folder, status, (place / "superlink.log").read_text(errors="replace"))
        except SimulationFailed as error:
            with contextlib.suppress(UserError):  # why the run failed comes first
                if (place / "superlink.log").exists():
                    content = (place / "superlink.log").read_bytes()
                    write_atomically(folder / "flower.log", content)
                if not (folder / "summary.json").exists():
                    write_failure(experiment, folder, "flower", error)
            raise
        except (KeyboardInterrupt, SystemExit) as stop:
            if is_run_folder(folder) and read_summary(folder).get("status") != "completed":
                write_failure(experiment, folder, "flower", stop)
            raise


# --- processes ---


@contextlib.contextmanager
def _superlink(place: Path, settings: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Run a SuperLink during the block; yield the environment of its Flower commands.

    Every process below it inherits the environment, which holds `settings`.
    """
    marker = secrets.token_hex(16)
    environment = {**os.environ, **QUIET, **settings, MARKER: marker}
    environment["FLWR_HOME"] = str(place / "flwr")
    # Flower looks up its own scripts on the PATH, so those of this installation come first.
    scripts = sysconfig.get_path("scripts")
    environment["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    empty = place / "empty"
    empty.mkdir()
    (place / "flwr").mkdir()
    port = _free_port()
    (place / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "own"\n\n[superlink.own]\naddress = "127.0.0.1:{port}"\n'
        "insecure = true\n"
    )
    with (place / "superlink.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "flower-superlink",
                *("--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)),
                "--disable-runtime-dependency-installation",
            ],
            cwd=empty,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        _wait_for_port(process, port, place / "superlink.log")
        yield environment
    finally:
        end_marked(marker)
        process.wait()


def end_marked(marker: str, grace: float = 5.0) -> None:
    """End every process that carries `marker` in its environment: by SIGTERM, then by SIGKILL.

    Their children go too: Ray's agents overwrite their environment, and outlive a killed raylet.
    """
    known: set[psutil.Process] = set()
    for send in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace
        while alive := _with_children(_marked(marker), known):
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(send)
            psutil.wait_procs(alive, timeout=1.0)
            if time.monotonic() > deadline:
                break


def _with_children(
    marked: list[psutil.Process], known: set[psutil.Process]
) -> list[psutil.Process]:
    """Add `marked` and all their descendants to `known`; return the living among them."""
    for process in marked:
        with contextlib.suppress(psutil.Error):
            known.update(process.children(recursive=True))
    known.update(marked)
    return [process for process in known if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _marked(marker: str) -> list[psutil.Process]:
    marked = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            other = process.pid != os.getpid() and _is_alive(process)
            if other and process.environ().get(MARKER) == marker:
                marked.append(process)
    return marked


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise SimulationFailed(f"Flower's SuperLink did not start: {' '.join(last)}")
        time.sleep(0.1)


# --- the run ---


def _submit(
    place: Path,
    environment: Mapping[str, str],
    app: Path,
    run_config: Mapping[str, str],
    nodes: int,
    placement: Placement,
) -> str:
    """Submit the run and return its id; a file holds its configuration, so that quotes survive."""
    for key, value in run_config.items():
        if value != printable(value):
            raise UserError(f"{key}={value} is no UTF-8, which Flower does not take; rename it")
    lines = (f"{key} = {json.dumps(v, ensure_ascii=False)}\n" for key, v in run_config.items())
    (place / "run.toml").write_text("".join(lines), encoding="utf-8")
    settings = [f"num-supernodes={nodes}", "client-resources-num-cpus=1", *placement.resources]
    if environment.get("RAY_ADDRESS", "") not in ("", "local"):
        # Ray joins that cluster, whose nodes know what they have, and refuses to be told it.
        settings = [setting for setting in settings if not setting.startswith("init-args-")]
    response = _flwr(
        place,
        environment,
        *("run", str(app), "own", "--run-config", str(place / "run.toml")),
        *("--federation-config", " ".join(settings), "--format", "json"),
    )
    if not response.get("success") or "run-id" not in response:
        raise SimulationFailed(f"Flower refused the run: {response.get('error-message', response)}")
    return str(response["run-id"])


def _wait(
    place: Path,
    environment: Mapping[str, str],
    run_id: str,
    experiment: Experiment,
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Follow the run to its summary, and pass on the rounds as they are written.

    Flower's own commands take seconds of processor time. So only its folder and its processes are
    checked; where they end without a summary, Flower's status of the run is returned.
    """
    federation = experiment.config.federation
    patience = 2 * federation.round_timeout_seconds + federation.node_timeout_seconds
    seen, seen_process, last_sign = 0, False, time.monotonic()
    while not (folder / "summary.json").exists():
        lines = read_log(folder, seen)
        for line in lines:
            progress(line)
        alive = _is_running(environment[MARKER])
        if lines or (alive and not seen_process):
            last_sign = time.monotonic()
        seen, seen_process = seen + len(lines), seen_process or alive
        silence = time.monotonic() - last_sign
        if silence > (patience if alive else START_TIMEOUT if not seen_process else 5):
            break
        time.sleep(0.5)
    for line in read_log(folder, seen):
        progress(line)
    if read_summary(folder):
        return {}  # it says how the run ended; Flower may take a minute to notice
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        response = _flwr(place, environment, "ls", "own", "--run-id", run_id, "--format", "json")
        status = dict((response.get("runs") or [{}])[0])
        finished = str(status.get("status", "")).startswith("finished")
        if finished or time.monotonic() > deadline:
            return status
        time.sleep(0.5)


def _is_running(marker: str) -> bool:
    """Return whether Flower's simulation process of this run is alive."""
    for process in _marked(marker):
        with contextlib.suppress(psutil.Error):
            if any("flwr-simulation" in part for part in process.cmdline()):
                return True
    return False


def _outcome(folder: Path, status: Mapping[str, Any], log: str) -> dict[str, Any]:
    """Return the summary of a completed run.

    Raises:
        SimulationFailed: the run did not complete; the error names the cause.
    """
    summary = read_summary(folder)
    if summary.get("status") == "completed":
        return summary
    cause = summary.get("error") or _last_error(log) or status.get("status-details")
    raise SimulationFailed(f"the Flower simulation failed: {cause or 'it stopped without a word'}")


def _last_error(log: str) -> str:
    """Return the server app's own error line in Flower's log; "" if there is none."""
    lines = [line.partition("error: ")[2] for line in log.splitlines() if "error: " in line]
    return lines[-1].strip() if lines else ""


def _flwr(place: Path, environment: Mapping[str, str], *arguments: str) -> dict[str, Any]:
    """Run a `flwr` command, and return its JSON answer."""
    try:
        return run_flwr(["flwr", *arguments], place / "empty", environment, START_TIMEOUT)
    except ValueError as error:
        raise SimulationFailed(f"`flwr {arguments[0]}` failed: {error}") from None


def run_flwr(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
) -> dict[str, Any]:
    """Run a `flwr` command in a folder, and return its JSON answer.

    Raises:
        ValueError: the command gave no JSON; the error is the end of its output.
    """
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    try:
        response: dict[str, Any] = json.loads(done.stdout[done.stdout.find("{") :])
        return response
    except ValueError:
        raise ValueError(" ".join((done.stdout + done.stderr).split())[-300:]) from None
