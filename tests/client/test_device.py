"""The devices of teachers, and which teachers stay there."""

import pytest
import torch

from fed_dpsd.client import device
from fed_dpsd.client.device import (
    TeacherCache,
    device_of,
    named_device,
    teacher_cache,
)
from fed_dpsd.errors import UserError
from fed_dpsd.models.classifiers import CLASSIFIERS, FIXED
from fed_dpsd.models.torchvision_networks import GROUP_FORMS, NETWORKS
from tests.every import every


@every(
    ("overrides", "expected"),
    [
        (("device=cpu",), "cpu"),
        (("device=auto",), "auto"),
        (("device=cuda:1",), "cuda:1"),
        (("device=cpu", "client_device=cuda"), "cuda"),
        (("device=cuda", "client_device=cpu"), "cpu"),
        (("device=auto", "model=scattering"), "cpu"),  # all clients share its features
        (("device=cuda", "model=scattering"), "cuda"),  # as configured
        # Noise that protects needs teachers that no other teacher's memory can touch.
        (("device=cuda", "noise=secure"), "cpu"),
        (("device=cuda", "noise=secure", "federation=deployment"), "cuda"),
        (("device=cuda", "noise=secure", "federation=deployment", "teachers_per_client=2"), "cpu"),
        (("device=cuda", "teachers_per_client=2"), "cuda"),
    ],
)
def test_the_device_of_a_clients_teachers(small, overrides, expected):
    assert named_device(small(*overrides).config, 0) == expected


def test_a_process_that_does_not_see_the_device_says_so(small):
    assert device_of(small("device=auto").config, 0).type == "cpu"
    with pytest.raises(UserError, match="client_device=cuda: this machine has no usable GPU"):
        device_of(small("device=cuda").config, 0)


@every(
    ("overrides", "there"),
    [
        (("training=plain",), True),
        (("training=dp_sgd",), False),
        (("training=output_gradient",), False),
        (("method=central", "training=lp_2st", "partition=iid"), False),
    ],
)
def test_private_trainings_stay_on_the_processor(small, overrides, there):
    assert (small(*overrides).training.reads == "images") is there


@every("name", sorted({*CLASSIFIERS} - {*NETWORKS, *GROUP_FORMS.values()}))
def test_the_architectures_with_fixed_features_are_listed(name):
    with torch.device("meta"):
        assert CLASSIFIERS[name]((1, 16, 16), 10, 4).fixed is (name in FIXED)


class Client:
    def __init__(self):
        self.dropped = 0

    def drop(self):
        self.dropped += 1


def test_the_teachers_that_were_used_longest_ago_leave_first():
    held = TeacherCache(limit=30)
    one, two, three, four = clients = [Client() for _ in range(4)]
    for client in (one, two, three):
        held.use(client, 10)
    held.use(one, 10)
    held.use(four, 10)
    assert [client.dropped for client in clients] == [0, 1, 0, 0]
    held.use(four, 25)  # it is larger now
    assert [client.dropped for client in clients] == [1, 1, 1, 0]


def test_one_clients_teachers_may_exceed_the_limit_alone():
    held = TeacherCache(limit=5)
    small, large = Client(), Client()
    held.use(small, 1)
    held.use(large, 100)
    assert (small.dropped, large.dropped) == (1, 0)


def test_what_is_gone_takes_no_room():
    held = TeacherCache(limit=20)
    kept = Client()
    held.use(kept, 10)
    held.use(Client(), 10)  # nobody keeps it
    held.use(Client(), 10)
    assert kept.dropped == 0


def test_the_limit_is_given_or_half_of_what_is_free(monkeypatch):
    teacher_cache.cache_clear()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1_000, 4_000))
    assert teacher_cache(torch.device("cpu"))._limit == device.PROCESSOR_BYTES
    assert teacher_cache(torch.device("cuda:0"))._limit == 500
    monkeypatch.setenv(device.TEACHER_BYTES, "70")
    assert teacher_cache(torch.device("cuda:1"))._limit == 70
    teacher_cache.cache_clear()
