"""Placement on devices that this machine may not have."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.simulation.ray_transport import ray_actor

from fed_dpsd.client.device import TEACHER_BYTES
from fed_dpsd.engines import placement
from fed_dpsd.engines.placement import (
    CONTEXT,
    MOST,
    ROOM,
    SERVER,
    UNITS,
    Placement,
    gpu_fraction,
    place,
)
from fed_dpsd.errors import UserError
from fed_dpsd.models.devices import Device

GIB = 2**30
SMALL_GPU = Device("cuda:0", "small", 8 * GIB, 7 * GIB)
LARGE_GPU = Device("cuda:0", "large", 80 * GIB, 79 * GIB)
PLAIN = ("training=plain", "device=auto")


def second(device):
    return replace(device, name="cuda:1")


def flowers_processes(monkeypatch, placed):
    """How many processes Flower's own function starts with the resources of a placement."""
    own = placed.backend["init_args"]
    resources = {"CPU": own["num_cpus"], "GPU": own["num_gpus"]}
    monkeypatch.setattr(ray_actor.ray, "nodes", lambda: [{"Resources": resources}])
    return ray_actor.pool_size_from_resources(placed.backend["client_resources"])


def rays_processes(placed):
    """How many processes with this share Ray fits on a GPU; it counts ten-thousandths."""
    return UNITS // round(placed.fraction * UNITS)


def test_clients_on_the_processor_request_no_gpu(small):
    assert place(small(*PLAIN), 5, (), 16) == Placement()
    assert Placement().backend == {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    assert Placement().environment == {}
    for overrides in (
        ("training=plain", "device=cpu"),
        ("training=plain", "device=cuda", "client_device=cpu"),
        ("training=plain", "device=cuda", "noise=secure"),
        ("training=plain", "device=auto", "model=scattering"),
    ):
        assert place(small(*overrides), 5, (LARGE_GPU,), 16) == Placement(), overrides


def test_no_gpu_is_touched_where_no_client_uses_one(small, monkeypatch):
    """Each would lose the memory of a context; the server's device must still exist."""
    monkeypatch.setattr(placement, "gpus", pytest.fail)
    monkeypatch.setattr(placement, "number_of_gpus", lambda: 1)
    assert placement.place_on_this_machine(small(*PLAIN, "client_device=cpu"), 5) == Placement()
    with pytest.raises(UserError, match=r"^server_device=cuda:1: this machine has only cuda:0"):
        placement.place_on_this_machine(small("client_device=cpu", "server_device=cuda:1"), 5)
    monkeypatch.setattr(placement, "gpus", lambda: (LARGE_GPU,))
    assert placement.place_on_this_machine(small(*PLAIN), 5).devices == ("cuda:0",)  # the control


def test_a_running_ray_cluster_gets_no_resources(monkeypatch):
    """Ray refuses to join a cluster with a number of processors or GPUs."""
    shared = Placement(("cuda:0", "cuda:1"), 3, 0.5, GIB, GIB // 2)
    for address, joined in (("192.0.2.1:6379", True), ("local", False), ("", False)):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert shared.backend["client_resources"] == {"num_cpus": 1, "num_gpus": 0.5}
        assert ("init_args" in shared.backend) is not joined, address
    assert shared.backend["init_args"] == {"num_gpus": 2, "num_cpus": 3}


@pytest.mark.parametrize("table", [(SMALL_GPU,), (LARGE_GPU,), (SMALL_GPU, second(LARGE_GPU))])
def test_clients_share_devices_within_their_memory(small, monkeypatch, table):
    for nodes in (1, 3, 5, 7, 10, 20, 33, 1_000):
        placed = place(small(*PLAIN), nodes, table, 64)
        assert placed.devices == tuple(device.name for device in table)
        assert 1 <= placed.processes <= min(nodes, 64)
        assert flowers_processes(monkeypatch, placed) == placed.processes
        assert rays_processes(placed) * len(table) >= placed.processes  # Ray has room for each
        least = min(d.free - (SERVER + CONTEXT) * (d.name == "cuda:0") for d in table)
        assert rays_processes(placed) * placed.share <= least
        assert placed.share > placed.teachers + CONTEXT > CONTEXT
        assert placed.environment == {TEACHER_BYTES: str(placed.teachers)}
        assert "GiB" in str(placed)
    # The control: with 0.095 of each GPU, Flower would start one more than Ray has room for.
    own = {"Resources": {"CPU": 64, "GPU": 2}}
    monkeypatch.setattr(ray_actor.ray, "nodes", lambda: [own])
    assert ray_actor.pool_size_from_resources({"num_cpus": 1, "num_gpus": 0.095}) == 21 > 20


def test_ray_and_flower_fit_as_many_processes_on_a_gpu_as_have_memory():
    """With 32 bits, Flower's fifth is larger than 1/5, and Ray counts ten-thousandths."""
    assert 5 * float(np.float32(0.2)) > 1  # the control
    for each in range(1, MOST + 1):
        part = gpu_fraction(each)
        assert int(1 / part) == int(1 / np.float32(part)) == each
        assert rays_processes(Placement(fraction=part)) == each
    assert rays_processes(Placement(fraction=gpu_fraction(150))) > 150  # the control: beyond MOST


def test_more_clients_than_fit_take_turns(small):
    few = place(small(*PLAIN), 5, (SMALL_GPU,), 64)
    many = place(small(*PLAIN), 1_000, (SMALL_GPU,), 64)
    assert few.processes == 5 < many.processes == 10  # 7 GiB less the server's 1.5, by halves
    assert many.share < few.share
    assert place(small(*PLAIN), 1_000, (LARGE_GPU,), 4).processes == 4  # a processor for each
    assert place(small(*PLAIN), 1_000, (replace(LARGE_GPU, free=999 * GIB),), 999).processes == MOST


def test_of_two_devices_the_one_with_less_room_decides(small):
    pair = SMALL_GPU, second(replace(LARGE_GPU, free=2 * GIB))
    assert place(small(*PLAIN), 1_000, pair, 64).processes == 2 * 3
    alone = place(small(*PLAIN, "client_device=cuda:0"), 1_000, pair, 64)
    assert (alone.processes, alone.devices) == (10, ("cuda:0",))


def test_a_named_device_is_not_hidden_from_its_processes(small):
    """Ray would show them its own first GPU, which is not the named one."""
    table = LARGE_GPU, second(LARGE_GPU)
    placed = place(small(*PLAIN, "client_device=cuda:1"), 5, table, 64)
    assert placed.devices == ("cuda:1",)
    assert placed.environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert placed.backend["init_args"]["num_gpus"] == 1
    assert place(small(*PLAIN), 5, table, 64).environment.keys() == {TEACHER_BYTES}


def test_the_servers_part_is_reserved_where_it_shares_the_device(small):
    for server, reserved in (("auto", True), ("cuda:1", False), ("cpu", False)):
        experiment = small(*PLAIN, f"server_device={server}", "client_device=cuda:0")
        placed = place(experiment, 5, (LARGE_GPU, second(LARGE_GPU)), 64)
        assert (placed.share * 5 <= LARGE_GPU.free - SERVER - CONTEXT) is reserved, server
        assert reserved or placed.share == LARGE_GPU.free // 5


def test_the_need_is_what_a_teacher_takes(small):
    """By hand, of a linear network: weights, gradients, two of Adam, the first weights, a step."""
    experiment = small(*PLAIN, "model.teacher=mlp", "teachers_per_client=3")
    held, work = placement._process_bytes(experiment, 0)
    weights = 4 * (64 * 32 + 32 + 32 * 10 + 10)  # float32; width 4
    assert held == 3 * weights
    tensors = (work - CONTEXT) / ROOM
    assert 5 * weights < tensors < 8 * weights + 4 * 4 * 128 * (64 + 32 + 10)
    settings = ("model.teacher=cnn3", "teacher.batch_size=128")
    plain, private = (
        placement._process_bytes(small(f"training={name}", *settings), 0)
        for name in ("plain", "dp_sgd")
    )
    assert private[1] < plain[1]  # it learns on the CPU
    one, both = (
        place(small(*PLAIN, f"model.teachers=[{names}]"), 5, (LARGE_GPU,), 64)
        for names in ("mlp", "mlp,cnn3")
    )
    assert both.share - both.teachers > one.share - one.teachers  # the largest teacher counts


def test_a_teacher_that_does_not_fit_is_one_error(small):
    full = replace(SMALL_GPU, free=2 * GIB)
    with pytest.raises(UserError, match="client_device=auto: a process with .* needs") as error:
        place(small(*PLAIN, "model.teacher=resnet18"), 5, (full,), 16)
    assert "cuda:0 small, 2.00 of 8.00 GiB free" in str(error.value)
    assert "client_device=cpu" in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="of cuda:1 small.*client_device=cuda:N for another GPU"):
        place(small(*PLAIN), 5, (LARGE_GPU, second(replace(SMALL_GPU, free=0))), 16)


@pytest.mark.parametrize("key", ["client_device", "server_device"])
def test_a_device_that_is_not_there_is_one_error(small, key):
    for name, table, said in (
        ("cuda", (), "this machine has no usable GPU; use {key}=auto or cpu"),
        ("cuda:3", (LARGE_GPU, second(LARGE_GPU)), "this machine has only cuda:0 and cuda:1"),
    ):
        with pytest.raises(UserError, match=f"{key}={name}: {said.format(key=key)}"):
            place(small("device=cpu", f"{key}={name}"), 5, table, 16)
        with pytest.raises(UserError, match=f"^device={name}: {said.format(key='device')}"):
            place(small(f"device={name}"), 5, table, 16)
