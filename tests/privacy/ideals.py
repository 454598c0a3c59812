"""Ideal events, which have no loss by finite precision, and seeded generators."""

import numpy as np
from dp_accounting import ComposedDpEvent, SelfComposedDpEvent

from fed_dpsd.privacy.events import FinitePrecisionDpEvent, ReservedDpEvent, ReservingDpEvent


def ideal(event):
    """The event of ideal noise; a composition of one part is that part."""
    if isinstance(event, SelfComposedDpEvent):
        return SelfComposedDpEvent(ideal(event.event), event.count)
    if isinstance(event, ComposedDpEvent):
        parts = [ideal(e) for e in event.events if not isinstance(e, FinitePrecisionDpEvent)]
        return parts[0] if len(parts) == 1 else ComposedDpEvent(parts)
    if isinstance(event, ReservingDpEvent | ReservedDpEvent):
        return ideal(event.event)
    return event


def rng(seed=0):
    return np.random.Generator(np.random.PCG64(seed))
