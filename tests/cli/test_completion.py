"""Completion: the shells' protocols, and a real bash and zsh on a terminal."""

import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_command

from fed_dpsd.cli import app
from fed_dpsd.config.plugins import files_of
from tests.cli.test_catalogue import HEAVY, imported

WORDS = [
    ("resu", ["resume"]),
    ("run rou", ["rounds=", "rounds=VALUE"]),  # a single word would get a blank
    ("run data.path=", [""]),  # the shell completes a file
    ("run rounds=3 method=fed_", ["fed_dpsd"]),
    ("run answers=", list(files_of("answers"))),
    ("run experiment=two", ["two_axes"]),
    ("run privacy.targ", ["privacy.target_epsilon=", "privacy.target_epsilon=VALUE"]),
    ("run --eng", ["--engine"]),
    ("run --engine fl", ["flower"]),
    ("privacy plan method=paper_fed", ["paper_fed_dpsd"]),
    ("list keys method=dgd_", ["dgd_plus"]),
    ("run nothing_begins_so", [""]),
]


@pytest.fixture
def complete(monkeypatch, capsys):
    """Call a shell's protocol in this process; returns the lines that it prints."""

    def call(protocol, **environment):
        for name, value in (environment | {"_FED_DPSD_COMPLETE": protocol}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as stop:
            get_command(app).main(prog_name="fed-dpsd")
        output = capsys.readouterr()
        assert (stop.value.code or 0, output.err) == (0, "")
        return output.out.splitlines()

    return call


@pytest.mark.parametrize(("typed", "offered"), WORDS)
def test_bash_completes_what_stands_after_the_last_equals_sign(complete, typed, offered):
    words = re.findall(r"=|[^ =]+", f"fed-dpsd {typed}")
    line = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    assert complete("complete_bash", **line) == offered


def test_other_shells_complete_whole_overrides(complete):
    begun = {"_TYPER_COMPLETE_ARGS": "fed-dpsd run seed=1 method=fed_"}
    line, *_ = complete("complete_fish", _TYPER_COMPLETE_FISH_ACTION="get-args", **begun)
    assert line.startswith("method=fed_dpsd\tFedDPSD ")


def test_completion_imports_nothing_heavy():
    words = {"COMP_WORDS": "fed-dpsd run rou", "COMP_CWORD": "2"}
    modules = imported("", _FED_DPSD_COMPLETE="complete_bash", **words)
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
        enter("fed-dpsd run meth\t", "method=")
        enter("dens\t", "dense ")  # a whole choice, then a blank
        enter("roun\t", "rounds=")  # a key, then none
        enter("3 teacher.ep\t", "epochs=")
        enter("4; echo do''ne\n", "done")
        assert typed.read_text() == "run method=dense rounds=3 teacher.epochs=4"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
