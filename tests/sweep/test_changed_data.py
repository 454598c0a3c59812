"""A finished cell is finished only for the same data; results on other data are kept apart."""

import hashlib
import json
import shutil

import pytest

from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.experiment import from_overrides
from fed_dpsd.models import write_weights
from fed_dpsd.server import run_folder
from fed_dpsd.storage import write_json
from fed_dpsd.sweep import sweep as sweeps
from fed_dpsd.sweep.reported import settings_in, write_report
from tests.conftest import SMALL
from tests.report.runs import leave_figures_empty
from tests.server.test_inputs import DATA, add_to_test, folders, relabel, touch
from tests.sweep.test_sweep import TINY, at_once, rows


@pytest.fixture
def sweep(tmp_path):
    """Sweeps over seeds on the data at a path; returns the folders that ran, and what was said."""

    def run(place, *overrides):
        said, ran = [], []

        def work(experiment, folder):
            ran.append(folder.name)
            at_once(experiment, folder)
            summary = json.loads((folder / "summary.json").read_text())
            digest = hashlib.sha256(folder.name.encode()).hexdigest()
            write_json(folder / "summary.json", summary | {"student_sha256": digest})

        data = (*DATA, f"data.path={place}", f"cache={tmp_path}/cache")
        cells = sweeps.plan((*TINY, *data, *overrides), tmp_path / "out", tmp_path, said.append)
        assert not sweeps.run(cells, work, tmp_path / "out" / "results.csv", said.append)
        return ran, said

    return run


def finished(said):
    return [line for line in said if line.startswith("already finished")]


@pytest.mark.slow
def test_a_cell_runs_again_on_other_data_and_keeps_its_results(sweep, tmp_path):
    place, table = folders(tmp_path / "D"), tmp_path / "out" / "results.csv"
    first, said = sweep(place, "seed=0,1")
    assert len(first) == 2
    assert not [line for line in said if "new run" in line]
    touch(place)
    copy = shutil.copytree(place, tmp_path / "copy")
    for same in (place, copy):  # the control
        ran, said = sweep(same, "seed=0,1")
        assert not ran
        assert len(finished(said)) == 2
    relabel(place)
    second, said = sweep(place, "seed=0,1")
    assert second == [f"{name}-2" for name in first]
    for seed, line in enumerate(said[:2]):
        expected = f"seed={seed} is a new run: {first[seed]} read other training labels, and keeps"
        assert line.startswith(expected)
    assert [row["key"] for row in rows(table)] == [*first, *second]
    assert len({row["data_sha256"] for row in rows(table)}) == 2
    for again in (place, copy):  # both are finished
        assert not sweep(again, "seed=0,1")[0]
    add_to_test(place)
    third, said = sweep(place, "seed=0")
    assert third == [f"{first[0]}-3"]
    assert "read other test images, test labels, and keeps" in said[0]


def test_paths_with_other_data_are_cells_of_their_own_in_one_sweep(sweep, tmp_path):
    place = folders(tmp_path / "D")
    same, other = (shutil.copytree(place, tmp_path / name) for name in ("same", "other"))
    relabel(other)
    ran, said = sweep(f"{place},{same},{other}")
    assert len(ran) == 2
    twice = f"data.path={same} has the same configuration as data.path={place}: one run for both"
    assert said[0] == twice
    assert not sweep(f"{place},{other}")[0]


@pytest.mark.slow
def test_a_teachers_file_with_other_weights_is_another_cell(sweep, tmp_path):
    place, weights = folders(tmp_path / "D"), tmp_path / "teacher.safetensors"
    table = tmp_path / "out" / "results.csv"
    own = ("training=plain", "answers=label", f"teacher.path={weights}", "teacher.arch=cnn")
    plain = from_overrides([*SMALL, *DATA, f"data.path={place}", "model.teacher=cnn"], tmp_path)
    for client, changes in ((0, ""), (1, "read other teacher.path, and keeps its results")):
        write_weights(make_teacher(plain.config, client, 0), weights)
        ran, said = sweep(place, *own)
        assert len(ran) == 1
        assert changes in said[0]
        assert not sweep(place, *own)[0]
    files = [setting.values["file contents"] for setting in settings_in([table])]
    assert files == ["1", "2"]


def test_an_unfinished_cell_is_resumed_on_the_same_data_alone(sweep, tmp_path):
    place = folders(tmp_path / "D")
    (name,), _ = sweep(place)
    (tmp_path / "out" / name / "summary.json").unlink()
    assert sweep(place)[0] == [name]
    (tmp_path / "out" / name / "summary.json").unlink()
    relabel(place)
    assert sweep(place)[0] == [f"{name}-2"]


def test_a_run_that_does_not_say_what_it_read_is_not_reused(sweep, tmp_path):
    place = folders(tmp_path / "D")
    (name,), _ = sweep(place)
    (tmp_path / "out" / name / "inputs.json").unlink()
    ran, said = sweep(place)
    assert ran == [f"{name}-2"]
    assert f"{name} has no inputs.json, which says what it read, and keeps its results" in said[0]


def test_with_secret_noise_other_data_is_said_and_no_digest_is_in_the_table(sweep, tmp_path):
    place, table = folders(tmp_path / "D"), tmp_path / "out" / "results.csv"
    (name,), _ = sweep(place, "noise=secure")
    assert not sweep(place, "noise=secure")[0]
    relabel(place)
    (other,), _ = sweep(place, "noise=secure")
    assert {row["data_sha256"] for row in rows(table)} == {""}
    settings = settings_in([table])  # from the runs' own digests
    assert [setting.values["data contents"] for setting in settings] == ["1", "2"]
    assert {setting.runs[0]["key"] for setting in settings} == {name, other}


def test_other_versions_of_a_finished_run_are_said_and_it_is_not_run_again(sweep, tmp_path):
    place = folders(tmp_path / "D")
    (name,), _ = sweep(place)
    versions = tmp_path / "out" / name / "versions.json"
    known = json.loads(versions.read_text())
    write_json(versions, known | {"torch": "1.0", "commit": None})
    ran, said = sweep(place)
    assert not ran
    now = run_folder.versions()
    changed = f"commit unknown (now {now['commit']}), torch 1.0 (now {now['torch']})"
    assert finished(said) == [f"already finished: the only cell, with {changed}"]
    write_json(versions, known)
    assert finished(sweep(place)[1]) == ["already finished: the only cell"]


# --- reports ---


@pytest.mark.slow
def test_a_report_says_which_runs_read_other_data_and_keeps_them_apart(
    sweep, tmp_path, monkeypatch
):
    leave_figures_empty(monkeypatch)
    place, out = folders(tmp_path / "D"), tmp_path / "out"
    first, _ = sweep(place, "seed=0,1")
    said = []
    assert "other contents" not in write(out, said).read_text()
    assert len(settings_in([out / "results.csv"])) == 1
    relabel(place)
    second, _ = sweep(place, "seed=0,1")
    shutil.copy(out / "results.csv", tmp_path / "alone.csv")  # without the runs' folders
    for table in (out, tmp_path / "alone.csv"):
        said.clear()
        page = write(table, said).read_text()
        assert [line.partition("contents: ")[2] for line in said] == [
            f"data=imagefolder, data contents=1: {', '.join(first)}",
            f"data=imagefolder, data contents=2: {', '.join(second)}",
        ]
        assert "Runs that read other contents under the same name are separate settings" in page
        assert "data contents=2" in page


def write(path, said):
    """The page of a report."""
    return [*write_report([path], say=said.append)][-1]
