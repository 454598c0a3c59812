"""Cohorts: the clients that take part in a round, by a public schedule.

A cohort is drawn from the public seed, so it reveals nothing about records. A client is charged
less only because it answers less often: cohorts are not secret, so sampling amplifies no guarantee.
"""

import functools
from collections import Counter
from collections.abc import Sequence

from fed_dpsd.config import Config
from fed_dpsd.streams import Streams


def cohort(config: Config, number: int) -> Sequence[int]:
    """Return the clients of round `number`, >= 1, in order."""
    if config.clients_per_round is None:
        return range(config.num_clients)
    return _drawn(config.seed, config.num_clients, config.clients_per_round, number)


def most_rounds(config: Config) -> int:
    """Return the largest number of rounds that a client takes part in."""
    if config.clients_per_round is None:
        return config.rounds
    return _most_drawn(config.seed, config.num_clients, config.clients_per_round, config.rounds)


def _drawn(seed: int, num_clients: int, size: int, number: int) -> list[int]:
    rng = Streams(seed).numpy("cohort", query_id=number)
    return sorted(rng.choice(num_clients, size, replace=False).tolist())


@functools.lru_cache(maxsize=8)
def _most_drawn(seed: int, num_clients: int, size: int, rounds: int) -> int:
    rounds_of = Counter[int]()
    for number in range(1, rounds + 1):
        rounds_of.update(_drawn(seed, num_clients, size, number))
    return max(rounds_of.values())
