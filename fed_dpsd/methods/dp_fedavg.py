"""DP-FedAVG: FedAVG whose clients train with DP-SGD, a charge for every round.

McMahan, Ramage, Talwar, Zhang: "Learning Differentially Private Recurrent Language Models", ICLR
2018, arXiv 1710.06963, with the clipping moved to the record: among a few hospitals no client is
hidden, so what is protected is a record, from everybody, the server included (Abadi et al., arXiv
1607.00133, at each client).
"""

from dataclasses import dataclass
from typing import ClassVar

from fed_dpsd.methods.fedavg import FedAVG


@dataclass(frozen=True)
class DPFedAVG(FedAVG):
    """FedAVG that cannot run without a training mechanism: `privacy=dp_teacher`."""

    mechanisms: ClassVar[tuple[str, ...] | None] = ("dp_teacher",)
