"""The texts of a run under way, in a pipe and on a terminal."""

import os
import pty
import subprocess
import sys

import pytest

from fed_dpsd.server.summary import round_text
from tests.conftest import SMALL

SPENT = {"unit": "record", "relation": "add_remove", "trust": "nobody", "delta": 1e-5}
SPENT |= {"notes": []}


def line(number, accuracy=None, agreement=None, **more):
    return {
        **{"round": number, "rounds": 5, "student_accuracy": accuracy, "agreement": agreement},
        **{"round_queries": 128, "answered_queries": 128 * number, "round_seconds": 1.0},
        **{"refused": {}, "spent": SPENT | {"epsilon": 0.5 * number}},
        **more,
    }


def test_a_line_says_accuracy_agreement_and_budget_with_its_meaning():
    assert round_text(line(2, 0.5, 0.25, refused={"1": "spent"})) == (
        "round 2/5 · student 50.0 % · agreement 25.0 % · epsilon 1 spent (record, add_remove) · "
        "128 queries · 1.0 s · without client 1"
    )
    note = "not reviewed: nothing is proven of what p does"
    plugin = round_text(line(2, spent=SPENT | {"epsilon": 1, "notes": [note]}))
    assert "epsilon 1 spent (record, add_remove, not reviewed)" in plugin
    old = {k: v for k, v in line(2).items() if k not in ("agreement", "spent")}
    assert round_text(old) == "round 2/5 · student not scored · 128 queries · 1.0 s"


COMMAND = (sys.executable, "-c", "import sys; from fed_dpsd import cli; cli.main()", "run", *SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_draws_on_a_terminal_and_writes_lines_into_a_pipe(tmp_path, terminal):
    ours, theirs = pty.openpty() if terminal else os.pipe()
    settings = {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    command = [*COMMAND, "method.final_student_steps=4000", f"out={tmp_path}"]
    with subprocess.Popen(
        command, stderr=theirs, stdout=subprocess.DEVNULL, env=os.environ | settings
    ) as process:
        os.close(theirs)
        text = b""
        while True:
            try:
                part = os.read(ours, 65_536)
            except OSError:  # a terminal whose other end is closed
                part = b""
            if not part:
                break
            text += part
    os.close(ours)
    assert not process.returncode
    said = text.decode()
    assert "epsilon 1,921 spent (record, add_remove)" in said.replace("1,920", "1,921")
    if terminal:
        assert "\x1b[" in said
        assert "of 3 rounds" in said
        assert "agreement" in said
    else:
        assert "\x1b" not in said
        assert "\r" not in said
        assert said.count("round 1/3 ·") == 1
