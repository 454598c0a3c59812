"""A privacy card in plain words: the verdict, and how teachers are trained and queried."""

import math
from collections.abc import Iterator

from fed_dpsd.accounts.card import NOTHING_NOTE, PrivacyCard, plan_of
from fed_dpsd.experiment import Experiment
from fed_dpsd.methods.method import PublicContext
from fed_dpsd.privacy.epsilon import Epsilon
from fed_dpsd.privacy.label_dp import IMAGES_NOTE
from fed_dpsd.privacy.mechanism import Unit, combined_trust
from fed_dpsd.report.guarantee import (
    MEANINGFUL,
    MEANINGFUL_DELTA,
    NO_TEACHERS,
    against,
    other_observers,
)

SEEDED_VERDICT = "this simulation's noise is seeded, so its releases carry no guarantee"
CHANGES: dict[Unit, tuple[str, str, str]] = {
    "record": ("a record", "a record added or removed", "one replaced"),
    "patient": ("all records of a patient at a client", "one added or removed", "one replaced"),
    "client": ("a whole client", "one added or removed", "one replaced"),
}


def is_meaningful(epsilon: Epsilon) -> bool:
    """Return whether both numbers of a bound are small enough to be meaningful."""
    return epsilon.value <= MEANINGFUL and epsilon.delta <= MEANINGFUL_DELTA


def verdict(experiment: Experiment, card: PrivacyCard) -> Iterator[str]:
    """Yield sentences on what a card proves: the requested unit, larger units, then caveats."""
    if card.covers_nothing:
        yield f"{NOTHING_NOTE}: there is nothing to prove"
        return
    if card.review:
        yield card.review
    first = dict.fromkeys((card.unit, "record"))
    for unit in first:
        yield _describe_unit(card, unit)
    yield from other_observers(card.content)
    if card.label:
        number, terms = card.label.number(3), _terms(card, card.label)
        yield f"epsilon {number} for a replaced label alone, {terms}: {IMAGES_NOTE}"
    for unit in (each for each in CHANGES if each not in first):
        yield _describe_unit(card, unit)
    if experiment.seeded:
        epsilons = (*card.proven, *([card.label] if card.label else []))
        finite = any(math.isfinite(epsilon.value) for epsilon in epsilons)
        more = "; the numbers apply to the same run with noise=secure"
        yield SEEDED_VERDICT + (more if finite else "")


def _describe_unit(card: PrivacyCard, unit: Unit) -> str:
    """Describe what is proven for a unit; the numbers of patients and clients are rarely small."""
    added, replaced = card.epsilon(unit, "add_remove"), card.epsilon(unit, "replace_one")
    whole, one, other = CHANGES[unit]
    if math.isinf(added.value) and math.isinf(replaced.value):
        reason = f": {card.content['reason']}" if unit == "record" else ""
        return f"nothing is proven for {whole}{reason}"
    terms = _terms(card, added, replaced)
    if not is_meaningful(added):
        of = "at" if unit == "record" else f"for {whole}:"
        return (
            f"no meaningful protection {of} epsilon {added.number(3)} ({unit}, add_remove) and "
            f"{replaced.number(3)} ({unit}, replace_one), {terms}"
        )
    of = "" if unit == "record" else f"for {whole}: "
    second = "nothing proven" if math.isinf(replaced.value) else replaced.number(3)
    numbers = f"{of}epsilon {added.number(3)} for {one}, {second} for {other}"
    if not is_meaningful(replaced):
        numbers += ", which is not meaningful"
    return f"{numbers}, {terms}"


def _terms(card: PrivacyCard, *epsilons: Epsilon) -> str:
    """Return the deltas of numbers, and whom they hold against, given the largest trust needed."""
    deltas = dict.fromkeys(f"{e.delta:g}" for e in epsilons if math.isfinite(e.value))
    trust = combined_trust(epsilon.trust for epsilon in epsilons)
    return f"delta {' and '.join(deltas)}, against {against(trust, card.content['colluding'])}"


def how_trained(experiment: Experiment) -> str:
    """Describe how the teachers are trained and what their training alone protects."""
    if experiment.config.teacher.path is not None:
        return "none here: teachers are read from files"
    if not experiment.answers.from_teachers:
        return NO_TEACHERS
    return experiment.training.describe(plan_of(experiment).trainings)


def how_answered(experiment: Experiment) -> str:
    """Describe everything that leaves a client in a run, and where noise is added."""
    context = PublicContext.of(experiment.config, experiment.training, experiment.answers)
    return experiment.method.describe(context)


def published_line(card: PrivacyCard) -> str:
    """Return the line on the papers' epsilon, which is not a guarantee, or on the lack of one."""
    if math.isinf(card.published):
        return "nothing published: the papers' formulas give no finite epsilon for this"
    return f"epsilon published (no guarantee): {card.published:.6g}"
