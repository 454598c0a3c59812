"""Methods that learn a linear classifier from sums over the clients' records, without teachers."""

from typing import ClassVar

from fed_dpsd.config import Config
from fed_dpsd.errors import ProtocolError
from fed_dpsd.methods.method import Method, Site
from fed_dpsd.models.classifiers import FIXED
from fed_dpsd.privacy.mechanism import Mechanism
from fed_dpsd.privacy.record_sums import RecordSums
from fed_dpsd.privacy.training import Training
from fed_dpsd.protocol import Refusal, Request, Response


class SummingRecords(Method):
    """A method with a linear classifier on fixed features, and sums over records as answers.

    Attributes:
        sums: the name of the mechanism with these sums.
    """

    trainings: ClassVar[tuple[str, ...] | None] = ("plain",)
    takes_gradients: ClassVar[bool] = True
    averages: ClassVar[bool] = True  # one architecture, and a common start in each round
    sums: ClassVar[str]

    def check(self, config: Config, training: Training, answers: Mechanism) -> list[str]:
        """Also require the method's sums, linear models, and no teachers."""
        problems = super().check(config, training, answers)
        if answers.name != self.sums:
            problems.append(
                f"answers={answers.name}: method={self.name} needs sums over records; use "
                f"answers={self.sums}"
            )
        if (network := config.architecture(0)) not in FIXED:
            problems.append(
                f"model.teacher={network}: method={self.name} trains a linear classifier on fixed "
                f"features; use model={' or '.join(FIXED)}"
            )
        if config.teacher.path is not None:
            problems.append(
                f"teacher.path={config.teacher.path}: method={self.name} has no teachers; use "
                "teacher.path=null"
            )
        if config.diagnostics:
            problems.append(
                f"diagnostics=true: method={self.name} has no teachers to score; use "
                "diagnostics=false"
            )
        return problems

    # --- client ------------------------------------------------------------------------------

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Release the sum over the client's records that the request asks for."""
        if not isinstance(site.answers, RecordSums) or request.kind != site.answers.kind:
            raise ProtocolError(f"method {type(self).__name__} does not answer {request.kind!r}")
        return site.release(site.answers, site.sensitive_sum(request), request)
