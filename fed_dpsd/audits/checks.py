"""Checks of properties of correct code, with the observations.

A counting check compares hits with an exactly known probability. Its failure probability bounds how
often correct code fails, by the binomial law and a union bound over all counts. Correct code never
fails a check that only compares, or fails it with a stated probability.
"""

import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, laplace, norm

from fed_dpsd.privacy.noise import Law

Part = Literal["attacks", "sampler", "protocol"]
CHECK_FAILURE = 1e-5  # of each counting check
LOW_BITS = 12  # examined; noise has at least 25
LAWS: dict[Law, Any] = {"gaussian": norm, "laplace": laplace}


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


def check_counts(part: Part, title: str, counts: Iterable[Count]) -> Check:
    """Check that no count is too improbable; all counts' tails share CHECK_FAILURE equally."""
    every = list(counts)
    rarest = min(every, key=lambda count: count.chance)
    likely = rarest.chance >= CHECK_FAILURE / (2 * len(every))
    trials = max(count.trials for count in every)
    evidence = f"{len(every):,} counts of up to {trials:,}, failure probability {CHECK_FAILURE:g}"
    wrong = "" if likely else f"{rarest} (probability {rarest.chance:.3g})"
    return Check(part, title, wrong, evidence, CHECK_FAILURE)


def run_checks(part: Part, title: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yield checks; if the code under test raises an error, end with a failed check."""
    try:
        yield from checks()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        wrong = f"{type(error).__name__} in {where.name}: {error}"
        yield Check(part, title, wrong, "")


# --- counts over drawn numbers ---


def count_true(values: NDArray[np.generic]) -> int:
    """Count the true values, or the odd integers."""
    return int(np.count_nonzero(np.asarray(values, np.int64) & 1))


def count_tails(drawn: NDArray[np.float64], law: Law, beyond: tuple[float, ...]) -> list[Count]:
    """Count draws of unit scale beyond each distance, on both sides."""
    counts = []
    for distance in beyond:
        chance = LAWS[law].sf(distance)
        for side, hits in (("above", drawn > distance), ("below", drawn < -distance)):
            text = f"draws {side} {'-' * (side == 'below')}{distance:g} scales"
            counts.append(Count(text, int(hits.sum()), drawn.size, float(chance)))
    return counts


def check_low_bits(what: str, released: NDArray[np.float64], spacing: float) -> Check:
    """Check that low bits of (R, C) numbers are fair and independent.

    A column holds one value with noise. If a low bit, or the difference of two low bits, were a
    function of the value, it would be constant in the column.
    """
    steps = np.rint(released / spacing)
    away = int((np.abs(released / spacing - steps) > 1e-3).sum())
    counts = [Count("numbers off the lattice", away, released.size, 0.0)]
    bits = (steps.astype(np.int64)[..., None] >> np.arange(LOW_BITS)) & 1  # (R, C, bits)
    for column, bit in itertools.product(range(released.shape[1]), range(LOW_BITS)):
        hits = count_true(bits[:, column, bit])
        counts.append(Count(f"bit {bit} set in column {column}", hits, len(bits), 0.5))
    for one, other in itertools.combinations(range(LOW_BITS // 2), 2):
        for column, hits in enumerate((bits[..., one] == bits[..., other]).sum(axis=0)):
            text = f"bits {one} and {other} alike in column {column}"
            counts.append(Count(text, int(hits), len(bits), 0.5))
    return check_counts("sampler", f"{what}: on the lattice, with fair low bits", counts)


def check_residues(
    what: str, released: NDArray[np.float64], sensitive: NDArray[np.float64], spacing: float
) -> Check:
    """Check that low bits of (R, C) numbers, in lattice steps, do not depend on the values."""
    moved = sensitive != 0
    steps, values = (np.rint(x[moved] / spacing).astype(np.int64) for x in (released, sensitive))
    positive, counts = values > 0, []
    for bit in range(LOW_BITS):
        set_ = (steps >> bit) & 1
        own = count_true(set_ == (values >> bit) & 1)
        sign = count_true(set_ == positive)
        counts.append(Count(f"bit {bit} as in the value", own, steps.size, 0.5))
        counts.append(Count(f"bit {bit} as the value's sign", sign, steps.size, 0.5))
    return check_counts("sampler", f"{what}: low bits do not depend on the value", counts)


def check_independence(what: str, drawn: NDArray[np.float64], law: Law) -> Check:
    """Check that (R, C) draws of unit scale are independent, by agreement of signs and sizes.

    This compares each row with the next, the first half of all rows with the second, and each
    column with the next.
    """
    half, median = len(drawn) // 2, LAWS[law].ppf(0.75)  # of the sizes
    pairs = {
        "a row and the next": (drawn[: 2 * half : 2], drawn[1 : 2 * half : 2]),
        "the two halves": (drawn[:half], drawn[half : 2 * half]),
        "a column and the next": (drawn[:, 0:-1:2], drawn[:, 1::2]),
    }
    counts = []
    for text, (one, other) in pairs.items():
        signs = count_true((one > 0) == (other > 0))
        sizes = count_true((np.abs(one) > median) == (np.abs(other) > median))
        counts.append(Count(f"signs that agree in {text}", signs, one.size, 0.5))
        counts.append(Count(f"sizes that agree in {text}", sizes, one.size, 0.5))
    return check_counts("sampler", f"{what}: draws are independent", counts)


def check_different_secrets(
    what: str, one: NDArray[np.float64], other: NDArray[np.float64]
) -> Check:
    """Check that noise from two secrets, in arrays of the same shape, is independent."""
    agreeing = Count("signs that agree", count_true((one > 0) == (other > 0)), one.size, 0.5)
    return check_counts("sampler", f"{what}: another secret gives different noise", [agreeing])
