"""The GPU shares of client processes in `flwr run`."""

import multiprocessing
import os

import pytest
from flwr.simulation.ray_transport import ray_actor

from fed_dpsd.client.device import TEACHER_BYTES
from fed_dpsd.engines.flower import shares
from fed_dpsd.engines.placement import Placement
from fed_dpsd.errors import UserError


@pytest.fixture
def variables(monkeypatch):
    """The variables that a process with a share sets, removed at the test's end."""
    for name in (TEACHER_BYTES, shares.VISIBLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(shares, "_assigned_by_ray", lambda: False)
    monkeypatch.setattr(shares, "_taken", [])
    shares.take_share.cache_clear()
    yield
    shares.take_share.cache_clear()
    for claim in shares._taken:
        claim.close()


def placed(gpus, processes, pinned=False):
    devices = tuple(f"cuda:{number}" for number in range(gpus))
    return Placement(devices, processes, 0.5, 2**30, 2**29, pinned)


def test_a_share_limits_the_bytes_for_teachers_unless_the_user_does(variables, monkeypatch):
    assert shares.shares_of(Placement()) is None
    shares.take_share(shares.shares_of(placed(1, 1)))
    assert os.environ[TEACHER_BYTES] == str(2**29)
    assert shares.VISIBLE not in os.environ
    monkeypatch.setenv(TEACHER_BYTES, "7")
    shares.take_share(shares.shares_of(placed(1, 1)))
    assert os.environ[TEACHER_BYTES] == "7"


def test_flower_keeps_no_more_processes_busy_than_nodes_that_are_sent_messages(monkeypatch):
    """Of a pool of four processes, two messages at a time reach only two."""
    nodes = [{"Resources": {"CPU": 4}}]
    monkeypatch.setattr(ray_actor.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_actor.ray, "get", lambda future: (None, None, future))
    pool = ray_actor.BasicActorPool(ray_actor.ClientAppActor, {"num_cpus": 1}, {})
    pool.pool = ["a", "b", "c", "d"]
    used = set()

    def submit(number):
        def send(actor, *_):
            used.add(actor)
            return number, actor

        return pool.submit(send, (None, None, "", None))

    under_way = [submit(0), submit(1)]
    for number in range(2, 8):
        pool.fetch_result_and_return_actor_to_pool(under_way.pop(number % 2))
        under_way.append(submit(number))
    assert used == {"c", "d"}
    submit(8)
    assert len(used) == 3  # the control: a third at a time


def test_processes_take_one_share_each_and_no_more_than_there_are(variables, monkeypatch):
    monkeypatch.setenv(shares.VISIBLE, "4,6")
    offered = shares.shares_of(placed(2, 3))
    forks = multiprocessing.get_context("fork")
    pipes = []

    def process(pipe):
        try:
            shares.take_share(offered)
            shares.take_share(offered)
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
        assert take().startswith("the GPUs have room for 3 client processes, but Flower uses ")
        monkeypatch.setattr(shares, "_assigned_by_ray", lambda: True)
        assert take() == "4,6"  # as Ray has set it
        monkeypatch.setattr(shares, "_assigned_by_ray", lambda: False)
        end(*pipes.pop(1))
        assert take() == "6"  # which the process that ended had
    finally:
        for pair in pipes:
            end(*pair)


def test_a_running_ray_cluster_is_offered_no_shares_but_what_to_request(monkeypatch):
    monkeypatch.setattr(shares, "prepare_clients", lambda *_: placed(2, 3))
    line, offered = shares.place_clients(None, 3)
    assert (line, offered.number, offered.gpus) == (str(placed(2, 3)), 3, 2)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    requested = "client-resources-num-cpus=1 client-resources-num-gpus=0.5"
    line, offered = shares.place_clients(None, 3)
    assert f'--federation-config "{requested}"' in line
    assert offered is None


def test_a_pinned_gpu_is_not_renumbered(variables):
    offered = shares.shares_of(placed(2, 1, pinned=True))
    shares.take_share(offered)
    assert shares.VISIBLE not in os.environ
    shares.take_share(offered)  # the same one
    shares.take_share.cache_clear()
    with pytest.raises(UserError, match="room for 1 client processes"):
        shares.take_share(offered)
