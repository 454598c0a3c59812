"""FedAVG: the server averages models that the clients train from a common start.

McMahan, Moore, Ramage, Hampson, Agueera y Arcas: "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, arXiv 1602.05629, Algorithm 1, with all clients in each
round.

The first round's models are the teachers themselves, so rounds=1 is one-shot FedAVG.
`teacher.same_start=true` gives the teachers a common start, and all must have the same
architecture.

A client with few records of a class has a useless row for it in its last layer. `weights=classes`
therefore weights each row by the clients' shares of the records of its class.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from fed_dpsd.config import STRICT, Config
from fed_dpsd.errors import ProtocolError
from fed_dpsd.methods.class_counts import KnownCounts, counts_stage, release_class_counts
from fed_dpsd.methods.method import Federation, PublicContext, Round, Site, State, nobody_answers
from fed_dpsd.methods.white_box import WEIGHTS, WhiteBox, read_teachers
from fed_dpsd.models import load_vector, to_vector
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.privacy.mechanism import Mechanism, Weights
from fed_dpsd.privacy.plan import Plan
from fed_dpsd.privacy.training import Training, TrainingMechanism
from fed_dpsd.protocol import Refusal, Replies, Request, Response
from fed_dpsd.streams import Streams


@dataclass(frozen=True, config=STRICT)
class FedAVG(WhiteBox):
    """FedAVG, Algorithm 1; conf/method/fedavg.yaml explains the fields.

    Args:
        weights: "equal"; "records", the clients' numbers of records, as in the paper; or "classes",
            for which each row of the last layer is weighted by the numbers of its class, and all
            other weights as by "records".
        local_epochs: E, epochs over a client's records in each round after the first, >= 1;
            private training uses its own number of steps instead.
    """

    averages: ClassVar[bool] = True
    supports_cohorts: ClassVar[bool] = True
    weights: Literal["equal", "records", "classes"]
    local_epochs: PositiveInt

    def warnings(self, config: Config, training: Training, answers: Mechanism) -> list[str]:
        """Also warn about an epsilon that grows with the rounds, and about missing class counts."""
        found = super().warnings(config, training, answers)
        uncounted = isinstance(training, TrainingMechanism) and not training.counts_classes
        if self.weights != "equal" and uncounted:
            found.append(
                f"method={self.name} with method.weights={self.weights}: the training releases no "
                "class counts, so all clients have equal weights; use method.weights=equal, or "
                "training.count_fraction=0.05"
            )
        if training.private and config.rounds > 1 and config.privacy.target_epsilon is None:
            found.append(
                f"method={self.name} with rounds={config.rounds} and training={training.name}: "
                "clients train again in each round, and each training is charged, so epsilon is "
                "larger than for methods that train once; use rounds=1, or "
                "privacy.target_epsilon=3 for the epsilon of the whole run"
            )
        return found

    def plan(self, context: PublicContext) -> Plan:
        """Return training and a stage of weights for each round, and any class counts.

        All clients take part in the first round; cohorts apply only to later rounds.
        """
        counts = counts_stage(context, clear=True) if self.weights != "equal" else ()
        asked = min(context.rounds, 1 + context.rounds_per_client)
        return Plan(context.training, (*counts, *(WEIGHTS,) * asked), asked)

    # --- client ------------------------------------------------------------------------------

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Release the weights after local training (ClientUpdate) or, once, the class counts."""
        if request.kind == "counts" and self.weights != "equal":
            return release_class_counts(request, site, clear=True)
        if request.kind == "train":
            return site.release(Weights(), site.retrain(request, self.local_epochs), request)
        return super().client(request, site)

    # --- server ------------------------------------------------------------------------------

    def server(
        self, federation: Federation, context: PublicContext, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Fetch weights, average them, and request training that starts from the average."""
        counts = KnownCounts(
            federation, context, requested=self.plan(context).releases_class_counts
        )
        student = context.make_teacher(0)
        last = 0
        if resume:
            resume.load(student=student)
            last = resume.round
        for number in range(last + 1, context.rounds + 1):
            first = number == 1
            start = to_vector(student).numpy()
            request = (
                context.request("weights") if first else context.request("train", number, start)
            )
            replies = counts.with_counts(federation.each(request))
            if not replies.answers and first:
                raise nobody_answers(replies.refused)
            if replies.answers:
                self.aggregate(student, replies, counts, context)
                last = number
            yield Round(State.of(last, student=student), student.eval(), {}, replies.refused)
            if not replies.answers:  # every client's budget is spent
                return

    def aggregate(
        self, student: Classifier, replies: Replies, counts: KnownCounts, context: PublicContext
    ) -> None:
        """Give the student the weights that follow from one or more clients' answers.

        Variants of FedAVG override it.

        Args:
            student: the network, with the weights that this round's training started from. In the
                first round, whose request has kind "weights", these are unrelated values.
            replies: the replies to the round's request; `models_of` reads the teachers' weights.
            counts: the clients' class counts; `sizes_of` gives each teacher's number of records.
            context: the public side of the experiment.
        """
        load_vector(student, average(models_of(replies), sizes_of(replies, counts.by_client)))
        if self.weights == "classes":
            average_rows(student, replies, counts.weights(replies.answers), context)


@dataclass(frozen=True, config=STRICT)
class DPFedAVG(FedAVG):
    """DP-FedAVG: FedAVG with clients that train with DP-SGD; each round is charged.

    McMahan, Ramage, Talwar, Zhang: "Learning Differentially Private Recurrent Language Models",
    ICLR 2018, arXiv 1710.06963, except that each record's gradient is clipped, not each client's
    update, because a whole client cannot hide among a few hospitals. A record is protected from
    everyone, including the server. The class is separate because hospitals allow methods by class.
    """

    trainings: ClassVar[tuple[str, ...] | None] = ("dp_sgd",)


@dataclass(frozen=True, config=STRICT)
class WeightsOnce(FedAVG):
    """One-shot FedAVG: each client sends its teachers' weights once, and never trains again.

    With private training, the training covers the weights, and the noisy class counts are charged
    as in FedDPSD. Without it, nothing is proven. The class is separate because hospitals allow
    methods by class.
    """

    def client(self, request: Request, site: Site) -> Response | Refusal:
        """Release the weights or the class counts, and reject requests to train."""
        if request.kind == "train":
            raise ProtocolError(f"method {type(self).__name__} does not answer {request.kind!r}")
        return super().client(request, site)


def models_of(replies: Replies) -> list[torch.Tensor]:
    """Return the (P,) weights of all teachers in the clients' answers."""
    return [
        torch.from_numpy(vector.astype(np.float32))
        for response in replies.answers.values()
        for vector in np.array_split(response.values[:, 0], response.teachers)
    ]


def sizes_of(replies: Replies, counts: Mapping[int, NDArray[Any]]) -> list[float]:
    """Return each teacher's weight: its part of its client's records, or of 1 if unknown."""
    return [
        (float(counts[client].sum()) if client in counts else 1.0) / response.teachers
        for client, response in replies.answers.items()
        for _ in range(response.teachers)
    ]


def average_rows(
    student: Classifier,
    replies: Replies,
    shares: Mapping[int, NDArray[np.float64]],
    context: PublicContext,
) -> None:
    """Set each row of the student's last layer to the weighted mean of the clients' rows.

    Args:
        student: the network whose last layer is set.
        replies: the clients' weights, one or more teachers each.
        shares: for each client, its (K,) shares of the records of each class; the shares of a class
            sum to 1.
        context: the public side of the experiment.
    """
    layer = student.classifier
    rows = torch.zeros(layer.out_features, layer.in_features + 1, dtype=torch.float64)
    for client, response in replies.answers.items():
        share = torch.from_numpy(shares[client] / response.teachers)
        for teacher in read_teachers(response, context, client):
            own = teacher.classifier
            both = torch.cat([own.weight, own.bias[:, None]], 1)
            rows += share[:, None] * both.double().cpu()
    with torch.no_grad():
        layer.weight.copy_(rows[:, :-1])
        layer.bias.copy_(rows[:, -1])


def average(vectors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted (P,) mean of (P,) vectors, or the plain mean if all weights are 0.

    The weights may have any sum.

    Raises:
        ProtocolError: the vectors have different lengths, so the clients' architectures differ.
    """
    lengths = {len(vector) for vector in vectors}
    if len(lengths) > 1:
        raise ProtocolError(
            f"clients sent {sorted(lengths)} weights: an average needs one architecture; use "
            "model.teachers=[]"
        )
    factors = torch.tensor(weights, dtype=torch.float64)
    if not factors.any():
        factors = torch.ones_like(factors)
    weighted = torch.stack(list(vectors)).double().mul_((factors / factors.sum())[:, None])
    return weighted.sum(0).float()
