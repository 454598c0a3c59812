"""The papers' privacy formulas, evaluated as printed. None of these numbers is a guarantee.

It is imported only where results are written or shown, so published numbers never affect a run.
"""

import math

from scipy.optimize import minimize_scalar

from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import Mechanism
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.privacy.votes import NoisyVotes


def published_epsilon(mechanism: Mechanism, queries: int, delta: float) -> float:
    """Return the epsilon for `queries` answers by the formula of the method's paper.

    It is `inf` if the paper claims nothing or no noise is drawn. It may differ from the epsilons
    that the papers print with their results.
    """
    if isinstance(mechanism, TopKRandomizedResponse):
        return theorem_2(mechanism.epsilon_per_answer)
    noise = getattr(mechanism, "noise_multiplier", 0.0)
    if isinstance(mechanism, NormalizedGradient) and noise > 0:
        return theorem_1(mechanism.bound, noise, mechanism.num_classes, queries, delta)
    if (
        isinstance(mechanism, NoisyVotes | NoisyMax)
        and mechanism.noise_law == "laplace"
        and noise > 0
    ):
        return dgd_labels(2 / noise, queries, delta)
    return math.inf


def theorem_1(
    bound: float, noise_multiplier: float, num_classes: int, queries: int, delta: float
) -> float:
    """Evaluate Theorem 1 of arXiv 2601.19090, and Theorem 3 of DPDFD, minimised over q > 1.

    In the paper, `bound` is beta, `noise_multiplier` sigma, `num_classes` c and `queries` b T. It
    divides by sigma^2 although the added noise has variance sigma^2 beta^2, so its first term is
    too small by a factor of about 1 / beta^2. It counts every query, as is necessary if a record
    changes its teacher. DPDFD (IJCAI 2023) adds one draw to the sum of a batch's gradients (Eq. 4),
    which has sensitivity 2 * bound * batch, but still counts them as separate queries.
    """
    slope = 2 * bound**2 * num_classes * queries / noise_multiplier**2

    def at(log_excess: float) -> float:
        q = 1 + math.exp(log_excess)
        return slope * q + math.log((q - 1) / q) - math.log(q * delta) / (q - 1)

    return float(minimize_scalar(at, bounds=(-20, 40), method="bounded").fun)


def theorem_2(epsilon_per_answer: float) -> float:
    """Evaluate Theorem 2 of arXiv 2601.19090: the overall epsilon for any number of queries.

    It counts one response and assumes that only its label changes (Lemma 3 of the paper), although
    one training record may change its teacher and thus all responses.
    """
    return epsilon_per_answer


def dgd_labels(epsilon_per_query: float, queries: int, delta: float) -> float:
    """Evaluate DGD's discriminative budget (Sec. III-E): N eps0^2 + eps0 sqrt(-2 N log delta).

    DGD's votes have Laplace noise of scale 2 / eps0. The epsilons that the paper prints come from
    its moments accountant and are smaller; its total adds epsilon_1 = 0.01 (Theorem 1). Both omit
    the generator, which is trained against a classifier of all private data.
    """
    spread = math.sqrt(-2 * queries * math.log(delta))
    return queries * epsilon_per_query**2 + epsilon_per_query * spread
