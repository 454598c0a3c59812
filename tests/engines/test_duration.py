"""How long a run takes here: from earlier runs with its settings, or from the default run's."""

import json

import yaml

from fed_dpsd.engines.duration import START, duration_text, expected_duration
from fed_dpsd.experiment import from_overrides
from fed_dpsd.server.run_folder import new_run_folder
from tests.conftest import SMALL


def experiment(tmp_path, *overrides):
    return from_overrides([*SMALL, *overrides], tmp_path)


def finish(tmp_path, *overrides, first=2.0, last=5.0, teachers=3.0, **changes):
    """The folder of a run with these seconds per round, in the last round and before."""
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


def test_earlier_runs_give_an_estimate_whatever_their_seed_noise_and_rounds(tmp_path):
    finish(tmp_path, "seed=3", "answers.epsilon_per_answer=1", "rounds=3")
    found = expected_duration(
        experiment(tmp_path, "rounds=100", "privacy.budget=900000", "noise=secure")
    )
    seconds = START + 3 + 99 * 2 + 5
    assert found.least < seconds < found.most < 2 * found.least
    assert str(found).startswith("about 3 minutes to 4 minutes on this machine (")
    assert str(found).endswith(f", by an earlier run with these settings in {tmp_path}/runs")
    finish(tmp_path, first=4.0)
    several = expected_duration(experiment(tmp_path))
    assert several.least < START + 3 + 2 * 2 + 5 < START + 3 + 2 * 4 + 5 < several.most
    assert "by 2 earlier runs with these settings" in several.source


def test_other_settings_and_unfinished_or_damaged_runs_give_no_estimate(tmp_path):
    for number, (overrides, changes) in enumerate(
        [
            (("queries_per_round=65",), {}),
            (("num_clients=3",), {}),
            (("model.student=mlp",), {}),
            (("answers=votes",), {}),
            ((), {"status": "failed"}),
            ((), {"engine": "flower"}),
            ((), {"seconds": {}}),
            (("rounds=1",), {}),  # the last round takes longer than others
        ]
    ):
        place = tmp_path / str(number)
        finish(place, *overrides, **changes)
        assert expected_duration(experiment(place)) is None, (overrides, changes)
    for name in ("summary.json", "config.yaml", "rounds.jsonl"):
        folder = finish(tmp_path / name)
        assert expected_duration(experiment(tmp_path / name)) is not None
        (folder / name).write_text("{")
        assert expected_duration(experiment(tmp_path / name)) is None, name
    folder = finish(tmp_path / "later version")
    raw = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(raw | {"later": 1}))
    assert expected_duration(experiment(tmp_path / "later version")) is None


def test_without_an_earlier_run_the_default_runs_seconds_are_scaled(tmp_path):
    short, long = (from_overrides([f"rounds={n}"], tmp_path) for n in (20, 200))
    assert "from the default run's seconds" in expected_duration(short).source
    assert 15 < expected_duration(short).least < 40 < expected_duration(short).most < 200
    assert (
        4 * expected_duration(short).least
        < expected_duration(long).least
        < 10 * expected_duration(short).least
    )


def test_an_unknown_duration_comes_with_a_way_to_know_it(tmp_path):
    for overrides in (
        ("model=cnn",),
        ("method=dense", "training=plain", "model=cnn"),
        ("data=mnist",),
    ):
        run = from_overrides(overrides, tmp_path)
        assert expected_duration(run) is None
        assert duration_text(run, None) == (
            f"not known: no run with these settings is in {tmp_path}/runs; after one with "
            "rounds=2, this plan shows it"
        )
    finish(tmp_path)
    run = experiment(tmp_path, "federation=deployment", "rounds=80")
    assert expected_duration(run) is None
    assert duration_text(run, None).startswith(
        "not known: it depends on the hospitals' machines, and 80 "
    )
    assert "rounds take at least 3 minutes" in duration_text(run, None)
