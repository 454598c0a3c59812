"""Runs whose settings defeat their method get a warning; other runs get none."""

import numpy as np
import pytest

from fed_dpsd.experiment import from_overrides
from fed_dpsd.privacy.noisy_max import NoisyMax

NO_WARNING = ""
PROCEDURAL = "method.generator_steps=0 method.areas_fraction=0.5 method.lines_fraction=0.5"
WARNED = {  # overrides, and a part of the one warning
    "training=plain answers=votes": "5 teachers can say in 5,120 queries",
    "training=plain answers=gradient": "many more teachers (teachers_per_client)",
    "training=plain privacy.target_epsilon=1": "training=dp_sgd answers.epsilon_per_answer=10",
    "training=plain answers=noisy_max": "noise_multiplier=4: the noise hides what 5 teachers",
    "answers=gradient answers.noise_multiplier=100": "training=dp_sgd already gives a guarantee",
    "training=output_gradient": "expect teachers near chance; use training=dp_sgd",
    "method=dpsd training=plain answers=gradient": "1 teacher can say",
    "method=paper_fed_dpsd answers=gradient": "use answers=label or method=fed_dpsd",
    "method=dpdfd training=dp_sgd": "use answers=label or method=dpsd",
    "method=paper_fed_dpsd": NO_WARNING,
    # It measures sums of so much noise, and has no other warning.
    "experiment=secure_sums": "the noise hides what 5 teachers can say in 3,000 queries",
    # The noise is the smallest that is recommended: only more queries help.
    "num_clients=2 rounds=1 queries_per_round=8": "near chance; send more queries, by rounds or",
    "": NO_WARNING,
    "training=plain": NO_WARNING,
    "training=plain answers=probabilities": NO_WARNING,
    "answers=gradient": NO_WARNING,
    "answers=label answers.epsilon_per_answer=inf": NO_WARNING,
    "answers=votes answers.noise_multiplier=0": NO_WARNING,
    "training=plain answers=votes teachers_per_client=50": NO_WARNING,
    "training=plain answers=gradient method=ensemble": NO_WARNING,  # weights leave, and no answers
    "method=dgd queries_per_round=512": "its generator makes most images, which teach little",
    f"method=dgd {PROCEDURAL}": "far below its teachers; use many more teachers "
    "(teachers_per_client) or queries",
    f"method=dgd queries_per_round=512 {PROCEDURAL}": NO_WARNING,
    "method=weights_once training.count_fraction=null": "releases no class counts, so all clients",
    "method=weights_once training.count_fraction=null method.weights=equal": NO_WARNING,
    "method=weights_once": NO_WARNING,
    "method=weights_once training=plain": NO_WARNING,
    "training=plain answers=noisy_max teachers_per_client=25": NO_WARNING,
    "training=plain answers=noisy_max answers.noise_multiplier=1": NO_WARNING,
}


@pytest.mark.slow
def test_settings_that_defeat_a_method_give_a_warning_with_a_remedy(tmp_path):
    wrong = {}
    for typed, expected in WARNED.items():
        found = from_overrides(typed.split(), tmp_path).warnings
        if len(found) != bool(expected) or not all(expected in warning for warning in found):
            wrong[typed] = found
    assert not wrong


@pytest.mark.parametrize("law", ["laplace", "gaussian", "gumbel"])
def test_the_class_of_all_votes_is_more_probable_by_what_draws_show(law):
    """Of 200,000 draws: 0.004 is more than 3.5 standard errors of each difference."""
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = {"laplace": rng.laplace, "gaussian": rng.normal, "gumbel": rng.gumbel}[law]
    for votes, scale in ((1, 4.0), (5, 1.0)):
        noisy = drawn(0, scale, (200_000, 10))
        noisy[:, 0] += votes
        often = np.bincount(noisy.argmax(1), minlength=10) / len(noisy)
        expected = NoisyMax(10, scale, law).label_margin(votes)
        assert often[0] - often[1:].mean() == pytest.approx(expected, abs=0.004), (votes, scale)
