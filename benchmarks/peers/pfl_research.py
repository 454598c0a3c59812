"""FedAvg in Apple's pfl-research: `SimulatedBackend` and `FederatedAveraging`, in one process."""

import dataclasses
import time
from typing import Any

import torch
from common import Task
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel

task = Task()
settings = task.settings
network = task.network()
network.loss = lambda images, labels: torch.nn.functional.cross_entropy(network(images), labels)
network.metrics = lambda images, labels: {}


def dataset(client: int) -> Dataset:
    """Return a client's records in a new order."""
    images, labels = task.clients[client]
    order = torch.randperm(len(labels))
    return Dataset([images[order], labels[order]], user_id=client)


class Averaging(FederatedAveraging):
    """FedAvg that does not score the clients' own records, as the other rows do not."""

    def get_next_central_contexts(self, *arguments: Any, **named: Any) -> Any:
        """Return the next round without its evaluation."""
        contexts, *rest = super().get_next_central_contexts(*arguments, **named)
        plain = contexts and tuple(dataclasses.replace(c, do_evaluation=False) for c in contexts)
        return plain, *rest


users = list(range(len(task.clients)))
data = FederatedDataset(dataset, get_user_sampler("minimize_reuse", users))
model = PyTorchModel(
    model=network,
    local_optimizer_create=torch.optim.SGD,
    central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
)
began = time.time()
Averaging().run(
    NNAlgorithmParams(
        central_num_iterations=settings["rounds"],
        evaluation_frequency=settings["rounds"],
        train_cohort_size=len(users),
        val_cohort_size=None,
    ),
    SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
    model,
    NNTrainHyperParams(
        local_batch_size=settings["batch_size"],
        local_num_epochs=settings["epochs"],
        local_learning_rate=settings["learning_rate"],
    ),
    NNEvalHyperParams(local_batch_size=None),
)
task.finish(network, began)
