"""Exact diagnostics, for simulations only: the accuracy of teachers without noise.

The scores are of the teachers of each client, and of all teachers together.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.experiment import Experiment
from fed_dpsd.methods.class_counts import fetch_class_weights, pool, weigh
from fed_dpsd.methods.method import World
from fed_dpsd.privacy.randomized_response import TopKRandomizedResponse
from fed_dpsd.server.federation import HostedFederation
from fed_dpsd.server.metrics import METRICS, accuracy
from fed_dpsd.streams import Streams


def diagnose(
    experiment: Experiment, federation: HostedFederation, world: World, labels: NDArray[np.int64]
) -> dict[str, dict[str, Any]]:
    """Return exact scores of the clients, of the mean of all probabilities, and of the vote.

    Where class counts are known, students learn from the weighted ensemble. The vote is the most
    frequent class of the teachers. The answered vote is that of their randomised responses, where
    these do not depend on a student's top k.
    """
    sensitive = {
        client: values[np.isfinite(values).all((1, 2))]
        for client, values in federation.diagnose().items()
    }
    teachers = np.concatenate(list(sensitive.values()))  # (M, N, K)
    if not len(teachers):
        return {}
    votes = np.eye(teachers.shape[2])[teachers.argmax(2)]  # (M, N, K)
    scores = {
        name: {
            "ensemble": metric(teachers.mean(0), labels),
            "clients": [metric(v.mean(0), labels) if len(v) else None for v in sensitive.values()],
        }
        for name, metric in METRICS.items()
    }
    plan = experiment.method.plan(world)
    if plan.counts and (weights := fetch_class_weights(federation, world)):
        sums = {client: v.sum(0) for client, v in sensitive.items() if client in weights}
        combine = pool if getattr(experiment.method, "pooling", "mean") == "odds" else weigh
        for name, metric in METRICS.items():
            scores[name]["weighted_ensemble"] = metric(combine(sums, weights), labels)
    scores["accuracy"]["vote"] = accuracy(votes.sum(0), labels)
    mechanism, num_classes = experiment.answers, experiment.config.data.num_classes
    always = isinstance(mechanism, TopKRandomizedResponse) and mechanism.threshold is None
    if always and mechanism.k in (None, num_classes):
        uniform = np.full(teachers[0].shape, 1 / teachers.shape[2], np.float32)
        laws = np.stack([mechanism.encode(p, uniform) for p in teachers])
        rng = Streams(experiment.config.seed).numpy("diagnostic vote")
        answered = mechanism.noise(laws, uniform, rng)
        scores["accuracy"]["answered_vote"] = accuracy(answered, labels)
    return scores
