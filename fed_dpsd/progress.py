"""Progress reporting: work done and estimated time left, sent to the context's listener.

By default there is no listener, as on a hospital's node.
"""

import bisect
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import TypeVar

RECENT = 1 / 3  # the pace of the last third of the parts done predicts the others
APART_SECONDS = 0.1  # minimum between a kept sample and the one after the next

Item = TypeVar("Item")


def seconds_left(
    samples: Sequence[tuple[float, int]],
    total: int,
    waited: float = 0.0,
    inside: float = 0.0,
    after: float = 0.0,
    recent: float = RECENT,
) -> float | None:
    """Estimate the seconds until all parts are done, at the pace of the recent ones.

    The first parts are often slower than the others, and later parts may take longer again.

    Args:
        samples: (seconds, parts done), both ascending, the first at the start.
        total: number of parts.
        waited: seconds since the last sample.
        inside: minimum seconds that the current part still takes.
        after: additional seconds of the last part.
        recent: fraction of the completed parts that determine the pace, in (0, 1].

    Returns:
        Seconds >= 0; None before anything is done, or if only the first of many parts is done.
    """
    (_, first), (now, done) = samples[0], samples[-1]
    left = total - done
    if left <= 0:
        return 0.0
    if done == first or (len(samples) == 2 and recent < 1 and 4 * (done - first) < total - first):
        return None
    limit = done - recent * (done - first)
    then, before = samples[bisect.bisect_right(samples, limit, key=lambda each: each[1]) - 1]
    pace = (now - then) / (done - before)
    current = pace + (after if left == 1 else 0.0)
    return pace * left + after - current + max(current - waited, inside)


class Task:
    """Work in progress, divided into equal parts (see `reporting`)."""

    def __init__(
        self, name: str, total: int, done: int, recent: float, text: str, listener: "Listener"
    ) -> None:
        self.name, self.total, self.done, self.text = name, total, done, text
        self._recent, self._listener = recent, listener
        self._started = self._changed = listener.clock()
        self._samples, self._after = [(0.0, done)], 0.0

    def advance(self, parts: int = 1) -> None:
        """Report that `parts` more are done."""
        self.reach(self.done + parts, self.seconds)

    def reach(self, done: int, seconds: float, text: str = "", after: float = 0.0) -> None:
        """Report that `done` parts are done.

        Args:
            done: number of parts.
            seconds: time that they took.
            text: what to show instead of the number; "" keeps the last text.
            after: as for `seconds_left`.
        """
        crowded = len(self._samples) > 1 and seconds - self._samples[-2][0] < APART_SECONDS
        self._samples[len(self._samples) - crowded :] = [(seconds, done)]
        self.done, self.text, self._after = done, text or self.text, after
        self._changed = self._listener.clock()
        if text or not crowded:
            self._listener.changed(self)

    @property
    def seconds(self) -> float:
        """Return the seconds since the work began."""
        return self._listener.clock() - self._started

    @property
    def left(self) -> float | None:
        """Return the expected seconds until the work is done; None if unknown."""
        waited = self._listener.clock() - self._changed
        inner = self._listener.inside(self)
        inside = (inner and inner.left) or 0.0
        return seconds_left(self._samples, self.total, waited, inside, self._after, self._recent)

    @property
    def count(self) -> str:
        """Return the number of parts done out of all parts."""
        return f"{self.done:,} of {self.total:,} {self.name}"

    def __str__(self) -> str:
        """Return the text, or the number of parts done."""
        return self.text or self.count


class Listener:
    """The base class of listeners; it shows nothing.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.under_way: list[Task] = []  # the outermost first
        self._stopped: dict[str, Task] = {}

    def begin(self, name: str, total: int, done: int, recent: float, text: str) -> Task:
        """Begin a task, or continue a task of this name that stopped at the same point."""
        task = self._stopped.pop(name, None)
        if task is None or (task.total, task.done) != (total, done):
            task = Task(name, total, done, recent, text, self)
        self.under_way.append(task)
        return task

    def end(self, task: Task) -> None:
        """End a task, or stop it for now."""
        self.under_way.remove(task)
        if 0 < task.done < task.total:
            self._stopped[task.name] = task

    def inside(self, task: Task) -> Task | None:
        """Return the task that runs within `task` now, if there is one."""
        under_way = self.under_way.copy()  # another thread may show it
        inner = under_way[under_way.index(task) + 1 :] if task in under_way else []
        return inner[0] if inner else None

    def changed(self, task: Task) -> None:
        """Handle progress; called at most a few times a second, and for every text."""


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def has_listener() -> bool:
    """Return whether there is a listener."""
    return _listener.get() is not None


@contextlib.contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Report all work of this block to a listener; None for no listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextlib.contextmanager
def reporting(
    name: str, total: int, done: int = 0, recent: float = RECENT, text: str = ""
) -> Iterator[Task]:
    """Report the work of this block as one task; the block advances it.

    Args:
        name: what the parts are, such as "cells".
        total: number of parts.
        done: number of parts that earlier blocks of the same name and total have done.
        recent: as for `seconds_left`; 1 if the durations of the parts vary at random.
        text: as for `Task`.
    """
    listener = _listener.get() or Listener()
    task = listener.begin(name, total, done, recent, text)
    try:
        yield task
    finally:
        listener.end(task)


def track(
    name: str, items: Collection[Item], done: int = 0, total: int | None = None
) -> Iterator[Item]:
    """Yield the items and report their progress; an item is done when the next is requested.

    Args:
        name: the kind of items, such as "teachers".
        items: the items.
        done: number of items that earlier loops of the same name and total have yielded.
        total: total number of items; None if `items` is all of them.
    """
    with reporting(name, len(items) if total is None else total, done) as task:
        for item in items:
            yield item
            task.advance()
