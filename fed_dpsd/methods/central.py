"""Training on all records in one place, which no federation can do.

With training=dp_sgd it is central DP-SGD. With a training that keeps labels alone private it is a
baseline for images that are public.
"""

from dataclasses import dataclass
from typing import ClassVar

from fed_dpsd.methods.ensemble import WholeEnsemble


@dataclass(frozen=True)
class Central(WholeEnsemble):
    """A single client that holds all records; its teacher, trained as usual, is the student."""

    num_clients: ClassVar[int | None] = 1
