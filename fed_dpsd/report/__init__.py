"""Reports: pages, tables and figures of runs, deployments and sweeps.

Knows results that others have read and computed: scores, costs, epsilons and predictions, and in a
simulation exact diagnostics. Knows no site, network or record, and computes no epsilon.
"""

from pathlib import Path

from fed_dpsd.errors import UserError

REPORTED = (
    "a table of `fed-dpsd sweep`, or the folder that a sweep, a run or a rehearsal has written"
)


def require_path(path: Path) -> None:
    """Check that what is to be reported exists."""
    if not path.exists():
        raise UserError(f"{path} does not exist; give {REPORTED}")
