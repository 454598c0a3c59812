"""Environments with FedDPSD's wheel."""

import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = [sys.executable, "-m", "uv"]


def with_wheel(folder, *packages):
    """Install the wheel, and more packages, in a new environment; return its `fed-dpsd`.

    Flower comes with it for its commands. All else is taken from the environment of the tests,
    where it is compiled; an editable FedDPSD there is out of reach.
    """
    venv = folder / "venv"
    subprocess.run([*UV, "build", "-q", "--wheel", "-o", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*UV, "venv", "-q", "--python", sys.executable, str(venv)], check=True)
    into = [*UV, "pip", "install", "-q", "--no-deps", "--python", str(venv / "bin" / "python")]
    flower = f"flwr=={metadata.version('flwr')}"
    subprocess.run([*into, str(wheel), *map(str, packages), flower], check=True)
    (own,) = venv.glob("lib/python*/site-packages")
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin" / "fed-dpsd"


def said_by(program, folder, *words):
    """Run a program with its home in `folder`, out of reach of a checkout; returns what it says."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [program, *words],
        cwd=folder,
        env=own | {"FED_DPSD_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
