"""`fed-dpsd bench`: its options, its tables and its JSON. Measurements are tested in test_rows."""

import pytest

from fed_dpsd.benchmarks import rows
from fed_dpsd.benchmarks.report import summarise

REPETITION = {
    **{"seconds": {"total": 2.0, "rounds": 1.0}, "processor": {"seconds": 3.0}},
    **{"peak_memory": 1e9, "student_sha256": "aa"},
}


def content(names):
    return {
        "command": "fed-dpsd bench",
        "machine": {"processor": "P", "cores": 2, "load_average": [0, 0, 0]},
        "versions": {"commit": "abc", "machine": "m"},
        "rows": [
            {
                **{"name": name, "row": "local", "clients": 5, "repetitions": [REPETITION]},
                "statistics": summarise([REPETITION]),
            }
            for name in names
        ],
        "ratios": {},
    }


@pytest.fixture
def measured(monkeypatch):
    """Record what the command would measure, without measuring it."""
    asked = {}

    def bench(planned, repeat, command, out, say, peers):
        asked.update(planned=planned, repeat=repeat, command=command, out=out)
        return content([row.name for row in planned])

    monkeypatch.setattr(rows, "bench", bench)
    return asked


def test_all_rows_are_measured_and_shown(fed_dpsd, measured):
    code, out, _ = fed_dpsd("bench", "rounds=2", "--repeat", "5")
    assert code == 0
    assert [row.name for row in measured["planned"]] == ["local", "flower"]
    assert {row.overrides for row in measured["planned"]} == {("rounds=2",)}
    assert (measured["repeat"], measured["out"]) == (5, None)
    assert measured["command"] == ["fed-dpsd", "bench", "rounds=2", "--repeat", "5"]
    assert any(line.split() == ["local", "flower"] for line in out)
    assert any(line.split() == ["seconds", "in", "all", *["2.00"] * 2] for line in out)
    assert out[-1].startswith("`fed-dpsd bench`: from 1 run of each row")


def test_numbers_of_clients_measure_this_run_alone(fed_dpsd, measured):
    code, out, _ = fed_dpsd("bench", "--clients", "10,5")
    assert code == 0
    assert [row.name for row in measured["planned"]] == ["local@5", "local@10"]
    assert measured["repeat"] == 3
    assert any(line.split() == ["local@5", "local@10"] for line in out)


def test_bad_options_are_one_line(fed_dpsd, measured, subtests):
    for arguments, expected in [
        (("--rows", "local,x"), "error: --rows local,x: 'x' is not one of local, flower"),
        (("--clients", "10,x"), "error: --clients 10,x must be whole numbers, such as 10,100"),
        (("--clients", "0"), "error: --clients 0 must be >= 1"),
    ]:
        with subtests.test(arguments=arguments, expected=expected):
            code, out, err = fed_dpsd("bench", *arguments)
            assert (code, out) == (1, [])
            assert err.count("\n") == 1
            assert err.startswith(expected)
            assert not measured
