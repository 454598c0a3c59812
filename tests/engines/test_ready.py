"""Checks of a run before anything is read or made, on each engine."""

import functools
import shutil
import sqlite3
from contextlib import closing
from types import SimpleNamespace

import pytest
from torch import nn

from fed_dpsd import api
from fed_dpsd.accounts.database import journal_path
from fed_dpsd.accounts.ledger import FileLedger
from fed_dpsd.engines import ready as checks
from fed_dpsd.engines.clients import data_set_name, prepare_clients
from fed_dpsd.engines.flower import server
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.engines.ready import run_warnings, weak_delta
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import partitions
from fed_dpsd.models import functions
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder

DP = ("training=dp_sgd", "training.steps=20")
GRID = SimpleNamespace(get_node_ids=lambda: [1])


def ready(experiment):
    return checks.check_run(experiment, functools.partial(prepare_clients, experiment, 1))


@pytest.fixture
def on_flower(monkeypatch):
    """Prepares a run as `flwr run` does."""

    def prepare(experiment):
        monkeypatch.setattr(server, "from_run_config", lambda _: experiment)
        server.prepare(GRID, {})

    return prepare


def test_a_budget_below_the_first_charge_is_an_error_with_the_number_that_is_needed(small):
    needed = r"privacy.budget=0.1 is less than this run needs, [\d.]+ \(record, add_remove\); raise"
    with pytest.raises(UserError, match=needed):
        ready(small(*DP, "privacy.budget=0.1"))
    with pytest.raises(UserError, match="needs, inf .*privacy.budget=null"):
        ready(small("answers=probabilities", "privacy.budget=3"))
    replaced = ("privacy.budget_relation=replace_one", "privacy.target_epsilon=3")
    with pytest.raises(
        UserError, match=r"budget=3.5 is less .* \(record, add_remove and replace_one\)"
    ):
        ready(small(*DP, *replaced, "privacy.budget=3.5"))
    assert run_warnings(small(*DP, "privacy.target_epsilon=3", "privacy.budget=3")) == []


def test_a_budget_that_ends_the_run_early_is_a_caution(small):
    steps = "method.final_student_steps=100"
    some = small("answers.epsilon_per_answer=4", "rounds=6", "privacy.budget=400", steps)
    (caution,) = run_warnings(some)
    assert "privacy.budget=400 is less than this run needs, " in caution
    assert "the run ends when the budget is spent" in caution


def test_a_delta_that_is_too_large_is_said_to_its_owner_alone(small):
    """On the card it would reveal roughly how many records the largest client has."""
    records = max(map(len, partitions(small())))
    notes = []
    for share, large in ((0.999, False), (1.001, True)):
        experiment = small(f"privacy.delta={share / records!r}", "rounds=1")
        said = f"is too large for the {records:,} records of the largest client"
        assert any(said in caution for caution in weak_delta(experiment)) == large
        folder = new_run_folder(experiment)
        federation = LocalFederation(experiment, folder)
        summary = runs.run(experiment, federation, folder, lambda line: None)
        notes.append([row["notes"] for row in summary["privacy"]["proven"]])
    assert notes[0] == notes[1]


def test_a_ledger_of_earlier_runs_is_left_to_the_clients(small, tmp_path):
    (tmp_path / "life").mkdir()
    shared = (*DP, "privacy.budget=0.1", f"ledger={tmp_path}/life")
    with pytest.raises(UserError, match="privacy.budget"):
        run_warnings(small(*shared))
    (tmp_path / "life" / "client_000.sqlite").touch()
    assert run_warnings(small(*shared)) == []


def with_ledger(small, folder):
    """An experiment with a ledger of client 0, to which a note was written."""
    experiment = small(f"ledger={folder}")
    own = FileLedger(folder, 0, data_set_name(experiment, "client 0"))
    with own.transaction():
        own.store_note("a", b"")
    return experiment


def others(small, tmp_path):
    experiment = with_ledger(small, tmp_path / "life")
    shutil.copy(tmp_path / "life" / "client_000.sqlite", tmp_path / "life" / "client_001.sqlite")
    return experiment


def lost(small, tmp_path):
    experiment = with_ledger(small, tmp_path / "life")
    (tmp_path / "life" / "client_000.sqlite").unlink()
    return experiment


def of_one_run(small, tmp_path):
    (tmp_path / "life").mkdir()
    (tmp_path / "life" / "simulated.sqlite").touch()
    return small(f"ledger={tmp_path}/life")


def no_ledger(small, tmp_path):
    (tmp_path / "file").touch()
    return small(f"ledger={tmp_path}/file/below")


def no_teacher(small, tmp_path):
    (tmp_path / "teacher.safetensors").write_text("nonsense")
    return small(f"teacher.path={tmp_path}/teacher.safetensors", "teacher.arch=cnn")


@pytest.mark.parametrize("engine", ["local", "flower"])
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            others,
            r"client_001.sqlite is the account of client 0, .*, not of client 1, .*; for the same",
        ),
        (lost, "client_000.sqlite is missing or empty, .*; restore it from a backup"),
        (of_one_run, "^ledger=.*/life holds the ledgers of one run; choose another folder"),
        (no_ledger, "^ledger=.*/file/below is not writable; choose another folder"),
        (no_teacher, "^teacher.path=.*/teacher.safetensors"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_what_a_run_lacks_is_one_error_before_a_folder_is_made_on_each_engine(
    small, tmp_path, on_flower, make, problem, engine
):
    with pytest.raises(UserError, match=problem):
        (ready if engine == "local" else on_flower)(make(small, tmp_path))
    assert not (tmp_path / "runs").exists()


def test_a_run_that_lacks_nothing_has_a_folder(small, tmp_path, on_flower):
    on_flower(small())
    assert [path.name for path in (tmp_path / "runs").iterdir()]


def test_a_ledger_whose_last_write_was_cut_short_is_repaired(small, tmp_path):
    path, experiment = (
        tmp_path / "life" / "client_000.sqlite",
        with_ledger(small, tmp_path / "life"),
    )
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO notes VALUES ('b', x'00', zeroblob(900000))")
        files = {each: each.read_bytes() for each in (path, journal_path(path))}
    for each, content in files.items():
        each.write_bytes(content)
    ready(experiment)
    assert not journal_path(path).exists()


def test_a_deployment_needs_no_ledger(deployed, tmp_path, on_flower):
    (tmp_path / "file").touch()
    on_flower(deployed(f"ledger={tmp_path}/file/below"))
    assert (tmp_path / "runs").exists()


def test_a_python_function_of_a_resumed_run_is_missed_in_one_line(
    small, tmp_path, on_flower, monkeypatch, caplog
):
    """What has no function cannot resume a run that was given one in Python."""

    def make_net():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    monkeypatch.setattr(functions, "_MADE", {})
    name = functions.add_functions({"teacher": make_net})["teacher"]
    folder = new_run_folder(small(f"model.teacher='{name}'"))
    monkeypatch.delitem(CLASSIFIERS, name)
    with pytest.raises(server.RunFailed, match="is a Python function, which this"):
        server.start(GRID, {"resume": str(folder)})
    assert not caplog.records  # such as a traceback


@pytest.mark.parametrize("key", ["out", "cache"])
def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_made(small, tmp_path, key):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"{key}={tmp_path}/file/below is not writable; choose"):
        ready(small(f"{key}={tmp_path}/file/below"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_hospitals_are_reached_by_the_overrides_that_were_typed():
    with pytest.raises(
        UserError, match=r"--run-config 'overrides=\"federation=deployment rounds=2 seed=1\"'"
    ):
        api.new_job(("federation=deployment", "rounds=2", "seed=1"))
