"""Charges in their order, and what an account asks of all of them together."""

from collections import Counter
from collections.abc import Sequence

from fed_dpsd.accounts.entry import Entry


class Charges:
    """The charges of a client, kept so that no question about them takes longer the more they are.

    Attributes:
        queries: answered; a charge for none, such as a training, counts as one.
    """

    def __init__(self) -> None:
        self.queries = 0
        self._by_digest: dict[str, Entry] = {}
        self._released: dict[str, Counter[str]] = {}
        self._alike: dict[tuple[int, int, bool], list[Entry]] = {}

    def add(self, content: str) -> Entry:
        """Add the charge of a line of `Entry.to_json`, and return it.

        Raises:
            ValueError: its digest is charged already, or the line holds no entry.
            KeyError: the same, or it holds an event of an unknown type.
        """
        entry = Entry.from_json(content)
        self.check_new(entry.digest)
        self._by_digest[entry.digest] = entry
        self.queries += max(entry.queries, 1)
        self._released.setdefault(entry.run, Counter())[entry.mechanism] += entry.releases
        # Entries that are read have one object for equal costs, which lives as long as they do.
        alike = id(entry.costs), entry.releases, bool(entry.training)
        self._alike.setdefault(alike, []).append(entry)
        return entry

    def check_new(self, digest: str) -> None:
        """Refuse a digest that is charged already.

        Raises:
            ValueError: it is.
        """
        if digest in self._by_digest:
            raise ValueError(f"{digest} is charged already")

    def find(self, digest: str) -> Entry | None:
        """Return the charge with this digest."""
        return self._by_digest.get(digest)

    def entries(self) -> Sequence[Entry]:
        """Return all charges, oldest first."""
        return tuple(self._by_digest.values())

    def released(self, run: str) -> Counter[str]:
        """Count the releases of each mechanism that were charged for a run."""
        return self._released.get(run, Counter())

    def alike(self) -> list[tuple[Entry, int]]:
        """Return one charge of each cost, in the order of their first, and how many cost the same.

        They cost the same where a proof rests on private trainings, as a budget's does.

        Costs that are equal may appear more than once.
        """
        return [(group[0], len(group)) for group in self._alike.values()]
