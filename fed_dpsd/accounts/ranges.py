"""Clients whose charges are the same, as text: ranges of their numbers."""

from collections.abc import Iterator, Mapping

from fed_dpsd.protocol import Releases


def by_ranges(charges: Mapping[int, Releases]) -> dict[str, dict[str, int]]:
    """Return the charges of clients once for all that have the same, by the clients' numbers.

    >>> by_ranges({0: {"label": 64}, 1: {"label": 64}, 2: {"label": 64}, 4: {"label": 32}})
    {'0-2': {'label': 64}, '4': {'label': 32}}
    """
    groups: dict[frozenset[tuple[str, int]], list[int]] = {}
    for client, releases in sorted(charges.items()):
        groups.setdefault(frozenset(releases.items()), []).append(client)
    return {",".join(_runs(clients)): dict(charges[clients[0]]) for clients in groups.values()}


def _runs(numbers: list[int]) -> Iterator[str]:
    """Yield ascending numbers as ranges."""
    first = last = numbers[0]
    for number in [*numbers[1:], -1]:
        if number != last + 1:
            yield str(first) if first == last else f"{first}-{last}"
            first = number
        last = number


def clients_in(ranges: str) -> list[int]:
    """Return the clients' numbers of a key of `by_ranges`.

    >>> clients_in("0-2,4")
    [0, 1, 2, 4]
    """
    ends = [part.partition("-") for part in ranges.split(",")]
    return [n for first, _, last in ends for n in range(int(first), int(last or first) + 1)]
