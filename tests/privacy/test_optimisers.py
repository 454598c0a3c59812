"""Optimisers against torch's own, and what they import."""

import subprocess
import sys

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fed_dpsd.privacy.optimisers import SGD, Adam
from tests.every import every

SETTINGS = [
    (Adam, torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    (Adam, torch.optim.Adam, {"betas": (0.5, 0.999)}),
    (SGD, torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (SGD, torch.optim.SGD, {}),
]
PROGRAM = """
import sys, torch
from fed_dpsd.models import initialise
from fed_dpsd.privacy.optimisers import Adam

layer = initialise(lambda: torch.nn.Linear(3, 2), torch.Generator())
optimiser = {kind}(layer.parameters(), 0.1)
optimiser.zero_grad()
layer(torch.ones(1, 3)).sum().backward()
optimiser.step()
print(sorted({{"sympy", "torch._dynamo"}} & sys.modules.keys()))
"""


def trained(kind, settings):
    """Weights after steps with a schedule, and the number of steps that a hook saw."""
    layer = torch.nn.Linear(5, 3)
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    optimiser = kind(layer.parameters(), 0.1, **settings)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=20)
    inputs = torch.randn(20, 4, 5, generator=torch.Generator().manual_seed(0))
    seen = []
    with register_optimizer_step_pre_hook(lambda *_: seen.append(1)):
        for batch in inputs[:-1]:
            optimiser.zero_grad()
            layer(batch).square().mean().backward()
            optimiser.step()
            schedule.step()
    return [parameter.detach().clone() for parameter in layer.parameters()], len(seen)


@every("ours, theirs, settings", SETTINGS)
def test_steps_and_hooks_are_torchs_to_the_last_bit(ours, theirs, settings):
    weights, seen = trained(ours, settings)
    expected, counted = trained(theirs, settings)
    assert seen == counted == 19
    assert all(map(torch.equal, weights, expected))


@pytest.mark.slow(seconds=12)
def test_a_step_does_not_import_what_only_compiling_needs():
    def imported(kind):
        program = [sys.executable, "-c", PROGRAM.format(kind=kind)]
        return subprocess.run(program, check=True, capture_output=True, text=True).stdout.strip()

    assert imported("Adam") == "[]"
    assert "torch._dynamo" in imported("torch.optim.Adam")  # the control
