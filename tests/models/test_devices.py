"""Devices by name, and the messages about missing devices."""

import pytest
import torch

from fed_dpsd.config import require_device
from fed_dpsd.errors import UserError
from fed_dpsd.models import devices
from tests.every import every


@every(
    ("name", "count", "said"),
    [
        ("cuda", 0, "client_device=cuda: this machine has no usable GPU; use client_device=auto"),
        ("cuda:0", 0, "client_device=cuda:0: this machine has no usable GPU"),
        ("cuda:3", 2, "client_device=cuda:3: this machine has only cuda:0 and cuda:1; use client"),
        ("cuda:1", 1, "this machine has only cuda:0; use client_device=cuda:0, auto or cpu"),
    ],
)
def test_a_device_that_is_not_there_is_named_with_what_is(name, count, said):
    with pytest.raises(UserError, match=said) as error:
        require_device("client_device", name, count)
    assert "\n" not in str(error.value)


@every(("name", "count"), [("auto", 0), ("cpu", 0), ("auto", 2), ("cuda", 1), ("cuda:1", 2)])
def test_a_device_that_is_there_is_none_to_speak_of(name, count):
    require_device("client_device", name, count)


def test_auto_is_a_gpu_where_there_is_one(monkeypatch):
    for there, kind in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert devices.torch_device("auto").type == kind
        assert devices.torch_device("cpu").type == "cpu"
        assert str(devices.torch_device("cuda:1")) == "cuda:1"


def test_the_table_has_every_gpu_with_its_memory(monkeypatch):
    assert devices.gpu_model(torch.device("cpu")) == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (2**30, (number + 1) * 2**31))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"card {number}")
    assert [str(device) for device in devices.gpus()] == [
        "cuda:0 card 0, 1.00 of 2.00 GiB free",
        "cuda:1 card 1, 1.00 of 4.00 GiB free",
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.gpus() == ()


def test_a_full_gpu_is_named_with_the_cause(monkeypatch):
    def memory(number):
        if number == 1:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return 2**30, 2**31

    monkeypatch.setattr(devices, "number_of_gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    with pytest.raises(UserError, match=r"^cuda:1 cannot be used \(CUDA error: out of memory\); "):
        devices.gpus()
