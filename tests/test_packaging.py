"""The published files: the Flower bundle, the wheel and the source distribution."""

import hashlib
import os
import re
import socket
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from flwr.cli.app_cmd.publish import _collect_file_paths, _validate_files
from flwr.cli.build import build_fab_from_disk, build_fab_from_files, get_fab_filename
from flwr.cli.config_utils import load_and_validate
from flwr.cli.utils import collect_files
from flwr.supercore.superexec.dependency_installer import (
    RuntimeDependencyInstallationError,
    install_app_dependencies,
)

from fed_dpsd import __version__
from fed_dpsd.engines.flower import QUIET
from fed_dpsd.server.summary import read_summary
from tests.processes import MARK, end_marked, free_port, wait_until

ROOT = Path(__file__).parents[1]
SHIPPED = (".py", ".yaml", ".toml", ".md")
NOT_PACKAGED = {"tests", "docs", "results"}
NOT_SHIPPED = ("tests", "docs", "results", "benchmarks", "deploy", ".ci", ".pre-commit-config.yaml")


@pytest.fixture(scope="module")
def bundle():
    return zipfile.ZipFile(BytesIO(build_fab_from_disk(ROOT)))


def tracked():
    return subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()


def test_the_bundle_is_what_git_tracks(bundle):
    """An unanchored `data/` in .gitignore would drop fed_dpsd/data and conf/data unnoticed."""
    expected = {
        name
        for name in tracked()
        if (name.endswith(SHIPPED) or name == "LICENSE")
        and name.split("/")[0] not in NOT_SHIPPED
        and (ROOT / name).exists()
    }
    shipped = {name for name in bundle.namelist() if not name.startswith(".info/")}
    assert {
        "fed_dpsd/data/datasets.py",
        "conf/data/digits.yaml",
        "client_app/__init__.py",
    } <= shipped
    assert shipped == expected


def test_the_bundle_has_the_format_of_flower_hub():
    _, metadata = build_fab_from_files(collect_files(ROOT))
    assert metadata.fab_format_version == 1
    assert metadata.flwr_version_min == metadata.flwr_version_target == "1.41.0"
    assert load_and_validate(ROOT / "pyproject.toml")[1] == []  # what `flwr build` warns about
    _validate_files(_collect_file_paths(ROOT))  # what Hub refuses: sizes, encoding


def test_flower_hub_gets_what_git_tracks():
    """`flwr app publish .` uploads the folder, not the bundle."""
    uploaded = {path.relative_to(ROOT).as_posix() for path in _collect_file_paths(ROOT)}
    assert uploaded - set(tracked()) == set()
    assert [name for name in uploaded if PRIVATE.search(name)] == []
    assert {"pyproject.toml", "fed_dpsd/data/datasets.py", "conf/data/digits.yaml"} <= uploaded


def test_flower_installs_nothing_at_run_time(bundle, tmp_path, monkeypatch):
    """Without network or cache; a dependency that is not excluded would have to be resolved."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, value in {
        "FLWR_HOME": tmp_path / "flwr",
        "UV_CACHE_DIR": tmp_path / "cache",
        "UV_OFFLINE": 1,
        "PATH": os.environ["PATH"],  # Flower changes it, and the next one
        "VIRTUAL_ENV": os.environ.get("VIRTUAL_ENV", ""),
    }.items():
        monkeypatch.setenv(name, str(value))
    app = tmp_path / "app"
    bundle.extractall(app)
    (packages,) = install_app_dependencies(app).glob("lib/python*/site-packages")
    assert {path.name for path in packages.iterdir()} <= {"_virtualenv.pth", "_virtualenv.py"}
    project = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(project.replace('    "torch",\n', "", 1))
    with pytest.raises(RuntimeDependencyInstallationError, match="torch"):
        install_app_dependencies(app)


# --- the content of each published file ---

NAMES = {
    "wheel": f"fed_dpsd-{__version__}-py3-none-any.whl",
    "sdist": f"fed_dpsd-{__version__}.tar.gz",
    "bundle": "the Flower bundle (`.fab`)",
}
MOST_BYTES = {"wheel": 1_000_000, "sdist": 6_000_000, "bundle": 2_500_000}  # Flower takes 10 MB
# Data, files left by runs and reports, and secrets.
PRIVATE = re.compile(
    r"(^|/)(runs|data/(?!\w+\.(py|yaml)$)|build|dist|site-packages|\.git|\.ci|\.venv|state|ledger"
    r"|checkpoint|samples|asks|secret|node_key)(/|$)|\.(html|sqlite|jsonl|npz|parquet|safetensors"
    r"|onnx|key|pem|crt|fab|whl|pyc|log)$"
)


def build(kind, folder):
    """Build a file to publish, in this process, and return it."""
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    if kind == "bundle":
        content = build_fab_from_disk(ROOT)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        path = folder / get_fab_filename(project, hashlib.sha256(content).hexdigest())
        path.write_bytes(content)
        return path
    builder = WheelBuilder if kind == "wheel" else SdistBuilder
    return Path(next(builder(str(ROOT)).build(directory=str(folder), versions=["standard"])))


def held(path):
    """The name and size of each file inside, without the top folder of an sdist."""
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path) as file:
            found = {m.name: m.size for m in file.getmembers() if m.isfile()}
        return {name.partition("/")[2]: size for name, size in found.items()}
    with zipfile.ZipFile(path) as file:
        return {info.filename: info.file_size for info in file.infolist() if not info.is_dir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    return {kind: build(kind, folder) for kind in NAMES}


def test_nothing_private_or_large_is_published(built):
    for kind, path in built.items():
        files = held(path)
        assert path.stat().st_size < MOST_BYTES[kind], kind
        assert max(files.values()) < 1_000_000, kind
        assert [name for name in files if PRIVATE.search(name)] == [], kind
        if kind != "sdist":
            assert [name for name in files if NOT_PACKAGED & set(name.split("/"))] == [], kind
    for name in ("runs/a/summary.json", "data/mnist/train.parquet", "docs/x.html", "state/secret"):
        assert PRIVATE.search(name), name  # the control


def test_what_a_wheel_needs_is_in_it(built):
    files = held(built["wheel"])
    needed = ["conf/config.yaml", *(f"deploy/{file.name}" for file in (ROOT / "deploy").iterdir())]
    assert {f"fed_dpsd/_app/{name}" for name in needed} <= set(files)
    assert any(name.startswith("fed_dpsd/report/") and name.endswith(".css") for name in files)
    folders = {name.partition("/")[0] for name in files}
    assert folders == {"fed_dpsd", f"fed_dpsd-{__version__}.dist-info"}
    (licence,) = [name for name in files if name.endswith(".dist-info/licenses/LICENSE")]
    assert files[licence] == (ROOT / "LICENSE").stat().st_size


TINY = (
    *("num_clients=2", "rounds=2", "queries_per_round=64", "training.steps=10"),
    *("method.student_steps=5", "method.final_student_steps=10"),
)


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("kind", ["sdist", "bundle"])
def test_the_default_job_runs_in_an_empty_environment(built, tmp_path, kind):
    """From the source distribution, and the bundle unpacked in a folder. test_simulation has the
    wheel.

    The bundle runs without network, and uv's cache is out of its reach.
    """
    uv, venv = [sys.executable, "-m", "uv"], tmp_path / "venv"
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, str(venv)], check=True)
    folder, what = tmp_path / "app", [str(built[kind])]
    folder.mkdir()
    if kind == "bundle":  # Ray waits 30 s for processes, which would compile it for themselves
        zipfile.ZipFile(built[kind]).extractall(folder)
        what = ["--compile-bytecode", "-e", "."]
    into = [*uv, "pip", "install", "-q", "--python", str(venv / "bin" / "python")]
    subprocess.run([*into, *what], cwd=folder, check=True)
    marker, ports = f"published-{tmp_path.name}", (free_port(), free_port())
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own |= QUIET | {
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "FED_DPSD_HOME": str(tmp_path / "home"),
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0],
        "FLWR_LOCAL_CONTROL_API_PORT": ports[1],
        # As on a user's machine, where Flower looks for dependencies; none could be installed.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "0",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_OFFLINE": "1",
        MARK: marker,
    }

    def call(*words):
        done = subprocess.run(
            words, cwd=folder, env=own, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    if kind != "bundle":
        output = call("fed-dpsd", "run", *TINY)
        run = Path(output.splitlines()[-1])
    else:
        try:
            # As flwr run starts it, which gives up after 15 s, on a busy machine too.
            local = ["--insecure", "--simulation", "--isolation", "subprocess"]
            local += ["--control-api-address", f"127.0.0.1:{ports[1]}", "--host", "127.0.0.1"]
            log = (tmp_path / "superlink.log").open("wb")
            subprocess.Popen(
                [venv / "bin" / "flower-superlink", *local, "--port", ports[0]],
                cwd=folder,
                env=own,
                stdout=log,
                stderr=log,
            )
            wait_until(lambda: is_open(ports[0]))
            config = f'num_clients=2 rounds=2 overrides="{" ".join(TINY[2:])}"'
            output = call("flwr", "run", ".", "--run-config", config, "--stream")
        finally:
            end_marked(marker)
        assert "No additional application dependencies needed installation." in output
        (run,) = (tmp_path / "home" / "runs").iterdir()
        pages = subprocess.run(
            ["fed-dpsd", "report", run],
            env=own,
            capture_output=True,
            text=True,
            check=False,
        )
        assert pages.returncode == 1
        assert "run this command where FedDPSD is installed from its wheel" in pages.stderr
    found = read_summary(run)
    assert found.get("status") == "completed", output
    assert (found["method"], found["data"]) == ("fed_dpsd", "digits")


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
