"""docs/extending.md: its files, in a copy of the project, and its commands."""

import io
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from tests.conftest import SMALL
from tests.forks import finished, fork

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"^`(\S+/\S+)`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def run_all(commands):
    """The page's commands, by the package of the working directory."""
    forget()
    import fed_dpsd
    from fed_dpsd.cli import main

    print(fed_dpsd.__file__)
    for words in commands:
        sys.argv = words
        try:
            main()
        except SystemExit as done:
            if done.code:
                sys.exit(f"failed: {words}")


def forget():
    """Let this process, a fork, import the package of its working directory."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fed_dpsd"]:
        del sys.modules[name]
    sys.path.insert(0, os.getcwd())


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
    commands = [small(command) for command in COMMANDS]
    log = project / "log"
    code = finished(fork(lambda: run_all(commands), log, project))
    assert code == 0, log.read_text()
    assert log.read_text().startswith(str(project))
    assert log.read_text().count("· ensemble") == 2
    (method,) = [content for name, content in FILES.items() if "methods" in name and "py" in name]
    assert len(method.splitlines()) <= 45


def audited():
    """Audits of the page's mechanism, as it is and with an event of half the sensitivity."""
    forget()
    from dp_accounting import LaplaceDpEvent
    from fed_dpsd.privacy.laplace_probabilities import LaplaceProbabilities

    from fed_dpsd.audits.black_box import audit
    from fed_dpsd.privacy.accounting import Stage, prove

    class TooSmall(LaplaceProbabilities):
        def event(self, unit, relation):
            return LaplaceDpEvent(self.noise_multiplier)

    for cls in (LaplaceProbabilities, TooSmall):
        mechanism = cls(4, 1.0)
        claim = prove([Stage(mechanism, 1, 1)], 1e-5, "record", "replace_one")
        rng = np.random.default_rng(0)

        def client(asks, row, mechanism=mechanism, rng=rng):
            return [
                mechanism.noise(mechanism.encode(values[0], row)[None], row, rng) for values in asks
            ]

        found = audit(mechanism, client, 1, 40_000, 1e-5, 1e-6)
        print(found.lower_bound <= claim.value, found.refutes(claim.value, 1e-5, 1))


def test_the_pages_mechanism_is_refuted_where_its_event_is_too_small(project):
    """Audited: the claim holds; with half the sensitivity it is refuted (probability 1 - 1e-6)."""
    log = project / "log"
    assert finished(fork(audited, log, project)) == 0, log.read_text()
    assert log.read_text().split() == ["True", "False", "False", "True"]
