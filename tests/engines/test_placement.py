"""Placement on devices that this machine need not have."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.simulation.ray_transport import ray_actor

from fed_dpsd.client.device import TEACHER_BYTES
from fed_dpsd.engines import placement
from fed_dpsd.engines.placement import CONTEXT, ROOM, SERVER, fitting, fraction, place
from fed_dpsd.errors import UserError
from fed_dpsd.models.devices import Device

GIB = 2**30
SMALL_GPU = Device("cuda:0", "small", 8 * GIB, 7 * GIB)
LARGE_GPU = Device("cuda:0", "large", 80 * GIB, 79 * GIB)
PLAIN = ("training=plain", "device=auto")


def second(device):
    return replace(device, name="cuda:1")


def flowers_processes(monkeypatch, placed):
    """How many processes Flower starts, by its own function, of the resources that we ask for."""
    settings = dict(setting.split("=") for setting in placed.resources)
    resources = {
        "CPU": int(settings["init-args-num-cpus"]),
        "GPU": int(settings["init-args-num-gpus"]),
    }
    monkeypatch.setattr(ray_actor.ray, "nodes", lambda: [{"Resources": resources}])
    asked = float(np.float32(settings["client-resources-num-gpus"]))
    return ray_actor.pool_size_from_resources({"num_cpus": 1, "num_gpus": asked})


def rays_processes(placed):
    """How many processes of a part Ray fits on a GPU; it counts ten-thousandths."""
    return 10_000 // round(float(np.float32(placed.fraction)) * 10_000)


def test_without_a_gpu_nothing_is_asked_of_ray(small):
    placed = place(small(*PLAIN), 5, (), 16)
    assert placed == placement.Placement()
    assert placed.resources == ()
    assert placed.environment == {}


@pytest.mark.parametrize(
    "overrides",
    [
        ("training=plain", "device=cpu"),
        ("training=plain", "device=cuda", "client_device=cpu"),
        ("training=plain", "device=cuda", "noise=secure"),
        ("training=plain", "device=auto", "model=scattering"),
    ],
)
def test_clients_on_the_processor_ask_for_no_gpu_beside_one(small, overrides):
    assert place(small(*overrides), 5, (LARGE_GPU,), 16).resources == ()


@pytest.mark.parametrize("nodes", [5, 20, 1_000])
@pytest.mark.parametrize("table", [(SMALL_GPU,), (LARGE_GPU,), (SMALL_GPU, second(LARGE_GPU))])
def test_clients_share_devices_within_their_memory(small, monkeypatch, nodes, table):
    placed = place(small(*PLAIN), nodes, table, 64)
    assert placed.devices == tuple(device.name for device in table)
    assert 1 <= placed.processes <= min(nodes, 64)
    assert flowers_processes(monkeypatch, placed) == placed.processes
    assert rays_processes(placed) * len(table) >= placed.processes  # Ray has a place for each
    least = min(d.free - (SERVER + CONTEXT) * (d.name == "cuda:0") for d in table)
    assert rays_processes(placed) * placed.share <= least
    assert placed.share > placed.teachers + CONTEXT > CONTEXT
    assert placed.environment == {TEACHER_BYTES: str(placed.teachers)}
    assert "GiB" in str(placed)


def test_more_clients_than_fit_take_turns(small):
    few = place(small(*PLAIN), 5, (SMALL_GPU,), 64)
    many = place(small(*PLAIN), 1_000, (SMALL_GPU,), 64)
    assert few.processes == 5 < many.processes == 10  # 7 GiB less the server's 1.5, by halves
    assert many.share < few.share


def test_processes_are_at_most_processors(small):
    assert place(small(*PLAIN), 1_000, (LARGE_GPU,), 4).processes == 4


def test_of_two_devices_the_one_with_less_room_decides(small):
    pair = SMALL_GPU, second(replace(LARGE_GPU, free=2 * GIB))
    placed = place(small(*PLAIN), 1_000, pair, 64)
    assert placed.processes == 2 * 3
    alone = place(small(*PLAIN, "client_device=cuda:0"), 1_000, pair, 64)
    assert alone.processes == 10
    assert alone.devices == ("cuda:0",)


def test_a_named_device_is_not_hidden_from_its_processes(small):
    """Ray would show them its own first GPU alone, which is another."""
    table = LARGE_GPU, second(LARGE_GPU)
    placed = place(small(*PLAIN, "client_device=cuda:1"), 5, table, 64)
    assert placed.devices == ("cuda:1",)
    assert placed.environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert "init-args-num-gpus=1" in placed.resources
    assert place(small(*PLAIN), 5, table, 64).environment.keys() == {TEACHER_BYTES}


@pytest.mark.parametrize(
    ("overrides", "reserved"),
    [((), True), (("server_device=cuda:1",), False), (("server_device=cpu",), False)],
)
def test_the_servers_part_is_reserved_where_it_shares_the_device(small, overrides, reserved):
    table = LARGE_GPU, second(LARGE_GPU)
    experiment = small(*PLAIN, "client_device=cuda:0", *overrides)
    placed = place(experiment, 5, table, 64)
    assert (placed.share * 5 <= LARGE_GPU.free - SERVER - CONTEXT) is reserved
    if not reserved:
        assert placed.share == LARGE_GPU.free // 5


def test_the_need_is_what_a_teacher_takes(small):
    """By hand, of a linear network: weights, gradients, two of Adam, the first weights, a step."""
    experiment = small(*PLAIN, "model.teacher=mlp", "teachers_per_client=3")
    need = placement._need(experiment, 0)
    weights = 4 * (64 * 32 + 32 + 32 * 10 + 10)  # float32; width 4
    assert need.held == 3 * weights
    tensors = (need.work - CONTEXT) / ROOM
    assert 5 * weights < tensors < 8 * weights + 4 * 4 * 128 * (64 + 32 + 10)
    plain, private = (
        placement._need(
            small(f"training={name}", "model.teacher=cnn3", "teacher.batch_size=128"), 0
        )
        for name in ("plain", "dp_sgd")
    )
    assert private.work < plain.work  # it learns on the processor


def test_the_largest_teacher_counts(small):
    one, both = (
        place(small(*PLAIN, f"model.teachers=[{names}]"), 5, (LARGE_GPU,), 64)
        for names in ("mlp", "mlp,cnn3")
    )
    assert both.share - both.teachers > one.share - one.teachers


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
@pytest.mark.parametrize(
    ("name", "table", "said"),
    [
        ("cuda", (), "this machine has no usable GPU; use {key}=auto or cpu"),
        ("cuda:3", (LARGE_GPU, second(LARGE_GPU)), "this machine has cuda:0 and cuda:1 only"),
    ],
)
def test_a_device_that_is_not_there_is_one_error(small, key, name, table, said):
    with pytest.raises(UserError, match=f"{key}={name}: {said.format(key=key)}"):
        place(small("device=cpu", f"{key}={name}"), 5, table, 16)
    both = said.format(key="device")
    with pytest.raises(UserError, match=f"^device={name}: {both}"):
        place(small(f"device={name}"), 5, table, 16)


def test_a_part_of_a_gpu_survives_rounding():
    """Flower's to 32 bits, which makes a fifth larger, and Ray's to a ten-thousandth."""
    assert 5 * float(np.float32(0.2)) > 1  # the control
    for processes in range(1, 1_001):
        part = np.float32(fraction(processes))
        assert processes * float(part) <= 1
        assert int(1 / float(part)) >= processes
        assert processes * round(float(part) * 10_000) <= 10_000
        assert fraction(processes) >= 0.9 / processes


def test_ray_fits_no_more_on_a_gpu_than_there_is_memory_for():
    """From a hundred on more would fit: the control."""
    assert 10_000 // round(float(np.float32(fraction(150))) * 10_000) == 151
    for most in range(1, 301):
        number = fitting(most, most)
        assert 0.9 * most < number <= most
        assert 10_000 // round(float(np.float32(fraction(number))) * 10_000) <= most


def test_flower_starts_no_process_that_ray_has_no_place_for(small, monkeypatch):
    """0.95 of a GPU divided by ten, as it was, gave 21 on two GPUs, and Ray places 20 of them."""
    resources = {"CPU": 64, "GPU": 2}
    monkeypatch.setattr(ray_actor.ray, "nodes", lambda: [{"Resources": resources}])
    former = {"num_cpus": 1, "num_gpus": float(np.float32(0.095))}
    assert ray_actor.pool_size_from_resources(former) == 21 > 2 * (10_000 // 950)
    for nodes in (1, 3, 7, 10, 20, 33):
        placed = place(small(*PLAIN), nodes, (LARGE_GPU, second(LARGE_GPU)), 64)
        assert placed.processes == nodes
        assert flowers_processes(monkeypatch, placed) == nodes
        assert 2 * rays_processes(placed) >= nodes
