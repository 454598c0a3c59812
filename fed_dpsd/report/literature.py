"""Published results at the epsilons that their papers state; none is proven here.

DPSD's Table V does not say whether FedDPSD's answers there are gradients or labels.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A number of a paper.

    Args:
        method: the method's name in the paper.
        epsilon: the stated epsilon, in the paper's own accounting and unit.
        accuracy: accuracy on the test split, in percent.
        source: paper and table.
    """

    method: str
    epsilon: float
    accuracy: float
    source: str


DPSD = "arXiv 2601.19090, Table"
DGD = "Ge et al., IEEE TIP 32 (2023), Table I"  # arXiv 2601.19090 prints its cells in another order
PUBLISHED = {
    "mnist": (
        Published("DPSD, data", 1, 96.03, f"{DPSD} I"),
        Published("DPSD, data", 10, 97.85, f"{DPSD} I"),
        Published("DPSD, label", 1, 97.62, f"{DPSD} IV"),
        Published("DPSD, label", 10, 98.19, f"{DPSD} VI"),
        Published("FedDPSD", 10, 95.76, f"{DPSD} V"),
        Published("DPDFD", 1, 95.12, f"{DPSD} I"),
        Published("DPDFD", 10, 97.51, f"{DPSD} I"),
        Published("DGD", 1, 73.6, DGD),
        Published("DGD", 10, 97.4, DGD),
        Published("G-PATE", 1, 58.10, f"{DPSD} I"),
        Published("G-PATE", 10, 80.92, f"{DPSD} I"),
        Published("PATE-GAN", 1, 41.68, f"{DPSD} I"),
        Published("PATE-GAN", 10, 66.67, f"{DPSD} I"),
    )
}
