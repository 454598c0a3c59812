"""Rows of a benchmark: their runs, measurements and processes."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fed_dpsd import api, experiment
from fed_dpsd.benchmarks import row, rows
from fed_dpsd.benchmarks.report import markdown, read
from fed_dpsd.benchmarks.rows import Sample, bench, plan, without_folder
from fed_dpsd.errors import ConfigError, UserError
from tests.conftest import SMALL

SECONDS = {"total", "start", "teachers", "rounds", "rest"}
QUERIES = {"answered", "per_second", "bytes_to_client", "bytes_to_server"}
QUERIES |= {"forward_answers", "backward_answers"}
REPETITION = {
    "seconds": SECONDS,
    "queries": QUERIES,
    "processor": {"seconds", "share"},
    "accuracy": {"student", "ensemble"},
}
OPERATIONS = {"teachers_per_second", "matmul_per_second", "share_of_matmul"}
STAGES = {"data", "partition", "teachers", "diagnostics", "asks", "charges", "teachers' answers"}
STAGES |= {"generator", "student", "evaluation", "checkpoint", "samples", "card"}
TINY = (*SMALL, "rounds=2", "method.generator_steps=2")


@pytest.fixture
def in_this_process(monkeypatch, tmp_path):
    """Do tasks in this process, with two samples of the machine."""
    done = []

    def do(task):
        done.append(task)
        places = (f"out={tmp_path}/runs", f"cache={tmp_path}/cache{len(done)}")
        own = [{**r, "overrides": [*places, *r["overrides"]]} for r in task.get("rows", [task])]
        experiment.load_data.cache_clear()  # as in a new process
        experiment._partitions.cache_clear()
        began = time.time()
        if "rows" in task:
            return json.loads(json.dumps(row.check({"rows": own}))), []
        before = sum(psutil.Process().cpu_times()[:4])  # of this process's other work
        result = json.loads(json.dumps(row.measure(own[0], tmp_path)))
        result["processor_seconds"] -= before
        return result, [Sample(began, 0, 0.0), Sample(began + 0.1, 10**12, 0.1)]

    monkeypatch.setattr(rows, "_in_process", do)
    return done


def numbers(tree):
    for value in tree.values():
        if isinstance(value, dict):
            yield from numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def check_repetition(repetition):
    for key, names in REPETITION.items():
        assert set(repetition[key]) == names, key
    assert all(math.isfinite(number) and number >= 0 for number in numbers(repetition))
    seconds, queries = repetition["seconds"], repetition["queries"]
    assert min(seconds.values()) > 0
    assert seconds["total"] == pytest.approx(sum(seconds[part] for part in SECONDS - {"total"}))
    assert queries["per_second"] == pytest.approx(queries["answered"] / seconds["rounds"])
    assert queries["forward_answers"] > 0
    assert 0 < repetition["processor"]["share"] <= 1.01
    assert repetition["peak_memory"] > 10**7
    assert repetition["device"] is None or set(repetition["device"]) == {
        "peak_memory",
        "matmul_per_second",
    }


def test_a_bench_measures_each_row_and_writes_what_it_returns(in_this_process, tmp_path):
    out, said = tmp_path / "bench.json", []
    command = ("fed-dpsd", "bench", "data.path=/somewhere/else/mnist")
    content = bench(plan(TINY, ["local", "dense"], []), 1, command, out, said.append)
    assert read(out) == content == json.loads(json.dumps(content))
    assert content["command"] == "fed-dpsd bench data.path=mnist"
    assert said[1:] == ["repetition 1 of 1: local", "repetition 1 of 1: dense"]
    assert len(in_this_process) == 1 + 2
    assert set(content["machine"]) == {"processor", "cores", "memory", "load_average"}
    assert {"commit", "torch", "flwr", "machine"} <= set(content["versions"])
    assert content["configuration"]["num_clients"] == 2
    assert not {"out", "cache"} & set(content["configuration"])
    assert str(tmp_path) not in json.dumps(content)
    local, dense = content["rows"]
    ours, theirs = local["repetitions"][0], dense["repetitions"][0]
    for repetition in (ours, theirs):
        check_repetition(repetition)
        assert set(repetition["operations"]) == OPERATIONS
        assert repetition["peak_memory"] == 10**12  # the larger of two numbers counts
        assert set(repetition["stages"]) == STAGES
        assert min(repetition["stages"].values()) > 0
    assert 0 < ours["accuracy"]["ensemble"] == theirs["accuracy"]["ensemble"]  # the same teachers
    queries = ours["queries"]
    assert (queries["answered"], queries["forward_answers"]) == (128, 256)
    assert queries["bytes_to_client"] == pytest.approx(64 + 4 * 10, rel=0.05)
    assert set(content["ratios"]) == {"dense/local"}
    run = api.run(*TINY, f"out={tmp_path}/runs", f"cache={tmp_path}/cache2", progress=False)
    assert ours["student_sha256"] == run.summary["student_sha256"]  # no clock has changed it


def test_each_row_runs_with_each_number_of_clients():
    planned = plan(["num_clients=7"], ["local", "fedavg"], [30, 4, 30])
    assert [each.name for each in planned] == ["local@4", "local@30", "fedavg@4", "fedavg@30"]
    assert planned[1].overrides == ("num_clients=7", "num_clients=30")


def test_a_problem_of_any_row_shows_before_a_row_runs(in_this_process):
    for overrides, chosen, clients, expected in (
        ((), ["locl"], [], "--rows locl: 'locl' is not one of local, flower, fedavg, dense"),
        ((), ["local"], [0], "--clients 0 must be >= 1"),
        (("rouds=2",), ["local"], [], "did you mean rounds?"),
        (("num_clients=0",), ["dense"], [], "num_clients=0 must be >= 1"),
        (("federation=deployment",), ["local"], [], "hospitals"),
        (("num_clients=900",), ["local"], [], "works here"),
        (("model.teachers=[cnn,mlp]",), ["local", "fedavg"], [], "fedavg needs one"),
        (("data=nope",), ["dense"], [], "data=nope is unknown"),
    ):
        with pytest.raises(UserError) as caught:
            bench(plan((*TINY, *overrides), chosen, clients), 1, (), None, lambda line: None)
        assert expected in str(caught.value), overrides
    assert not [task for task in in_this_process if "rows" not in task]


def test_dense_takes_what_it_has_a_key_for():
    typed = ["method=fed_dpsd", "method.student_steps=5", "method.batch_size=32", "rounds=2"]
    assert row.own_overrides("local", typed) == typed
    expected = ["method.batch_size=32", "rounds=2", "method=dense"]
    assert row.own_overrides("dense", typed) == expected
    assert row.composed("dense", [*SMALL, *typed]).method_name == "dense"


def test_repeat_and_out_are_checked(in_this_process):
    with pytest.raises(UserError, match="--repeat 0 must be >= 1"):
        bench(plan(TINY, ["local"], []), 0, (), None, print)
    with pytest.raises(UserError, match=r"/dev/null/b.json cannot be written"):
        bench(plan(TINY, ["local"], []), 1, (), Path("/dev/null/b.json"), lambda line: None)
    assert len(in_this_process) == 1  # the check alone
    words = ["data.path=/a/b/mnist", "--out", "/a/b.json", "a.b=c/d", "rounds=2"]
    expected = ["data.path=mnist", "--out", "b.json", "a.b=c/d", "rounds=2"]
    assert [without_folder(word) for word in words] == expected


def test_a_watched_process_counts_with_its_children():
    """Two children use 50 MB and 0.4 s of a processor each; the process itself almost nothing."""
    child = (
        "import time; held = bytearray(b'x') * 50_000_000; began = time.process_time()\n"
        "while time.process_time() < began + 0.4: pass\n"
        "time.sleep(1.2)"
    )
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}])"
    program = f"import subprocess, sys; [each.wait() for each in ({start}, {start})]"
    samples = rows._watch(subprocess.Popen([sys.executable, "-c", program]))
    assert samples[0] == Sample(samples[0].at, 0, 0.0)
    assert max(sample.memory for sample in samples) > 100_000_000
    assert 0.75 < samples[-1].processor_seconds < 2.5
    assert [s.at for s in samples] == sorted(s.at for s in samples)


def test_the_process_that_watches_imports_no_torch():
    program = "import sys, fed_dpsd.benchmarks.rows; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_process_that_dies_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match=r"its process died \(1\)"):
        rows._in_process({"row": "local", "overrides": []})


@pytest.mark.slow
def test_all_rows_in_processes_of_their_own(tmp_path):
    """Flower's two leave no process, and FedDPSD has the same student through it."""
    others = {process.pid for process in psutil.process_iter()}
    overrides = ("experiment=bench", *TINY, "model.teacher=cnn_bn")
    out = tmp_path / "bench.json"
    content = bench(plan(overrides, rows.ROWS, []), 1, (), out, print)
    assert [each["name"] for each in content["rows"]] == list(rows.ROWS)
    for each in content["rows"]:
        (repetition,) = each["repetitions"]
        check_repetition(repetition)
        assert (repetition["operations"] is None) == (each["row"] in ("flower", "fedavg"))
        assert repetition["queries"]["answered"] == 128
    by_name = {each["name"]: each["repetitions"][0] for each in content["rows"]}
    assert by_name["flower"]["stages"]["asks"] > 0
    passes = {by_name[name]["queries"]["forward_answers"] for name in ("local", "flower", "fedavg")}
    assert passes == {256}
    assert content["ratios"]["flower/local"]["same_student"] is True
    assert set(content["ratios"]) == {
        *("flower/local", "local/fedavg", "flower/fedavg", "dense/local")
    }
    assert "| flower/local |" in markdown(read(out))
    left = [p for p in psutil.process_iter() if p.pid not in others and is_of_flower(p)]
    assert not left


def is_of_flower(process):
    try:
        return any(name in " ".join(process.cmdline()) for name in ("flower-", "flwr-", "raylet"))
    except psutil.Error:
        return False


@pytest.mark.slow
def test_a_problem_in_a_process_of_its_own_is_reported_unchanged():
    with pytest.raises(ConfigError) as caught:
        bench(plan(["rouds=2"], ["local"], []), 1, (), None, print)
    assert caught.value.problems == ("rouds is not a configuration key; did you mean rounds?",)
