"""A hospital's log of requests: who requested what, the charge, and the budget left.

The lines are exact and private, and stay in the hospital's own log.
"""

import math
from collections.abc import Sequence

from fed_dpsd.accounts import card as cards
from fed_dpsd.accounts.entry import Entry
from fed_dpsd.client.hospital import Hospital
from fed_dpsd.client.site import Site
from fed_dpsd.errors import one_line
from fed_dpsd.protocol import Request, SumStep

_CHARGED = {
    "training": "private training of its teachers",
    "counts": "class counts",
    "weights": "its teachers' weights",
    "baseline": "the weights of a classifier trained on all records",
    "train": "weights after training",
    "gradients": "the sum of its records' gradients",
    "statistics": "statistics of its records' features",
    "teachers": "its teachers as the result of the run",
}


def describe_request(request: Request | SumStep | None) -> str:
    """Describe what was requested; return "" for a request that was not read."""
    if request is None:
        return ""
    if isinstance(request, SumStep):
        return "a step of a secure sum"
    if request.kind == "answers":
        return f"round {request.query_id}, answers to {len(request.images):,} images"
    where = f"round {request.query_id}, " if request.kind in ("train", "gradients") else ""
    return where + _CHARGED[request.kind]


def describe_charge(hospital: Hospital, site: Site | None) -> str:
    """Describe a request's charge and what is left of the hospital's budget.

    Args:
        hospital: the hospital.
        site: the site that handled the request; None if the request was refused before that.
    """
    if site is None:
        return "nothing was charged"
    new = site.account.charged
    try:
        with site.ledger.transaction():
            entries = site.ledger.entries()
            queries = site.ledger.charges().queries
        warning = hospital.problem_of_delta(site.num_records)
        parts = (
            f"charged {_describe_entries(new)}",
            _budget_left(hospital, entries),
            _images_left(hospital, queries),
        )
        return "; ".join([*parts, *[f"warning: {warning}"] * bool(warning)])
    except Exception as error:  # a log never changes what a hospital answers
        return f"charged {_describe_entries(new)}; the budget left is unknown ({one_line(error)})"


def _describe_entries(entries: Sequence[Entry]) -> str:
    """Describe what was charged, as in "class counts and answers to 256 images"."""
    parts = []
    for entry in entries:
        answers = f"answers to {entry.queries:,} images"
        covered = " (covered by private training)" if entry.training else ""
        parts.append((answers if entry.kind == "answers" else _CHARGED[entry.kind]) + covered)
    return " and ".join(parts) or "nothing"


def _budget_left(hospital: Hospital, entries: Sequence[Entry]) -> str:
    """Describe how much of the budget the ledger's charges have spent and what is left."""
    proofs = cards.ledger_epsilons(entries, hospital.delta, "record", hospital.budget_relation)
    spent = proofs.get("training", proofs["answers"])  # what a budget counts
    left = max(hospital.budget - spent.value, 0.0)
    return (
        f"spent epsilon {spent.number} of {hospital.budget:g} (record, {spent.relation}, delta "
        f"{spent.delta:g}), {math.floor(100 * left) / 100:,g} left"
    )


def _images_left(hospital: Hospital, queries: int) -> str:
    return f"{max(hospital.queries - queries, 0):,} of {hospital.queries:,} images left"
