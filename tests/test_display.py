"""The display of progress, on a console that is a terminal, a pipe or a notebook."""

from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from fed_dpsd.display import Bars, Lines, show_progress, time_left
from fed_dpsd.progress import has_listener, reporting, track


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def console(width=120, **kind):
    return Console(file=StringIO(), width=width, highlight=False, **kind)


def lines(out):
    return out.file.getvalue().splitlines()


# --- in a pipe ---


def test_a_pipe_gets_a_line_now_and_then(clock):
    out = console(force_terminal=False)
    with show_progress(out, clock):
        for _ in track("cells", range(60)):
            clock.now += 2
        for _ in track("steps", range(1_000)):  # quick work prints nothing
            clock.now += 0.009
    assert lines(out)[:3] == [
        "5 of 60 cells, about 2 min left",
        "10 of 60 cells, about 2 min left",
        "15 of 60 cells, about 2 min left",
    ]
    assert len(lines(out)) == 11  # one in ten seconds, and later one in a tenth of the time
    assert lines(out)[-1] == "56 of 60 cells, about 8 s left"


def test_a_pipe_gets_each_text_with_the_time_left_now_and_then_and_no_control_codes(clock):
    out = console(force_terminal=False)
    with show_progress(out, clock), reporting("rounds", 10, text="preparing") as rounds:
        for number in range(1, 11):
            clock.now += 6
            rounds.reach(number, 6.0 * number, f"round {number} [b]")
    assert lines(out)[:5] == [
        "round 1 [b]",
        "round 2 [b] · about 48 s left",
        "round 3 [b]",
        "round 4 [b] · about 36 s left",
        "round 5 [b]",
    ]
    assert len(lines(out)) == 10
    text = out.file.getvalue()
    assert not [letter for letter in text if ord(letter) < 32 and letter != "\n"]


def test_of_nested_work_the_outermost_with_a_known_end_is_printed(clock):
    out = console(force_terminal=False)
    with show_progress(out, clock), reporting("cells", 3, recent=1) as cells:
        for _ in range(3):
            for _ in track("teachers", range(4)):
                clock.now += 11
            cells.advance()
    assert lines(out) == [
        "1 of 4 teachers, about 33 s left",
        "2 of 4 teachers, about 22 s left",
        "3 of 4 teachers, about 11 s left",
        "1 of 3 cells, about 88 s left",
        "2 of 4 teachers, about 22 s left",  # since nothing was printed for long
        "2 of 3 cells, about 44 s left",
        "2 of 4 teachers, about 22 s left",
    ]


def test_a_long_last_part_is_not_silent(clock):
    """As the last round of a run, which trains its final student."""
    out = console(force_terminal=False)
    with show_progress(out, clock), reporting("rounds", 3, text="preparing") as rounds:
        for number in (1, 2):
            clock.now += 5
            rounds.reach(number, 5.0 * number, f"round {number}", after=60)
        for _ in track("steps of the student", range(600)):
            clock.now += 0.1
    assert [line for line in lines(out) if "steps of the student" in line] == [
        "200 of 600 steps of the student, about 40 s left",
        "400 of 600 steps of the student, about 20 s left",
    ]


def test_a_notebook_gets_lines_and_needs_no_widgets(clock, monkeypatch):
    monkeypatch.setattr("fed_dpsd.display.Live", None)
    out = console(force_jupyter=True, force_terminal=True)
    printed = []
    monkeypatch.setattr(out, "print", lambda line, **_: printed.append(line))
    with show_progress(out, clock):
        for _ in track("cells", range(3)):
            clock.now += 20
    assert printed == ["1 of 3 cells, about 40 s left", "2 of 3 cells, about 20 s left"]


# --- on a terminal ---


def picture(task, width=120):
    """A task's display as text, without the bars."""
    out = console(width, force_terminal=False)
    out.print(task._listener)
    return [" ".join(line.replace("━", "").replace("╸", "").split()) for line in lines(out)]


def test_a_terminal_has_a_bar_for_each_task_and_nothing_stays(clock):
    out = console(force_terminal=True)
    with show_progress(out, clock), reporting("cells", 27, recent=1) as cells:
        clock.now += 0.5
        assert "".join(picture(cells)) == ""  # quick work has no bar
        clock.now += 119.5
        cells.advance()
        with reporting("teachers", 5) as teachers:
            assert picture(cells) == ["1 of 27 cells 0:02:00 about 52 min left"]
            for _ in range(2):
                clock.now += 30
                teachers.advance()
            assert picture(cells) == [
                "1 of 27 cells 0:03:00 about 52 min left",
                "2 of 5 teachers 0:01:00 about 2 min left",
            ]
    assert out.file.getvalue().endswith("\x1b[2K")  # the last line is cleared


def test_the_last_text_stays_on_a_terminal_unless_nothing_was_done(clock):
    out = console(force_terminal=True)
    with show_progress(out, clock):
        with reporting("rounds", 2, text="preparing") as rounds:
            rounds.reach(1, 1.0, "round 1")
            rounds.reach(2, 2.0, "round 2")
        with reporting("rounds", 2, text="preparing"):  # a run that was already finished
            pass
    text = out.file.getvalue()
    assert "round 2\n" in text
    assert "round 1\n" not in text
    assert "preparing" not in text


def test_a_terminal_shows_a_tasks_text_below_its_bar(clock):
    with show_progress(console(force_terminal=True), clock), reporting("rounds", 20) as rounds:
        clock.now += 30
        rounds.reach(3, 30.0, "round 3/20 · student 85.1 % [b]")
        shown_now = picture(rounds)
        assert shown_now == ["3 of 20 rounds 0:00:30", "round 3/20 · student 85.1 % [b]"]


def test_a_display_inside_another_opens_none(clock):
    for terminal in (True, False):
        out = console(force_terminal=terminal)
        with show_progress(out, clock), reporting("cells", 2) as cells:
            with show_progress(out, clock), reporting("rounds", 2) as rounds:
                assert rounds._listener is cells._listener
                assert isinstance(cells._listener, Bars if terminal else Lines)
            assert has_listener()
        assert not has_listener()


def test_data_stay_on_stdout_below_a_bar(clock, capsys):
    """Otherwise a table that is piped into a file would be lost on the screen."""
    out = console(force_terminal=True)
    with show_progress(out, clock), reporting("faults", 2):
        print("number,seed")
    assert capsys.readouterr().out == "number,seed\n"
    assert "number,seed" not in out.file.getvalue()


def test_the_time_left_is_in_words():
    for seconds, words in (
        *((None, ""), (0.0, ""), (0.6, "about 1 s left"), (89.0, "about 89 s left")),
        *((90.0, "about 2 min left"), (14 * 60.0, "about 14 min left")),
        *((90 * 60.0, "about 1.5 h left"), (50 * 3_600.0, "about 50.0 h left")),
    ):
        assert time_left(SimpleNamespace(left=seconds)) == words
