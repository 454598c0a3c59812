"""A lying client counts for no more than a bounded answer."""

from dataclasses import replace

import numpy as np
import pytest

from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.protocol import Response
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder
from tests.every import every
from tests.server.test_federation import request

# What client 0 sends instead of its honest values; `first` are the values of its first answer.
LIES = {
    "nothing": lambda values, first: np.zeros_like(values),
    "NaN": lambda values, first: np.full(values.shape, np.nan),
    "infinite in one class": lambda values, first: np.where(np.arange(10) == 0, np.inf, values),
    "huge": lambda values, first: values * 1e30 + 1e30,
    "another shape": lambda values, first: values[:-1],
    "text": lambda values, first: values.astype(str),
    "flipped": lambda values, first: np.roll(values, 1, axis=1),
    "replayed": lambda values, first: first,
}
DISCARDED = ("NaN", "infinite in one class", "huge", "another shape", "text")
MECHANISMS = {
    "label": ("training=plain", "answers=label"),
    "gradient": ("training=plain", "answers=gradient"),
    "votes": ("training=plain", "answers=votes"),
    "dp_sgd": (
        "training=dp_sgd",
        "answers=probabilities",
        "training.steps=3",
        "model.teacher=scattering",
    ),
}


class Lied(LocalFederation):
    """All clients but client 0 are honest."""

    def __init__(self, experiment, folder, lie):
        super().__init__(experiment, folder)
        self._lie, self._first = lie, None

    def _deliver(self, asked):
        answers = super()._deliver(asked)
        given = answers[0]
        if asked.kind == "answers" and isinstance(given, Response) and self._lie != "honest":
            if self._first is None:
                self._first = given.values
            values = LIES[self._lie](given.values, self._first)
            sealed = {0: b"what only secure sums have"} if self._lie == "huge" else {}
            answers[0] = replace(given, values=values, sealed=sealed)
        return answers


def student(experiment, lie):
    """A run's summary."""
    folder = new_run_folder(experiment)
    return runs.run(experiment, Lied(experiment, folder, lie), folder, lambda line: None)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["label", "dp_sgd"])
def test_what_no_client_could_have_answered_counts_as_nothing(small, mechanism):
    experiment = small(*MECHANISMS[mechanism], "rounds=1")
    silent = student(experiment, "nothing")["student_sha256"]
    assert {student(experiment, lie)["student_sha256"] for lie in DISCARDED} == {silent}
    assert student(experiment, "honest")["student_sha256"] != silent


@pytest.mark.slow
@every("mechanism", MECHANISMS)
@every("lie", ["flipped", "replayed"])
def test_a_lie_that_could_be_an_answer_moves_a_sum_by_two_of_them(small, tmp_path, mechanism, lie):
    """Of the longest that are admissible: a vote, probabilities, or a gradient and its noise."""
    experiment = small(*MECHANISMS[mechanism], "num_clients=3", "queries_per_round=16")
    honest, lied = (Lied(experiment, tmp_path / name, name) for name in ("honest", lie))
    lied.total(request(count=16))
    query = replace(request(count=16), query_id=2)
    moved = np.linalg.norm(lied.total(query).sum - honest.total(query).sum, axis=1)
    longest = {"label": 1, "dp_sgd": 1.001, "votes": None, "gradient": None}[mechanism]
    if longest is None:
        scale = experiment.answers.scale
        longest = (1e-3 if mechanism == "gradient" else 1) + scale * (10**0.5 * 9 + 9)
    assert moved.max() <= 2 * longest


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("mechanism", ["label", "dp_sgd"])
def test_one_liar_of_five(small, mechanism, capsys):
    """Measured, printed with -s as CSV: students of five clients, one lying, on digits."""
    sizes = ("num_clients=5", "rounds=5", "queries_per_round=640", "method.final_student_steps=500")
    settings = {
        "label": (
            "training=plain",
            "answers=label",
            "teacher.min_steps=200",
            "model.teacher_width=8",
        ),
        "dp_sgd": (
            "training=dp_sgd",
            "answers=probabilities",
            "model=scattering",
            "model.student_width=16",
        ),
    }[mechanism]
    found = {}
    for lie in ("honest", "nothing", "flipped", "replayed"):
        scores = [
            student(small(*sizes, *settings, f"seed={seed}"), lie)["accuracy"]["student"]
            for seed in range(3)
        ]
        found[lie] = 100 * np.mean(scores)
        with capsys.disabled():
            for seed, score in enumerate(scores):
                print(f"{mechanism},{lie},{seed},{score:.4f}")
    assert found["nothing"] > found["honest"] - 10
    assert min(found["flipped"], found["replayed"]) > found["nothing"] - 25
