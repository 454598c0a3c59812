"""The keys of `flwr run --run-config`: the configuration of the command line, or an error."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fed_dpsd.engines.flower.run_config import (
    SHORT,
    _quoted,
    from_run_config,
    with_typed_keys,
)
from fed_dpsd.errors import ConfigError
from fed_dpsd.experiment import from_overrides

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
NOT_GIVEN = PROJECT["tool"]["flwr"]["app"]["config"]


def test_a_run_by_flat_keys_is_the_run_of_the_command_line(tmp_path):
    places = {"out": f"{tmp_path}/my runs", "cache": f"{tmp_path}/it's here"}
    flat = {"num_clients": 7, "seed": 3, "rounds": 10, "method": "fed_dpsd", "data": "mnist"}
    flat |= {"data_path": str(tmp_path), "alpha": 1, "target_epsilon": 2.5, "answers": "votes"}
    flat |= {"model": "cnn", "teachers_per_client": 2, "delta": 1e-6, "device": "cpu", **places}
    rest = "method.batch_size=64 model.student_width=4"
    typed = [f"{SHORT.get(key, key)}={value}" for key, value in flat.items()]
    typed = [f'out="{places["out"]}"', f'cache="{places["cache"]}"', *typed[: -len(places)]]
    by_flower = from_run_config(NOT_GIVEN | flat | {"overrides": rest})
    assert by_flower.to_json() == from_overrides([*typed, *rest.split()], tmp_path).to_json()


@pytest.mark.slow
def test_every_flat_key_sets_its_key(tmp_path):
    values = {"method": "fedavg", "data": "mnist", "training": "plain", "answers": "votes"}
    values |= {"partition": "iid", "model": "cnn", "federation": "deployment"}
    values |= {"experiment": "cifar10_small", "device": "cpu", "alpha": 0.25, "delta": 1e-6}
    values |= dict.fromkeys(("data_path", "out", "cache", "ledger"), str(tmp_path))
    default = from_overrides([], None).to_json()
    for key in sorted(NOT_GIVEN.keys() - {"plugins", "overrides", "resume"}):
        value = values.get(key, 2)
        flat = {"data": "mnist"} if key == "data_path" else {}  # digits are read from no path
        found = from_run_config(NOT_GIVEN | flat | {key: value}).to_json()
        typed = [*(f"data={data}" for data in flat.values()), f"{SHORT.get(key, key)}={value}"]
        assert found == from_overrides(typed, None).to_json() != default, key


def test_nothing_given_is_the_default_run():
    default = from_overrides([], None)
    assert from_run_config(NOT_GIVEN) == from_run_config({}) == default


PROBLEMS = [
    ({"num_clients": 3, "overrides": "num_clients=4"}, "num_clients is given twice, flat and"),
    ({"data_path": "/a", "overrides": "data.path=/b"}, "flat and as data.path in overrides"),
    ({"overrides": 3}, "3 is not a setting; write KEY=VALUE"),
    ({"overrides": "out='a"}, "out='a: a quote or bracket is not closed"),
    ({"method": "dnse"}, "method=dnse is unknown; choose one of: central, class_statistics"),
    ({"num_clients": "x"}, "num_clients=x must be an integer"),
    ({"num_clients": 2.5}, "num_clients=2.5 must be an integer"),
    ({"alpha": "1"}, "alpha='1' must be a number"),
    ({"alpha": 0}, "alpha=0 must be > 0"),
    ({"alpha": 1, "partition": "iid"}, "alpha belongs to partition=dirichlet"),
    ({"target_epsilon": 1e6}, "target_epsilon=1000000 is more than any setting here spends"),
    ({"data": "imagefolder", "data_path": "/no where"}, "data_path=/no where does not exist;"),
    ({"out": "here"}, "out=here must be an absolute path"),
    ({"data": "mnist", "data_path": "here"}, "data_path=here must be an absolute path"),
    ({"experiment": "table5"}, "experiment=table5 is a grid of "),
]


def test_a_problem_is_reported_as_it_is_typed():
    for run_config, expected in PROBLEMS:
        with pytest.raises(ConfigError) as caught:
            from_run_config(NOT_GIVEN | run_config)
        lines = with_typed_keys(str(caught.value), run_config).splitlines()
        found = [line for line in lines if line.startswith(expected) or f" {expected}" in line]
        assert found, (run_config, lines)


def test_a_path_that_needs_quotes_is_shown_in_those_of_flower_and_a_shell():
    """Bash, Flower and Hydra accept what is shown; the control is what was typed."""

    def typed(text):
        given = parse_config_args([text])
        return from_run_config(NOT_GIVEN | {"data": "imagefolder"} | given)

    for path in ("/x/a=b,c", "/x/é=1", "/x/a=1\\b"):
        with pytest.raises(ConfigError) as caught:
            typed(f"overrides='data.path={path}'")
        (problem,) = (each for each in caught.value.problems if "put the value" in each)
        said, _, shown = problem.partition("put the value in quotes: --run-config ")
        assert said == f"data.path={path}: "
        text = subprocess.run(["bash", "-c", f"printf %s {shown}"], capture_output=True, text=True)
        with pytest.raises(ConfigError) as caught:
            typed(text.stdout)
        assert caught.value.problems[0].startswith(f"data.path={path} does not exist")


def test_all_problems_of_keys_and_values_come_in_one_error():
    flat = {"seed": 1.5, "rounds": 2, "num_clients": 0, "target_epsilon": 0}
    with pytest.raises(ConfigError) as caught:
        from_run_config(NOT_GIVEN | flat | {"overrides": "rounds=3 device=tpu queries=[3"})
    keys = [problem.partition("=")[0].split()[0] for problem in caught.value.problems]
    expected = ["device", "num_clients", "privacy.target_epsilon", "queries"]
    assert sorted(keys) == [*expected, "rounds", "seed"]


def test_a_grid_is_refused_with_the_command_that_runs_it(tmp_path):
    flat = {"experiment": "table5", "data": "digits", "out": str(tmp_path)}
    with pytest.raises(ConfigError) as caught:
        from_run_config(NOT_GIVEN | flat)
    command = f"fed-dpsd sweep data=digits experiment=table5 --out {tmp_path}"
    assert caught.value.problems[0].endswith(f" runs: {command}")


ANY = st.characters(codec="utf-8", exclude_characters="\n\r\0")
# Characters that are special to Hydra, OmegaConf and shells occur more often than by chance.
MEANINGS = st.lists(st.sampled_from(["${", "${seed}", "}", "$", "\\", '"', "'", "=", ",", " a"]))


@pytest.mark.slow
@given(st.text(ANY, min_size=1) | MEANINGS.map("".join).map("/x".__add__))
@example("Null")
@example("-inf")
@example("/my/runs-2.0")
@example("true/")
@settings(derandomize=True, max_examples=200, deadline=None)
def test_no_text_has_a_meaning_to_hydra(text):
    override = OverridesParser.create().parse_override(f"out={_quoted(text)}")
    composed = OmegaConf.create({"seed": 3, override.key_or_group: override.value()})
    assert OmegaConf.to_container(composed, resolve=True) == {"seed": 3, "out": text}
