"""Shared fixtures: a home and a cache of their own, and a small experiment that runs in seconds.

Heavy libraries are imported inside functions: the process that only hands out tests needs none.
"""

import copy
import functools
import gc
import io
import os
import pwd
import shutil
import subprocess
from types import SimpleNamespace

import pytest

# Processes that share cores are fastest with one thread each; tests of threads set their own.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads yield their core
# Ledgers wait for the disk at each charge: where memory has room, it holds the tests' folders.
MEMORY = "/dev/shm"
if os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > 2e9:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

SMALL = (
    "training=plain",
    "answers=label",
    "model=cnn",
    "num_clients=2",
    "rounds=3",
    "queries_per_round=64",
    "teacher.min_steps=20",
    "teacher.epochs=0",
    "method.student_steps=5",
    "method.final_student_steps=10",
    "method.batch_size=32",
    "method.generator_steps=2",
    "model.generator_width=4",
    "model.student_width=4",
    "model.teacher_width=4",
    "device=cpu",
    "threads_server=1",
)


# Small numbers, where a method has such a setting.
QUICK = ("generator_steps", "pretraining_steps", "pixel_steps", "steps_per_round", "latent_size")
QUICK += ("synthetic_images", "vae_steps", "code_size")


def contents(folder):
    """The bytes and modification time of every file below a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


PARTS = 60  # of the slow tests; every run of .ci/run takes the part of its day
SECONDS = 3  # of a slow test, unless its mark has its own `seconds`
# Files that take longest come first: the two processes then end together.
LONGEST = ("test_simulation.py", "test_mutations.py", "test_method_contract.py")
LONGEST += ("test_accounting.py", "test_charges.py", "test_run.py", "test_membership.py")


def pytest_addoption(parser):
    text = f"with -m '': the fast tests, those marked ci, and one of {PARTS} parts of the slow ones"
    parser.addoption("--slow-part", type=int, choices=range(PARTS), help=text)


def pytest_report_header(config):
    part = config.getoption("slow_part")
    return [] if part is None else f"slow tests: part {part} of 0 to {PARTS - 1}"


def parts_of(slow):
    """Deal slow tests to parts of about the same expected seconds: the longest tests come first."""

    def seconds(item):
        return item.get_closest_marker("slow").kwargs.get("seconds", SECONDS)

    parts, times = [[] for _ in range(PARTS)], [0.0] * PARTS
    for item in sorted(slow, key=seconds, reverse=True):
        shortest = times.index(min(times))
        parts[shortest].append(item)
        times[shortest] += seconds(item)
    return parts


def pytest_collection_modifyitems(config, items):
    """Choose a part of the slow tests, and begin with the files that take longest."""
    if (part := config.getoption("slow_part")) is not None:
        # Keywords also have the names of folders, such as a checkout's.
        marked = [item for item in items if item.get_closest_marker("slow")]
        slow = [item for item in marked if not item.get_closest_marker("ci")]
        left_out = set(slow) - set(parts_of(slow)[part])
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish():
    """Leave the libraries' many objects out of garbage collections, and have fewer of them."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _each_configuration_file_is_parsed_once():
    """A command composes conf/ once or twice; the tests, hundreds of times."""
    from omegaconf import OmegaConf

    load = OmegaConf.load

    @functools.cache
    def parsed(text):
        return load(io.StringIO(text))

    def load_once(file):
        return copy.deepcopy(parsed(file.read())) if hasattr(file, "read") else load(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", staticmethod(load_once))
        yield


@pytest.fixture
def small_disk(tmp_path):
    """A folder on its own disk, and a function that sets the disk's size in bytes.

    Skips the test if mounting is not permitted, as without root.
    """
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size, *how):
        options = ",".join([*how, f"size={size}"])
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True).returncode == 0

    if not shutil.which("mount") or not mount(300_000):
        pytest.skip("no disk may be mounted here")
    yield folder, lambda size: mount(size, "remount")
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def composed(*overrides):
    from fed_dpsd.config.compose import compose

    return compose(overrides)


@functools.cache
def composed_once(*overrides):
    """The same for a few overrides, by many tests; not to be changed."""
    return composed(*overrides)


def small_for(overrides):
    """SMALL, without what the method that `overrides` name has no key for, or sets itself."""
    named = [override for override in overrides if override.startswith("method=")]
    whole = composed_once(*named)
    keys = whole["method"] if named else None
    alone = whole["num_clients"] == 1
    return [
        setting
        for setting in SMALL
        if not (alone and setting.startswith("num_clients="))
        if keys is None
        or setting.partition("=")[0].removeprefix("method.") in keys
        or not setting.startswith("method.")
    ]


def quick_for(overrides):
    """QUICK, as the method that `overrides` name has it."""
    keys = composed_once(*(each for each in overrides if each.startswith("method=")))
    return [f"method.{key}=2" for key in QUICK if key in keys["method"]]


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _own_home(home, monkeypatch):
    monkeypatch.setenv("FED_DPSD_HOME", str(home))


@pytest.fixture
def homeless(_own_home, monkeypatch):
    """A user without a home folder, as in a container with an unknown uid."""

    def unknown(_):
        raise KeyError

    for name in ("FED_DPSD_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)


@pytest.fixture
def small(tmp_path):
    """Sets up a small experiment; takes further overrides."""

    from fed_dpsd.experiment import set_up

    def make(*overrides):
        raw = composed(*small_for(overrides), *overrides)
        return set_up(raw | {"out": raw["out"] or f"{tmp_path}/runs"}, tmp_path)

    return make


@pytest.fixture(scope="module")
def few_examples():
    """Fixed features are whitened by an eighth of the images in a whole module."""
    from fed_dpsd.models import fixed_features, patches, scattering

    caches = patches.patterns, fixed_features.whitening, fixed_features._remembered
    with pytest.MonkeyPatch.context() as patch:
        for module in (patches, scattering):
            patch.setattr(module, "EXAMPLES", module.EXAMPLES // 8)
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def clock(monkeypatch):
    """The coordinator's time in seconds, in a list of one; only its sleeps move it."""
    from fed_dpsd.engines.flower import grid

    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(grid, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


@pytest.fixture
def deployed(small, monkeypatch, clock):
    """Sets up an experiment over hospitals, in what says it is a Flower process, at `clock`."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("task_id", "run_id", "node_id"):  # otherwise no message can be made
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)

    def make(*overrides, one=True):
        """With `one`, one hospital is enough, unless the overrides say otherwise."""
        return small(
            *("federation=deployment", "federation.node_timeout_seconds=0.5"),
            *("federation.min_clients=1",) * one,
            *("federation.round_timeout_seconds=1.5", *overrides),
        )

    return make
