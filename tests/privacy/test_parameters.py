"""Parameters out of range: each is refused by name."""

import math

import pytest

from fed_dpsd.papers.output_gradient import OutputGradient
from fed_dpsd.privacy.dp_sgd import DPSGD
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import Shards
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.votes import NoisyVotes
from tests.every import every

STEPS = {"noise_multiplier": 1.0, "steps": 1, "learning_rate": 1.0}
BOUNDED = {"sample_rate": 0.5, "max_grad_norm": 0.5}
PATIENTS = {"unit": "patient", "records_per_patient": 4}
OUTPUTS = {
    "bound": 0.1,
    "stability": 1e-4,
    "label_step": 0.1,
    "batch_size": 1,
    "mean_over": "batch",
}
TEN = {"num_classes": 10, "noise_multiplier": 1.0}
WRONG = [
    (NormalizedGradient, TEN, "noise_multiplier", (-1.0, 1e-101, math.nan, 1e101)),
    (NormalizedGradient, TEN, "bound", (-1.0, 1e-101)),
    (NormalizedGradient, TEN, "stability", (0.0,)),
    (NormalizedGradient, TEN, "k", (1, 11)),
    (NormalizedGradient, TEN, "noise_at", ("both",)),
    (NormalizedGradient, TEN, "mask", ("hidden",)),
    (NormalizedGradient, TEN, "normalise", ("round",)),
    (NormalizedGradient, TEN, "scaling", ("stretch",)),
    (NoisyVotes, TEN, "noise_multiplier", (-1.0, 1e-101)),
    (NoisyVotes, TEN, "noise_law", ("cauchy",)),
    (NoisyVotes, TEN, "noise_at", ("nobody",)),
    (NoisyMax, TEN, "noise_multiplier", (-1.0,)),
    (NoisyMax, TEN, "noise_law", ("cauchy",)),
    (Shards, {}, "teachers", (0,)),
    (Shards, {}, "by", ("ward",)),
    (
        TopKRandomizedResponse,
        {"num_classes": 10, "epsilon_per_answer": 1.0, "k": 3},
        "epsilon_per_answer",
        (-1.0, 21.0, math.nan, -math.inf),
    ),
    (TopKRandomizedResponse, {"num_classes": 10, "epsilon_per_answer": 1.0}, "k", (1, 11)),
    (DPSGD, STEPS | BOUNDED, "noise_multiplier", (0.0,)),
    (DPSGD, STEPS | BOUNDED, "sample_rate", (0.0, 1.5)),
    (DPSGD, STEPS | BOUNDED, "steps", (0,)),
    (DPSGD, STEPS | BOUNDED, "copies", (0, 10)),
    (DPSGD, STEPS | BOUNDED, "max_grad_norm", (math.inf, 1e-43)),  # float32 rounds the latter up
    (DPSGD, STEPS | BOUNDED, "learning_rate", (-1.0,)),
    (DPSGD, STEPS | BOUNDED, "count_fraction", (0.0, math.inf, math.nan)),
    (DPSGD, STEPS | BOUNDED | PATIENTS, "unit", ("client", "record")),
    (DPSGD, STEPS | BOUNDED | PATIENTS, "records_per_patient", (0, 65)),
    (DPSGD, STEPS | BOUNDED | PATIENTS | {"records_per_patient": 8}, "copies", (9,)),
    *(
        (OutputGradient, STEPS | OUTPUTS, field, (value,))
        for field, value in (
            *(("noise_multiplier", 0.0), ("bound", -1.0), ("stability", 0.0), ("steps", 0)),
            *(("label_step", math.inf), ("learning_rate", 0.0), ("batch_size", 0)),
            ("mean_over", "epoch"),
        )
    ),
]


@every(("make", "right", "field", "values"), WRONG)
def test_a_parameter_out_of_its_range_is_named(make, right, field, values):
    make(**right)
    for value in values:
        # Pydantic writes a field's name on a line of its own.
        named = rf"{field}(=|\n)|records_per_patient=4 needs unit=patient"
        with pytest.raises(ValueError, match=named):
            make(**right | {field: value})
