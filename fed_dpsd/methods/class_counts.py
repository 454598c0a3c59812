"""Class counts, and the weights that follow: how far a client is believed about each class."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.methods.method import Federation, Site, World, answers_and_refusals
from fed_dpsd.privacy.mechanism import Mechanism, NonPrivate
from fed_dpsd.privacy.training import TrainingMechanism
from fed_dpsd.protocol import Answer, Ask

MOST_RECORDS = 1e12  # that a client may claim for a class, so that all sums stay finite


def releases_class_counts(mechanism: Mechanism) -> bool:
    """Return whether class counts are free: paid for by a training, or all is in the clear."""
    if isinstance(mechanism, TrainingMechanism):
        return mechanism.counts_classes
    return isinstance(mechanism, NonPrivate)


def release_class_counts(ask: Ask, site: Site) -> Answer:
    """Release a client's class counts: noisy ones, or exact ones where all is in the clear."""
    mechanism = site.pay_for_training()
    clear = isinstance(mechanism, NonPrivate)
    counts = site.sensitive_class_counts() if clear else site.class_counts()
    return site.release(mechanism, counts, ask)


def fetch_class_weights(federation: Federation, world: World) -> dict[int, NDArray[np.float64]]:
    """Return each client's part of the records of each class, (K,) in [0, 1], from class counts.

    A class without any record counts as split equally among the clients. The result is empty where
    the mechanism releases no counts, or no client answers.
    """
    if not releases_class_counts(world.mechanism):
        return {}
    answers, _ = answers_and_refusals(federation.each(world.ask("counts")))
    counts = {client: np.clip(own.values[0], 0, MOST_RECORDS) for client, own in answers.items()}
    total = sum(counts.values(), np.zeros(world.num_classes))
    divisor = np.where(total > 0, total, 1)
    return {
        client: np.where(total > 0, count / divisor, 1 / len(counts))
        for client, count in counts.items()
    }


def weigh(
    probabilities: Mapping[int, NDArray[np.floating]],
    class_weights: Mapping[int, NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Average the clients' (B, K) probabilities, weighted for each class by `class_weights`.

    A client with few records of a class gives its probability to other classes by mistake, so its
    weight for that class is low. Rows sum to 1; a row without any mass becomes uniform.
    """
    total = sum(class_weights[client] * own for client, own in probabilities.items())
    mass = np.sum(total, axis=1, keepdims=True)
    uniform = 1 / np.shape(total)[1]
    return np.where(mass > 0, total / np.where(mass > 0, mass, 1), uniform)
