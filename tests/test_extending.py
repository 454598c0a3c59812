"""docs/extending.md: its files, in a copy of the project, and its commands."""

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from tests.conftest import SMALL

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"^`(\S+/\S+)`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
RUN_ALL = """
import sys
from fed_dpsd.cli import main
import fed_dpsd
print(fed_dpsd.__file__)
for line in sys.stdin.read().splitlines():
    sys.argv = line.split("\\0")
    try:
        main()
    except SystemExit as done:
        if done.code:
            sys.exit(f"failed: {sys.argv}")
"""


@pytest.fixture
def project(tmp_path):
    """A copy of the library with the page's files in it, and a folder of colour images."""
    for folder in ("fed_dpsd", "conf"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for name, content in FILES.items():
        path = tmp_path / name
        assert not path.exists()
        path.write_text(content)
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        rows = []
        for index in range(60):
            buffer = io.BytesIO()
            pixels = rng.integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(buffer, "PNG")
            picture = {"bytes": buffer.getvalue(), "path": None}
            rows.append({"image": picture, "label": index % 5, "patient": f"p{index // 3}"})
        (tmp_path / "FOLDER").mkdir(exist_ok=True)
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, tmp_path / "FOLDER" / f"{split}.parquet")
    return tmp_path


def small(command):
    """A command of the page at a small size."""
    words = shlex.split(command, comments=True)
    if words[1] == "data":
        return [*words, "num_clients=2"]
    kept = [s for s in SMALL if not s.startswith("privacy")]
    if "method=blend" in words:
        kept = [s for s in kept if not s.startswith("method.") or s.startswith("method.batch")]
    return [*words[:1], *words[1 : 3 - ("run" in words)], *kept, *words[3 - ("run" in words) :]]


def test_the_page_adds_a_method_a_mechanism_and_a_data_set(project):
    assert len(FILES) == 5
    assert len(COMMANDS) == 6
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input="\n".join("\0".join(small(command)) for command in COMMANDS),
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert str(project) in done.stdout.splitlines()[0]
    assert done.stderr.count("· ensemble") == 2
    (method,) = [content for name, content in FILES.items() if "methods" in name and "py" in name]
    assert len(method.splitlines()) <= 45


def test_the_pages_mechanism_is_refuted_where_its_event_is_too_small(project, monkeypatch):
    """Audited: the claim holds; with half the sensitivity it is refuted (probability 1 - 1e-6)."""
    script = """
import dataclasses, sys
import numpy as np
from dp_accounting import LaplaceDpEvent
from fed_dpsd.privacy.accounting import Stage, prove
from fed_dpsd.privacy.audit import audit
from fed_dpsd.privacy.laplace_probabilities import LaplaceProbabilities
class TooSmall(LaplaceProbabilities):
    def event(self, unit, relation):
        return LaplaceDpEvent(self.noise_multiplier)
for cls in (LaplaceProbabilities, TooSmall):
    mechanism = cls(4, 1.0)
    claim = prove([Stage(mechanism, 1, 1)], 1e-5, "record", "replace_one")
    rng = np.random.default_rng(0)

    def client(asks, row):
        return [
            mechanism.noise(mechanism.encode(values[0], row)[None], row, rng) for values in asks
        ]

    found = audit(mechanism, client, 1, 40_000, 1e-5, 1e-6)
    print(found.lower_bound <= claim.value, found.refutes(claim.value, 1e-5, 1))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "False", "True"]
