"""The texts of a run under way, in a pipe and on a terminal."""

from fed_dpsd.server.summary import round_text

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
    seeded = round_text(line(2, spent=SPENT | {"epsilon": 1, "notes": ["seeded noise"]}))
    assert "epsilon 1 spent (record, add_remove, seeded noise)" in seeded
    old = {k: v for k, v in line(2).items() if k not in ("agreement", "spent")}
    assert round_text(old) == "round 2/5 · student not scored · 128 queries · 1.0 s"
