"""Every example of the help texts, unchanged; added settings keep it short."""

import io
import re
import shlex
import shutil
import tempfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from click import Group
from PIL import Image
from typer.main import get_command

from fed_dpsd import api, cli
from fed_dpsd.engines.flower import nodes
from fed_dpsd.server.attendance import Member, store_members
from tests.conftest import SMALL
from tests.hospitals import site_file

QUICK = tuple(each for each in SMALL if each.partition("=")[0] not in ("training", "answers"))
DP = ("training.steps=5", "rounds=1", "queries_per_round=16", "method.final_student_steps=5")


def examples(command, words=("fed-dpsd",)):
    """Every example below a command: the words of its name, and the line."""
    if isinstance(command, Group):
        for name, below in command.commands.items():
            yield from examples(below, (*words, name))
        return
    for line in re.findall(r"^(?:Example|Or): (.*)$", command.epilog, re.MULTILINE):
        assert line.startswith(" ".join(words)), f"the help of {words} shows {line}"
        yield line


EXAMPLES = list(examples(get_command(cli.app)))


def test_every_command_has_an_example():
    def below(command):
        return (
            [each for sub in command.commands.values() for each in below(sub)]
            if isinstance(command, Group)
            else [command]
        )

    commands = below(get_command(cli.app))
    assert len(commands) >= 18
    assert all("Example: " in command.epilog for command in commands)
    needs = {each: [key for key in NEEDS if each.startswith(key)] for each in EXAMPLES}
    assert all(len(keys) == 1 for keys in needs.values()), needs
    assert {key for keys in needs.values() for key in keys} == set(NEEDS)


# --- what an example needs in its folder ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("finished") / "RUN"
    api.run(*SMALL, "rounds=1", f"run_folder={folder}", progress=False)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "runs" / "RUN")


@pytest.fixture
def model(run, fed_dpsd, tmp_path):
    assert fed_dpsd("export", "runs/RUN", "--out", "model")[0] == 0
    Image.new("L", (12, 9)).save(tmp_path / "IMAGE.png")


@pytest.fixture
def mnist(tmp_path):
    """A folder in MNIST's layout, with forty images."""
    rng, rows = np.random.default_rng(0), []
    for label in [*range(10)] * 4:
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (28, 28), np.uint8)).save(buffer, "PNG")
        rows.append({"image": {"bytes": buffer.getvalue(), "path": None}, "label": label})
    for split in ("train", "test"):
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, tmp_path / f"{split}.parquet")


@pytest.fixture
def site(tmp_path):
    site_file(tmp_path, training=["dp_sgd"], models=["scattering"], queries=100_000)


@pytest.fixture
def node(site, tmp_path, monkeypatch):
    """A hospital's files, and a stub in place of Flower's node."""
    for name in ("ca.crt", "node_key"):
        (tmp_path / name).touch()
    monkeypatch.setattr("fed_dpsd.engines.flower.supernode.serve", lambda *_: None)


@pytest.fixture
def members(tmp_path, monkeypatch):
    """A run's list of hospitals, and a stub in place of Flower's commands."""
    store_members(tmp_path / "runs" / "NAME", [Member(0, "St Mary's", 100)])
    monkeypatch.setattr(nodes, "_flwr", lambda *_: {"nodes": []})


@pytest.fixture
def swept(fed_dpsd):
    code, _, err = fed_dpsd("sweep", "seed=0", *SMALL, "rounds=1")
    assert code == 0, err


@pytest.fixture
def coins(fed_dpsd):
    """A sweep whose runs leave out records by coins, for an attack to find."""
    settings = (*SMALL, "answers=probabilities", "partition=coins", "rounds=1")
    code, _, err = fed_dpsd("sweep", "seed=range(0,6)", *settings)
    assert code == 0, err


@pytest.fixture
def attacked(monkeypatch, few_draws):
    """Attacks of fewer runs."""
    monkeypatch.setattr("fed_dpsd.audits.attacks.CLOSE_RUNS", 10_000)
    monkeypatch.setattr("fed_dpsd.audits.attacks.CLAIM_RUNS", 50)


@pytest.fixture
def rehearsed(monkeypatch, tmp_path):
    """A stub for hosts and processes, which only writes the hospitals' files."""
    from fed_dpsd.cli import rehearse
    from fed_dpsd.client.hospital import open_hospital
    from fed_dpsd.rehearsal.rehearsal import Rehearsal

    class Stub(Rehearsal):
        def __enter__(self):
            for number in self.hospitals:
                open_hospital(self.site(number)).experiment(self.experiment.to_json(), 0)
            return self

        def __exit__(self, *_):
            pass

    def finished(rehearsal):
        settings = ("training.steps=5", "method.student_steps=2", *DP)
        return api.run(*settings, f"run_folder={tmp_path}/run", progress=False)

    monkeypatch.setattr("fed_dpsd.rehearsal.rehearsal.Rehearsal", Stub)
    monkeypatch.setattr(rehearse, "_run", finished)
    with tempfile.TemporaryDirectory() as short:  # a hospital's socket needs a short path
        monkeypatch.chdir(short)
        yield


# The beginning of an example: the fixture that it needs, and what is typed after it.
NEEDS = {
    "fed-dpsd run rounds=5": ("", (*SMALL, "rounds=1")),
    "fed-dpsd run method=dpsd": ("mnist", ("data.path=.", *DP)),
    "fed-dpsd resume": ("run", ()),
    "fed-dpsd export": ("run", ()),
    "fed-dpsd predict": ("model", ()),
    "fed-dpsd synthesize": ("run", ("--num", "20")),
    "fed-dpsd list": ("", ()),
    "fed-dpsd data": ("", ()),
    "fed-dpsd doctor": ("", ()),
    "fed-dpsd privacy plan": ("", ()),
    "fed-dpsd privacy audit": ("attacked", ("rounds=1", "queries_per_round=16")),
    "fed-dpsd privacy attack": ("coins", ()),
    "fed-dpsd privacy ledger": ("run", ()),
    "fed-dpsd sweep seed": ("", (*QUICK, "training=plain", "rounds=1", "queries_per_round=16")),
    "fed-dpsd sweep experiment": ("", ("method=local", "seed=0", "teacher.min_steps=5")),
    "fed-dpsd report": ("swept", ()),
    "fed-dpsd rehearse": ("rehearsed", ()),
    "fed-dpsd site init": ("", ()),
    "fed-dpsd site key": ("site", ()),
    "fed-dpsd site check": ("site", ("num_clients=2", "training.steps=3")),
    "fed-dpsd site serve": ("node", ()),
    "fed-dpsd site list": ("members", ()),
    "fed-dpsd site revoke": ("members", ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("begin", NEEDS)
def test_an_example_does_what_it_says(fed_dpsd, request, begin):
    """The first one of each kind."""
    fixture, settings = NEEDS[begin]
    if fixture:
        request.getfixturevalue(fixture)
    example = next(each for each in EXAMPLES if each.startswith(begin))
    code, _, err = fed_dpsd(*shlex.split(example)[1:], *settings)
    assert code == 0, err
