"""Values that code further down the stack reads without being passed them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def setting(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Set a context variable to `value` in this block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
