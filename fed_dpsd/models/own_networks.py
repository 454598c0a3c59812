"""Checks of the networks of plug-ins and Python functions, before any record is read."""

import functools

import torch
from torch import nn

from fed_dpsd.config import is_function
from fed_dpsd.errors import UserError, one_line
from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import CLASSIFIERS, Classifier
from fed_dpsd.models.functions import network_as_made
from fed_dpsd.privacy import lattice
from fed_dpsd.privacy.dp_sgd import RANDOM_LAYERS


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
    build = functools.partial(CLASSIFIERS[name], shape, num_classes, width)
    try:
        network = initialise(build, torch.Generator().manual_seed(0))
        if buffers := _unset_buffers(network):
            return f"its buffer {buffers[0]} would not be set; register no buffers"
        images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
        with torch.random.fork_rng():
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
    if is_function(name):
        made = network_as_made(name, tuple(images.shape[1:]), network)
        if not torch.allclose(logits, made(2 * images - 1), rtol=1e-4, atol=1e-5):
            return "its output must be the output of its last linear layer, without a softmax"
    return ""


def _gradient_problem(network: Classifier, images: torch.Tensor) -> str:
    many = torch.rand(64, *images.shape[1:], generator=torch.Generator().manual_seed(1))
    if _mixes_images(network, images) or _mixes_images(network, many):
        return (
            "its output for an image depends on the other images of a batch, as in batch "
            "normalisation, so DP-SGD cannot bound a record's contribution; use GroupNorm"
        )
    if _draws_random_numbers(network, images):
        return RANDOM_LAYERS
    if constant := _constant_weights(network, images):
        return f"its weights {constant[0]} are frozen or unused, so DP-SGD cannot train them"
    try:
        _compute_gradients(network, images)
    except Exception as error:  # whatever Opacus raises
        return (
            "Opacus cannot compute the gradient of each record; let no layer work in place, as "
            f"inplace=True does ({one_line(error).partition('. ')[0]})"
        )
    return ""


@torch.no_grad()
def _mixes_images(network: nn.Module, images: torch.Tensor) -> bool:
    """Return whether, during training, the first image's output depends on the other images."""
    outputs, state = [], torch.get_rng_state()
    for batch in (images, torch.cat([images[:1], 1 - images[1:]])):
        torch.set_rng_state(state)  # dropout draws from torch's own generator
        outputs.append(network.train()(batch)[0])
    return not torch.allclose(*outputs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def _draws_random_numbers(network: nn.Module, images: torch.Tensor) -> bool:
    """Return whether the network draws random numbers during training."""
    state = torch.get_rng_state()
    network.train()(images)
    return not torch.equal(state, torch.get_rng_state())


def _constant_weights(network: nn.Module, images: torch.Tensor) -> list[str]:
    """Return the names of weights that have no gradient."""
    network.zero_grad()
    network.train()(images).sum().backward()
    constant = [name for name, weights in network.named_parameters() if weights.grad is None]
    network.zero_grad()
    return constant


def _compute_gradients(network: nn.Module, images: torch.Tensor) -> None:
    """Compute the gradient of each image as DP-SGD does."""
    from opacus import GradSampleModule  # takes seconds to import, and few runs need it

    network.to(memory_format=torch.contiguous_format)
    model = GradSampleModule(network.train(), loss_reduction="sum")
    lattice.single_gradients(model, images[:, None], torch.zeros(len(images), dtype=torch.int64))
