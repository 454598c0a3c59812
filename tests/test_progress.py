"""Progress reporting: the estimate of the time left, and reports to listeners."""

import threading

import pytest

from fed_dpsd.progress import has_listener, listening, reporting, seconds_left, track
from tests.listeners import Hearing


def samples(costs):
    """The samples after parts that took these seconds."""
    known = [(0.0, 0)]
    for cost in costs:
        known.append((known[-1][0] + cost, len(known)))
    return known


# --- the estimate ---

COSTS = {
    "linear": lambda n: [3.0] * n,
    "slow start": lambda n: [100.0] + [1.0] * (n - 1),
    "slow first tenth": lambda n: [30.0] * (n // 10) + [1.0] * (n - n // 10),
    "growing": lambda n: [1.0 + 0.1 * part for part in range(n)],
    "growing from nothing": lambda n: [float(part + 1) for part in range(n)],
    "every fifth is slow": lambda n: [1.0 + 2.0 * (part % 5 == 4) for part in range(n)],
}


def test_half_way_the_estimate_is_right_within_a_factor_of_two():
    for total in (10, 20, 200, 1_000):
        half = total // 2
        for name, costs in COSTS.items():
            left = sum(costs(total)[half:])
            found = seconds_left(samples(costs(total)[:half]), total)
            assert left / 2 <= found <= left * 2, (name, total)
    for total in (2, 3, 4, 5):
        found = seconds_left(samples([2.0] * (total // 2)), total)
        assert found == pytest.approx(2.0 * (total - total // 2)), total
    # The control: with the mean of all parts, a slow start would count for ever.
    costs = COSTS["slow start"](20)
    left, known = sum(costs[10:]), samples(costs[:10])
    assert seconds_left(known, 20, recent=1) > 2 * left
    assert seconds_left(known, 20) == pytest.approx(left)


def test_finished_cells_count_by_their_mean():
    assert seconds_left(samples([10.0, 2.0, 60.0]), 7, recent=1) == pytest.approx(4 * 24.0)
    assert seconds_left(samples([10.0]), 7, recent=1) == pytest.approx(60.0)


def test_nothing_is_known_at_first_and_nothing_is_left_at_last():
    assert seconds_left([(0.0, 0)], 5) is None
    assert seconds_left(samples([60.0]), 20) is None  # the first part may be slow
    assert seconds_left(samples([60.0, 1.0]), 20) == pytest.approx(18.0)
    assert seconds_left(samples([1.0] * 5), 5, waited=9.0) == 0
    assert seconds_left([(0.0, 40), (5.0, 41), (10.0, 42)], 50) == pytest.approx(40.0)


def test_the_current_part_counts_down_and_a_longer_last_part_is_added():
    known = samples([10.0] * 4)
    assert [seconds_left(known, 6, waited) for waited in (0, 4, 10, 99)] == [20, 16, 10, 10]
    assert seconds_left(known, 6, waited=99, inside=7) == 17
    assert seconds_left(samples([2.0] * 10), 20, after=120) == 140
    last = samples([2.0] * 19)
    assert [seconds_left(last, 20, waited, after=120) for waited in (0, 50, 130)] == [122, 72, 0]


# --- reports ---


def test_a_loop_reports_each_part_and_its_end():
    assert not has_listener()
    assert list(track("things", "abc")) == ["a", "b", "c"]  # by default there is no listener
    hearing = Hearing()
    with listening(hearing):
        for _ in track("things", range(3)):
            (task,) = hearing.under_way
            hearing.now += 1
    assert hearing.heard == [("things", 1, 3), ("things", 2, 3), ("things", 3, 3)]
    assert not hearing.under_way
    assert str(task) == "3 of 3 things"
    assert not has_listener()


def test_fast_work_is_reported_a_few_times_a_second_and_keeps_few_samples():
    hearing = Hearing()
    with listening(hearing), reporting("steps", 10_000) as task:
        for _ in range(10_000):
            hearing.now += 0.001
            task.advance()
    assert task.done == 10_000
    assert len(hearing.heard) < 250
    assert len(task._samples) < 250


def test_an_error_ends_the_task():
    def fail():
        for part in track("things", range(3)):
            part / part

    hearing = Hearing()
    with listening(hearing), pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(ZeroDivisionError), listening(hearing), reporting("others", 3):
        1 / 0  # noqa: B018
    assert not hearing.under_way
    assert not has_listener()


def test_a_loop_continues_one_of_its_name_and_length():
    """As clients train their teachers in turn: a single teacher each still has a pace."""
    hearing = Hearing()
    left = []
    with listening(hearing):
        for client in range(4):
            for _ in track("teachers", ["teacher"], done=client, total=4):
                left.append(hearing.under_way[0].left)
                hearing.now += 10
            hearing.now += 1  # the client answers
        assert left[0] is None
        assert left[2] == pytest.approx(2 * 11 - 1)
        assert [done for _, done, _ in hearing.heard] == [1, 2, 3, 4]
        next(iter(track("steps", range(5))))
        for _ in track("steps", range(2)):  # another length
            hearing.now += 1
    assert hearing.heard[4:] == [("steps", 1, 2), ("steps", 2, 2)]


def test_work_inside_a_part_says_how_long_the_part_still_takes():
    hearing = Hearing()
    with listening(hearing), reporting("teachers", 3) as teachers:
        for _ in range(2):
            hearing.now += 10
            teachers.advance()
        with reporting("steps", 100) as steps:
            for _ in range(50):
                hearing.now += 1
                steps.advance()
            assert steps.left == pytest.approx(50, rel=0.1)
            assert teachers.left == steps.left


def test_another_thread_has_no_listener():
    heard = []
    with listening(Hearing()):
        thread = threading.Thread(target=lambda: heard.append(has_listener()))
        thread.start()
        thread.join()
        with listening(None):
            assert not has_listener()
        assert has_listener()
    assert heard == [False]
