"""`fed-dpsd list` and `--version`, and what they must not import."""

import subprocess
import sys

import pytest

import fed_dpsd as package
from fed_dpsd.cli.catalogue import GROUPS, keys
from fed_dpsd.storage import conf_folder
from tests.conftest import composed

HEAVY = {"torch", "scipy", "matplotlib", "dp_accounting", "hydra", "flwr", "ray", "pyarrow", "PIL"}


def flat(tree, prefix=""):
    """Every key that has a value of its own, by its path."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}"


def test_every_choice_has_a_line(fed_dpsd):
    code, out, _ = fed_dpsd("list")
    assert code == 0
    for name, group in GROUPS.items():
        start = out.index(f"{name} ({group}=...):") + 1
        choices = sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))
        lines = out[start : start + len(choices)]
        assert [line.split()[0] for line in lines] == choices
        assert all(line.endswith(".") and len(line.split()) > 3 for line in lines)
    assert fed_dpsd("list", "methods")[1] == out[: len(choices_of("method")) + 1]


def choices_of(group):
    return list((conf_folder() / group).glob("*.yaml"))


def test_every_key_of_the_default_run_is_listed_once(fed_dpsd):
    listed = [key for key, _, _ in keys(conf_folder())]
    composed_keys = [key for key in flat(composed()) if key != "sweep"]
    assert sorted(listed) == sorted([*composed_keys, "device"])  # which stands for two others
    _, out, _ = fed_dpsd("list", "keys")
    assert "seed=0" in out
    assert "rounds=20" in out
    assert any(line.startswith("partition.alpha=0.5  # the smaller, the more") for line in out)
    assert "data.name=digits" in out  # what a file begins with is about the file


def test_the_version_is_the_packages(fed_dpsd):
    assert fed_dpsd("--version") == (0, [package.__version__], "")


def test_help_says_what_every_argument_is(fed_dpsd):
    """typer below 0.21, which Flower needs, loses these texts with click 8.5."""
    for command, text in (
        (["run"], "Hydra overrides, such as rounds=10"),
        (["predict"], "An exported .safetensors file."),
        (["privacy", "ledger"], "a folder of them, or a run folder."),
        (["site", "check"], "The site's file."),
    ):
        code, out, _ = fed_dpsd(*command, "--help")
        assert code == 0
        assert text in " ".join(" ".join(out).replace("│", " ").split())


def imported(command):
    """The modules that a command has imported when it ends."""
    program = (
        f"import sys; sys.argv = ['fed-dpsd', *{command.split()!r}]\n"
        "from fed_dpsd.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print('modules', *{m.partition('.')[0] for m in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *modules = done.stdout.splitlines()[-1].split()
    assert first == "modules"
    return set(modules)


@pytest.mark.parametrize(
    "command",
    ["--help", "--version", "list", "run --help", "bench --help", "privacy --help", "site --help"],
)
def test_a_command_that_only_tells_imports_nothing_heavy(command):
    assert HEAVY.isdisjoint(imported(command))


def test_a_plan_imports_no_more_than_it_needs():
    modules = imported("privacy plan")
    assert {"torch", "dp_accounting", "hydra"} <= modules  # the control
    unneeded = {"matplotlib", "flwr", "ray", "opacus", "torchvision", "sklearn", "datasets"}
    assert unneeded.isdisjoint(modules)
