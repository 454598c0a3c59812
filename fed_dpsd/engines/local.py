"""The local engine, which hosts all clients in this process and does not need Flower."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.client.learning import sharing_batches
from fed_dpsd.client.site import answer, take_step
from fed_dpsd.engines.clients import Clients
from fed_dpsd.experiment import Experiment
from fed_dpsd.models import torch_threads
from fed_dpsd.models.inference import sharing_images
from fed_dpsd.protocol import Refusal, Request, Response, SumStep
from fed_dpsd.server.federation import HostedFederation


class LocalFederation(HostedFederation):
    """A federation in this process with clients that answer in turn."""

    engine = "local"

    def __init__(self, experiment: Experiment, run_folder: Path) -> None:
        super().__init__(experiment, run_folder)
        self._sites = Clients(experiment, run_folder)

    def _deliver(self, request: Request) -> dict[int, Response | Refusal]:
        method, sites = self.experiment.method, self._sites
        clients = self._recipients(request)
        with (
            torch_threads(self.experiment.config.threads_client),
            sites.charging(),
            sharing_batches(self._unread(clients)),
            sharing_images(),
        ):
            return {client: answer(method, request, sites[client]) for client in clients}

    def _step(self, steps: Mapping[int, SumStep]) -> dict[int, dict[str, bytes]]:
        with self._sites.charging():
            return {client: take_step(self._sites[client], step) for client, step in steps.items()}

    def diagnose(self) -> Iterator[NDArray[np.float32]]:
        """Yield the exact probabilities of each client's teachers on the test split."""
        unread = self._unread(self._sites)
        for site in self._sites.values():
            with (
                torch_threads(self.experiment.config.threads_client),
                self._sites.charging(),
                sharing_batches(unread),
            ):
                probabilities = site.diagnose()
            yield probabilities

    def _unread(self, clients: Collection[int]) -> Iterator[NDArray[np.uint8]]:
        """Yield records that clients will read, if the features of all are of one kind.

        All clients are opened now, so that an error names the right one.
        """
        sites = [self._sites[client] for client in clients]
        if len(set(map(self.experiment.config.architecture, clients))) > 1:
            return iter(())
        return (image for site in sites for image in site.sensitive_unread())
