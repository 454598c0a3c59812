"""Classifiers and generators, and how they are initialised without a global generator."""

from collections.abc import Callable

import torch
from torch import nn


def initialise(build: Callable[[], nn.Module], generator: torch.Generator) -> nn.Module:
    """Build a module and draw its weights (Xavier, zero bias) from `generator` alone.

    The module is built on the meta device, so no layer draws from torch's global generator.
    """
    with torch.device("meta"):
        module = build()
    module.to_empty(device="cpu")
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight, generator=generator)
                if layer.bias is not None:
                    layer.bias.zero_()
            elif isinstance(layer, nn.BatchNorm2d):
                layer.reset_running_stats()
                layer.weight.fill_(1)
                layer.bias.zero_()
    return module
