"""What a method is, and what it may see of the federation and of a site."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.config import Config
from fed_dpsd.data.datasets import Split
from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import CLASSIFIERS, Classifier
from fed_dpsd.models.generators import Generator
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.mechanism import Mechanism, NonPrivate
from fed_dpsd.protocol import NOTHING, Answer, Ask, Kind, Refusal, Total
from fed_dpsd.streams import Streams


@dataclass(frozen=True)
class World:
    """What is public: shapes, sizes, the mechanism's parameters, and perhaps a test split."""

    image_shape: tuple[int, ...]
    num_classes: int
    rounds: int
    queries_per_round: int
    mechanism: Mechanism
    make_student: Callable[[torch.Generator], Classifier]
    make_generator: Callable[[int, torch.Generator], nn.Module]
    make_teacher: Callable[[int], nn.Module]
    device: torch.device
    test: Split | None = None

    @classmethod
    def of(cls, config: Config, mechanism: Mechanism, test: Split | None = None) -> "World":
        """The public side of an experiment."""
        shape, model = config.data.shape, config.model

        def student() -> Classifier:
            return CLASSIFIERS[model.student](shape, config.data.num_classes, model.student_width)

        def generator(latent_size: int, rng: torch.Generator) -> nn.Module:
            made = initialise(lambda: Generator(shape, latent_size, model.generator_width), rng)
            made.start(rng)
            return made.to(device)

        def teacher(client: int) -> nn.Module:
            build = CLASSIFIERS[config.architecture(client)]
            return initialise(
                lambda: build(shape, config.data.num_classes, model.teacher_width),
                torch.Generator(),
            ).to(device)

        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(
            image_shape=shape,
            num_classes=config.data.num_classes,
            rounds=config.rounds,
            queries_per_round=config.queries_per_round,
            mechanism=mechanism,
            make_student=lambda rng: initialise(student, rng).to(device),
            make_generator=generator,
            make_teacher=teacher,
            device=torch.device(device),
            test=test,
        )

    def ask(self, kind: Kind, query_id: int = 0, weights: NDArray[np.float32] = NOTHING) -> Ask:
        """An ask for anything but answers to images."""
        return Ask.without_images(kind, self.image_shape, self.num_classes, query_id, weights)


@dataclass(frozen=True)
class Plan:
    """What one client will be charged, stage by stage.

    Args:
        stages: in their order.
        counts: whether it is asked for its class counts too; see `release_class_counts`.
    """

    stages: tuple[Stage, ...]
    counts: bool = False

    @property
    def queries(self) -> int:
        """N, over all stages."""
        return sum(stage.asks * stage.queries for stage in self.stages)

    @property
    def releases(self) -> Counter[str]:
        """How many releases of each mechanism, by its name, a client is charged for."""
        found = Counter[str]()
        for stage in self.stages:
            found[stage.mechanism.name] += stage.mechanism.releases(stage.asks, stage.queries)
        if self.counts and NonPrivate.name in found:  # a training has paid for its own counts
            found[NonPrivate.name] += 1
        return found


@dataclass(frozen=True)
class Bank:
    """Answered samples of one round, all of it public.

    Args:
        images: (B, C, H, W) uint8, as they were sent.
        predictions: (B, K) float32, the student's, as they were sent.
        labels: (B, K) float32, noisy soft labels.
    """

    images: NDArray[np.uint8]
    predictions: NDArray[np.float32]
    labels: NDArray[np.float32]


@dataclass(frozen=True)
class State:
    """All a server needs after `round`: named tensors, and a bank of a part a round or none."""

    round: int
    tensors: dict[str, torch.Tensor]
    bank: Sequence[Bank]


@dataclass(frozen=True)
class Round:
    """What a server yields after each round.

    Args:
        state: what to resume from; `student.NAME` are the student's tensors.
        student: (B, C, H, W) images in [0, 1] to (B, K) logits.
        metrics: what to log.
        refused: reason by client, of those that refused.
        forward_answers: images times teachers that answered in this round.
        backward_answers: of these, those that a gradient went back through.
    """

    state: State
    student: nn.Module
    metrics: dict[str, float] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    forward_answers: int = 0
    backward_answers: int = 0


class Federation(Protocol):
    """The clients, whatever engine hosts them."""

    def settle(self, ask: Ask) -> Ask:
        """The ask to send and to learn from: this one or, in a resumed run, what it sent before.

        A client was charged for the bytes that it was sent. Other predictions or images under the
        same id and kind would be charged again, so `each` and `total` refuse them.
        """

    def each(self, ask: Ask) -> dict[int, Answer | Refusal]:
        """Every client's own answer; only for answers that are no secret (DP teachers, weights)."""

    def total(self, ask: Ask) -> Total:
        """The sum of the answers, with the server's share of the noise already added."""


class Site(Protocol):
    """One client, as the client half of a method sees it."""

    def pay_for_training(self) -> Mechanism:
        """Charge a private training, unless it is paid; return what answers are released with."""

    def sensitive_probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """The n teachers' (n, B, K) probabilities: never to leave but through `release`."""

    def sensitive_weights(self) -> NDArray[np.float32]:
        """The teachers' parameters, (1, n * P, 1): never to leave but through `release`."""

    def retrain(self, ask: Ask, epochs: int) -> tuple[Mechanism, NDArray[np.float32]]:
        """Such weights after a training from the ask's, and the mechanism to release them with."""

    def class_counts(self) -> NDArray[np.float64]:
        """The noisy class counts that the teachers' training released, (n, 1, K)."""

    def sensitive_class_counts(self) -> NDArray[np.float64]:
        """The exact class counts, (1, 1, K): never to leave but through `release`."""

    def release(self, mechanism: Mechanism, sensitive_value: NDArray[Any], ask: Ask) -> Answer:
        """The only way out, for (n, B, K) values: bound, charge the ledger, draw the noise."""


class Method(Protocol):
    """A paper: what it will cost, its server half and its client half.

    `num_clients` is the number that the method needs, and `mechanisms` are the names of those that
    it has a use for; None where any will do. `averages` says that it averages the teachers'
    weights, which needs one architecture and a common start.
    """

    num_clients: ClassVar[int | None]
    mechanisms: ClassVar[tuple[str, ...] | None]
    averages: ClassVar[bool]

    def plan(self, world: World) -> Plan:
        """What one client will be charged, from public facts only."""

    def server(
        self, federation: Federation, world: World, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """The algorithm box from top to bottom, one yield a round."""

    def client(self, ask: Ask, site: Site) -> Answer | Refusal:
        """A client's answer to one ask."""


def below(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors named PREFIX.REST, by REST."""
    start = f"{prefix}."
    return {name[len(start) :]: t for name, t in tensors.items() if name.startswith(start)}
