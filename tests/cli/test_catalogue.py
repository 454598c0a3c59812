"""`fed-dpsd list` and `--version`, and what they must not import."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from PIL import Image

import fed_dpsd as package
from fed_dpsd.cli.catalogue import GROUPS
from fed_dpsd.config import leaves
from fed_dpsd.experiment import from_overrides
from fed_dpsd.storage import conf_folder
from tests.conftest import composed

HEAVY = {"torch", "scipy", "matplotlib", "dp_accounting", "hydra", "flwr", "ray", "pyarrow", "PIL"}


def test_every_choice_has_a_line(fed_dpsd):
    code, out, _ = fed_dpsd("list")
    assert code == 0
    for name, group in GROUPS.items():
        start = out.index(f"{name} ({group}=...):") + 1
        choices = sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))
        lines = out[start : start + len(choices)]
        assert [line.split()[0] for line in lines] == choices
    assert fed_dpsd("list", "methods")[1] == out[: len(choices_of("method")) + 1]


def choices_of(group):
    return list((conf_folder() / group).glob("*.yaml"))


def test_every_key_of_the_default_run_is_listed_once(fed_dpsd):
    _, out, _ = fed_dpsd("list", "keys")
    keys = [key for key, _ in leaves(composed()) if not key.endswith("_target_")]
    assert sorted(line.partition("=")[0] for line in out) == sorted([*keys, "device"])
    assert any(line.startswith("seed=0") for line in out)
    assert any(line.startswith("rounds=20") for line in out)
    assert any(line.startswith("teacher.seed=${seed}") for line in out)
    assert any(line.startswith("partition.alpha=0.5  # ") for line in out)  # a file's comment
    assert "privacy.delta=1e-05  # delta of every guarantee" in out  # the schema's


def test_keys_of_chosen_groups_are_listed_with_what_is_typed(fed_dpsd):
    code, out, _ = fed_dpsd("list", "keys", "method=dense", "rounds=3")
    assert code == 0
    assert any(line.startswith("method.generator_steps=30") for line in out)
    assert any(line.startswith("rounds=3 ") for line in out)
    assert not any(line.startswith("method.student_steps=") for line in out)


def test_keys_have_the_comments_of_their_own_files(fed_dpsd):
    """Of a file, of the file that it builds on, and of a choice within another's group."""
    typed = ("method=fedprox", "model=patches")
    _, out, _ = fed_dpsd("list", "keys", *typed)
    assert any(line.startswith("method.proximal_weight=0.1  # mu of") for line in out)
    assert any(line.startswith("method.local_epochs=1  # E of the paper") for line in out)
    within = "training@method.baseline=dp_sgd"
    _, out, _ = fed_dpsd("list", "keys", "method=dgd", within)
    assert any(line.startswith("method.baseline.steps=100") for line in out)
    assert any(line.startswith("method.baseline.copies=1  # versions of each") for line in out)
    assert not any("method.baseline.copies" in line for line in fed_dpsd("list", "keys")[1])


def test_architectures_are_listed(fed_dpsd):
    from fed_dpsd.models.classifiers import CLASSIFIERS

    _, out, _ = fed_dpsd("list", "models")
    assert f"  {', '.join(CLASSIFIERS)}" in out


def test_the_version_is_the_packages(fed_dpsd):
    assert fed_dpsd("--version") == (0, [package.__version__], "")


def test_help_says_what_every_argument_is(fed_dpsd):
    """With click 8.5, typer below 0.21, which Flower needs, loses these texts."""
    for command, text in (
        (["run"], "Settings as KEY=VALUE, such as rounds=10"),
        (["predict"], "File written by `fed-dpsd export`, .safetensors or .onnx."),
        (["privacy", "ledger"], "a folder of ledgers, or a run folder."),
        (["site", "check"], "The hospital's file, as"),
    ):
        code, out, _ = fed_dpsd(*command, "--help")
        assert code == 0
        assert text in " ".join(" ".join(out).replace("│", " ").split())


def imported(command, **environment):
    """The modules that a command has imported when it ends."""
    program = (
        f"import sys; sys.argv = ['fed-dpsd', *{command.split()!r}]\n"
        "from fed_dpsd.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print('modules', *{m.partition('.')[0] for m in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, *modules = done.stdout.splitlines()[-1].split()
    assert first == "modules"
    return set(modules)


@pytest.mark.slow(seconds=5)
def test_commands_that_only_print_import_nothing_heavy():
    assert HEAVY.isdisjoint(imported("--help"))
    assert HEAVY.isdisjoint(imported("list methods"))
    assert HEAVY - {"hydra"} == HEAVY - imported("list keys")


@pytest.mark.slow
def test_a_plan_a_run_and_a_prediction_import_no_more_than_they_need(tmp_path):
    unneeded = {"matplotlib", "flwr", "ray", "opacus", "sklearn", "torchmetrics"}
    modules = imported("privacy plan")
    assert {"torch", "dp_accounting", "hydra"} <= modules  # the control
    assert (unneeded | {"torchvision", "datasets"}).isdisjoint(modules)
    small = "rounds=1 num_clients=1 method.final_student_steps=1"  # one client: no partitioner
    run, model = tmp_path / "run", tmp_path / "model"
    assert {"flwr", "ray", "opacus"}.isdisjoint(
        imported(f"run {small} run_folder={run} cache={tmp_path}")
    )
    imported(f"export {run} --out {model}")
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    predicted = imported(f"predict {model}/student.safetensors {tmp_path}/image.png")
    assert "torch" in predicted
    assert (unneeded | {"dp_accounting", "scipy", "pandas"}).isdisjoint(predicted)


def test_the_configuration_is_shown_as_the_run_would_store_it(fed_dpsd, tmp_path):
    code, out, _ = fed_dpsd("run", "data=mnist", "rounds=3", "--show-config")
    assert code == 0
    experiment = from_overrides(["data=mnist", "rounds=3"], tmp_path)
    assert yaml.safe_load("\n".join(out)) == json.loads(experiment.to_json())
    assert not list(tmp_path.iterdir())
