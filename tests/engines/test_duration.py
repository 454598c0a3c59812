"""How long a run takes here: from earlier runs with its settings, or from the default run's."""

import dataclasses
import json

import pytest
import yaml

from fed_dpsd.engines.duration import START, Duration, expected, rounded, words
from fed_dpsd.experiment import from_overrides
from fed_dpsd.server.run_folder import new_run_folder
from tests.conftest import SMALL


def experiment(tmp_path, *overrides):
    return from_overrides([*SMALL, *overrides], tmp_path)


def finish(tmp_path, *overrides, first=2.0, last=5.0, teachers=3.0, **changes):
    """The folder of a run that took so many seconds a round, and others for the last one."""
    run = experiment(tmp_path, *overrides)
    folder = new_run_folder(run)
    rounds = [first] * (run.config.rounds - 1) + [last]
    lines = (json.dumps({"round_seconds": seconds}) + "\n" for seconds in rounds)
    (folder / "rounds.jsonl").write_text("".join(lines))
    summary = {"status": "completed", "engine": "local", "method": run.method_name}
    summary |= {"data": "digits", "num_clients": run.config.num_clients}
    summary |= {"seconds": {"teachers": teachers}} | changes
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_an_earlier_run_says_how_long_whatever_its_seed_noise_and_rounds(tmp_path):
    finish(tmp_path, "seed=3", "answers.epsilon_per_answer=1", "rounds=3")
    found = expected(experiment(tmp_path, "rounds=100", "privacy.budget=900000", "noise=secure"))
    seconds = START + 3 + 99 * 2 + 5
    assert found.least < seconds < found.most < 2 * found.least
    assert str(found).startswith("about 3 minutes to 4 minutes on this machine (")
    assert str(found).endswith(f", by an earlier run with these settings in {tmp_path}/runs")


def test_several_runs_give_their_least_and_their_most(tmp_path):
    for seed, first in enumerate((2.0, 4.0, 3.0)):
        finish(tmp_path, f"seed={seed}", first=first)
    found = expected(experiment(tmp_path))
    alone = [START + 3 + 2 * first + 5 for first in (2.0, 4.0)]
    assert found.least < min(alone) < max(alone) < found.most
    assert "by 3 earlier runs with these settings" in found.source


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (("queries_per_round=65",), {}),
        (("num_clients=3",), {}),
        (("model.student=mlp",), {}),
        (("answers=votes",), {}),
        ((), {"status": "failed"}),
        ((), {"engine": "flower"}),
        ((), {"seconds": {}}),
        (("rounds=1",), {}),  # the last round takes longer than others
    ],
)
def test_runs_of_other_settings_and_unfinished_ones_say_nothing(tmp_path, overrides, changes):
    finish(tmp_path, *overrides, **changes)
    assert expected(experiment(tmp_path)) is None


def test_a_method_that_ends_after_one_round_has_its_seconds(tmp_path):
    folder = finish(tmp_path)
    (folder / "rounds.jsonl").write_text('{"round_seconds": 7.0}\n')
    found = expected(experiment(tmp_path))
    assert found.least < START + 3 + 7 < found.most
    assert expected(experiment(tmp_path, "rounds=9")) is None


@pytest.mark.parametrize("name", ["summary.json", "config.yaml", "rounds.jsonl"])
def test_a_damaged_folder_is_passed_over(tmp_path, name):
    folder = finish(tmp_path)
    assert expected(experiment(tmp_path)) is not None
    (folder / name).write_text("{")
    assert expected(experiment(tmp_path)) is None


def test_the_run_folder_of_another_version_is_passed_over(tmp_path):
    folder = finish(tmp_path)
    raw = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(raw | {"later": 1}))
    assert expected(experiment(tmp_path)) is None


def test_without_one_the_default_runs_seconds_are_scaled(tmp_path):
    short, long = (from_overrides([f"rounds={n}"], tmp_path) for n in (20, 200))
    assert "from the default run's seconds" in expected(short).source
    assert 15 < expected(short).least < 40 < expected(short).most < 200
    assert 4 * expected(short).least < expected(long).least < 10 * expected(short).least


@pytest.mark.parametrize(
    "overrides",
    [("model=cnn",), ("method=dense", "training=plain", "model=cnn"), ("data=mnist",)],
)
def test_what_is_not_known_is_said_with_a_way_to_know_it(tmp_path, overrides):
    run = from_overrides(overrides, tmp_path)
    assert expected(run) is None
    assert words(run, None) == (
        f"not known here: no run with these settings is in {tmp_path}/runs; after one with "
        "rounds=2, this plan knows"
    )


def test_hospitals_machines_are_not_known_here(tmp_path):
    finish(tmp_path)
    run = experiment(tmp_path, "federation=deployment", "rounds=80")
    assert expected(run) is None
    assert words(run, None).startswith("not known: it depends on the hospitals' machines, and 80 ")
    assert "rounds take 3 minutes at least" in words(run, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.1, "5 s"),
        (16, "20 s"),
        (119, "120 s"),
        (121, "2 minutes"),
        (7_100, "118 minutes"),
        (7_300, "2 hours"),
        (400_000, "5 days"),
    ],
)
def test_seconds_are_rounded_as_people_say_them(seconds, text):
    assert rounded(seconds) == text


def test_a_span_of_one_number_is_that_number():
    duration = Duration(200.0, 205.0, "by a run")
    assert str(duration).startswith("about 3 minutes on this machine (")
    assert " to " in str(dataclasses.replace(duration, most=900.0))
