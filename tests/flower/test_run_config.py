"""The keys of `flwr run --run-config`: the configuration of the command line, or an error."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from fed_dpsd.errors import ConfigError
from fed_dpsd.experiment import set_up
from fed_dpsd.flower.run_config import FLAT_KEYS, _quoted, from_run_config
from fed_dpsd.flower.server import RunFailed, serve
from fed_dpsd.overrides import compose

NOT_GIVEN = dict.fromkeys((*FLAT_KEYS, "overrides", "resume"), "")


def test_a_run_by_flat_keys_is_the_run_of_the_command_line(tmp_path):
    places = {"out": f"{tmp_path}/my runs", "cache": f"{tmp_path}/it's here"}
    flat = {"num_clients": 7, "seed": 3, "rounds": 10, "method": "fed_dpsd", "data": "mnist"}
    flat |= {"data_path": str(tmp_path), "alpha": 1, "target_epsilon": 2.5, "answers": "votes"}
    flat |= {"model": "cnn", "teachers_per_client": 2, "delta": 1e-6, "device": "cpu", **places}
    rest = "method.batch_size=64 model.student_width=4"
    typed = [f"{FLAT_KEYS[key].override}={value}" for key, value in flat.items()]
    typed = [f'out="{places["out"]}"', f'cache="{places["cache"]}"', *typed[: -len(places)]]
    by_flower = set_up(from_run_config(NOT_GIVEN | flat | {"overrides": rest}), None)
    assert by_flower.to_json() == set_up(compose([*typed, *rest.split()]), tmp_path).to_json()
    # Each of them says something: no other key of the default run has these values.
    default = set_up(compose([*typed[:2]]), tmp_path).to_json()
    assert by_flower.to_json() != default


@pytest.mark.parametrize("key", sorted(FLAT_KEYS.keys() - {"plugins"}))
def test_every_flat_key_sets_its_key(key, tmp_path):
    values = {"method": "dense", "data": "mnist", "training": "plain", "answers": "votes"}
    values |= {"partition": "iid", "model": "cnn", "federation": "deployment"}
    values |= {"experiment": "ci", "device": "cpu"}
    values |= dict.fromkeys(("data_path", "out", "cache", "ledger"), str(tmp_path))
    value = values.get(key, 2 if FLAT_KEYS[key].kind is int else 0.25)
    raw = from_run_config(NOT_GIVEN | {key: value})
    assert raw == compose([f"{FLAT_KEYS[key].override}={value}"])
    assert raw != compose([])


def test_nothing_given_is_the_default_run():
    assert from_run_config(NOT_GIVEN) == from_run_config({}) == compose([])


@pytest.mark.parametrize(
    ("run_config", "expected"),
    [
        ({"num_clients": 3, "overrides": "num_clients=4"}, "num_clients is given twice, flat and"),
        ({"out": "/a", "overrides": "out=/b"}, "out is given twice"),
        ({"data_path": "/a", "overrides": "data.path=/b"}, "flat and as data.path in overrides"),
        ({"overrides": 3}, 'overrides=3 must be a string: overrides="rounds=10"'),
        ({"overrides": "out='a"}, "a quote or bracket is not closed"),
        ({"rouns": 3}, "rouns=3 is no key of a run configuration; did you mean rounds?"),
        ({"zzz": True}, "zzz=true is no key of a run configuration; the keys are num_clients, se"),
        ({"method": "dnse"}, "method=dnse is unknown; choose one of: central, dense"),
        ({"method": 3}, 'method=3 must be a string, in quotes: method="3"'),
        ({"num_clients": "x"}, 'num_clients="x" must be an integer'),
        ({"num_clients": True}, "num_clients=true must be an integer"),
        ({"num_clients": 2.5}, "num_clients=2.5 must be an integer"),
        ({"alpha": "1"}, 'alpha="1" must be a number'),
    ],
)
def test_bad_run_config(run_config, expected):
    with pytest.raises(ConfigError) as caught:
        from_run_config(run_config)
    assert expected in str(caught.value)


def test_all_problems_come_in_one_error():
    bad = {"rouns": 3, "seed": 1.5, "rounds": 2, "overrides": "rounds=3"}
    with pytest.raises(ConfigError) as caught:
        from_run_config(bad)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("key", ["out", "cache", "data_path"])
def test_relative_paths_are_errors_where_the_working_directory_is_not_the_users(key):
    named = FLAT_KEYS[key].override
    with pytest.raises(ConfigError, match=f"{named}=here must be an absolute path"):
        set_up(from_run_config({key: "here"}), None)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), min_size=1))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_no_text_has_a_meaning_to_hydra(text):
    override = OverridesParser.create().parse_override(f"out={_quoted(text)}")
    assert (override.key_or_group, override.value()) == ("out", text)


def test_a_resumed_run_takes_no_other_key(tmp_path, capsys):
    with pytest.raises(RunFailed, match=r"rounds is given with resume=/.*: a run keeps its conf"):
        serve(None, NOT_GIVEN | {"resume": str(tmp_path), "rounds": 3}, tmp_path)
    assert capsys.readouterr().out.startswith("error: rounds is given with resume=")
