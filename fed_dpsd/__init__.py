"""Federated data-free distillation with differential privacy: train, resume, read, plan.

>>> import fed_dpsd
>>> plan = fed_dpsd.plan("training=plain", "answers=label", "rounds=2")
>>> plan.queries_per_client
512
>>> print(plan.privacy.epsilon("record", "replace_one"))
5,120.1 (record, replace_one, trust nobody, delta 0, pure)

`run` trains, `resume` continues after a crash, and `load_student` reads an exported student. Heavy
libraries are imported only when one of them is first used.
"""

import os
from typing import TYPE_CHECKING, Any

# Make waiting threads yield their core: on a busy machine, spinning took ten times the processor
# time. OpenMP reads this when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
__all__ = ["PlannedRun", "Run", "UserError", "load_student", "plan", "resume", "run"]

if TYPE_CHECKING:
    from fed_dpsd.api import PlannedRun, Run, UserError, load_student, plan, resume, run


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'fed_dpsd' has no attribute {name!r}")
    from fed_dpsd import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*(name for name in globals() if name.startswith("__")), *__all__]
