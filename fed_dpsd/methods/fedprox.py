"""FedProx: FedAVG with a penalty that pulls clients towards the model that they started from.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks",
MLSys 2020, arXiv 1812.06127, Algorithm 2, with all clients in each round and the same number of
epochs for each. As in FedAVG here, the first round's models are the teachers themselves.
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from fed_dpsd.config import STRICT
from fed_dpsd.methods.fedavg import FedAVG
from fed_dpsd.methods.method import Site
from fed_dpsd.privacy.mechanism import Weights
from fed_dpsd.protocol import Refusal, Request, Response


@dataclass(frozen=True, config=STRICT)
class FedProx(FedAVG):
    """FedAVG with the proximal term of Equation 2 in the clients' training.

    Args:
        proximal_weight: mu >= 0; 0 gives FedAVG. DP-SGD adds the term's gradient to its noisy sum
            of clipped gradients.
    """

    proximal_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Release the weights after local training with the term, or what FedAVG releases."""
        if request.kind == "train" and self.proximal_weight:
            weights = site.retrain(request, self.local_epochs, self.proximal_term)
            return site.release(Weights(), weights, request)
        return super().client(request, site)

    def proximal_term(
        self, weights: Sequence[torch.Tensor], start: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return mu / 2 ||w - w_t||^2."""
        squares = [(w - w_t).square().sum() for w, w_t in zip(weights, start, strict=True)]
        return self.proximal_weight / 2 * torch.stack(squares).sum()
