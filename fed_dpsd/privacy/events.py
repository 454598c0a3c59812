"""Events missing from dp_accounting.

An event documents a mechanism: it states the law of one release under the worst change. The proofs
are in accounting.py; nothing here computes an epsilon.
"""

import attrs
from dp_accounting import DpEvent


@attrs.frozen
class ReplacedInSampleDpEvent(DpEvent):
    """A Poisson-sampled Gaussian sum in which one record is replaced by another.

    With probability q the sum includes the record's vector of norm 1, or the opposite vector in the
    other world: (1 - q) N(0, z^2) + q N(1, z^2) against (1 - q) N(0, z^2) + q N(-1, z^2).
    """

    sampling_probability: float  # q
    # z, noise standard deviation divided by the norm of one record's vector
    noise_multiplier: float


@attrs.frozen
class FinitePrecisionDpEvent(DpEvent):
    """The loss due to a sampler's finite precision, in addition to the event of its ideal noise.

    In both worlds, every outcome is at most exp(loss / 2) times as likely as with ideal noise, and
    vice versa. So epsilon grows by `loss`, and delta by a factor of exp(loss / 2).
    """

    loss: float  # >= 0; losses of several releases add up


@attrs.frozen
class BoundedRangeDpEvent(DpEvent):
    """A release with losses in an interval of known length.

    Between two neighbours, the logarithms of the likelihood ratios of all outcomes lie in an
    interval of length `loss_range`. The interval may depend on the neighbours and on everything
    released before.
    """

    loss_range: float  # r > 0


@attrs.frozen
class ShuffledResponseDpEvent(DpEvent):
    """The counts of `responses` k-ary randomised responses; one of them changes.

    The responders answer the same public query independently; only the counts of the k classes
    are seen. The other responses are arbitrary.
    """

    epsilon_per_answer: float  # eps0 of one response, > 0
    k: int  # number of classes that a response may name, >= 2
    responses: int  # M >= 1, the number of honest responses, including the one that changes


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
