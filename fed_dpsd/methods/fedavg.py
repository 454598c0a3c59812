"""FedAVG: the server averages what clients train from one common start.

McMahan, Moore, Ramage, Hampson, Agueera y Arcas: "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, arXiv 1602.05629, Algorithm 1, all clients in every round.

The first round's models are the teachers themselves, so with rounds=1 it is one-shot FedAVG. Their
common start is `teacher.same_start=true`, and all have one architecture.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fed_dpsd.config import require
from fed_dpsd.methods.class_counts import MOST_RECORDS, release_class_counts, releases_class_counts
from fed_dpsd.methods.method import Federation, Plan, Round, Site, State, World, below
from fed_dpsd.methods.white_box import WEIGHTS_LEAVE, WhiteBox, weights_stage
from fed_dpsd.models import load_vector, to_vector
from fed_dpsd.privacy.mechanism import NonPrivate
from fed_dpsd.protocol import Answer, Ask, ProtocolError, Refusal
from fed_dpsd.streams import Streams


@dataclass(frozen=True)
class FedAVG(WhiteBox):
    """Algorithm 1; the fields are conf/method/fedavg.yaml.

    Args:
        weighted: by the clients' numbers of records, as in the paper; else all count alike.
        local_epochs: E, over a client's records in each round after the first, >= 1; a private
            training takes its own steps instead.
    """

    averages: ClassVar[bool] = True
    weighted: bool
    local_epochs: int

    def __post_init__(self) -> None:
        require(self, local_epochs=1)

    def plan(self, world: World) -> Plan:
        """Weights in each round, each after a training; before them the counts of records."""
        rounds = (weights_stage(world),) * world.rounds
        return Plan(rounds, self.weighted and releases_class_counts(world.mechanism))

    # --- client ------------------------------------------------------------------------------

    def client(self, ask: Ask, site: Site) -> Answer | Refusal:
        """ClientUpdate: the weights after a local training, and once the class counts."""
        if ask.kind == "counts" and self.weighted:
            return release_class_counts(ask, site)
        if ask.kind == "train":
            paid, sensitive = site.retrain(ask, self.local_epochs)
            clear = isinstance(paid, NonPrivate)
            return site.release(WEIGHTS_LEAVE if clear else paid, sensitive, ask)
        return super().client(ask, site)

    # --- server ------------------------------------------------------------------------------

    def server(
        self, federation: Federation, world: World, streams: Streams, resume: State | None
    ) -> Iterator[Round]:
        """Train, average, and train from the average."""
        sizes = self.fetch_sizes(federation, world)
        student = world.make_teacher(0)
        last = 0
        if resume is not None:
            student.load_state_dict(below("student", resume.tensors))
            last = resume.round
        for number in range(last + 1, world.rounds + 1):
            first = number == 1
            start = to_vector(student).numpy()
            ask = world.ask("weights") if first else world.ask("train", number, start)
            answers = federation.each(federation.settle(ask))
            given = {client: each for client, each in answers.items() if isinstance(each, Answer)}
            refused = {c: each.reason for c, each in answers.items() if isinstance(each, Refusal)}
            if not given and first:
                raise ProtocolError(f"no client answers: {sorted(set(refused.values()))}")
            vectors, shares = [], []
            for client, each in given.items():
                for vector in np.array_split(each.values[:, 0], each.teachers):
                    vectors.append(torch.from_numpy(vector.astype(np.float32)))
                    shares.append(sizes.get(client, 1.0) / each.teachers)
            if vectors:
                load_vector(student, average(vectors, shares))
                last = number
            tensors = {f"student.{name}": t.clone() for name, t in student.state_dict().items()}
            yield Round(State(last, tensors, ()), student.eval(), {}, refused)
            if not vectors:  # every client's budget is spent
                return

    def fetch_sizes(self, federation: Federation, world: World) -> dict[int, float]:
        """Each client's number of records, at least 0; empty where all count alike."""
        if not self.plan(world).counts:
            return {}
        answers = federation.each(world.ask("counts"))
        return {
            client: float(np.clip(each.values, 0, MOST_RECORDS).sum())
            for client, each in answers.items()
            if isinstance(each, Answer)
        }


def average(vectors: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """(P,) mean of (P,) vectors, weighted by `shares` of any sum; the plain one if all are 0.

    Raises:
        ProtocolError: their lengths differ: the clients have several architectures.
    """
    lengths = {len(vector) for vector in vectors}
    if len(lengths) > 1:
        raise ProtocolError(
            f"clients sent {sorted(lengths)} weights: an average needs one architecture; use "
            "model.teachers=[]"
        )
    weights = torch.tensor(shares, dtype=torch.float64)
    if not weights.any():
        weights = torch.ones_like(weights)
    total = torch.stack(list(vectors)).double() * (weights / weights.sum())[:, None]
    return total.sum(0).float()
