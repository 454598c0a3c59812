"""torch's Adam and SGD without torch.compile, whose import takes as long as torch's own.

Steps and hooks are torch's. Only `torch.compile` cannot compile these steps.
"""

import inspect
from typing import TypeVar

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def _eager(kind: type[Kind]) -> type[Kind]:
    """Return a subclass without the wrappers of torch's methods, which import torch._dynamo."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    bare = {name: inspect.unwrap(each) for name, each in methods if hasattr(each, "__wrapped__")}
    bare["step"] = torch.no_grad()(bare["step"])
    return type(kind.__name__, (kind,), bare)


Adam = _eager(torch.optim.Adam)
SGD = _eager(torch.optim.SGD)
