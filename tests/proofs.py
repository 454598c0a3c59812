"""The cost of a ledger and a plan on each basis of a proof, by definition, to check claims."""

from dp_accounting import ComposedDpEvent


def spent(entries, unit, relation, basis):
    """The cost of entries: training runs and releases that they do not cover, or all releases."""
    left_out = {
        "training": lambda entry: entry.training,
        "answers": lambda entry: entry.kind == "training",
    }[basis]
    kept = [entry for entry in entries if not left_out(entry)]
    return ComposedDpEvent([entry.event(unit, relation) for entry in kept])


def bases(plan):
    """The stages that a proof on each basis composes."""
    return {"answers": plan.stages} | ({"training": plan.paid} if plan.trained else {})


def by(row, basis):
    """The epsilon of a card's row on a basis, whether it is the claim or another proof."""
    found = next((each for each in (row, *row["beside"]) if each["basis"] == basis), None)
    return None if found is None else float(found["epsilon"])
