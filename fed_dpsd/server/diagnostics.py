"""Exact scores of teachers without noise, of each client and of all, only for simulations."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.experiment import Experiment
from fed_dpsd.methods.class_counts import normalise_rows, pool_odds
from fed_dpsd.methods.fed_dpsd import FedDPSD
from fed_dpsd.server.federation import HostedFederation
from fed_dpsd.server.metrics import METRICS, accuracy


def diagnose(
    experiment: Experiment,
    federation: HostedFederation,
    weights: Mapping[int, NDArray[np.float64]],
    labels: NDArray[np.int64],
) -> dict[str, dict[str, Any]]:
    """Return exact scores of the clients, of the mean of all probabilities and of the vote.

    If class counts are known, there are also scores of the weighted ensemble, which students learn
    from. The vote is the teachers' most frequent class.

    Clients are added one by one, so memory does not grow with their number; only `pooling: odds`
    needs all of them at once.
    """
    num_classes = experiment.config.data.num_classes
    method = experiment.method
    pooling = method if isinstance(method, FedDPSD) and method.pooling == "odds" else None
    teachers = 0
    total = np.zeros((len(labels), num_classes), np.float32)
    weighted, votes = (np.zeros((len(labels), num_classes)) for _ in range(2))
    clients: dict[int, NDArray[np.float32]] = {}  # the sums of each client's teachers
    scores: dict[str, dict[str, Any]] = {name: {"clients": []} for name in METRICS}
    for client, values in enumerate(federation.diagnose()):
        own = values[np.isfinite(values).all((1, 2))]
        for name, metric in METRICS.items():
            score = metric(own.mean(0), labels) if len(own) else None
            scores[name]["clients"].append(score)
        for probabilities in own:
            total += probabilities
            votes += np.eye(num_classes)[probabilities.argmax(1)]
        teachers += len(own)
        if client in weights and pooling:
            clients[client] = own.sum(0)
        elif client in weights:
            weighted += weights[client] * own.sum(0)
    if not teachers:
        return {}
    for name, metric in METRICS.items():
        scores[name]["ensemble"] = metric(total / np.float32(teachers), labels)
        if weights:
            if pooling:
                ensemble = pool_odds(clients, weights, pooling.pools_by_shares(experiment.training))
            else:
                ensemble = normalise_rows(weighted)
            scores[name]["weighted_ensemble"] = metric(ensemble, labels)
    scores["accuracy"]["vote"] = accuracy(votes, labels)
    return scores
