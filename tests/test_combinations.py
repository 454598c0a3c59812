"""Combinations from which a student learns nothing, and those from which it does."""

import pytest

from fed_dpsd.experiment import from_overrides

PLAIN = "training=plain"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((PLAIN, "answers=votes"), "5 teachers can say in 5,120 queries"),
        ((PLAIN, "answers=gradient"), "many more teachers (teachers_per_client)"),
        ((PLAIN, "privacy.target_epsilon=1"), "training=dp_sgd answers.epsilon_per_answer=10"),
        (("answers=gradient",), "training=dp_sgd carries the proof already: use answers.noise"),
        (("method=dpdfd",), "1 teacher can say"),
    ],
)
def test_noise_that_hides_all_answers_is_told_with_a_remedy(tmp_path, overrides, expected):
    (caution,) = from_overrides(overrides, tmp_path).cautions
    assert expected in caution


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
    ],
)
def test_other_runs_are_not_warned_of(tmp_path, overrides):
    assert from_overrides(overrides, tmp_path).cautions == []
