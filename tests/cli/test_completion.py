"""Completion: the shells' protocols, and a real bash and zsh on a terminal."""

import os
import pty
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_command

from fed_dpsd.cli import app, completion
from fed_dpsd.config import keys
from tests.cli.test_catalogue import HEAVY, imported

WORDS = [
    ("resu", ["resume"]),
    ("run rou", ["rounds="]),
    ("run meth", ["method=", "method."]),
    ("run method=fed_", ["method=fed_dpsd"]),
    ("run method=dense method.generator_s", ["method.generator_steps="]),
    ("run data=mnist privacy.bud", ["privacy.budget=", "privacy.budget_relation="]),
    ("run experiment=two", ["experiment=two_axes"]),
    ("run model.student=resnet1", ["model.student=resnet18"]),
    ("run noise=", ["noise=seeded", "noise=secure"]),  # the schema's
    ("run answers.noise_at=", ["answers.noise_at=client", "answers.noise_at=distributed"]),
    ("run partition.self_balancing=t", ["partition.self_balancing=true"]),
    ("sweep seed=0,1 answers=label,vo", ["answers=label,votes"]),
    ("privacy plan training=dp", [f"training=dp_{name}" for name in ("gan", "merf", "sgd")]),
    ("list ke", ["keys"]),
    ("list keys method=dgd_", ["method=dgd_plus"]),
    ("run --eng", ["--engine"]),
    ("run --engine fl", ["flower"]),
    ("run nothing_begins_so", [""]),
]


@pytest.fixture
def complete(monkeypatch, capsys):
    """Call a shell's protocol in this process; returns the lines that it prints."""

    def call(protocol, **environment):
        for name, value in (environment | {"_FED_DPSD_COMPLETE": protocol}).items():
            monkeypatch.setenv(name, value)
        command = get_command(app)
        completion.register()  # as main does, after typer's own
        with pytest.raises(SystemExit) as stop:
            command.main(prog_name="fed-dpsd")
        output = capsys.readouterr()
        assert (stop.value.code or 0, output.err) == (0, "")
        return output.out.splitlines()

    return call


@pytest.fixture
def bash(complete):
    def call(typed):
        return complete("complete_bash", COMP_LINE=f"fed-dpsd {typed}")

    return call


def test_bash_gets_what_can_follow(bash):
    found = {typed: bash(typed) for typed, _ in WORDS}
    assert found == dict(WORDS)


def test_every_group_and_section_is_offered_before_a_letter_is_typed(bash):
    offered = bash("run ")
    assert {f"{group}=" for group in keys.groups()} <= set(offered)
    assert {"rounds=", "privacy.", "method."} <= set(offered)
    assert len(offered) < 50


def test_zsh_gets_a_line_on_each_choice(complete):
    for typed, lines in {
        "fed-dpsd run seed=1 method=fed_": [
            f"method=fed_dpsd:{keys.choices('method')['fed_dpsd']}"
        ],
        "fed-dpsd run privacy.del": ["privacy.delta=:1.0e-5 delta of every guarantee"],
        "fed-dpsd run data.path=x": [""],  # files are meant
    }.items():
        assert complete("complete_zsh", _TYPER_COMPLETE_ARGS=typed) == lines, typed


def test_completion_imports_nothing_heavy():
    typed = {"_FED_DPSD_COMPLETE": "complete_bash", "COMP_LINE": "fed-dpsd run method=fed_"}
    modules = imported("", **typed)
    assert "fed_dpsd" in modules  # the control
    assert HEAVY.isdisjoint(modules)


# The program that a real shell completes and runs; it records what was typed.
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
        """Type, and wait for the shell's response."""
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
