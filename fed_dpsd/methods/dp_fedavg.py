"""DP-FedAVG: FedAVG whose clients train with DP-SGD; each round is charged.

McMahan, Ramage, Talwar, Zhang: "Learning Differentially Private Recurrent Language Models", ICLR
2018, arXiv 1710.06963, except that each record's gradient is clipped, not each client's update: a
few hospitals cannot hide a whole client. Each client runs DP-SGD (Abadi et al., arXiv 1607.00133),
so a record is protected from everybody, the server included.
"""

from dataclasses import dataclass
from typing import ClassVar

from fed_dpsd.methods.fedavg import FedAVG


@dataclass(frozen=True)
class DPFedAVG(FedAVG):
    """FedAVG that requires a private training: `training=dp_sgd`."""

    trainings: ClassVar[tuple[str, ...] | None] = ("dp_sgd",)
