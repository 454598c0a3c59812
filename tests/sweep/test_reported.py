"""The inputs of `fed-dpsd report`: tables, folders of sweeps and runs; the facts of a run."""

import csv
import dataclasses
import json
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

from fed_dpsd import api
from fed_dpsd.engines.flower.run_config import from_run_config
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import from_overrides, one_run
from fed_dpsd.report import pages
from fed_dpsd.report.pages import run_page as page
from fed_dpsd.report.settings import read_settings, setting_names
from fed_dpsd.server.run_folder import new_run_folder, open_run_folder
from fed_dpsd.sweep.reported import (
    command_of,
    facts_of,
    settings_in,
    tables_of,
    unfinished_nearby,
)
from fed_dpsd.sweep.sweep import cell_key
from tests.conftest import SMALL, small_for
from tests.every import every
from tests.report.runs import check_structure, leave_figures_empty
from tests.sweep.test_sweep import plan


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folders of two completed runs that differ in their seed and their noise."""
    out = tmp_path_factory.mktemp("finished")
    more = ("seed=1", "answers.epsilon_per_answer=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FED_DPSD_HOME", str(out))
        runs = [
            api.run(*SMALL, "rounds=1", *own, f"run_folder={out}/{name}", progress=False)
            for name, own in (("one", ()), ("other", more[:1]), ("noisier", more[1:]))
        ]
    return [run.folder for run in runs]


@pytest.fixture(autouse=True)
def _empty_figures(monkeypatch):
    leave_figures_empty(monkeypatch)


@pytest.fixture
def folders(finished, tmp_path):
    """Copies of the completed runs, for a test to modify."""
    return [shutil.copytree(folder, tmp_path / "runs" / folder.name) for folder in finished]


@pytest.fixture
def run(folders):
    """A completed run's folder."""
    return folders[0]


@pytest.mark.slow
def test_a_run_is_a_table_of_one_row(run, tmp_path):
    (path,) = tables_of([run], tmp_path / "report")
    assert path == tmp_path / "report" / "results.csv"
    (row,) = csv.DictReader(path.open(newline=""))
    summary = json.loads((run / "summary.json").read_text())
    assert float(row["student"]) == summary["accuracy"]["student"]
    assert (row["key"], row["seed"], row["data"]) == (run.name, "0", "digits")
    assert tables_of([run]) == [run / "results.csv"]
    assert tables_of([run]) == [run / "results.csv"]  # again, over its own
    assert tables_of([tmp_path / "report"]) == [path]  # as the folder of a sweep
    assert tables_of([path, path]) == [path]


@pytest.mark.slow
def test_several_runs_are_one_table_in_the_folder_that_is_named(folders, tmp_path):
    run, other, noisier = folders
    (path,) = tables_of([run, other], tmp_path / "report")
    assert [row["seed"] for row in csv.DictReader(path.open(newline=""))] == ["0", "1"]
    assert tables_of([run, other]) == [run / "results.csv", other / "results.csv"]
    assert facts_of([run, other]) is None
    assert facts_of([path]) is None
    # Runs of the same seed have the keys that differ.
    settings = read_settings([*tables_of([run, noisier], tmp_path / "both")])
    assert setting_names(settings) == ["epsilon_per_answer=10", "epsilon_per_answer=2"]
    assert len(read_settings(tables_of([run, noisier]))) == 2  # from the tables of their own, too


def test_runs_that_differ_in_seeds_that_follow_the_runs_are_one_setting(folders, tmp_path):
    run, other, _ = folders
    for out in (tmp_path / "report", None):
        (setting,) = settings_in(tables_of([run, other], out))
        assert [row["seed"] for row in setting.runs] == ["0", "1"]
    copy = shutil.copytree(run, run.with_name("copy"))
    for out in (tmp_path / "both", None):
        (setting,) = settings_in(tables_of([run, copy], out))
        assert len(setting.runs) == 1


def test_a_value_that_is_typed_in_two_ways_is_one_setting(folders, tmp_path):
    for folder, text in zip(folders, ("1e-5", "0.00001"), strict=False):
        file = folder / "overrides.json"
        file.write_text(json.dumps([*json.loads(file.read_text()), f"privacy.delta={text}"]))
    for out in (tmp_path / "report", None):
        (setting,) = settings_in(tables_of(folders[:2], out))
        assert setting.values["privacy.delta"] == "1e-05"
        assert len(setting.runs) == 2


def test_a_report_does_not_join_the_report_of_another_run(folders, tmp_path):
    run, other, _ = folders
    (path,) = tables_of([run], tmp_path / "report")
    before = path.read_bytes()
    error = f"{path} is a table of other runs \\({run.name}\\); choose another --out, or delete"
    for paths in ([other], [other, other]):
        with pytest.raises(UserError, match=error):
            tables_of(paths, tmp_path / "report")
    assert path.read_bytes() == before
    tables_of([run], tmp_path / "report")  # its own report is written again
    tables_of([run, other], tmp_path / "report")  # the old row is part of the new table
    assert len(list(csv.DictReader(path.open(newline="")))) == 2
    assert tables_of([run]) == [run / "results.csv"]
    renamed = run.rename(run.with_name("renamed"))
    (own,) = tables_of([renamed])
    assert [row["key"] for row in csv.DictReader(own.open(newline=""))] == ["renamed"]


def test_predictions_are_those_of_the_last_round_or_none(run):
    facts = facts_of([run])
    kept = facts.predictions
    right = (kept.probabilities.argmax(1) == kept.labels).mean()
    assert right == facts.summary["accuracy"]["student"]
    assert 0.3 < kept.choosing.mean() < 0.7
    stored = run / "predictions.npz"
    arrays = dict(np.load(stored))
    np.savez(stored, **arrays | {"round": 2})  # as if killed between the file and the checkpoint
    assert facts_of([run]).predictions is None
    stored.write_bytes(b"PK not a zip file")
    with pytest.raises(UserError, match="predictions.npz is damaged"):
        facts_of([run])


def test_a_threshold_needs_one_run_of_two_classes(run, folders):
    for threshold in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="must be above 0 and below 1"):
            facts_of([run], threshold=threshold)
    with pytest.raises(UserError, match="needs the folder of a single run"):
        facts_of(folders, threshold=0.5)
    with pytest.raises(UserError, match="has no test predictions of two classes"):
        facts_of([run], threshold=0.5)
    two = dict(np.load(run / "predictions.npz"))
    two |= {"probabilities": two["probabilities"][:, :2], "labels": two["labels"] % 2}
    np.savez(run / "predictions.npz", **two)
    assert facts_of([run], threshold=0.5).threshold == 0.5


def test_a_rehearsal_is_known_from_its_own_run_folder(run, tmp_path, monkeypatch):
    assert not facts_of([run]).rehearsed
    monkeypatch.setenv("FED_DPSD_REHEARSAL", "1")
    folder = new_run_folder(from_overrides([*SMALL, f"run_folder={tmp_path}/new"], None))
    assert facts_of([folder]).rehearsed


def test_a_stopped_run_and_a_path_without_runs_are_errors(run, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="results.csv cannot be written .*; choose another folder"):
        tables_of([run], tmp_path / "file")
    (run / "summary.json").unlink()
    with pytest.raises(
        UserError, match="has not completed: it has done 1 of 1 round. It ended: its"
    ):
        tables_of([run])


# --- runs that have not completed ---


def test_a_run_without_its_versions_is_an_error_with_a_remedy(run, tmp_path):
    versions = run / "versions.json"
    for damage in (versions.unlink, lambda: versions.write_text("{")):
        damage()
        with pytest.raises(UserError, match=f"^{versions} is missing or damaged; .* write {{}}"):
            tables_of([run], tmp_path / "report")
    with pytest.raises(UserError, match=f"^{versions} is damaged; restore it"):
        facts_of([run])
    versions.write_text("{}")
    tables_of([run], tmp_path / "report")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The folder of a run of three rounds, stopped by Ctrl-C while it reported the first."""
    folder = tmp_path_factory.mktemp("interrupted") / "stopped"

    def stop(line):
        raise KeyboardInterrupt

    experiment = from_overrides((*SMALL, f"run_folder={folder}"), folder.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FED_DPSD_HOME", str(folder.parent))
        job = api.local_job(experiment, new_run_folder(experiment))
        with pytest.raises(KeyboardInterrupt):
            job.work(stop)
    return folder


@pytest.fixture
def stopped(interrupted, tmp_path):
    """A copy of the interrupted run's folder."""
    return shutil.copytree(interrupted, tmp_path / "runs" / "stopped")


def test_a_stopped_run_reports_its_progress_its_cost_and_how_to_continue(stopped):
    shown = check_structure(page(facts_of([stopped])))
    assert shown.text_of("h1").endswith("2 clients, not finished")
    lead = shown.text_of("p", class_="lead")
    assert lead.startswith(
        "This run is not finished: it has done 1 of 3 rounds. It ended: stopped by Ctrl-C. So far "
        "it has cost a client at most epsilon 641 (record, add_remove, trust nobody, delta 0)"
    )
    assert "What is charged stays charged" in page(facts_of([stopped]))
    commands = [each["text"] for each in shown.all("pre")]
    assert commands[0] == "fed-dpsd resume stopped"
    assert shown.rows("Bounds of this run")[0]["epsilon of the whole plan"] == "1,921"
    assert shown.rows("Bounds of this run")[0]["spent"] == "641"


def test_a_killed_run_has_the_same_page_without_a_word_on_why(stopped):
    table = check_structure(page(facts_of([stopped]))).rows("Each class")
    (stopped / "summary.json").unlink()  # as after kill -9, which writes none
    shown = check_structure(page(facts_of([stopped])))
    assert shown.rows("Each class") == table
    assert "It ended: its process was killed, or its machine stopped." in shown.text_of(
        "p", class_="lead"
    )


def test_a_charge_counts_before_its_round_is_done(stopped):
    """The log may lack a client's answer to the next request; the ledger has it."""
    (stopped / "summary.json").unlink()
    shutil.rmtree(stopped / "checkpoint")
    facts = facts_of([stopped])
    assert (facts.unfinished.done, facts.rounds, facts.summary["accuracy"]["student"]) == (
        0,
        [],
        None,
    )
    lead = check_structure(page(facts)).text_of("p", class_="lead")
    assert "it has done 0 of 3 rounds." in lead
    assert "has cost a client at most epsilon 641 (record, add_remove" in lead


def test_a_run_under_way_says_so(stopped):
    hold = "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.lockf(f, fcntl.LOCK_EX); "
    hold += "print('held', flush=True); input()"
    command = [sys.executable, "-c", hold, str(stopped / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        shown = check_structure(page(facts_of([stopped])))
        holder.communicate(b"\n")
    lead = shown.text_of("p", class_="lead")
    assert lead.startswith("This run is not finished: it is under way, and has done 1 of 3 rounds.")
    assert shown.all("pre")[0]["text"] == "fed-dpsd report stopped"
    assert facts_of([stopped]).unfinished.command == "fed-dpsd resume stopped"


def test_a_sweeps_unfinished_runs_are_found_in_its_folder(stopped, run):
    assert run.parent == stopped.parent
    (found,) = unfinished_nearby([stopped.parent])
    assert (found.name, found.done, found.error) == ("stopped", 1, "stopped by Ctrl-C")
    assert unfinished_nearby([stopped]) == []
    assert unfinished_nearby([stopped.parent / "results.csv"]) == []


@pytest.mark.slow(seconds=4)
def test_the_page_of_a_stopped_run_is_replaced_when_it_completes(stopped):
    path = pages.write_unfinished(facts_of([stopped]), stopped)
    assert "not finished" in path.read_text()
    api.resume(stopped, progress=False)
    completed = facts_of([stopped])
    assert completed.unfinished is None
    tables = tables_of([stopped])
    assert path in list(pages.write(read_settings(tables), tables, stopped, None, completed))
    assert "not finished" not in path.read_text()


# --- the facts of a run ---


def test_the_facts_are_those_of_the_folder(run):
    facts = facts_of([run])
    summary = json.loads((run / "summary.json").read_text())
    assert (facts.name, facts.summary) == (run.name, summary)
    assert sorted(facts.samples) == [1]
    assert sorted(facts.test_images) == list(range(10))
    assert facts.settings["queries_per_round"] == 64
    assert not any("/" in str(value) for value in facts.settings.values())
    assert facts.verdict[0].startswith("no meaningful protection at epsilon 641")
    assert facts.published.startswith("epsilon published (no guarantee): 10")


def test_what_each_client_has_spent_at_the_end_is_what_the_card_says(run):
    facts = facts_of([run])
    (row,) = (r for r in facts.card["proven"] if (r["unit"], r["relation"]) == RECORD)
    assert facts.spent[-1] == {0: row["spent"], 1: row["spent"]}
    assert facts.costs == facts.spent[-1]


def test_a_ledger_that_runs_share_is_read_for_each_client(tmp_path):
    shared = (*SMALL, "rounds=1", f"ledger={tmp_path}/ledger", f"out={tmp_path}/runs")
    api.run(*shared, progress=False)
    facts = facts_of([api.run(*shared, "method.student_steps=6", progress=False).folder])
    spent = next(row["spent"] for row in facts.card["proven"])
    assert spent > 0
    assert facts.ledgers.keys() == {0, 1}
    for text in facts.ledgers.values():
        assert float(text.rpartition(" ")[2].replace(",", "")) > 1.9 * spent  # of both runs


RECORD = ("record", "add_remove")


@pytest.mark.slow(seconds=5)
def test_every_kind_of_run_has_a_page(tmp_path):
    for overrides in (
        ("method=local",),
        ("method=fedavg", "teacher.same_start=true"),
        ("method=ensemble",),
        ("answers=probabilities",),
        ("method=dpsd", "evaluate_every=2"),
    ):
        given = [*small_for(overrides), "training=plain", *overrides]
        run = api.run(*given, "rounds=1", f"out={tmp_path}/runs", progress=False)
        shown = check_structure(page(facts_of([run.folder])))
        lead = shown.text_of("p", class_="lead")
        assert ("no student of its own" in lead) == (overrides[0] == "method=local"), overrides
        assert "None" not in " ".join(each["text"] for each in shown.all("main")), overrides


@pytest.mark.slow
@every("start", ["run", "sweep", "flower"])
def test_the_command_of_a_run_has_the_words_that_were_typed(tmp_path, start):
    given, out = ["model.teachers=[cnn, lenet]", "partition=iid"], f"out={tmp_path}/runs"
    if start == "run":
        experiments = [one_run([*given, out, "privacy.target_epsilon=1"], tmp_path)]
    elif start == "flower":
        words = " ".join([given[0].replace(" ", ""), given[1], out])
        experiments = [from_run_config({"overrides": words, "target_epsilon": 1})]
    else:  # a cell of each grid
        given += ["experiment=two_axes", "training=plain", "answers=label,gradient", "seed=1"]
        experiments = [cell.experiment for cell in plan(tmp_path, *given)]
        assert len(experiments) == 2
    for experiment in experiments:
        command = shlex.split(command_of(open_run_folder(new_run_folder(experiment))))
        assert command[:2] == ["fed-dpsd", "run"]
        assert "model.teachers=[cnn" in " ".join(command)
        assert str(tmp_path) not in " ".join(command)
        assert cell_key(one_run(command[2:], tmp_path)) == cell_key(experiment)


def test_a_command_names_no_path_and_only_experiments_of_ours(tmp_path):
    (tmp_path / "a").mkdir()
    given = ["data.path=a/b", "partition.path='a/c d.csv'", f"ledger={tmp_path}", "rounds=4"]
    experiment = dataclasses.replace(from_overrides(["rounds=4"], tmp_path), overrides=given)
    assert shlex.split(command_of(experiment))[2:] == [
        *("data.path=FOLDER", "partition.path=FILE", "rounds=4"),
    ]
    for unknown in (None, ["experiment=my_grid", "rounds=4"], ["model.student='my.net()'"]):
        assert command_of(dataclasses.replace(experiment, overrides=unknown)) == ""


def test_the_command_of_a_deployment_is_flowers(tmp_path):
    typed = ("federation=deployment", "num_clients=3", 'data.name="x"')
    *words, given = shlex.split(command_of(from_overrides(typed, tmp_path)))
    assert words == ["flwr", "run", "APP", "federation", "--stream", "--run-config"]
    assert given == "overrides=\"federation=deployment num_clients=3 data.name='x'\""


def test_a_run_is_resumed_without_the_words_that_were_typed(stopped):
    (stopped / "overrides.json").write_text("{")
    assert api.resume(stopped, progress=False).summary["status"] == "completed"
    assert facts_of([stopped]).command == ""


def test_the_settings_of_a_deployment_are_those_that_hospitals_use(deployed, small, tmp_path):
    """Hospitals have their own records and secret noise, whatever the coordinator's settings."""
    for make, noise in ((deployed, "secure"), (small, "seeded")):
        folder = new_run_folder(make(f"out={tmp_path}/{noise}"))
        settings = facts_of([folder]).settings
        assert settings["noise"] == noise
        shared = [key for key in settings if key.startswith("partition")]
        assert bool(shared) == (noise == "seeded")
