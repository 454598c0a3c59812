"""Grids: typed overrides and an experiment's declarations, and which of them wins."""

import json
import re
import shutil

import pytest

from fed_dpsd.config import compose as typed
from fed_dpsd.config import plugins
from fed_dpsd.config.compose import compose
from fed_dpsd.config.grid import Point, expand, name_points
from fed_dpsd.errors import ConfigError
from fed_dpsd.experiment import one_run, set_up
from fed_dpsd.storage import conf_folder
from fed_dpsd.sweep import sweep as sweeps
from tests.sweep.test_sweep import plan


def cells(overrides):
    return [point.overrides for point in expand(overrides)]


@pytest.fixture
def experiments(tmp_path, monkeypatch):
    """Adds experiment files to a copy of conf/."""
    conf = shutil.copytree(conf_folder(), tmp_path / "conf")
    monkeypatch.setattr(plugins, "conf_folder", lambda: conf)

    def write(name, text):
        (conf / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")

    return write


def test_a_grid_is_hydras_product_the_last_key_fastest():
    grid = cells(
        [
            "rounds=3",
            "seed=range(2)",
            "answers=choice(label,gradient)",
            "model.teachers=[cnn],[mlp]",
        ]
    )
    assert [tuple(cell.values()) for cell in grid[:3]] == [
        ("3", "0", "label", "[cnn]"),
        ("3", "0", "label", "[mlp]"),
        ("3", "0", "gradient", "[cnn]"),
    ]
    assert len(grid) == 8
    assert all(list(cell) == ["rounds", "seed", "answers", "model.teachers"] for cell in grid)


def test_an_experiment_declares_a_grid_and_the_command_line_wins(experiments, tmp_path):
    experiments("curve", 'sweep: {seed: "0,1,2", answers.epsilon_per_answer: "1,10"}')
    grid = cells(["experiment=curve"])
    assert [cell["seed"] for cell in grid] == ["0", "0", "1", "1", "2", "2"]
    assert all(cell["experiment"] == "curve" for cell in grid)
    grid = cells(["experiment=curve", "seed=7", "rounds=2"])
    assert [(c["seed"], c["answers.epsilon_per_answer"], c["rounds"]) for c in grid] == [
        ("7", "1", "2"),
        ("7", "10", "2"),
    ]
    noises = [
        cell.experiment.answers.epsilon_per_answer
        for cell in plan(tmp_path, "training=plain", "answers=label", "experiment=curve", "seed=7")
    ]
    assert noises == [1, 10]


def test_a_grid_may_name_experiments_whose_own_grids_do_not_count(experiments, tmp_path):
    experiments("curve", 'sweep: {seed: "0,1", experiment: "votes,labels"}')
    experiments(
        "votes",
        "defaults: [{override /training: plain}, {override /answers: votes}]\n"
        'sweep: {seed: "5,6,7"}',
    )
    experiments(
        "labels",
        "defaults: [{override /training: plain}, {override /answers: label}]\nrounds: 3\n"
        'sweep: {nonsense: "1,2"}',
    )
    planned = plan(tmp_path, "experiment=curve")
    found = [
        (c.experiment.config.seed, c.experiment.answers.name, c.experiment.config.rounds)
        for c in planned
    ]
    assert found == [(0, "votes", 20), (1, "votes", 20), (0, "label", 3), (1, "label", 3)]
    assert planned[0].name == "experiment=votes seed=0"


def test_a_grids_own_keys_come_before_those_that_all_share(experiments):
    """So a method without DP has no epsilon in a comparison over epsilons."""
    experiments(
        "table", 'sweep: {one: {rounds: "1,2"}, two: {answers: label}, rounds: "3", seed: "0"}'
    )
    assert [tuple(cell.items())[1:] for cell in cells(["experiment=table"])] == [
        (("rounds", "1"), ("seed", "0")),
        (("rounds", "2"), ("seed", "0")),
        (("answers", "label"), ("rounds", "3"), ("seed", "0")),
    ]


def test_grids_apart_share_the_other_keys(experiments):
    experiments(
        "table",
        'sweep: {one: {method: "fed_dpsd,dpsd"}, two: {answers: label, rounds: "1"}, seed: "0,1"}',
    )
    assert [tuple(cell.items())[1:] for cell in cells(["experiment=table", "rounds=9"])] == [
        (("method", "fed_dpsd"), ("seed", "0"), ("rounds", "9")),
        (("method", "fed_dpsd"), ("seed", "1"), ("rounds", "9")),
        (("method", "dpsd"), ("seed", "0"), ("rounds", "9")),
        (("method", "dpsd"), ("seed", "1"), ("rounds", "9")),
        (("answers", "label"), ("rounds", "9"), ("seed", "0")),
        (("answers", "label"), ("rounds", "9"), ("seed", "1")),
    ]


def test_points_are_named_by_their_grid_and_what_varies_in_it():
    """Names omit what all points of a grid share, even if other grids differ in it."""
    points = [
        Point("bounds", {"method": "ensemble", "rounds": "1", "seed": "0"}),
        Point("bounds", {"method": "local", "rounds": "1", "seed": "0"}),
        Point("DENSE", {"method": "dense", "rounds": "20", "seed": "0"}),
    ]
    assert name_points(points) == ["bounds: method=ensemble", "bounds: method=local", "DENSE"]
    assert name_points([Point("", {"seed": s}) for s in "01"]) == ["seed=0", "seed=1"]
    assert name_points([Point("", {"seed": "0"})]) == ["the only cell"]


def test_a_group_chooses_among_grids_apart(experiments):
    """A grid whose keys depend on one mechanism is not a grid of another."""
    experiments(
        "table",
        "sweep: {trained: {training: dp_sgd, training.copies: '5'}, "
        "answered: {training: plain, answers: 'votes,label'}, seed: '0,1', data: digits}",
    )

    def found(*overrides):
        found = cells(["experiment=table", "seed=7", *overrides])
        keys = "training", "answers", "training.copies"
        return [tuple(cell.get(key) for key in keys) for cell in found]

    trained = "dp_sgd", None, "5"
    votes, label = ("plain", "votes", None), ("plain", "label", None)
    assert found() == [trained, votes, label]
    assert found("training=dp_sgd") == [trained]
    assert found("training=plain") == [votes, label]
    assert found("training=plain", "answers=label") == [label]
    assert found("training=plain,dp_sgd") == [trained, votes, label]
    with pytest.raises(ConfigError, match="training=fast: no grid of experiment=table contains it"):
        found("training=fast")
    assert all(cell["data"] == "mnist" for cell in cells(["experiment=table", "data=mnist"]))


def test_each_of_several_experiments_brings_its_own_grid(experiments):
    experiments("a", 'sweep: {seed: "0,1"}')
    experiments("b", 'sweep: {rounds: "2,3"}')
    assert cells(["experiment=a,b"]) == [
        {"experiment": "a", "seed": "0"},
        {"experiment": "a", "seed": "1"},
        {"experiment": "b", "rounds": "2"},
        {"experiment": "b", "rounds": "3"},
    ]


def test_an_experiment_is_composed_once(tmp_path):
    for cache in (typed._composed, typed._raw_files, typed._resolved_once):
        cache.cache_clear()
    assert one_run(["experiment=mnist", "rounds=2"], tmp_path).config.rounds == 2
    assert typed._composed.cache_info().misses == 1
    with pytest.raises(ConfigError, match="experiment=ci is a grid of"):
        one_run(["experiment=ci"], tmp_path)


def test_one_run_has_no_grid(experiments, tmp_path):
    experiments("curve", 'seed: 3\nsweep: {seed: "0,1,2"}')
    raw = compose(["experiment=curve"])
    assert "sweep" not in raw
    experiment = set_up(raw, tmp_path)
    assert experiment.config.seed == 3
    assert "sweep" not in json.loads(experiment.to_json())


def test_one_run_is_not_a_grid(experiments):
    experiments("curve", 'seed: 3\nsweep: {seed: "0,1,2"}')
    for overrides, command in (
        ("experiment=curve", "experiment=curve"),
        ("experiment=curve out=/x run_folder=/x/y", "experiment=curve --out /x"),
    ):
        with pytest.raises(ConfigError) as caught:
            one_run(overrides.split(), None)
        assert caught.value.problems == (
            f"experiment=curve is a grid of 3 runs: fed-dpsd sweep {command}",
        )
        one_run([*overrides.split(), "seed=4"], None)


def test_one_run_is_of_a_grid_that_has_the_chosen_value_of_a_group(experiments):
    text = 'sweep: {plain: {training: plain}, private: {training: dp_sgd, rounds: "2,3"}}'
    experiments("two", text)
    one_run(["experiment=two", "training=plain"], None)
    one_run(["experiment=two", "training=dp_sgd", "rounds=4"], None)
    with pytest.raises(ConfigError, match="experiment=two is a grid of 2 runs: fed-dpsd sweep"):
        one_run(["experiment=two", "training=dp_sgd"], None)


def test_a_bad_grid_is_named(experiments, tmp_path):
    for number, (sweep, expected) in enumerate(
        (
            ("{privcy.delta: '2,3'}", "privcy.delta is not a configuration key; did you mean"),
            ("null", "sweep=null must map keys to choices"),
            ("{seed: 'interval(0,1)'}", "values cannot be listed; write them out, as in seed=0"),
        )
    ):
        experiments(f"bad{number}", f"sweep: {sweep}")
        with pytest.raises(ConfigError) as caught:
            plan(tmp_path, f"experiment=bad{number}")
        assert expected in str(caught.value)


@pytest.mark.parametrize("key", ["out", "run_folder"])
def test_the_sweep_names_the_run_folders(key):
    with pytest.raises(ConfigError, match=f"{key}=here: a sweep names its run folders; use --out"):
        cells([f"{key}=here", "seed=0,1"])


# --- a user's file ---

MINE = """
num_clients: 3
sweep:
  DENSE: {method: dense, training: plain, model: cnn, model.teacher: cnn_bn}
  FedDPSD, labels: {method: fed_dpsd, rounds: [1, 2]}
  FedDPSD: {method: fed_dpsd, queries_per_round: 64}
  seed: 0,1
"""


def mine(tmp_path, *overrides, text=MINE):
    (tmp_path / "my_grid.yaml").write_text(text)
    return sweeps.plan(["my_grid.yaml", *overrides], tmp_path, tmp_path, lambda line: None)


def test_a_grid_may_be_a_file_beside_the_data(tmp_path):
    cells = mine(tmp_path)
    assert [cell.name for cell in cells[:3]] == [
        *("DENSE: seed=0", "DENSE: seed=1", "FedDPSD, labels: rounds=1 seed=0"),
    ]
    assert len(cells) == 8
    assert {cell.experiment.config.num_clients for cell in cells} == {3}
    assert {cell.overrides["experiment"] for cell in cells} == {"my_grid"}
    assert len(mine(tmp_path, "seed=4", "num_clients=2")) == 4


def test_a_choice_without_override_is_named(tmp_path):
    text = f"defaults: [{{data: digits}}, _self_]{MINE}"
    with pytest.raises(ConfigError, match=r"write `override /data: digits`"):
        mine(tmp_path, text=text)
    mine(tmp_path, text=text.replace("data: digits", "override /data: digits"))  # the control


def test_only_runs_entries_by_name_even_with_commas_in_it(experiments):
    """A name that begins with another entry's name is one name."""
    experiments("both", 'sweep: {DENSE: {}, FedDPSD: {}, "FedDPSD, labels": {rounds: 1}, seed: 0}')
    for only, expected in (
        (["DENSE,FedDPSD"], {"DENSE", "FedDPSD"}),
        (["FedDPSD, labels"], {"FedDPSD, labels"}),
        (["FedDPSD, labels,DENSE"], {"FedDPSD, labels", "DENSE"}),
        (["DENSE", "FedDPSD"], {"DENSE", "FedDPSD"}),
    ):
        assert {point.grid for point in expand(["experiment=both"], only)} == expected
    with pytest.raises(ConfigError, match=r"^--only DENS: choose among: DENSE; FedDPSD; FedDPSD, "):
        expand(["experiment=both"], ["DENS"])
    with pytest.raises(ConfigError, match="--only DENSE: this sweep has no named entries"):
        expand(["seed=0,1"], ["DENSE"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sweep: {A: {metod: dense}}", "my_grid.yaml: metod is not a .* did you mean method"),
        ("sweep: {A: {rounds: 0}, seed: 0}", "my_grid.yaml: rounds=0 must be >= 1"),
        ("numclients: 3\nsweep: {seed: 0}", "my_grid.yaml: .*did you mean num_clients"),
        ("defaults: [override /data: mnst]\nsweep: {seed: 0}", "^my_grid.yaml: .*mnst"),
        ("num_clients: 3", "my_grid.yaml has no grid; add the key sweep"),
        ("sweep: [DENSE]", "my_grid.yaml has no grid"),
        ("sweep: {A: {", "my_grid.yaml is not YAML: .*line 1"),
        ("sweep:\n  A: {seed: 0}\n  A: {seed: 1}", "my_grid.yaml: A is given twice.*line 2"),
        (
            "model: {teacher: cnn}\nsweep: {A: {model: patches}}",
            "model=patches: the experiment's own block sets model.teacher=cnn.*set model.teacher",
        ),
    ],
)
def test_a_wrong_file_is_rejected_with_file_key_and_remedy(tmp_path, text, problem):
    with pytest.raises(ConfigError, match=problem):
        mine(tmp_path, text=text)


def test_a_file_must_exist_be_alone_and_have_its_own_name(tmp_path):
    for overrides, problem in (
        (["lost.yaml"], "lost.yaml cannot be read .No such file.*check its path"),
        (["mnist.yaml"], "mnist.yaml: experiment=mnist comes with FedDPSD; rename the file"),
        (["mnist.yaml", "experiment=ci"], "experiment=ci: mnist.yaml already gives the grid"),
    ):
        (tmp_path / "mnist.yaml").write_text(MINE)
        with pytest.raises(ConfigError, match=problem):
            sweeps.plan(overrides, tmp_path, tmp_path, lambda line: None)


# --- methods that are set up to fail ---


@pytest.mark.slow
def test_the_comparison_gives_no_warning_and_a_plain_grid_names_the_method_and_the_key(tmp_path):
    said = [
        cell.experiment.warnings
        for cell in plan(tmp_path, "experiment=compare", "seed=0", "partition.alpha=0.5")
    ]
    assert len(said) == 8
    assert not any(said)
    fedavg, dense, ours = (
        " ".join(cell.experiment.warnings)
        for cell in plan(tmp_path, "method=fedavg,dense,fed_dpsd")
    )
    assert re.search("method=fedavg with rounds=20 .*use rounds=1", fedavg)
    assert re.search("method=dense with model.teacher=scattering.*use training=plain", dense)
    assert not ours
    (gradient,) = plan(tmp_path, "training=plain", "answers=gradient")
    (warning,) = gradient.experiment.warnings
    assert re.search("answers=gradient .*noise_multiplier=100.*use many more teachers", warning)
