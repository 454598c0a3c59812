"""Class statistics: a linear classifier from one message of each client's noisy feature moments.

All clients have the same frozen features and send sums over their records: of the features and the
number of records of each class, and of the features' products. The server adds them and fits a
Gaussian to each class, all with the same covariance (linear discriminant analysis). Sums do not
depend on how records are spread over clients.

Sources: FedCGS (arXiv 2503.06962) and GH-OFL (arXiv 2602.01186), without noise; Mehta, Krichene,
Thakurta, Kurakin, Cutkosky (arXiv 2211.13403), noisy moments, without a federation.
"""

import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass

from fed_dpsd.config import STRICT, Positive
from fed_dpsd.errors import UserError
from fed_dpsd.methods.method import Federation, PublicContext, Round, State, nobody_answers
from fed_dpsd.methods.record_sums import SummingRecords
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.class_statistics import ClassStatistics
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.record_sums import MOST_NUMBERS
from fed_dpsd.streams import Streams


@dataclass(frozen=True, config=STRICT)
class FedStatistics(SummingRecords):
    """Gaussians with a shared covariance, from noisy moments; the method has one round.

    Args:
        ridge: what is added to the variances of the records' features, in standard deviations of
            the noise in a second moment, > 0.
    """

    sums: ClassVar[str] = "class_statistics"
    ridge: Positive

    def plan(self, context: PublicContext) -> Plan:
        """Return the single release."""
        return Plan(context.training, (Stage(context.answers, 1, 1),))

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Sum the clients' statistics and fit the student to them."""
        if resume:
            return
        student, answers = context.make_teacher(0), context.answers
        assert isinstance(answers, ClassStatistics)
        layer = student.classifier
        request = context.request("statistics", 1, np.zeros(layer.in_features, np.float32))
        if (count := request.summed_shape[0]) > MOST_NUMBERS:
            raise UserError(
                f"statistics of {layer.in_features:,} features have {count:,} numbers; a release "
                f"covers {MOST_NUMBERS:,}; use fewer features (model.teacher_width)"
            )
        total = federation.total(request)
        if not total.count:
            raise nobody_answers(total.refused)
        noise = answers.noise_of_moments(total.count)
        statistics = answers.statistics(total.sum[:, 0])
        weights, bias = gaussian_classifier(*statistics, self.ridge * noise)
        weights /= math.sqrt(layer.in_features)  # about the length of an image's features
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weights))
            layer.bias.copy_(torch.from_numpy(bias))
        yield Round(State.of(1, student=student), student.eval(), {}, total.refused)


def gaussian_classifier(
    moments: NDArray[np.float64],
    sums: NDArray[np.float64],
    counts: NDArray[np.float64],
    penalty: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the (K, D) weights and (K,) biases of the classes' logits under Gaussians.

    The Gaussians have one covariance, and the classes' frequencies are known.

    Args:
        moments: (D, D), the sum of u u^T over all inputs u; a symmetric matrix. Noise may have made
            eigenvalues of the covariance negative, which then count as 0.
        sums: (K, D), the sum of the inputs of each class.
        counts: (K,), the number of inputs of each class; below 1 they count as 1.
        penalty: added to each eigenvalue of the covariance, times the number of inputs, > 0.
    """
    counts = np.maximum(counts, 1)
    means = sums / counts[:, None]
    eigenvalues, vectors = np.linalg.eigh(moments - means.T @ (counts[:, None] * means))
    precision = vectors * (counts.sum() / (np.clip(eigenvalues, 0, None) + penalty)) @ vectors.T
    weights = means @ precision
    return weights, np.log(counts / counts.sum()) - (weights * means).sum(1) / 2
