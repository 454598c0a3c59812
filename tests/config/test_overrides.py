"""Overrides as people type them: each invalid one gives one sentence, valid ones none."""

import subprocess

import pytest

from fed_dpsd.config.compose import (
    compose,
    compose_skipping_invalid,
    resolve_choices,
    sweep_choices,
)
from fed_dpsd.errors import ConfigError

GRAMMAR = ("viable", "EOF", "expecting", "override", "Interpolation")


def said(*overrides):
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    for problem in caught.value.problems:
        assert not any(word in problem for word in GRAMMAR), problem
    return caught.value.problems


WRONG = [
    ("rounds", "rounds: write rounds=VALUE"),
    ("mnist", "mnist: write data=mnist or experiment=mnist"),
    ("mnist seed=1", "mnist: write data=mnist or experiment=mnist"),
    ("model.teachers=[cnn", "model.teachers=[cnn: a quote or bracket is not closed"),
    ("out='a", "out='a: a quote or bracket is not closed"),
    ("data.path=/a(b)", "data.path=/a(b): put the value in quotes: 'data.path=\"/a(b)\"'"),
    ("data.path=/a=b,c", "put the value in quotes: 'data.path=\"/a=b,c\"'"),
    ("data.path=a,b", "; for one value put the value in quotes: 'data.path=\"a,b\"'"),
    ("rounds==3", "rounds==3 cannot be read; write KEY=VALUE, as in rounds=10"),
    ("~seed", "~seed: a setting cannot be deleted; write KEY=VALUE"),
    ("seed=0,1,2", "seed=0,1,2 is a grid of runs: fed-dpsd sweep seed=0,1,2"),
    ("seed=range(3)", "seed=range(3) is a grid of runs: fed-dpsd sweep 'seed=range(3)'"),
    ("alpha=0.1", "alpha is not a configuration key; did you mean partition.alpha?"),
    ("metod=dense", "metod is not a configuration key; did you mean method?"),
    ("+foo=1", "foo is not a configuration key; `fed-dpsd list keys` lists all keys"),
    ("method=dens method.x=1", "did you mean dense?"),
    ("data=null", "data=null is unknown; choose one of: celeba_gender"),
    ("model=resnet18", "architectures by model.teacher=... and model.student=..."),
    ("method=fedavg method.weight=1", "did you mean method.weights?"),
    ("training@method.baseline=dp_sgd", "belongs to method=dgd or method=dgd_plus"),
    ("model=patches model.teachr=mlp", "did you mean model.teacher?"),
    ("sweep.seed=1", "sweep.seed is not a configuration key"),
]


def test_an_override_that_cannot_be_used_is_one_sentence():
    found = {typed: said(*typed.split()) for typed, _ in WRONG}
    assert [row for row in WRONG if row[1] not in found[row[0]][0] or len(found[row[0]]) > 1] == []


def test_settings_in_one_word_are_not_a_value_for_quotes():
    (problem,) = said("rounds=2 seed=1")
    assert problem == "rounds=2 seed=1: give each setting as its own word"


def remedy(problem):
    """What bash makes of the setting that a problem says to write."""
    word = problem.partition("put the value in quotes: ")[2]
    command = ["bash", "-c", f"printf %s {word}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


PATHS = ["/x/a=b,c", "/x/a=b", "/x/a b=c", "/x/it's", '/x/"a"', "/x/a b/é", "/x/“é”", "/x/a=b\\"]
PATHS += ["/x/$a=${seed}`!"]


def test_a_path_that_needs_quotes_is_shown_in_those_of_shell_and_hydra():
    for path in PATHS:
        (problem,) = said(f"data.path={path}")
        assert problem.startswith(f"data.path={path}: put the value in quotes: ")
        assert compose([remedy(problem)])["data"]["path"] == path
        with pytest.raises(ConfigError, match="put the value in quotes"):
            sweep_choices(f"data.path={path}")
        key, values = sweep_choices(remedy(problem))  # a sweep takes it as one value
        assert len(values) == 1
        assert compose([f"{key}={values[0]}"])["data"]["path"] == path


def test_letters_of_any_script_need_no_quotes():
    for value in (
        "Bilder_ü/tabelle.csv",
        "/данные/снимки",
        "/写真",
        "/mnt/a:b_ü/x",
        "/e\u0301",
        "/हिन्दी",
    ):
        override = f"data.path={value}"
        assert compose([override])["data"]["path"] == value
        key, (choice,) = sweep_choices(override)  # in a sweep
        assert compose([f"{key}={choice}"])["data"]["path"] == value
    classes = compose(["data=folder", "data.classes=[gesund,Entzündung]"])["data"]["classes"]
    assert classes == ["gesund", "Entzündung"]
    key, values = sweep_choices("data.path=/ä,/b,/ö")
    assert [compose([f"{key}={each}"])["data"]["path"] for each in values] == ["/ä", "/b", "/ö"]
    assert said("experiment=größe")[0].startswith("experiment=größe is unknown")


def test_a_path_with_commas_is_a_grid_or_one_value_in_quotes():
    (problem,) = said("data.path=/x/a,b")
    assert problem.startswith(
        "data.path=/x/a,b is a grid of runs: fed-dpsd sweep data.path=/x/a,b; "
    )
    assert compose([remedy(problem)])["data"]["path"] == "/x/a,b"


def test_a_key_of_another_choice_says_whose_it_is():
    (problem,) = said("answers=votes", "answers.k=2")
    assert problem.startswith("answers.k belongs to answers=gradient, answers=gradient_sum ")
    assert problem.endswith("here: noise_multiplier, noise_law, noise_at, quorum")


def test_a_key_that_is_there_may_be_typed_as_hydra_wants_it():
    for override in ("++rounds=3", "+rounds=3", "rounds=3"):
        assert compose([override])["rounds"] == 3
    assert compose(["+experiment=mnist"])["data"]["name"] == "mnist"
    assert compose(["experiment=null"]) == compose([])


def test_a_value_that_names_an_unknown_key_is_left_out():
    composition = compose_skipping_invalid(["out=${nope}", "teacher.seed=${rounds}", "rounds=3"])
    assert composition.problems == ("out=${nope}: Interpolation key 'nope' not found",)
    assert composition.values["teacher"]["seed"] == composition.values["rounds"] == 3


def test_a_composition_leaves_out_what_is_wrong():
    composition = compose_skipping_invalid(
        ["rounds=3", "lr=1", "method=dpsd", "method.nope=2", "seed=4"]
    )
    assert len(composition.problems) == 2
    assert (composition.values["rounds"], composition.values["seed"]) == (3, 4)
    assert composition.values["num_clients"] == 1  # the method's own


def test_a_composition_knows_where_a_value_comes_from():
    sources = compose_skipping_invalid(["method=direct"]).sources
    assert sources["teacher.seed"] == sources["partition.seed"] == "seed"
    assert sources["client_device"] == "device"
    assert sources["model.teacher"] == "model.student"


def test_a_typed_choice_replaces_what_a_file_chooses():
    assert resolve_choices(["method=dgd"])["answers"] == "noisy_max"
    typed = resolve_choices(["method=dgd", "answers=votes", "training@method.baseline=dp_sgd"])
    assert (typed["answers"], typed["training@method.baseline"]) == ("votes", "dp_sgd")


def test_a_sweep_that_cannot_be_read_is_reported():
    with pytest.raises(ConfigError, match="not closed"):
        sweep_choices("model.teachers=[cnn")
