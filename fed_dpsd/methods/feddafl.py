"""FedDAFL: a generator trained against the ensemble, and a student trained on its images.

Chen et al.: "Data-Free Learning of Student Networks", ICCV 2019, arXiv 1904.01186, Algorithm 1,
applied to the clients' ensemble as in DENSE's Table 1. As in its code base for MNIST, the student
is trained with Adam, and the default weights are those. For CIFAR10, its README has one-hot 0.05,
entropy 5 (to base 10), activation 0.01, a generator's rate of 0.02 and a student's SGD at 0.1.

Differences from the code base:
- The generator is fed_dpsd/models/generators.py, with pixels in [0, 1].
- Both optimisers restart in each round.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from fed_dpsd import losses
from fed_dpsd.config import STRICT, Positive
from fed_dpsd.methods.method import Federation, PublicContext, Round, State
from fed_dpsd.methods.white_box import Ensemble, Mean, WhiteBox, divergence, fetch_ensemble
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.divergence import descend, rates_of
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.streams import Streams


@dataclass(frozen=True, config=STRICT)
class FedDAFL(WhiteBox):
    """FedDAFL, Algorithm 1; conf/method/feddafl.yaml explains the fields.

    A round has `steps_per_round` steps on batches of queries_per_round images. The optimisers
    restart in each round, so a run can be resumed from the weights alone.
    """

    follows_gradients: ClassVar[bool] = True
    latent_size: PositiveInt
    steps_per_round: PositiveInt
    generator_learning_rate: Positive
    student_learning_rate: Positive
    one_hot_weight: NonNegativeFloat
    entropy_weight: NonNegativeFloat
    activation_weight: NonNegativeFloat
    ensemble: Mean

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Train the generator and the student in turn, one step each on the same batch."""
        ensemble = fetch_ensemble(federation, context, self.ensemble)
        generator = context.make_generator(self.latent_size, streams.torch("generator"))
        student = context.make_student(streams.torch("student"))
        if resume:
            resume.load(generator=generator, student=student)
        for number in range(resume.round + 1 if resume else 1, context.rounds + 1):
            rng = streams.torch("latents", query_id=number)
            loss = self.learn(ensemble, generator, student, context, rng)
            yield Round(
                State.of(number, generator=generator, student=student),
                student,
                {"student_loss": loss},
                **ensemble.pop_counts(),
            )

    def learn(
        self,
        ensemble: Ensemble,
        generator: nn.Module,
        student: Classifier,
        context: PublicContext,
        rng: torch.Generator,
    ) -> float:
        """Take the steps of a round; return the student's last loss."""
        generator_optimiser = Adam(generator.parameters(), self.generator_learning_rate)
        student_optimiser = Adam(student.parameters(), self.student_learning_rate)
        generator.train()
        student.train()
        shape = context.queries_per_round, self.latent_size
        weights = self.one_hot_weight, self.entropy_weight, self.activation_weight
        generator_rates, student_rates = (
            rates_of(self, f"{network}_learning_rate") for network in ("generator", "student")
        )

        def student_losses() -> Iterator[torch.Tensor]:
            for step in range(self.steps_per_round):
                images = generator(torch.randn(shape, generator=rng).to(context.device))
                logits, features = ensemble.logits_and_features(images)
                loss = losses.dafl_loss(features, logits, *weights)
                descend(generator_optimiser, [loss], "the generator", generator_rates, step)
                yield divergence(logits.detach(), student(images.detach()), 1.0)

        return descend(student_optimiser, student_losses(), "the student", student_rates).item()
