"""DP-FedSGD: one shared model, trained on noisy sums of all clients' clipped gradients.

FedSGD is Section 2 of McMahan, Moore, Ramage, Hampson, Agueera y Arcas: "Communication-Efficient
Learning of Deep Networks from Decentralized Data", arXiv 1602.05629. With noise shares and secure
sums, it is distributed DP-SGD: Kairouz, Liu, Steinke, "The Distributed Discrete Gaussian Mechanism
for Federated Learning with Secure Aggregation", arXiv 2102.06387, here with each record's gradient
clipped. A round is one step on all records of all clients.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import nn

from fed_dpsd.config import STRICT, Positive
from fed_dpsd.errors import UserError
from fed_dpsd.methods.method import (
    Federation,
    PublicContext,
    Round,
    State,
    named_tensors,
    nobody_answers,
    tensors_of,
)
from fed_dpsd.methods.record_sums import SummingRecords
from fed_dpsd.models import load_vector, to_vector
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.record_sums import MOST_NUMBERS
from fed_dpsd.streams import Streams


@dataclass(frozen=True, config=STRICT)
class DPFedSGD(SummingRecords):
    """DP-FedSGD for a linear classifier on fixed features.

    Args:
        learning_rate: learning rate of the server's Adam, > 0.
    """

    sums: ClassVar[str] = "clipped_gradients"
    learning_rate: Positive

    def plan(self, context: PublicContext) -> Plan:
        """Return one release for each round."""
        return Plan(context.training, (Stage(context.answers, context.rounds, 1),))

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Send the weights, sum the gradients, and take a step of Adam."""
        student = context.make_teacher(0)
        weights = nn.Parameter(torch.zeros_like(to_vector(student.classifier)))
        if len(weights) > MOST_NUMBERS:
            raise UserError(
                f"the classifier has {len(weights):,} weights; a sum covers {MOST_NUMBERS:,}; use "
                "fewer features (model.teacher_width) or classes"
            )
        optimiser = Adam([weights], self.learning_rate)
        last = 0
        if resume:
            last = resume.round
            student.load_state_dict(tensors_of("student", resume.tensors))
            weights.data = to_vector(student.classifier)
            moments = {"state": {0: tensors_of("optimiser", resume.tensors)}}
            optimiser.load_state_dict(optimiser.state_dict() | moments)
        for number in range(last + 1, context.rounds + 1):
            sent = context.request("gradients", number, weights.detach().numpy().copy())
            total = federation.total(sent)
            if not total.count and not last:
                raise nobody_answers(total.refused)
            if total.count:
                last = number
                weights.data = torch.from_numpy(total.request.weights.copy())
                # The sum is not divided by a count: Adam is insensitive to scale.
                weights.grad = torch.from_numpy(total.sum[:, 0]).float()
                optimiser.step()
                load_vector(student.classifier, weights.detach())
            own = {f"optimiser.{k}": v.clone() for k, v in optimiser.state[weights].items()}
            state = State(last, named_tensors(student=student) | own, [])
            yield Round(state, student.eval(), {}, total.refused)
            if not total.count:  # every client's budget is spent
                return
