"""What the Flower bundle carries, and that it asks Flower to install nothing."""

import re
import subprocess
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from fed_dpsd import __version__
from fed_dpsd.flower.run_config import FLAT_KEYS

ROOT = Path(__file__).parents[1]
SHIPPED = (".py", ".yaml", ".toml", ".md")
NOT_SHIPPED = ("tests", "docs", "deploy", ".ci")


@pytest.fixture(scope="module")
def bundle():
    return zipfile.ZipFile(BytesIO(build_fab_from_disk(ROOT)))


def test_the_bundle_is_what_git_tracks(bundle):
    """An unanchored `data/` in .gitignore would drop fed_dpsd/data and conf/data unnoticed."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    expected = {
        name
        for name in listed
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


def test_the_bundle_names_no_dependency(bundle):
    project = tomllib.loads(bundle.read("pyproject.toml").decode())["project"]
    assert "dependencies" not in project
    assert "optional-dependencies" not in project
    assert set(project["dynamic"]) == {"dependencies", "optional-dependencies"}
    assert not [name for name in bundle.namelist() if name.endswith(".txt")]


def test_flat_keys_are_declared_as_not_given_each_with_its_type():
    text = (ROOT / "pyproject.toml").read_text()
    config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    assert config == dict.fromkeys((*FLAT_KEYS, "overrides", "resume"), "")
    kinds = {int: "an integer", float: "a number"}
    for key, flat in FLAT_KEYS.items():
        (comment,) = re.findall(rf'^{key} = "" # (.+)$', text, re.MULTILINE)
        assert [kind for kind, words in kinds.items() if comment.startswith(words)] == [
            kind for kind in kinds if kind is flat.kind
        ]


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
