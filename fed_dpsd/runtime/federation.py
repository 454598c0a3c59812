"""The clients as a method sees them, whatever hosts them; and the host that needs no Flower."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fed_dpsd.protocol import Answer, Ask, Refusal, Total, check_answer
from fed_dpsd.runtime.experiment import Experiment
from fed_dpsd.runtime.site import open_site
from fed_dpsd.streams import Streams


class HostedFederation(ABC):
    """What every engine shares: checking and summing answers, and counting what travelled.

    Attributes:
        bytes_to_clients: payload sent so far, over all clients.
        bytes_to_server: payload received so far.
    """

    engine: str

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.bytes_to_clients = 0
        self.bytes_to_server = 0

    @abstractmethod
    def _deliver(self, ask: Ask) -> dict[int, Answer | Refusal]:
        """Bring an ask to every client and its answers back."""

    @abstractmethod
    def diagnose(self) -> dict[int, NDArray[np.float32]]:
        """Exact (n, N, K) probabilities of a client's teachers on the test split; simulation only.

        Teachers that are not trained yet are trained now.
        """

    def each(self, ask: Ask) -> dict[int, Answer | Refusal]:
        """Every client's checked answer, in the order of the clients."""
        answers = self._deliver(ask)
        for client, answer in answers.items():
            if isinstance(answer, Answer):
                check_answer(ask, client, answer)
                self.bytes_to_server += answer.values.nbytes
            self.bytes_to_clients += ask.nbytes
        return dict(sorted(answers.items()))

    def total(self, ask: Ask) -> Total:
        """The sum of the answers; with `noise_at: server` its noise is drawn here, once a query."""
        answers = self.each(ask)
        given = [answer for answer in answers.values() if isinstance(answer, Answer)]
        total = np.zeros(ask.predictions.shape)
        for answer in given:
            total += answer.values
        mechanism = self.experiment.mechanism
        if mechanism.noise_at == "server" and given:
            streams = Streams(self.experiment.config.seed)
            rng = streams.numpy("server noise", query_id=int(ask.digest(), 16))
            total = mechanism.noise(total[None], ask.predictions, rng)
        refused = {
            client: answer.reason
            for client, answer in answers.items()
            if isinstance(answer, Refusal)
        }
        return Total(total, sum(answer.teachers for answer in given), refused)


class LocalFederation(HostedFederation):
    """All clients in this process, one after the other: for tests, sweeps and benchmarks."""

    engine = "local"

    def __init__(self, experiment: Experiment, run_folder: Path) -> None:
        super().__init__(experiment)
        clients = range(experiment.config.num_clients)
        self._sites = {client: open_site(experiment, client, run_folder) for client in clients}

    def _deliver(self, ask: Ask) -> dict[int, Answer | Refusal]:
        with client_threads(self.experiment):
            method = self.experiment.method
            return {client: method.client(ask, site) for client, site in self._sites.items()}

    def diagnose(self) -> dict[int, NDArray[np.float32]]:
        """Exact probabilities of every teacher on the test split."""
        with client_threads(self.experiment):
            return {client: site.diagnose() for client, site in self._sites.items()}


@contextlib.contextmanager
def client_threads(experiment: Experiment) -> Iterator[None]:
    """The client's fixed number of torch threads inside the block, the caller's after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(experiment.config.threads_client)
    try:
        yield
    finally:
        torch.set_num_threads(before)
