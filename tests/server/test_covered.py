"""No score stands next to an epsilon that does not cover it: all methods, both axes."""

import itertools
import json
import math

import pytest

from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.methods.method import State
from fed_dpsd.server import summary as summaries
from fed_dpsd.server.cards import as_markdown, model_card, privacy_card_of
from fed_dpsd.server.run_folder import CompletedRun, new_run_folder
from fed_dpsd.server.summary import OF_TEACHERS, add_privacy, blank_summary, result_line, scores_of
from fed_dpsd.storage import conf_folder

METHODS = sorted(path.stem for path in (conf_folder() / "method").glob("*.yaml"))
TRAININGS = ("plain", "dp_sgd", "lp_2st")
ANSWERS = ("label", "gradient", "noisy_max", "probabilities")
OF_SUMS = ("clipped_gradients", "class_statistics")
MARKS = (pytest.mark.slow, ())  # every other method composes some twenty experiments too
SECRET = 0.123456  # a score of teachers, wherever it is printed


def scored(experiment):
    """A finished run's folder and summary, with a score for everybody; nothing is trained."""
    folder = new_run_folder(experiment)
    summary = blank_summary(experiment, "local") | {"status": "completed"}
    for metric in ("accuracy", "auroc"):
        known = dict.fromkeys(OF_TEACHERS, SECRET) | {"clients": [SECRET, SECRET], "student": 0.5}
        summary[metric] |= {role: known[role] for role in summary[metric] if role in known}
    add_privacy(summary, experiment, folder)
    return folder, summary


def exported(folder, experiment, summary):
    """The text of everything that leaves: the result line, cards, and the trackers' numbers."""
    run = CompletedRun(folder, experiment, summary, State(0, {}, []))
    card = privacy_card_of(run)
    yield result_line(experiment, summary)
    yield json.dumps(card)
    yield as_markdown(card | {"artefact": "student.safetensors", "files": {}})
    yield model_card(run, "student.safetensors", ["a", "b"], card)
    yield json.dumps({key: value for key, value in summary.items() if key != "diagnostics"})


def combinations(small, method):
    """The experiments of a method that its settings allow."""
    pairs = itertools.product(TRAININGS, ANSWERS)
    typed = [(f"training={training}", f"answers={answers}") for training, answers in pairs]
    sums = [(f"answers={name}", "model=scattering") for name in OF_SUMS]
    own = (), (f"training={method}", "answers=probabilities"), *sums
    for pair in (*own, *typed):
        settings = f"method={method}", *pair
        for more in ((), ("num_clients=1",), ("teacher.same_start=true",), ("rounds=1",)):
            try:
                yield small(*settings, *more)
            except (ConfigError, UserError):
                continue
            break


def may_leave(summary):
    """Whether every finite epsilon comes from the teachers' own training."""
    rows = summary["privacy"]["proven"]
    return all(row["epsilon"] == "inf" or row["basis"] == "training" for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param(m, marks=MARKS[m == "fed_dpsd"]) for m in METHODS])
def test_scores_of_teachers_leave_only_where_their_training_is_what_is_proven(small, method):
    seen = 0
    for experiment in combinations(small, method):
        folder, summary = scored(experiment)
        seen += 1
        covered = may_leave(summary)
        assert covered or not summary["accuracy"]["covered_by_epsilon"]
        for text in exported(folder, experiment, summary):
            assert covered or not any(shown in text for shown in ("12.3", "0.123"))
        # Its owner still finds them.
        assert scores_of(summary, "accuracy")["ensemble"] == SECRET
        assert scores_of(summary, "auroc")["clients"] == [SECRET, SECRET]
        assert summary["accuracy"]["student"] == 0.5
    assert seen


def test_the_ensembles_score_is_in_the_line_of_a_private_training_alone(small):
    _, summary = scored(small("training=dp_sgd"))
    assert "ensemble 12.3 %" in result_line(small("training=dp_sgd"), summary)
    noisy = small("training=plain", "answers=label", "answers.epsilon_per_answer=0.01")
    _, summary = scored(noisy)
    assert math.isfinite(summary["privacy"]["proven"][0]["epsilon"])
    assert result_line(noisy, summary).startswith("student 50.0 % · published")


def test_control_scores_that_stay_are_found(small, monkeypatch):
    """The old behaviour: the ensemble's exact score next to an epsilon that noisy answers prove."""
    monkeypatch.setattr(summaries, "_move_uncovered_scores", lambda summary: None)
    experiment = small("training=plain", "answers=gradient", "answers.noise_multiplier=1000")
    folder, summary = scored(experiment)
    assert not may_leave(summary)
    assert any("12.3" in text for text in exported(folder, experiment, summary))
