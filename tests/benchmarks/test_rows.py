"""Rows of a benchmark: their runs, measurements and processes."""

import json
import math
import runpy
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from fed_dpsd import api, experiment
from fed_dpsd.benchmarks import row, rows
from fed_dpsd.benchmarks.report import peers, summarise
from fed_dpsd.benchmarks.rows import bench, plan, without_folder
from fed_dpsd.errors import ConfigError, UserError
from fed_dpsd.models import initialise, load_vector, to_vector
from fed_dpsd.models.classifiers import CLASSIFIERS
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
TINY = (*SMALL, "rounds=2", "method.generator_steps=2")


@pytest.fixture
def in_this_process(monkeypatch, tmp_path):
    """Do tasks in this process, as if they had used 1 TB."""
    done = []

    def do(task, prepared=None):
        done.append(task)
        places = (f"out={tmp_path}/runs", f"cache={tmp_path}/cache{len(done)}")
        own = [{**r, "overrides": [*places, *r["overrides"]]} for r in task.get("rows", [task])]
        experiment.load_data.cache_clear()  # as in a new process
        experiment._partitions.cache_clear()
        began = time.time()
        if "rows" in task:
            return json.loads(json.dumps(row.check({"rows": own})))
        before = sum(psutil.Process().cpu_times()[:4])  # of this process's other work
        result = json.loads(json.dumps(row.measure(own[0])))
        result["processor_seconds"] -= before
        return result | {"spawned": began, "peak_memory": 10**12}

    monkeypatch.setattr(rows, "_run_task", do)
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


def test_a_bench_measures_each_row_and_writes_what_it_returns(in_this_process, tmp_path):
    out, said = tmp_path / "bench.json", []
    command = ("fed-dpsd", "bench", "data.path=/somewhere/else/mnist")
    content = bench(plan(TINY, ["local"], []), 1, command, out, said.append)
    assert json.loads(out.read_text()) == content
    assert content["command"] == "fed-dpsd bench data.path=mnist"
    assert said[1:] == ["repetition 1 of 1: local"]
    assert len(in_this_process) == 1 + 1
    assert set(content["machine"]) == {"processor", "load_average"}
    assert {"commit", "torch", "flwr", "machine"} <= set(content["versions"])
    assert content["configuration"]["num_clients"] == 2
    assert not {"out", "cache"} & set(content["configuration"])
    assert str(tmp_path) not in json.dumps(content)
    (local,) = content["rows"]
    (ours,) = local["repetitions"]
    check_repetition(ours)
    assert ours["peak_memory"] == 10**12
    assert ours["accuracy"]["ensemble"] > 0
    queries = ours["queries"]
    assert (queries["answered"], queries["forward_answers"]) == (128, 256)
    assert queries["bytes_to_client"] == pytest.approx(64 + 4 * 10, rel=0.05)
    run = api.run(*TINY, f"out={tmp_path}/runs", f"cache={tmp_path}/cache2", progress=False)
    assert ours["student_sha256"] == run.summary["student_sha256"]


def test_each_row_runs_with_each_number_of_clients():
    planned = plan(["num_clients=7"], ["local", "fedavg"], [30, 4, 30])
    assert [each.name for each in planned] == ["local@4", "local@30", "fedavg@4", "fedavg@30"]
    assert planned[1].overrides == ("num_clients=7", "num_clients=30")


def test_a_problem_of_any_row_shows_before_a_row_runs(in_this_process):
    for overrides, chosen, clients, expected in (
        ((), ["locl"], [], "--rows locl: 'locl' is not one of local, flower, fedavg, pfl"),
        ((), ["local"], [0], "--clients 0 must be >= 1"),
        (("rouds=2",), ["local"], [], "did you mean rounds?"),
        (("num_clients=0",), ["flower"], [], "num_clients=0 must be >= 1"),
        (("federation=deployment",), ["local"], [], "hospitals"),
        (("num_clients=900",), ["local"], [], "works here"),
        (("data=nope",), ["flower"], [], "data=nope is unknown"),
    ):
        with pytest.raises(UserError) as caught:
            bench(plan((*TINY, *overrides), chosen, clients), 1, (), None, lambda line: None)
        assert expected in str(caught.value), overrides
    assert not [task for task in in_this_process if "rows" not in task]


FEDAVG = ("method=fedavg", "training=plain", "model=cnn", "data=digits", "partition=iid")
FEDAVG += ("num_clients=3", "rounds=2", "teacher.epochs=1", "teacher.min_steps=1")
FEDAVG += ("teacher.momentum=0", "teacher.batch_size=479", "teacher.learning_rate=0.5")
PEERS = Path(rows.__file__).parent / "peers"


def test_other_simulators_need_their_environments(tmp_path):
    """The message has the commands that make a missing one."""
    planned = plan(FEDAVG, ["local", "fluke"], [])
    with pytest.raises(UserError, match=r"--rows fluke needs --peers FOLDER"):
        bench(planned, 1, (), None, print)
    made = rf"uv venv --python 3.11 {tmp_path}/fluke && uv pip install .* 'fluke-fl==[0-9.]+' torch"
    with pytest.raises(UserError, match=made):
        bench(planned, 1, (), None, print, tmp_path)
    assert all((PEERS / script).exists() for script, _ in rows.PEERS.values())


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("method=fed_dpsd", "method=fedavg training=plain"),
        ("method.local_epochs=2", "teacher.epochs as method.local_epochs"),
        ("teacher.momentum=null", "teacher.momentum=0"),
        ("clients_per_round=2", "clients_per_round=null"),
        ("teacher.batch_size=64", "teacher.batch_size=64 must divide each client's records"),
    ],
)
def test_other_simulators_get_only_work_that_they_share(override, problem, tmp_path):
    experiment = row.compose_row([*FEDAVG, override, f"cache={tmp_path}/cache"])
    with pytest.raises(ConfigError, match=problem):
        row.prepare(experiment, tmp_path / "3")


def test_a_plain_loop_of_fedavg_runs_like_a_simulator(tmp_path):
    """It reads what a simulator reads, on the same records and network as this library."""
    experiment = row.compose_row([*FEDAVG, f"cache={tmp_path}/cache"])
    row.prepare(experiment, tmp_path / "3")
    loop = tmp_path / "loop.py"
    loop.write_text(
        f"import sys, time; sys.path.insert(0, {str(PEERS)!r})\n"
        "import torch; from common import Task\n"
        "task, began = Task(), time.time()\n"
        "network = task.network()\n"
        "for _ in range(task.settings['rounds']):\n"
        "    models = [task.network() for _ in task.clients]\n"
        "    for model, (images, labels) in zip(models, task.clients):\n"
        "        model.load_state_dict(network.state_dict())\n"
        "        optimiser = torch.optim.SGD(model.parameters(), task.settings['learning_rate'])\n"
        "        torch.nn.functional.cross_entropy(model(images), labels).backward()\n"
        "        optimiser.step()\n"
        "    states = [model.state_dict() for model in models]\n"
        "    network.load_state_dict({k: sum(s[k] for s in states) / 3 for k in states[0]})\n"
        "task.finish(network, began)\n"
    )
    found = rows._run_peer([sys.executable, str(loop)], tmp_path / "3")
    assert found["images"]["trained"] == row.trained_images(experiment) == 3 * 479 * 2
    assert 0.1 < found["accuracy"]["student"] < 1
    assert found["seconds"]["total"] > found["seconds"]["rounds"] > 0
    assert found["processor"]["seconds"] > 0
    assert found["peak_memory"] > 10**7
    content = {"rows": [{"row": "pfl", "clients": 3, "statistics": summarise([found])}]}
    assert peers(content)[1][:2] == ["pfl", "3"]


def test_other_simulators_train_the_architecture_of_this_library(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["script", str(tmp_path)])
    network = runpy.run_path(str(PEERS / "common.py"))["Network"](1, 8, 10, 4)
    ours = initialise(lambda: CLASSIFIERS["cnn"]((1, 8, 8), 10, 4), torch.Generator())
    load_vector(network, to_vector(ours))
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(network(images), ours(images))


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
    memory, seconds = rows._watch(subprocess.Popen([sys.executable, "-c", program]))
    assert memory > 100_000_000
    assert 0.75 < seconds < 2.5


def test_the_process_that_watches_imports_no_torch():
    program = "import sys, fed_dpsd.benchmarks.rows; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_process_that_dies_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match=r"its process died \(1\)"):
        rows._run_task({"row": "local", "overrides": []})


@pytest.mark.slow
def test_all_rows_in_processes_of_their_own(tmp_path):
    """Flower's leave no process, and FedDPSD has the same student through it."""
    others = {process.pid for process in psutil.process_iter()}
    out = tmp_path / "bench.json"
    content = bench(plan(TINY, rows.ROWS, []), 1, (), out, print)
    assert [each["name"] for each in content["rows"]] == list(rows.ROWS)
    for each in content["rows"]:
        (repetition,) = each["repetitions"]
        check_repetition(repetition)
        queries = repetition["queries"]
        assert (queries["answered"], queries["forward_answers"]) == (128, 256)
    assert content["ratios"]["flower/local"]["same_student"] is True
    assert json.loads(out.read_text()) == content
    ours, theirs = bench(plan(FEDAVG, ["local", "fedavg"], []), 1, (), None, print)["rows"]
    assert set(ours["statistics"]) > set(theirs["statistics"]) > {"images.trained"}
    trained = {each["statistics"]["images.trained"]["median"] for each in (ours, theirs)}
    assert trained == {3 * 479 * 2}
    scores = [each["statistics"]["accuracy.student"]["median"] for each in (ours, theirs)]
    assert min(scores) > 0.15  # chance is 0.1
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
