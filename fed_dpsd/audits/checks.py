"""Checks of properties of correct code, with the observations.

A counting check compares hits with an exactly known probability. Its failure probability bounds how
often correct code fails, by the binomial law and a union bound over all counts. Correct code never
fails a check that only compares, or fails it with a stated probability.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from scipy.stats import binom

Part = Literal["attacks", "sampler", "protocol"]
CHECK_FAILURE = 1e-5  # of each counting check


@dataclass(frozen=True)
class Count:
    """Hits among independent trials with one known probability."""

    what: str  # the event, in words
    hits: int  # how often it occurred
    trials: int  # number of trials, >= 0
    # the probability of a hit for correct code; with 0 or 1, correct code never fails
    probability: float

    @property
    def chance(self) -> float:
        """Return the probability of at most, or at least, this many hits, whichever is smaller."""
        below = binom.cdf(self.hits, self.trials, self.probability)
        above = binom.sf(self.hits - 1, self.trials, self.probability)
        return float(min(below, above))

    def __str__(self) -> str:
        expected = self.trials * self.probability
        return f"{self.what}: {self.hits:,} of {self.trials:,}, expected {expected:,.4g}"


@dataclass(frozen=True)
class Check:
    """A check of a property of a client's code."""

    part: Part  # the part of the audit that the check belongs to
    title: str  # the property, in words
    contradiction: str  # what was observed instead; "" if the property is satisfied
    evidence: str  # what was examined, in words
    failure_probability: float = 0.0  # an upper bound on how often correct code fails it

    @property
    def contradicts(self) -> bool:
        """Return whether the property is violated."""
        return bool(self.contradiction)

    def __str__(self) -> str:
        if self.contradiction:
            return f"{self.title}: contradicted: {self.contradiction}"
        return f"{self.title}: holds ({self.evidence})"

    def to_json(self) -> dict[str, Any]:
        """Return the object of `fed-dpsd privacy audit --json`."""
        shown = {key: value for key, value in vars(self).items() if key != "part"}
        return shown | {"contradicts": self.contradicts}


def counted(part: Part, title: str, counts: Iterable[Count]) -> Check:
    """Check that no count is too improbable; all counts' tails share CHECK_FAILURE equally."""
    every = list(counts)
    rarest = min(every, key=lambda count: count.chance)
    likely = rarest.chance >= CHECK_FAILURE / (2 * len(every))
    trials = max(count.trials for count in every)
    evidence = f"{len(every):,} counts of up to {trials:,}, failure probability {CHECK_FAILURE:g}"
    wrong = "" if likely else f"{rarest} (probability {rarest.chance:.3g})"
    return Check(part, title, wrong, evidence, CHECK_FAILURE)


def running(part: Part, title: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yield the block's checks; if the code under test raises an error, yield a failed check.

    Correct code raises no error here, so any exception is a contradiction.
    """
    try:
        yield from checks()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        wrong = f"{type(error).__name__} in {where.name}: {error}"
        yield Check(part, title, wrong, "")
