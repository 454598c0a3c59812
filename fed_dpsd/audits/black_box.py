"""Lower bounds on what a mechanism leaks, measured on released answers.

A proof bounds epsilon from above, an audit from below: a proven number below an audited one means a
bug. The adversary knows every answer except one teacher's, and guesses which of two worlds, which
differ in one record, an answer came from. Its accuracy bounds epsilon (docs/audits.md, "Audits").
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from fed_dpsd.audits import rates
from fed_dpsd.privacy.epsilon import Epsilon
from fed_dpsd.privacy.gaussian import NormalizedGradient
from fed_dpsd.privacy.mechanism import Additive, Relation, Unit, Values
from fed_dpsd.privacy.noisy_max import NoisyMax
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.progress import track

# A client of the audited mechanism, with new noise at every call. It takes its teachers' (n, B, K)
# values for each of several requests, and the student's (B, K) predictions for the first; a smaller
# later request uses the first of these rows. It returns the (B, K) values that the adversary sees
# for each request.
Client = Callable[[Sequence[Values], Values], Iterable[Values]]
Audited = Additive | TopKRandomizedResponse | NoisyMax  # mechanisms that randomise an answer

PREMISE = "one changed record may change its teacher, and so all its answers, arbitrarily"
VALUES_AT_ONCE = 2**18  # in a request: 2 MiB, which fit in the cache
RUNS_AT_ONCE = 1_000  # in a request, and the most runs that a repeated draw may affect
PILOT = (200, 25_000)  # fewest and most runs that choose a threshold; otherwise a quarter of all
KINDS = 8  # of public predictions
ROUNDING = 1e-9  # largest rounding error of an enumerated ratio


@dataclass(frozen=True)
class Audit:
    """A lower bound on what one changed record or patient reveals."""

    lower_bound: float  # no epsilon below this bound is valid at `delta`
    # the mechanism has no Gaussian differential privacy with a smaller mu. It is not converted to
    # an epsilon, which would assume a Gaussian trade-off. None if it was not computed.
    mu_lower_bound: float | None
    # the probability that any bound fails, over the audit's own randomness
    failure_probability: float
    delta: float  # the delta of `lower_bound`
    # "sampling" of two worlds, "enumeration" of an answer's laws, or guesses at "canaries"
    method: Literal["sampling", "enumeration", "canaries"]
    assumption: str  # the premise of the worlds, in words
    runs: int  # simulated runs in each world, or training runs on canaries; 0 by enumeration
    queries: int  # answers in a run
    audited: str  # the audited randomness, in words
    relation: Relation = "replace_one"  # how the record changes
    # the total variation distance between the worlds is no smaller. None if it was not computed.
    advantage_lower_bound: float | None = None
    canaries: int | None = None  # the number of canaries in a run; None for two worlds
    unit: Unit = "record"  # the unit that changes

    def __str__(self) -> str:
        more = ""
        if self.advantage_lower_bound is not None:
            more += f" and advantage at least {_round_down(self.advantage_lower_bound)}"
        if self.mu_lower_bound is not None:
            more += f" and mu at least {_round_down(self.mu_lower_bound)}"
        canaries = "" if self.canaries is None else f"canaries {self.canaries:,}, "
        return (
            f"epsilon at least {_round_down(self.lower_bound)}{more} ({self.unit}, "
            f"{self.relation}, lower bound at delta {self.delta:g}, failure probability "
            f"{self.failure_probability:g}, {self.method} of {self.audited}, {self.runs:,} runs, "
            f"{canaries}queries {self.queries:,}, assuming that {self.assumption})"
        )

    def refutes(self, epsilon: float, delta: float, queries: int) -> bool:
        """Return whether (epsilon, delta) is refuted as a bound for `queries` answers.

        A claim covers the audited runs only if its delta is no larger than theirs and it covers all
        queries of a run.
        """
        covered = delta <= self.delta and self.queries <= queries
        return covered and self.lower_bound > epsilon + ROUNDING

    def to_json(self) -> dict[str, Any]:
        """Return all fields; infinity is the string "inf"."""
        return vars(self) | ({"lower_bound": "inf"} if math.isinf(self.lower_bound) else {})


@dataclass(frozen=True)
class Proof:
    """Proven numbers to compare an audit with."""

    epsilon: Epsilon  # the proven epsilon of the audited answers or training
    # the mu of Gaussian differential privacy; None if the mechanism is not Gaussian
    mu: float | None = None
    # the total variation distance that the proof allows; None if it was not computed
    advantage: float | None = None

    def contradicted(self, audit: Audit) -> list[str]:
        """Return the names of proven numbers that are below an audit's lower bounds."""
        proven = self.epsilon
        # A claim for a removed client says nothing about other changes.
        weaker = (proven.unit, proven.relation) == ("client", "add_remove")
        refuted = []
        if audit.refutes(proven.value, proven.delta, proven.queries) and not weaker:
            refuted.append(f"epsilon {proven}")
        for name, bound, limit in (
            ("mu", audit.mu_lower_bound, self.mu),
            ("advantage", audit.advantage_lower_bound, self.advantage),
        ):
            if bound is not None and limit is not None and bound > limit + ROUNDING:
                refuted.append(f"{name} {limit:.4g}")
        return refuted


def audit(
    mechanism: Audited,
    client: Client,
    queries: int,
    runs: int,
    delta: float,
    failure_probability: float,
    report_mu: bool = True,
) -> Audit:
    """Audit a mechanism by sampling answers of a client that claims to use it.

    Both worlds of `worst_case` are simulated `runs` times. A run is assigned to the first world if
    its log-likelihood ratio, summed over the queries, reaches a threshold, which is fixed on a
    pilot with separate draws. True and false positives then get Clopper-Pearson bounds, and epsilon
    >= log((true_low - delta) / false_high). Compare with the proof of `Stage(mechanism, queries,
    1)`.

    A run of two or more queries is spread over two or more requests. The worlds alternate between
    the rows of a request and between requests: shared noise cancels in the sum, which then
    distinguishes the worlds. Each run rolls the classes of the worst case by a different
    shift, and uses a different kind of student prediction (`public_rows`).

    Runs share requests, unless the rows of a request are not separate releases. The failure
    probability assumes that the rows of a request are independent draws. Independence is part of
    the claim, so the audit should detect code that violates it.

    Args:
        mechanism: the claim, which defines the worlds and the likelihoods.
        client: the client whose answers are attacked.
        queries: the number of queries in a run, >= 1.
        runs: the number of runs in each world, >= 1.
        delta: in [0, 1).
        failure_probability: in (0, 1), for all reported bounds together; split evenly between two
            rates, or four with `report_mu`.
        report_mu: whether to bound mu too, at a second threshold, the pilot's median.
    """
    failure = failure_probability / (4 if report_mu else 2)
    pilot = _ratios(mechanism, client, queries, int(np.clip(runs // 4, *PILOT)))
    ratios = _ratios(mechanism, client, queries, runs)
    hits = (ratios >= rates.best_threshold(pilot, failure, delta)).sum(axis=1)
    mu = None
    if report_mu:
        above = (ratios >= np.median(pilot)).sum(axis=1)
        low, high = (
            rates.rate_at_least(above[0], runs, failure),
            rates.rate_at_most(above[1], runs, failure),
        )
        mu = max(0.0, float(ndtri(low) - ndtri(high)))
    return Audit(
        max(0.0, float(rates.epsilon_lower_bound(hits, runs, failure, delta))),
        mu,
        failure_probability,
        delta,
        "sampling",
        PREMISE,
        runs,
        queries,
        _randomness(mechanism),
    )


def audit_by_enumeration(mechanism: TopKRandomizedResponse, queries: int) -> Audit:
    """Audit the law of responses without sampling, for `queries` of the most revealing ones."""
    ratio = queries * enumerate_response(mechanism)
    audited = _randomness(mechanism)
    return Audit(ratio, None, 0.0, 0.0, "enumeration", PREMISE, 0, queries, audited)


def enumerate_response(mechanism: TopKRandomizedResponse) -> float:
    """Return the largest log-ratio of any answer's probabilities under any two teachers.

    The laws come from `constrain_sensitivity`: for a class inside the student's set, outside it,
    and for no class (NaN). Students find 1 to K classes probable, so a threshold gives sets of
    every size.
    """
    num_classes = mechanism.num_classes
    teachers = np.vstack([np.eye(num_classes), np.full(num_classes, math.nan)])
    worst = 0.0
    for predictions in np.tri(num_classes, dtype=np.float32):
        laws = mechanism.constrain_sensitivity(
            teachers, np.broadcast_to(predictions, teachers.shape)
        )
        possible = laws[:, laws.max(axis=0) > 0]
        with np.errstate(divide="ignore"):
            ratios = np.log(possible.max(axis=0) / possible.min(axis=0))
        worst = max(worst, float(ratios.max()))
    return worst


def rows_are_separate(mechanism: Audited) -> bool:
    """Return whether rows of a request are bounded one by one, so that runs may share a request."""
    world, _ = mechanism.worst_case()
    two, one = (_bound_rows(mechanism, world, count) for count in (2, 1))
    return np.array_equal(two, np.tile(one, (2, 1)))


def cost_in_answers(mechanism: Audited, queries: int) -> float:
    """Return how many single answers cost as much as an answer to `queries` images.

    This is how much the squared distance between both worlds grows. It is computed from bounded
    values, not taken from the mechanism's own count.
    """
    whole, one = (
        np.square(np.subtract(*(_bound_rows(mechanism, w, count) for w in mechanism.worst_case())))
        for count in (queries, 1)
    )
    return float(whole.sum() / one.sum())


def _bound_rows(mechanism: Audited, world: Values, count: int) -> Values:
    """Bound `count` equal rows of the teacher that differs between both worlds."""
    row = public_rows(mechanism.num_classes)[-1:]
    return mechanism.constrain_sensitivity(np.tile(world[0], (count, 1)), np.tile(row, (count, 1)))


def verdict(audit: Audit, proof: Proof, published: float, published_delta: float) -> list[str]:
    """Describe in sentences what the audit refutes and what it does not."""
    odds = f"(failure probability {audit.failure_probability:g})"
    proven = proof.epsilon
    numbers = "".join(
        f", {name} {value:.4g}"
        for name, value in (("mu", proof.mu), ("advantage", proof.advantage))
        if value is not None
    )
    if refuted := proof.contradicted(audit):
        sentences = [
            f"contradicts the proven {' and '.join(refuted)}: the implementation or the proof is "
            f"wrong {odds}: {audit}"
        ]
    elif audit.lower_bound > proven.value + ROUNDING:
        sentences = [
            f"says nothing about the proven epsilon {proven}, which is a weaker promise: {audit}"
        ]
    else:
        sentences = [f"consistent with the proven epsilon {proven}{numbers}: {audit}"]
    if audit.mu_lower_bound:
        mu = _round_down(audit.mu_lower_bound)
        sentences.append(
            f"mu is at least {mu} ({audit.unit}, {audit.relation}, failure probability "
            f"{audit.failure_probability:g})"
        )
    if audit.refutes(published, published_delta, proven.queries):
        sentences += [
            f"refuted: the published epsilon {published:.3g} as a bound for {audit.audited}, under "
            f"the premise that {PREMISE} {odds}",
            "not shown: that a particular trained teacher leaks this much",
        ]
    elif math.isfinite(published):
        sentences.append(
            f"not refuted: the published epsilon {published:.3g}, at queries {audit.queries:,} and "
            f"delta {audit.delta:g}; that does not prove it"
        )
    return sentences


# --- sampling ---------------------------------------------------------------------------------


def public_rows(num_classes: int) -> NDArray[np.float32]:
    """Make (8, K) predictions that all find the classes of the worst case most probable.

    Two give all other classes probability zero, three are sure of one class, and three are random.
    """
    rows = np.zeros((8, num_classes))
    rows[:2, :2] = 0.5
    rows[2:5, 0] = 1.0, 0.999, 0.95
    rows[3:5, 1:] = (1 - rows[3:5, :1]) / (num_classes - 1)
    random = np.random.default_rng(0).dirichlet(np.ones(num_classes), 3)
    rows[5:] = -np.sort(-random, axis=1)
    return rows.astype(np.float32)


def _all_public_rows(num_classes: int) -> NDArray[np.float32]:
    """Return (8 K, K) rows of all kinds, each rolled by every shift."""
    return np.concatenate([_shifted(row) for row in public_rows(num_classes)])


def _worlds(mechanism: Audited) -> Values:
    """Return the teachers' (2, 8 K, n, K) values in both worlds for each row of `_public`."""
    worlds = np.stack([_shifted(world[:, 0]) for world in mechanism.worst_case()])
    return np.tile(worlds, (1, KINDS, 1, 1))


def _shifted(values: Values) -> Values:
    """Roll the classes of (..., K) values by every shift; return (K, ..., K) values."""
    return np.stack([np.roll(values, shift, axis=-1) for shift in range(values.shape[-1])])


def _ratios(mechanism: Audited, client: Client, queries: int, runs: int) -> NDArray[np.float64]:
    """Simulate runs in both worlds; return (2, runs) log-likelihood ratios, up to constants.

    Each row of a request belongs to a slot and a run; the rows of a slot are adjacent.
    """
    num_classes, worlds = mechanism.num_classes, _worlds(mechanism)
    public, statistic = _all_public_rows(num_classes), _statistic(mechanism)
    separate = rows_are_separate(mechanism)
    most = max(1, VALUES_AT_ONCE // num_classes) if separate else 1  # rows of a request
    half = math.ceil(queries / 2)
    piece = min(half + half % 2 if queries > 2 else half, most)  # rows of a run in a request
    sizes = [min(piece, queries - done) for done in range(0, queries, piece)]
    together = min(most // piece, RUNS_AT_ONCE)  # runs that share a request
    ratios = np.zeros((2, runs))
    parts = [(world, first) for world in (0, 1) for first in range(0, runs, together)]
    for world, first in track("parts of the runs", parts):
        part = ratios[world, first : first + together]
        places = np.tile((first + np.arange(len(part))) % len(public), piece)
        swaps = np.arange(piece).repeat(len(part))
        requests = [
            worlds[(world + swaps[:rows] + number) % 2, places[:rows]].swapaxes(0, 1)
            for number, size in enumerate(sizes)
            for rows in [len(part) * size]
        ]
        for number, answers in enumerate(client(requests, public[places])):
            row_ratios = statistic(answers, places[: len(answers)])
            row_ratios = row_ratios * (-1.0) ** (swaps[: len(answers)] + number)
            part += row_ratios.reshape(-1, len(part)).sum(axis=0)
    return ratios


def _statistic(mechanism: Audited) -> Callable[[Values, NDArray[np.int64]], NDArray[np.float64]]:
    """Return the function from (B, K) answers and (B,) places to (B,) log-likelihood ratios.

    A place is the index of the prediction's row in `_public`. Ratios omit constants. For a noisy
    maximum, only the classes that gain or lose a vote count; the test remains valid.
    """
    public = _all_public_rows(mechanism.num_classes)
    worlds = [
        np.stack([_constrained(mechanism, *each) for each in zip(world, public, strict=True)])
        for world in _worlds(mechanism)
    ]  # (8 K, n, K)
    if isinstance(mechanism, TopKRandomizedResponse):
        laws = [np.where(world[:, 0] > 0, world[:, 0], 1) for world in worlds]  # of teacher 0
        weights = np.log(laws[0] / laws[1])
    else:
        first, second = (world.sum(axis=1) for world in worlds)
        weights = first - second
        if isinstance(mechanism, Additive) and mechanism.noise_law == "laplace":
            middle, reach = (first + second) / 2, np.abs(weights) / 2
            signs = np.sign(weights)

            def laplace(answers: Values, places: NDArray[np.int64]) -> NDArray[np.float64]:
                """Return half of |answer - second| - |answer - first|, exact where constant."""
                far = reach[places]
                return _dot(np.clip(answers - middle[places], -far, far), signs[places])

            return laplace
    return lambda answers, places: _dot(answers, weights[places])


def _constrained(mechanism: Audited, teachers: Values, row: NDArray[np.float32]) -> Values:
    """Constrain the sensitivity of (n, K) values at a (K,) prediction; do equal values once."""
    distinct = {each.tobytes(): each for each in teachers}
    known = {
        key: mechanism.constrain_sensitivity(each[None], row[None])[0]
        for key, each in distinct.items()
    }
    return np.stack([known[each.tobytes()] for each in teachers])


def _dot(left: Values, right: Values) -> NDArray[np.float64]:
    """Return the (B,) dot products of (B, K) values, row by row."""
    return np.asarray(np.einsum("bk,bk->b", left, right))


def _randomness(mechanism: Audited) -> str:
    if isinstance(mechanism, TopKRandomizedResponse):
        return "randomised responses"
    if isinstance(mechanism, NoisyMax):
        return "noisy maxima"
    if isinstance(mechanism, NormalizedGradient):
        return "noise N(0, sigma^2 beta^2)"
    return "noise N(0, sigma^2)" if mechanism.noise_law == "gaussian" else "noise Laplace(0, sigma)"


def _round_down(bound: float) -> str:
    return f"{math.floor(bound * 1e3) / 1e3:.3f}" if math.isfinite(bound) else "inf"
