"""Losses, weights, predictions and pictures that are not finite."""

import math

import numpy as np
import pytest
import torch

from fed_dpsd.errors import Diverged, UserError
from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.models.divergence import check_losses, is_finite
from fed_dpsd.models.inference import to_bytes
from tests.every import every

SHAPE = (1, 8, 8)
RATES = {"method.student_learning_rate": 1e30}


def classifier(name="cnn"):
    return initialise(lambda: CLASSIFIERS[name](SHAPE, 10, 4), torch.Generator().manual_seed(0))


def losses(*values):
    return [torch.tensor(value) for value in values]


def test_the_first_loss_that_is_not_finite_is_named():
    for value, word, done in ((math.nan, "NaN", 0), (math.inf, "infinite", 6)):
        seen = losses(0.5, -3e38, value, 0.1, math.nan)
        with pytest.raises(UserError) as caught:
            check_losses(seen, "the student", RATES, done)
        assert str(caught.value) == (
            f"training diverged: the loss of the student is {word} after step {done + 2}; "
            "lower method.student_learning_rate (now 1e+30)"
        )
        check_losses(seen[:2], "the student", RATES, done)
    check_losses([], "the student", RATES)


def test_several_keys_and_none_are_named():
    two = str(Diverged("x", {"a": 1.0, "b": 0.5}))
    assert two == "training diverged: x; lower a (now 1) or b (now 0.5)"
    assert str(Diverged("x", {})) == "training diverged: x; lower its learning rate"


@every("value", [math.nan, math.inf, -math.inf])
@every("name", ["cnn", "cnn_bn", "mlp", "scattering"])
def test_one_weight_that_is_not_finite_is_found_in_any_place(value, name):
    """Also in a bias before a layer that would hide it, and in the statistics of BatchNorm."""
    model = classifier(name)
    assert is_finite(model, SHAPE)
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            state = {k: t.clone() for k, t in model.state_dict().items()}
            state[key][(-1,) * tensor.ndim] = value
            broken = classifier(name)
            broken.load_state_dict(state)
            assert not is_finite(broken, SHAPE), key


def test_finite_weights_with_predictions_that_are_not_are_found():
    model = classifier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e30)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert not is_finite(model, SHAPE)


@every("value", [math.nan, math.inf])
def test_pixels_that_are_not_finite_are_no_bytes(value):
    pixels = torch.rand((2, *SHAPE), generator=torch.Generator().manual_seed(0))
    assert np.array_equal(to_bytes(pixels), (pixels * 255).round().byte().numpy())
    pixels[1, 0, 3, 3] = value
    with pytest.raises(Diverged, match=r"images.* are NaN or infinite; lower a \(now 1\)"):
        to_bytes(pixels, {"a": 1.0})
