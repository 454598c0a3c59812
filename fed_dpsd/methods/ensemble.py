"""The ensemble of all clients' teachers, as it is: what FedDF, FedDAFL, FedADI and DENSE distil.

The mean of the logits. A run's `ensemble` score is of another one, the mean of the probabilities,
and `weighted_ensemble` of probabilities that class counts weigh, which may well be better.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fed_dpsd.methods.method import Federation, Round, State, World
from fed_dpsd.methods.white_box import Ensemble, WhiteBox, fetch_teachers
from fed_dpsd.streams import Streams


@dataclass(frozen=True)
class WholeEnsemble(WhiteBox):
    """One round: the mean of the teachers' logits is the student."""

    def server(
        self, federation: Federation, world: World, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Nothing is learnt."""
        if resume is None:
            teachers = fetch_teachers(federation, world)
            ensemble = Ensemble([teacher for own in teachers.values() for teacher in own])
            tensors = {f"student.{name}": t for name, t in ensemble.state_dict().items()}
            yield Round(State(1, tensors, ()), ensemble)
