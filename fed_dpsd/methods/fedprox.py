"""FedProx: FedAVG with a penalty that pulls clients towards the model that they started from.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks",
MLSys 2020, arXiv 1812.06127, Algorithm 2, with all clients in each round and the same number of
epochs for each. As in FedAVG here, the first round's models are the teachers themselves.
"""

from dataclasses import dataclass

from fed_dpsd.methods.fedavg import FedAVG


@dataclass(frozen=True)
class FedProx(FedAVG):
    """FedAVG with the proximal term of Equation 2 in the clients' training.

    Args:
        proximal_weight: mu >= 0. `Site.retrain` adds mu / 2 ||w - w_t||^2 to a client's loss; 0
            gives FedAVG. DP-SGD adds the term's gradient to its noisy sum of clipped gradients.
    """

    proximal_weight: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.proximal_weight < float("inf"):
            raise ValueError(f"proximal_weight={self.proximal_weight} must be a finite number >= 0")
