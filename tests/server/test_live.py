"""The texts of a run under way: a line of a pipe, and the rows of a live display."""

import math
import sys

from fed_dpsd.privacy.epsilon import Epsilon
from fed_dpsd.server.summary import round_facts, round_text
from tests.conftest import SMALL

SPENT = {"unit": "record", "relation": "add_remove", "trust": "nobody", "delta": 1e-5}
SPENT |= {"notes": []}
PLANNED = Epsilon(2.98, 1e-5, "record", "add_remove", "nobody", "gdp_exact", 640)


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


def test_rows_show_the_way_of_the_run_and_the_whole_budget():
    lines = [line(1, 0.1, 0.0), line(2), line(3, 0.99, 1.0)]
    assert round_facts(lines, PLANNED) == {
        "student": "99.0 %  ▁█",
        "agreement": "100.0 %  ▁█",
        "budget": "epsilon 1.5 spent (record, add_remove), of 2.98 planned",
        "images": "384 answered",
    }
    assert round_facts(lines[:1], PLANNED)["student"] == "10.0 %"
    clear = line(1, spent=SPENT | {"epsilon": "inf"})
    whole = Epsilon(math.inf, 1e-5, "record", "add_remove", "nobody", "none", 640)
    text = "epsilon inf spent (record, add_remove), of inf planned"
    assert round_facts([clear], whole)["budget"] == text


COMMAND = (sys.executable, "-c", "import sys; from fed_dpsd import cli; cli.main()", "run", *SMALL)
