"""Local training: clients train teachers on their own records; the summary has the scores.

Teachers receive no requests, so nothing private leaves a client, and there is no student. The
guarantee of teachers trained with DP holds against anyone with access to them.
"""

from collections.abc import Iterator
from typing import ClassVar

from pydantic.dataclasses import dataclass

from fed_dpsd.config import STRICT
from fed_dpsd.errors import ProtocolError
from fed_dpsd.methods.method import Federation, Method, PublicContext, Round, Site, State
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.mechanism import KeptTeachers
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.training import TrainingMechanism
from fed_dpsd.protocol import Refusal, Request, Response
from fed_dpsd.streams import Streams


@dataclass(frozen=True, config=STRICT)
class Local(Method):
    """Local training, a method without rounds."""

    takes_gradients: ClassVar[bool] = True  # asks for no answers

    def plan(self, context: PublicContext) -> Plan:
        """Plan the teachers' private training, if any; nothing else is released."""
        private = isinstance(context.training, TrainingMechanism)
        return Plan(context.training, (Stage(KeptTeachers(), 1, 0),) if private else ())

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Reject every request."""
        raise ProtocolError("method Local answers no requests")

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Run no rounds."""
        yield from ()
