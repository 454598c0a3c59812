"""Privacy losses of a randomised response that is counted together with others.

The argument follows Feldman, McMillan, Talwar (arXiv 2012.12803), with tighter numbers. See
docs/proofs.md, Theorem 10.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

OUTSIDE = 1e-15  # mass that a window of counts may omit
COARSE = 2**-8  # largest fraction by which a number of uniform responses is rounded down


def window(trials: int, probability: float) -> tuple[int, int]:
    """Return a half-open range of counts that omits at most OUTSIDE of Binomial(trials, p).

    Bernstein's inequality: P(|X - np| >= t) <= 2 exp(-t^2 / (2 (np (1 - p) + t / 3))).
    """
    limit = math.log(2 / OUTSIDE)
    variance = trials * probability * (1 - probability)
    width = limit / 3 + math.sqrt(limit**2 / 9 + 2 * limit * variance)
    mean = trials * probability
    return max(0, math.floor(mean - width)), min(trials, math.ceil(mean + width)) + 1


def losses(
    epsilon_per_answer: float, k: int, responses: int
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Yield losses and probabilities of M responses; one of them has the true class 0 or 1.

    Each of the other M - 1 responses is uniform with probability k b and names its true class
    otherwise; the adversary knows which of them are not uniform, and their classes. The uniform
    responses and the one that changes are n responses with multinomial counts h, weighted by (k /
    n) (b n + (a - b) h_c), where c is the true class of the response that changes, and a and b are
    the probabilities of the truth and of one lie. More uniform responses hide more, so n is rounded
    down a little. The worlds are mirror images, so both directions have the same losses.
    """
    lie = 1 / (math.exp(epsilon_per_answer) + k - 1)
    truth = 1 - (k - 1) * lie
    uniform = np.arange(*window(responses - 1, k * lie))
    width = max(1, math.floor(COARSE * uniform[0]))
    weights = binom.pmf(uniform, responses - 1, k * lie)
    for start in range(0, len(uniform), width):
        n = int(uniform[start]) + 1
        both = np.arange(*(window(n, 2 / k) if k > 2 else (n, n + 1)))[:, None]  # h0 + h1
        h0 = np.arange(window(int(both[0, 0]), 1 / 2)[0], window(int(both[-1, 0]), 1 / 2)[1])
        chance = binom.pmf(both, n, 2 / k) * binom.pmf(h0, both, 1 / 2)  # 0 where impossible
        first = lie + (truth - lie) * h0 / n
        second = lie + (truth - lie) * np.maximum(both - h0, 0) / n
        chance = k * weights[start : start + width].sum() * chance * first
        yield (np.log(first) - np.log(second)).ravel(), chance.ravel()


def omitted_mass(k: int) -> float:
    """Return an upper bound on the mass that `losses` omits, due to three windows and rounding."""
    return 1e-12 + 4 * k * OUTSIDE
