"""Sweeps: no crash, concurrent sweep or failure changes the table."""

import csv
import json
import math
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import yaml

from fed_dpsd.config import leaves
from fed_dpsd.config.compose import compose
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.experiment import from_overrides, set_up
from fed_dpsd.progress import listening
from fed_dpsd.server import run as runs
from fed_dpsd.server.summary import write_failure
from fed_dpsd.storage import write_atomically
from fed_dpsd.sweep import sweep as sweeps
from tests.conftest import SMALL
from tests.listeners import Hearing

TINY = (*SMALL, "rounds=1", "queries_per_round=32", "teacher.min_steps=1", "method.student_steps=1")
TINY += ("method.final_student_steps=1",)
SEEDS_AND_PRIVACY = (*TINY, "seed=0,1", "answers=label,probabilities")


def really(experiment, folder, progress=lambda line: None):
    runs.run(experiment, LocalFederation(experiment, folder), folder, progress)


def at_once(experiment, folder):
    """Leave what a completed run would, without running."""
    write_failure(experiment, folder, "local", UserError("none"))
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) | {"status": "completed", "student_sha256": "0" * 64}
    summary["confusion"] = [[0, 3], [1, 2]]
    write_atomically(path, json.dumps(summary).encode())
    line = {"round": 1, "seconds": 0.5, "forward_answers": 64, "student_accuracy": None}
    (folder / "rounds.jsonl").write_text(json.dumps(line) + "\n")


def plan(tmp_path, *overrides, say=lambda line: None):
    return sweeps.plan(overrides, tmp_path / "sweep", tmp_path, say)


def go(cells, table, work=at_once):
    said = []
    return sweeps.run(cells, work, table, said.append), said


def rows(table, suffix=""):
    """Read a table, or the "_rounds" next to it."""
    with table.with_stem(table.stem + suffix).open(newline="") as file:
        return list(csv.DictReader(file))


# --- planning ---


def test_every_problem_of_every_cell_comes_at_once_and_nothing_is_written(tmp_path):
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, "answers=label", "num_clients=0,2", "answers.k=1,2", "rounds=0,1")
    named = [problem.split(" must")[0] for problem in caught.value.problems]
    assert sorted(named) == ["answers.k=1", "num_clients=0", "rounds=0"]
    assert caught.value.problems[0].endswith(" (in num_clients=0 answers.k=1 rounds=0)")
    assert not (tmp_path / "sweep").exists()


def test_equal_cells_run_once_and_are_named(tmp_path):
    said = []
    overrides = "training=plain", "answers.epsilon_per_answer=1,1.0,2"
    cells = plan(tmp_path, *overrides, say=said.append)
    assert [cell.experiment.answers.epsilon_per_answer for cell in cells] == [1, 2]
    assert said == [
        "answers.epsilon_per_answer=1.0 has the same configuration as "
        "answers.epsilon_per_answer=1: one run for both"
    ]


def test_a_cell_that_is_typed_twice_runs_once(tmp_path):
    for overrides, name in (
        (["seed=0,0"], "the only cell"),
        (["seed=0,0", "rounds=1,2"], "rounds=1"),
    ):
        said = []
        plan(tmp_path, "training=plain", *overrides, say=said.append)
        assert said[0] == f"{name} is given twice: one run for both"


def test_every_key_and_value_is_checked_before_any_noise_is_calibrated(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sweeps, "calibrated", lambda each: calls.append(each) or each)
    grid = ("training=plain", "privacy.target_epsilon=1,2", "seed=0,1")
    for wrong, problem in (
        ("sweep.only=DENSE", "sweep.only is not a configuration key"),
        ("rounds=5,0", "rounds=0 must be >= 1 (in "),
    ):
        with pytest.raises(ConfigError) as caught:
            plan(tmp_path, *grid, wrong)
        assert caught.value.problems[0].startswith(problem)
        assert len(caught.value.problems) == 1
    assert not calls
    plan(tmp_path, *grid)
    assert len(calls) == 4


# --- keys ---


def test_a_comparison_that_trains_one_method_less_is_a_warning(tmp_path):
    """Not if a method is alone, its largest value is the default, or all methods train less."""

    def described(*overrides):
        plain = "training=plain", "answers=probabilities"
        return from_overrides([*plain, *overrides], tmp_path)

    key, lower = "method.final_student_steps", "method.generator_steps=1"
    less, own = described("method=fed_dpsd", f"{key}=5"), described("method=fed_dpsd")
    dense, less_dense = described("method=dense"), described("method=dense", lower)
    (line,) = sweeps._unequal_training([dense, less])
    assert line.startswith(f"fed_dpsd has {key}=5, below its default of 2000; check that")
    for fair in ([dense, less, own], [less], [less, less_dense], [dense, own]):
        assert not [*sweeps._unequal_training(fair)], fair
    grid = {"A": {"method": "dense"}, "B": {"method": "fed_dpsd", key: "5"}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump({"sweep": grid}))
    said = []
    plan(tmp_path, "grid.yaml", "training=plain", "answers=probabilities", say=said.append)
    assert f"warning: {line}" in said


def test_a_key_depends_on_every_setting_but_places_and_deadlines(tmp_path):
    experiment = set_up(compose(["training=plain", "answers=gradient"]), tmp_path)

    def key(config):
        return sweeps.cell_key(SimpleNamespace(to_json=lambda: json.dumps(config)))

    original = sweeps.cell_key(experiment)
    assert len(original) == 16
    unchanged = []
    for name, _ in leaves(json.loads(experiment.to_json())):
        config = branch = json.loads(experiment.to_json())
        *groups, last = name.split(".")
        for group in groups:
            branch = branch[group]
        branch[last] = "another"
        if key(config) == original:
            unchanged.append(name)
    places = {"out", "cache", "run_folder", "ledger", "tracker"}
    places |= {"data.path", "data.classes", "teacher.path"}
    deadlines = {f"federation.{time}_seconds" for time in ("node_timeout", "round_timeout")}
    deadlines |= {"federation.grace_seconds", "federation.retry_seconds"}
    assert set(unchanged) == places | deadlines

    def key_of(*overrides):
        settings = "data=mnist", "training=plain", "answers=gradient", *overrides
        return sweeps.cell_key(set_up(compose(settings), tmp_path))

    there = (f"out={tmp_path}/there", "cache=c", "ledger=l", f"data.path={tmp_path}")
    assert key_of() == key_of(*there)
    assert key_of("privacy.target_epsilon=1") != key_of("privacy.target_epsilon=2")


def test_folders_say_what_is_in_them_and_are_found_again(tmp_path):
    (tmp_path / "my_grid.yaml").write_text(
        "sweep: {'Ours, small': {rounds: [1, 2]}, partition.alpha: 0.1, seed: 7}"
    )
    grid = ("num_clients=2", "my_grid.yaml")
    first, second = plan(tmp_path, *grid)
    for cell in (first, second):
        key = sweeps.cell_key(cell.experiment)
        assert cell.key == f"Ours_small-digits-alpha0.1-seed7-{key[:4]}"
        assert cell.folder == tmp_path / "sweep" / cell.key
    (iid,) = plan(tmp_path, "partition=iid", "method=dpsd", "num_clients=1")
    assert iid.key.startswith("dpsd-digits-iid-seed0-")
    # A renamed entry finds its run; another run with the same name is left alone.
    go([first], tmp_path / "table.csv")
    text = (tmp_path / "my_grid.yaml").read_text().replace("Ours, small", "Theirs")
    (tmp_path / "my_grid.yaml").write_text(text)
    again, _ = plan(tmp_path, *grid)
    assert (again.key, again.finished) == (first.key, True)
    taken = tmp_path / "sweep" / f"Theirs-digits-alpha0.1-seed7-{second.key[-4:]}"
    taken.mkdir()
    shutil.copy(first.folder / "config.yaml", taken)
    _, other = plan(tmp_path, *grid)
    assert other.key == f"Theirs-digits-alpha0.1-seed7-{sweeps.cell_key(second.experiment)}"


# --- running ---


@pytest.mark.slow
def test_a_sweep_leaves_run_folders_and_a_table_in_the_order_of_its_cells(tmp_path):
    cells = plan(tmp_path, *SEEDS_AND_PRIVACY)
    table = tmp_path / "table.csv"
    failed, _ = go(cells, table, really)
    assert not failed
    found = rows(table)
    assert [(row["seed"], row["mechanism"]) for row in found] == [
        ("0", "label"),
        ("0", "probabilities"),
        ("1", "label"),
        ("1", "probabilities"),
    ]
    for cell, row in zip(cells, found, strict=True):
        assert row["key"] == cell.key
        summary = json.loads((tmp_path / "sweep" / cell.key / "summary.json").read_text())
        assert float(row["student"]) == summary["accuracy"]["student"]
        scores, of_teachers = summary["accuracy"], ("ensemble", "client_best", "client_mean")
        if row["mechanism"] == "label":  # whose noise covers no score of teachers
            assert [row[name] for name in of_teachers] == ["", "", ""]
        else:
            best, mean = max(scores["clients"]), sum(scores["clients"]) / 2
            expected = pytest.approx([scores["ensemble"], best, mean])
            assert [float(row[name]) for name in of_teachers] == expected
        assert row["student_sha256"] == summary["student_sha256"][:16]
        assert (row["num_classes"], row["queries_per_client"]) == ("10", "32")
        assert (row["rounds"], row["trust"]) == ("1", "nobody")
        assert (row["forward_answers"], row["backward_answers"]) == ("64", "0")
        for name in ("bytes_to_clients", "bytes_to_server"):
            assert row[name] == str(summary["queries"][name]) != "0"
        assert row["seconds_rounds"] == str(round(summary["seconds"]["rounds"], 1))
    assert [float(row["client_replace_one"]) for row in found[:2]] == [
        pytest.approx(320.0),
        math.inf,
    ]
    assert [row["delta"] for row in found[:2]] == ["0.0", "1e-05"]
    assert len({row["student_sha256"] for row in found}) == 4
    assert "runs" not in found[0]["machine"]
    assert not list((tmp_path / "sweep").rglob("*.tmp"))
    # A row's only delta holds for all its epsilons, even if (record, add_remove) needs none.
    path = cells[0].folder / "summary.json"
    summary = json.loads(path.read_text())
    for claim in summary["privacy"]["proven"]:
        claim["delta"] = 1e-5 if claim["unit"] == "client" else 0.0
    path.write_text(json.dumps(summary))
    go(plan(tmp_path, *SEEDS_AND_PRIVACY), tmp_path / "again.csv", really)
    assert rows(tmp_path / "again.csv")[0]["delta"] == "1e-05"


def test_a_second_sweep_runs_nothing_and_gives_the_same_bytes(tmp_path):
    table = tmp_path / "table.csv"
    go(plan(tmp_path, *SEEDS_AND_PRIVACY), table)
    before = table.read_bytes()

    def never(experiment, folder):
        raise AssertionError("a finished cell ran again")

    failed, said = go(plan(tmp_path, *SEEDS_AND_PRIVACY), table, never)
    assert not failed
    assert said[0] == "already finished: seed=0 answers=label"
    assert table.read_bytes() == before
    failed, _ = go(plan(tmp_path, *TINY, "seed=0,9"), tmp_path / "other.csv", never)
    assert list(failed) == ["seed=9"]  # seed 0 is a cell of both sweeps


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_two_sweeps_share_the_cells_and_run_none_twice(tmp_path, dies):
    """The first is busy with seed 0, or dies of it, while the second does all the others."""
    cells = {name: plan(tmp_path, *TINY, "seed=0,1,2") for name in ("first", "second")}
    began, others_done, ran, answers = threading.Event(), threading.Event(), [], {}

    def work(experiment, folder):
        seed = experiment.config.seed
        ran.append((threading.current_thread().name, seed))
        began.set()
        if ran[-1] == ("first", 0):
            assert others_done.wait(60)
            time.sleep(0.3)  # the second now waits for this cell
            if dies:
                raise RuntimeError("out of memory")
        at_once(experiment, folder)
        if seed == 2:
            others_done.set()

    def sweep():
        name = threading.current_thread().name
        answers[name] = go(cells[name], tmp_path / f"{name}.csv", work)

    threads = [threading.Thread(target=sweep, name=name) for name in cells]
    threads[0].start()
    assert began.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    again = [("second", 0)] if dies else []
    assert ran == [("first", 0), ("second", 1), ("second", 2), *again]
    failed, said = answers["second"]
    assert not failed
    assert said[0] == "running in another process, checked again later: seed=0"
    assert [row["seed"] for row in rows(tmp_path / "second.csv")] == ["0", "1", "2"]
    assert list(answers["first"][0]) == (["seed=0"] if dies else [])


def test_a_failing_cell_leaves_the_others_alone_and_is_tried_again(tmp_path):
    table = tmp_path / "table.csv"

    def fails_at_one(experiment, folder):
        if experiment.config.seed == 1:
            raise RuntimeError("the disk\nis full")
        at_once(experiment, folder)

    failed, _ = go(plan(tmp_path, *TINY, "seed=0,1,2"), table, fails_at_one)
    assert failed == {"seed=1": "RuntimeError: the disk is full"}
    assert [row["seed"] for row in rows(table)] == ["0", "2"]
    failed, said = go(plan(tmp_path, *TINY, "seed=0,1,2"), table)
    assert not failed
    assert [row["seed"] for row in rows(table)] == ["0", "1", "2"]
    assert sum("already finished" in line for line in said) == 2


# --- the table ---


@pytest.mark.slow
def test_cells_are_reported_except_those_that_were_finished(tmp_path):
    table = tmp_path / "results.csv"
    go(plan(tmp_path, *TINY, "seed=0,1"), table)

    def work(experiment, folder):
        if experiment.config.seed == 3:
            raise ValueError("no such seed")
        at_once(experiment, folder)

    hearing = Hearing()
    with listening(hearing):
        failed, _ = go(plan(tmp_path, *TINY, "seed=0,1,2,3,4"), table, work)
    assert list(failed) == ["seed=3"]
    assert hearing.heard == [("cells", 1, 3), ("cells", 2, 3), ("cells", 3, 3)]


@pytest.mark.slow
def test_a_table_grows_from_several_sweeps(tmp_path):
    """Others' rows and columns stay where they are; new columns come last."""
    table = tmp_path / "table.csv"
    go(plan(tmp_path, *TINY, "seed=0,1"), table)
    foreign = [{**rows(table)[0], "key": f"foreign {n}", "remark": "by hand, kept"} for n in (0, 1)]
    found = [foreign[0], *rows(table), foreign[1]]
    found[1]["student"] = "stale"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(foreign[0]), restval="")
        writer.writeheader()
        writer.writerows(found)
    go(plan(tmp_path, *TINY, "seed=0,1,2"), table)
    grown = rows(table)
    assert [(row["key"][:7], row["seed"]) for row in grown[:1] + grown[-1:]] == [
        ("foreign", "0"),
        ("foreign", "0"),
    ]
    assert [row["seed"] for row in grown[1:-1]] == ["0", "1", "2"]
    assert [row["remark"] for row in grown] == ["by hand, kept", "", "", "", "by hand, kept"]
    assert "stale" not in {row["student"] for row in grown}
    go(plan(tmp_path, *TINY, "seed=0", "answers.k=2,3"), table)
    grown = rows(table)
    assert list(grown[0])[-2:] == ["remark", "answers.k"]
    assert [row["answers.k"] for row in grown[-2:]] == ["2", "3"]
    assert len(grown) == 7


@pytest.mark.slow
def test_a_row_stays_until_its_cell_is_finished_here_too(tmp_path):
    table = tmp_path / "table.csv"
    go(plan(tmp_path, *TINY, "seed=0,1"), table)
    before = table.read_bytes()
    elsewhere = sweeps.plan((*TINY, "seed=0,1"), tmp_path / "elsewhere", tmp_path, print)

    def fails(experiment, folder):
        raise UserError("no")

    assert len(go(elsewhere, table, fails)[0]) == 2
    assert table.read_bytes() == before


def test_a_file_that_is_no_table_is_left_alone(tmp_path):
    for name in ("notes.csv", "notes_rounds.csv"):
        (tmp_path / name).write_text("name,age\nx,3\n")
        with pytest.raises(UserError, match=rf"{name} is not a sweep's table .*'key'.*use --csv"):
            go(plan(tmp_path, *TINY), tmp_path / "notes.csv")
        assert (tmp_path / name).read_text() == "name,age\nx,3\n"
        (tmp_path / name).unlink()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "sweep").write_text("")
    with pytest.raises(UserError, match="sweep cannot be written .*choose another folder"):
        go(plan(tmp_path, *TINY), tmp_path / "table.csv")


def test_next_to_the_table_is_every_round(tmp_path):
    cells = plan(tmp_path, *TINY, "rounds=2", "seed=0,1")
    table = tmp_path / "table.csv"
    assert not go(cells, table, really)[0]
    rounds = rows(table, "_rounds")
    keys = [cell.key for cell in cells]
    assert [(row["key"], row["round"]) for row in rounds] == [(k, r) for k in keys for r in "12"]
    for cell in cells:
        log = (cell.folder / "rounds.jsonl").read_text().splitlines()
        mine = [line for line in rounds if line["key"] == cell.key]
        for line, found in zip(map(json.loads, log), mine, strict=True):
            assert {name: found[name] for name in sweeps.ROUNDS[1:]} == {
                name: str(line[name]) for name in sweeps.ROUNDS[1:]
            }


@pytest.mark.slow
def test_a_cells_rounds_are_replaced_and_others_stay_where_they_are(tmp_path):
    table = tmp_path / "table.csv"
    cells = plan(tmp_path, *TINY, "seed=0,1")
    other = plan(tmp_path, *TINY, "seed=9")
    go(other, table)
    go(cells, table)
    log = cells[0].folder / "rounds.jsonl"
    log.write_text(log.read_text() + json.dumps({"round": 2, "student_accuracy": 0.25}) + "\n")
    go(cells, table)
    found = [(row["key"], row["round"], row["student_accuracy"]) for row in rows(table, "_rounds")]
    assert found == [
        (other[0].key, "1", ""),
        (cells[0].key, "1", ""),
        (cells[0].key, "2", "0.25"),
        (cells[1].key, "1", ""),
    ]
