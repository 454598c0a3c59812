"""An experiment: its JSON, its simulated records, and what its student is tested on."""

import json

import numpy as np
import pytest

from fed_dpsd.config.compose import compose
from fed_dpsd.errors import ConfigError, UserError, warn_once
from fed_dpsd.experiment import (
    evaluated_on,
    from_json,
    from_overrides,
    largest_partition,
    load_data,
    one_run,
    partitions,
    set_up,
)
from fed_dpsd.experiment import test_split as held_out

RECORDS = 1_437  # of digits, to train with


def test_an_experiment_survives_its_json(tmp_path):
    for overrides in (
        [],
        ["training=plain", "answers=gradient", "partition=class"],
        ["training=plain", "answers=probabilities"],
    ):
        experiment = set_up(compose(overrides), tmp_path)
        again = from_json(experiment.to_json())
        assert again == experiment
        assert json.loads(again.to_json()) == json.loads(experiment.to_json())


def test_simulated_clients_share_no_record_and_the_largest_is_known(small):
    for rule in ("dirichlet", "iid", "class"):
        experiment = small("num_clients=3", f"partition={rule}")
        parts = partitions(experiment)
        shared = np.concatenate(parts)
        assert len(np.unique(shared)) == len(shared)
        # Three clients of two classes leave some.
        assert (len(shared) == RECORDS) == (rule != "class")
        assert partitions(experiment) is parts  # once a process
        assert partitions(small("num_clients=2", f"partition={rule}")) is not parts
        assert largest_partition(experiment) == max(map(len, parts))


@pytest.mark.slow
def test_too_many_clients_are_an_error_and_then_no_partition_is_the_largest(small):
    experiment = small("num_clients=900")
    with pytest.raises(UserError, match="num_clients=.* works here"):
        partitions(experiment)
    assert largest_partition(experiment) is None


def test_a_deployments_partitions_are_not_public(deployed):
    assert largest_partition(deployed()) is None


def test_what_a_student_is_tested_on_is_said(small, deployed):
    test = held_out(small())
    assert len(test) == 360
    said = evaluated_on(small(), test)
    assert said == "360 test images of digits, taken as public in a simulation"
    said = evaluated_on(deployed(), held_out(deployed()))
    assert said == "360 test images of digits, the coordinator's own"
    own = deployed("data=folder", "data.shape=[1,8,8]", "data.num_classes=10")
    assert held_out(own) is None
    assert evaluated_on(own, None) == "nothing: there are no test images"


def test_a_simulation_needs_test_images(small):
    with pytest.raises(UserError):
        held_out(small("data=folder", "data.shape=[1,8,8]", "data.num_classes=10"))


def test_noise_follows_public_seeds_in_a_simulation_alone(small, deployed):
    assert small().seeded
    assert not small("noise=secure").seeded
    assert not deployed("noise=seeded").seeded


def test_a_method_is_named_by_its_file_and_data_is_loaded_once(small):
    experiment = small("method=ensemble", "training=plain", "answers=probabilities")
    assert experiment.method_name == "ensemble"
    config = experiment.config
    assert load_data(config.data, config.cache) is load_data(config.data, config.cache)


def test_labels_that_are_private_divide_no_records(small):
    """Otherwise one label would decide which records are trained on, or in which shard."""
    message = "(by|from) (their )?labels, which training=alibi keeps private"
    for override in ("partition=class", "data.records_per_patient=4"):
        with pytest.raises(ConfigError, match=message):
            small("method=central", "training=alibi", "answers=probabilities", override)


def test_a_key_of_plain_teachers_that_a_private_training_does_not_read_is_said(tmp_path, caplog):
    for bind in (from_overrides, one_run):  # of a sweep, and of a run
        warn_once.cache_clear()
        caplog.clear()
        bind(["training=dp_sgd", "teacher.learning_rate=1e30"], tmp_path)
        assert "learning_rate=1e30 has no effect: training=dp_sgd has its own keys" in caplog.text
    caplog.clear()
    from_overrides(["training=plain", "teacher.learning_rate=0.1"], tmp_path)
    from_overrides(["training=dp_sgd", "training.learning_rate=0.1"], tmp_path)
    assert "has no effect" not in caplog.text


def test_noise_that_is_both_typed_and_calibrated_is_refused(tmp_path):
    for key, training in (
        ("training.noise_multiplier", "dp_sgd"),
        ("answers.noise_multiplier", "plain"),
    ):
        typed = [f"training={training}", "answers=gradient", f"{key}=3"]
        message = (
            rf"^{key}=3 and privacy\.target_epsilon=1 contradict .* privacy.target_epsilon=null$"
        )
        for bind in (from_overrides, one_run):
            with pytest.raises(ConfigError, match=message):
                bind([*typed, "privacy.target_epsilon=1"], tmp_path)
            bind([*typed, "privacy.target_epsilon=null"], tmp_path)
    # The noise of the other axis is not calibrated.
    other = ("training=dp_sgd", "answers=gradient", "answers.noise_multiplier=3")
    from_overrides([*other, "privacy.target_epsilon=1"], tmp_path, calibrate=False)
