"""Networks from Python functions: `fed_dpsd.run(teacher=make_net)`.

A run folder holds the name of a function, such as "my_models.make_net()", but not the function.
Whenever the network is needed again, the function must be given again.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fed_dpsd.config import Config, is_function
from fed_dpsd.errors import UserError
from fed_dpsd.models import initialise, torch_threads
from fed_dpsd.models.classifiers import CLASSIFIERS, Classifier

# A function of an image's shape (C, S, S) and the number of classes, or of nothing.
MakeNetwork = Callable[..., nn.Module]

_MADE: dict[str, MakeNetwork] = {}


def add_functions(given: Mapping[str, MakeNetwork | None]) -> dict[str, str]:
    """Add the networks of functions to CLASSIFIERS; return their names.

    Args:
        given: functions by the role of their network, "teacher" or "student"; None is omitted.

    Raises:
        UserError: a function has no name or the wrong arguments, or two functions have the same
            name.
    """
    made = {role: make for role, make in given.items() if make is not None}
    names = {role: _name(role, make) for role, make in made.items()}
    if len(set(names.values())) < len(set(map(id, made.values()))):
        raise UserError(
            f"teacher and student are two functions named {names['teacher']}; rename one"
        )
    for role, make in made.items():
        _MADE[names[role]] = make
        CLASSIFIERS[names[role]] = functools.partial(_build, make)
    return names


def _name(role: str, make: MakeNetwork) -> str:
    name = getattr(make, "__qualname__", "<lambda>")
    if not callable(make) or name.endswith("<lambda>"):
        raise UserError(
            f"{role}={make!r} has no name to record; give a function or a class, as in "
            f"`def make_net(): ...` and {role}=make_net"
        )
    if _num_arguments(make) not in (0, 2):
        raise UserError(
            f"{role}={name} must take no arguments, or an image shape and the number of classes"
        )
    return f"{make.__module__}.{name}()"


def _num_arguments(make: MakeNetwork) -> int:
    """Return the number of arguments that a function needs."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(
        parameter.default is parameter.empty and parameter.kind in positional
        for parameter in inspect.signature(make).parameters.values()
    )


def _make_network(
    make: MakeNetwork, shape: tuple[int, ...], num_classes: int
) -> tuple[nn.Module, str]:
    """Return a function's network and the path of its last linear layer.

    Raises:
        UserError: the network does not end with a linear layer for `num_classes` classes.
    """
    network = make(shape, num_classes) if _num_arguments(make) else make()
    used: list[nn.Module] = []
    if isinstance(network, nn.Module):
        linear = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
        hooks = [layer.register_forward_hook(lambda own, *_: used.append(own)) for layer in linear]
        with torch.no_grad():  # on the meta device, where networks are built, this computes nothing
            network.eval()(torch.zeros(2, *shape))
        for hook in hooks:
            hook.remove()
    if not used or used[-1] is network or used[-1].out_features != num_classes:
        raise UserError(
            f"it must return a torch.nn.Module whose last layer is torch.nn.Linear(..., "
            f"{num_classes}), since num_classes={num_classes}"
        )
    return network.train(), next(n for n, each in network.named_modules() if each is used[-1])


def _build(make: MakeNetwork, shape: tuple[int, ...], num_classes: int, width: int) -> Classifier:
    """Return a function's network as a backbone and its last linear layer; `width` is ignored."""
    network, path = _make_network(make, shape, num_classes)
    last = network.get_submodule(path)
    assert isinstance(last, nn.Linear)
    network.set_submodule(path, nn.Identity())
    classifier = Classifier(network, last.in_features, num_classes)
    classifier.classifier = last
    classifier.own = True
    return classifier


def require_functions(config: Config) -> None:
    """Check that this process has the functions that make a run's networks.

    Raises:
        UserError: a function was not given; the message gives its name.
    """
    named = {config.architecture(client): "teacher" for client in range(config.num_clients)}
    for name, role in (named | {config.model.student: "student"}).items():
        if missing := missing_function(role, name):
            raise UserError(missing)


def missing_function(role: str, name: str) -> str:
    """Explain how to give a function that this process does not have; "" if it has all."""
    if not is_function(name) or name in CLASSIFIERS:
        return ""
    given = f"{role}={name.removesuffix('()').rpartition('.')[2]}"
    reading = f", or fed_dpsd.load_student(FILE, {given})" if role == "student" else ""
    return (
        f"model.{role}={name} is a Python function, which this process does not have; give it in "
        f"Python: fed_dpsd.resume(RUN, {given}){reading}; Flower needs a plug-in"
    )


def network_as_made(name: str, shape: tuple[int, ...], classifier: Classifier) -> nn.Module:
    """Return the network as made by the function, with the weights of its classifier."""
    head = classifier.classifier
    network, path = _make_network(_MADE[name], shape, head.out_features)
    network.to_empty(device="cpu")
    weights = {
        own: head.state_dict()[own.removeprefix(f"{path}.")]
        if own.startswith(f"{path}.")
        else classifier.backbone.state_dict()[own]
        for own in network.state_dict()
    }
    network.load_state_dict(weights)
    return network.eval()


def network_digest(name: str, shape: tuple[int, ...], num_classes: int) -> str:
    """Return a digest of a function's network: its layers, and its output for random pixels.

    Cached teachers of different functions with the same name have different digests.
    """
    build = functools.partial(CLASSIFIERS[name], shape, num_classes, 1)
    network = initialise(build, torch.Generator().manual_seed(0)).eval()
    images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch_threads(1):
        output = network(images).numpy().tobytes()
    return hashlib.sha256(repr(network).encode() + output).hexdigest()
