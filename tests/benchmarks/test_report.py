"""Tables of benchmarks."""

import pytest

from fed_dpsd.benchmarks import report as bench
from fed_dpsd.benchmarks.report import (
    cost_per_client,
    filled_tables,
    format_number,
    ratios,
    summarise,
)


def repetition(total, rounds=10.0, memory=2e9, processor=20.0, student="aa", **more):
    return {
        "seconds": {"total": total, "start": 1.0, "rounds": rounds},
        "processor": {"seconds": processor, "share": 0.5},
        "peak_memory": memory,
        "accuracy": {"student": 0.9, "ensemble": None},
        "student_sha256": student,
        **more,
    }


def row(name, *repetitions, clients=5):
    return {
        **{"name": name, "row": name.partition("@")[0], "overrides": [], "clients": clients},
        **{"statistics": summarise(repetitions), "repetitions": list(repetitions)},
    }


def content(*rows):
    whole = {
        "command": "fed-dpsd bench rounds=2",
        "machine": {"processor": "P", "cores": 2, "memory": 8, "load_average": [0.5, 1, 2]},
        "versions": {"commit": "abc", "machine": "m, 2 cores"},
        "rows": list(rows),
    }
    return whole | {"ratios": ratios(whole)}


@pytest.fixture
def three():
    return content(
        row("local", repetition(20.0), repetition(10.0), repetition(16.0)),
        row("flower", repetition(40.0), repetition(32.0, 25.0), repetition(30.0, 30.0, 8e9)),
        row("fedavg", repetition(8.0, 4.0, student=None)),
    )


def test_statistics_are_median_least_and_most_of_what_all_repetitions_have():
    known = summarise([repetition(4.0, images={"trained": 1}), repetition(1.0)])
    assert known["seconds.total"] == {"median": 2.5, "least": 1.0, "most": 4.0}
    assert known["accuracy.student"]["median"] == 0.9
    assert not {"images.trained", "accuracy.ensemble", "student_sha256"} & set(known)


def test_ratios_are_of_medians_of_rows_with_as_many_clients(three):
    assert set(three["ratios"]) == {"flower/local", "local/fedavg", "flower/fedavg"}
    flower = three["ratios"]["flower/local"]
    assert flower["seconds.total"] == 32 / 16
    assert flower["seconds.rounds"] == 25 / 10
    assert flower["peak_memory"] == 1
    assert flower["same_student"] is True
    assert "same_student" not in three["ratios"]["local/fedavg"]
    few, many = (
        row("flower@2", repetition(4.0), clients=2),
        row("local@9", repetition(1), clients=9),
    )
    assert content(few, many)["ratios"] == {}


def test_another_student_is_reported():
    other = content(row("local", repetition(1)), row("flower", repetition(1, student="bb")))
    assert other["ratios"]["flower/local"]["same_student"] is False
    assert filled_tables(other)["ratios"][1] == ["flower/local", *["1.00"] * 4, "no"]


@pytest.mark.parametrize(
    ("value", "scale", "text"),
    [
        *((16.04, 1, "16.0"), (0.01234, 1, "0.0123"), (2e9, 1e-6, "2,000"), (0, 1, "0")),
        *((1_234_567, 1, "1,234,567"), (0.9, 100, "90.0"), (-3.5, 1, "-3.50"), (None, 1, "-")),
    ],
)
def test_numbers_have_three_digits(value, scale, text):
    assert format_number(value, scale) == text


def test_the_tables_have_every_number_that_a_row_has(three):
    assert filled_tables(three) == {
        "measures": [
            ["", "local", "flower", "fedavg"],
            ["seconds in all", "16.0 (10.0 to 20.0)", "32.0 (30.0 to 40.0)", "8.00"],
            ["until the server begins, s", "1.00", "1.00", "1.00"],
            ["rounds, s", "10.0", "25.0 (10.0 to 30.0)", "4.00"],
            ["student's accuracy, %", "90.0", "90.0", "90.0"],
            ["peak memory, MB", "2,000", "2,000 (2,000 to 8,000)", "2,000"],
            ["processor seconds", "20.0", "20.0", "20.0"],
            ["use of all cores, %", "50.0", "50.0", "50.0"],
        ],
        "ratios": [
            ["", *bench.RATIOS.values(), "same student"],
            ["flower/local", "2.00", "2.50", "1.00", "1.00", "yes"],
            ["local/fedavg", "2.00", "2.50", "1.00", "1.00", "-"],
            ["flower/fedavg", "4.00", "6.25", "1.00", "1.00", "-"],
        ],
    }
    assert bench.origin(three) == (
        "`fed-dpsd bench rounds=2`: medians, with minimum and maximum in brackets, of 3 runs of "
        "each row, in turn, each in a separate process. Commit abc, P, m, 2 cores, load average at "
        "the start 0.50, 1.00, 2.00."
    )


def test_slopes_are_against_the_first_row_of_the_kind():
    rows = [
        row("local@10", repetition(10.0, memory=1e9, processor=5.0), clients=10),
        row("local@110", repetition(10.0, memory=1.1e9, processor=25.0), clients=110),
        row("fedavg@10", repetition(1.0), clients=10),
    ]
    assert cost_per_client(rows[0], rows[1], "peak_memory") == pytest.approx(1e6)
    assert cost_per_client(rows[0], rows[0], "peak_memory") is None
    header, first, second, third = bench.clients(content(*rows))
    assert len({len(header), len(first), len(second), len(third)}) == 1
    assert first[1:] == ["10", "10.0", "1,000", "5.00", "500", "-", "-"]
    assert second[1:] == ["110", "10.0", "1,100", "25.0", "227", "1,000", "200"]
    assert third[0] == "fedavg"
    assert third[-2:] == ["-", "-"]
    assert list(bench.filled_tables(content(*rows)))[-1] == "clients"
