"""Forms in which released answers travel: fewer bytes for equal values.

A form follows from the mechanism and the public predictions of an ask. So packing is
post-processing, and honest answers to an ask have the same length, whatever they say. An answer
that its form does not hold travels as it is, and only a function of released values shows: a former
version may have stored it, or its noise is farther out than noise.FARTHEST.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.privacy.mechanism import Mechanism, Values

_MOST_STEPS = 2**31  # int32 holds fewer


class Form(Protocol):
    """A form of the (B, K) answers to one ask."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Return the type of a packed answer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a packed answer."""

    def pack(self, values: Values) -> Values:
        """Pack (B, K) values; what does not fit comes out as other values, or as it is."""

    def unpack(self, packed: Values) -> Values:
        """Unpack any array of the form's type and shape; (B, K)."""


@runtime_checkable
class Packed(Protocol):
    """A mechanism whose answers travel in a form of their own."""

    def form(self, predictions: Values) -> Form | None:
        """Return the form of answers to (B, K) predictions; None where they stay as they are."""


def pack(mechanism: Mechanism, values: Values, predictions: Values) -> Values:
    """Pack a released (B, K) answer; it stays as it is where its form does not hold it exactly.

    Zeros lose their sign, in every engine.
    """
    if (form := _form(mechanism, predictions)) is None:
        return values
    packed = form.pack(values)
    if packed.dtype != form.dtype or packed.shape != form.shape:
        return values
    again = form.unpack(packed)
    return packed if again.dtype == values.dtype and np.array_equal(again, values) else values


def unpack(mechanism: Mechanism, packed: Values, predictions: Values) -> Values:
    """Unpack a peer's answer; one that does not have the form comes back as it is, to be checked.

    What comes back may be anything that `admissible` would have to judge without packing.
    """
    form = _form(mechanism, predictions)
    if form is None or packed.dtype != form.dtype or packed.shape != form.shape:
        return packed
    return form.unpack(packed)


def _form(mechanism: Mechanism, predictions: Values) -> Form | None:
    return mechanism.form(predictions) if isinstance(mechanism, Packed) else None


@dataclass(frozen=True)
class Responses:
    """The class numbers of a row's responses instead of the votes of each class.

    Args:
        queries: B.
        num_classes: K.
        responses: number of responses in a row.
        votes: votes that each response counts for.
    """

    queries: int
    num_classes: int
    responses: int
    votes: int = 1

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Return the smallest type of a class number."""
        return np.min_scalar_type(self.num_classes - 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (B, responses)."""
        return self.queries, self.responses

    @property
    def pays(self) -> bool:
        """Return whether class numbers take fewer bytes than votes."""
        votes = self.num_classes * self._counted.itemsize
        return self.responses * self.dtype.itemsize < votes

    @property
    def _counted(self) -> np.dtype[np.generic]:
        return np.min_scalar_type(self.responses * self.votes)

    def pack(self, values: Values) -> Values:
        """List each row's classes in ascending order, each as often as it was the response."""
        if values.dtype != self._counted:
            return values
        counts = values // self.votes
        if (counts.sum(axis=1) != self.responses).any():
            return values
        classes = np.tile(np.arange(self.num_classes, dtype=self.dtype), len(counts))
        return np.repeat(classes, counts.ravel()).reshape(-1, self.responses)

    def unpack(self, packed: Values) -> Values:
        """Count the votes of each class; a number that is no class has none."""
        counts = np.zeros((len(packed), self.num_classes), self._counted)
        rows, places = np.nonzero(packed < self.num_classes)
        np.add.at(counts, (rows, packed[rows, places]), self.votes)
        return counts


@dataclass(frozen=True)
class Entries:
    """The entries that may differ from zero, one after the other.

    Args:
        kept: (B, K) mask of these entries, a public one.
        spacing: lattice of which entries are whole multiples, which travel as int32; 0 for the
            float64 themselves.
    """

    kept: NDArray[np.bool_]
    spacing: float = 0.0

    @classmethod
    def of(cls, kept: NDArray[np.bool_], spacing: float, largest: float) -> "Entries":
        """Choose int32 where it holds all multiples of `spacing` up to the size `largest`."""
        return cls(kept, spacing if largest < _MOST_STEPS * spacing else 0.0)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Return int32 or float64."""
        return np.dtype(np.int32 if self.spacing else np.float64)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (number of kept entries,)."""
        return (int(self.kept.sum()),)

    def pack(self, values: Values) -> Values:
        """Take the kept entries, in whole multiples of the spacing."""
        entries = np.asarray(values[self.kept])
        with np.errstate(all="ignore"):  # what int32 does not hold is another number again
            return np.rint(entries / self.spacing).astype(np.int32) if self.spacing else entries

    def unpack(self, packed: Values) -> Values:
        """Put the entries in their places among zeros."""
        values = np.zeros(self.kept.shape)
        values[self.kept] = packed * (self.spacing or 1.0)
        return values
