"""Checks of the networks of plug-ins and Python functions, before any record is read.

They try the networks on a few images. They find common mistakes, but prove nothing: a layer may
depend on other images only for inputs that were not tried.
"""

import random
import sys

import numpy as np
import torch
from torch import nn

from fed_dpsd.config import is_function
from fed_dpsd.errors import UserError, one_line
from fed_dpsd.models import initialise, torch_threads
from fed_dpsd.models.classifiers import CLASSIFIERS, Build, Classifier
from fed_dpsd.models.functions import network_as_made
from fed_dpsd.privacy import lattice
from fed_dpsd.privacy.dp_sgd import RANDOM_LAYERS

# A configuration is bound several times. The functions are kept, so their ids stay unique.
_checked: dict[tuple[object, ...], tuple[Build, str]] = {}


def network_problem(
    name: str, shape: tuple[int, ...], num_classes: int, width: int, bounds_gradients: bool = False
) -> str:
    """Return why a network cannot be used; "" if it can be used.

    Args:
        name: a key of CLASSIFIERS.
        shape: (C, S, S) of the images.
        num_classes: number of classes.
        width: number of channels of the first layer; functions ignore it.
        bounds_gradients: whether the network's training bounds each record's gradient.
    """
    build = CLASSIFIERS[name]
    key = id(build), name, tuple(shape), num_classes, width, bounds_gradients
    if key not in _checked:
        _checked[key] = build, _problem(build, name, shape, num_classes, width, bounds_gradients)
    return _checked[key][1]


def _problem(
    build: Build,
    name: str,
    shape: tuple[int, ...],
    num_classes: int,
    width: int,
    bounds_gradients: bool,
) -> str:
    try:
        network = initialise(
            lambda: build(shape, num_classes, width), torch.Generator().manual_seed(0)
        )
        if not isinstance(network, Classifier):
            return "it must be a fed_dpsd.models.classifiers.Classifier"
        if buffers := _unset_buffers(network):
            return f"its buffer {buffers[0]} would not be set; register no buffers"
        images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
        with torch.random.fork_rng([]), torch_threads(1):  # for equal bits
            return _output_problem(name, network, images, num_classes) or (
                _gradient_problem(network, images) if bounds_gradients else ""
            )
    except UserError as error:
        return str(error)
    except Exception as error:  # whatever the network raises
        return one_line(error)


def _unset_buffers(network: nn.Module) -> list[str]:
    """Return the buffers that `initialise` does not set."""
    return [
        f"{path}.{name}"
        for path, layer in network.named_modules()
        if not isinstance(layer, nn.BatchNorm2d) and not hasattr(layer, "reset_buffers")
        for name, _ in layer.named_buffers(recurse=False)
    ]


@torch.no_grad()
def _output_problem(name: str, network: Classifier, images: torch.Tensor, num_classes: int) -> str:
    logits = network.eval()(images)
    if logits.shape != (len(images), num_classes):
        return (
            f"it returns {tuple(logits.shape)} for {len(images)} images, not "
            f"({len(images)}, {num_classes})"
        )
    if (one := network(images[:1])).shape != (1, num_classes):
        return f"it returns {tuple(one.shape)} for one image, not (1, {num_classes})"
    if is_function(name):
        made = network_as_made(name, tuple(images.shape[1:]), network)
        if not torch.allclose(logits, made(2 * images - 1), rtol=1e-4, atol=1e-5, equal_nan=True):
            return "its output must be the output of its last linear layer, without a softmax"
    return ""


def _gradient_problem(network: Classifier, images: torch.Tensor) -> str:
    many = torch.rand(64, *images.shape[1:], generator=torch.Generator().manual_seed(1))
    if _draws_random_numbers(network, images):
        return RANDOM_LAYERS
    if _keeps_state(network, images):
        return (
            "its output for the same images changes during training, so a record's gradient "
            "depends on earlier records; let no layer keep a state"
        )
    if _mixes_images(network, images) or _mixes_images(network, many):
        return (
            "its output for an image depends on the other images of a batch, as in batch "
            "normalisation, so no bound holds for a record's contribution; use GroupNorm"
        )
    if network.fixed:
        features = network.classifier.in_features
        return lattice.too_many_inputs(features) if features > lattice.MOST_INPUTS else ""
    if constant := _constant_weights(network, images):
        return f"its weights {constant[0]} are frozen or unused, so they have no gradient"
    try:
        _compute_gradients(network, images, many[:7], images[:1])
    except Exception as error:  # whatever Opacus raises
        why = one_line(error).partition(". ")[0]
        remedy = "use inplace=False" if "inplace" in why else "use other layers"
        return f"Opacus cannot compute the gradient of each record ({why}); {remedy}"
    return ""


@torch.no_grad()
def _draws_random_numbers(network: nn.Module, images: torch.Tensor) -> bool:
    """Return whether the network draws from a global random generator during training."""

    def state() -> tuple[object, ...]:
        with np.printoptions(threshold=sys.maxsize):
            own = str(np.random.get_state())  # noqa: NPY002 (a layer may use it)
        return random.getstate(), own, torch.get_rng_state().numpy().tobytes()

    before = state()
    network.train()(0.4 + 0.2 * images)  # narrow, so that `_keeps_state` can still widen a range
    return state() != before


def _mixes_images(network: nn.Module, images: torch.Tensor) -> bool:
    """Return whether, during training, an image's output depends on the others or their order."""
    network.train()
    batches = list(lattice.with_others(images))
    outputs = [network(batch).detach() for batch in batches]
    reversed_ = network(batches[0].flip(0)).detach().flip(0)
    last = torch.cat([images[:1].expand_as(images[1:]), images[-1:]])
    return not (
        all(torch.equal(outputs[0][0], output[0]) for output in outputs)
        and torch.equal(network(images)[-1], network(last)[-1])
        and torch.allclose(outputs[0], reversed_, rtol=1e-4, atol=1e-5)
    )


def _keeps_state(network: nn.Module, images: torch.Tensor) -> bool:
    """Return whether, during training, the output depends on earlier batches.

    Gradients are enabled, as in training.
    """
    network.train()
    narrow, ones = 0.4 + 0.2 * images, torch.ones_like(images)
    before = network(narrow).detach()
    for other in (images, 1 - images, images.round(), ones, 0 * ones):
        network(other)
        if not torch.equal(before, network(narrow)):
            return True
    return False


def _constant_weights(network: nn.Module, images: torch.Tensor) -> list[str]:
    """Return the names of weights that have no gradient."""
    network.zero_grad()
    network.train()(images).sum().backward()
    constant = [name for name, weights in network.named_parameters() if weights.grad is None]
    network.zero_grad()
    return constant


def _compute_gradients(network: nn.Module, *batches: torch.Tensor) -> None:
    """Compute the gradient of each image of batches of several sizes, as DP-SGD does."""
    from opacus import GradSampleModule  # takes seconds to import, and few runs need it

    network.to(memory_format=torch.contiguous_format)
    model = GradSampleModule(network.train(), loss_reduction="sum")
    for images in batches:
        labels = torch.zeros(len(images), dtype=torch.int64)
        lattice.single_gradients(model, images[:, None], labels)
