"""Class counts, and the weights of clients for each class that follow from them."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.errors import ProtocolError
from fed_dpsd.methods.method import Federation, PublicContext, Site
from fed_dpsd.privacy.accounting import Stage
from fed_dpsd.privacy.mechanism import Charged, ExactCounts
from fed_dpsd.privacy.training import ClassCounts, TrainingMechanism
from fed_dpsd.protocol import Absent, Refusal, Replies, Request, Response

MOST_RECORDS = 1e12  # the most that a client may claim for a class, so all sums stay finite
SMALLEST_SHARE, SMALLEST_PROBABILITY = 1e-4, 1e-6  # in the logarithms of `pool_odds`
RIDGE = 0.01  # times the mean weight; keeps classes that no two clients share comparable
logger = logging.getLogger("fed_dpsd")


def counts_stage(context: PublicContext, clear: bool) -> tuple[Stage, ...]:
    """Return the stage that releases class counts; empty if they must not be requested.

    Private training sets their noise. Without private training, they are exact, and are requested
    only if everything else is exact too.

    Args:
        context: the public side of the experiment.
        clear: whether everything else is released without noise of its own.
    """
    counted: Charged | None = ExactCounts() if clear else None
    if isinstance(context.training, TrainingMechanism):
        counted = ClassCounts(context.training) if context.training.counts_classes else None
    return (Stage(counted, 1, 0),) if counted else ()


def release_class_counts(request: Request, site: Site, clear: bool) -> Response:
    """Release a client's class counts: noisy with private training, otherwise exact if `clear`.

    Raises:
        ProtocolError: the client releases no class counts.
    """
    site.pay_for_training()  # counts are useless to a client that cannot pay for its teachers
    if isinstance(site.training, TrainingMechanism):
        return site.release(ClassCounts(site.training), site.class_counts(request), request)
    if not clear:
        raise ProtocolError("this client's mechanism releases no class counts")
    return site.release(ExactCounts(), site.sensitive_class_counts(), request)


def released_counts(replies: Replies) -> dict[int, NDArray[Any]]:
    """Return the (K,) class counts, >= 0, of each client that released them."""
    answers = replies.answers
    return {client: np.clip(own.values[0], 0, MOST_RECORDS) for client, own in answers.items()}


class KnownCounts:
    """The class counts that clients have released to a run.

    Args:
        federation: the clients.
        context: the public side of the experiment.
        requested: whether to request the counts; the plan must then include them.

    Attributes:
        by_client: the (K,) counts, >= 0, of each client that has released them, in client order.
    """

    def __init__(self, federation: Federation, context: PublicContext, requested: bool) -> None:
        self._federation, self._request = federation, context.request("counts")
        self.requested = requested
        self.by_client: dict[int, NDArray[Any]] = {}
        self._refusals: dict[int, Refusal] = {}
        if requested:
            self._fetch()

    def _fetch(self) -> None:
        """Request the counts; clients that released them before repeat their answers for free."""
        replies = self._federation.each(self._request)
        self.by_client = dict(sorted((self.by_client | released_counts(replies)).items()))
        self._refusals = {c: own for c, own in replies.items() if isinstance(own, Refusal)}
        for client, own in self._refusals.items():
            logger.warning("client %d: no class counts: %s", client, own.reason)

    def with_counts(self, replies: Replies) -> Replies:
        """Return replies that can be weighted; an answer without counts becomes a refusal.

        The counts are requested again if a client that was absent then has now answered. If no
        answering client has counts, all replies are returned, to be weighted equally.
        """
        clients = replies.answers.keys()
        if not self.requested or clients <= self.by_client.keys():
            return replies
        if any(isinstance(self._refusals[c], Absent) for c in clients - self.by_client.keys()):
            self._fetch()
        if not clients & self.by_client.keys():
            return replies
        left_out: dict[int, Response | Refusal] = {
            client: Refusal(own.query_id, f"no class counts: {self._refusals[client].reason}")
            for client, own in replies.answers.items()
            if client not in self.by_client
        }
        return Replies(replies.request, replies | left_out)

    def weights(self, clients: Collection[int]) -> dict[int, NDArray[np.float64]]:
        """Return the (K,) weights of the clients that answer in replies from `with_counts`."""
        counts = {client: own.astype(np.float64) for client, own in self.by_client.items()}
        if not counts.keys() & clients:
            counts = dict.fromkeys(clients, np.zeros(self._request.predictions.shape[1]))
        shares = shares_among(counts, counts)
        return shares if len(shares) == len(clients) else shares_among(shares, clients)


def fetch_class_weights(
    federation: Federation, context: PublicContext
) -> dict[int, NDArray[np.float64]]:
    """Request class counts; return each client's (K,) shares of the records of each class.

    Shares are in [0, 1]. The plan must include the counts. For a class without records, all clients
    have equal shares. The result is empty if no client answers.
    """
    counts = KnownCounts(federation, context, requested=True)
    return counts.weights(counts.by_client)


def shares_among(
    counts: Mapping[int, NDArray[np.float64]], clients: Collection[int]
) -> dict[int, NDArray[np.float64]]:
    """Return each client's (K,) shares of the total counts, or weights, of each class.

    For a class without records, all clients have equal shares.
    """
    total = sum(counts[client] for client in clients)
    divisor = np.where(total > 0, total, 1)
    return {
        client: np.where(total > 0, counts[client] / divisor, 1 / len(clients))
        for client in clients
    }


def average_by_class(
    answers: Mapping[int, NDArray[np.floating]],
    class_weights: Mapping[int, NDArray[np.float64]],
    signed: bool = False,
) -> NDArray[np.float64]:
    """Average the clients' (B, K) answers, with a weight per client and class.

    A client with few records of a class assigns it probabilities that are too low, so its weight
    for this class is low.

    Args:
        answers: for each client, the mean or sum over its teachers: probabilities, responses, noisy
            votes, or normalised gradients.
        class_weights: each client's (K,) weights, which sum to 1 over the clients.
        signed: whether entries may be negative, as in gradients and noisy votes. Otherwise, rows
            are scaled by `normalise_rows`.
    """
    total = np.asarray(sum(class_weights[client] * own for client, own in answers.items()))
    return total if signed else normalise_rows(total)


def normalise_rows(total: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale (B, K) rows to sum to 1; a row of zeros becomes uniform."""
    mass = np.sum(total, axis=1, keepdims=True)
    return np.where(mass > 0, total / np.where(mass > 0, mass, 1), 1 / total.shape[1])


def pool_odds(
    answers: Mapping[int, NDArray[np.floating]],
    class_weights: Mapping[int, NDArray[np.float64]],
    by_shares: bool = False,
) -> NDArray[np.float64]:
    """Return the (B, K) probabilities with odds that agree best with each client's odds.

    By Bayes' rule, a client's probability of a class, divided by its share of the class, is the
    probability under the class frequencies of all records, up to a factor per image and client. So
    a client determines only the odds of the classes that it knows. (An average would trust a client
    that assigns every image to one of its own classes.) The factors and probabilities solve a
    least-squares problem in logarithms, weighted by the shares or their square roots.

    Args:
        answers: for each client, the (B, K) mean or sum of its teachers' probabilities.
        class_weights: each client's (K,) weights; a class with weight 0 at every client gets
            probability 0.
        by_shares: whether shares are the weights. It suits private teachers that are linear on the
            same features: their rows of classes with few records are mostly noise.
    """
    shares = np.stack([class_weights[client] for client in answers])
    logs = np.stack([np.log(np.clip(own, SMALLEST_PROBABILITY, None)) for own in answers.values()])
    logs -= np.log(np.clip(shares, SMALLEST_SHARE, None))[:, None]
    weights = shares if by_shares else np.sqrt(shares)  # (C, K)
    known = weights.sum(0) > 0
    if not known.any():
        return np.full(logs[0].shape, 1 / logs.shape[2])
    of_classes = np.diag(weights.sum(0) + RIDGE * weights.mean())
    of_clients = np.diag(np.where(weights.any(1), weights.sum(1), 1))
    normal = np.block([[of_classes, weights.T], [weights, of_clients]])
    sums = np.concatenate(
        [np.einsum("ck,cbk->kb", weights, logs), np.einsum("ck,cbk->cb", weights, logs)]
    )
    scores = np.where(known, np.linalg.solve(normal, sums)[: len(known)].T, -np.inf)
    odds = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(odds / odds.sum(1, keepdims=True))
