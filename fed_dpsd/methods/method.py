"""The interface of a method, and its view of the federation and of a site."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fed_dpsd.config import Config
from fed_dpsd.data.intake import Records
from fed_dpsd.errors import ProtocolError, UserError, format_value
from fed_dpsd.methods.cohort import most_rounds
from fed_dpsd.models import initialise
from fed_dpsd.models.classifiers import FIXED, Classifier, builder
from fed_dpsd.models.devices import torch_device
from fed_dpsd.models.generators import Generator
from fed_dpsd.models.pictures import Pictures
from fed_dpsd.models.precision import Network, choose_precision
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.mechanism import Mechanism
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.training import BaselineWeights, Training
from fed_dpsd.protocol import NOTHING, Aggregate, Kind, Refusal, Replies, Request, Response
from fed_dpsd.streams import Streams


@dataclass(frozen=True)
class PublicContext:
    """The public side of an experiment, which a method's server half may use.

    Args:
        config: the composed configuration; methods read the keys that have a name below.
        training: how the teachers are trained.
        answers: the mechanism of the clients' answers.
        test: the test split; None if there is none.
    """

    config: Config
    training: Training
    answers: Mechanism
    test: Records | None = None

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Return (C, H, W)."""
        return self.config.data.shape

    @property
    def num_classes(self) -> int:
        """Return K."""
        return self.config.data.num_classes

    @property
    def rounds(self) -> int:
        """Return the number of rounds."""
        return self.config.rounds

    @property
    def rounds_per_client(self) -> int:
        """Return the largest number of rounds in which a client receives requests."""
        return most_rounds(self.config)

    @property
    def queries_per_round(self) -> int:
        """Return Q, the number of synthetic images per round."""
        return self.config.queries_per_round

    @property
    def device(self) -> torch.device:
        """Return the server's device."""
        return torch_device(self.config.server_device)

    def make_student(self, rng: torch.Generator) -> Classifier:
        """Return a student with weights drawn from `rng`, on `device`."""
        config, model = self.config, self.config.model

        def student() -> Classifier:
            build = builder(model.student, model)
            classifier = build(self.image_shape, self.num_classes, model.student_width)
            return classifier.keep_features(Path(config.cache))

        return self._placed(initialise(student, rng))

    def make_generator(
        self, latent_size: int, rng: torch.Generator, normalised: bool = True
    ) -> Generator:
        """Return an image generator of latent vectors, with weights drawn from `rng`."""
        sizes = latent_size, self.config.model.generator_width, normalised
        generator = initialise(lambda: Generator(self.image_shape, *sizes), rng)
        if normalised:
            generator.draw_levels(rng)
        return self._placed(generator)

    def make_teacher(self, client: int) -> Classifier:
        """Return a network of a client's architecture, for weights that it sends."""
        config = self.config
        build = builder(config.architecture(client), config.model)
        sizes = self.image_shape, self.num_classes, config.model.teacher_width
        return self._placed(initialise(lambda: build(*sizes), torch.Generator()))

    def _placed(self, network: Network) -> Network:
        return choose_precision(network, self.config.precision, self.device).to(self.device)

    def request(
        self, kind: Kind, query_id: int = 0, weights: NDArray[np.float32] = NOTHING
    ) -> Request:
        """Return a request for anything except answers to images."""
        return Request.without_images(kind, self.image_shape, self.num_classes, query_id, weights)


def require_fractions(fractions: Mapping[str, float], others: str) -> None:
    """Check the fractions of images by kind; `others` says what the other images are.

    Raises:
        ValueError: a fraction is negative, or their sum exceeds 1.
    """
    if min(fractions.values()) < 0 or math.fsum(fractions.values()) > 1:
        *first, last = (f"{kind}_fraction={part}" for kind, part in fractions.items())
        raise ValueError(
            f"{', '.join(first)} and {last} must be >= 0 with a sum of at most 1; {others}"
        )


def counts_of(fractions: Mapping[str, float], total: int) -> dict[str, int]:
    """Return how many of `total` images are of each kind, rounded down."""
    # A product of floats may lie just below its integer: 0.29 * 100 is 28.999999999999996.
    return {kind: int(round(fraction * total, 9)) for kind, fraction in fractions.items()}


@dataclass(frozen=True)
class ReplayBuffer:
    """The answered samples of one round, which are all public.

    Args:
        images: (B, C, H, W) uint8, as sent; several rounds' are joined without a copy.
        predictions: (B, K) float32, the student's predictions, as sent.
        labels: (B, K) float32, noisy soft labels.
    """

    images: NDArray[np.uint8] | Pictures
    predictions: NDArray[np.float32]
    labels: NDArray[np.float32]

    @classmethod
    def of(cls, total: Aggregate, labels: NDArray[np.floating]) -> "ReplayBuffer":
        """Return the samples of an answered request, with (B, K) labels."""
        return cls(total.request.images, total.request.predictions, labels.astype(np.float32))

    @classmethod
    def joined(cls, parts: Sequence["ReplayBuffer"]) -> "ReplayBuffer":
        """Merge the samples of one or more rounds."""
        return cls(
            Pictures([part.images for part in parts]),
            np.concatenate([part.predictions for part in parts]),
            np.concatenate([part.labels for part in parts]),
        )


@dataclass(frozen=True)
class State:
    """A server's state after `round`: named tensors and any samples of each round.

    When a run has saved a state, the last images of its `buffer` are mapped from the checkpoint.
    """

    round: int
    tensors: dict[str, torch.Tensor]
    buffer: list[ReplayBuffer]

    @classmethod
    def of(
        cls, number: int, buffer: list[ReplayBuffer] | None = None, **learners: nn.Module
    ) -> "State":
        """Return the state after round `number`, with copies of the learners' tensors."""
        return cls(number, named_tensors(**learners), [] if buffer is None else buffer)

    def load(self, **learners: nn.Module) -> list[ReplayBuffer]:
        """Restore the learners; return the buffer."""
        for name, learner in learners.items():
            learner.load_state_dict(tensors_of(name, self.tensors))
        return list(self.buffer)


@dataclass(frozen=True)
class Round:
    """The result of one round, which a server yields.

    Args:
        state: the state to resume from; the student's tensors are named `student.NAME`.
        student: network from (B, C, H, W) images in [0, 1] to (B, K) logits.
        metrics: numbers to log.
        refused: the reason of each client that refused.
        forward_answers: number of images times teachers that answered in this round.
        backward_answers: number of these that had a gradient through the teacher.
    """

    state: State
    student: nn.Module
    metrics: dict[str, float] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    forward_answers: int = 0
    backward_answers: int = 0


class Federation(Protocol):
    """The clients, independent of the engine that hosts them.

    A resumed run repeats earlier requests under the same id and kind, because clients were charged
    for them. A method must learn from the returned `request`, not from the one that it passed.
    """

    def each(self, request: Request) -> Replies:
        """Return each client's own answer, if it may be seen (DP teachers, weights)."""

    def total(self, request: Request) -> Aggregate:
        """Return the sum of the answers, with the server's noise share already added."""


# A loss of the parameters that a teacher learns and of the values that they started from. It must
# depend on no record, and follow from these and the method's keys alone, under which it is charged.
TrainingLoss = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]


class Site(Protocol):
    """A client, as the client half of a method sees it."""

    @property
    def training(self) -> Training:
        """Return how the client's teachers are trained."""

    @property
    def answers(self) -> Mechanism:
        """Return the mechanism of the client's answers."""

    def pay_for_training(self) -> None:
        """Charge the teachers' private training, if any; it is charged only once."""

    def sensitive_probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Return the n teachers' (n, B, K) probabilities, which leave only through `release`.

        Like `sensitive_weights`, it calls `pay_for_training` before it trains teachers.
        """

    def sensitive_weights(self) -> NDArray[np.float32]:
        """Return the teachers' parameters, (1, n * P, 1), which leave only through `release`."""

    def sensitive_baseline(
        self, mechanism: BaselineWeights, request: Request
    ) -> NDArray[np.float32]:
        """Charge and train one classifier on all records; return its (1, P, 1) weights."""

    def retrain(
        self, request: Request, epochs: int, loss: TrainingLoss | None = None
    ) -> NDArray[np.float32]:
        """Train from the request's weights; return the weights, private until released.

        `loss` is added to the records' loss.
        """

    def class_counts(self, request: Request) -> NDArray[np.float64]:
        """Charge and draw (n, 1, K) noisy class counts, once; they leave only through `release`."""

    def sensitive_sum(self, request: Request) -> NDArray[np.float64]:
        """Return the mechanism's sum over the records, (1, P, 1), private until released."""

    def sensitive_class_counts(self) -> NDArray[np.float64]:
        """Return the exact class counts, (1, 1, K), which leave only through `release`."""

    def release(
        self, mechanism: Mechanism, sensitive_value: NDArray[Any], request: Request
    ) -> Response:
        """Release (n, B, K) values: bound them, charge the ledger and draw the noise."""


@dataclass(frozen=True)
class Method(ABC):
    """A paper's method: a plan of its cost, its server half and its client half.

    By default, clients answer images with the configured mechanism, and a round is a request to all
    of them.

    Args:
        name: name of its file in conf/method, for display only.
        needs: required values of other keys, as in {num_clients: 1}.

    Attributes:
        trainings: values of `training` that the method supports; None for any.
        takes_gradients: whether answers may be gradients, or the method asks for no answers.
        averages: whether the method averages the teachers' weights, which requires a single
            architecture and a common start.
        supports_cohorts: whether the method can send requests to different clients in each round.
        uses_teachers_alone: whether the method uses records only to train the teachers, once.
        sends_once: a method that sends weights of the same teachers once, for plans; or None.
    """

    trainings: ClassVar[tuple[str, ...] | None] = None
    takes_gradients: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    supports_cohorts: ClassVar[bool] = False
    uses_teachers_alone: ClassVar[bool] = False
    sends_once: ClassVar[str | None] = None
    name: str = field(kw_only=True)
    needs: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def check(self, config: Config, training: Training, answers: Mechanism) -> list[str]:
        """Return the problems with the method in an experiment, each with key, value and remedy.

        Overriding methods extend the returned list.
        """
        problems = list(unmet_needs(self.needs, config, self.name))
        if not re.fullmatch(r"[a-z0-9_]+", self.name):
            problems.append(
                f"method.name={self.name!r} names run folders; use lower-case letters, digits and _"
            )
        if training.name not in (self.trainings or (training.name,)):
            problems.append(
                f"training={training.name}: method={self.name} does not support it; use "
                f"training={' or '.join(self.trainings or ())}"
            )
        if answers.input == "gradient" and not self.takes_gradients:
            problems.append(
                f"answers={answers.name}: method={self.name} does not learn from gradients; "
                "use answers=label"
            )
        if config.clients_per_round is not None and not self.supports_cohorts:
            problems.append(
                f"clients_per_round={config.clients_per_round}: method={self.name} sends each "
                "request to all clients; use clients_per_round=null"
            )
        if not self.averages or config.teacher.path is not None:
            return problems
        architectures = set(map(config.architecture, range(config.num_clients)))
        if len(architectures) > 1:
            problems.append(
                f"model.teachers={format_value(config.model.teachers)}: method={self.name} "
                "averages weights of one architecture; use model.teachers=[]"
            )
        if not config.teacher.same_start and not architectures <= set(FIXED):
            problems.append(
                f"teacher.same_start=false: method={self.name} averages weights, which is useless "
                "for networks with hidden layers unless they start from the same values; use "
                "teacher.same_start=true"
            )
        return problems

    def warnings(self, config: Config, training: Training, answers: Mechanism) -> list[str]:
        """Return a sentence for each setting with which the method cannot give useful results.

        Each sentence names the method and the key to change.
        """
        return []

    def plan(self, context: PublicContext) -> Plan:
        """Return the charges that one client should expect, computed from public facts."""
        answers = Stage(context.answers, context.rounds, context.queries_per_round)
        return Plan(context.training, (answers,))

    def describe(self, context: PublicContext) -> str:
        """Describe everything that leaves a client in a run, and where noise is added."""
        plan, answers = self.plan(context), context.answers
        others = {s.mechanism.name: s.mechanism for s in plan.stages if s.mechanism != answers}
        if len(others) < len({stage.mechanism.name for stage in plan.stages}):
            said = answers.describe()
            if answers.noise_at != "client":
                secure = answers.noise_at == "distributed"
                said += "; in a secure sum" if secure else "; the coordinator adds the noise"
        elif plan.ends_with_teachers:
            return "none: the teachers are the result, and stay at their clients"
        elif not others:
            return "none: nothing leaves the clients"
        else:
            said = f"none: {others.popitem()[1].describe()} leave the clients"
        return "; besides, ".join([said, *(f"{own.describe()} leave" for own in others.values())])

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Return a client's answer to one request."""
        if request.kind != "answers":
            raise ProtocolError(f"method {type(self).__name__} does not answer {request.kind!r}")
        sensitive = site.sensitive_probabilities(request.images)
        if site.answers.input == "gradient":
            sensitive = self.gradients(sensitive, request.predictions)
        return site.release(site.answers, sensitive, request)

    def gradients(
        self, sensitive: NDArray[np.float64], predictions: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Return the gradients to release instead of the teachers' (n, B, K) probabilities.

        Methods that take gradients define it.
        """
        raise NotImplementedError

    @abstractmethod
    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Run the paper's algorithm from top to bottom; yield once per round."""


def unmet_needs(
    needs: Mapping[str, Any], config: Any, method: str, where: str = ""
) -> Iterator[str]:
    """Yield a sentence for each configuration value that differs from the required one."""
    for key, value in needs.items():
        found = getattr(config, key, None)
        found = list(found) if isinstance(found, tuple) else found
        if isinstance(value, Mapping):
            yield from unmet_needs(value, found, method, f"{where}{key}.")
        elif found != value:
            needed = f"{where}{key}={format_value(value)}"
            why = "has one client" if needed == "num_clients=1" else "needs another value"
            yield f"{where}{key}={format_value(found)}: method={method} {why}; use {needed}"


def nobody_answers(refused: Mapping[int, str]) -> UserError:
    """Return the error for a request that no client answered; it lists the clients' reasons."""
    return UserError(f"no client answers: {'; '.join(sorted(set(refused.values()))) or 'no reply'}")


def named_tensors(**modules: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of modules' tensors, named MODULE.NAME; the inverse is `tensors_of`."""
    return {
        f"{prefix}.{name}": tensor.clone()
        for prefix, module in modules.items()
        for name, tensor in module.state_dict().items()
    }


def tensors_of(module: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors named MODULE.NAME, by NAME."""
    start = f"{module}."
    return {name[len(start) :]: t for name, t in tensors.items() if name.startswith(start)}
