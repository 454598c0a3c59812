"""Membership attacks on the folders of a small sweep, from its runs to the table.

Seeds are fixed; each statistical test states how often a correct implementation would fail with
other seeds.
"""

import csv
import dataclasses
import functools
import shutil
import sys

import numpy as np
import pytest
from scipy.special import expit

from fed_dpsd import api, cli
from fed_dpsd.audits import inversion, membership, shadows
from fed_dpsd.data.partition import Coins
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import from_overrides
from fed_dpsd.server.run_folder import open_run_folder
from fed_dpsd.sweep import sweep as sweeps
from tests.every import every

RUNS = 6
COMMON = ("partition=coins", "rounds=1", "queries_per_round=64", "method.final_student_steps=20")
COMMON += ("method.student_steps=5", "num_clients=2", "model.generator_width=4")


def swept(folder, *overrides):
    """The folder of a sweep that has run."""
    say = functools.partial(lambda line: None)
    cells = sweeps.plan([*COMMON, *overrides], folder, folder, say)
    failed = sweeps.run(
        cells,
        lambda experiment, run: api.local_job(experiment, run).run(lambda line: None),
        folder / "results.csv",
        say,
    )
    assert not failed
    return folder


PLAIN = ("training=plain", "answers=probabilities", f"seed=range(0,{RUNS})", "model.teacher=mlp")


@pytest.fixture(scope="module")
def memorised(tmp_path_factory):
    """Plain teachers that memorise their 90 records each."""
    by_heart = ("num_clients=8", "teacher.min_steps=100")
    return swept(tmp_path_factory.mktemp("memorised"), *PLAIN, *by_heart)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Plain teachers and students that learn nearly nothing."""
    hardly = ("model.student=mlp", "teacher.min_steps=1", "teacher.epochs=0")
    return swept(tmp_path_factory.mktemp("plain"), *PLAIN, *hardly)


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """Teachers trained by DP-SGD at epsilon 1."""
    folder = tmp_path_factory.mktemp("private")
    few = ("training.steps=10", "privacy.target_epsilon=1", f"seed=range(0,{RUNS})")
    return swept(folder, "training=dp_sgd", "answers=probabilities", *few)


@functools.cache
def attacked(folder):
    return {(o.victim, o.attack): o for o in membership.attack(folder, lambda line: None)}


@pytest.mark.slow(seconds=14)
def test_teachers_that_memorise_their_records_are_broken_and_the_control_is_not(memorised):
    """Two targets of 1,437 records: the control's AUC has a standard error of 0.011.

    So the control fails once in 10,000 times.
    """
    found = attacked(memorised)
    broken = found["teachers", "lira"].to_row()
    assert broken["tpr@1%_low"] > 3 * broken["fpr@1%_high"]
    assert broken["auc"] > 0.6
    assert broken["epsilon_at_least"] > 0.5
    assert (broken["epsilon_proven"], broken["cap@1%"], broken["above_cap"]) == ("inf", 1, False)
    for attack in ("lira", "loss"):
        control = found["untrained teachers", attack]
        assert control.to_row()["auc"] == pytest.approx(0.5, abs=0.044)
        assert not control.contradicts
    # A wrong claim of the broken teachers is refuted: the check is not blind.
    lie = dataclasses.replace(found["teachers", "lira"], claims=((0.5, 1e-5),))
    assert lie.contradicts


@pytest.mark.slow
def test_guesses_refute_a_claim_whose_caps_no_rate_exceeds(plain):
    """Responses that are right as often as epsilon 1 allows, all equally sure, have no threshold.

    Of 2,874 guesses 73.1 % are right, with a standard error of 0.8 %.
    """
    outcome = attacked(plain)["teachers", "lira"]
    right = np.random.default_rng(0).random(outcome.included.shape) < expit(1)
    scores = np.where(outcome.included == right, 1.0, -1.0)
    outcomes = [
        dataclasses.replace(outcome, scores=scores, claims=((epsilon, 1e-5),))
        for epsilon in (0.5, 1)
    ]
    assert [(each.above_cap, each.refuted, each.contradicts) for each in outcomes] == [
        (False, True, True),
        (False, False, False),
    ]


@pytest.mark.slow(seconds=20)
def test_models_of_an_earlier_row_are_attacked_again_where_more_is_claimed(
    plain, private, monkeypatch
):
    """Without noise the models equal the earlier row's, and more is claimed of them."""
    rows = [shadows.rows_of(folder)[0] for folder in (plain, plain, private)]
    monkeypatch.setattr(membership, "rows_of", lambda path: rows)
    scores = np.random.default_rng(0).normal(size=(RUNS, 1_437))
    monkeypatch.setattr(membership, "_scores", lambda row, victim: scores)
    said = []
    found = [o for o in membership.attack(plain, said.append) if o.attack == "lira"]
    claimed = [(o.victim, round(o.claims[0][0], 3)) for o in found]
    # Without privacy nothing is claimed of teachers and students: only the first is attacked.
    assert claimed == [("untrained teachers", 0), ("teachers", np.inf), ("teachers", 1)]
    assert sum("the same models" in line for line in said) == 4
    assert said[0].endswith(f": seeds 0-{RUNS - 1}, the last {RUNS // 3} under attack")


@pytest.mark.slow
def test_caps_follow_the_run_with_the_weakest_proof(private):
    (row,) = shadows.rows_of(private)
    more = row.runs[4].summary
    more["privacy"]["proven"] = [claim | {"epsilon": 7.5} for claim in more["privacy"]["proven"]]
    assert row.least_proven("student") is row.runs[4]
    assert row.least_proven("teachers").proven("teachers").number == "1"
    assert shadows.facts(row, "student")["epsilon_proven"] == "7.5"


@pytest.mark.slow(seconds=5)
def test_private_teachers_stay_below_their_caps(private):
    """Their attacks may exceed the interval of a right proof once in 20 times each."""
    found = attacked(private)
    for victim in ("teachers", "student"):
        outcome = found[victim, "lira"]
        row = outcome.to_row()
        assert row["epsilon_proven"] == "0.99999"
        assert not outcome.contradicts
        assert row["profile_cap@1%"] <= row["cap@1%"] < 0.1
        assert row["epsilon_at_least"] <= 1
    assert found["student", "lira"].claims[0] == found["teachers", "lira"].claims[0]


@pytest.mark.slow
def test_an_answer_s_noise_is_not_claimed_for_teachers(tmp_path):
    folder = swept(tmp_path, "training=plain", "privacy.target_epsilon=2", "seed=0")
    (row,) = shadows.rows_of(folder)
    (run,) = row.runs
    assert run.claims("teachers") == [(np.inf, 1e-5)]
    assert run.claims("student")[0][0] == pytest.approx(2, abs=0.02)
    assert run.proven("teachers").number == "inf"


@pytest.mark.ci
@pytest.mark.slow
def test_a_table_names_the_seeds_and_commits_that_there_are(plain):
    (row,) = shadows.rows_of(plain)
    assert shadows.facts(row, "student")["seeds"] == f"0-{RUNS - 1}"
    fewer = shadows.Row(row.name, [row.runs[number] for number in (0, 1, 4)])
    for number, run in enumerate(fewer.runs):
        run.versions["commit"] = f"abc{number // 2}"
    found = shadows.facts(fewer, "student")
    assert (found["seeds"], found["commit"]) == ("0, 1, 4", "abc0, abc1")


def test_a_method_that_ends_with_teachers_has_no_student_to_attack(tmp_path):
    local, both = (
        shadows.ShadowRun(tmp_path, from_overrides(["partition=coins", *more], tmp_path))
        for more in (["method=local"], [])
    )
    assert local.victims == ("teachers",)
    assert both.victims == ("teachers", "student")


@pytest.mark.ci
@pytest.mark.slow
def test_coins_decide_who_is_a_member_and_nothing_else(plain):
    (row,) = shadows.rows_of(plain)
    first, second = row.runs[:2]
    for mine, yours in zip(first.holders, second.holders, strict=True):
        assert np.array_equal(mine, yours)
    assert sorted(np.concatenate(first.holders)) == list(range(1_437))
    assert (first.included != second.included).mean() == pytest.approx(0.5, abs=0.06)
    kept = Coins(seed=0, coins=0, fraction=0.5).kept(1_437)
    assert np.array_equal(first.included, kept)


@pytest.mark.slow
def test_runs_without_coins_and_too_few_of_them_are_refused(tmp_path, plain):
    folder = swept(tmp_path / "few", "training=plain", "answers=probabilities", "seed=0,1")
    with pytest.raises(UserError, match="has 2 runs; sweep over at least 6 seeds"):
        list(membership.attack(folder, lambda line: None))
    folder = swept(*(tmp_path / "iid", "training=plain", "answers=probabilities"), "partition=iid")
    with pytest.raises(UserError, match="partition=iid leaves no record out"):
        list(membership.attack(folder, lambda line: None))


@pytest.mark.ci
@pytest.mark.slow
@every(
    ("change", "says"),
    [
        (lambda n: Coins(seed=0, coins=5, fraction=0.5), "the same partition.coins"),
        (lambda n: Coins(seed=n, coins=n, fraction=0.5), "several values of partition.seed"),
    ],
)
def test_runs_whose_coins_or_holders_are_not_as_theorems_have_them_are_refused(
    plain, monkeypatch, change, says
):
    (row,) = shadows.rows_of(plain)
    runs = [
        dataclasses.replace(
            run, experiment=dataclasses.replace(run.experiment, partition=change(number))
        )
        for number, run in enumerate(row.runs)
    ]
    monkeypatch.setattr(membership, "rows_of", lambda path: [row, shadows.Row("other", runs)])
    with pytest.raises(UserError, match=f"other has runs with {says}"):
        next(membership.attack(plain, lambda line: None))  # before anything is attacked


@pytest.mark.ci
@pytest.mark.slow
@every(
    ("known", "other", "says"),
    [
        ("fraction: 0.5", "fraction: 1.0", "partition.fraction=1 leaves no record out"),
        (
            "records_per_patient: null",
            "records_per_patient: 3",
            "leaving out a record moves others",
        ),
    ],
)
def test_settings_in_which_a_coin_is_not_one_record_are_refused(
    plain, tmp_path, known, other, says
):
    (row,) = shadows.rows_of(plain)
    for attack in (membership.attack, inversion.attack):
        folder = tmp_path / attack.__module__
        shutil.copytree(row.runs[0].folder, folder)
        text = (folder / "config.yaml").read_text()
        assert known in text
        (folder / "config.yaml").write_text(text.replace(known, other))
        with pytest.raises(UserError, match=says):
            next(attack(folder, lambda line: None))


@pytest.mark.ci
@pytest.mark.slow
def test_a_table_without_its_run_folders_is_refused(plain, tmp_path):
    shutil.copy(plain / "results.csv", tmp_path)
    with pytest.raises(UserError, match="does not exist; an attack needs a sweep's run folders"):
        next(membership.attack(tmp_path, lambda line: None))


@pytest.mark.ci
@pytest.mark.slow
def test_the_command_writes_a_table_and_a_figure(plain, tmp_path, monkeypatch, capsys):
    outcomes = list(attacked(plain).values())
    monkeypatch.setattr(membership, "attack", lambda path, say: iter(outcomes))
    command = ["fed-dpsd", "privacy", "attack", "membership", str(plain), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert not done.value.code
    paths = capsys.readouterr().out.split()
    assert paths == [str(tmp_path / f"membership.{end}") for end in ("csv", "png")]
    rows = list(csv.DictReader((tmp_path / "membership.csv").open()))
    assert [row["victim"] for row in rows[::2]] == ["untrained teachers", "teachers", "student"]
    assert {row["relation"] for row in rows} == {"add_remove"}
    assert {row["resolved@1%"] for row in rows} == {"True"}


@pytest.mark.ci
@pytest.mark.slow
def test_the_command_reports_which_proof_is_wrong(plain, tmp_path, monkeypatch, capsys):
    lies = [
        dataclasses.replace(o, scores=np.where(o.included, 1.0, -1.0), claims=((0.1, 1e-5),))
        for o in attacked(plain).values()
    ]
    monkeypatch.setattr(membership, "attack", lambda path, say: iter(lies))
    command = ["fed-dpsd", "privacy", "attack", "membership", str(plain), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 3
    said = "more than the proof allows: the only setting, teachers, lira: "
    assert said in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.slow
def test_pictures_are_compared_with_as_many_members_as_others_of_each_class(plain):
    (row,) = shadows.rows_of(plain)
    run, records = row.runs[0], row.runs[0].data.train
    known = zip(records.images, records.labels, run.included, strict=True)
    facts = {image.tobytes(): (label, inside) for image, label, inside in known}
    for victim, most in (("student", 1_437), ("teachers", 1_437 // 2 + 1)):
        judge = inversion.Judge.of(run, victim, None)
        members, others = (
            [facts[image.tobytes()] for image in images] for images in (judge.members, judge.others)
        )
        assert {inside for _, inside in members} == {True}
        assert {inside for _, inside in others} == {False}
        assert sorted(label for label, _ in members) == sorted(label for label, _ in others)
        assert most / 2 < len(members) + len(others) <= most


@pytest.mark.ci
@pytest.mark.slow
def test_a_runs_experiment_is_read_back_with_its_coins(plain):
    (row,) = shadows.rows_of(plain)
    assert open_run_folder(row.runs[3].folder).partition == Coins(seed=0, coins=3, fraction=0.5)
