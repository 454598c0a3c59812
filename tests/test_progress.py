"""Progress: bars on a terminal, lines in a pipe or a notebook, and nothing by default."""

import threading
from io import StringIO

import pytest

from fed_dpsd.progress import Display, PlainConsole, listening, reporting, show_progress, track
from tests.listeners import Hearing


class Clock:
    """Seconds, which a test advances."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def console(clock, **kind):
    return PlainConsole(file=StringIO(), width=120, get_time=clock, **kind)


def lines(out):
    return out.file.getvalue().splitlines()


# --- reports ---


def test_a_loop_reports_each_part_and_nothing_outside_a_display():
    assert list(track("things", "abc")) == ["a", "b", "c"]
    hearing = Hearing()
    with listening(hearing):
        assert list(track("things", "abc")) == ["a", "b", "c"]
        with listening(None):
            list(track("others", "abc"))
    list(track("things", "abc"))
    assert hearing.heard == [("things", 1, 3), ("things", 2, 3), ("things", 3, 3)]
    assert not hearing.tasks


def test_another_thread_reports_nothing():
    hearing = Hearing()
    with listening(hearing):
        thread = threading.Thread(target=lambda: list(track("things", "abc")))
        thread.start()
        thread.join()
    assert not hearing.heard


def test_an_error_ends_the_task():
    hearing = Hearing()
    with pytest.raises(ZeroDivisionError), listening(hearing), reporting("things", 3):
        1 / 0  # noqa: B018
    assert not any(task.visible for task in hearing.tasks)
    with listening(hearing):
        list(track("things", "abc"))
    assert not hearing.tasks


def test_a_loop_continues_one_of_its_name_and_length(clock):
    """As clients train their teachers in turn: a single teacher each still has a pace."""
    hearing, left = Hearing(clock), []
    with listening(hearing):
        for client in range(4):
            for _ in track("teachers", ["teacher"], done=client, total=4):
                left += [task.time_remaining for task in hearing.tasks]
                clock.now += 10
    assert left == [None, None, 20, 10]
    assert [done for _, done, _ in hearing.heard] == [1, 2, 3, 4]


# --- in a pipe or a notebook ---


def test_a_pipe_gets_a_line_now_and_then_with_the_time_left(clock):
    out = console(clock, force_terminal=False)
    with show_progress(out):
        for _ in track("cells", range(60)):
            clock.now += 2
    assert lines(out)[:2] == [
        "5 of 60 cells, about 0:01:50 left",
        "10 of 60 cells, about 0:01:40 left",
    ]
    assert len(lines(out)) == 11  # one in ten seconds, and later one in a tenth of the time


def test_a_pipe_gets_each_text_unchanged(clock):
    out = console(clock, force_terminal=False)
    with show_progress(out), reporting("rounds", 3) as rounds:
        for number in range(1, 4):
            clock.now += 1
            rounds.advance(text=f"round {number} [b]")
    assert out.file.getvalue() == "round 1 [b]\nround 2 [b]\nround 3 [b]\n"


def test_a_line_names_all_work_under_way(clock):
    """So a long last part is not silent, such as a run's last round."""
    out = console(clock, force_terminal=False)
    with show_progress(out), reporting("rounds", 3) as rounds:
        for _ in range(2):
            clock.now += 5
            rounds.advance(text="a round")
        for _ in track("steps of the student", range(20)):
            clock.now += 1
    assert lines(out)[2:] == [
        "2 of 3 rounds, 10 of 20 steps of the student, about 0:00:10 left for the steps of the "
        "student",  # five seconds would be left if the last round took as long as the others
        "2 of 3 rounds, 20 of 20 steps of the student, about 0:00:05 left for the rounds",
    ]


def test_a_notebook_gets_lines_and_needs_no_widgets(clock, monkeypatch):
    out, printed = console(clock, force_jupyter=True, force_terminal=True), []
    monkeypatch.setattr(out, "print", lambda line, **_: printed.append(line))
    with show_progress(out):
        for _ in track("cells", range(3)):
            clock.now += 20
    assert printed == ["1 of 3 cells", "2 of 3 cells, about 0:00:20 left", "3 of 3 cells"]


# --- on a terminal ---


def test_a_terminal_has_a_bar_for_each_task_and_only_texts_stay(clock):
    out = console(clock, force_terminal=True)

    def bars():
        seen = console(clock, force_terminal=False)
        (table,) = display.get_renderables()
        seen.print(table)
        return [" ".join(line.replace("━", "").replace("╸", "").split()) for line in lines(seen)]

    with Display(out) as display, listening(display), reporting("rounds", 20) as rounds:
        clock.now += 0.5
        assert not "".join(bars())  # quick work has no bar
        for number in (1, 2):
            clock.now += 30
            rounds.advance(text=f"round {number} [b]")
        with reporting("teachers", 5) as teachers:
            clock.now += 60
            teachers.advance(2)
            assert bars() == [
                "2 of 20 rounds 0:02:00 0:09:00",
                "2 of 5 teachers 0:01:00 -:--:--",
            ]
    text = out.file.getvalue()
    assert text.count("round 1 [b]\n") == text.count("round 2 [b]\n") == 1
    assert "\x1b[2K" in text.rpartition("━")[2]  # the last bar is cleared


@pytest.mark.parametrize("terminal", [True, False])
def test_a_display_inside_another_opens_none(clock, terminal):
    out, inner = (console(clock, force_terminal=terminal) for _ in range(2))
    with show_progress(out), show_progress(inner), reporting("rounds", 2) as rounds:
        rounds.advance(text="round 1")
    assert "round 1" in out.file.getvalue()
    assert not inner.file.getvalue()


def test_data_stay_on_stdout_below_a_bar(clock, capsys):
    """Otherwise a table that is piped into a file would be lost on the screen."""
    out = console(clock, force_terminal=True)
    with show_progress(out), reporting("faults", 2):
        print("number,seed")
    assert capsys.readouterr().out == "number,seed\n"
    assert "number,seed" not in out.file.getvalue()
