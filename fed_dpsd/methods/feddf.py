"""FedDF: ensemble distillation on public images; the student starts as the teachers' average.

Lin, Kong, Stich, Jaggi: "Ensemble Distillation for Robust Model Fusion in Federated Learning",
NeurIPS 2020, arXiv 2006.07242, Algorithm 1, with one round of communication.

Differences from the paper:
- It distils on other data sets or on noise; here, on procedural images
  (fed_dpsd/models/procedural.py).
- Its optimiser is Adam at 0.001 with cosine annealing, for 10,000 steps with early stopping; here,
  SGD with momentum 0.9 and a constant rate, which restarts in each round.
- It starts from an average weighted by numbers of records; here, all weights are equal.
"""

import numpy as np
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass

from fed_dpsd.config import STRICT
from fed_dpsd.methods.fedavg import average
from fed_dpsd.methods.method import PublicContext, counts_of, require_fractions
from fed_dpsd.methods.white_box import Distilling, Ensemble
from fed_dpsd.models import load_vector, procedural, to_vector
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.streams import Streams


@dataclass(frozen=True, config=STRICT)
class FedDF(Distilling):
    """FedDF, Algorithm 1; conf/method/feddf.yaml explains the fields."""

    noise_fraction: float
    areas_fraction: float
    leaves_fraction: float
    objects_fraction: float

    def __post_init__(self) -> None:
        require_fractions(self.fractions, "the other images are lines")

    @property
    def fractions(self) -> dict[str, float]:
        """Return the fractions of procedural images by kind, except lines."""
        return {
            "noise": self.noise_fraction,
            "areas": self.areas_fraction,
            "leaves": self.leaves_fraction,
            "objects": self.objects_fraction,
        }

    def initial_student(
        self, ensemble: Ensemble, context: PublicContext, streams: Streams
    ) -> Classifier:
        """Return the average of the teachers if all have the student's architecture.

        Otherwise, the student starts from random weights. The average is useful only if the
        teachers also had a common start (teacher.same_start).
        """
        student = super().initial_student(ensemble, context, streams)
        vectors = [to_vector(teacher) for teacher in ensemble.teachers]
        if all(str(teacher) == str(student) for teacher in ensemble.teachers):
            load_vector(student, average(vectors, [1.0] * len(vectors)))
        return student

    def synthesise(
        self,
        ensemble: Ensemble,
        student: Classifier,
        context: PublicContext,
        streams: Streams,
        number: int,
    ) -> NDArray[np.uint8]:
        """Draw procedural images."""
        queries = context.queries_per_round
        counts = counts_of(self.fractions, queries)
        counts["lines"] = queries - sum(counts.values())
        return np.concatenate(procedural.draw(counts, context.image_shape, streams, number))
