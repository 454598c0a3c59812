"""Checks of drawn numbers and labels: their laws, and draws that are used twice.

They are functions of arrays: released rows, minus the values that noise was added to. A counting
check compares hits with an exactly known probability. Its failure probability bounds how often
correct code fails, by the binomial law and a union bound over all counts.
"""

import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.stats import binom, laplace, norm

from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse

CHECK_FAILURE = 1e-5  # of each counting check
FLOAT_BITS = 24  # two float32 draws are equal with a probability below 2^-24


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

    title: str  # the property, in words
    contradiction: str  # what was observed instead; "" if the property is satisfied
    evidence: str  # what was examined, in words
    failure_probability: float = 0.0  # an upper bound on how often correct code fails it
    tests_noise: bool = False  # whether it must detect noise that is too small

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
        return vars(self) | {"contradicts": self.contradicts}


def run_checks(title: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yield checks; if the code under test raises an error, end with a failed check."""
    try:
        yield from checks()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        yield Check(title, f"{type(error).__name__} in {where.name}: {error}", "")


def check_counts(title: str, counts: Iterable[Count]) -> Check:
    """Check that no count is too improbable; all counts' tails share CHECK_FAILURE equally."""
    every = list(counts)
    rarest = min(every, key=lambda count: count.chance)
    likely = rarest.chance >= CHECK_FAILURE / (2 * len(every))
    trials = max(count.trials for count in every)
    evidence = f"{len(every):,} counts of up to {trials:,}, failure probability {CHECK_FAILURE:g}"
    wrong = "" if likely else f"{rarest} (probability {rarest.chance:.3g})"
    return Check(title, wrong, evidence, CHECK_FAILURE)


def check_repeats(title: str, noise: NDArray[Any], width: int = 3) -> Check:
    """Check that no draw is used twice: each is compared with all others.

    A repeat is a run of `width` neighbours that occurs again, with any signs. Draws of one law are
    then equal with a probability below 2^-24 each, so n of them fail with probability at most n^2 /
    2^(24 width + 1).

    Args:
        title: the property, in words.
        noise: draws of any shape in units of their scale. Zeros are left out: they are numbers
            without noise, as outside a mask.
        width: numbers in a run, at least 2 and at most the noisy numbers in a row.
    """
    drawn = np.abs(noise[noise != 0]).astype(np.float32)
    failure = drawn.size**2 / 2.0 ** (FLOAT_BITS * width + 1)
    evidence = f"{drawn.size:,} draws, each compared with all others"
    if drawn.size < width:
        return Check(title, f"{drawn.size} noisy numbers", evidence, failure)
    first: dict[bytes, int] = {}
    for place, run in enumerate(sliding_window_view(drawn, width)):
        before = first.setdefault(run.tobytes(), place)
        if before != place:
            wrong = f"draws {place:,} to {place + width - 1:,} are those from {before:,} on"
            return Check(title, wrong, evidence, failure)
    return Check(title, "", evidence, failure)


def check_lags(title: str, hits: NDArray[np.bool_], probability: float) -> Check:
    """Check that (N,) draws of an event do not repeat at any distance up to N / 2.

    Two draws agree with probability p^2 + (1 - p)^2. The pairs at a distance form paths, in which
    only neighbours depend on each other, so agreements are concentrated nearly as if they were
    independent (Janson, Random Structures and Algorithms 24, 2004, Theorems 2.1 and 2.3). All
    distances share CHECK_FAILURE.
    """
    size = len(hits)
    signs = np.fft.rfft(2.0 * hits - 1, 2 * size)
    pairs = size - np.arange(1, size // 2 + 1)
    products = np.rint(np.fft.irfft(np.abs(signs) ** 2)[1 : len(pairs) + 1])
    agreeing, chance = (pairs + products) / 2, probability**2 + (1 - probability) ** 2
    rare = math.log(2 * len(pairs) / CHECK_FAILURE)
    share = 25 / 4 * rare
    most = np.minimum(
        np.sqrt(rare * pairs),
        share / 6 + np.sqrt((share / 6) ** 2 + share * chance * (1 - chance) * pairs),
    )
    away = np.abs(agreeing - chance * pairs) / most
    worst = int(away.argmax())
    wrong = ""
    if away[worst] > 1:
        wrong = (
            f"draws {worst + 1:,} apart agree {int(agreeing[worst]):,} times of "
            f"{pairs[worst]:,}, expected {chance * pairs[worst]:,.4g}"
        )
    evidence = f"{size:,} draws at {len(pairs):,} distances, failure probability {CHECK_FAILURE:g}"
    return Check(title, wrong, evidence, CHECK_FAILURE)


# --- the laws of labels -----------------------------------------------------------------------


def law_of_response(claimed: TopKRandomizedResponse) -> NDArray[np.float64]:
    """Return the (K,) law of a response when the class is the first of k candidates."""
    size = 2 if claimed.threshold is not None else (claimed.k or claimed.num_classes)
    law = np.zeros(claimed.num_classes)
    law[:size] = 1 / (math.exp(claimed.epsilon_per_answer) + size - 1)
    law[0] *= math.exp(claimed.epsilon_per_answer)
    return law


def law_of_most_votes(claimed: NoisyMax) -> NDArray[np.float64]:
    """Return the (K,) law of the class with the most noisy votes, in the worst case."""
    votes = claimed.worst_case()[0][:, 0].sum(axis=0) / claimed.noise_multiplier
    if claimed.noise_law == "gumbel":
        weights = np.exp(votes - votes.max())
        return np.asarray(weights / weights.sum())
    noise: Any = {"gaussian": norm, "laplace": laplace}[claimed.noise_law]
    points = np.linspace(-45, 45 + votes.max(), 400_001)
    sizes, places, numbers = np.unique(votes, return_inverse=True, return_counts=True)
    below = [noise.logcdf(points - size) for size in sizes]
    largest = sum(number * each for number, each in zip(numbers, below, strict=True))
    chances = [
        np.trapezoid(noise.pdf(points - size) * np.exp(largest - own), points)
        for size, own in zip(sizes, below, strict=True)
    ]
    law = np.array(chances)[places]
    return np.asarray(law / law.sum())
