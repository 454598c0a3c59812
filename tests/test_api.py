"""The public API: what a short script does with `import fed_dpsd`."""

import doctest
import inspect
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fed_dpsd
from fed_dpsd import api
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.experiment import one_run
from fed_dpsd.progress import listening
from fed_dpsd.server.run_folder import open_run_folder
from tests.conftest import SMALL, contents
from tests.every import every
from tests.forks import finished, fork
from tests.listeners import Hearing

HEAVY = ("torch", "numpy", "flwr", "hydra", "dp_accounting", "fed_dpsd.api")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: empty."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    return empty


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, to be read and never to be written to, and the lines of its progress."""
    lines = []
    out = tmp_path_factory.mktemp("api")
    return fed_dpsd.run(*SMALL, f"out={out}", progress=lines.append), lines


# --- names ---


def test_the_import_is_light_and_its_names_come_when_they_are_used():
    program = (
        "import sys, fed_dpsd\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
        "print(fed_dpsd.__version__, set(fed_dpsd.__all__) <= set(dir(fed_dpsd)))\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(fed_dpsd.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["[]", f"{fed_dpsd.__version__} True", "[]"]


def test_every_public_name_is_there_typed_and_documented():
    assert (Path(fed_dpsd.__file__).parent / "py.typed").is_file()
    for name in fed_dpsd.__all__:
        value = getattr(fed_dpsd, name)
        assert value is getattr(api, name)
        assert inspect.getdoc(value)
        functions = [value]
        if inspect.isclass(value):
            functions = [getattr(value, n) for n in vars(value) if not n.startswith("_")]
            functions = [function for function in functions if inspect.isfunction(function)]
        for function in functions:
            signature = inspect.signature(function)
            assert signature.return_annotation is not inspect.Signature.empty, name
            for parameter in signature.parameters.values():
                assert parameter.name == "self" or parameter.annotation is not parameter.empty
    with pytest.raises(AttributeError, match="module 'fed_dpsd' has no attribute 'train'"):
        fed_dpsd.train  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("module", [fed_dpsd, api], ids=lambda module: module.__name__)
def test_its_examples_say_what_happens(module, folder, monkeypatch):
    """With a student of few steps, which does not affect the printed results."""
    steps = ("method.student_steps=5", "method.final_student_steps=10", "threads_server=1")
    monkeypatch.setattr(api, "one_run", lambda typed, base: one_run([*steps, *typed], base))
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried >= 3


# --- run, resume, load_student, plan ---


def test_a_script_in_an_empty_folder_trains_and_predicts(folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import fed_dpsd, numpy as np\n"
        f"run = fed_dpsd.run(*{SMALL!r}, 'rounds=1', progress=False)\n"
        "print(run.folder)\n"
        "print(run.student.predict(np.zeros((3, 1, 8, 8), np.uint8)).shape)\n"
        "print(run)\n"
    )
    log = tmp_path / "log"
    assert finished(fork(lambda: runpy.run_path(str(script)), log, folder)) == 0, log.read_text()
    place, shape, result = log.read_text().splitlines()
    assert Path(place).parent == folder / "runs"
    assert shape == "(3, 10)"
    assert result.startswith("student ")
    assert [path.name for path in folder.iterdir()] == ["runs"]


def test_a_run_is_what_its_folder_holds(trained, tmp_path):
    run, _ = trained
    assert run.summary == json.loads((run.folder / "summary.json").read_text())
    assert run.summary["status"] == "completed"
    assert run.privacy.published == run.summary["privacy"]["epsilon_published"]
    assert run.privacy.epsilon("record", "replace_one").value == pytest.approx(1_920)
    with pytest.raises(UserError, match="^unit='records', .* must be one of: record, add_remove; "):
        run.privacy.epsilon("records", "add_remove")
    assert "proven 1,921 (record, add_remove), 1,921 (replace_one), trust nobody" in str(run)
    images = np.random.default_rng(0).integers(0, 256, (5, 1, 8, 8), dtype=np.uint8)
    predicted = run.student.predict(images)
    assert predicted.sum(axis=1) == pytest.approx(1, abs=1e-5)
    read = fed_dpsd.load_student(run.export(tmp_path / "model"))
    assert np.array_equal(read.predict(images), predicted)
    with pytest.raises(UserError, match="form='pickle' must be safetensors or onnx"):
        run.export(tmp_path / "other", "pickle")
    with pytest.raises(UserError):
        fed_dpsd.load_student(tmp_path / "none.safetensors")
    with pytest.raises(UserError, match=r"is a folder; give the file .*student.safetensors"):
        fed_dpsd.load_student(tmp_path / "model")
    for wrong in (images.tolist(), images / 255, images[0], images[:0], images[:, :, 1:]):
        with pytest.raises(UserError, match=r"give uint8 images, .* of shape \(B, 1, 8, 8\)"):
            read.predict(wrong)
    assert repr(read).startswith("Student(Network(architecture=")
    assert repr(run) == str(run)
    assert repr(run.privacy) == str(run.privacy)


def test_progress_is_reported_once_a_round(trained):
    run, lines = trained
    assert [line["round"] for line in lines] == [1, 2, 3]
    logged = (run.folder / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in logged] == json.loads(json.dumps(lines))


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_lines_where_there_is_no_terminal_or_nothing(folder, capsys, progress):
    fed_dpsd.run(*SMALL, "rounds=2", progress=progress)
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert len(lines) == (7 if progress else 0)
    if progress:
        (run_folder,) = (folder / "runs").iterdir()
        assert lines[0] == f"run folder: {run_folder}"
        assert lines[1].startswith(
            "data digits · method fed_dpsd · 2 clients, each with 1 teacher "
        )
        assert lines[2] == "data: 1,797 images found, 1,797 used"
        assert lines[3].startswith("privacy: published 10 (label) · planned ")
        assert [line.split(" · ")[0] for line in lines[4:6]] == ["round 1/2", "round 2/2"]
        assert "proven" in lines[6]


def test_a_run_reports_its_teachers_and_its_students_steps(folder):
    hearing = Hearing()
    with listening(hearing):
        fed_dpsd.run(*SMALL, "rounds=2", "teacher.min_steps=21", progress=False)
    assert [part for part in hearing.heard if part[0] == "teachers"] == [
        ("teachers", 1, 2),
        ("teachers", 2, 2),
    ]
    steps = [part[2] for part in hearing.heard if part[0] == "steps of the student"]
    assert steps == [5] * 5 + [10] * 10
    (log,) = (folder / "runs").glob("*/rounds.jsonl")
    assert all(json.loads(line)["student_seconds"] > 0 for line in log.read_text().splitlines())


def test_resuming_a_completed_run_touches_nothing(trained):
    run, _ = trained
    before = contents(run.folder)
    for given in (run.folder, str(run.folder), run):
        assert fed_dpsd.resume(given, progress=True).summary == run.summary
    assert fed_dpsd.Run(str(run.folder)) == run
    assert contents(run.folder) == before


def test_a_plan_spends_nothing_and_says_what_the_run_then_spends(trained, folder):
    plan = fed_dpsd.plan(*SMALL)
    assert plan.queries_per_client == 192
    assert plan.privacy.proven[0].value == trained[0].privacy.proven[0].value
    assert "queries per client: 192" in str(plan)
    assert not list(folder.iterdir())


def test_a_sweeps_results_are_those_of_its_own_runs(tmp_path):
    pytest.importorskip("pandas")
    table = tmp_path / "results.csv"
    table.write_text("key,student\nother,0.1\nfirst,0.2\nsecond,0.3\n")
    swept = api.Sweep(table, tuple(api.Run(tmp_path / name) for name in ("first", "second")))
    assert list(swept.results()["student"]) == [0.2, 0.3]
    assert list(swept.results().index) == [0, 1]


# --- errors ---


def test_a_failing_run_leaves_its_traceback_and_continues_later(folder, monkeypatch):
    def broken(*_):
        raise RuntimeError("something\nunforeseen")

    with monkeypatch.context() as patch:
        patch.setattr(api, "run_rounds", broken)
        with pytest.raises(UserError) as caught:
            fed_dpsd.run(*SMALL, "rounds=1", progress=False)
    (place,) = (folder / "runs").iterdir()
    said = f"RuntimeError: something unforeseen (traceback: {place}/error.log)"
    assert str(caught.value) == said
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "in broken" in (place / "error.log").read_text()
    assert fed_dpsd.resume(place, progress=False).summary["status"] == "completed"


@pytest.mark.slow
@every(
    ("overrides", "options", "expected"),
    [
        ((["rounds=2"],), {}, "give each override as a string"),
        ((), {"nodes": 2}, "nodes=2 needs engine=flower"),
        ((), {"engine": "flower", "nodes": 0}, "nodes=0 must be an integer >= 1"),
        ((), {"engine": "flower", "nodes": "2"}, "nodes='2' must be an integer"),
        ((), {"engine": "flowr"}, "engine=flowr must be local or flower"),
        (("num_clients=900",), {"engine": "flower"}, "num_clients=.* works here"),
        (("federation=deployment",), {}, "are hospitals, .*flwr run"),
        (
            ("training=plain", "answers=label", "answers.k=1"),
            {},
            "answers.k=1 must be between 2 and",
        ),
        (("trainng.steps=1",), {}, "did you mean training.steps"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(folder, overrides, options, expected):
    with pytest.raises(UserError, match=expected):
        fed_dpsd.run(*overrides, **options, progress=False)
    assert not list(folder.iterdir())


def test_errors_of_resume_and_plan_are_the_users(folder, trained):
    with pytest.raises(UserError, match=r"as a string, as in fed_dpsd.sweep\("):
        fed_dpsd.sweep(["seed=0,1"])
    with pytest.raises(UserError, match="^rounds=5: resume takes no settings; for a longer run"):
        fed_dpsd.resume(trained[0], "rounds=5")
    with pytest.raises(UserError, match="needs a run, a sweep or a path"):
        fed_dpsd.report()
    with pytest.raises(UserError, match="is a run folder; `fed-dpsd export .* writes its student"):
        fed_dpsd.load_student(trained[0])
    with pytest.raises(UserError, match="is not a run folder"):
        fed_dpsd.resume(folder)
    with pytest.raises(ConfigError, match="num_clients=0 must be >= 1"):
        fed_dpsd.plan("num_clients=0")


def test_a_folder_without_results_is_named_with_a_remedy(trained, folder):
    (folder / "begun").mkdir()
    shutil.copy(trained[0].folder / "config.yaml", folder / "begun")
    begun = fed_dpsd.Run(folder / "begun")
    remedy = "; `fed-dpsd resume begun` continues the run$"
    assert repr(begun) == f"{folder}/begun: no results"
    assert repr(begun) in begun._repr_html_()
    for use in (lambda: begun.summary, lambda: begun.privacy):
        with pytest.raises(UserError, match=f"^{folder}/begun has no summary.json{remedy}"):
            use()
    with pytest.raises(UserError, match=f"^{folder}/begun has no finished rounds{remedy}"):
        begun.history()
    (folder / "begun" / "summary.json").write_text('{"status": "failed", "privacy": null}')
    failed = fed_dpsd.Run(folder / "begun")
    assert repr(failed) == repr(begun)
    with pytest.raises(UserError, match=f"^{folder}/begun has no results{remedy}"):
        str(failed.privacy)
    nowhere = fed_dpsd.Run(folder / "nowhere")
    for use in (lambda: nowhere.summary, nowhere.history):
        with pytest.raises(UserError, match="nowhere is not a run folder .it does not exist"):
            use()


def test_a_completed_run_without_its_checkpoint_says_so_and_can_start_again(trained, folder):
    run = fed_dpsd.Run(shutil.copytree(trained[0].folder, folder / "run"))
    shutil.rmtree(run.folder / "checkpoint")
    missing = f"^{run.folder}/checkpoint, with the student, is missing or empty; .* delete "
    for use in (
        lambda: run.student,
        lambda: run.export(folder / "model"),
        lambda: fed_dpsd.resume(run.folder, progress=False),
    ):
        with pytest.raises(UserError, match=missing):
            use()
    (run.folder / "summary.json").unlink()
    again = fed_dpsd.resume(run.folder, progress=False)
    assert again.summary["student_sha256"] == trained[0].summary["student_sha256"]


def test_a_method_without_rounds_says_so(folder):
    settings = [each for each in SMALL if not each.startswith("method.")]
    run = fed_dpsd.run(*settings, "method=local", progress=False)
    with pytest.raises(UserError, match="method=local has no rounds"):
        run.history()
    assert fed_dpsd.resume(run.folder, progress=False).summary == run.summary


def test_an_empty_path_is_not_the_working_directory(trained, folder):
    run, _ = trained
    for name, use in {
        "folder": lambda: run.export(""),
        "path": lambda: run.synthesize(1, ""),
        "out": lambda: fed_dpsd.sweep("seed=0,1", out=""),
    }.items():
        with pytest.raises(UserError, match=f'^{name}="" is empty; give a path'):
            use()
    for use in (fed_dpsd.Run, fed_dpsd.resume, fed_dpsd.report, fed_dpsd.load_student):
        with pytest.raises(UserError, match='="" is empty; give a path'):
            use("")
    with pytest.raises(UserError, match='^out="" is empty'):
        fed_dpsd.report(run, out="")
    with pytest.raises(UserError, match="^against is empty; give an entry"):
        fed_dpsd.report(run, against="")
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_threads_that_wait_leave_their_core_unless_set_otherwise(given, expected):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": given} if given else {}
    program = (
        "import fed_dpsd, os, sys; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == [expected, "False"]


def test_the_flower_engine_reads_the_experiment_from_its_run_folder(folder):
    """Its process may have another working directory."""
    typed = ("out=my runs", "ledger=kept", "model.teachers=[cnn, mlp]")
    job = api.new_job(("training=plain", "model=cnn", *typed), "flower")
    assert open_run_folder(job.folder) == job.experiment


def test_a_plan_names_a_method_that_the_same_epsilon_covers():
    line = "the same epsilon covers method=weights_once, which sends weights once"
    for overrides in ((), ("rounds=2", "method.student_steps=5"), ("privacy.target_epsilon=1",)):
        assert str(fed_dpsd.plan(*overrides)).endswith(f"\n{line}")
    several = "model.teachers=[scattering,patches]", "num_clients=2"
    for overrides in (("training=plain",), several, ("method=weights_once",)):  # the control
        assert line not in str(fed_dpsd.plan(*overrides))
