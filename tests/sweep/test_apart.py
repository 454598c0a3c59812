"""Settings of runs: equal configurations, except for seeds, are one, and others are not."""

import csv
import re

import pytest

from fed_dpsd.errors import UserError
from fed_dpsd.experiment import from_overrides
from fed_dpsd.report.settings import read_settings, setting_names
from fed_dpsd.sweep.apart import differing_keys, distinguish_rows, key_texts
from fed_dpsd.sweep.reported import settings_in
from tests.every import every
from tests.sweep.test_sweep import go, plan

GRID = "rounds: 2\nsweep: {FedAVG: {method: fedavg}, FedDPSD: {method: fed_dpsd}, seed: [0, 1]}"


def sweep(folder, *overrides, grid=None):
    """Sweep into a folder without running, and return its table."""
    table = folder / "sweep" / "results.csv"
    if grid:
        (folder / "my_grid.yaml").write_text(grid)
    assert not go(plan(folder, "training=plain", *overrides), table)[0]
    return table


def found(settings):
    """The seeds of each setting, by its name."""
    seeds = ["".join(run["seed"] for run in setting.runs) for setting in settings]
    return dict(zip(setting_names(settings), seeds, strict=True))


@pytest.mark.slow(seconds=8)
@every("seeds", ["[2, 3]", "[0]"])
def test_an_edited_grid_gives_other_settings_whether_its_seeds_are_new_or_not(tmp_path, seeds):
    sweep(tmp_path, "my_grid.yaml", grid=GRID)
    edited = GRID.replace("rounds: 2", "rounds: 3").replace("[0, 1]", seeds)
    table = sweep(tmp_path, "my_grid.yaml", grid=edited)
    more = "".join(re.findall(r"\d", seeds))
    expected = {"FedAVG, rounds=2": "01", "FedAVG, rounds=3": more}
    expected |= {"FedDPSD, rounds=2": "01", "FedDPSD, rounds=3": more}
    assert found(read_settings([table])) == expected
    # A table of an earlier version lacks the column; it has the same report.
    with table.open(newline="") as file:
        rows = [{k: v for k, v in row.items() if k != "rounds"} for row in csv.DictReader(file)]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert found(settings_in([table])) == expected
    copy = table.rename(tmp_path / "copy.csv")  # without its run folders
    if seeds == "[0]":
        with pytest.raises(UserError, match="seed=0 occurs twice .* with another --out"):
            settings_in([copy])


@pytest.mark.slow(seconds=4)
def test_tables_of_two_grids_are_told_apart(tmp_path):
    tables = []
    for rounds in ("2", "3"):
        folder = tmp_path / rounds
        folder.mkdir()
        grid = GRID.replace("rounds: 2", f"rounds: {rounds}")
        tables.append(sweep(folder, "my_grid.yaml", grid=grid))
    assert list(found(settings_in(tables))) == [
        *("FedAVG, rounds=2", "FedDPSD, rounds=2", "FedAVG, rounds=3", "FedDPSD, rounds=3"),
    ]


@pytest.mark.slow
def test_keys_left_at_their_defaults_have_their_values_next_to_others(tmp_path):
    sweep(tmp_path, "partition.alpha=0.5,0.1")
    sweep(tmp_path, "rounds=2")
    table = sweep(tmp_path)
    expected = ["alpha=0.5, rounds=20", "alpha=0.1, rounds=20", "alpha=0.5, rounds=2"]
    assert list(found(read_settings([table]))) == expected
    table = sweep(tmp_path, "answers.epsilon_per_answer=2,10", "seed=1")  # 10.0 by default
    assert found(read_settings([table])) == {
        "alpha=0.5, rounds=20, epsilon_per_answer=10": "01",
        "alpha=0.1, rounds=20, epsilon_per_answer=10": "0",
        "alpha=0.5, rounds=2, epsilon_per_answer=10": "0",
        "alpha=0.5, rounds=20, epsilon_per_answer=2": "1",
    }


@pytest.mark.slow
def test_named_grids_have_the_keys_that_they_set(tmp_path):
    """A key of one grid is not a column of others, until a second sweep varies it."""
    grid = "sweep: {one: {rounds: 2}, two: {answers.k: [2, 3]}}"

    def columns(table):
        with table.open(newline="") as file:
            return [(row["rounds"], row["answers.k"]) for row in csv.DictReader(file)]

    table = sweep(tmp_path, "my_grid.yaml", grid=grid)
    assert columns(table) == [("2", ""), ("", "2"), ("", "3")]
    table = sweep(tmp_path, "my_grid.yaml", "rounds=3", grid=grid)
    assert columns(table)[:3] == [("2", ""), ("20", "2"), ("20", "3")]
    assert columns(table)[3:] == [("3", ""), ("3", "2"), ("3", "3")]


def row(key, seed=0, **cells):
    return {"key": key, "seed": str(seed), "method": "fed_dpsd", "student": "0.9", **cells}


def test_only_copies_of_a_run_are_merged():
    """Runs on the data of other folders have the same configuration, and other results."""
    runs = dict.fromkeys("ab", from_overrides(["seed=0"], None))
    assert [own["key"] for own in distinguish_rows([row("a"), row("b")], runs)] == ["a"]
    other = distinguish_rows([row("a"), row("b", student="0.5")], runs)
    assert [own["key"] for own in other] == ["a", "b"]


def test_a_setting_stays_whole_if_a_folder_of_its_runs_is_deleted():
    two, three = (from_overrides([f"rounds={n}"], None) for n in (2, 3))
    rows = [row("a"), row("b", 1), row("c", rounds="3")]
    known = distinguish_rows(rows, {"a": two, "b": two, "c": three})
    assert [own.get("rounds") for own in known] == ["2", "2", "3"]
    assert distinguish_rows(rows, {"a": None, "b": two, "c": three}) == rows


def differ(*runs):
    """The keys in which runs differ, of runs with a seed, a partition.seed and more overrides."""
    typed = [
        [f"seed={seed}", *([] if own is None else [f"partition.seed={own}"]), *more]
        for seed, own, *more in runs
    ]
    return differing_keys(key_texts([from_overrides(each, None) for each in typed]))


def test_a_seed_that_follows_the_runs_seed_is_no_setting():
    assert differ((0, None), (1, None)) == []
    assert differ((0, 0), (1, 0)) == []
    assert differ((0, None, "partition=coins"), (1, None, "partition=coins")) == []
    assert differ((0, None), (1, None), (0, 7), (1, 7)) == ["partition.seed"]
    assert differ((0, 5), (1, 6)) == ["partition.seed"]
    assert differ((0, None, "teacher.seed=3"), (1, None, "teacher.seed=4")) == ["teacher.seed"]
    # A partition.seed of 0 is fixed among the runs of 2 rounds, but not among the others.
    two, three = "rounds=2", "rounds=3"
    both = differ((0, 0, two), (1, 0, two), (0, None, three), (1, None, three))
    assert both == ["partition.seed", "rounds"]
    own = key_texts([from_overrides([f"seed={n}", three], None) for n in (0, 1)])
    assert {each["partition.seed"] for each in own} == {""}
