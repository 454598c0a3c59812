"""FedGen: FedAVG with clients that also learn from a generator of features.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021,
arXiv 2105.10056, Algorithm 1, with all clients in each round. As in FedAVG here, the first round's
models are the teachers themselves, trained without a generator.

As in the code base zhuangdizhu/FedGen, the generator's loss weights a client's classifier by the
client's fraction of a class's records and rewards diverse features; Equation 4 averages the
clients' logits. The generator's Adam restarts in each round; the code base keeps one, at 0.0003 on
MNIST, with weight decay and a rate that falls by 2 % per round.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fed_dpsd.config import require, require_positive
from fed_dpsd.methods.class_counts import KnownCounts, shares_among
from fed_dpsd.methods.fedavg import FedAVG, average, models_of, sizes_of
from fed_dpsd.methods.method import (
    Federation,
    HeadLoss,
    PublicContext,
    Round,
    Site,
    State,
    nobody_answers,
)
from fed_dpsd.models import initialise, load_vector, to_vector
from fed_dpsd.models.divergence import descend, rates_of
from fed_dpsd.privacy.mechanism import Weights
from fed_dpsd.privacy.optimisers import Adam
from fed_dpsd.protocol import Refusal, Request, Response
from fed_dpsd.streams import Streams


class FeatureGenerator(nn.Module):
    """A generator of features for given classes, with one hidden layer.

    Args:
        num_classes: K.
        latent_size: length of a latent vector, without the class.
        hidden_size: units of the hidden layer.
        num_features: F.
    """

    def __init__(
        self, num_classes: int, latent_size: int, hidden_size: int, num_features: int
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.latent_size = latent_size
        hidden = nn.Linear(latent_size + num_classes, hidden_size)
        self.layers = nn.Sequential(hidden, nn.ReLU(), nn.Linear(hidden_size, num_features))

    def forward(
        self, classes: torch.Tensor, rng: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw latent vectors for (B,) classes; return them, (B, Z), and the (B, F) features."""
        device = self.layers[0].weight.device
        latents = torch.randn((len(classes), self.latent_size), generator=rng).to(device)
        one_hot = functional.one_hot(classes, self.num_classes).to(latents)
        return latents, self.layers(torch.cat([latents, one_hot], 1))


@dataclass(frozen=True)
class FedGen(FedAVG):
    """FedGen, Algorithm 1; conf/method/fedgen.yaml explains the fields.

    The generator learns only from released weights and class counts, and the clients' additional
    loss (Equation 5) depends only on the message and their weights. So a client releases exactly
    what it releases in FedAVG: with DP-SGD, the loss's gradient is added after the noise, and class
    counts are noisy and charged, or not released.
    """

    generator_weight: float  # weight of the clients' loss on generated features, >= 0; 0 is FedAVG
    diversity_weight: float  # weight of the generator's reward for diverse features, >= 0
    generator_steps: int  # steps of the generator in each round, >= 1
    generator_learning_rate: float  # learning rate of Adam, > 0
    latent_size: int  # length of a latent vector, >= 1
    hidden_size: int  # units of the generator's hidden layer, >= 1
    batch_size: int  # generated features in a step of the generator or of a client, >= 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("generator_weight", "diversity_weight"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number >= 0")
        require(self, generator_steps=1, latent_size=1, hidden_size=1, batch_size=1)
        require_positive(self, "generator_learning_rate")

    # --- client ------------------------------------------------------------------------------

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Release the weights after local training with the generator, or what FedAVG releases."""
        if request.kind == "train" and self.generator_weight:
            weights = site.retrain(request, self.local_epochs, self.generated_loss)
            return site.release(Weights(), weights, request)
        return super().client(request, site)

    def generated_loss(
        self, head: nn.Linear, numbers: NDArray[np.float32], rng: torch.Generator
    ) -> HeadLoss:
        """Return the second term of Equation 5: cross-entropy on generated features.

        Args:
            head: the teacher's last layer.
            numbers: the generator's weights, then the (K,) frequencies of the classes.
            rng: random stream of classes and latent vectors.

        Raises:
            ValueError: the numbers do not fit the generator and the classes.
        """
        generator = self.make_generator(head, torch.Generator())
        weights, frequencies = np.split(numbers, [max(len(numbers) - head.out_features, 0)])
        load_vector(generator, torch.from_numpy(weights))
        if not (frequencies >= 0).all() or not 0 < frequencies.sum() < np.inf:
            raise ValueError(f"frequencies of classes {frequencies.tolist()}")

        def loss(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            classes = self.draw_classes(frequencies, rng)
            with torch.no_grad():
                _, features = generator(classes, rng)
            logits = functional.linear(features.to(weight), weight, bias)
            entropy = functional.cross_entropy(logits, classes.to(weight.device))
            return self.generator_weight * entropy

        return loss

    # --- server ------------------------------------------------------------------------------

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Average the weights as in FedAVG, train the generator on them, and send both."""
        if not self.generator_weight:
            yield from super().server(federation, context, streams, resume)
            return
        counts = KnownCounts(federation, context, requested=self.plan(context).releases_counts)
        student = context.make_teacher(0)
        generator = self.make_generator(student.classifier, streams.torch("feature generator"))
        generator.to(context.device)
        last = 0
        if resume:
            resume.load(student=student, feature_generator=generator)
            last = resume.round
        for number in range(last + 1, context.rounds + 1):
            first = number == 1
            frequencies = class_frequencies(counts.by_client, context.num_classes)
            parts = to_vector(student).numpy(), to_vector(generator).numpy(), frequencies
            request = (
                context.request("weights")
                if first
                else context.request("train", number, np.concatenate(parts))
            )
            replies = counts.with_counts(federation.each(request))
            if not replies.answers and first:
                raise nobody_answers(replies.refused)
            metrics = {}
            if vectors := models_of(replies):
                mean, heads = average(vectors, sizes_of(replies, counts.by_client)), []
                for vector in vectors:
                    load_vector(student, vector)
                    heads.append(tuple(p.detach().clone() for p in student.classifier.parameters()))
                load_vector(student, mean)
                last = number
                teachers = {c: own.teachers for c, own in replies.answers.items()}
                shares = class_shares(teachers, counts.by_client, context.num_classes)
                frequencies = class_frequencies(counts.by_client, context.num_classes)
                rng = streams.torch("generator", query_id=number)
                loss = self.train_generator(generator, heads, shares, frequencies, rng)
                metrics = {"generator_loss": loss}
            state = State.of(last, student=student, feature_generator=generator)
            yield Round(state, student.eval(), metrics, replies.refused)
            if not vectors:  # every client's budget is spent
                return

    def train_generator(
        self,
        generator: FeatureGenerator,
        heads: list[tuple[torch.Tensor, ...]],
        shares: NDArray[np.float64],
        frequencies: NDArray[np.float32],
        rng: torch.Generator,
    ) -> float:
        """Train the generator so that the clients' classifiers recognise its features.

        Args:
            generator: the generator, trained in place.
            heads: weight (K, F) and bias (K,) of n classifiers.
            shares: (n, K) weight of each classifier for each class.
            frequencies: (K,) frequencies of the classes.
            rng: random stream of classes and latent vectors.

        Returns:
            The last step's loss.
        """
        weights, biases = (torch.stack(parts) for parts in zip(*heads, strict=True))
        of_classes = torch.from_numpy(shares).to(weights)
        optimiser = Adam(generator.parameters(), self.generator_learning_rate)

        def losses() -> Iterator[torch.Tensor]:
            for _ in range(self.generator_steps):
                classes = self.draw_classes(frequencies, rng).to(weights.device)
                latents, features = generator(classes, rng)
                logits = features @ weights.mT + biases[:, None]  # (n, B, K)
                logs = logits.log_softmax(2)[:, torch.arange(len(classes)), classes]
                entropy = -(of_classes[:, classes] * logs).sum(0).mean()
                yield entropy + self.diversity_weight * similarity(latents, features)

        rates = rates_of(self, "generator_learning_rate")
        return descend(optimiser, losses(), "the generator", rates).item()

    def make_generator(self, head: nn.Linear, rng: torch.Generator) -> FeatureGenerator:
        """Return a new generator of the features that a classifier reads."""
        sizes = head.out_features, self.latent_size, self.hidden_size, head.in_features
        return initialise(lambda: FeatureGenerator(*sizes), rng)

    def draw_classes(self, frequencies: NDArray[np.float32], rng: torch.Generator) -> torch.Tensor:
        """Draw (B,) classes with these frequencies."""
        return torch.multinomial(
            torch.from_numpy(frequencies), self.batch_size, True, generator=rng
        )


def class_frequencies(
    counts: Mapping[int, NDArray[np.floating]], num_classes: int
) -> NDArray[np.float32]:
    """Return the (K,) frequencies of the classes at all clients; they are equal if unknown."""
    total = sum(counts.values(), np.zeros(num_classes))
    known = total if total.any() else np.ones(num_classes)
    return (known / known.sum()).astype(np.float32)


def class_shares(
    teachers: Mapping[int, int], counts: Mapping[int, NDArray[np.floating]], num_classes: int
) -> NDArray[np.float64]:
    """Return the (n, K) weights of each teacher for each class, which sum to 1 for each class."""
    known = {client: counts.get(client, np.ones(num_classes)) for client in teachers}
    shares = shares_among(known, known)
    return np.stack([shares[client] / n for client, n in teachers.items() for _ in range(n)])


def similarity(latents: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Return the similarity in (0, 1] of (B, F) features for different (B, Z) latent vectors.

    This is the code base's diversity loss (mode seeking: Mao et al., arXiv 1903.05628).
    """
    between_latents = torch.cdist(latents, latents).square() / latents.shape[1]
    between_features = torch.cdist(features, features, 1) / features.shape[1]
    return (-between_latents * between_features).mean().exp()
