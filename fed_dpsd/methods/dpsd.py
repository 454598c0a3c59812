"""DPSD: differentially private synthetic distillation from one teacher.

Liu, Ge, Wang, Li, Liu: "Privacy-Preserving Model Transcription with Differentially Private
Synthetic Distillation", arXiv 2601.19090. It is `fed_dpsd` with one client: each image has an
answer of its own, and the student learns from all answers so far. The paper's own loop, Algorithm
1, is fed_dpsd/papers/paper_dpsd.py.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from fed_dpsd.methods.fed_dpsd import FedDPSD
from fed_dpsd.methods.method import Federation, Plan, PublicContext, Site
from fed_dpsd.methods.white_box import WEIGHTS, fetch_teachers, release_weights
from fed_dpsd.protocol import Refusal, Request, Response


@dataclass(frozen=True)
class DPSD(FedDPSD):
    """DPSD with one teacher; conf/method/dpsd.yaml explains the fields.

    Args:
        discriminator: the network that generators are trained against. "teacher" is the paper's
            DPSD-T: the teacher's weights leave the client, so nothing is proven unless the teacher
            was trained with DP.
    """

    discriminator: Literal["student", "teacher"]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.discriminator not in ("student", "teacher"):
            raise ValueError(f"discriminator={self.discriminator!r} must be 'student' or 'teacher'")
        if self.discriminator == "teacher" and self.generator_steps == 0:
            raise ValueError(
                "discriminator='teacher' sends the teacher's weights but does not use them with "
                "generator_steps=0; give generator_steps >= 1"
            )

    def plan(self, context: PublicContext) -> Plan:
        """Return the stage of answers; for DPSD-T, the teacher's weights come before it."""
        plan = super().plan(context)
        if self.discriminator == "student":
            return plan
        return replace(plan, stages=(WEIGHTS, *plan.stages))

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Answer as in Alg. 1, line 4; release the weights only for the teacher discriminator."""
        if request.kind == "weights" and self.discriminator == "teacher":
            return release_weights(request, site)
        return super().client(request, site)

    def fetch_discriminator(
        self, federation: Federation, context: PublicContext
    ) -> nn.Module | None:
        """Return the teacher for DPSD-T, otherwise None."""
        if self.discriminator == "student":
            return None
        (teacher, *_) = fetch_teachers(federation, context)[0]
        return teacher
