"""Checks of a machine before a run, each with its remedy."""

import importlib
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from fed_dpsd.errors import UserError
from fed_dpsd.experiment import from_overrides
from fed_dpsd.models.devices import Device, gpus
from fed_dpsd.simulation.placement import place
from fed_dpsd.storage import app_folder, home

FLOWER_MINOR = "1.41"
LOCAL_SUPERLINK_PORTS = (39091, 39093)
CLIENTS = 5  # in the example of a GPU's shares
EXAMPLE = ("training=plain", "model=cnn", "device=cuda")


@dataclass(frozen=True)
class Check:
    """A finding about the machine."""

    name: str
    good: bool
    state: str
    remedy: str = ""


def examine() -> list[Check]:
    """Return every check, good or bad."""
    return [
        *(_flower(), _app(), _torchvision(), *_folders(), *_superlinks(), _ports()),
        *(_processors(), *_gpus(gpus(), os.cpu_count() or 1)),
    ]


def _flower() -> Check:
    version = metadata.version("flwr")
    good = version.startswith(FLOWER_MINOR + ".")
    remedy = "" if good else f"pip install 'flwr[simulation]~={FLOWER_MINOR}.0'"
    return Check("flwr", good, f"{version} (tested with {FLOWER_MINOR})", remedy)


def _app() -> Check:
    folder = app_folder()
    good = (folder / "pyproject.toml").is_file()
    remedy = "" if good else "install the package, or a checkout: pip install ."
    return Check("app, for flwr run", good, str(folder), remedy)


def _torchvision() -> Check:
    state = f"{metadata.version('torch')} and {metadata.version('torchvision')}"
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        remedy = "install both together, from one index: pip install --upgrade torch torchvision"
        return Check("torch and torchvision", False, f"{state}: {error}", remedy)
    return Check("torch and torchvision", True, state)


def _folders() -> list[Check]:
    checks = []
    for name, folder in (("FED_DPSD_HOME", home()), ("temporary", Path(tempfile.gettempdir()))):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            checks.append(Check(f"{name} folder", True, f"{folder} is writable"))
        except OSError as error:
            remedy = f"make it writable, or set {'TMPDIR' if name == 'temporary' else name}"
            checks.append(Check(f"{name} folder", False, f"{folder}: {error.strerror}", remedy))
    return checks


def _superlinks() -> list[Check]:
    """List running SuperLinks: `flwr run` would use them, with their code and their folder."""
    states = []
    for process in psutil.process_iter(["cmdline", "pid", "cwd"]):
        if any("flower-superlink" in part for part in process.info["cmdline"] or []):
            states.append(f"process {process.info['pid']} in {process.info['cwd']}")
    if not states:
        return [Check("SuperLink", True, "none is running")]
    remedy = "a bare `flwr run` meets the one on the local ports: kill it first if it is stale"
    return [Check("SuperLink", True, state, remedy) for state in states]


def _ports() -> Check:
    taken = []
    for port in LOCAL_SUPERLINK_PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                taken.append(str(port))
    if not taken:
        return Check("local ports", True, "free, `flwr run` will start its own SuperLink")
    remedy = "if no SuperLink of yours is meant to run there, end the process that holds them"
    return Check("local ports", True, f"{', '.join(taken)} in use", remedy)


def _processors() -> Check:
    count = os.cpu_count() or 1
    remedy = "" if count > 1 else "`flwr run` asks for 2 a client: use fed-dpsd run --engine flower"
    return Check("processors", count > 1, str(count), remedy)


def _gpus(devices: Sequence[Device], processors: int) -> list[Check]:
    """List the GPUs, and the share of five clients that learn plainly on them."""
    if not devices:
        return [Check("GPU", True, "none, everything runs on the processor")]
    checks = [Check("GPU", True, str(device)) for device in devices]
    experiment = from_overrides([*EXAMPLE, f"num_clients={CLIENTS}"], Path.cwd())
    name = f"{CLIENTS} clients, {' '.join(EXAMPLE)}"
    try:
        return [*checks, Check(name, True, str(place(experiment, CLIENTS, devices, processors)))]
    except UserError as error:
        return [*checks, Check(name, False, str(error), "end what fills the GPU: see nvidia-smi")]
