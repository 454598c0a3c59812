"""Completion as shells ask for it: their protocols, and a real bash and zsh on a terminal."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fed_dpsd.config import keys
from tests.cli.test_catalogue import HEAVY

SCRIPT = "import sys; sys.argv[0] = 'fed-dpsd'; from fed_dpsd.cli import main; main()"


def request(protocol, program=SCRIPT, **environment):
    given = os.environ | environment | {"_FED_DPSD_COMPLETE": protocol}
    done = subprocess.run(
        [sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


def bash(*words):
    return request(
        "complete_bash",
        COMP_WORDS="\n".join(("fed-dpsd", *words)),
        COMP_CWORD=str(len(words)),
    )


def zsh(line):
    given = os.environ | {"_TYPER_COMPLETE_ARGS": line, "_FED_DPSD_COMPLETE": "complete_zsh"}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=given, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("resu",), ["resume"]),
        (("run", "rou"), ["rounds="]),
        (("run", "meth"), ["method=", "method."]),
        (("run", "method", "=", "fed_"), ["fed_dpsd"]),  # as bash splits words
        (("run", "method=fed_"), ["method=fed_dpsd"]),  # where COMP_WORDBREAKS has no =
        (("run", "method", "=", "dense", "method.generator_s"), ["method.generator_steps="]),
        (
            ("run", "data", "=", "mnist", "privacy.bud"),
            ["privacy.budget=", "privacy.budget_relation="],
        ),
        (("run", "experiment", "=", "two"), ["two_axes"]),
        (("run", "model.student", "=", "resnet1"), ["resnet18"]),
        (("run", "answers.noise_at", "="), ["client", "distributed"]),
        (("run", "partition.self_balancing", "=", "t"), ["true"]),
        (("sweep", "seed", "=", "0,1", "answers", "=", "label,vo"), ["label,votes"]),
        (("privacy", "plan", "training", "=", "dp"), ["dp_sgd"]),
        (("list", "ke"), ["keys"]),
        (("list", "keys", "method", "=", "dgd_"), ["dgd_plus"]),
        (("run", "--eng"), ["--engine"]),
        (("run", "--engine", "fl"), ["flower"]),
        (("run", "nothing_begins_so"), []),
    ],
)
def test_bash_is_told_what_can_follow(words, expected):
    assert bash(*words) == expected


def test_every_group_and_section_is_offered_before_a_letter_is_typed():
    offered = bash("run", "")
    assert {f"{group}=" for group in keys.groups()} <= set(offered)
    assert {"rounds=", "privacy.", "method."} <= set(offered)
    assert len(offered) < 50


def test_zsh_is_told_a_line_on_each_choice():
    (line,) = zsh("fed-dpsd run seed=1 method=fed_")
    assert line == f"method=fed_dpsd:{keys.choices('method')['fed_dpsd']}"
    assert zsh("fed-dpsd run privacy.del") == ["privacy.delta=:1.0e-5"]
    assert zsh("fed-dpsd run data.path=x") == [""]  # files are meant


def test_completion_imports_nothing_heavy():
    program = (
        f"{SCRIPT.replace('; main()', '')}\ntry:\n    main()\nfinally:\n    print(*sys.modules)"
    )
    words = {"COMP_WORDS": "fed-dpsd\nrun\nmethod\n=\nfed_", "COMP_CWORD": "4"}
    modules = {module.partition(".")[0] for module in request("complete_bash", program, **words)}
    assert "fed_dpsd" in modules  # the control
    assert HEAVY.isdisjoint(modules)


# The program that a real shell completes, and runs: it then writes down what was typed.
PROGRAM = """#!{python}
import os, sys
if "_FED_DPSD_COMPLETE" in os.environ:
    sys.argv[0] = "fed-dpsd"
    from fed_dpsd.cli import main
    main()
open({typed!r}, "w").write(" ".join(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "options", "begin"),
    [
        ("bash", ("--norc", "--noprofile", "-i"), ""),
        ("zsh", ("-f", "-i"), "autoload -U compinit; compinit -u -d ./dump; "),
    ],
)
def test_a_real_shell_completes_keys_and_choices(tmp_path, shell, options, begin):
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    typed = tmp_path / "typed"
    program = tmp_path / "fed-dpsd"
    program.write_text(PROGRAM.format(python=sys.executable, typed=str(typed)))
    program.chmod(0o755)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        root = str(Path(__file__).parents[2])
        given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "dumb", "PYTHONPATH": root}
        os.execve(path, [shell, *options], os.environ | given)
    seen = ""

    def enter(keys, echo):
        """Type, and wait for what the shell shows after it."""
        nonlocal seen
        seen, end = "", time.monotonic() + 60
        os.write(terminal, keys.encode())
        while echo not in seen and time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 4096).decode(errors="replace").replace("\a", "")
        assert echo in seen

    try:
        script = f'{begin}eval "$(_FED_DPSD_COMPLETE=source_{shell} fed-dpsd)"; echo swit""ched\n'
        enter(script, "switched")
        enter("fed-dpsd run meth\t", "method")
        enter("=dens\t", "dense ")  # a whole choice, then a blank
        enter("roun\t", "rounds=")  # a key, then none
        enter("3 method.generator_st\t", "generator_steps=")
        enter("4; echo do''ne\n", "done")
        assert typed.read_text() == "run method=dense rounds=3 method.generator_steps=4"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
