"""Checks of a machine, in general or for a run, each with its remedy."""

import importlib
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from fed_dpsd.engines.flower import LOOPBACK, direct, proxies
from fed_dpsd.engines.placement import place, place_on_this_machine
from fed_dpsd.engines.ready import require_writable, run_warnings
from fed_dpsd.errors import UserError, size_text
from fed_dpsd.experiment import Experiment, from_overrides, partitions
from fed_dpsd.models.devices import Device, gpus
from fed_dpsd.needs import needs_of
from fed_dpsd.storage import app_folder, home, nearest_existing

FLOWER_MINORS = ("1.41", "1.42")
# The variables that Flower reads, and the ports of the SuperLink that `flwr run` starts.
LOCAL_PORTS = {
    "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": "39091",
    "FLWR_LOCAL_CONTROL_API_PORT": "39093",
}
# The example run for a GPU's shares.
CLIENTS = 5
EXAMPLE = ("training=plain", "model=cnn", "device=cuda")


@dataclass(frozen=True)
class Check:
    """A finding about the machine."""

    name: str
    good: bool
    state: str
    remedy: str = ""


def examine() -> list[Check]:
    """Return all checks of the machine, passed or failed."""
    return [
        *(_flower(), _app(), _torchvision(), *_folders(), *_superlinks(), _ports(), _proxies()),
        *(_processors(), *_gpus(gpus(), os.cpu_count() or 1)),
    ]


def examine_run(experiment: Experiment) -> list[Check]:
    """Return the checks for a run on this machine, which read data but train and charge nothing."""
    config, data = experiment.config, _checked("data", lambda: _data(experiment))
    records = sum(map(len, partitions(experiment))) if data.good else None
    needs = needs_of(experiment, records)
    return [
        data,
        _checked("devices", lambda: str(place_on_this_machine(experiment, 1))),
        _checked("budget", lambda: "; ".join(run_warnings(experiment)) or "admits the whole plan"),
        _folder("out", Path(config.out), needs.run_disk),
        _folder("cache", Path(config.cache), needs.cache_disk + needs.temporary),
        _memory(sum(needs.here.values())),
    ]


def _checked(name: str, found: Callable[[], str]) -> Check:
    """Run a check that returns the state; an error is the remedy of a failed check."""
    try:
        return Check(name, True, found())
    except UserError as error:
        return Check(name, False, "not as this run needs it", " ".join(str(error).split()))


def _data(experiment: Experiment) -> str:
    sizes = sorted(map(len, partitions(experiment)))
    return (
        f"{experiment.config.data.name}: {sum(sizes):,} records, {sizes[0]:,} to {sizes[-1]:,} at "
        f"each of {len(sizes):,} clients"
    )


def _folder(key: str, folder: Path, needed: int) -> Check:
    """Check that a folder is writable and has room for what the run writes to it."""
    try:
        require_writable(key, folder)
    except UserError as error:
        return Check(key, False, str(folder), str(error))
    free = psutil.disk_usage(str(nearest_existing(folder))).free
    state = f"{folder} is writable, {size_text(free)} free"
    state += f"; the run writes about {size_text(needed)}"
    remedy = "" if needed < free else f"free some space, or give {key}="
    return Check(key, needed < free, state, remedy)


def _memory(needed: int) -> Check:
    """Check that a run fits into free memory."""
    free = psutil.virtual_memory().available
    state = f"{size_text(free)} free; the run takes about {size_text(needed)}"
    return Check("memory", needed < free, state, "" if needed < free else "close other programs")


def _flower() -> Check:
    version = metadata.version("flwr")
    good = version.startswith(tuple(f"{minor}." for minor in FLOWER_MINORS))
    remedy = "" if good else f"pip install 'flwr[simulation]~={FLOWER_MINORS[-1]}.0'"
    return Check("flwr", good, f"{version} (tested with {' and '.join(FLOWER_MINORS)})", remedy)


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
    """List running SuperLinks; `flwr run` uses them with their code and folder."""
    states = []
    for process in psutil.process_iter(["cmdline", "pid", "cwd"]):
        if any("flower-superlink" in part for part in process.info["cmdline"] or []):
            states.append(f"process {process.info['pid']} in {process.info['cwd']}")
    if not states:
        return [Check("SuperLink", True, "none is running")]
    remedy = "a plain `flwr run` uses the one on the local ports; stop it first if it is outdated"
    return [Check("SuperLink", True, state, remedy) for state in states]


def _ports() -> Check:
    taken = []
    ports = {name: os.environ.get(name, usual) for name, usual in LOCAL_PORTS.items()}
    for name, port in ports.items():
        if not (port.isdecimal() and 0 < int(port) < 2**16):
            return Check("local ports", False, f"{name}={port} is not a port", f"unset {name}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                taken.append(port)
    if not taken:
        free = f"{' and '.join(ports.values())} are free: `flwr run` will start its own SuperLink"
        return Check("local ports", True, free)
    remedy = f"unless your own SuperLink runs there, stop it, or set {' and '.join(LOCAL_PORTS)}"
    return Check("local ports", True, f"{', '.join(taken)} in use", remedy)


def _proxies() -> Check:
    """Check that loopback addresses are reached without a proxy."""
    if not (named := ", ".join(proxies(os.environ))):
        return Check("proxy", True, "none is set")
    if not (changed := direct(os.environ)):
        return Check("proxy", True, f"{named}, not for {' and '.join(LOOPBACK)}")
    state = f"{named}, also for this machine, so `flwr run` cannot reach its own SuperLink"
    remedy = f"add {', '.join(LOOPBACK)} to {' and '.join(changed)}; fed-dpsd does so for its own"
    return Check("proxy", False, state, f"{remedy} processes")


def _processors() -> Check:
    count = os.cpu_count() or 1
    remedy = "" if count > 1 else "`flwr run` needs 2 per client: use fed-dpsd run --engine flower"
    return Check("processors", count > 1, str(count), remedy)


def _gpus(devices: Sequence[Device], processors: int) -> list[Check]:
    """List the GPUs and how each is shared by five clients that train without privacy."""
    if not devices:
        return [Check("GPU", True, "none; everything runs on the CPU")]
    checks = [Check("GPU", True, str(device)) for device in devices]
    experiment = from_overrides([*EXAMPLE, f"num_clients={CLIENTS}"], Path.cwd())
    name = f"{CLIENTS} clients, {' '.join(EXAMPLE)}"
    try:
        shares = place(experiment, CLIENTS, devices, processors)
        return [*checks, Check(name, True, f"{shares}; `flwr run` needs no --federation-config")]
    except UserError as error:
        return [
            *checks,
            Check(name, False, str(error), "stop the processes that fill the GPU (see nvidia-smi)"),
        ]
