"""The ensemble of all clients' teachers, which FedDF, FedDAFL, FedADI and DENSE distil.

This ensemble averages logits. A run's `ensemble` score is for a different ensemble, which
averages probabilities. `weighted_ensemble` weights the probabilities by class counts and may be
better.
"""

from collections.abc import Iterator
from typing import ClassVar

from pydantic.dataclasses import dataclass

from fed_dpsd.config import STRICT
from fed_dpsd.methods.method import Federation, PublicContext, Round, State
from fed_dpsd.methods.white_box import WhiteBox, fetch_ensemble
from fed_dpsd.streams import Streams


@dataclass(frozen=True, config=STRICT)
class WholeEnsemble(WhiteBox):
    """A method of one round, in which the student is the mean of the teachers' logits.

    With one client that holds all records, this is centralised training, which no federation can do
    (conf/method/central.yaml and direct.yaml).
    """

    uses_teachers_alone: ClassVar[bool] = True

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Yield the ensemble as the student; train nothing."""
        if resume is None:
            ensemble = fetch_ensemble(federation, context)
            yield Round(State.of(1, student=ensemble), ensemble)


@dataclass(frozen=True, config=STRICT)
class CentralBaseline(WholeEnsemble):
    """A baseline with all records in one place, as in the papers' tables.

    The method is named after the only training that it supports.
    """

    @property
    def trainings(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the training that the method supports."""
        return (self.name,)
