"""Checks of a run before anything is read or made."""

import pytest

from fed_dpsd.accounts.ledger import FileLedger
from fed_dpsd.engines.clients import data_of
from fed_dpsd.engines.ready import ready
from fed_dpsd.errors import UserError
from fed_dpsd.server.checks import cautions

DP = ("training=dp_sgd", "training.steps=20")


def test_a_budget_below_the_first_charge_is_an_error_with_the_number_that_is_needed(small):
    needed = r"privacy.budget=0.1 is less than this run needs, [\d.]+ \(record, add_remove\); raise"
    with pytest.raises(UserError, match=needed):
        ready(small(*DP, "privacy.budget=0.1"), ())
    with pytest.raises(UserError, match="needs, inf .*privacy.budget=null"):
        ready(small("answers=probabilities", "privacy.budget=3"), ())
    replaced = ("privacy.budget_relation=replace_one", "privacy.target_epsilon=3")
    with pytest.raises(
        UserError, match=r"budget=3.5 is less .* \(record, add_remove and replace_one\)"
    ):
        ready(small(*DP, *replaced, "privacy.budget=3.5"), ())
    assert cautions(small(*DP, "privacy.target_epsilon=3", "privacy.budget=3")) == []


def test_a_budget_that_ends_the_run_early_is_a_caution(small):
    some = small("answers.epsilon_per_answer=4", "rounds=6", "privacy.budget=400")
    (caution,) = cautions(some)
    assert "privacy.budget=400 is less than this run needs, " in caution
    assert "the run ends when the budget is spent" in caution


def test_a_ledger_of_earlier_runs_is_left_to_the_clients(small, tmp_path):
    (tmp_path / "life").mkdir()
    shared = (*DP, "privacy.budget=0.1", f"ledger={tmp_path}/life")
    with pytest.raises(UserError, match="privacy.budget"):
        cautions(small(*shared))
    (tmp_path / "life" / "client_000.sqlite").touch()
    assert cautions(small(*shared)) == []


def test_ledgers_of_other_records_are_reported_before_a_run_folder_is_made(small, tmp_path):
    mine, life = small(f"ledger={tmp_path}/life"), tmp_path / "life"
    own = FileLedger(life, 0, data_of(mine, 0))
    with own.transaction():
        own.note("a", b"")
    ready(mine, ())
    (life / "client_000.sqlite").rename(life / "client_001.sqlite")
    with pytest.raises(UserError, match=r"client_001.sqlite belongs to other records \(dig"):
        ready(mine, ())


@pytest.mark.parametrize("key", ["out", "cache"])
def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_made(small, tmp_path, key):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"{key}={tmp_path}/file/below is not writable; choose"):
        ready(small(f"{key}={tmp_path}/file/below"), ())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_hospitals_are_reached_by_the_overrides_that_were_typed(deployed):
    with pytest.raises(UserError, match=r"--run-config 'overrides=\"rounds=2 seed=1\"'"):
        ready(deployed(), ("rounds=2", "seed=1"))
