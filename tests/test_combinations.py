"""Combinations from which a student learns nothing, and those from which it does."""

import numpy as np
import pytest

from fed_dpsd.combinations import _truth
from fed_dpsd.experiment import from_overrides
from fed_dpsd.privacy.noisy_max import NoisyMax

PLAIN = "training=plain"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((PLAIN, "answers=votes"), "5 teachers can say in 5,120 queries"),
        ((PLAIN, "answers=gradient"), "many more teachers (teachers_per_client)"),
        ((PLAIN, "privacy.target_epsilon=1"), "training=dp_sgd answers.epsilon_per_answer=10"),
        ((PLAIN, "answers=noisy_max"), "noise_multiplier=4: the noise hides what 5 teachers"),
        (("answers=gradient",), "training=dp_sgd carries the proof already: use answers.noise"),
        (("method=dpdfd",), "1 teacher can say"),
    ],
)
def test_noise_that_hides_all_answers_is_told_with_a_remedy(tmp_path, overrides, expected):
    (caution,) = from_overrides(overrides, tmp_path).cautions
    assert expected in caution


def test_too_few_queries_are_not_told_to_have_the_noise_that_they_have(tmp_path):
    (caution,) = from_overrides(
        ["num_clients=2", "rounds=1", "queries_per_round=8"], tmp_path
    ).cautions
    assert caution.endswith("near chance; ask more, by rounds or queries_per_round")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (PLAIN,),
        (PLAIN, "answers=probabilities"),
        ("answers=gradient", "answers.noise_multiplier=0.1"),
        ("answers=label", "answers.epsilon_per_answer=inf"),
        ("answers=votes", "answers.noise_multiplier=0"),
        (PLAIN, "answers=votes", "teachers_per_client=50"),
        (PLAIN, "answers=gradient", "method=dense"),  # whose weights leave: it asks nothing
        ("method=dgd",),
        (PLAIN, "answers=noisy_max", "teachers_per_client=25"),
        (PLAIN, "answers=noisy_max", "answers.noise_multiplier=1"),
    ],
)
def test_other_runs_are_not_warned_of(tmp_path, overrides):
    assert from_overrides(overrides, tmp_path).cautions == []


@pytest.mark.parametrize("law", ["laplace", "gaussian", "gumbel"])
@pytest.mark.parametrize(("votes", "scale"), [(1, 4.0), (5, 1.0)])
def test_the_class_of_all_votes_is_more_probable_by_what_draws_show(law, votes, scale):
    rng = np.random.Generator(np.random.PCG64(0))
    count = 200_000
    drawn = {"laplace": rng.laplace, "gaussian": rng.normal, "gumbel": rng.gumbel}[law]
    noisy = drawn(0, scale, (count, 10))
    noisy[:, 0] += votes
    often = np.bincount(noisy.argmax(1), minlength=10) / count
    expected = _truth(NoisyMax(10, scale, law), votes)
    assert often[0] - often[1:].mean() == pytest.approx(expected, abs=0.004)
