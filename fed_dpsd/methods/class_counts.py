"""Class counts: how many records of each class a client has, and how far to believe it of each."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.methods.method import Federation, Site, World
from fed_dpsd.privacy.mechanism import Mechanism, NonPrivate
from fed_dpsd.privacy.training import TrainingMechanism
from fed_dpsd.protocol import Answer, Ask

MOST_RECORDS = 1e12  # of a class that a client may claim: the sum of all stays finite


def releases_class_counts(mechanism: Mechanism) -> bool:
    """Whether class counts cost nothing more: a training has paid, or all is in the clear."""
    if isinstance(mechanism, TrainingMechanism):
        return mechanism.counts_classes
    return isinstance(mechanism, NonPrivate)


def release_class_counts(ask: Ask, site: Site) -> Answer:
    """A client's answer to an ask for its class counts: noisy ones, or exact ones in the clear."""
    mechanism = site.pay_for_training()
    clear = isinstance(mechanism, NonPrivate)
    counts = site.sensitive_class_counts() if clear else site.class_counts()
    return site.release(mechanism, counts, ask)


def fetch_class_weights(federation: Federation, world: World) -> dict[int, NDArray[np.float64]]:
    """What part of each class's records a client holds, (K,) in [0, 1], from its class counts.

    Of a class that seems to have no record, each client holds an equal part. Empty where the
    mechanism releases no counts, or nobody answers.
    """
    if not releases_class_counts(world.mechanism):
        return {}
    answers = federation.each(world.ask("counts"))
    given = {client: each for client, each in answers.items() if isinstance(each, Answer)}
    counts = {client: np.clip(each.values[0], 0, MOST_RECORDS) for client, each in given.items()}
    total = sum(counts.values(), np.zeros(world.num_classes))
    known = np.where(total > 0, total, 1)
    return {
        client: np.where(total > 0, count / known, 1 / len(counts))
        for client, count in counts.items()
    }


def weigh(
    values: Mapping[int, NDArray[np.floating]], weights: Mapping[int, NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Clients' (B, K) probabilities as one, each believed about a class as far as it holds it.

    A client that has seen few records of a class is wrong about it, and sure of others instead.
    Rows sum to 1; a row that nobody says anything about is uniform.
    """
    total = sum(weights[client] * each for client, each in values.items())
    mass = np.sum(total, axis=1, keepdims=True)
    uniform = 1 / np.shape(total)[1]
    return np.where(mass > 0, total / np.where(mass > 0, mass, 1), uniform)
