"""Checks: properties of correct code, and what was observed.

A counting check compares hits with an exactly known probability. Its failure probability bounds how
often correct code fails it, by the binomial law and a union bound over all counts. A check that
only compares never fails for correct code, or does so with a stated probability.
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
    """Hits among independent trials of one known probability.

    Args:
        what: the event, in words.
        hits: how often it occurred.
        trials: number of trials, >= 0.
        probability: the probability of a hit if the code is correct; if it is 0 or 1, correct code
            never fails.
    """

    what: str
    hits: int
    trials: int
    probability: float

    @property
    def chance(self) -> float:
        """Return the probability of this few or this many hits, whichever is smaller."""
        below = binom.cdf(self.hits, self.trials, self.probability)
        above = binom.sf(self.hits - 1, self.trials, self.probability)
        return float(min(below, above))

    def __str__(self) -> str:
        expected = self.trials * self.probability
        return f"{self.what}: {self.hits:,} of {self.trials:,}, expected {expected:,.4g}"


@dataclass(frozen=True)
class Check:
    """A property of a client's code.

    Args:
        part: the part of the audit that it belongs to.
        title: the property, in words.
        contradiction: what was observed instead; "" if it holds.
        evidence: what was examined, in words.
        failure_probability: an upper bound on how often correct code fails it.
    """

    part: Part
    title: str
    contradiction: str
    evidence: str
    failure_probability: float = 0.0

    @property
    def contradicts(self) -> bool:
        """Return whether the property does not hold."""
        return bool(self.contradiction)

    def __str__(self) -> str:
        if self.contradiction:
            return f"{self.title}: contradicted: {self.contradiction}"
        return f"{self.title}: holds ({self.evidence})"

    def to_json(self) -> dict[str, Any]:
        """Return the object of `fed-dpsd privacy audit --json`."""
        shown = {key: value for key, value in vars(self).items() if key != "part"}
        return shown | {"contradicts": self.contradicts}


def counted(
    part: Part, title: str, counts: Iterable[Count], failure: float = CHECK_FAILURE
) -> Check:
    """Check that no count is too improbable; all tails of all counts share `failure` equally."""
    every = list(counts)
    rarest = min(every, key=lambda count: count.chance)
    likely = rarest.chance >= failure / (2 * len(every))
    trials = max(count.trials for count in every)
    evidence = f"{len(every):,} counts of up to {trials:,}, failure probability {failure:g}"
    wrong = "" if likely else f"{rarest} (probability {rarest.chance:.3g})"
    return Check(part, title, wrong, evidence, failure)


def running(part: Part, title: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yield checks; if the code under test raises an error, yield a failed check.

    Correct code raises no error here, so any exception is a contradiction.
    """
    try:
        yield from checks()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        wrong = f"{type(error).__name__} in {where.name}: {error}"
        yield Check(part, title, wrong, "")
