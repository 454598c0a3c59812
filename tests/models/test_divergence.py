"""Losses, weights, predictions and pictures that are not finite."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import fed_dpsd
from fed_dpsd.errors import Diverged, UserError
from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.models.divergence import check_losses, is_finite
from fed_dpsd.models.inference import to_bytes

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


def test_one_weight_that_is_not_finite_is_found_in_any_place(subtests):
    """Also in a bias before a layer that would hide it, and in the statistics of BatchNorm."""
    for value in [math.nan, math.inf, -math.inf]:
        for name in ["cnn", "cnn_bn", "mlp", "scattering"]:
            with subtests.test(name=name, value=value):
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


def test_pixels_that_are_not_finite_are_no_bytes(subtests):
    for value in [math.nan, math.inf]:
        with subtests.test(value=value):
            pixels = torch.rand((2, *SHAPE), generator=torch.Generator().manual_seed(0))
            assert np.array_equal(to_bytes(pixels), (pixels * 255).round().byte().numpy())
            pixels[1, 0, 3, 3] = value
            with pytest.raises(Diverged, match=r"images.* are NaN or infinite; lower a \(now 1\)"):
                to_bytes(pixels, {"a": 1.0})


# Their losses belong to records that noise protects, or to a user's own attack or measurement.
UNCHECKED = {
    "client/learning.py": ["fit"],  # returned by `train`; `Teachers` has them checked
    "privacy/dp_sgd.py": ["_train_linear", "_train_network"],
    "papers/dp_gan.py": ["train_generator", "losses"],
    "papers/gep.py": ["train"],
    "papers/gs_wgan.py": ["step"],
    "papers/output_gradient.py": ["train"],
    "papers/taught_generative.py": ["learn"],
    "audits/inversion.py": ["fredrikson", "generative"],
    "benchmarks/peers/flower_fedavg.py": ["train"],
}


def unchecked(source):
    """The functions that take an optimiser's step and check no loss."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            steps = [call for call in calls if ast.unparse(call).endswith("optimiser.step")]
            if steps and not any(ast.unparse(call) == "check_losses" for call in calls):
                found.append(function.name)
    return found


def test_every_training_checks_its_losses_or_is_listed():
    package = Path(fed_dpsd.__file__).parent
    found = {str(p.relative_to(package)): unchecked(p.read_text()) for p in package.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == UNCHECKED
    assert unchecked("def learn():\n    for _ in x:\n        optimiser.step()") == ["learn"]
    assert not unchecked("def learn():\n    optimiser.step()\n    check_losses(seen)")
