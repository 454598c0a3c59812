"""The memory of a computation, compared with sums by hand."""

import torch
from torch import nn

from fed_dpsd.models.footprint import peak_bytes, weight_bytes

ROWS, INPUTS, OUTPUTS = 8, 16, 4  # float32 of 4 bytes


def linear():
    return nn.Linear(INPUTS, OUTPUTS, device="meta")


def test_weights_are_parameters_and_buffers():
    assert weight_bytes(linear()) == 4 * (INPUTS * OUTPUTS + OUTPUTS)
    assert weight_bytes(nn.BatchNorm1d(3)) == 4 * 4 * 3 + 8  # and its counter of batches


def test_the_peak_is_what_lies_there_at_once():
    layer = linear()

    def work():
        for _ in range(3):  # what is free again does not add up
            with torch.inference_mode():
                layer(torch.empty(ROWS, INPUTS, device="meta"))
        torch.empty(10_000)  # on the CPU

    expected = weight_bytes(layer) + 4 * ROWS * (INPUTS + OUTPUTS)
    assert peak_bytes(layer, work) == expected


def test_what_a_gradient_needs_stays_and_a_view_costs_nothing():
    layer = linear()
    inputs = torch.empty(ROWS, INPUTS, device="meta")

    def forward():
        layer(inputs).view(-1).sum().backward()

    peak = peak_bytes(layer, forward)
    rows = 4 * ROWS * (INPUTS + OUTPUTS)
    assert peak > weight_bytes(layer) + 4 * ROWS * OUTPUTS
    assert peak <= 2 * weight_bytes(layer) + 2 * rows
