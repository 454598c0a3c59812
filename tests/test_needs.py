"""What a run needs: estimates that grow with it, and refusals before anything is read."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from fed_dpsd import checks, needs
from fed_dpsd import experiment as experiments
from fed_dpsd.client.hospital import Hospital
from fed_dpsd.config.compose import compose
from fed_dpsd.engines.clients import prepare_clients
from fed_dpsd.engines.doctor import examine_run
from fed_dpsd.engines.ready import check_run
from fed_dpsd.errors import ConfigError, UserError, size_text
from fed_dpsd.experiment import set_up
from fed_dpsd.methods.method import ReplayBuffer, State
from fed_dpsd.needs import PAGES, needs_of, require_room
from fed_dpsd.protocol import Request, Response
from fed_dpsd.server import checkpoint

PICTURES = ("data=imagefolder", "data.path=.", "data.classes=[a,b]", "data.num_classes=2")


def memory(experiment, records=None):
    return sum(needs_of(experiment, records).here.values())


def machine(monkeypatch, total=2**50, free=2**50):
    """Gives this machine `total` bytes of memory and a disk with `free` bytes."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=10**15))


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("rounds", (1, 10, 100)),
        ("queries_per_round", (64, 640, 6_400)),
        ("data.shape", ("[1,8,8]", "[1,16,16]", "[1,32,32]", "[3,32,32]")),
        ("model.teacher_width", (4, 8, 64)),
        ("model.student_width", (4, 8, 64)),
    ],
)
def test_more_of_anything_needs_no_less(small, setting, values):
    data = PICTURES if setting == "data.shape" else ()
    every = [needs_of(small(*data, f"{setting}={value}"), 1_000) for value in values]
    for part in ("request", "per_client", "run_disk", "cache_disk", "server_memory"):
        numbers = [getattr(each, part) for each in every]
        assert numbers == sorted(numbers), part
    memories = [sum(each.here.values()) for each in every]
    assert memories == sorted(set(memories))


def test_more_records_need_more(small):
    few, many = (needs_of(small(*PICTURES), records) for records in (1_000, 10_000))
    assert sum(few.here.values()) < sum(many.here.values())
    assert few.cache_disk < many.cache_disk
    assert "besides the records" in str(needs_of(small()))
    assert "besides the records" not in str(few)


def test_messages_and_checkpoints_are_estimated_by_what_they_hold(small, tmp_path):
    experiment = small("rounds=3", "queries_per_round=500")
    images, rows = np.zeros((500, 1, 8, 8), np.uint8), np.zeros((500, 10), np.float32)
    request = Request(1, images, rows)
    answer = Response(1, rows.astype(np.float64))  # the largest kind
    estimated = needs_of(experiment)
    assert estimated.request == request.nbytes + answer.nbytes
    assert estimated.per_client == 3 * estimated.request
    buffer = []
    for number in (1, 2, 3):
        buffer.append(ReplayBuffer(images, rows, rows))
        checkpoint.save(tmp_path, State(number, {}, buffer))
    kept = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert kept < estimated.run_disk - PAGES < 3 * kept  # answers and requests are kept too


# Growth of the peak of resident memory of `fed-dpsd run num_clients=2` with few steps, in bytes, as
# measured on an x86 processor, between settings with less and with more of something. Each has a
# number of records.
GREY = (*PICTURES, "data.shape=[1,32,32]", "rounds=1", "queries_per_round=256")
LARGE = (*PICTURES, "data.shape=[1,128,128]", "rounds=1", "queries_per_round=64")
ROUND = (*PICTURES, "data.shape=[1,32,32]", "queries_per_round=1024")
MEASURED = {
    "3 more rounds of 4,096 digits": (
        (("queries_per_round=4096", "rounds=1"), 1_437),
        (("queries_per_round=4096", "rounds=4"), 1_437),
        37e6,
    ),
    "9 more rounds of 1,024 images": (
        ((*ROUND, "rounds=1"), 2_000),
        ((*ROUND, "rounds=10"), 2_000),
        70e6,
    ),
    "3,840 more images in a round": (
        ((*ROUND, "queries_per_round=256", "rounds=1"), 2_000),
        ((*ROUND, "queries_per_round=4096", "rounds=1"), 2_000),
        48e6,
    ),
    "10,000 more records of 32 pixels": ((GREY, 2_000), (GREY, 12_000), 138e6),
    "3,500 more records of 128 pixels": ((LARGE, 500), (LARGE, 4_000), 231e6),
}


@pytest.mark.parametrize("case", MEASURED)
def test_memory_grows_as_it_was_measured(monkeypatch, case):
    monkeypatch.setattr(needs, "SIDE", 128)  # the work on a batch does not grow
    less, more, measured = MEASURED[case]
    start, end = (
        memory(set_up(compose((*overrides, "num_clients=2")), Path.cwd()), records)
        for overrides, records in (less, more)
    )
    assert measured / 2 < end - start < 2 * measured


def test_a_request_that_no_message_holds_is_refused_with_the_number_that_fits(small, monkeypatch):
    monkeypatch.setattr(checks, "LARGEST_REQUEST", 100 * 64)
    assert small("queries_per_round=100")  # the control
    with pytest.raises(ConfigError) as error:
        small("queries_per_round=101", "rounds=3")
    (problem,) = error.value.problems
    assert problem.startswith("queries_per_round=101: ")
    assert "use queries_per_round=100, with more rounds" in problem
    assert "(rounds=4)" in problem
    # Weights and sums have no images.
    assert small("queries_per_round=101", "method=fedavg")
    assert small("queries_per_round=101", "method=weights_once", "rounds=1")


def test_the_largest_request_is_512_mib(small):
    many = 2**29 // 64
    assert small(f"queries_per_round={many}")
    with pytest.raises(ConfigError, match=f"use queries_per_round={many}, .*rounds=4"):
        small(f"queries_per_round={many + 1}")


def test_what_does_not_fit_is_refused_before_anything_is_read(small, monkeypatch, tmp_path):
    experiment = small("rounds=100", "queries_per_round=5000")
    needed, disk = memory(experiment), needs_of(experiment).run_disk
    monkeypatch.setattr(experiments.datasets, "load", pytest.fail)
    experiments.forget_data()
    for total, free, said in (
        (
            needed - 1,
            2**50,
            f"about {size_text(needed)} of memory.*; use fewer rounds or a smaller",
        ),
        (2**50, disk - 1, f"writes about {size_text(disk)} to {tmp_path}/runs, which has .* free"),
    ):
        machine(monkeypatch, total, free)
        with pytest.raises(UserError, match=f"^rounds=100 queries_per_round=5000 .*{said}"):
            check_run(experiment, lambda: prepare_clients(experiment, 1))
    assert not (tmp_path / "runs").exists()
    machine(monkeypatch, needed, disk)  # the control
    require_room(experiment)


def test_a_resumed_run_has_written_a_part_of_its_files(small, monkeypatch):
    machine(monkeypatch, free=0)
    with pytest.raises(UserError, match="free"):
        require_room(small())
    require_room(small(), new=False)


def test_the_keys_of_the_largest_part_are_named(small, monkeypatch):
    machine(monkeypatch, total=needs.PROCESS)
    for overrides, key in (
        (("queries_per_round=1000000",), "queries_per_round"),
        (("model.teacher=mlp", "model.teacher_width=100000"), "model.teacher"),
        ((*PICTURES, "model=scattering", "data.shape=[3,32,32]"), "data.shape"),
    ):
        with pytest.raises(UserError, match=f"; use .*{key}"):
            require_room(small(*overrides))


def test_a_coordinator_has_no_clients_on_its_machine(deployed, monkeypatch):
    experiment = deployed("model.teacher=mlp", "model.teacher_width=1000")
    estimated = needs_of(experiment)
    assert sum(estimated.here.values()) == estimated.server_memory
    assert estimated.client_memory > needs.PROCESS
    machine(monkeypatch, total=estimated.server_memory, free=estimated.run_disk)
    require_room(experiment)


def test_a_hospital_refuses_what_its_machine_cannot_hold_before_it_reads(
    deployed, monkeypatch, tmp_path
):
    experiment = deployed("rounds=50", "queries_per_round=500")
    monkeypatch.setattr(Hospital, "read", pytest.fail)
    estimated = needs_of(experiment, 1_000)
    assert estimated.client_memory > needs_of(experiment).client_memory
    for total, free in ((estimated.client_memory - 1, 2**50), (2**50, estimated.client_disk - 1)):
        machine(monkeypatch, total, free)
        with pytest.raises(UserError, match="^rounds=50 queries_per_round=500 "):
            needs.require_room_of_hospital(experiment, 1_000)
    machine(monkeypatch, estimated.client_memory, estimated.client_disk)
    needs.require_room_of_hospital(experiment, 1_000)


def test_records_are_counted_before_an_image_is_read(small, monkeypatch, tmp_path):
    """The files are no images; the control fits. Decoded images in the cache need no new room."""
    for name in ("a", "b"):
        (tmp_path / "scans" / name).mkdir(parents=True)
        for number in range(50):
            (tmp_path / "scans" / name / f"{number}.png").write_bytes(b"no image")
    where = f"data.path={tmp_path}/scans", "data.classes=[a,b]", "data.num_classes=2"
    experiment = small(
        "data=imagefolder", *where, "data.shape=[1,1024,1024]", "queries_per_round=1"
    )
    estimated = needs_of(experiment, 100)
    total, disk = sum(estimated.here.values()), estimated.cache_disk
    for given, said in (
        ((total - 1, 2**50), "of memory, and this machine has"),
        ((2**50, disk - 1), "writes about .* to .*cache, which .*; use a smaller data.shape"),
    ):
        machine(monkeypatch, *given)
        with pytest.raises(UserError, match=f"^rounds=.* data.shape=.1,1024,1024.: .*{said}"):
            require_room(experiment, count=True)
    machine(monkeypatch, total, max(disk, estimated.run_disk, estimated.temporary))
    require_room(experiment, count=True)
    monkeypatch.setattr(needs, "count_items", lambda *_: (100, True))
    assert memory(experiment) < total - 1
    machine(monkeypatch, total, max(needs_of(experiment, 100, True).cache_disk, estimated.run_disk))
    require_room(experiment, count=True)


def test_the_limit_of_a_service_or_container_counts(small, monkeypatch, tmp_path):
    """The limit of any group above the process's own; "max" is none."""
    experiment = small()
    needed = memory(experiment)
    machine(monkeypatch)
    monkeypatch.setattr(needs, "CONTROL_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(needs, "CONTROLS", tmp_path)
    (tmp_path / "cgroup").write_text("0::/system.slice/fed-dpsd.service\n")
    (tmp_path / "system.slice" / "fed-dpsd.service").mkdir(parents=True)
    (tmp_path / "system.slice" / "fed-dpsd.service" / "memory.max").write_text("max\n")
    for limit, fits in ((needed, True), (needed - 1, False)):
        (tmp_path / "system.slice" / "memory.max").write_text(f"{limit}\n")
        if fits:
            require_room(experiment)
            continue
        with pytest.raises(UserError, match="of memory, and this machine has"):
            require_room(experiment)


def test_the_doctor_checks_the_same_needs(small, monkeypatch):
    experiment = small("partition=iid")
    records = len(experiments.load_data(experiment.config.data, experiment.config.cache).train)
    needed = memory(experiment, records)
    for available, good in ((needed - 1, False), (needed + 1, True)):
        free = SimpleNamespace(available=available)
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: free)
        (check,) = [each for each in examine_run(experiment) if each.name == "memory"]
        assert (check.good, size_text(needed) in check.state) == (good, True)
