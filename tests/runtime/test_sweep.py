"""Sweeps: what a grid is, and that no death, neighbour or failure changes its table."""

import csv
import json
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fed_dpsd import config as configs
from fed_dpsd.config import ConfigError, UserError, compose, conf_folder, from_run_config
from fed_dpsd.runtime import run as runs
from fed_dpsd.runtime import sweep as sweeps
from fed_dpsd.runtime.checkpoint import write_atomically
from fed_dpsd.runtime.experiment import set_up
from fed_dpsd.runtime.federation import LocalFederation
from tests.conftest import SMALL

TINY = (*SMALL, "rounds=1", "queries_per_round=32", "teacher.min_steps=1", "method.student_steps=1")
TINY += ("method.final_student_steps=1",)
SEEDS_AND_PRIVACY = (*TINY, "seed=0,1", "privacy=label,non_private")


def really(experiment, folder, progress=lambda line: None):
    runs.run(experiment, LocalFederation(experiment, folder), folder, progress)


def at_once(experiment, folder):
    """Leave what a completed run would, without running."""
    runs.write_failure(experiment, folder, "local", UserError("none"))
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) | {"status": "completed", "student_sha256": "0" * 64}
    write_atomically(path, json.dumps(summary).encode())


def plan(tmp_path, *overrides, say=lambda line: None):
    return sweeps.plan(overrides, tmp_path / "sweep", tmp_path, say)


def go(cells, table, work=at_once):
    said = []
    return sweeps.run(cells, work, table, said.append), said


def rows(table):
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def experiments(tmp_path, monkeypatch):
    """Adds experiment files to a copy of conf/."""
    conf = shutil.copytree(conf_folder(), tmp_path / "conf")
    monkeypatch.setattr(configs, "conf_folder", lambda: conf)

    def write(name, text):
        (conf / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")

    return write


# --- grids ---


def test_a_grid_is_hydras_product_the_last_key_fastest():
    grid = sweeps.expand(
        [
            "rounds=3",
            "seed=range(2)",
            "privacy=choice(label,gradient)",
            "model.teachers=[cnn],[mlp]",
        ]
    )
    assert [tuple(cell.values()) for cell in grid[:3]] == [
        ("3", "0", "label", "[cnn]"),
        ("3", "0", "label", "[mlp]"),
        ("3", "0", "gradient", "[cnn]"),
    ]
    assert len(grid) == 8
    assert all(list(cell) == ["rounds", "seed", "privacy", "model.teachers"] for cell in grid)


def test_an_experiment_declares_a_grid_and_the_command_line_wins(experiments, tmp_path):
    experiments("curve", 'sweep: {seed: "0,1,2", privacy.epsilon_per_answer: "1,10"}')
    grid = sweeps.expand(["experiment=curve"])
    assert [cell["seed"] for cell in grid] == ["0", "0", "1", "1", "2", "2"]
    assert all(cell["experiment"] == "curve" for cell in grid)
    grid = sweeps.expand(["experiment=curve", "seed=7", "rounds=2"])
    assert [(c["seed"], c["privacy.epsilon_per_answer"], c["rounds"]) for c in grid] == [
        ("7", "1", "2"),
        ("7", "10", "2"),
    ]
    noises = [
        cell.experiment.mechanism.epsilon_per_answer
        for cell in plan(tmp_path, "privacy=label", "experiment=curve", "seed=7")
    ]
    assert noises == [1, 10]


def test_a_grid_may_name_experiments_whose_own_grids_do_not_count(experiments, tmp_path):
    experiments("curve", 'sweep: {seed: "0,1", experiment: "votes,labels"}')
    experiments("votes", 'defaults: [{override /privacy: votes}]\nsweep: {seed: "5,6,7"}')
    experiments(
        "labels", 'defaults: [{override /privacy: label}]\nrounds: 3\nsweep: {nonsense: "1,2"}'
    )
    cells = plan(tmp_path, "experiment=curve")
    found = [
        (c.experiment.config.seed, c.experiment.mechanism.name, c.experiment.config.rounds)
        for c in cells
    ]
    assert found == [(0, "votes", 20), (1, "votes", 20), (0, "label", 3), (1, "label", 3)]
    assert cells[0].name == "experiment=votes seed=0"


def test_grids_apart_share_the_other_keys(experiments):
    experiments(
        "table",
        'sweep: {one: {method: "fed_dpsd,dpsd"}, two: {privacy: label, rounds: "1"}, seed: "0,1"}',
    )
    assert [
        tuple(cell.items())[1:] for cell in sweeps.expand(["experiment=table", "rounds=9"])
    ] == [
        (("method", "fed_dpsd"), ("seed", "0"), ("rounds", "9")),
        (("method", "fed_dpsd"), ("seed", "1"), ("rounds", "9")),
        (("method", "dpsd"), ("seed", "0"), ("rounds", "9")),
        (("method", "dpsd"), ("seed", "1"), ("rounds", "9")),
        (("privacy", "label"), ("rounds", "9"), ("seed", "0")),
        (("privacy", "label"), ("rounds", "9"), ("seed", "1")),
    ]


def test_a_group_chooses_among_grids_apart(experiments):
    """A grid whose keys hang on one mechanism is no grid of another."""
    experiments(
        "table",
        "sweep: {trained: {privacy: dp_teacher, privacy.copies: '5'}, "
        "answered: {privacy: 'votes,label'}, seed: '0,1', data: digits}",
    )

    def found(*overrides):
        cells = sweeps.expand(["experiment=table", "seed=7", *overrides])
        return [(cell["privacy"], cell.get("privacy.copies")) for cell in cells]

    assert found() == [("dp_teacher", "5"), ("votes", None), ("label", None)]
    assert found("privacy=label") == [("label", None)]
    assert found("privacy=label,dp_teacher") == [("dp_teacher", "5"), ("label", None)]
    with pytest.raises(ConfigError, match="privacy=gradient: no grid of experiment=table has that"):
        found("privacy=gradient")
    assert all(
        cell["data"] == "mnist" for cell in sweeps.expand(["experiment=table", "data=mnist"])
    )


def test_each_of_several_experiments_brings_its_own_grid(experiments):
    experiments("a", 'sweep: {seed: "0,1"}')
    experiments("b", 'sweep: {rounds: "2,3"}')
    assert sweeps.expand(["experiment=a,b"]) == [
        {"experiment": "a", "seed": "0"},
        {"experiment": "a", "seed": "1"},
        {"experiment": "b", "rounds": "2"},
        {"experiment": "b", "rounds": "3"},
    ]


def test_one_run_has_no_grid(experiments, tmp_path):
    experiments("curve", 'seed: 3\nsweep: {seed: "0,1,2"}')
    for raw in (
        compose(["experiment=curve"]),
        from_run_config({"overrides": "experiment=curve"}),
    ):
        assert "sweep" not in raw
        experiment = set_up(raw, tmp_path)
        assert experiment.config.seed == 3
        assert "sweep" not in json.loads(experiment.to_json())


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ("{privcy.k: '2,3'}", "override 'privcy.k' is not a configuration key; did you mean"),
        ("{seed: [0, 1]}", "experiment=bad: sweep.seed=[0, 1] must be a string, as in '0,1,2'"),
        ("null", "experiment=bad: sweep=None must map keys to choices"),
        ("{seed: 'interval(0,1)'}", "Can only enumerate CHOICE and RANGE sweeps"),
    ],
)
def test_a_bad_grid_is_named(experiments, tmp_path, sweep, expected):
    experiments("bad", f"sweep: {sweep}")
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, "experiment=bad")
    assert expected in str(caught.value)


@pytest.mark.parametrize("key", ["out", "run_folder"])
def test_the_sweep_names_the_run_folders(key):
    with pytest.raises(ConfigError, match=f"{key}=here: a sweep names its run folders; use --out"):
        sweeps.expand([f"{key}=here", "seed=0,1"])


def test_every_problem_of_every_cell_comes_at_once_and_nothing_is_written(tmp_path):
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, "privacy=label", "num_clients=0,2", "privacy.k=1,2", "rounds=0,1")
    named = [problem.split(" must")[0] for problem in caught.value.problems]
    assert sorted(named) == ["num_clients=0", "privacy.k=1", "rounds=0"]
    assert caught.value.problems[0].endswith(" (in num_clients=0 privacy.k=1 rounds=0)")
    assert not (tmp_path / "sweep").exists()


def test_equal_cells_run_once_and_are_named(tmp_path):
    said = []
    cells = plan(tmp_path, "privacy=label", "privacy.epsilon_per_answer=1,1.0,2", say=said.append)
    assert [cell.experiment.mechanism.epsilon_per_answer for cell in cells] == [1, 2]
    assert said[2] == (
        "privacy.epsilon_per_answer=1.0 is the same configuration as "
        "privacy.epsilon_per_answer=1: one run for both"
    )


# --- keys ---


def leaves(tree, path=()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def test_a_key_hangs_on_every_setting_and_on_no_place(tmp_path):
    experiment = set_up(compose(["privacy=gradient"]), tmp_path)

    def key(config):
        return sweeps.cell_key(SimpleNamespace(to_json=lambda: json.dumps(config)))

    original = sweeps.cell_key(experiment)
    assert len(original) == 16
    unchanged = []
    for path in leaves(json.loads(experiment.to_json())):
        config = json.loads(experiment.to_json())
        branch = config
        for name in path[:-1]:
            branch = branch[name]
        branch[path[-1]] = "another"
        if key(config) == original:
            unchanged.append(".".join(path))
    assert sorted(unchanged) == sorted(
        ["out", "cache", "run_folder", "ledger", "data.path", "teacher.path"]
    )


def test_the_key_is_the_same_in_another_place_and_the_noise_counts(tmp_path):
    def key(*overrides):
        return sweeps.cell_key(set_up(compose(["privacy=gradient", *overrides]), tmp_path))

    assert key() == key(f"out={tmp_path}/there", "cache=c", "ledger=l", f"data.path={tmp_path}")
    assert key("privacy.target_epsilon=1") != key("privacy.target_epsilon=2")


# --- running ---


def test_a_sweep_leaves_run_folders_and_a_table_in_the_order_of_its_cells(tmp_path):
    cells = plan(tmp_path, *SEEDS_AND_PRIVACY)
    table = tmp_path / "table.csv"
    failed, _ = go(cells, table, really)
    assert not failed
    found = rows(table)
    assert [(row["seed"], row["mechanism"]) for row in found] == [
        ("0", "label"),
        ("0", "non_private"),
        ("1", "label"),
        ("1", "non_private"),
    ]
    for cell, row in zip(cells, found, strict=True):
        assert row["key"] == cell.key
        summary = json.loads((tmp_path / "sweep" / cell.key / "summary.json").read_text())
        assert float(row["student"]) == summary["accuracy"]["student"]
        assert float(row["client_best"]) == max(summary["accuracy"]["clients"])
        assert float(row["client_mean"]) == pytest.approx(sum(summary["accuracy"]["clients"]) / 2)
        assert row["student_sha256"] == summary["student_sha256"][:16]
        assert (row["num_classes"], row["queries_per_client"]) == ("10", "32")
        assert (row["rounds"], row["trust"]) == ("1", "nobody")
    assert [row["client_replace_one"] for row in found[:2]] == ["320.0", "inf"]
    assert [row["delta"] for row in found[:2]] == ["0.0", "1e-05"]
    assert len({row["student_sha256"] for row in found}) == 4
    assert "runs" not in found[0]["machine"]
    assert not list((tmp_path / "sweep").rglob("*.tmp"))


def test_a_second_sweep_runs_nothing_and_gives_the_same_bytes(tmp_path):
    table = tmp_path / "table.csv"
    go(plan(tmp_path, *SEEDS_AND_PRIVACY), table)
    before = table.read_bytes()

    def never(experiment, folder):
        raise AssertionError("a finished cell ran again")

    failed, said = go(plan(tmp_path, *SEEDS_AND_PRIVACY), table, never)
    assert not failed
    assert said[0] == "finished already: seed=0 privacy=label"
    assert table.read_bytes() == before
    failed, _ = go(plan(tmp_path, *TINY, "seed=0,9"), tmp_path / "other.csv", never)
    assert list(failed) == ["seed=9"]  # seed 0 is a cell of both sweeps


class Killed(BaseException):
    """What no handler of a failing cell may catch."""


def test_a_sweep_that_died_twice_gives_the_table_of_one_that_did_not(tmp_path):
    """Once after a checkpoint, once while a run folder was made."""
    overrides = (*TINY, "rounds=2", "seed=0,1", "privacy=label,gradient")
    whole, table = tmp_path / "whole.csv", tmp_path / "table.csv"
    go(sweeps.plan(overrides, tmp_path / "whole", tmp_path, print), whole, really)

    began = []

    def dies(experiment, folder):
        began.append(folder)

        def progress(line):
            if len(began) == 2:
                raise Killed

        really(experiment, folder, progress)

    cells = plan(tmp_path, *overrides)
    with pytest.raises(Killed):
        go(cells, table, dies)
    assert len(rows(table)) == 1
    assert not cells[1].finished
    (cells[2].folder / "checkpoint").mkdir(parents=True)
    (cells[2].folder / "versions.json").write_text("{}")

    lines = []

    def goes_on(experiment, folder):
        really(experiment, folder, lambda line: lines.append((folder, line["round"])))

    assert not go(plan(tmp_path, *overrides), table, goes_on)[0]
    assert [number for folder, number in lines if folder == cells[1].folder] == [2]
    assert [number for folder, number in lines if folder == cells[2].folder] == [1, 2]
    unlike = {"seconds"}
    for one, other in zip(rows(whole), rows(table), strict=True):
        assert {k: v for k, v in one.items() if k not in unlike} == {
            k: v for k, v in other.items() if k not in unlike
        }


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
    assert said[0] == "left to another process, for now: seed=0"
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
    assert sum("finished already" in line for line in said) == 2


# --- the table ---


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
    go(plan(tmp_path, *TINY, "seed=0", "privacy.k=2,3"), table)
    grown = rows(table)
    assert list(grown[0])[-2:] == ["remark", "privacy.k"]
    assert [row["privacy.k"] for row in grown[-2:]] == ["2", "3"]
    assert len(grown) == 7


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
    table = tmp_path / "notes.csv"
    table.write_text("name,age\nx,3\n")
    with pytest.raises(UserError, match=r"notes.csv is no table of a sweep .*'key'.*use --csv"):
        go(plan(tmp_path, *TINY), table)
    assert table.read_text() == "name,age\nx,3\n"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "sweep").write_text("")
    with pytest.raises(UserError, match="sweep cannot be written .*choose another folder"):
        go(plan(tmp_path, *TINY), tmp_path / "table.csv")


# --- versions.json ---


def test_a_run_says_what_code_on_which_machine(small, tmp_path, monkeypatch):
    def versions(name):
        runs._commit.cache_clear()
        folder = runs.new_run_folder(small(f"run_folder={tmp_path}/{name}"))
        return json.loads((folder / "versions.json").read_text())

    package = tmp_path / "checkout" / "package"
    package.mkdir(parents=True)
    (package / "run.py").write_text("")
    monkeypatch.setattr(runs, "__file__", str(package / "run.py"))

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=package, check=True, capture_output=True)

    assert versions("none")["commit"] is None
    git("init", "..")
    (package.parent / "other.py").write_text("")
    git("add", "../other.py")
    git("commit", "-m", "without the package")
    assert versions("installed inside a checkout")["commit"] is None
    git("add", "run.py")
    git("commit", "-m", "with it")
    commit = versions("clean")["commit"]
    assert len(commit) == 12
    (package / "run.py").write_text("pass")
    assert versions("dirty")["commit"] == f"{commit}+dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions("no git")["commit"] is None
    assert "cores, " in versions("machine")["machine"]
    runs._commit.cache_clear()


def test_no_run_folder_counts_before_it_is_complete(small, monkeypatch):
    """config.yaml is what makes it one, so it comes last."""
    written = []
    original = runs.write_atomically

    def record(path, content):
        written.append(Path(path).name)
        original(path, content)

    monkeypatch.setattr(runs, "write_atomically", record)
    runs.new_run_folder(small())
    assert written == ["versions.json", "config.yaml"]
