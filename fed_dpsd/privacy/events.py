"""Events, each with its law: the privacy losses of one release under the worst change.

An event documents a mechanism, and its `Law` is all that proofs know of it. A new event needs a
class and a law here, and nothing elsewhere: ledgers hold the registered events, and accounting.py
composes their laws. The proofs are in docs/proofs.md.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import attrs
import numpy as np
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NeighboringRelation,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    RandomizedResponseDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray

from fed_dpsd.privacy import bounded_range, shuffled

FINEST_RESOLUTION = 1e-4
E = TypeVar("E", bound=DpEvent)


class UnsupportedEventError(ValueError):
    """An event that no proof covers; the message names the uncovered part."""


# --- events without a law, which accounting.py takes apart --------------------------------------


@attrs.frozen
class FinitePrecisionDpEvent(DpEvent):
    """The loss due to a sampler's finite precision, in addition to the event of its ideal noise.

    In both worlds, every outcome is at most exp(loss / 2) times as likely as with ideal noise, and
    vice versa. So epsilon grows by `loss`, and delta by a factor of exp(loss / 2).
    """

    loss: float  # >= 0; losses of several releases add up


@attrs.frozen
class ReservingDpEvent(DpEvent):
    """A release and a second release that may follow once; a budget pays for both at once.

    A lifetime budget can be spent in full if all charges have one setting, but not if settings
    differ (docs/proofs.md, Theorem 7). The two releases together count as one setting.
    """

    event: DpEvent  # the event of the release itself; a claim counts only this one
    reserved: DpEvent  # the event of the second release


@attrs.frozen
class ReservedDpEvent(DpEvent):
    """A release that a budget has paid for with a `ReservingDpEvent`; a claim counts it."""

    event: DpEvent


# --- laws ---------------------------------------------------------------------------------------

EVENTS: dict[str, type[DpEvent]] = {  # every event that a ledger may hold, by name
    event.__name__: event
    for event in (
        *(ComposedDpEvent, SelfComposedDpEvent),
        *(FinitePrecisionDpEvent, ReservingDpEvent, ReservedDpEvent),
    )
}


class Law(ABC, Generic[E]):
    """The privacy losses of one release of an event.

    Every method is exact, or an upper bound in exact arithmetic, in the worse direction.
    """

    finest = FINEST_RESOLUTION  # the smallest step of discretised losses

    def __init__(self, event: E) -> None:
        self.event = event

    @property
    def pure(self) -> float:
        """Return the largest loss; `inf` if it is unbounded."""
        return math.inf

    def renyi(self, order: float) -> float:
        """Return D_order between the two worlds, order > 1; `inf` if no formula is known."""
        return math.inf

    @property
    def concentration(self) -> float:
        """Estimate the mean of the loss (half its variance); used only to set the resolution."""
        return min(self.pure, self.pure**2 / 2)

    @property
    def grid(self) -> float:
        """Return a loss that divides all losses, or many; 0 if there is none.

        Multiples of the resolution need no rounding up, which would cost up to a step for each
        loss. So the resolution divides this loss.
        """
        return 0.0

    @abstractmethod
    def losses(self, step: float) -> pld.PrivacyLossDistribution:
        """Return losses that dominate one release's losses, as multiples of `step`."""

    def composed(self, releases: int, step: float) -> pld.PrivacyLossDistribution:
        """Return losses that dominate adaptive releases' losses, as multiples of `step`."""
        return _losses(self.event, step).self_compose(releases)


@functools.lru_cache(maxsize=8)  # of about 1 MB each; one event often comes in many counts
def _losses(event: DpEvent, step: float) -> pld.PrivacyLossDistribution:
    return law_of(event).losses(step)


_LAWS: dict[type[DpEvent], type[Law[Any]]] = {}


def register(event: type[E]) -> Callable[[type[Law[E]]], type[Law[E]]]:
    """Register the decorated class as the law of a class of events.

    Raises:
        ValueError: an event of this name is already known.
    """
    if event.__name__ in EVENTS:
        raise ValueError(f"{event.__name__} is already known, and a ledger may hold it")

    def add(law: type[Law[E]]) -> type[Law[E]]:
        EVENTS[event.__name__], _LAWS[event] = event, law
        return law

    return add


def law_of(event: DpEvent) -> Law[Any]:
    """Return the law of one release.

    Raises:
        UnsupportedEventError: no proof covers the event.
    """
    if type(event) not in _LAWS:
        raise UnsupportedEventError(f"no proof here covers {event}")
    return _LAWS[type(event)](event)


@register(NonPrivateDpEvent)
class _Unbounded(Law[NonPrivateDpEvent]):
    def losses(self, step: float) -> pld.PrivacyLossDistribution:
        return pld.PrivacyLossDistribution.create_from_rounded_probability({0: 0.0}, 1.0, step)


@register(GaussianDpEvent)
class _Gaussian(Law[GaussianDpEvent]):
    def renyi(self, order: float) -> float:
        return order / (2 * float(self.event.noise_multiplier) ** 2)

    @property
    def concentration(self) -> float:
        return 1 / (2 * float(self.event.noise_multiplier) ** 2)

    def losses(self, step: float) -> pld.PrivacyLossDistribution:
        return pld.from_gaussian_mechanism(
            self.event.noise_multiplier, value_discretization_interval=step
        )


@register(LaplaceDpEvent)
class _Laplace(Law[LaplaceDpEvent]):
    @property
    def pure(self) -> float:
        return 1 / float(self.event.noise_multiplier)

    def renyi(self, order: float) -> float:
        """Return D_order by Mironov, arXiv 1702.07476v3, Proposition 6."""
        shift = 1 / self.event.noise_multiplier
        up = math.log(order / (2 * order - 1)) + (order - 1) * shift
        down = math.log((order - 1) / (2 * order - 1)) - order * shift
        return float(np.logaddexp(up, down)) / (order - 1)

    def losses(self, step: float) -> pld.PrivacyLossDistribution:
        return pld.from_laplace_mechanism(
            self.event.noise_multiplier, value_discretization_interval=step
        )


def truth_and_lie(response: RandomizedResponseDpEvent) -> tuple[float, float]:
    """Return the probabilities of the true class and of each other class."""
    lie = response.noise_parameter / response.num_buckets
    return 1 - (response.num_buckets - 1) * lie, lie


@register(RandomizedResponseDpEvent)
class _RandomizedResponse(Law[RandomizedResponseDpEvent]):
    """Accounted as replace-one: the true class changes."""

    @property
    def pure(self) -> float:
        truth, lie = truth_and_lie(self.event)
        return max(0.0, math.log(truth / lie)) if lie > 0 else math.inf

    def renyi(self, order: float) -> float:
        """Return D_order, from the three likelihood ratios."""
        truth, lie = truth_and_lie(self.event)
        if lie <= 0:
            return math.inf
        rest = max(0.0, 1 - truth - lie)
        terms = [
            order * math.log(truth) + (1 - order) * math.log(lie),
            order * math.log(lie) + (1 - order) * math.log(truth),
            math.log(rest) if rest > 0 else -math.inf,
        ]
        return float(np.logaddexp.reduce(terms)) / (order - 1)

    @property
    def grid(self) -> float:
        return self.pure

    def losses(self, step: float) -> pld.PrivacyLossDistribution:
        truth, lie = truth_and_lie(self.event)
        jumps = self.pure / step
        up, down = math.ceil(jumps), math.floor(jumps)
        if abs(jumps - round(jumps)) < 1e-9:  # the resolution divides the loss, up to rounding
            up = down = round(jumps)
        masses: dict[int, float] = {}
        for jump, mass in ((up, truth), (0, max(0.0, 1 - truth - lie)), (-down, lie)):
            masses[jump] = masses.get(jump, 0.0) + mass
        return pld.PrivacyLossDistribution.create_from_rounded_probability(masses, 0.0, step)


@register(PoissonSampledDpEvent)
class _PoissonSampled(Law[PoissonSampledDpEvent]):
    """Covers only sums with Gaussian noise."""

    def __init__(self, event: PoissonSampledDpEvent) -> None:
        if not isinstance(event.event, GaussianDpEvent):
            raise UnsupportedEventError(f"no proof here covers {event}")
        super().__init__(event)

    def renyi(self, order: float) -> float:
        accountant = RdpAccountant([order], NeighboringRelation.ADD_OR_REMOVE_ONE)
        return float(accountant.compose(self.event).rdp[0])

    @property
    def concentration(self) -> float:
        return _sampled_concentration(
            self.event.sampling_probability, self.event.event.noise_multiplier
        )

    def losses(self, step: float) -> pld.PrivacyLossDistribution:
        return pld.from_gaussian_mechanism(
            self.event.event.noise_multiplier,
            value_discretization_interval=step,
            sampling_prob=self.event.sampling_probability,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        )


@attrs.frozen
class ReplacedInSampleDpEvent(DpEvent):
    """A Poisson-sampled Gaussian sum in which one record is replaced by another.

    With probability q the sum includes the record's vector of norm 1, or the opposite vector in the
    other world: (1 - q) N(0, z^2) + q N(1, z^2) against (1 - q) N(0, z^2) + q N(-1, z^2).
    """

    sampling_probability: float  # q
    # z, noise standard deviation divided by the norm of one record's vector
    noise_multiplier: float


@register(ReplacedInSampleDpEvent)
class _ReplacedInSample(Law[ReplacedInSampleDpEvent]):
    @property
    def concentration(self) -> float:
        return 4 * _sampled_concentration(
            self.event.sampling_probability, self.event.noise_multiplier
        )

    def losses(self, step: float) -> pld.PrivacyLossDistribution:
        return pld.from_gaussian_mechanism(
            self.event.noise_multiplier,
            value_discretization_interval=step,
            sampling_prob=self.event.sampling_probability,
            neighboring_relation=NeighboringRelation.REPLACE_ONE,
        )


def _sampled_concentration(probability: float, noise_multiplier: float) -> float:
    whole = 1 / noise_multiplier**2
    return min(probability**2 * math.expm1(min(whole, 500)), whole) / 2


@attrs.frozen
class BoundedRangeDpEvent(DpEvent):
    """A release with losses in an interval of known length.

    Between two neighbours, the logarithms of the likelihood ratios of all outcomes lie in an
    interval of length `loss_range`. The interval may depend on the neighbours and on everything
    released before.
    """

    loss_range: float  # r > 0


@register(BoundedRangeDpEvent)
class _BoundedRange(Law[BoundedRangeDpEvent]):
    """Composed block by block (docs/proofs.md, Theorem 5b)."""

    @property
    def pure(self) -> float:
        return self.event.loss_range  # the interval holds 0

    def renyi(self, order: float) -> float:
        return min(order * self.event.loss_range**2 / 8, self.event.loss_range)

    @property
    def concentration(self) -> float:
        return super().concentration / 4

    @property
    def grid(self) -> float:
        return self.event.loss_range / bounded_range.PIECES

    def losses(self, step: float) -> pld.PrivacyLossDistribution:
        return self._block(1, step)

    def composed(self, releases: int, step: float) -> pld.PrivacyLossDistribution:
        total, most = pld.identity(step), bounded_range.most_releases(self.event.loss_range)
        for size, times in ((most, releases // most), (releases % most, 1)):
            if size and times:
                total = total.compose(self._block(size, step).self_compose(times))
        return total

    def _block(self, releases: int, step: float) -> pld.PrivacyLossDistribution:
        losses, chance, infinite = bounded_range.losses(self.event.loss_range, releases)
        farthest = math.ceil(losses[-1] / step) + 1
        return _symmetric(_on_grid(losses, chance, step, farthest), infinite, step)


@attrs.frozen
class ShuffledResponseDpEvent(DpEvent):
    """The counts of `responses` k-ary randomised responses; one of them changes.

    The responders answer the same public query independently; only the counts of the k classes
    are seen. The other responses are arbitrary.
    """

    epsilon_per_answer: float  # eps0 of one response, > 0
    k: int  # number of classes that a response may name, >= 2
    responses: int  # M >= 1, the number of honest responses, including the one that changes


@register(ShuffledResponseDpEvent)
class _ShuffledResponse(Law[ShuffledResponseDpEvent]):
    finest = FINEST_RESOLUTION / 10

    @property
    def pure(self) -> float:
        return self.event.epsilon_per_answer

    @property
    def concentration(self) -> float:
        lie = 1 / (math.exp(self.pure) + self.event.k - 1)
        apart = math.expm1(self.pure) * lie
        uniform = 1 + (self.event.responses - 1) * self.event.k * lie
        return min(super().concentration, self.event.k * apart**2 / uniform)

    def losses(self, step: float) -> pld.PrivacyLossDistribution:
        farthest = math.ceil(self.pure / step) + 1
        masses = np.zeros(2 * farthest + 1)
        for losses, chance in shuffled.losses(self.pure, self.event.k, self.event.responses):
            masses += _on_grid(losses, chance, step, farthest)
        return _symmetric(masses, shuffled.omitted_mass(self.event.k), step)


# --- losses on a grid ---------------------------------------------------------------------------


def _on_grid(
    losses: NDArray[np.float64], chance: NDArray[np.float64], step: float, farthest: int
) -> NDArray[np.float64]:
    """Split each probability between the two grid points, -farthest..farthest, next to its loss.

    An outcome keeps its probability in both worlds, so merging the two points again is
    post-processing, and the result dominates the losses. Its error falls with the square of the
    step.
    """
    below = np.floor(losses / step)
    above = np.expm1(below * step - losses) / math.expm1(-step)
    index, size = below.astype(np.int64) + farthest, 2 * farthest + 1
    low = np.bincount(index, chance * (1 - above), size)
    return np.asarray(low + np.bincount(index + 1, chance * above, size))


def _symmetric(
    masses: NDArray[np.float64], infinite: float, step: float
) -> pld.PrivacyLossDistribution:
    """Return the distribution of losses of -G..G steps, the same in both directions.

    `infinite` is the mass of an infinite loss.
    """
    farthest = len(masses) // 2
    law = dict(zip(range(-farthest, farthest + 1), masses.tolist(), strict=True))
    return pld.PrivacyLossDistribution.create_from_rounded_probability(law, infinite, step)
