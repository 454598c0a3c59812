"""DPSD: differentially private synthetic distillation from one teacher.

Liu, Ge, Wang, Li, Liu: "Privacy-Preserving Model Transcription with Differentially Private
Synthetic Distillation", arXiv 2601.19090. This is `fed_dpsd` with one client: each image has its
own answer, and the student learns from all answers so far. conf/method/paper_dpsd.yaml is the
paper's own loop, Algorithm 1.
"""

from pydantic.dataclasses import dataclass

from fed_dpsd.config import STRICT
from fed_dpsd.methods.fed_dpsd import FedDPSD
from fed_dpsd.methods.white_box import Discriminating


@dataclass(frozen=True, config=STRICT)
class DPSD(Discriminating, FedDPSD):
    """DPSD with one teacher; with the teacher as discriminator, the paper's DPSD-T.

    conf/method/dpsd.yaml explains the fields.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.discriminator == "teacher" and self.generator_steps == 0:
            raise ValueError(
                "discriminator='teacher' sends the teacher's weights but does not use them if "
                "generator_steps=0; use generator_steps >= 1"
            )
