"""All records in one place: what no federation has. With privacy=dp_teacher, central DP-SGD."""

from dataclasses import dataclass
from typing import ClassVar

from fed_dpsd.methods.ensemble import WholeEnsemble


@dataclass(frozen=True)
class Central(WholeEnsemble):
    """One client holds everything, and its teacher, trained as all teachers are, is the student."""

    num_clients: ClassVar[int | None] = 1
