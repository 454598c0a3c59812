"""Local training: every client trains a teacher on its own records, and the summary scores it.

No teacher is asked, so nothing private leaves a client, and there is no student. Teachers trained
with DP keep their guarantee against anyone with access to them or to their class counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fed_dpsd.errors import ProtocolError
from fed_dpsd.methods.class_counts import counts_stage, release_class_counts
from fed_dpsd.methods.method import Federation, Plan, Round, Site, State, World
from fed_dpsd.privacy.training import TrainingMechanism
from fed_dpsd.protocol import Answer, Ask, Refusal
from fed_dpsd.streams import Streams


@dataclass(frozen=True)
class Local:
    """Local training, a method without rounds."""

    num_clients: ClassVar[int | None] = None
    trainings: ClassVar[tuple[str, ...] | None] = None
    averages: ClassVar[bool] = False
    asks_pictures: ClassVar[bool] = False
    asks_cohorts: ClassVar[bool] = False

    def plan(self, world: World) -> Plan:
        """Return the class counts of a private training; otherwise nothing leaves."""
        counts = counts_stage(world, clear=False)
        return Plan(world.training, counts, ends_with_teachers=True)

    def client(self, ask: Ask, site: Site) -> Answer | Refusal:
        """Release the class counts of a private training, and nothing else."""
        if ask.kind == "counts" and isinstance(site.training, TrainingMechanism):
            return release_class_counts(ask, site, clear=False)
        raise ProtocolError("method Local answers nothing")

    def server(
        self, federation: Federation, world: World, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Yield no round."""
        yield from ()
