"""Federated data-free distillation with differential privacy: train, resume, read, plan.

>>> import fed_dpsd
>>> plan = fed_dpsd.plan("training=plain", "answers=label", "rounds=2")
>>> plan.queries_per_client
512
>>> print(plan.privacy.epsilon("record", "replace_one"))
5,121 (record, replace_one, trust nobody, delta 0, pure)

`run` trains, `resume` continues after a crash, `load_student` reads an exported student, `sweep`
runs a grid, and `report` writes a page. Heavy libraries are imported when one of these functions is
first used.
"""

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Make waiting threads yield their core: on a busy machine, spinning took ten times the processor
# time. OpenMP reads this when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
__all__ = [
    "PlannedRun",
    "Run",
    "Sweep",
    "UserError",
    "load_student",
    "plan",
    "report",
    "resume",
    "run",
    "sweep",
]

if TYPE_CHECKING:
    from fed_dpsd.accounts.card import PlannedRun
    from fed_dpsd.api import (
        Run,
        Sweep,
        load_student,
        plan,
        report,
        resume,
        run,
        sweep,
    )
    from fed_dpsd.errors import UserError


class _Package(ModuleType):
    """The package's module type: `sweep` and `report` remain functions, not subpackages."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a room sets its name, after which __getattr__ would not be called.
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because importing torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'fed_dpsd' has no attribute {name!r}")
    from fed_dpsd import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*(name for name in globals() if name.startswith("__")), *__all__]
