"""Random experiments over both axes: ledgers hold what was planned and never more."""

import contextlib

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fed_dpsd.accounts.card import ledger_files, plan_of
from fed_dpsd.accounts.database import read
from fed_dpsd.engines.local import LocalFederation
from fed_dpsd.errors import UserError
from fed_dpsd.privacy.accounting import epsilon, prove
from fed_dpsd.privacy.mechanism import UNITS_AND_RELATIONS
from fed_dpsd.server.run import run
from fed_dpsd.server.run_folder import new_run_folder
from tests.proofs import bases, spent

pytestmark = pytest.mark.no_cover  # shorter tests run the same lines, and count them

DELTA = 1e-5


class Interrupted(Exception):
    """The end of a run's process, after some round."""


@st.composite
def trainings(draw):
    """Overrides of training, plain or private, by record or by patient."""
    if draw(st.booleans()):
        return ["training=plain"]
    unit = draw(st.sampled_from(["record", "patient"]))
    return [
        *("training=dp_sgd", "model=scattering", f"training.unit={unit}"),
        f"training.records_per_patient={draw(st.integers(1, 3)) if unit == 'patient' else 1}",
        f"training.steps={draw(st.integers(1, 3))}",
        f"training.noise_multiplier={draw(st.sampled_from([0.8, 3.0, 14.3]))}",
        f"training.sample_rate={draw(st.sampled_from([0.2, 1.0]))}",
        f"training.count_fraction={draw(st.sampled_from(['null', '0.05', '0.5']))}",
    ]


@st.composite
def answers(draw, private):
    """Overrides of the answers; only private teachers may answer without noise."""
    name = draw(st.sampled_from(["label", "gradient", "votes", "probabilities"]))
    chosen = [f"answers={name}"]
    if name == "label":
        levels = [0.5, 10.0, *(["inf"] if private else [])]
        chosen.append(f"answers.epsilon_per_answer={draw(st.sampled_from(levels))}")
        chosen.append(f"answers.k={draw(st.sampled_from(['null', 2, 5]))}")
    elif name != "probabilities":
        level = draw(st.sampled_from([1.0, 100.0, *([0] if private else [])]))
        places = ["client", *(["server"] if level else [])]
        chosen.append(f"answers.noise_multiplier={level}")
        chosen.append(f"answers.noise_at={draw(st.sampled_from(places))}")
    if name == "gradient":
        chosen.append(f"answers.normalise={draw(st.sampled_from(['sample', 'batch']))}")
    return chosen


@st.composite
def experiments(draw):
    """Overrides of an experiment, and the rounds after which its process ends."""
    training = draw(trainings())
    count = draw(st.integers(1, 3))
    overrides = [
        *training,
        *draw(answers(private=len(training) > 1)),
        f"rounds={count}",
        f"queries_per_round={draw(st.sampled_from([4, 16]))}",
        f"teachers_per_client={draw(st.sampled_from([1, 2]))}",
        f"method.class_counts={draw(st.booleans())}",
        "data.records_per_patient=3",
    ]
    return overrides, draw(st.sets(st.integers(1, count)))


def live(experiment, folder, ends):
    """Run, and resume after each end of the process; return the summary."""
    left = sorted(ends)

    def progress(line):
        if left and line["round"] == left[0]:
            raise Interrupted(left.pop(0))

    while True:
        try:
            return run(experiment, LocalFederation(experiment, folder), folder, progress)
        except Interrupted:
            continue


def epsilons(entries, plan):
    """The epsilon that was charged and the one that was planned, by basis, unit and relation."""
    return {
        (basis, *pair): (
            epsilon(spent(entries, *pair, basis), DELTA).epsilon,
            prove(stages, DELTA, *pair).value,
        )
        for basis, stages in bases(plan).items()
        for pair in UNITS_AND_RELATIONS
    }


def claimed(card):
    """Every epsilon on a card, by basis, unit and relation."""
    return {
        (claim["basis"], row["unit"], row["relation"]): float(claim["epsilon"])
        for row in card["proven"]
        for claim in (row, *row["beside"])
    }


def random(number):
    """Hypothesis settings for this many experiments, the same ones each time."""
    fixtures = HealthCheck.function_scoped_fixture
    return settings(
        max_examples=number,
        derandomize=True,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=[fixtures],
    )


MANY = pytest.mark.parametrize("number", [1, pytest.param(20, marks=pytest.mark.slow(seconds=60))])
BUDGETS = st.sampled_from([0.5, 5.0, 50.0])


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("number", [20])
def test_ledgers_hold_what_was_planned(small, tmp_path_factory, number):
    """Also if the process ends between rounds and the run is resumed."""
    random(number)(given(experiments())(lambda drawn: holds(small, tmp_path_factory, *drawn)))()


@MANY
def test_clients_that_stop_early_hold_no_more_than_was_planned(small, tmp_path_factory, number):
    """A budget ends a run when it must, and the card still covers the whole plan."""

    def check(drawn, budget):
        holds_no_more(small, tmp_path_factory, *drawn, budget)

    random(number)(given(drawn=experiments(), budget=BUDGETS)(check))()


def holds(small, tmp_path_factory, overrides, ends):
    experiment = small(*overrides, f"out={tmp_path_factory.mktemp('runs')}")
    folder, plan = new_run_folder(experiment), plan_of(experiment)
    card = claimed(live(experiment, folder, ends)["privacy"])
    for path in ledger_files(folder):
        for key, (charged, planned) in epsilons(read(path), plan).items():
            assert charged == pytest.approx(planned, rel=1e-9)
            assert card[key] == pytest.approx(planned, rel=1e-9)


def holds_no_more(small, tmp_path_factory, overrides, ends, budget):
    limit = f"privacy.budget={budget}"
    experiment = small(*overrides, limit, f"out={tmp_path_factory.mktemp('runs')}")
    folder, plan = new_run_folder(experiment), plan_of(experiment)
    card = {}
    with contextlib.suppress(UserError):  # no client can pay for its first answer
        card = claimed(live(experiment, folder, ends)["privacy"])
    by = "training" if "training" in bases(plan) else "answers"
    for path in folder.glob("ledger/*.sqlite"):
        found = epsilons(read(path) if path.stat().st_size else (), plan)
        assert found[by, "record", "add_remove"][0] <= budget
        for key, (charged, planned) in found.items():
            assert charged <= planned * (1 + 1e-9)
            assert not card or card[key] == pytest.approx(planned, rel=1e-9)
