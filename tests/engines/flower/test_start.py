"""The start of `flwr run`: the first error, the ClientApp's turn, and the shares of GPUs."""

import importlib.util
import json
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from ray import cloudpickle

from fed_dpsd.client.device import TEACHER_BYTES
from fed_dpsd.engines.flower import client, direct, gate, job, server, shares
from fed_dpsd.engines.placement import Placement
from fed_dpsd.errors import UserError

ROOT = Path(__file__).parents[3]

# In a new process: an early error must not wait for torch, a node or Ray.
EARLY = """
import json, os, sys
from fed_dpsd.engines.flower import gate
import server_app

class Grid:
    def get_node_ids(self):
        raise AssertionError("asked for nodes")

sys.argv[0] = "flwr-simulation"
from fed_dpsd.engines.flower.server import RunFailed, main
from types import SimpleNamespace
try:
    main(Grid(), SimpleNamespace(run_config=json.loads(sys.argv[1])))
except RunFailed as error:
    print("status:", error)
assert not {"torch", "ray", "fed_dpsd.experiment"} & set(sys.modules)
import client_app  # which does not wait for ever, and does not load Ray for a failed run
assert not {"torch", "ray"} & set(sys.modules)
assert os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0"  # else Ray warns after the error
"""
# In a new process: only Flower and its own packages are installed.
BARE = """
import sys
import flwr.clientapp, flwr.serverapp
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in ("fed_dpsd", "flwr", "server_app", "client_app", *sys.stdlib_module_names):
            raise ModuleNotFoundError(f"No module named {root!r}", name=root)

sys.meta_path.insert(0, Missing())
sys.argv[0] = "flwr-simulation"
import server_app
try:
    server_app.app(None, None)
except Exception as error:
    print("status:", error)
import client_app
"""


def early(run_config, program=EARLY):
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(run_config)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.ci  # a process that imports Flower, for each
def test_the_first_error_waits_for_nothing():
    for run_config, problem in (
        ({"method": "dnse"}, "method=dnse is unknown; choose one of: "),
        ({"resume": "/nowhere"}, "/nowhere is not a run folder (it does not exist); give "),
        ({"num_clients": 0}, "num_clients=0 must be >= 1"),
    ):
        first, status = early(run_config)
        assert first.startswith(f"error: {problem}"), run_config
        assert status == f"status: {first.removeprefix('error: ')}"
    assert early({"num_clients": 3})[0] == "error: AssertionError: asked for nodes"  # the control
    first, status = early({}, BARE)
    remedy = "install FedDPSD where the SuperLink runs: pip install -e ."
    assert re.fullmatch(rf"error: No module named '\w+'; {remedy}", first)
    assert status == f"status: {first.removeprefix('error: ')}"


OURS = "127.0.0.1,localhost,::1"


@pytest.mark.parametrize(
    ("given", "listed", "changed"),
    [
        ({"http_proxy": "http://p"}, (), {"no_proxy": OURS, "NO_PROXY": OURS}),
        ({"ALL_PROXY": "socks5://p", "NO_PROXY": ".corp"}, ("10.77.0.1",), {
            name: f".corp,{OURS},10.77.0.1" for name in ("no_proxy", "NO_PROXY")
        }),
        ({"grpc_proxy": "p", "no_grpc_proxy": ".corp", "no_proxy": OURS, "NO_PROXY": "*"}, (), {
            "no_grpc_proxy": f".corp,{OURS}"
        }),
        ({"https_proxy": "p", "no_proxy": OURS, "NO_PROXY": "localhost, ::1 ,127.0.0.1"}, (), {}),
        ({"http_proxy": "", "NO_PROXY": ".corp"}, ("10.77.0.1",), {}),  # no proxy
    ],
)  # fmt: skip
def test_loopback_addresses_use_no_proxy(given, listed, changed):
    assert direct(given, listed) == changed
    assert not direct(given | changed, listed)


@pytest.mark.slow
@pytest.mark.ci  # two processes that import gRPC, one of which waits for a proxy
def test_grpc_and_http_reach_a_server_on_this_machine():
    """In a new process, where a proxy that does not exist is named."""
    program = """
import sys, grpc, requests
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
server = grpc.server(ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
web = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
Thread(target=web.serve_forever, daemon=True).start()
try:
    grpc.channel_ready_future(grpc.insecure_channel(f"127.0.0.1:{port}")).result(float(sys.argv[1]))
    print(requests.get(f"http://127.0.0.1:{web.server_port}").status_code)
except (grpc.FutureTimeoutError, requests.RequestException) as error:
    print(type(error).__name__)
"""
    own = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    own |= {"http_proxy": "http://127.0.0.1:9", "NO_PROXY": ".corp"}
    for changed, seconds, said in (({}, "1", "FutureTimeoutError"), (direct(own), "30", "501")):
        command = [sys.executable, "-c", program, seconds]
        done = subprocess.run(command, env=own | changed, capture_output=True, check=True)
        assert done.stdout.decode().split() == [said]


@pytest.fixture
def simulation(monkeypatch):
    """The start of a simulation, whose process this one claims to be."""
    monkeypatch.setattr(gate, "_needed", Future())
    monkeypatch.setattr(gate, "_place", Future())
    monkeypatch.setattr(gate, "LONGEST", 2)  # fails instead of waiting
    monkeypatch.setattr(sys, "argv", ["/usr/bin/flwr-simulation"])
    for name in ("task_id", "run_id", "node_id"):  # of messages
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


def test_a_client_app_loads_after_the_server_apps_checks(simulation):
    with ThreadPoolExecutor(2) as threads:
        needed = threads.submit(gate.wait_until_needed, "{} on {}".format)
        assert wait([needed], timeout=0.05).not_done
        assert gate.place_clients("experiment", 5) == "experiment on 5"
        assert needed.result()
    gate.server_ended()  # at the end of the run
    assert gate._needed.result()


def test_without_gpus_ray_starts_before_the_clients_are_placed(simulation, monkeypatch):
    order = []

    class Grid:
        def get_node_ids(self):
            return [1, 2]

        def push_messages(self, messages):
            order.append({message.metadata.message_type for message in messages})

    def stopped(*_):
        order.append(gate._needed.done())
        raise UserError("stopped here")

    monkeypatch.setattr(gate, "wait_for_ray", lambda: order.append("Ray runs"))
    monkeypatch.setattr(job, "prepare", stopped)
    for gpus, early in ((True, [False]), (False, [{gate.WAKE}, "Ray runs", True])):
        monkeypatch.setattr(gate, "may_have_gpus", lambda gpus=gpus: gpus)
        with pytest.raises(gate.RunFailed, match="stopped here"):
            server.serve(Grid(), {})
        assert order == early
        order.clear()


def test_a_wait_for_ray_ends_when_it_runs_or_the_time_is_up(monkeypatch):
    monkeypatch.setattr(gate, "RAY_WITHIN", 30)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    gate.wait_for_ray()
    monkeypatch.setattr(gate, "RAY_WITHIN", 0.05)
    for ray in (SimpleNamespace(), SimpleNamespace(is_initialized=lambda: False), None):
        monkeypatch.setitem(sys.modules, "ray", ray)
        gate.wait_for_ray()


def test_a_simulations_app_is_imported_where_its_first_message_arrives(simulation, monkeypatch):
    monkeypatch.setattr("fed_dpsd.engines.flower.import_ray", lambda: None)
    gate.start_clients()
    app = load("client_app")
    client = SimpleNamespace(app=lambda message, context: (message, context))
    monkeypatch.setitem(sys.modules, "fed_dpsd.engines.flower.client", client)
    sent = pickle.loads(cloudpickle.dumps(app))
    question, wake = (
        Message(RecordDict(), dst_node_id=1, message_type=kind) for kind in ("query", gate.WAKE)
    )
    assert sent(question, "context") == (question, "context")
    assert not sent(wake, "context").content
    monkeypatch.setitem(sys.modules, "fed_dpsd.engines.flower.client", None)
    with pytest.raises(ImportError):
        sent(wake, "context")


@pytest.mark.parametrize("kind", [UserError, RuntimeError])
def test_clients_that_cannot_be_placed_end_the_server_app(simulation, monkeypatch, kind):
    def full(experiment, nodes):
        raise kind("the GPU is full")

    monkeypatch.setattr(shares, "place_clients", full)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(load, "client_app")
        with pytest.raises(kind, match="the GPU is full"):
            gate.place_clients("experiment", 5)
        gate.server_ended()


def load(app):
    """What Flower loads, in a fresh process."""
    spec = importlib.util.spec_from_file_location(app, ROOT / app / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.app


def test_an_app_that_cannot_be_imported_ends_the_run_with_the_remedy(
    simulation, monkeypatch, capsys
):
    for app in ("server", "client"):
        monkeypatch.setitem(sys.modules, f"fed_dpsd.engines.flower.{app}", None)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(load, "client_app")
        with pytest.raises(ImportError, match=r"engines\.flower"):
            gate.place_clients("experiment", 5)
        with pytest.raises(gate.RunFailed) as failed:
            load("server_app")(None, None)
        assert not gate._needed.result()
    assert str(failed.value).endswith("install FedDPSD where the SuperLink runs: pip install -e .")
    assert capsys.readouterr().out == f"error: {failed.value}\n"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/flwr-clientapp"])
    with pytest.raises(ImportError):
        load("client_app")


def test_a_simulation_without_nodes_is_an_error_with_the_remedy(monkeypatch):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds
        assert now[0] < 10

    monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    grid = SimpleNamespace(get_node_ids=lambda: [1, 2] if now[0] > late else [])
    late = 1
    assert gate.number_of_nodes(grid) == 2
    late = 1e9
    with pytest.raises(UserError, match="--federation-config num-supernodes="):
        gate.number_of_nodes(grid)


def test_a_failed_run_needs_no_clients(simulation):
    gate.server_ended()
    assert not gate.wait_until_needed(pytest.fail)


def test_a_client_app_waits_only_in_a_simulation(simulation, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/flwr-clientapp"])
    assert load("client_app") is client.app


# --- shares ---


@pytest.fixture
def variables(monkeypatch):
    """Variables that a test's offer sets, removed at its end, in a process without a share."""
    names = ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_OVERRIDE_RESOURCES")
    for name in (*names, shares.SHARES, TEACHER_BYTES, shares.VISIBLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    shares.take_share.cache_clear()
    yield
    shares.take_share.cache_clear()


def placed(gpus, processes, pinned=False):
    devices = tuple(f"cuda:{number}" for number in range(gpus))
    return Placement(devices, processes, 0.5, 2**30, 2**29, pinned)


def test_an_offer_is_the_environment_of_ray(variables, monkeypatch):
    shares.offer_shares(Placement())
    assert shares.SHARES not in os.environ
    assert "RAY_OVERRIDE_RESOURCES" not in os.environ
    shares.offer_shares(placed(2, 3))
    assert json.loads(os.environ["RAY_OVERRIDE_RESOURCES"]) == {"CPU": 6}
    assert os.environ[TEACHER_BYTES] == str(2**29)
    monkeypatch.setenv(TEACHER_BYTES, "7")  # a user's own number stays
    shares.offer_shares(placed(2, 3))
    assert os.environ[TEACHER_BYTES] == "7"


def test_flowers_default_starts_as_many_processes_as_there_are_shares(variables, monkeypatch):
    from flwr.simulation.ray_transport import ray_actor
    from flwr.supercore.constant import DEFAULT_SIMULATION_CONFIG as default

    shares.offer_shares(placed(2, 3))
    resources = json.loads(os.environ["RAY_OVERRIDE_RESOURCES"])
    monkeypatch.setattr(ray_actor.ray, "nodes", lambda: [{"Resources": resources}])
    requested = {"num_cpus": default.client_resources_num_cpus, "num_gpus": 0.0}
    assert ray_actor.pool_size_from_resources(requested) == 3


def test_processes_take_one_share_each_and_no_more_than_there_are(variables, monkeypatch):
    monkeypatch.setenv(shares.VISIBLE, "4,6")
    monkeypatch.setattr(shares, "_assigned_by_ray", lambda: False)
    shares.offer_shares(placed(2, 3))
    forks = multiprocessing.get_context("fork")
    pipes = []

    def process(pipe):
        try:
            shares.take_share()
            shares.take_share()
            pipe.send(os.environ[shares.VISIBLE])
        except UserError as error:
            pipe.send(str(error))
        pipe.recv()

    def take():
        here, there = forks.Pipe()
        started = forks.Process(target=process, args=(there,))
        started.start()
        pipes.append((here, started))
        return here.recv()

    def end(here, started):
        here.send("")
        started.join()

    try:
        assert [take(), take(), take()] == ["4", "6", "4"]
        assert take().startswith("the GPUs have room for 3 client processes, but Flower has ")
        monkeypatch.setattr(shares, "_assigned_by_ray", lambda: True)
        assert take() == "4,6"  # as Ray has set it
        monkeypatch.setattr(shares, "_assigned_by_ray", lambda: False)
        end(*pipes.pop(1))
        assert take() == "6"  # which the process that ended had
    finally:
        for pair in pipes:
            end(*pair)


def test_on_a_running_ray_cluster_the_line_says_what_to_request(variables, monkeypatch):
    monkeypatch.setattr(shares, "prepare_clients", lambda *_: placed(2, 3))
    assert shares.place_clients(None, 3) == str(placed(2, 3))
    assert os.environ.pop(shares.SHARES)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    requested = "client-resources-num-cpus=1 client-resources-num-gpus=0.5"
    assert f'--federation-config "{requested}"' in shares.place_clients(None, 3)
    assert shares.SHARES not in os.environ


def test_a_pinned_gpu_is_not_renumbered(variables, monkeypatch):
    monkeypatch.setattr(shares, "_assigned_by_ray", lambda: False)
    monkeypatch.setattr(shares, "_taken", [])
    shares.take_share.cache_clear()
    shares.offer_shares(placed(1, 1, pinned=True))
    shares.take_share()
    assert shares.VISIBLE not in os.environ
    shares.take_share()  # the same one
    shares.take_share.cache_clear()
    with pytest.raises(UserError, match="room for 1 client processes"):
        shares.take_share()
    for claim in shares._taken:
        claim.close()
